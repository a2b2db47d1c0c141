"""Read a grid folder: the plan, and the files of every planned cell so far."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_app.analysis.grid_results import CellResult, GridResults, State, without_strangers
from lightning_app.analysis.papers import number_of, read_grid_file, read_plan
from lightning_app.errors import UserError, named
from lightning_app.grid_axes import (
    BLOCK,
    CORPUS,
    PRESET,
    RATE,
    SEED,
    WARMUP,
    Labels,
    cell_setting,
    group_name,
    key_of,
    lookup,
    named_values,
    variant,
)
from lightning_app.grid_folder import GridFolder
from lightning_app.identity.relevant import without_removed
from lightning_app.records import (
    SEAL,
    OtherVersion,
    Unsound,
    is_sealed,
    read_pruned,
    read_result,
    read_yaml,
)
from lightning_app.rulers import BUDGET, ruler
from lightning_app.run_folder import RunFolder
from lightning_app.run_state import cut_short
from lightning_app.task_facts import TASKS, glue_task_of, task_facts

SCORED = (SEED, WARMUP, RATE)
"""The axes over which scores are computed, within each group of runs."""


def read_results(folder: Path, file: Mapping[str, Any] | None = None) -> GridResults:
    """Read `grid.yaml`, `plan.json` and each cell's `result.json`.

    `file` is the content of a grid file of the same cells, which takes the place of `grid.yaml`: a
    question or a label may be another now. A cell whose result is damaged counts as not finished.
    Raises `UserError` for a folder that is no grid, for a plan or grid file that cannot be
    understood, and for what another version made that this one cannot read.
    """
    folder = Path(folder)
    paths = GridFolder(folder)
    for needed in (paths.specification, paths.plan):
        if not needed.is_file():
            raise UserError(f"{folder}: holds no {needed.name}, so it is not the folder of a grid")
    plan, grid = read_plan(paths.plan), file or read_grid_file(paths.specification)
    scores, metric = grid.get("sensitivity") or {}, grid.get("metric") or {}
    factors, compare = grid.get("factors") or {}, grid.get("compare") or {}
    config, damaged = _config(paths, plan, grid)
    monitored = task_facts(lookup(config, TASKS.field)).monitored
    cells = [_cell(paths, entry, config, grid, plan["axes"]) for entry in plan["cells"]]
    if SEAL not in plan and any(is_sealed(cell.result) for cell in cells if cell.result):
        raise UserError(
            f"{paths.plan}: has lost its {SEAL}: results of its cells have one; `ablate run` makes "
            "the plan again"
        )
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
        cells=tuple(cells),
        pruner=grid.get("pruner") if any(map(_may_be_pruned, cells)) else None,
        published=tuple(grid.get("published") or ()),
        damaged_configs=tuple(damaged),
        factors={name: axis for name, axis in factors.items() if axis in plan["axes"]},
        compare={axis: base for axis, base in compare.items() if axis in plan["axes"]},
        labels=_labels(grid, plan["axes"]),
        without_parent=tuple(cell["name"] for cell in plan.get("waiting", ())),
        linked=_linked(grid),
    )
    return without_strangers(found)


def _config(
    paths: GridFolder, plan: Mapping[str, Any], grid: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The config of one run under the grid's base, and a line for each damaged one before it."""
    base, damaged = grid.get("base_config") or {}, []
    for entry in plan["cells"]:
        path = paths.run(entry["name"]).config
        try:
            with named(path):
                return _merge(without_removed(read_yaml(path)), without_removed(base)), damaged
        except FileNotFoundError:
            continue
        except Unsound as error:
            damaged.append(f"{path}: {error}")
    return dict(base), damaged


def _may_be_pruned(cell: CellResult) -> bool:
    """Whether a pruner ended the cell; without any such cell it has selected nothing."""
    return cell.state in ("pruned", "damaged")


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
    facts = task_facts(axes.get(TASKS.field) or lookup(config, TASKS.field))
    # An axis that follows from another one says nothing more, unless losses count other things at
    # its values, or runs have other budgets, and that one is no part of a group's name: then two
    # variants are of two groups.
    counts = ruler(cell_setting(axes, config), facts.monitored.loss)
    followed = [
        key
        for key, other in _linked(grid).items()
        if key not in (*counts, *BUDGET) or not (other in SCORED or other.startswith(BLOCK))
    ]
    others = [
        key
        for key in axes
        if key not in (*SCORED, *followed)
        and not key.startswith(BLOCK)
        and len(planned.get(key, ())) != 1  # an axis of one value distinguishes nothing
    ]
    baseline = (grid.get("sensitivity") or {}).get("baseline")
    if baseline is not None and PRESET in axes:
        baseline = variant({**axes, PRESET: baseline}, config, labels)
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
        config=config,
    )


def _linked(grid: Mapping[str, Any]) -> dict[str, str]:
    """The axes whose values follow from another one, with that one."""
    axes = grid.get("axes")
    given = axes.items() if isinstance(axes, Mapping) else ()
    return {axis: str(next(iter(of))) for axis, of in given if isinstance(of, Mapping) and of}


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
            why = cut_short(run, result)
            return (None, "failed", why) if why else (result, result["status"], None)
        path = run.pruned
        if prunes and read_pruned(path, identity):
            return None, "pruned", None
    except OtherVersion as error:
        raise UserError(f"{path}: {error}") from error
    except Unsound as error:
        return None, "damaged", f"{path.name}: {error}"
    last = run.last_attempt()
    if not last:
        return None, "waiting", None
    error = run.attempt(last).error_line()
    return (None, "unfinished", None) if error is None else (None, "failed", error)
