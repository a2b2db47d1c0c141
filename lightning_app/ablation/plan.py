"""The cells of a grid: every combination of the axes, checked, identified and named."""

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from importlib.metadata import version
from importlib.resources import files
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml

from lightning_app.ablation.grid import BLOCK, PRESET, SEED, WARMUP, Grid, key_of, same
from lightning_app.data.corpus import corpus_of
from lightning_app.errors import UserError, nearest
from lightning_app.files import write_whole
from lightning_app.identity.ids import Identity
from lightning_app.records import PLAN_SCHEMA, Newer, Unsound, check_schema, read_json
from lightning_app.task_facts import DEFAULT_TASK, GENERAL, TASKS

Tree = Mapping[str, Any]
Resolve = Callable[[dict[str, Any], str], dict[str, Any]]
Identify = Callable[[dict[str, Any]], Identity]
Corpus = Callable[[Tree], str | None]

DEVICES = "trainer.devices"

_LONGEST = 120  # characters of a run's name before its id; file systems allow 255


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid: `axes` maps each dotted key to this cell's value, in the file's order.

    `former` is its id of schema 1, empty where that schema could not say what the cell is.
    """

    id: str
    name: str
    axes: Mapping[str, Any]
    former: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a grid file comes to.

    `hash` identifies the axes, the cells and the metric, hence the study. `made_from` identifies
    the grid's content and the code that resolved it: where it is unchanged, the plan still holds.
    `data` lists the distinct data configs of the cells, `corpora` the digest of what the corpus of
    each holds, None for one that is not on this machine.
    """

    name: str
    hash: str
    made_from: str
    metric: str
    mode: str
    axes: Mapping[str, list[Any]]
    excluded: int
    data: tuple[Mapping[str, Any], ...]
    cells: tuple[Cell, ...]
    corpora: tuple[str | None, ...] = ()

    @property
    def study(self) -> str:
        return f"{self.name}-{self.hash}"


def combinations(grid: Grid) -> Iterator[dict[str, Any]]:
    """Yield the axes' values of every cell that is not excluded: seeds slowest, then file order."""
    excluded: dict[tuple[str, ...], set[tuple[Hashable, ...]]] = {}
    for entry in grid.exclude:
        excluded.setdefault(tuple(entry), set()).add(tuple(map(key_of, entry.values())))
    order = sorted(grid.axes, key=lambda axis: axis != SEED)
    for values in product(*(grid.axes[axis] for axis in order)):
        chosen = dict(zip(order, values, strict=True))
        axes = {axis: chosen[axis] for axis in grid.axes}
        if not any(
            tuple(key_of(axes[axis]) for axis in names) in keys for names, keys in excluded.items()
        ):
            yield axes


def expand(grid: Grid, resolve: Resolve, identify: Identify) -> tuple[Plan, list[dict[str, Any]]]:
    """Return the plan of a grid and the resolved config of every cell, in the same order.

    Raises `UserError` naming file, field and value.
    """
    _check_axes(grid, resolve(dict(grid.base_config), grid.source))
    cells, configs = [], []
    corpora: dict[str, str | None] = {}
    for axes, config in _resolved(grid, resolve):
        identity = identify(config)
        name = _cell_name(grid, axes, identity.id)
        cells.append(Cell(id=identity.id, name=name, axes=axes, former=identity.former))
        configs.append(config)
        corpora[_canonical(config["data"])] = identity.corpus
    if not cells:
        raise UserError(f"{grid.source}: exclude: no cell is left")
    _check_identities(grid, cells)
    _check_reference(grid, configs)
    _check_devices(grid, configs)
    _check_baseline(grid, cells)
    _check_metric(grid, configs)
    identifying = [grid.name, grid.metric, grid.mode, grid.axes, [cell.id for cell in cells]]
    data = {_canonical(config["data"]): config["data"] for config in configs}
    plan = Plan(
        name=grid.name,
        hash=_digest(_canonical(identifying)),
        made_from=made_from(grid),
        metric=grid.metric,
        mode=grid.mode,
        axes=grid.axes,
        excluded=prod(map(len, grid.axes.values())) - len(cells),
        data=tuple(data.values()),
        corpora=tuple(corpora[key] for key in data),
        cells=tuple(cells),
    )
    return plan, configs


def cell_tree(base_config: Tree, axes: Mapping[str, Any]) -> dict[str, Any]:
    """The unresolved config of a cell: the grid's base with the values of the axes set."""
    return reduce(lambda tree, key: _replaced(tree, key, axes[key]), axes, dict(base_config))


def variant(axes: Mapping[str, Any], base_config: Tree) -> str:
    """The values of the block's axes joined by "+": the preset alone, others as `key=value`."""
    others = [key for key in axes if key.startswith(BLOCK) and key != PRESET]
    parts = [_label(axes[PRESET])] if PRESET in axes else []
    parts += [f"{key.removeprefix(BLOCK)}={_label(axes[key])}" for key in others]
    return "+".join(parts) or _label(_field(base_config, PRESET) or "base")


def devices_of(grid: Grid) -> int:
    """How many devices a cell of a grid takes, as its file says; `auto` and -1 are one.

    Raises `UserError` for a list of devices.
    """
    axis = grid.axes.get(DEVICES)
    return _devices(grid, axis[0] if axis else _field(grid.base_config, DEVICES))


def made_from(grid: Grid) -> str:
    """Identify what a plan is made from: the grid with its base, this package, its libraries."""
    digest = hashlib.sha256(_canonical(grid.tree()).encode())
    for library in ("torch", "lightning", "jsonargparse"):
        digest.update(f"{library} {version(library)}".encode())
    package = Path(str(files("lightning_app")))
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load_plan(directory: Path) -> Plan | None:
    """Read `plan.json` of a grid's folder, None where there is none.

    Raises `UserError` for one that is damaged or of a newer version.
    """
    path = directory / "plan.json"
    try:
        tree = read_json(path)
        check_schema(tree, PLAN_SCHEMA)
        del tree["schema"]
        cells = tuple(Cell(**cell) for cell in tree.pop("cells"))
        data = tuple(tree["data"])
        corpora = tuple(tree.get("corpora") or [None] * len(data))
        return Plan(**{**tree, "data": data, "corpora": corpora, "cells": cells})
    except FileNotFoundError:
        return None
    except Newer as error:
        raise UserError(f"{path}: {error}") from error
    except (Unsound, KeyError, TypeError) as error:
        again = "remove the file to plan anew"
        raise UserError(f"{path}: torn or damaged ({error}); {again}") from error


def still_holds(plan: Plan, grid: Grid, corpus: Corpus = corpus_of) -> bool:
    """Whether a saved plan is what the grid, this program and the corpora of now would give."""
    if plan.made_from != made_from(grid):
        return False
    return all(corpus(data) == known for data, known in zip(plan.data, plan.corpora, strict=True))


def save_plan(directory: Path, grid: Grid, plan: Plan) -> None:
    """Write `grid.yaml` and `plan.json`, the plan last."""
    question = yaml.safe_dump(grid.tree(), sort_keys=False, allow_unicode=True, width=100)
    write_whole(directory / "grid.yaml", question)
    write_whole(
        directory / "plan.json", json.dumps({"schema": PLAN_SCHEMA, **asdict(plan)}, indent=1)
    )


def _resolved(grid: Grid, resolve: Resolve) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield axes and resolved config of every cell.

    Sections of the config that no check compares are resolved apart: each combination of one
    section's axes once, upon the first cell, and its changes are carried over to the others.
    """

    def resolved(axes: Mapping[str, Any]) -> dict[str, Any]:
        where = ", ".join(f"{name}={_label(value)}" for name, value in axes.items())
        return resolve(cell_tree(grid.base_config, axes), f"{grid.source} (cell {where})")

    sections = {section: [] for section in map(_section, grid.axes)}
    for axis in grid.axes:
        sections[_section(axis)].append(axis)
    first: dict[str, Any] = {}
    origin: dict[str, Any] = {}
    changes: dict[str, list[tuple[str, Any]]] = {}
    for axes in combinations(grid):
        if not first:
            first, origin = axes, resolved(axes)
        config = origin
        for section in sections.values():
            values = {axis: axes[axis] for axis in section}
            key = _canonical(values)
            if key not in changes:
                changes[key] = _changes(origin, resolved({**first, **values}))
            for path, value in changes[key]:
                config = _replaced(config, path, value)
        yield axes, config


def _section(axis: str) -> str:
    """The part of a config within which alone one field may forbid the value of another."""
    if axis == SEED:
        return "seed"
    if axis.startswith("model.optimizer."):
        return "optimizer"
    return "steps" if axis.startswith(("model.schedule.", "trainer.")) else "model and data"


def _check_axes(grid: Grid, base: Tree) -> None:
    """Every axis names a field of the resolved base, or lies inside of one that the base leaves."""
    fields = list(_fields(base))
    for axis in grid.axes:
        parent = _field(base, axis.rpartition(".")[0])
        inside = axis.rpartition(".")[0] in fields and (parent is None or parent == {})
        if axis not in fields and not inside:
            raise UserError(f"{grid.source}: axes: no field '{axis}'{nearest(axis, fields)}")


def _check_identities(grid: Grid, cells: list[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.id, cell)
        if other is not cell:
            axes = [key for key in cell.axes if not same(cell.axes[key], other.axes[key])]
            values = [f"{key}={_label(each.axes[key])}" for each in (other, cell) for key in axes]
            raise UserError(f"{grid.source}: axes: the same experiment twice: {', '.join(values)}")


def _check_reference(grid: Grid, configs: list[dict[str, Any]]) -> None:
    schedules = [config["model"]["schedule"] for config in configs]
    schedules = [each for each in schedules if each["kind"] != "constant"]
    schedules = [each for each in schedules if each["coupling"] == "decoupled"]
    longest = max((each["warmup_steps"] for each in schedules), default=0)
    for each in schedules:
        if each["reference_steps"] is None or each["reference_steps"] < longest:
            raise UserError(
                f"{grid.source}: model.schedule.reference_steps: {each['reference_steps']} is "
                f"below the largest warm-up of the grid; a decoupled schedule needs {longest} or "
                f"more, the same for every cell"
            )


def _check_devices(grid: Grid, configs: list[dict[str, Any]]) -> None:
    """A cell runs on one host, on as many of its devices as all other cells."""
    devices = {_devices(grid, config["trainer"].get("devices")) for config in configs}
    if len(devices) > 1:
        found = ", ".join(map(str, sorted(devices)))
        raise UserError(f"{grid.source}: trainer.devices: {found}; one number for all cells")
    for config in configs:
        nodes = config["trainer"].get("num_nodes", 1)
        if nodes != 1:
            raise UserError(
                f"{grid.source}: trainer.num_nodes: {nodes}; each cell of a grid runs on 1 host"
            )


def _devices(grid: Grid, value: Any) -> int:
    if value in (None, "auto", -1, "-1"):
        return 1
    if isinstance(value, list) or (isinstance(value, str) and "," in value):
        raise UserError(
            f"{grid.source}: trainer.devices: {value!r} names devices; the supervisor hands them "
            f"out, so say how many each cell takes"
        )
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{grid.source}: trainer.devices: expected 1 or more, found {value!r}")
    return int(text)


def _check_baseline(grid: Grid, cells: list[Cell]) -> None:
    baseline = grid.sensitivity.get("baseline")
    if baseline is None or PRESET in grid.axes:
        return
    known = list(dict.fromkeys(variant(cell.axes, grid.base_config) for cell in cells))
    if baseline not in known:
        raise UserError(
            f"{grid.source}: sensitivity.baseline: no variant '{baseline}' "
            f"({', '.join(known)}){nearest(baseline, known)}"
        )


def _check_metric(grid: Grid, configs: list[dict[str, Any]]) -> None:
    """Every cell reports the metric by which the grid is judged."""
    split = grid.metric.partition("/")[0]
    owners = [n for n, task in TASKS.items() if grid.metric in [s.metric for s in task.scores]]
    for config in configs:
        objective = config["model"].get("objective", {})
        reports = grid.metric in GENERAL or objective.get("kind", DEFAULT_TASK) in owners
        conditions = {
            "evaluate_test: true": split != "test" or objective.get("evaluate_test", True),
            f"kind: {' or '.join(owners)}": reports,
            "validation_bleu: 1 or more": grid.metric != "val/bleu"
            or objective.get("validation_bleu", 1) > 0,
        }
        for condition, holds in conditions.items():
            if not holds:
                raise UserError(
                    f"{grid.source}: metric.name: a cell reports '{grid.metric}' only with "
                    f"model.objective.{condition}"
                )


def _cell_name(grid: Grid, axes: Mapping[str, Any], identity: str) -> str:
    """`<variant>-<short axes>-<id8>` of letters that are safe in a file's name."""
    shown = [key for key in axes if not key.startswith(BLOCK)]
    parts = [variant(axes, grid.base_config)]
    parts += [f"{_short(key, shown)}{_label(axes[key])}" for key in shown]
    name = re.sub(r"[^A-Za-z0-9_.+=-]+", "_", "-".join(parts))
    return f"{name[:_LONGEST]}-{identity[:8]}".lstrip(".-")


def _short(key: str, keys: list[str]) -> str:
    """The last word of a dotted key, or as many as tell it from the other keys."""
    if key in (SEED, WARMUP):
        return "seed" if key == SEED else "warmup"
    words = key.split(".")
    for count in range(1, len(words)):
        short = ".".join(words[-count:])
        if sum(other.endswith(f".{short}") for other in keys) == 1:
            return short
    return key


def _label(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _changes(old: Tree, new: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted key and new value of every field in which two resolved configs differ."""
    found = []
    for key in new:
        before, after = old[key], new[key]
        if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
            found += _changes(before, after, f"{prefix}{key}.")
        elif before != after or type(before) is not type(after):
            found.append((f"{prefix}{key}", after))
    return found


def _replaced(tree: Tree, dotted: str, value: Any) -> dict[str, Any]:
    """A tree with one field exchanged, sharing the rest."""
    key, _, rest = dotted.partition(".")
    inner = tree.get(key)
    if rest:
        value = _replaced(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**tree, key: value}


def _fields(tree: Tree, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{key}.")


def _field(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
