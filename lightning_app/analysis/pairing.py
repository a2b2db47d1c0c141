"""The runs of each variant, and runs of the same seeds compared at several settings."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_app.analysis.grid_results import CellResult, GridResults, failures
from lightning_app.analysis.score import Score, join_notes
from lightning_app.analysis.statistics import FEW_SEEDS, ended_alike, mean, seeds_interval
from lightning_app.errors import UserError

NEVER = "never learned"
ELSEWHERE = "learned only without the reference warm-up"
IS_BASELINE = "is the baseline"
NOT_YET = "not yet learned within this budget"
LEARNED = 0.1  # a variant has learned if its mean loss is this many nats under `H_uni`
ESCAPED = (
    1 / 3
)  # a run has half escaped if it learned under this share of what the best seed learned

Key = tuple[int, float, int]  # warm-up, rate, seed


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The planned cells of one variant within one group of the other axes.

    `cells` holds the finished ones.
    """

    group: str
    variant: str
    baseline: str | None
    planned: frozenset[Key]
    cells: Mapping[Key, CellResult] = field(repr=False)

    @property
    def rates(self) -> list[float]:
        return sorted({lr for _, lr, _ in self.planned})

    @property
    def warmups(self) -> list[int]:
        return sorted({warmup for warmup, _, _ in self.planned})

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, _, seed in self.planned})

    def at(self, points: Iterable[tuple[int, float]]) -> "Paired":
        """The seeds that finished at every one of the (warm-up, rate) points."""
        points = sorted(set(points))
        planned = [s for s in self.seeds if all((*point, s) in self.planned for point in points)]
        seeds = [s for s in planned if all((*point, s) in self.cells for point in points)]
        return Paired(self.cells, points, seeds, len(planned))


class Paired:
    """Losses of the same seeds at several (warm-up, rate) points."""

    def __init__(
        self,
        cells: Mapping[Key, CellResult],
        points: Sequence[tuple[int, float]],
        seeds: Sequence[int],
        planned: int,
    ) -> None:
        self.points, self.seeds, self.planned = points, seeds, planned
        self._cells = cells
        self.runs = {(point, s): cells[(*point, s)] for point in points for s in seeds}

    def losses(self, point: tuple[int, float]) -> list[float]:
        return [self.runs[point, seed].loss for seed in self.seeds]

    def mean(self, point: tuple[int, float]) -> float:
        return mean(self.losses(point))

    @property
    def entropy(self) -> float:
        return mean([cell.entropy for cell in self.runs.values()])

    @property
    def counts(self) -> dict[str, Any]:
        diverged = sum(cell.state == "diverged" for cell in self.runs.values())
        return {"seeds": len(self.seeds), "cells": len(self.runs), "diverged": diverged}

    @property
    def missing(self) -> str:
        few = len(self.seeds) < FEW_SEEDS  # `mixed` has the note then
        partly = "" if few else self.partly
        return join_notes(unfinished("seeds", self.planned, len(self.seeds)), self.early, partly)

    @property
    def early(self) -> str:
        """A note on runs that have not yet learned and so count as the unigram entropy."""
        counted = [
            f"{capped} of {len(self.seeds)} at warm-up {point[0]}"
            for point in self.points
            if (capped := sum(self.runs[point, seed].capped for seed in self.seeds))
        ]
        if not counted:
            return ""
        return f"not yet learned {' and '.join(counted)}, counted as the unigram entropy"

    def learned_with_another_warmup(self, rates: Container[float]) -> bool:
        """Whether the finished runs of any warm-up learned, in the mean over seeds at one rate.

        Of the arms of this variant, those outside of the compared points count as well.
        """
        margins: dict[tuple[int, float], list[float]] = {}
        for (warmup, lr, _), cell in self._cells.items():
            if lr in rates:
                margins.setdefault((warmup, lr), []).append(cell.entropy - cell.loss)
        return any(mean(each) >= LEARNED for each in margins.values())

    def failed(self, point: tuple[int, float]) -> list[bool]:
        return [self.runs[point, seed].state == "diverged" for seed in self.seeds]

    def half_escaped(self, point: tuple[int, float]) -> list[bool]:
        """Which runs left the plateau at `H_uni` so late that they lag far behind the best seed.

        By chance one seed leaves it early and another late, so their losses have two modes.
        """
        every = [cell for key, cell in self._cells.items() if key[:2] == point]
        best = max((cell.entropy - cell.loss for cell in every), default=0.0)
        runs = [self.runs[point, seed] for seed in self.seeds]
        return [
            best >= LEARNED and run.entropy - run.loss < ESCAPED * best and not run.failed
            for run in runs
        ]

    def alike(self, point: tuple[int, float]) -> bool:
        """Whether the runs of a point ended alike: none stalled or half escaped, or all stalled."""
        return ended_alike(self.failed(point)).item() and not any(self.half_escaped(point))

    @property
    def all_alike(self) -> bool:
        """Whether all runs ended alike, also those of different points."""
        failed = [flag for point in self.points for flag in self.failed(point)]
        return ended_alike(failed).item() and all(map(self.alike, self.points))

    @property
    def mixed(self) -> str:
        """Why there is no interval over these seeds; empty if there is one.

        Either some failed and others did not, or some of few seeds half escaped.
        """
        counted = self._counted(self.failed)
        if counted:
            kinds = failures(self.runs.values())
            return f"{kinds} {counted}, so no interval over seeds"
        if self.partly and len(self.seeds) < FEW_SEEDS:
            return f"{self.partly}, so no interval over seeds"
        return ""

    @property
    def partly(self) -> str:
        """A note on runs that half escaped."""
        counted = self._counted(self.half_escaped)
        return f"half escaped {counted}" if counted else ""

    def _counted(self, which: Callable[[tuple[int, float]], list[bool]]) -> str:
        """The numbers of runs at each point where it holds for some and not for all."""
        return " and ".join(
            f"{sum(which(point))} of {len(self.seeds)} at warm-up {point[0]}"
            for point in self.points
            if not ended_alike(which(point))
        )


def arms(grid: GridResults) -> list[Arm]:
    """The cells by group and variant."""
    planned: dict[tuple[str, str], dict[Key, CellResult]] = {}
    for cell in grid.cells:
        key = (cell.warmup or 0, cell.lr or 0.0, cell.seed or 0)
        known = planned.setdefault((cell.group, cell.variant), {})
        if key in known:
            raise UserError(
                f"{grid.folder}: '{cell.variant}' in '{cell.group}' names two settings, of "
                f"{known[key].name} and {cell.name}; change `labels` in the grid file"
            )
        known[key] = cell
    return [
        Arm(
            group=group,
            variant=variant,
            baseline=next(iter(cells.values())).baseline,
            planned=frozenset(cells),
            cells={key: cell for key, cell in cells.items() if cell.finished},
        )
        for (group, variant), cells in planned.items()
    ]


def mean_loss(cells: Sequence[CellResult]) -> tuple[float, float, float]:
    """The mean loss of the finished runs of one point, and its t interval over seeds."""
    losses = [cell.loss for cell in cells]
    low, high, _ = seeds_interval(losses, [cell.failed for cell in cells])
    return mean(losses), low, high


def unfinished(what: str, planned: int, finished: int) -> str:
    """A note on the planned runs or seeds that have not finished."""
    missing = planned - finished
    return f"{missing} of {planned} {what} not finished" if missing else ""


def why_nothing(pairs: Paired) -> str:
    """Why there is no score; empty if there is one."""
    return "" if pairs.seeds else "no seed has finished every run that it needs"


def why_never_learned(pairs: Paired, point: tuple[int, float]) -> str:
    """Why no score is defined, if the variant did not learn at this point; else empty."""
    if pairs.seeds and pairs.entropy - pairs.mean(point) >= LEARNED:
        return ""
    ends = {pairs.runs[point, seed].outcome for seed in pairs.seeds}
    if "not_yet_learned" in ends and ends <= {"not_yet_learned", "trained"}:
        return NOT_YET
    return ELSEWHERE if pairs.learned_with_another_warmup({point[1]}) else NEVER


def score_identity(arm: Arm, lr: float, score: str) -> dict[str, Any]:
    """The fields that identify a score."""
    return {"group": arm.group, "lr": lr, "variant": arm.variant, "score": score}


def undefined(arm: Arm, lr: float, score: str, reason: str, pairs: Paired | None = None) -> Score:
    """A score without a value, with the reason in its note."""
    counts: dict[str, Any] = pairs.counts if pairs else {}
    return Score(**score_identity(arm, lr, score), **counts, note=reason)
