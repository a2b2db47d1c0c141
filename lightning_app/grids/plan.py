"""The plan of a grid: its cells, resolved and checked, their parents, and the grid's folder."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from importlib.metadata import version
from importlib.resources import files
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from lightning_app.config.classes import classes_of
from lightning_app.config.grid import GridSpec, ParentGrid
from lightning_app.config.identity import Identity, leaves, read_record
from lightning_app.config.sources import without_derived
from lightning_app.config.tree import (
    BLOCK,
    RATE,
    SEED,
    WARMUP,
    Tree,
    canonical,
    changes,
    key_of,
    keys_of,
    label,
    lookup,
    replaced,
    variant,
)
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.files import write_whole
from lightning_app.core.schema import hint_at, kinds_of
from lightning_app.data.sources import corpus_of
from lightning_app.grids.plan_checks import (
    check_axes,
    check_baseline,
    check_budgets,
    check_devices,
    check_identities,
    check_ranked,
    check_reference,
    check_reported,
    unusual_schedules,
)
from lightning_app.grids.search import SearchArm, TrialScore, search_arms, wanted, with_floats
from lightning_app.plugins import KEY, digests, loaded
from lightning_app.runs.folder import NAMED, STORE, GridFolder, RunFolder
from lightning_app.runs.locks import is_held
from lightning_app.runs.parent import FIELD, find_parent
from lightning_app.runs.records import Cell, DamagedPlan, Plan, Waiting, read_plan, save_plan
from lightning_app.runs.run import DamagedRun, Run, RunState
from lightning_app.runs.store import locate_run, place_run
from lightning_app.scores.task_facts import LOSS, known_metrics

_PROBES = ("SignalProbe", "UpdateProbe")
"""The callbacks that write `probes.csv`."""
_LONGEST = 120  # characters of a run's name before its id; file systems allow 255


def combinations(spec: GridSpec) -> Iterator[dict[str, Any]]:
    """Yield the axis values of every cell not excluded: seeds vary slowest, then file order."""
    if spec.asked is not None:
        yield from map(dict, spec.asked)
        return
    excluded: dict[tuple[str, ...], set[tuple[Hashable, ...]]] = {}
    for entry in spec.exclude:
        excluded.setdefault(tuple(entry), set()).add(tuple(map(key_of, entry.values())))
    order = sorted(spec.axes.keys() - spec.linked.keys(), key=list(spec.axes).index)
    order.sort(key=lambda axis: axis != SEED)
    follow = {
        axis: dict(zip(map(key_of, spec.axes[other]), values, strict=True))
        for axis, (other, values) in spec.linked.items()
    }
    for values in product(*(spec.axes[axis] for axis in order)):
        chosen = dict(zip(order, values, strict=True))
        for axis, known in follow.items():
            chosen[axis] = known[key_of(chosen[spec.linked[axis].axis])]
        axes = {axis: chosen[axis] for axis in spec.axes}
        if not any(
            tuple(key_of(axes[axis]) for axis in names) in keys for names, keys in excluded.items()
        ):
            yield axes


def cell_tree(base_config: Tree, axes: Mapping[str, Any]) -> dict[str, Any]:
    """The unresolved config of a cell: the grid's base with its axis values."""
    base = without_derived(base_config)
    return reduce(lambda tree, key: replaced(tree, key, axes[key]), axes, base)


def cell_name(spec: GridSpec, axes: Mapping[str, Any], identity: str) -> str:
    """`<variant>-<short axes>-<id8>`, in characters that every file system accepts."""
    return f"{name_without_id(spec, axes)}-{identity[:8]}".lstrip(".-")


def name_without_id(spec: GridSpec, axes: Mapping[str, Any]) -> str:
    """`<variant>-<short axes>`, for a cell whose id is not known yet."""
    shown = [key for key in axes if not key.startswith(BLOCK)]
    parts = [variant(axes, spec.base_config)]
    parts += [f"{_short(key, shown)}{label(axes[key])}" for key in shown]
    name = re.sub(r"[^A-Za-z0-9_.+=-]+", "_", "-".join(parts))
    return name[:_LONGEST]


def _short(key: str, keys: list[str]) -> str:
    """The last word of a dotted key, or as many as distinguish it from the other keys."""
    if key in (SEED, WARMUP):
        return "seed" if key == SEED else "warmup"
    words = key.split(".")
    for count in range(1, len(words)):
        short = ".".join(words[-count:])
        if sum(other.endswith(f".{short}") for other in keys) == 1:
            return short
    return key


def parent_state(experiments: Path, parent: str, identity: str) -> tuple[str, str | None]:
    """Read the state of the run with this id in the folder `parent` of `experiments`.

    It is `done`, `running`, `missing`, `waiting` for its own parent, or `failed` with the last line
    of the error. Raises `UserError` if its result is damaged or belongs to another run.
    """
    if not parent:
        return "waiting", None
    folder = RunFolder(experiments / parent)
    try:
        run = Run(folder, identity, pruner=None).state
    except DamagedRun as error:
        fix = "; `ablate run` of its grid trains it again" if error.torn else ""
        raise UserError(f"{error.path}: {error}{fix}") from error
    if run.state != "done" and is_held(folder.lock):
        return "running", None
    return run.state, run.error


def waiting_document(cells: Iterable[Waiting], experiments: Path) -> list[dict[str, Any]]:
    """Name, and parent with its state, of each cell that waits, for `--json`."""
    states = ((cell, *parent_state(experiments, cell.parent, cell.parent_id)) for cell in cells)
    return [
        {"name": cell.name, "parent": cell.parent or None, "state": state, "error": error}
        for cell, state, error in states
    ]


def waiting_lines(waiting: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per parent that cells wait for, from `waiting_document`."""
    counts = Counter((each["parent"], each["state"], each["error"]) for each in waiting)
    lines = []
    for (parent, state, error), count in counts.items():
        cells = "1 cell waits" if count == 1 else f"{count} cells wait"
        name = parent or "a run that has no id yet"
        why = f"{state}: {error}" if error else state
        ready = "; `ablate run` starts what it can now" if state == "done" else ""
        lines.append(f"{cells} for {name} ({why}){ready}")
    return lines


def more_lines(more: int) -> list[str]:
    """One line on the cells of later rounds of a search, if there may be some."""
    return [f"at most {more} further cells, which the results of these choose"] if more else []


def lacking_lines(lacking: Mapping[str, Sequence[str]], grid: str) -> list[str]:
    """One line per file that finished runs lack, from `Grid.lacking`."""
    return [
        f"{len(names)} finished cells lack the {file} that this grid keeps, as when another grid "
        f"trained them (such as {names[0]}); `ablate run {grid} --rerun-stale` trains them again"
        for file, names in lacking.items()
    ]


def parent_name(experiments: Path, parent: str) -> str | None:
    """The parent as recorded in the id of a child; None if the parent's folder is gone.

    Empty if the parent cannot be continued now, for example because it is being retrained.
    """
    folder = experiments / parent
    if not folder.is_dir():
        return None
    try:
        return find_parent(str(folder)).name
    except UserError:
        return ""


def _parents_of(
    parent: ParentGrid,
    planned: Iterable[tuple[Cell | Waiting, Tree]],
    configs: Iterable[Tree],
    source: str,
    experiments: Path,
) -> Iterator[tuple[str, str]]:
    """Yield folder and id of the run from which a cell with each of `configs` starts.

    Both are empty if that run waits. `planned` are the cells of the parent grid with their configs;
    folders are relative to `experiments`. Raises `UserError` if a cell does not have a key of
    `match`, if no cell of the parent grid matches, or several do.
    """
    name = parent.spec.name
    grid = GridFolder(experiments / name)

    def values(config: Tree, where: str) -> tuple[Hashable, ...]:
        known = list(keys_of(config))
        for key in parent.match:
            if key not in known:
                raise UserError(
                    f"{source}: init_from.match: a cell of {where} has no "
                    f"'{key}'{nearest(key, known)}"
                )
        return tuple(key_of(lookup(config, key)) for key in parent.match)

    runs: dict[tuple[Hashable, ...], list[tuple[str, tuple[str, str]]]] = {}
    for cell, config in planned:
        run = "", ""
        if isinstance(cell, Cell):  # its grid may not have linked it yet
            path = locate_run(grid, cell.name, cell.id).path
            run = path.relative_to(experiments).as_posix(), cell.id
        runs.setdefault(values(config, f"'{name}'"), []).append((cell.name, run))
    for config in configs:
        found = runs.get(values(config, "this grid"), [])
        if len(found) != 1:
            shown = ", ".join(f"{key}={label(lookup(config, key))}" for key in parent.match)
            said = "no cell" if not found else f"{len(found)} cells"
            such = f" (such as {found[0][0]} and {found[1][0]})" if found else ""
            fix = "add a key that tells them apart" if found else "a cell needs exactly one"
            raise UserError(
                f"{source}: init_from.match: '{name}' has {said} with {shown}{such}; {fix}"
            )
        yield found[0][1]


Resolve = Callable[[dict[str, Any], str], dict[str, Any]]
Identify = Callable[[dict[str, Any]], Identity]
Corpus = Callable[[Tree], str | None]


def expand(
    spec: GridSpec, resolve: Resolve, identify: Identify, experiments: Path = Path("experiments")
) -> tuple[Plan, list[dict[str, Any]]]:
    """Return the plan of a grid and the resolved config of every cell, in the same order.

    The parents of its cells are looked up in the folders of `experiments`. Raises `UserError`
    naming file, field and value.
    """
    if not spec.adapts:
        plan, configs, _ = _expand(spec, resolve, identify, experiments)
        return plan, configs
    known: dict[str, TrialScore] | None = None
    typed, listed = with_floats(spec, _is_float), list(combinations(spec))
    while True:
        asked = search_arms(typed, listed, known or {})
        current = spec.with_cells(list(wanted(asked)))
        plan, configs, _ = _expand(current, resolve, identify, experiments)
        outcomes = outcomes_of(Grid(current, GridFolder(experiments / spec.name), plan))
        if outcomes == (known or {}):
            more = sum(arm.more * len(arm.cells) for arm in asked)
            return replace(plan, more=more), configs
        known = outcomes


def _is_float(field: str) -> bool:
    from lightning_app.config.config import Config  # slow to import, and no supervisor plans

    return float in kinds_of(hint_at(Config, field.split(".")))


def arms_of(grid: "Grid") -> tuple[list[SearchArm], dict[str, TrialScore]]:
    """The arms of a search or a refinement, and the outcomes of the finished cells."""
    assert grid.spec.listed is not None
    known = outcomes_of(grid)
    spec = replace(grid.spec, axes=grid.spec.listed, asked=None, listed=None)
    spec = with_floats(
        spec, lambda field: any(isinstance(cell.axes[field], float) for cell in grid.cells)
    )
    return search_arms(spec, list(combinations(spec)), known), known


def reopened(grid: "Grid") -> "Grid":
    """Return the grid with its search open again where it had ended by results that are gone.

    Results may have been put aside, removed or replaced since. Its next round then asks by the new
    ones. A search by Optuna is only compared where a result is missing: another version of Optuna
    may ask for other cells.
    """
    if not grid.spec.adapts or grid.plan.more or grid.plan.waiting:
        return grid
    ended = all(grid.state(cell).state in ("done", "pruned") for cell in grid.cells)
    if ended and grid.spec.refine is None:
        return grid
    arms, _ = arms_of(grid)
    more = sum(arm.more * len(arm.cells) for arm in arms)
    if ended and not more:
        planned = {canonical(cell.axes) for cell in grid.cells}
        more = int({canonical(axes) for axes in wanted(arms)} != planned)
    if not more:
        return grid
    grid = Grid(grid.spec, grid.folder, replace(grid.plan, more=more))
    grid.save()
    return grid


def outcomes_of(grid: "Grid") -> dict[str, TrialScore]:
    """What came of the finished cells of a search or a refinement, by `canonical` of their axes."""
    found = {}
    for cell in grid.cells:
        run = grid.state(cell)
        if run.result is not None:
            score = score_of(grid.plan, run.result)
            found[canonical(cell.axes)] = TrialScore(score, run.result["status"] != "diverged")
        elif run.pruned is not None:
            value, step = run.pruned["value"], run.pruned["step"]
            found[canonical(cell.axes)] = TrialScore(value, pruned=step)
    return found


_LOWER_IS_BETTER_CAPS = {LOSS: lambda entropy: entropy, "val/perplexity": math.exp}


def score_of(plan: Plan, result: Mapping[str, Any]) -> float:
    """The metric of a run, never NaN. A failed run counts as a model that ignores the context.

    If the metric of such a model is unknown, a run without the metric is worse than all others.
    Raises `UserError` if results lack the metric.
    """
    name, entropy = plan.metric, result["unigram_entropy"]
    diverged = result["status"] == "diverged"
    if name not in result["metrics"] and not diverged:
        known = ", ".join(result["metrics"])
        raise UserError(f"{plan.name}: metric.name: runs report no '{name}' ({known})")
    value = result["metrics"].get(name)
    if name in _LOWER_IS_BETTER_CAPS:  # one cap for all, or a failure beats a run that learns late
        cap = _LOWER_IS_BETTER_CAPS[name](entropy)
        return cap if diverged or value is None else min(value, cap)
    if value is not None:
        return value
    if plan.mode == "max":
        # A correlation is 0 if the context is ignored, and no share is below 0.
        return 0.0 if name in known_metrics() else -math.inf
    return math.inf


def _expand(
    spec: GridSpec, resolve: Resolve, identify: Identify, experiments: Path
) -> tuple[Plan, list[dict[str, Any]], list[dict[str, Any]]]:
    """The plan, and the configs of its cells and of the cells that wait for their parents."""
    chosen = list(combinations(spec))
    check_axes(spec, _resolved_base(spec, resolve, chosen))
    if not chosen:
        raise UserError(f"{spec.source}: exclude: no cell is left")
    waiting: list[Waiting] = []
    without_parent: list[dict[str, Any]] = []
    folders = [""] * len(chosen)
    above: Plan | None = None
    if spec.init_from is not None:
        above, theirs, others = _expand(spec.init_from.spec, resolve, identify, experiments)
        planned = zip((*above.cells, *above.waiting), (*theirs, *others), strict=True)
        alone = list(_resolved(spec, resolve, chosen))  # cells that wait are also checked now
        ours = [config for _, config in alone]
        runs = [*_parents_of(spec.init_from, planned, ours, spec.source, experiments)]
        chosen, folders = [], []
        for (axes, config), (folder, parent) in zip(alone, runs, strict=True):
            if parent_state(experiments, folder, parent)[0] == "done":
                chosen.append(axes)
                folders.append(folder)
            else:
                name = name_without_id(spec, axes)
                waiting.append(Waiting(name=name, axes=axes, parent=folder, parent_id=parent))
                without_parent.append(config)
    cells, configs = [], []
    corpora: dict[str, str | None] = {}
    settings = [
        {**axes, FIELD: str(experiments / folder)} if folder else axes
        for axes, folder in zip(chosen, folders, strict=True)
    ]
    resolved = _resolved(spec, resolve, settings)
    data: dict[str, dict[str, Any]] = {}
    for axes, folder, (_, config) in zip(chosen, folders, resolved, strict=True):
        identity = identify(config)
        name = cell_name(spec, axes, identity.id)
        cells.append(Cell(id=identity.id, name=name, axes=axes, parent=folder))
        configs.append(config)
        section = {**config["data"], "init_from": folder} if folder else config["data"]
        key = canonical(section)
        data[key], corpora[key] = section, identity.corpus
    check_identities(spec, cells)
    whole = [*configs, *without_parent]
    check_budgets(spec, whole)
    check_reference(spec, whole)
    check_devices(spec, whole)
    check_baseline(spec, [*cells, *waiting])
    check_reported(spec, whole)
    check_ranked(spec, cells, configs)
    plan = Plan(
        name=spec.name,
        hash=_hash(spec, cells),
        made_from=made_from(spec),
        metric=spec.metric,
        mode=spec.mode,
        axes=dict(spec.axes),
        excluded=_excluded(spec),
        data=tuple(data.values()),
        corpora=tuple(corpora[key] for key in data),
        cells=tuple(cells),
        waiting=tuple(waiting),
        parents={
            **(above.parents if above else {}),
            **{
                folder: find_parent(str(experiments / folder)).name
                for folder in dict.fromkeys(folders)
                if folder
            },
        },
        parent_data=(*above.parent_data, *above.data) if above else (),
        parent_corpora=(*above.parent_corpora, *above.corpora) if above else (),
        warnings=unusual_schedules(whole),
    )
    return plan, configs, without_parent


def _resolved_base(
    spec: GridSpec, resolve: Resolve, chosen: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The resolved base or, if it is not a valid run by itself, the first valid cell."""
    try:
        return resolve(dict(spec.base_config), spec.base_source or spec.source)
    except UserError as error:
        try:
            # An axis may replace the refused value, such as a warm-up longer than the run.
            return resolve(cell_tree(spec.base_config, dict(chosen[0])), spec.source)
        except (UserError, IndexError):
            raise error from None


def _excluded(spec: GridSpec) -> int:
    if not spec.exclude:
        return 0
    count = prod(len(values) for axis, values in spec.axes.items() if axis not in spec.linked)
    return count - sum(1 for _ in combinations(replace(spec, asked=None)))


def made_from(spec: GridSpec) -> str:
    """A digest of the sources of a plan: the grid with its base, this package, its libraries and
    the plug-ins."""
    digest = hashlib.sha256(canonical(spec.tree()).encode())
    for name, of in sorted(digests().items()):
        digest.update(f"{name} {of}".encode())
    for library in ("torch", "lightning", "pydantic"):
        digest.update(f"{library} {version(library)}".encode())
    package = Path(str(files("lightning_app")))
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def is_valid(
    plan: Plan, spec: GridSpec, corpus: Corpus = corpus_of, experiments: Path = Path("experiments")
) -> bool:
    """Whether this program would make the same plan from the current corpora and parents.

    A missing parent counts as unchanged: its finished children are still its children. So does
    a missing corpus of the parent grid; an edited one makes other parents. Nor does it matter
    if a parent has finished since: `Plan.waiting` holds its children.
    """
    if spec.adapts:
        spec = spec.with_cells([cell.axes for cell in (*plan.cells, *plan.waiting)])
    if plan.made_from != made_from(spec) or plan.hash != _hash(spec, plan.cells):
        return False
    if any(
        parent_name(experiments, each) not in (None, plan.parents[each]) for each in plan.parents
    ):
        return False
    if any(
        _found(corpus, data) not in (None, known)
        for data, known in zip(plan.parent_data, plan.parent_corpora, strict=True)
    ):
        return False
    return all(corpus(data) == known for data, known in zip(plan.data, plan.corpora, strict=True))


def _found(corpus: Corpus, data: Tree) -> str | None:
    try:
        return corpus(data)
    except UserError:
        return None


def load_plan(path: Path) -> Plan | None:
    """`read_plan`, whatever `grid.yaml` is next to it; None if it does not exist."""
    try:
        return read_plan(path, beside=False)
    except FileNotFoundError:
        return None


def runs_with_plugins(folder: GridFolder) -> list[Path]:
    """The folders of the planned runs that use a plug-in; none without a sound plan."""
    found = []
    with suppress(DamagedPlan):
        plan = load_plan(folder.plan)
        for cell in plan.cells if plan else ():
            with suppress(UserError):  # a wrong link, which the reader of the run refuses
                run = locate_run(folder, cell.name, cell.id)
                found += [run.path] if run.plugins.is_file() else []
    return found


def other_versions(grid: "Grid") -> list[str]:
    """Count the finished runs that differ from cells of this grid only by the code of a plug-in."""
    now = {f"{KEY}.{name}": digest for name, digest in digests().items()}
    store, counts = grid.folder.experiments / STORE, Counter[str]()
    for path in store.iterdir() if now and store.is_dir() else ():
        run = RunFolder(path)
        apart = path.name in grid.by_id or not path.name.isalnum()
        if apart or not (run.plugins.is_file() and run.result.is_file()):
            continue
        with suppress(UserError):  # damaged, and of no cell
            if (record := read_record(path)) is not None:
                known = {k: v for k, v in now.items() if record.config.get(k, v) != v}
                if record.with_config(known).id in grid.by_id:
                    counts.update([*known])
    shown = {f"{KEY}.{name}": Path(each.source).name for name, each in loaded().items()}
    return [f"{n} finished runs with another {shown[key]}" for key, n in sorted(counts.items())]


def _hash(spec: GridSpec, cells: Sequence[Cell]) -> str:
    identifying = [spec.name, spec.metric, spec.mode, spec.axes, [cell.id for cell in cells]]
    return hashlib.sha256(canonical(identifying).encode()).hexdigest()[:16]


def _resolved(
    spec: GridSpec, resolve: Resolve, cells: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each of `cells` (its fields by dotted key) with its resolved config.

    No check compares fields of two sections, except for axes of `CHECKED_TOGETHER`, so each
    section is resolved separately: every combination of its axes once, on top of the first cell,
    and its changes are applied to the other cells.
    """

    def resolved(axes: Mapping[str, Any]) -> dict[str, Any]:
        where = ", ".join(f"{name}={label(value)}" for name, value in axes.items())
        return resolve(cell_tree(spec.base_config, axes), f"{spec.source} (cell {where})")

    sections: dict[str, list[str]] = {}
    for axis in cells[0] if cells else ():
        sections.setdefault(_section(axis), []).append(axis)
    if CHECKED_TOGETHER & {axis for axes in sections.values() for axis in axes}:
        joined = [axis for name in _SECTIONS for axis in sections.pop(name, ())]
        sections[_SECTIONS[0]] = joined
    first: dict[str, Any] = {}
    origin: dict[str, Any] = {}
    known: dict[str, list[tuple[str, Any]]] = {}
    for axes in cells:
        if not first:
            first, origin = axes, resolved(axes)
        config = origin
        for section in sections.values():
            values = {axis: axes[axis] for axis in section}
            key = canonical(values)
            if key not in known:
                known[key] = changes(origin, resolved({**first, **values}))
            for path, value in known[key]:
                config = replaced(config, path, value)
        yield axes, config


CHECKED_TOGETHER = frozenset(
    {
        *("model.schedule.warmup_of", "model.schedule.kind", "model.schedule.batch_warmup_steps"),
        *("model.optimizer.weight_decay", "model.optimizer.kind", "trainer.callbacks"),
        *("model.block.branch_ramp", "model.block", "model.optimizer", "model.schedule"),
        *("model", "trainer"),
    }
)
"""The axes whose values are checked against other sections: a run may end before its ramp does, a
model may lack the parameters of `warmup_of`, blocks of unit matrices refuse decay, streams a
warm-up of the batch, QKClip parts and optimizers, and an optimizer that averages weights refuses
parts and schedules"""
_SECTIONS = ("model and data", "optimizer", "steps")


def _section(axis: str) -> str:
    """The part of a config to which an axis belongs; no check compares fields of two parts."""
    if axis in (SEED, RATE):
        return axis
    if axis.startswith("model.optimizer"):
        return _SECTIONS[1]
    return _SECTIONS[2 if axis.startswith(("model.schedule", "trainer")) else 0]


def _probes(trainer: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The probes among the callbacks of a config, with the arguments that are not null."""
    named = (
        (path.rpartition(".")[2], given) for path, given in classes_of(trainer.get("callbacks"))
    )
    return [
        (name, {key: value for key, value in given.items() if value is not None})
        for name, given in named
        if name in _PROBES
    ]


@dataclass(frozen=True)
class Grid:
    """The content of the grid file, the grid's folder, and its plan, each read once."""

    spec: GridSpec
    folder: GridFolder
    plan: Plan

    def __post_init__(self) -> None:
        if self.spec.adapts and self.spec.asked is None:
            cells = [cell.axes for cell in (*self.plan.cells, *self.plan.waiting)]
            object.__setattr__(self, "spec", self.spec.with_cells(cells))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.plan.cells

    @property
    def data(self) -> tuple[Mapping[str, Any], ...]:
        """The distinct data configs of the cells, with the paths of their parents."""
        if self.spec.init_from is None:
            return self.plan.data
        parents = (str(self.folder.path.parent / data["init_from"]) for data in self.plan.data)
        return tuple({**d, "init_from": p} for d, p in zip(self.plan.data, parents, strict=True))

    @cached_property
    def by_id(self) -> dict[str, Cell]:
        """The cells by their ids."""
        return {cell.id: cell for cell in self.cells}

    @property
    def prunes(self) -> bool:
        """Whether the grid has a pruner."""
        return self.spec.pruner is not None

    @property
    def awaits_round(self) -> bool:
        """Whether all cells of a search have ended, so that its next round can be asked for."""
        if not self.plan.more or self.plan.waiting:
            return False
        return all(self.state(cell).state in ("done", "pruned") for cell in self.cells)

    def run(self, cell: Cell) -> RunFolder:
        """The folder of a cell's run. Raises `UserError`: as `locate_run`."""
        return locate_run(self.folder, cell.name, cell.id)

    def place(self, cell: Cell) -> RunFolder:
        """The folder of a cell's run, created if missing."""
        return place_run(self.folder, cell.name, cell.id)

    def state(self, cell: Cell, *, with_metric: bool = True) -> RunState:
        """The state of a cell on disk; `with_metric`: a trained run must report the grid's metric.

        Raises `UserError` if its result is damaged, not the cell's, or from another version.
        """
        try:
            return self._run(cell, with_metric).state
        except DamagedRun as error:
            fix = f"; `ablate run {self.folder.name}` moves the run aside, so that it trains again"
            raise UserError(f"{error.path}: {error}{fix if error.torn else ''}") from error

    def damage(self, cell: Cell) -> DamagedRun | None:
        """The damage because of which a finished run has to be trained again."""
        try:
            _ = self._run(cell).state
        except DamagedRun as error:
            return error if error.torn else None
        return None

    def _run(self, cell: Cell, with_metric: bool = True) -> Run:
        metric = self.plan.metric if with_metric else None
        return Run(self.run(cell), cell.id, metric, pruner=self.name if self.prunes else None)

    def lacking(self, runs: Mapping[str, RunState]) -> dict[str, list[str]]:
        """The finished cells whose runs lack files that this grid keeps, by missing file.

        They were trained by another grid, which keeps less, or has other probes. `runs` holds run
        states by cell id.
        """
        found: dict[str, list[str]] = {}
        keep = self.spec.checkpoints
        for cell in self.cells:
            result = runs[cell.id].result if cell.id in runs else None
            if result is None or result["outcome"] == "non_finite":
                continue  # such a run may have no checkpoint
            folder, trainer = self.run(cell), self.tree(cell).get("trainer") or {}
            saves = trainer.get("enable_checkpointing") is not False
            kept = [folder.checkpoint(name) for name in NAMED if saves and keep in ("all", name)]
            missing = [path.name for path in kept if not path.is_file()]
            if probes := _probes(trainer):  # which need not be due within the run
                there = _probes(Run(folder).config["trainer"])
                if any(probe not in there for probe in probes):
                    missing.append(folder.probes.name)
            for name in missing:
                found.setdefault(name, []).append(cell.name)
        return found

    def tree(self, cell: Cell) -> dict[str, Any]:
        """The config of a cell as in the grid file: without defaults."""
        parent = {FIELD: str(self.folder.path.parent / cell.parent)} if cell.parent else {}
        return cell_tree(self.spec.base_config, {**cell.axes, **parent})

    def pack(self, cell: Cell) -> tuple[int, str]:
        """The width of the pack of a cell, and what the cells have in common that may be in it."""
        if cell.id not in self._packs:
            given = dict(leaves(self.tree(cell)))
            common = {key: value for key, value in given.items() if key not in (RATE, WARMUP)}
            text = json.dumps(common, sort_keys=True, default=str)
            self._packs[cell.id] = given.get("model.pack", 1), text
        return self._packs[cell.id]

    @cached_property
    def _packs(self) -> dict[str, tuple[int, str]]:
        return {}

    def variant(self, cell: Cell | Waiting) -> str:
        """The variant of a cell: the block described by its axes."""
        return self.spec.variant(cell.axes)

    def is_saved(self) -> bool:
        """Whether `grid.yaml` has the content that `save` would write, and `plan.json` seals it."""
        try:
            read_plan(self.folder.plan)
            return self.folder.specification.read_text(encoding="utf-8") == self._text()
        except (OSError, ValueError, UserError):
            return False

    def save(self) -> None:
        """Write `grid.yaml` and `plan.json`, the plan last."""
        write_whole(self.folder.specification, self._text())
        save_plan(self.folder.plan, self.plan)

    def _text(self) -> str:
        return strict_yaml.dump_yaml(self.spec.tree(), allow_unicode=True, width=100)
