"""The look of every figure. Nothing here touches matplotlib's global state."""

from collections.abc import Iterable, Iterator
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


def colours(variants: Iterable[str]) -> dict[str, str]:
    """A colour for each variant, in their order; after seven the colours repeat."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(variants)}
