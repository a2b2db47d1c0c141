"""Numbers as the report writes them, on its page and in its tables."""

import math
from typing import TYPE_CHECKING

from lightning_app.grid_axes import label

if TYPE_CHECKING:
    from lightning_app.analysis.score import Score

DASH = "–"


def nats(value: float) -> str:
    """Three digits and a true minus sign; no "−0.000"."""
    return f"{value:.3f}".replace("-", "−").replace("−0.000", "0.000")


def measured(value: float) -> str:
    """A value of any metric: three digits, those of huge numbers as a power of ten."""
    return f"{value:,.3f}".replace("-", "−") if abs(value) < 1e9 else f"{value:.3e}"


def bounded(score: "Score") -> str:
    """The estimate of a score in nats, with the sign of its bound: `≥ 2.300`."""
    sign = {">=": "≥ ", "<=": "≤ "}.get(score.bound, "")
    return f"{sign}{nats(score.estimate)}{' (?)' if score.bound == '?' else ''}"


def interval(low: float, high: float) -> str:
    """`[low, high]` in nats."""
    return f"[{nats(low)}, {nats(high)}]"


def rate(value: float) -> str:
    """A learning rate as short as it can be, other rates otherwise; a dash for NaN."""
    return DASH if math.isnan(value) else label(value)


def p_value(value: float) -> str:
    """Three digits, a dash for NaN."""
    if math.isnan(value):
        return DASH
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def share_of(failed: int, count: int) -> str:
    """`2 / 5`."""
    return f"{failed} / {count}"


def share_interval(low: float, high: float) -> str:
    """`[low, high]` of a proportion."""
    return f"[{low:.2f}, {high:.2f}]"
