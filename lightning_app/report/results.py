"""The results of a grid, read from its folder."""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_app.config.grid import GridFile, without_gone
from lightning_app.config.identity import completed, is_irrelevant, leaves
from lightning_app.config.rulers import BUDGET, differences, in_raw_text, names_of, ruler, unit_of
from lightning_app.config.search import ALPHA, LOOKED_AT
from lightning_app.config.sources import merged
from lightning_app.config.tree import (
    BLOCK,
    CORPUS,
    PRESET,
    RATE,
    SEED,
    WARMUP,
    Labels,
    canonical,
    cell_setting,
    group_name,
    key_of,
    lookup,
    named_values,
    variant,
)
from lightning_app.core.errors import UserError, named
from lightning_app.core.schema import read
from lightning_app.runs.folder import GridFolder, RunFolder
from lightning_app.runs.mixtures import Groups, strangers
from lightning_app.runs.records import (
    OUTCOMES,
    SEAL,
    Cell,
    Plan,
    Unsound,
    is_sealed,
    read_json,
    read_plan,
    read_yaml,
)
from lightning_app.runs.run import DamagedRun, Run
from lightning_app.runs.store import locate_run
from lightning_app.scores.task_facts import (
    AVERAGE,
    TASKS,
    Monitored,
    QualityMetric,
    glue_task_of,
    task_facts,
)

LEARNING_RATE = "train/lr"
"""The curve of the learning rate in the logs of a run."""

SUMS = {"train/tokens": "tokens", "train/seconds": "seconds"}
"""The sums since the start of training, by their names in `metrics.csv` and in data frames."""

OTHER_DATA = "other_data"
State = Literal[
    "ok", "diverged", "pruned", "failed", "unfinished", "waiting", "damaged", "other_data"
]


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One planned run.

    `state`: `ok` or `diverged` (a result exists), `pruned` (the grid's pruner ended it), `failed`
    (the last attempt crashed), `unfinished` (an attempt is running or was cut short; files do not
    show which), `waiting` (never started), `damaged` (its files cannot be read; `error` says why),
    `other_data` (finished, but on other data than the cells it would be compared with, so its
    result is excluded). `monitored` is what its task monitors, `corpus` its
    `data.name`, and `scores` the published scores of the task on that corpus, if any.
    `group` names the values of the axes that are no block, warm-up, rate or seed, and that follow
    from no other axis. `baseline` is the variant to compare with: the grid's baseline preset with
    this cell's other block axes. `config` has the settings that no axis varies.
    """

    id: str
    name: str
    run: Run
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
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run.folder.path

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

        The floor of the loss follows from the predicted tokens; the bytes of the validation text
        follow from them and the sum of the losses, and tell of the test text too. The size of the
        vocabulary, which a parent run may set, decides which rows lie in a part of a split.
        """
        if metric not in self._rulers:
            self._rulers[metric] = self._ruler(metric)
        return self._rulers[metric]

    def _ruler(self, metric: str) -> dict[str, Any]:
        metric = metric.removeprefix(AVERAGE)
        counts = ruler(self.setting, metric)
        if metric.startswith("val/") and unit_of(self.setting, metric) in ("tokens", "anything"):
            counts[f"the {self.monitored.floor}"] = self.entropy
        bits, parts = self.metrics.get("val/bits_per_byte"), self.record.get("validation_parts")
        if unit_of(self.setting, metric) == "bytes" and bits and parts:
            counts["the number of bytes"] = sum(parts["nll"]) / math.log(2) / bits
        vocabulary = self.data.get("vocab_size")
        limits = (f"trainer.limit_{split}_batches" for split in ("val", "test"))
        if vocabulary and any(counts.get(limit) is not None for limit in limits):
            counts["the size of the vocabulary"] = float(vocabulary)
        return counts

    @property
    def entropy(self) -> float:
        """`H_uni` in nats per token, of the run's own validation targets; NaN if not finished."""
        return float(self.result["unigram_entropy"]) if self.result else math.nan

    @property
    def loss(self) -> float:
        """The `l` of every score in nats per token: `H_uni` if diverged, else `min(loss, H_uni)`.

        A stall counts as exactly `H_uni`, even if it ended a little below, so that every failure
        costs the same. One cap holds for all variants: a run that has not yet learned counts as
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
    `pruner` is the rule by which hopeless cells were ended early, if any were. `chosen` names the
    fields whose values a search or a refinement chose by results; `more`: how many further cells it
    may still ask for, at most. `strangers` names the cells whose state is `other_data`, by their
    digest.
    `wiring` is what the names of the axes begin with whose values are variants.
    `without_parent` names the cells that are not planned yet, since the runs of another grid that
    they start from are not finished. `linked` has the axes whose values follow from another axis,
    with that one. `asked` says that the metric was asked for, so that no score of a task takes its
    place. `source` is a digest of the content of the grid file. `searched`: a search chose the
    trials of each arm; `trials`: those of each seed, where each is a study of its own. `alpha`: the
    two-sided error of its intervals (`statistics.corrected`). `matters` and `metric_matters` are
    the smallest differences that matter, in nats and in the metric; 0 if the grid file names none.
    `families` are groups of variants by name. `control` is a preset that, with the baseline, has
    families of its own. `afterwards` names those of `matters`, `control` and `families` that the
    grid's folder has not.
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
    chosen: tuple[str, ...] = ()
    more: int = 0
    strangers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    damaged_configs: tuple[str, ...] = ()
    factors: Mapping[str, str] = field(default_factory=dict)
    compare: Mapping[str, Any] = field(default_factory=dict)
    labels: Labels = field(default_factory=dict)
    wiring: tuple[str, ...] = (BLOCK,)
    without_parent: tuple[str, ...] = ()
    linked: Mapping[str, str] = field(default_factory=dict)
    asked: bool = False
    source: str = ""
    searched: bool = False
    trials: int = 0
    alpha: float = ALPHA
    control: str | None = None
    matters: float = 0.0
    metric_matters: float = 0.0
    families: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    afterwards: tuple[str, ...] = ()

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
        """The measure by which a run is judged.

        The first published score of its task and corpus, unless the grid file names a metric other
        than the loss; without published scores the metric of the grid file.
        """
        if cell.scores and self.metric == cell.monitored.metric and not self.asked:
            return cell.scores[0]
        return QualityMetric(self.metric, self.metric, "", self.mode)

    @property
    def measures(self) -> list[QualityMetric]:
        """The distinct measures of the finished runs; without runs the metric of the grid."""
        unique = list(dict.fromkeys(map(self.measure, self.finished)))
        return unique or [QualityMetric(self.metric, self.metric, "", self.mode)]

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

    @property
    def unit(self) -> str:
        """The unit of its losses."""
        return "nats per row" if self.scored else "nats per token"

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
        """The values of a dotted field: those of its axis, or the one that is set, if any."""
        value = lookup(self.config, key)
        return self.axes.get(key, [] if value is None else [value])


Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their key, in the order in which they come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


ARM = attrgetter("group", "lr", "variant", "warmup")
"""What the runs of one arm share."""


def best_trials(grid: GridResults) -> GridResults:
    """The grid with the best trial of each seed that is a study of its own; else as it is.

    Best by the measure of the run. A seed with an unfinished trial has not finished.
    """
    if not grid.trials:
        return grid
    studies: dict[str, list[CellResult]] = {}
    for cell in grid.cells:
        axes = {key: value for key, value in cell.axes.items() if key not in grid.chosen}
        studies.setdefault(canonical(axes), []).append(replace(cell, axes=axes, lr=None))

    def rank(cell: CellResult) -> tuple[bool, bool, float]:
        own = grid.measure(cell)
        value = cell.metrics.get(own.metric)
        sign = -1 if own.mode == "max" else 1
        return cell.finished, value is None, sign * (value or 0.0)

    axes = {key: values for key, values in grid.axes.items() if key not in grid.chosen}
    cells = tuple(min(cells, key=rank) for cells in studies.values())
    return replace(grid, cells=cells, axes=axes, chosen=(), trials=0)


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
    words = {cell.word for cell in cells if cell.state == "diverged"}
    return " or ".join(word for word in OUTCOMES.values() if word in words)


def outcomes(cells: Iterable[CellResult]) -> str:
    """The number of runs with each ending other than `ok`: `2 stalled, 1 non-finite`."""
    words = [cell.word for cell in cells if cell.finished]
    shown = [word for key, word in OUTCOMES.items() if key != "trained"]
    return ", ".join(f"{words.count(word)} {word}" for word in shown if word in words)


def without_strangers(grid: GridResults) -> GridResults:
    """The grid without results trained on other data than those they would be compared with.

    No later comparison of runs includes them.
    """
    records = {cell.name: cell.record for cell in grid.finished}
    excluded: Groups = strangers(records, {cell.name: cell.axes for cell in grid.finished})
    state_of = {name: state for state, names in excluded.items() for name in names}
    cells = tuple(
        replace(cell, state=OTHER_DATA, result=None, error=f"trained on {state_of[cell.name]}")
        if cell.name in state_of and cell.finished
        else cell
        for cell in grid.cells
    )
    return (
        replace(grid, cells=cells, strangers={**grid.strangers, **excluded}) if excluded else grid
    )


def as_number(value: Any) -> float:
    return math.nan if value is None else float(value)


def damaged_files(grid: GridResults) -> list[str]:
    """A line for each file that a report cannot read, with the reason."""
    damaged = (cell for cell in grid.cells if cell.state == "damaged")
    files = (f"{cell.folder}/{cell.error}" for cell in damaged)
    return list(dict.fromkeys((*grid.damaged_configs, *files)))


UNSAID = (  # folders of a machine, and settings that change no result
    *("data.root", "data.tokenizer_file", "data.cache", "data.num_workers"),
    *("trainer.default_root_dir", "trainer.logger", "trainer.log_every_n_steps"),
    *("trainer.enable_checkpointing", "trainer.enable_progress_bar"),
)


def _common(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    equal: dict[str, Any] = {}
    for key, value in one.items():
        if isinstance(value, Mapping) and isinstance(other.get(key), Mapping):
            equal[key] = _common(value, other[key])
        elif key in other and other[key] == value:
            equal[key] = value
    return equal


_LARGEST = 2**63  # the limit of a column of 64-bit integers

SCORED = (SEED, WARMUP, RATE)
"""The axes over which scores are computed, within each group of runs."""


def read_results(folder: Path, file: Mapping[str, Any] | None = None) -> GridResults:
    """Read `grid.yaml`, `plan.json` and each cell's `result.json`.

    `file` is the content of a grid file of the same cells, which replaces `grid.yaml`: its question
    or labels may have changed. A cell whose result is damaged counts as not finished.
    Raises `UserError` for a folder that is not a grid, for an invalid plan or grid file, and for
    files of another version that this one cannot read.
    """
    folder = Path(folder)
    paths = GridFolder(folder)
    for needed in (paths.specification, paths.plan):
        if not needed.is_file():
            raise UserError(f"{folder}: has no {needed.name}, so it is not the folder of a grid")
    plan, grid = read_plan(paths.plan), file or read_grid_file(paths.specification)
    scores, metric = grid.get("sensitivity") or {}, grid.get("metric") or {}
    factors, compare = grid.get("factors") or {}, grid.get("compare") or {}
    search = grid.get("search") or {}
    config, damaged = _config(paths, plan, grid)
    monitored = task_facts(lookup(config, TASKS.field)).monitored
    pruner = paths.name if grid.get("pruner") else None
    cells = []
    for cell in plan.cells:
        place = locate_run(paths, cell.name, cell.id)
        run = Run(place, cell.id, metric.get("name"), pruner=pruner)
        cells.append(_cell(run, paths, cell, config, grid, plan.axes))
    if plan.seal is None and any(is_sealed(cell.result) for cell in cells if cell.result):
        raise UserError(
            f"{paths.plan}: has lost its {SEAL}, though results of its cells have one; `ablate "
            "run` makes the plan again"
        )
    results = GridResults(
        folder=folder,
        name=plan.name,
        question=(grid.get("question") or "").strip(),
        config=config,
        axes=plan.axes,
        metric=metric.get("name") or monitored.metric,
        mode=metric.get("mode") or monitored.mode,
        reference_warmup=scores.get("reference_warmup"),
        baseline=scores.get("baseline"),
        control=scores.get("control"),
        cells=tuple(cells),
        chosen=tuple(search.get("fields") or (RATE,) * bool(grid.get("refine"))),
        more=plan.more,
        # Without a cell that the pruner may have ended it has selected nothing.
        pruner=grid.get("pruner")
        if {cell.state for cell in cells} & {"pruned", "damaged"}
        else None,
        damaged_configs=tuple(damaged),
        factors={name: axis for name, axis in factors.items() if axis in plan.axes},
        compare={axis: base for axis, base in compare.items() if axis in plan.axes},
        labels=_labels(grid, plan.axes),
        wiring=_wiring(grid),
        without_parent=tuple(cell.name for cell in plan.waiting),
        linked=_linked(grid),
        source=_digest(grid),
        searched=bool(search) and search.get("per") != "seed",
        trials=search.get("trials") or 0,
        alpha=LOOKED_AT if grid.get("until") else ALPHA,
        matters=scores.get("matters") or 0.0,
        metric_matters=metric.get("matters") or 0.0,
        families=grid.get("families") or {},
        afterwards=_afterwards(grid, file and read_grid_file(paths.specification)),
    )
    return without_strangers(results)


def _afterwards(grid: Mapping[str, Any], run: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What the grid file decides of verdicts that it did not when the grid was last run."""

    def decided(tree: Mapping[str, Any]) -> dict[str, Any]:
        found = {"families": tree.get("families")}
        for name in ("sensitivity", "metric"):
            found[f"{name}.matters"] = (tree.get(name) or {}).get("matters")
        found["sensitivity.control"] = (tree.get("sensitivity") or {}).get("control")
        return {key: value for key, value in found.items() if value}

    then = decided(grid if run is None else run)
    return tuple(key for key, value in decided(grid).items() if then.get(key) != value)


def _digest(grid: Mapping[str, Any]) -> str:
    """A digest of what a grid file says of its report; what it leaves out is empty."""
    said = {key: value for key, value in grid.items() if value and key != "checkpoints"}
    return hashlib.sha256(canonical(said).encode()).hexdigest()


_LINKED = ("data.seed", "data.task", "data.next_sentence", "data.init_from", "model.objective.glue")
"""Fields of a config that follow from others."""


def read_runs(folder: Path, runs: Sequence[RunFolder]) -> GridResults:
    """Read runs that no grid planned together; the differences between their configs become axes.

    Runs without a config, which have not begun, are left out, and damaged ones are named.
    """
    configs: dict[str, tuple[Run, Mapping[str, Any]]] = {}
    damaged = []
    for run in map(Run, runs):
        if not run.folder.config.exists():
            continue
        try:
            with named(run.folder.config):
                sound = Run(run.folder, run.id)
                configs[run.folder.name] = sound, completed(run.config)
        except UserError as error:
            damaged.append(str(error))
    flat = {name: dict(leaves(config)) for name, (_, config) in configs.items()}
    keys = dict.fromkeys(key for fields in flat.values() for key in fields)
    axes = {
        key: _distinct([fields.get(key) for fields in flat.values()])
        for key in keys
        if not is_irrelevant(key) and key not in (*UNSAID, *_LINKED)
    }
    axes = {key: values for key, values in axes.items() if len(values) > 1}
    common: Mapping[str, Any] = {}
    for number, (_, config) in enumerate(configs.values()):
        common = _common(common, config) if number else config
    kinds = _distinct([lookup(config, TASKS.field) for _, config in configs.values()])
    monitored = task_facts(kinds[0] if len(kinds) == 1 else None).monitored
    paths, grid = GridFolder(folder), {"metric": {"name": monitored.metric}}
    cells = []
    for name, (run, config) in configs.items():
        values = {key: flat[name].get(key) for key in axes}
        cell = Cell(id=run.id or "", name=name, axes=values)
        cells.append(_cell(run, paths, cell, config, grid, axes))
    return GridResults(
        folder=folder,
        name=folder.name,
        question="",
        config=common,
        axes=axes,
        metric=monitored.metric,
        mode=monitored.mode,
        reference_warmup=None,
        baseline=None,
        cells=tuple(cells),
        damaged_configs=tuple(damaged),
    )


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once; they need not be hashable."""
    return list({key_of(value): value for value in values}.values())


def _config(
    paths: GridFolder, plan: Plan, grid: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The config of one run under the grid's base, and a line for each damaged one before it."""
    base, damaged = grid.get("base_config") or {}, []
    for cell in plan.cells:
        path = locate_run(paths, cell.name, cell.id).config
        try:
            with named(path):
                return merged(read_yaml(path), base), damaged
        except FileNotFoundError:
            continue
        except Unsound as error:
            damaged.append(f"{path}: {error}")
    return dict(base), damaged


def _cell(
    run: Run,
    paths: GridFolder,
    cell: Cell,
    config: Mapping[str, Any],
    grid: Mapping[str, Any],
    planned: Mapping[str, list[Any]],
) -> CellResult:
    axes, folder = cell.axes, run.folder
    labels, wiring = _labels(grid, planned), _wiring(grid)

    def value(key: str, kind: Callable[[Any], float]) -> Any:
        found = axes[key] if key in axes else lookup(config, key)
        return _number(paths.plan if key in axes else folder.path, key, found, kind)

    result, state, error = _outcome(run)
    facts = task_facts(axes.get(TASKS.field) or lookup(config, TASKS.field))
    # An axis that follows from another one adds nothing to a group's name, unless its values change
    # what losses count or the budget of runs, and the other axis is not part of the name either.
    counts = ruler(cell_setting(axes, config), facts.monitored.loss)
    followed = [
        key
        for key, other in _linked(grid).items()
        if key not in (*counts, *BUDGET) or not (other in SCORED or other.startswith(wiring))
    ]
    others = [
        key
        for key in axes
        if key not in (*SCORED, *followed)
        and not key.startswith(wiring)
        and len(planned.get(key, ())) != 1  # an axis of one value distinguishes nothing
    ]
    baseline = (grid.get("sensitivity") or {}).get("baseline")
    if baseline is not None and PRESET in axes:
        firsts = {axis: planned[axis][0] for axis in wiring if axis in axes}
        baseline = variant({**axes, PRESET: baseline, **firsts}, config, labels, wiring)
    corpus = axes.get(CORPUS) or lookup(config, CORPUS)
    return CellResult(
        id=cell.id,
        name=cell.name,
        run=run,
        axes=axes,
        variant=variant(axes, config, labels, wiring),
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
        config=config,
    )


def read_grid_file(path: Path) -> dict[str, Any]:
    """Read the `grid.yaml` of a grid's folder. Raises `UserError` naming the field."""
    tree = without_gone(read_mapping(path), str(path))
    read(GridFile, tree, str(path))
    return tree


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON or YAML file that holds a mapping. Raises `UserError` naming the file otherwise."""
    try:
        return read_json(path) if path.suffix == ".json" else read_yaml(path)
    except Unsound as error:
        raise UserError(f"{path}: {error}") from error


def _number(path: Path, key: str, value: Any, kind: Callable[[Any], float]) -> Any:
    """A value of a config as a number of this kind, None for null.

    YAML reads `1e-3` as text. Raises `UserError`.
    """
    try:
        number = None if value is None or isinstance(value, bool) else kind(value)
        largest = _LARGEST if kind is int else math.inf
        if value is None or (number is not None and abs(number) < largest):
            return number
    except (TypeError, ValueError, OverflowError):
        pass  # the error is raised below
    raise UserError(f"{path}: {key}: expected a number, found {str(value)[:40]!r}")


def _linked(grid: Mapping[str, Any]) -> dict[str, str]:
    axes = grid.get("axes")
    items = axes.items() if isinstance(axes, Mapping) else ()
    return {axis: str(next(iter(of))) for axis, of in items if isinstance(of, Mapping) and of}


def _wiring(grid: Mapping[str, Any]) -> tuple[str, ...]:
    return (BLOCK, *(grid.get("variants") or ()))


def _labels(grid: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> Labels:
    """The names of values in the grid file, and the published names of corpora without one."""
    tasks = {key_of(name): glue_task_of(str(name)) for name in axes.get(CORPUS, ())}
    corpora = {key: name for key, name in tasks.items() if name}
    named = named_values(grid.get("labels") or {}, axes)
    return {CORPUS: corpora} | named if corpora else named


def _outcome(run: Run) -> tuple[Mapping[str, Any] | None, State, str | None]:
    """Result, state, and the last line of the error of one run."""
    try:
        state = run.state
    except DamagedRun as damage:
        if damage.other_version:
            raise UserError(f"{damage.path}: {damage}") from damage
        return None, "damaged", f"{damage.path.name}: {damage}"
    if state.result is not None:
        return state.result, state.result["status"], None
    if state.state == "missing":
        return None, "unfinished" if state.attempts else "waiting", None
    return None, "pruned" if state.state == "pruned" else "failed", state.error
