"""Read a grid folder: the plan, and the files of every planned cell so far."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_app.analysis.papers import number_of, read_grid_file, read_plan
from lightning_app.errors import UserError
from lightning_app.grid_axes import (
    BLOCK,
    CORPUS,
    PRESET,
    RATE,
    ROUNDING,
    SEED,
    WARMUP,
    Labels,
    group_name,
    key_of,
    lookup,
    named_values,
    variant,
)
from lightning_app.grid_folder import GridFolder
from lightning_app.mixtures import Groups, strangers
from lightning_app.records import (
    OUTCOMES,
    Newer,
    Unsound,
    outcome,
    read_pruned,
    read_result,
    read_yaml,
)
from lightning_app.run_folder import METRICS, RunFolder
from lightning_app.tables import CHECKS, Curve, read_curves
from lightning_app.task_facts import TASKS, Monitored, QualityMetric, glue_task_of, task_facts

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
    `group` names the values of the axes that are no block, warm-up, rate or seed. `baseline` is the
    variant to compare with: the grid's baseline preset with this cell's other block axes.
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
        return None if self.result is None else outcome(self.result)

    @property
    def word(self) -> str:
        """The displayed state: the ending in the words of `records.OUTCOMES`, else `state`."""
        return self.state if self.result is None else OUTCOMES[outcome(self.result)]

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
    `pruner` is the rule by which hopeless cells were ended early, if there was one. `published`
    holds the figures of papers to compare with, as the grid file has them. `parts` are the grids
    that this one joins (`analysis.together`). `strangers` names the cells whose state is
    `other_data`, by their digest. `reruns` has the cells under perturbed rounding; `cells` has not.
    `without_parent` names the cells that are not planned yet, since the runs of another grid that
    they start from are not finished.
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
    reruns: tuple[CellResult, ...] = ()
    labels: Labels = field(default_factory=dict)
    without_parent: tuple[str, ...] = ()

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
        if cell.scores and self.metric == cell.monitored.metric:
            return cell.scores[0]
        return QualityMetric(self.metric, self.metric, "", self.mode)

    @property
    def measures(self) -> list[QualityMetric]:
        """The measures of the finished runs, each once; the metric of the grid without a run."""
        found = list(dict.fromkeys(map(self.measure, self.finished)))
        return found or [QualityMetric(self.metric, self.metric, "", self.mode)]

    @property
    def scored(self) -> tuple[CellResult, ...]:
        """The finished cells whose task has published scores."""
        return tuple(cell for cell in self.finished if cell.scores)

    def setting(self, key: str) -> Any:
        """The value of a dotted field that no axis varies, or None if it is not set."""
        return None if key in self.axes else lookup(self.config, key)

    def varies(self, key: str) -> bool:
        """Whether a dotted field is an axis of several values."""
        return len(self.axes.get(key, ())) > 1

    def tried(self, key: str) -> Sequence[Any]:
        """The values of a dotted field: those of its axis, else the one that is set, if any."""
        found = lookup(self.config, key)
        return self.axes.get(key, [] if found is None else [found])


def failures(cells: Iterable[CellResult]) -> str:
    """The kinds of failure of the failed runs, in words: `stalled`, `non-finite` or both."""
    found = {cell.word for cell in cells if cell.state == "diverged"}
    return " or ".join(word for word in OUTCOMES.values() if word in found)


def outcomes(cells: Iterable[CellResult]) -> str:
    """The number of runs with each ending other than `ok`: `2 stalled, 1 non-finite`."""
    words = [cell.word for cell in cells if cell.finished]
    shown = [word for key, word in OUTCOMES.items() if key != "trained"]
    return ", ".join(f"{words.count(word)} {word}" for word in shown if word in words)


def read_results(folder: Path) -> GridResults:
    """Read `grid.yaml`, `plan.json` and each cell's `result.json`.

    A cell whose result is damaged counts as not finished. Raises `UserError` for a folder that is
    no grid, for a plan or grid file that cannot be understood, and for what a newer version made.
    """
    folder = Path(folder)
    paths = GridFolder(folder)
    for needed in (paths.specification, paths.plan):
        if not needed.is_file():
            raise UserError(f"{folder}: holds no {needed.name}, so it is not the folder of a grid")
    plan, grid = read_plan(paths.plan), read_grid_file(paths.specification)
    scores, metric = grid.get("sensitivity") or {}, grid.get("metric") or {}
    factors, compare = grid.get("factors") or {}, grid.get("compare") or {}
    config, damaged = _config(paths, plan, grid)
    monitored = task_facts(lookup(config, TASKS.field)).monitored
    cells = [_cell(paths, entry, config, grid, plan["axes"]) for entry in plan["cells"]]
    found = GridResults(
        folder=folder,
        name=plan["name"],
        question=(grid.get("question") or "").strip(),
        config=config,
        axes=plan["axes"],
        metric=metric.get("name") or monitored.metric,
        mode=metric.get("mode") or monitored.mode,
        reference_warmup=scores.get("reference_warmup"),
        baseline=scores.get("baseline"),
        cells=tuple(cell for cell in cells if not cell.axes.get(ROUNDING)),
        reruns=tuple(cell for cell in cells if cell.axes.get(ROUNDING)),
        pruner=grid.get("pruner"),
        published=tuple(grid.get("published") or ()),
        damaged_configs=tuple(damaged),
        factors={name: axis for name, axis in factors.items() if axis in plan["axes"]},
        compare={axis: base for axis, base in compare.items() if axis in plan["axes"]},
        labels=_labels(grid, plan["axes"]),
        without_parent=tuple(cell["name"] for cell in plan.get("waiting", ())),
    )
    return without_strangers(found)


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


def _config(
    paths: GridFolder, plan: Mapping[str, Any], grid: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The config of one run under the grid's base, and a line for each damaged one before it."""
    base, damaged = grid.get("base_config") or {}, []
    for entry in plan["cells"]:
        path = paths.run(entry["name"]).config
        try:
            return _merge(read_yaml(path), base), damaged
        except FileNotFoundError:
            continue
        except Unsound as error:
            damaged.append(f"{path}: {error}")
    return dict(base), damaged


def _merge(under: Any, over: Any) -> Any:
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: _merge(under.get(key), value) for key, value in over.items()}}


def _cell(
    paths: GridFolder,
    entry: Mapping[str, Any],
    config: Mapping[str, Any],
    grid: Mapping[str, Any],
    planned: Mapping[str, list[Any]],
) -> CellResult:
    axes, run = entry["axes"], paths.run(entry["name"])
    labels = _labels(grid, planned)

    def value(key: str, kind: Callable[[Any], float]) -> Any:
        found = axes[key] if key in axes else lookup(config, key)
        return number_of(paths.plan if key in axes else run.path, key, found, kind)

    metric = (grid.get("metric") or {}).get("name")
    result, state, error = _outcome(run, entry["id"], metric, grid.get("pruner") is not None)
    others = [
        key
        for key in axes
        if key not in (SEED, WARMUP, RATE, ROUNDING)
        and not key.startswith(BLOCK)
        and len(planned.get(key, ())) != 1  # an axis of one value distinguishes nothing
    ]
    baseline = (grid.get("sensitivity") or {}).get("baseline")
    if baseline is not None and PRESET in axes:
        baseline = variant({**axes, PRESET: baseline}, config, labels)
    facts = task_facts(axes.get(TASKS.field) or lookup(config, TASKS.field))
    corpus = axes.get(CORPUS) or lookup(config, CORPUS)
    return CellResult(
        id=entry["id"],
        name=entry["name"],
        folder=run.path,
        axes=axes,
        variant=variant(axes, config, labels),
        baseline=baseline,
        group=group_name(axes, others, labels),
        warmup=value(WARMUP, int),
        lr=value(RATE, float),
        seed=value(SEED, int),
        state=state,
        result=result,
        error=error,
        monitored=facts.monitored,
        corpus=None if corpus is None else str(corpus),
        scores=facts.by_corpus.get(str(corpus), ()),
    )


def _labels(grid: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> Labels:
    """The names of values in the grid file, and the published names of corpora without one."""
    tasks = {key_of(name): glue_task_of(str(name)) for name in axes.get(CORPUS, ())}
    corpora = {key: name for key, name in tasks.items() if name}
    given = named_values(grid.get("labels") or {}, axes)
    return {CORPUS: corpora} | given if corpora else given


def _outcome(
    run: RunFolder, identity: str, metric: str | None, prunes: bool
) -> tuple[dict[str, Any] | None, State, str | None]:
    """Result, state, and the last line of the error of one run folder.

    If the grid no longer `prunes`, a run that was pruned before counts as unfinished.
    """
    path = run.result
    try:
        if result := read_result(path, identity, metric):
            return result, result["status"], None
        path = run.pruned
        if prunes and read_pruned(path, identity):
            return None, "pruned", None
    except Newer as error:
        raise UserError(f"{path}: {error}") from error
    except Unsound as error:
        return None, "damaged", f"{path.name}: {error}"
    last = run.last_attempt()
    if not last:
        return None, "waiting", None
    error = run.attempt(last).error_line()
    return (None, "unfinished", None) if error is None else (None, "failed", error)


def as_number(value: Any) -> float:
    return math.nan if value is None else float(value)
