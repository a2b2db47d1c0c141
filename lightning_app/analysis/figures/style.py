"""The look of every figure. Nothing here touches matplotlib's global state."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# The first four are Okabe and Ito's (2008); the others maximise the smallest distance between any
# two under every common colour blindness. Each has a contrast of at least 3 : 1 to white and to the
# dark page, which excludes their yellow, sky blue and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#9761F2", "#8C5B74", "#B24300")
DASHES: tuple[Any, ...] = ((0, (1, 1.4)), (0, (4, 1.6)), (0, (6, 1.5, 1, 1.5)), (0, (9, 1.5)))
REFERENCE = (0, (5, 2.5))  # the dash of the unigram entropy
INK, MUTED, GRID, PAPER = "#222222", "#707070", "#e6e6e6", "#ffffff"  # replaced on a dark page
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lightning_app",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # journals refuse matplotlib's own default, type 3
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the style of the report, and then restore matplotlib's settings."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


FIXED = ("post_ln", "pre_ln", "realformer", "sas")
"""The presets that have the first colours in every report."""


def colours(variants: Iterable[str]) -> dict[str, str]:
    """A colour for each variant, in their order: one of its own for each preset of `FIXED`.

    The others take the first colours that are free in the grid; after seven the colours repeat.
    """
    names = list(variants)
    fixed = {name: COLOURS[FIXED.index(name)] for name in names if name in FIXED}
    free = [colour for colour in COLOURS if colour not in fixed.values()] or [*COLOURS]
    others = [name for name in names if name not in fixed]
    chosen = fixed | {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: chosen[name] for name in names}


def warmup_colours(warmups: Sequence[int]) -> dict[int, str]:
    """A colour for each warm-up in ascending order: the shortest is red, the longest blue."""
    blue, red, *others = COLOURS
    between = [others[i % len(others)] for i in range(len(warmups) - 2)]
    shown = [red, *between, blue] if len(warmups) > 1 else [blue]
    return dict(zip(warmups, shown, strict=True))
