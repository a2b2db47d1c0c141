"""The grid file: where it lies, and what it says. Every check here needs no resolved config."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_app import strict_yaml
from lightning_app.ablation.grid_checks import (
    Linked,
    check_axis_values,
    check_cells,
    check_checkpoints,
    check_compare,
    check_config_numbers,
    check_exclude,
    check_factors,
    check_init_from,
    check_labels,
    check_linked,
    check_metric,
    check_pruner,
    check_published,
    check_sensitivity,
    mapping,
)
from lightning_app.ablation.grid_classes import check_grid
from lightning_app.config.schema import hints_of
from lightning_app.errors import UserError, named, nearest
from lightning_app.grid_axes import lookup
from lightning_app.parent import FIELD
from lightning_app.plugins import KEY
from lightning_app.project import PROJECT
from lightning_app.shipped import shipped_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class GridFile:
    """What may be in a grid file."""

    name: str
    """The name of the grid, and of its folder below the folder of experiments."""
    question: str | None = None
    """What the grid asks; null: the comment at the top of the file."""
    base: str | None = None
    """The file of the config under the axes, beside this one; instead of base_config."""
    base_config: dict[str, Any] | None = None
    """The config under the axes, inlined."""
    axes: dict[str, list[Any] | dict[str, Any]] = field(default_factory=dict)
    """The values of dotted keys of a config; {other: {value: value}} for one that follows."""
    exclude: list[dict[str, Any]] | None = None
    """Cells that are left out: those that agree with all of one entry."""
    metric: dict[str, Any] | None = None
    """The name and the mode (min or max) of what decides which run is best."""
    sensitivity: dict[str, Any] | None = None
    """reference_warmup and baseline of the sensitivity to warm-up."""
    pruner: str | None = None
    """median or hyperband: end hopeless cells early."""
    checkpoints: str | None = None
    """Which checkpoints of a finished cell are kept: all, last, best or none."""
    published: str | list[dict[str, Any]] | None = None
    """Figures of papers for the report, or the file of a list of them."""
    labels: dict[str, list[str]] | None = None
    """The names of the values of axes in the report."""
    factors: dict[str, str] | None = None
    """Axes of two values whose effects the report contrasts, by name."""
    compare: dict[str, Any] | None = None
    """Axes whose values the report compares, with the baseline of each."""
    init_from: dict[str, Any] | None = None
    """grid and match: the grid whose runs the cells start from."""


@dataclass(frozen=True, kw_only=True)
class ParentGrid:
    """The grid whose runs the cells of another grid start from.

    A cell starts from the run whose values of the dotted keys `match` are its own.
    """

    spec: "GridSpec"
    match: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """What a grid file says, with its base inlined.

    `axes` maps a dotted key of the run's config to its values; the value of a `linked` axis follows
    from that of another. A cell that agrees with all of one
    entry of `exclude` is left out. `pruner` is the rule that ends hopeless cells early, None for
    none; `checkpoints` says which of a cell are kept once it is done. `published` holds figures of
    papers that the report puts beside ours, in the file or in one that it names. `labels` has the
    names of the values of axes in the report, `factors` the axes of two values whose effects it
    contrasts, by name, `compare` the axes whose values it compares on the metric, with the baseline
    of each. `init_from` is the grid whose runs the cells start from. `source` is the file as
    messages name it, and `base_source` the one that holds the base.
    """

    source: str
    name: str
    question: str
    base_config: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    exclude: tuple[Mapping[str, Any], ...]
    metric: str
    mode: str
    sensitivity: Mapping[str, Any]
    pruner: str | None = None
    checkpoints: str = "all"
    published: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, list[str]] = field(default_factory=dict)
    factors: Mapping[str, str] = field(default_factory=dict)
    compare: Mapping[str, Any] = field(default_factory=dict)
    init_from: ParentGrid | None = None
    linked: Mapping[str, Linked] = field(default_factory=dict)
    base_source: str = ""

    def source_of(self, key: str) -> str:
        """The file that sets a dotted key of the cells' configs, as messages name it."""
        by_axis = any(f"{key}.".startswith(f"{axis}.") for axis in self.axes)
        return self.source if by_axis else self.base_source or self.source

    def tree(self) -> dict[str, Any]:
        """What `grid.yaml` in the grid's folder holds. It can be read as a grid file itself."""
        parent = self.init_from
        linked = {
            axis: {other: dict(zip(self.axes[other], values, strict=True))}
            for axis, (other, values) in self.linked.items()
        }
        return {
            "name": self.name,
            "question": self.question,
            "base_config": self.base_config,
            "axes": {**self.axes, **linked},
            "exclude": list(self.exclude),
            "metric": {"name": self.metric, "mode": self.mode},
            "sensitivity": self.sensitivity,
            "pruner": self.pruner,
            "checkpoints": self.checkpoints,
            "published": list(self.published),
            "labels": dict(self.labels),
            "factors": dict(self.factors),
            "compare": dict(self.compare),
            "init_from": parent and {"grid": parent.spec.tree(), "match": list(parent.match)},
        }


def find_grid(grid: str | Path) -> Path:
    """Return the path of a grid file: `grid` is a path, or the name of an ablation that ships.

    Raises `UserError` listing the names where there is neither.
    """
    path = Path(grid)
    if path.suffix in (".yaml", ".yml") or len(path.parts) != 1:
        if not path.is_file():
            raise UserError(f"{path}: no such grid file")
        return path
    shipped = _shipped()
    if path.name not in shipped:
        known = ", ".join(sorted(shipped)) or "none"
        hint = nearest(path.name, shipped)
        raise UserError(f"{grid}: neither a YAML file nor an ablation that ships ({known}){hint}")
    return shipped[path.name]


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in shipped_folder().glob("*.yaml")}


def read_spec(grid: str | Path) -> GridSpec:
    """Read and check a grid file. Raises `UserError` naming file, field and value."""
    return _read(find_grid(grid), ())


def _read(path: Path, children: tuple[Path, ...]) -> GridSpec:
    """Read a grid file. `children` are the files that name it as their parent grid."""
    if path.resolve() in children:
        raise UserError(f"{path}: init_from.grid: the grid continues itself")
    content, text = strict_yaml.read_yaml_file(path)
    with named(path):
        tree = mapping(content, "the file")
    return _spec(path, tree, text, (*children, path.resolve()))


def _spec(
    path: Path, tree: Mapping[str, Any], text: str, files: tuple[Path, ...], source: str = ""
) -> GridSpec:
    """Check the tree of a grid in the file `path`; `source` is its place there."""
    source = source or str(path)
    with named(source):
        name = _name(tree)
    base_config, base_source = _base(path, tree, source)
    published = _published(path, tree.get("published"))
    parent = _parent(path, tree, files, source)
    with named(source):
        _check_parent(name, base_config, tree.get("axes"), parent)
        axes, linked = check_linked(tree.get("axes"))
        axes = check_axis_values(axes)
        exclude = check_exclude(tree.get("exclude"), axes)
        check_cells(axes, linked, exclude)
        metric, mode = check_metric(tree.get("metric"), base_config, axes)
        sensitivity = check_sensitivity(tree.get("sensitivity"), axes)
        check_config_numbers(base_config, axes)
        check_grid(base_config, axes)
        return GridSpec(
            source=source,
            name=name,
            question=_question(tree.get("question"), text),
            base_config=base_config,
            axes=axes,
            exclude=exclude,
            metric=metric,
            mode=mode,
            sensitivity=sensitivity,
            pruner=check_pruner(tree.get("pruner"), axes, metric, sensitivity),
            checkpoints=check_checkpoints(tree.get("checkpoints")),
            published=published,
            labels=check_labels(tree.get("labels"), axes),
            factors=check_factors(tree.get("factors"), axes),
            compare=check_compare(tree.get("compare"), axes),
            init_from=parent,
            linked=linked,
            base_source=base_source,
        )


def _parent(
    path: Path, tree: Mapping[str, Any], files: tuple[Path, ...], source: str
) -> ParentGrid | None:
    """The parent grid: one that ships, a file beside this one, or a whole grid as a mapping."""
    with named(source):
        given = check_init_from(tree.get("init_from"))
    if given is None:
        return None
    grid, match = given
    if isinstance(grid, Mapping):
        spec = _spec(path, grid, "", files, f"{source}: init_from.grid")
    else:
        is_path = grid.endswith((".yaml", ".yml")) or len(Path(grid).parts) != 1
        with named(f"{source}: init_from.grid"):
            found = find_grid(path.parent / grid if is_path else grid)
        spec = _read(found, files)
    return ParentGrid(spec=spec, match=match)


def _check_parent(name: str, base: Mapping[str, Any], axes: Any, parent: ParentGrid | None) -> None:
    if parent is None:
        return
    spec = parent.spec
    if lookup(base, FIELD) is not None or (isinstance(axes, Mapping) and FIELD in axes):
        raise UserError(f"init_from: cannot be combined with {FIELD}; give one of them")
    if spec.name == name:
        raise UserError(f"init_from.grid: has the name of this grid, '{name}', and so its folder")
    if spec.checkpoints not in ("all", "last"):
        raise UserError(
            f"init_from.grid: '{spec.name}' keeps checkpoints: {spec.checkpoints}, but cells start "
            "from the last checkpoint of a run; set it to last or all there"
        )
    if spec.pruner is not None:
        raise UserError(
            f"init_from.grid: '{spec.name}' has a pruner, and a pruned run cannot be continued; "
            "remove it there"
        )


def _name(tree: Mapping[str, Any]) -> str:
    for key in tree:
        if key == KEY:
            raise UserError(
                f"{KEY}: a grid file may not name code, since a grid file from elsewhere would run "
                f"it; pass --plugin FILE, or list it in {PROJECT} of the working folder"
            )
        if key not in hints_of(GridFile):
            raise UserError(f"unknown key '{key}'{nearest(key, hints_of(GridFile))}")
    name = tree.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            "name: expected letters, digits, '_', '-' and '.' (at most 64, a letter or digit "
            f"first), found {name!r}"
        )
    return name


def _base(path: Path, tree: Mapping[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """The config under the axes, inlined in the grid file or from one beside it, and its file."""
    with named(source):
        if ("base" in tree) == ("base_config" in tree):
            raise UserError("expected one of 'base' (a file) and 'base_config' (a mapping)")
        if "base_config" in tree:
            return mapping(tree["base_config"], "base_config"), source
        if not isinstance(tree["base"], str):
            raise UserError(f"base: expected the path of a YAML file, found {tree['base']!r}")
        base = path.parent / tree["base"]
        if not base.is_file():
            raise UserError(f"base: no such file: {base}")
    content, _ = strict_yaml.read_yaml_file(base)
    with named(base):
        return mapping(content, "the file"), str(base)


def _published(path: Path, given: Any) -> tuple[dict[str, Any], ...]:
    """The figures of papers, inlined in the grid file or a list in a file beside it."""
    if not isinstance(given, str):
        with named(path):
            return check_published(given)
    file = path.parent / given
    with named(path):
        if not file.is_file():
            raise UserError(f"published: no such file: {file}")
    content, _ = strict_yaml.read_yaml_file(file)
    with named(file):
        return check_published(content)


def _question(question: Any, text: str) -> str:
    """The opening comment block, unless the file says it in a field."""
    if question is not None:
        if not isinstance(question, str):
            raise UserError(f"question: expected text, found {question!r}")
        return question
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return "\n".join(lines).strip()
