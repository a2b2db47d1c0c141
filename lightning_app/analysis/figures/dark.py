"""A figure in the colours of a dark page."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.style import GRID, INK, MUTED, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK: Mapping[str, str] = {INK: "#e4e7eb", MUTED: "#9aa4b0", GRID: "#272d35", PAPER: "#12151a"}
_PARTS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def darken(figure: "Figure") -> None:
    """Replace ink, grey and paper of every mark; the colours of variants and warm-ups stay."""
    for artist in figure.findobj():
        for part in _PARTS:
            getter = getattr(artist, f"get_{part}", None)
            setter = getattr(artist, f"set_{part}", None)
            if getter is not None and setter is not None:
                _replace(getter(), setter)


def _replace(colour: Any, setter: Any) -> None:
    from matplotlib.colors import is_color_like, to_hex, to_rgba

    if is_color_like(colour):
        if (dark := DARK.get(to_hex(colour))) is not None:
            setter(to_rgba(dark, to_rgba(colour)[3]))
    elif hasattr(colour, "__len__") and len(colour) and not isinstance(colour, str):
        each = [to_rgba(one) for one in colour]
        found = [DARK.get(to_hex(one)) for one in each]
        if any(found):
            pairs = zip(found, each, strict=True)
            setter([to_rgba(dark, old[3]) if dark else old for dark, old in pairs])
