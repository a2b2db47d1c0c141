"""The plan of a grid: every cell with its id, resolved and checked; kept in `plan.json`."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

from lightning_app.ablation.cells import Cell, cell_name, cell_tree, combinations
from lightning_app.ablation.config_tree import Tree, canonical, changes, replaced
from lightning_app.ablation.grid_spec import GridSpec
from lightning_app.ablation.plan_checks import (
    check_axes,
    check_baseline,
    check_devices,
    check_identities,
    check_reference,
    check_reported,
)
from lightning_app.atomic_write import write_whole
from lightning_app.data.corpus import corpus_of
from lightning_app.errors import UserError
from lightning_app.grid_axes import SEED, label
from lightning_app.grid_folder import GridFolder
from lightning_app.identity.ids import Identity
from lightning_app.plugins import digests
from lightning_app.records import PLAN_SCHEMA, Newer, Unsound, check_schema, read_json

Resolve = Callable[[dict[str, Any], str], dict[str, Any]]
Identify = Callable[[dict[str, Any]], Identity]
Corpus = Callable[[Tree], str | None]


class DamagedPlan(UserError):
    """`plan.json` cannot be used; `ablate run` makes it again."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cells of a grid, and what they were derived from.

    Attributes:
        name: The grid's name.
        hash: Identifies the axes, the cells and the metric, and so the study.
        made_from: Identifies the content of the grid file and the code that resolved it. While it
            is unchanged, the plan is valid.
        metric: The metric by which cells are compared.
        mode: Whether its `min` or `max` is best.
        axes: The values of each dotted key.
        excluded: The number of combinations that the grid file excludes.
        data: The distinct data configs of the cells.
        cells: The cells, in the order in which they run.
        corpora: The digest of each corpus of `data`, None if it is not on this machine.
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
        """The name of the grid's study in a storage."""
        return f"{self.name}-{self.hash}"


def expand(
    spec: GridSpec, resolve: Resolve, identify: Identify
) -> tuple[Plan, list[dict[str, Any]]]:
    """Return the plan of a grid and the resolved config of every cell, in the same order.

    Raises `UserError` naming file, field and value.
    """
    check_axes(spec, resolve(dict(spec.base_config), spec.source))
    cells, configs = [], []
    corpora: dict[str, str | None] = {}
    for axes, config in _resolved(spec, resolve):
        identity = identify(config)
        name = cell_name(spec, axes, identity.id)
        cells.append(Cell(id=identity.id, name=name, axes=axes, former=identity.former))
        configs.append(config)
        corpora[canonical(config["data"])] = identity.corpus
    if not cells:
        raise UserError(f"{spec.source}: exclude: no cell is left")
    check_identities(spec, cells)
    check_reference(spec, configs)
    check_devices(spec, configs)
    check_baseline(spec, cells)
    check_reported(spec, configs)
    data = {canonical(config["data"]): config["data"] for config in configs}
    plan = Plan(
        name=spec.name,
        hash=_hash(spec, cells),
        made_from=made_from(spec),
        metric=spec.metric,
        mode=spec.mode,
        axes=spec.axes,
        excluded=prod(map(len, spec.axes.values())) - len(cells),
        data=tuple(data.values()),
        corpora=tuple(corpora[key] for key in data),
        cells=tuple(cells),
    )
    return plan, configs


def made_from(spec: GridSpec) -> str:
    """A digest of the sources of a plan: the grid with its base, this package, its libraries, and
    the plug-ins."""
    digest = hashlib.sha256(canonical(spec.tree()).encode())
    for name, of in sorted(digests().items()):
        digest.update(f"{name} {of}".encode())
    for library in ("torch", "lightning", "jsonargparse"):
        digest.update(f"{library} {version(library)}".encode())
    package = Path(str(files("lightning_app")))
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def is_valid(plan: Plan, spec: GridSpec, corpus: Corpus = corpus_of) -> bool:
    """Whether this program would make the same plan from the present corpora."""
    if plan.made_from != made_from(spec) or plan.hash != _hash(spec, plan.cells):
        return False
    if any(cell.name != cell_name(spec, cell.axes, cell.id) for cell in plan.cells):
        return False  # edited or damaged
    return all(corpus(data) == known for data, known in zip(plan.data, plan.corpora, strict=True))


def load_plan(path: Path) -> Plan | None:
    """Read `plan.json`, None if it does not exist.

    Raises:
        DamagedPlan: if it is damaged.
        UserError: if a newer version of this program made it.
    """
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
        again = "`ablate run` makes it again"
        raise DamagedPlan(f"{path}: torn or damaged ({error}); {again}") from error


def runs_with_plugins(folder: GridFolder) -> list[Path]:
    """The folders of the planned runs that use a plug-in; none where there is no sound plan."""
    try:
        plan = load_plan(folder.plan)
    except DamagedPlan:
        return []
    return [] if plan is None else folder.runs_with_plugins(cell.name for cell in plan.cells)


def save_plan(path: Path, plan: Plan) -> None:
    """Write `plan.json`."""
    write_whole(path, json.dumps({"schema": PLAN_SCHEMA, **asdict(plan)}, indent=1))


def _hash(spec: GridSpec, cells: Sequence[Cell]) -> str:
    identifying = [spec.name, spec.metric, spec.mode, spec.axes, [cell.id for cell in cells]]
    return hashlib.sha256(canonical(identifying).encode()).hexdigest()[:16]


def _resolved(spec: GridSpec, resolve: Resolve) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield axes and resolved config of every cell.

    No check compares fields of two sections, so each section is resolved separately: each
    combination of its axes once, on top of the first cell, and its changes are applied to the
    other cells.
    """

    def resolved(axes: Mapping[str, Any]) -> dict[str, Any]:
        where = ", ".join(f"{name}={label(value)}" for name, value in axes.items())
        return resolve(cell_tree(spec.base_config, axes), f"{spec.source} (cell {where})")

    sections = {section: [] for section in map(_section, spec.axes)}
    for axis in spec.axes:
        sections[_section(axis)].append(axis)
    first: dict[str, Any] = {}
    origin: dict[str, Any] = {}
    known: dict[str, list[tuple[str, Any]]] = {}
    for axes in combinations(spec):
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


def _section(axis: str) -> str:
    """The part of a config to which an axis belongs; no check compares fields of two parts."""
    if axis == SEED:
        return "seed"
    if axis.startswith("model.optimizer."):
        return "optimizer"
    return "steps" if axis.startswith(("model.schedule.", "trainer.")) else "model and data"
