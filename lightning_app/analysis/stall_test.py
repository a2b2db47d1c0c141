"""Do runs of a variant stall without warm-up, and not with it? An exact test over all rates."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from lightning_app.analysis.grid_results import failures
from lightning_app.analysis.pairing import Arm, score_identity, undefined
from lightning_app.analysis.score import Score, join_notes
from lightning_app.grid_axes import label


class StallTable(NamedTuple):
    """The runs of one rate: failed and all, without warm-up and with the reference."""

    lr: float
    failed_bare: int
    bare: int
    failed_ref: int
    ref: int

    @property
    def difference(self) -> float:
        return self.failed_bare / self.bare - self.failed_ref / self.ref

    @property
    def weight(self) -> float:
        return self.bare * self.ref / (self.bare + self.ref)

    @property
    def words(self) -> str:
        return f"{self.failed_bare}/{self.bare} against {self.failed_ref}/{self.ref}"


def stratified_p(tables: Sequence[StallTable]) -> float:
    """The exact two-sided p value of equal chances to fail at each rate (Fisher 1935, in strata).

    Given the failures at each rate, those without warm-up are hypergeometric where warm-up makes no
    difference; their sum over the rates is the statistic. The p value adds the chances of all sums
    that are no likelier than the one found. With one table it is Fisher's exact test.
    """
    chances, found = np.ones(1), 0
    for _, failed_bare, bare, failed_ref, ref in tables:
        failed = failed_bare + failed_ref
        least, most = max(0, failed - ref), min(bare, failed)
        counts = np.arange(least, most + 1)
        own = special.binom(bare, counts) * special.binom(ref, failed - counts)
        chances = np.convolve(chances, own / own.sum())
        found += failed_bare - least
    return min(1.0, float(chances[chances <= chances[found] * (1 + 1e-9)].sum()))


def stall_tables(arm: Arm, reference: int | None) -> list[StallTable]:
    """The counts of each rate with finished runs at both warm-ups."""
    found = []
    for lr in arm.rates:
        runs = [
            [cell for key, cell in arm.cells.items() if key[:2] == (warmup, lr)]
            for warmup in (0, reference)
        ]
        if all(runs):
            failed, counts = [sum(cell.failed for cell in of) for of in runs], list(map(len, runs))
            found.append(StallTable(lr, failed[0], counts[0], failed[1], counts[1]))
    return found


def stall_counts(tables: Sequence[StallTable]) -> tuple[str, str]:
    """Failed runs of all over the rates, without warm-up and with the reference: `6 of 9`."""
    _, failed_bare, bare, failed_ref, ref = (sum(column) for column in zip(*tables, strict=True))
    return f"{failed_bare} of {bare}", f"{failed_ref} of {ref}"


def stall_difference(arm: Arm, reference: int | None) -> Score:
    """`stall_difference`: the share of failed runs without warm-up less that with the reference.

    The mean of the differences at each rate (Mantel and Haenszel 1959): with n_0 and n_1 runs a
    rate weighs n_0 n_1 / (n_0 + n_1), so that unequal numbers of runs make no difference. p is
    `stratified_p` over the rates. `lr` is NaN if the variant has several.
    """
    lr = arm.rates[0] if len(arm.rates) == 1 else math.nan
    tables = stall_tables(arm, reference) if reference else []
    if not tables:
        reason = "no rate with finished runs both without warm-up and with the reference"
        return undefined(arm, lr, "stall_difference", reason)
    _, failed_bare, bare, failed_ref, ref = (sum(column) for column in zip(*tables, strict=True))
    runs = [cell for key, cell in arm.cells.items() if key[0] in (0, reference)]
    failing = [table for table in tables if table.failed_bare or table.failed_ref]
    each = "; ".join(f"{table.words} at {label(table.lr)}" for table in failing)
    return Score(
        **score_identity(arm, lr, "stall_difference"),
        estimate=sum(t.weight * t.difference for t in tables) / sum(t.weight for t in tables),
        p=stratified_p(tables) if failed_bare + failed_ref else math.nan,
        seeds=len({key[2] for key in arm.cells}),
        cells=int(bare + ref),
        diverged=int(failed_bare + failed_ref),
        note=join_notes(failures(runs), each) if failed_bare + failed_ref else "",
    )
