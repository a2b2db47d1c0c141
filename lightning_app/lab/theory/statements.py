"""Claims about a fresh model: predictions, measurements, and whether the two agree."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich import box
from rich.table import Table

from lightning_app.report.statistics import mean, t_interval

POST, PRE = "post_ln", "pre_ln"
NAMES = {POST: "Post-LN", PRE: "Pre-LN"}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One claim: the prediction, the measurement, and the range that would confirm it."""

    claim: str
    source: str
    predicted: float
    measured: float
    accepted: tuple[float, float]
    interval: tuple[float, float] = (math.nan, math.nan)
    """95 % interval of the measurement; NaN if nothing in it is random."""
    promised: bool = True
    """Whether the claim must hold here. Other claims are only shown."""

    @property
    def holds(self) -> bool:
        low, high = self.accepted
        return low <= self.measured <= high


class Fit(NamedTuple):
    """A straight line by least squares, with Student's 95 % interval of its slope."""

    slope: float
    low: float
    high: float
    intercept: float
    r_squared: float


def fitted_line(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Return the line through the points."""
    from scipy import stats

    slope, intercept, r, _, error = map(float, stats.linregress(x, y))
    half = float(stats.t.ppf(0.975, len(x) - 2)) * error
    return Fit(slope, slope - half, slope + half, intercept, r * r)


def power_law(points: Mapping[int, Sequence[float]]) -> Fit:
    """Return the fit of ``log y = slope log x + intercept`` over every draw at every x."""
    pairs = [(math.log(x), math.log(y)) for x, values in points.items() for y in values]
    return fitted_line([x for x, _ in pairs], [y for _, y in pairs])


def within(value: float, share: float) -> tuple[float, float]:
    """The range `value * (1 - share)` to `value * (1 + share)`."""
    return value * (1 - share), value * (1 + share)


def of_draws(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the mean of independent draws and its 95 % interval."""
    low, high, _ = t_interval(values)
    return mean(values), (low, high)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Draw from a separate generator, seeded by `numbers`; the global one is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(number * 1009**place for place, number in enumerate(numbers)))
        yield


def statements_to_csv(statements: Sequence[Statement]) -> str:
    """Return the table of statements, one per line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = ["low", "high", "accepted_low", "accepted_high"]
    names = ["statement", "predicted", "measured", "holds", "promised", *ends, "source"]
    writer.writerow(names)
    for one in statements:
        numbers = (*one.interval, *one.accepted)
        ends = ["" if math.isnan(number) else f"{number:.6g}" for number in numbers]
        yes = [str(answer).lower() for answer in (one.holds, one.promised)]
        row = [one.claim, f"{one.predicted:.6g}", f"{one.measured:.6g}", *yes, *ends, one.source]
        writer.writerow(row)
    return text.getvalue()


def statements_table(statements: Sequence[Statement]) -> Table:
    """Return the statements as a table that fits a terminal of 80 columns."""
    table = Table(
        *("", "predicted", "measured", "accepted", "holds"),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="(yes) and (no): shown, not required",
        caption_justify="left",
    )
    for column in table.columns[1:4]:
        column.justify = "right"
        column.no_wrap = True
    source = ""
    for one in statements:
        if one.source != source:
            table.add_section()
            table.add_row(f"[bold]{one.source}[/bold]")
            source = one.source
        answer = "yes" if one.holds else "no"
        if not one.promised:
            answer = f"({answer})"
        elif not one.holds:
            answer = f"[bold red]{answer}[/bold red]"
        accepted = " to ".join(f"{end:.3g}" for end in one.accepted)
        numbers = (f"{one.predicted:.3g}", f"{one.measured:.3g}", accepted)
        table.add_row(one.claim, *numbers, answer)
    return table
