"""What a grid folder holds: the plan, and every planned cell with its files so far."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_app.grid_axes import (
    SEED,
    WARMUP,
    Labels,
    cell_setting,
    lookup,
)
from lightning_app.mixtures import Groups, strangers
from lightning_app.records import (
    OUTCOMES,
    Unsound,
)
from lightning_app.rulers import differences, in_raw_text, names_of, ruler, unit_of
from lightning_app.run_folder import METRICS
from lightning_app.tables import CHECKS, Curve, read_curves
from lightning_app.task_facts import TASKS, Monitored, QualityMetric, task_facts

LEARNING_RATE = "train/lr"
"""The curve of the learning rate in the logs of a run."""

OTHER_DATA = "other_data"
State = Literal[
    "ok", "diverged", "pruned", "failed", "unfinished", "waiting", "damaged", "other_data"
]


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One planned run.

    `state`: `ok` or `diverged` (a result exists), `pruned` (the grid's pruner ended it), `failed`
    (the last attempt crashed), `unfinished` (an attempt runs or was cut short; files alone cannot
    tell), `waiting` (never started), `damaged` (what it left at its end cannot be read; `error`
    says why), `other_data` (finished, but on other data than the cells that it would be compared
    with: its result counts nowhere). `monitored` is what its task monitors, `corpus` its
    `data.name`, and `scores` the published scores of the task on that corpus, if it has some.
    `group` names the values of the axes that are no block, warm-up, rate or seed, and that follow
    from no other axis. `baseline` is the variant to compare with: the grid's baseline preset with
    this cell's other block axes. `config` has the settings that no axis varies.
    """

    id: str
    name: str
    folder: Path
    axes: Mapping[str, Any]
    variant: str
    baseline: str | None
    group: str
    warmup: int | None
    lr: float | None
    seed: int | None
    state: State
    result: Mapping[str, Any] | None
    error: str | None
    monitored: Monitored
    corpus: str | None = None
    scores: tuple[QualityMetric, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    _rulers: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def failed(self) -> bool:
        """Whether the run stalled, or its loss became non-finite."""
        return self.state == "diverged"

    @property
    def record(self) -> Mapping[str, Any]:
        """The fields of `result.json`, none before the run has finished."""
        return self.result or {}

    @property
    def outcome(self) -> str | None:
        """How it ended, a key of `records.OUTCOMES`; None before the run has finished."""
        return None if self.result is None else self.result["outcome"]

    @property
    def word(self) -> str:
        """The displayed state: the ending in the words of `records.OUTCOMES`, else `state`."""
        return self.state if self.result is None else OUTCOMES[self.result["outcome"]]

    @cached_property
    def damage(self) -> dict[str, str]:
        """The damage of the files that a report reads in its folder, by name."""
        found = {}
        for name, check in CHECKS.items():
            path = self.folder / name
            try:
                if path.exists():
                    check(path)
            except Unsound as error:
                found[name] = str(error)
            except OSError as error:
                found[name] = f"cannot be read: {error.strerror}"
        return found

    def sound(self, name: str) -> Path | None:
        """A file of its folder, None if it is missing or damaged."""
        path = self.folder / name
        return path if name not in self.damage and path.is_file() else None

    def curves(self, wanted: Callable[[str], bool]) -> dict[str, Curve]:
        """The `wanted` columns of its `metrics.csv`, none where the file is missing or damaged."""
        path = self.sound(METRICS)
        return {} if path is None else read_curves(path, wanted)

    def curve(self, tag: str) -> Curve:
        """One column of its `metrics.csv`, empty if the column is missing."""
        return self.curves(tag.__eq__).get(tag, {})

    @property
    def data(self) -> Mapping[str, Any]:
        """The training data of the run: name, protocol, sizes."""
        return self.record.get("data") or {}

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Final metrics by tag, None where not finite; empty before the run has finished."""
        return self.record.get("metrics") or {}

    def setting(self, key: str) -> Any:
        """The value of a dotted field in this run."""
        return cell_setting(self.axes, self.config)(key)

    def ruler(self, metric: str) -> dict[str, Any]:
        """What a metric counts here (`task_facts.ruler`), with what the result shows of that.

        The floor of the loss follows from the predicted tokens; the bytes that bits per byte are
        divided by follow from them and the sum of the losses.
        """
        if metric not in self._rulers:
            self._rulers[metric] = self._ruler(metric)
        return self._rulers[metric]

    def _ruler(self, metric: str) -> dict[str, Any]:
        found = ruler(self.setting, metric)
        if metric.startswith("val/") and unit_of(self.setting, metric) in ("tokens", "anything"):
            found[f"the {self.monitored.floor}"] = self.entropy
        bits, parts = self.metrics.get(metric), self.record.get("validation_parts")
        if metric == "val/bits_per_byte" and bits and parts:
            found["the number of bytes"] = sum(parts["nll"]) / math.log(2) / bits
        return found

    @property
    def entropy(self) -> float:
        """`H_uni` in nats per token, of the run's own validation targets; NaN if not finished."""
        return float(self.result["unigram_entropy"]) if self.result else math.nan

    @property
    def loss(self) -> float:
        """The `l` of every score in nats per token: `H_uni` if diverged, else `min(loss, H_uni)`.

        A stall counts as `H_uni` exactly, also where it ended a little below, so that every failure
        costs the same. One cap serves all variants: a run that has not yet learned counts as
        `H_uni` too, and `capped` tells it from a stall. NaN if not finished.
        """
        if self.state == "diverged":
            return self.entropy
        return min(self._measured, self.entropy)

    @property
    def _measured(self) -> float:
        return as_number(self.metrics.get(self.monitored.loss))

    @property
    def capped(self) -> bool:
        """Whether the run has not yet learned and its loss counts as the lower `H_uni`."""
        return self.state == "ok" and self._measured > self.entropy


@dataclass(frozen=True, kw_only=True)
class GridResults:
    """A grid folder. `cells` holds every planned cell, finished or not, in the order of the plan.

    `config` is the grid's base over the resolved config of one run, which has every default.
    `metric` is the metric of the grid, and `mode` whether `min` or `max` is best.
    `pruner` is the rule by which hopeless cells were ended early, if any were. `published`
    holds the figures of papers to compare with, as the grid file has them. `parts` are the grids
    that this one joins (`analysis.together`). `strangers` names the cells whose state is
    `other_data`, by their digest.
    `without_parent` names the cells that are not planned yet, since the runs of another grid that
    they start from are not finished. `linked` has the axes whose values follow from another axis,
    with that one. `asked` says that the metric was asked for, so that no score of a task takes its
    place.
    """

    folder: Path
    name: str
    question: str
    config: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    metric: str
    mode: str
    reference_warmup: int | None
    baseline: str | None
    cells: tuple[CellResult, ...]
    pruner: str | None = None
    published: tuple[Mapping[str, Any], ...] = ()
    parts: tuple["GridResults", ...] = ()
    strangers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    damaged_configs: tuple[str, ...] = ()
    factors: Mapping[str, str] = field(default_factory=dict)
    compare: Mapping[str, Any] = field(default_factory=dict)
    labels: Labels = field(default_factory=dict)
    without_parent: tuple[str, ...] = ()
    linked: Mapping[str, str] = field(default_factory=dict)
    asked: bool = False

    @cached_property
    def finished(self) -> tuple[CellResult, ...]:
        return tuple(cell for cell in self.cells if cell.finished)

    @cached_property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.variant for cell in self.cells))

    @cached_property
    def warmups(self) -> tuple[int, ...]:
        return tuple(sorted({cell.warmup for cell in self.cells if cell.warmup is not None}))

    @property
    def asks_warmup(self) -> bool:
        return WARMUP in self.axes

    @cached_property
    def rates(self) -> tuple[float, ...]:
        return tuple(sorted({cell.lr for cell in self.cells if cell.lr is not None}))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({cell.seed for cell in self.cells if cell.seed is not None}))

    @property
    def monitored(self) -> Monitored:
        """What the task of the grid monitors."""
        return task_facts(self.setting(TASKS.field)).monitored

    def measure(self, cell: CellResult) -> QualityMetric:
        """What a reader judges a run by.

        The first published score of its task and corpus, unless the grid file names a metric other
        than the loss; without such a score the metric of the grid file.
        """
        if cell.scores and self.metric == cell.monitored.metric and not self.asked:
            return cell.scores[0]
        return QualityMetric(self.metric, self.metric, "", self.mode)

    @property
    def measures(self) -> list[QualityMetric]:
        """The measures of the finished runs, each once; the metric of the grid without a run."""
        found = list(dict.fromkeys(map(self.measure, self.finished)))
        return found or [QualityMetric(self.metric, self.metric, "", self.mode)]

    def common_measure(self, cells: Sequence[CellResult]) -> tuple[QualityMetric | None, str]:
        """The measure that compares some runs, and why it is not their own (`measure`).

        Where theirs counts other things in some of them, it is one that counts the text itself and
        that all of them have; None without such a one.
        """
        own = self.measure(cells[0])
        why = unlike(cells, own.metric)
        if not why:
            return own, ""
        having = [cell for cell in cells if cell.metrics.get(own.metric) is not None]
        for other in in_raw_text(cells[0].setting, own.metric):
            lacking = sum(cell.metrics.get(other.metric) is None for cell in having)
            if lacking == len(having):
                continue
            also = unlike(cells, other.metric)
            if not lacking and not also:
                return other, why
            also = also or f"{lacking} of {len(having)} runs have none"
            why = f"{why}; nor by {other.metric}: {also}"
        return None, why

    @property
    def scored(self) -> tuple[CellResult, ...]:
        """The finished cells whose task has published scores."""
        return tuple(cell for cell in self.finished if cell.scores)

    def setting(self, key: str) -> Any:
        """The value of a dotted field that no axis varies, or None if it is not set."""
        return None if key in self.axes else lookup(self.config, key)

    def apart_from(self, axis: str, axes: Mapping[str, Any]) -> dict[str, Any]:
        """Values of axes without `axis`, what follows from it, and the seed."""
        return {
            key: value
            for key, value in axes.items()
            if key not in (axis, SEED) and self.linked.get(key) != axis
        }

    def varies(self, key: str) -> bool:
        """Whether a dotted field is an axis of several values."""
        return len(self.axes.get(key, ())) > 1

    def tried(self, key: str) -> Sequence[Any]:
        """The values of a dotted field: those of its axis, else the one that is set, if any."""
        found = lookup(self.config, key)
        return self.axes.get(key, [] if found is None else [found])


def unlike(cells: Iterable[CellResult], metric: str) -> str:
    """Why the values of a metric of these runs cannot be compared, in words; empty if they can."""
    return differences([cell.ruler(metric) for cell in cells])


def scales(cells: Sequence[CellResult], metric: str) -> list[str]:
    """The ruler of a metric in each run, as the fields in which these runs differ; all "" for one.

    Runs of one text can be compared, ranked and averaged by the metric, others cannot.
    """
    return names_of([cell.ruler(metric) for cell in cells])


def failures(cells: Iterable[CellResult]) -> str:
    """The kinds of failure of the failed runs, in words: `stalled`, `non-finite` or both."""
    found = {cell.word for cell in cells if cell.state == "diverged"}
    return " or ".join(word for word in OUTCOMES.values() if word in found)


def outcomes(cells: Iterable[CellResult]) -> str:
    """The number of runs with each ending other than `ok`: `2 stalled, 1 non-finite`."""
    words = [cell.word for cell in cells if cell.finished]
    shown = [word for key, word in OUTCOMES.items() if key != "trained"]
    return ", ".join(f"{words.count(word)} {word}" for word in shown if word in words)


def without_strangers(grid: GridResults) -> GridResults:
    """The grid without the results that were trained on other data than those beside them.

    So no later comparison of runs includes them.
    """
    records = {cell.name: cell.record for cell in grid.finished}
    found: Groups = strangers(records, {cell.name: cell.axes for cell in grid.finished})
    state_of = {name: state for state, names in found.items() for name in names}
    cells = tuple(
        replace(cell, state=OTHER_DATA, result=None, error=f"trained on {state_of[cell.name]}")
        if cell.name in state_of and cell.finished
        else cell
        for cell in grid.cells
    )
    return replace(grid, cells=cells, strangers={**grid.strangers, **found}) if found else grid


def as_number(value: Any) -> float:
    return math.nan if value is None else float(value)
