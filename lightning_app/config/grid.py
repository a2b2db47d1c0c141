"""The strict reader of grid files: every check that needs no resolved config.

A grid file may come from someone else. Nothing is imported and no file is read because it names
it: classes are looked up in the tables of `config.classes`.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

from lightning_app.config.classes import CLASS_FIELDS, FIELDS, known_path, refusal, require_plugin
from lightning_app.config.rulers import MetricChoice, check_matters, check_metric
from lightning_app.config.rules import GRID_RULES, GridSubject, check_rules, packs
from lightning_app.config.search import Refine, Search, Until
from lightning_app.config.sources import merged, nested, with_warmup
from lightning_app.config.trainer import ClassSpec, TrainerConfig
from lightning_app.config.tree import (
    BLOCK,
    PRESET,
    RATE,
    SECTIONS,
    SEED,
    check_numbers,
    check_seed,
    key_of,
    label,
    named_values,
    variant,
)
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, absent, named, nearest
from lightning_app.core.project import PROJECT, shipped_folder
from lightning_app.core.schema import read
from lightning_app.plugins import KEY

_WORDS: Mapping[str, tuple[str, ...]] = {
    "accelerator": ("auto", "cpu", "cuda", "gpu", "mps", "tpu"),
    "profiler": ("advanced", "pytorch", "simple"),
    "strategy": (
        "auto",
        "ddp",
        "ddp_find_unused_parameters_false",
        "ddp_find_unused_parameters_true",
        "fsdp",
    ),
}
"""Trainer fields that take a class or a word, and the words allowed in a grid file."""

_TEXT = ("api_key", "artifact_location", "checkpoint_name", "comment", "dir", "dirpath")
_TEXT += ("experiment_name", "filename", "filename_suffix", "monitor", "name", "prefix", "project")
_TEXT += ("run_name", "save_dir", "sub_dir", "tracking_uri", "version", "workspace")
"""Class arguments that may be any text; others must be one word and not a path."""

_FOLDERS = ("dir", "dirpath", "save_dir", "sub_dir")
"""Those of them that name a folder: in a cell it is inside the folder of the run."""

_ADDRESSES = ("artifact_location", "tracking_uri")
_ADDRESS = re.compile(r"(?!file:|sqlite:)[a-z][a-z0-9+.-]*://[^/]")
_WORD = re.compile(r"[\w:=-]*")


def check_grid(base: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> None:
    """Refuse a grid with a class that is in no table or that writes outside the folder
    of its run: see `check_config`.

    Raises:
        UserError: naming the field and its value.
    """
    check_config(base)
    _check_places(base)
    for axis, values in axes.items():
        for value in values if axis.partition(".")[0] not in ("model", "data") else values[:1]:
            tree = merged(base, nested({axis: value}))
            check_config(tree)
            _check_places(tree)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config, written or resolved, with an unknown section or a class outside the tables.

    Raises:
        UserError: naming the field and its value.
    """
    for key, value in config.items():
        if key not in SECTIONS:
            hint = nearest(str(key), SECTIONS)
            raise UserError(f"unknown key '{key}'; a config has {', '.join(SECTIONS)}{hint}")
        if key != "seed_everything" and not isinstance(value, Mapping):
            raise UserError(f"{key}: expected a mapping, found {value!r}")
    tree = nested(config)
    trainer = read(TrainerConfig, tree.get("trainer", {}), at="trainer")
    for name in FIELDS:
        value = getattr(trainer, name)
        words = _WORDS.get(name, ())
        if isinstance(value, str) and value not in words:
            raise UserError(
                f"trainer.{name}: expected one of {', '.join(words)}, or a mapping "
                f"{{class_path, init_args}}, found {value!r}{nearest(value, words)}"
            )
        for spec in value if isinstance(value, list) else [value]:
            if isinstance(spec, ClassSpec):
                _check_class(f"trainer.{name}", spec)
    for name in ("model", "data"):
        section = tree.get(name, {})
        path = section.get("class_path")
        if isinstance(path, str):
            require_plugin(name, path)
        elif path is not None:
            raise UserError(f"{name}.class_path: expected a text or null, found {path!r}")
        _check_data(f"{name}.init_args", section.get("init_args"), text=False)


def _check_class(field: str, spec: ClassSpec) -> None:
    if known_path(spec.class_path) is None:
        raise UserError(f"{field}.class_path: {refusal(spec.class_path)}")
    if spec.dict_kwargs is not None:
        raise UserError(
            f"{field}: unknown key 'dict_kwargs'; expected {' and '.join(CLASS_FIELDS)}"
        )
    for name, value in (spec.init_args or {}).items():
        _check_data(f"{field}.init_args.{name}", value, text=name in _TEXT)


def _check_data(field: str, value: Any, *, text: bool) -> None:
    """Refuse an argument that names a class or, unless `text` is allowed, a path or code."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key in CLASS_FIELDS:
                raise UserError(f"{field}: a grid file may not have the key '{key}' there")
            _check_data(f"{field}.{key}", part, text=text)
    elif isinstance(value, list):
        for part in value:
            _check_data(field, part, text=text)
    elif isinstance(value, str) and not text and not _WORD.fullmatch(value):
        raise UserError(f"{field}: a grid file may not name files or code there, found {value!r}")


def place_below(folder: Path, trainer: dict[str, Any]) -> None:
    """Make the classes of a complete section `trainer` write below `folder` if they name a folder.

    Relative to the working folder, they could replace the files of another run.
    """
    for field in FIELDS:
        for _, arguments in _arguments_of(field, trainer.get(field)):
            for key in _FOLDERS:
                if isinstance(arguments.get(key), str):
                    arguments[key] = str(folder / arguments[key])


def _check_places(config: Mapping[str, Any]) -> None:
    for field, arguments in _arguments_of("trainer", nested(config).get("trainer")):
        for name, value in arguments.items():
            _check_place(f"{field}.{name}", name, value)


def _arguments_of(field: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of each class in the value of a field."""
    if isinstance(value, list):
        for part in value:
            yield from _arguments_of(field, part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key == "init_args" and isinstance(part, dict):
                yield f"{field}.{key}", part
            else:
                yield from _arguments_of(f"{field}.{key}", part)


def _check_place(field: str, name: str, value: Any) -> None:
    """Refuse an argument that makes a class write outside the folder of its run."""
    if not isinstance(value, str) or not value:
        return
    if name in _ADDRESSES:
        if _ADDRESS.match(value):
            return
        wanted = "an address such as https://..."
    else:
        path = PurePath(value)
        if name not in _TEXT or not (path.is_absolute() or {"..", "~"} & {*path.parts}):
            return
        wanted = "a name or a path below the folder of the run"
    raise UserError(f"{field}: expected {wanted} in a grid file, found {value!r}")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The reference for the sensitivity to warm-up."""

    reference_warmup: int | None = None
    """A warm-up, in optimizer steps, that suffices for every arm."""
    baseline: str | None = None
    """The preset with which the others are compared."""
    control: str | None = None
    """A preset that shows whether the setting can tell; it and the baseline are no part of the
    question, so that the comparisons of their variants are a family apart."""
    matters: float | None = None
    """The smallest saving that matters, in nats per token; null: none is named."""

    def __post_init__(self) -> None:
        check_matters(self.matters)


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """The grid from whose runs the cells start."""

    grid: str | dict[str, Any]
    """Its name, its file next to this one, or the whole grid."""
    match: list[str]
    """The dotted config keys whose values match a cell to its parent."""

    def __post_init__(self) -> None:
        if not self.grid:
            raise ValueError("grid: expected the name or the path of a grid, found an empty one")
        if not self.match or len(set(self.match)) < len(self.match):
            raise ValueError(
                "match: expected a list of different dotted keys of a config, such as "
                f"[{PRESET}, {SEED}], found {self.match!r}"
            )


@dataclass(frozen=True, kw_only=True)
class GridFile:
    """The content of a grid file."""

    name: str
    """The name of the grid and of its folder in the folder of experiments."""
    question: str | None = None
    """The question that the grid asks; null: the comment at the top of the file."""
    base: str | None = None
    """The file of the base config, next to this one; instead of base_config."""
    base_config: dict[str, Any] | None = None
    """The base config, inlined; the axes override it."""
    axes: dict[str, list[Any] | dict[str, Any] | int] = dataclasses.field(default_factory=dict)
    """The values of dotted config keys; {other: {value: value}} for a key that follows another, and
    the number of seeds from 1 on for seed_everything."""
    exclude: list[dict[str, Any]] | None = None
    """Cells to omit: those that match all of an entry."""
    metric: MetricChoice | None = None
    """The name and the mode (min or max) of the metric that ranks the runs."""
    sensitivity: Sensitivity | None = None
    """reference_warmup and baseline for the sensitivity to warm-up."""
    pruner: Literal["median", "hyperband"] | None = None
    """The rule that ends hopeless cells early; null: none."""
    checkpoints: Literal["all", "last", "best", "none"] | None = None
    """Which checkpoints of a finished cell are kept; null: all."""
    labels: dict[str, list[str]] | None = None
    """The names of the values of axes in the report."""
    variants: list[str] | None = None
    """Further axes whose values are variants, such as model.class_path; the baseline has the first
    value of each."""
    factors: dict[str, str] | None = None
    """Axes of two values whose effects the report contrasts, by name."""
    families: dict[str, list[Any]] | None = None
    """Groups of variants that the report answers for, by name: names of variants, or values of
    their axes."""
    compare: dict[str, Any] | None = None
    """Axes whose values the report compares, each with its baseline."""
    init_from: InitFrom | None = None
    """grid and match: the grid from whose runs the cells start."""
    search: Search | None = None
    """Fields that a sampler of Optuna searches in every arm."""
    refine: Refine | None = None
    """Further learning rates around the best one of every arm."""
    until: Until | None = None
    """Further seeds of a search per seed, until the intervals are narrow enough."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "name: expected letters, digits, '_', '-' and '.' (at most 64, a letter or digit "
                f"first), found {self.name!r}"
            )
        if self.name in _TAKEN:
            raise ValueError(
                f"name: {self.name!r} is a folder of single runs among the experiments; use "
                "another name"
            )
        if (self.base is None) == (self.base_config is None):
            raise ValueError("expected one of 'base' (a file) and 'base_config' (a mapping)")


_TAKEN = ("fit", "probe")

SEEDS = 1000
"""The largest number of seeds that is given as a number."""

CELLS = 100_000
"""The largest number of cells of a grid, before exclusions."""


def mapping(value: Any, field: str) -> dict[str, Any]:
    """Return `value` if it is a mapping with text keys. Raises `UserError` otherwise."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{field}: expected a mapping with text keys, found {value!r}")
    return value


class Linked(NamedTuple):
    """An axis whose value follows from that of another axis; `values` are in the order there."""

    axis: str
    values: tuple[Any, ...]


def check_linked(axes: Any) -> tuple[dict[str, Any], dict[str, Linked]]:
    """The axes with their distinct values, and those linked to another axis.

    A linked axis is written `{other: {value of other: value}}`, with every value of the other.
    """
    axes = mapping(axes, "axes")
    lists, linked = dict(axes), {}
    seeds = axes.get(SEED)
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if not 1 <= seeds <= SEEDS:
            raise UserError(f"axes: {SEED}: expected 1 to {SEEDS} seeds, found {seeds}")
        lists[SEED] = list(range(1, seeds + 1))
    for axis, given in axes.items():
        if not isinstance(given, dict):
            continue
        field = f"axes: {axis}"
        if len(given) != 1:
            raise UserError(f"{field}: expected a list of values, or the one axis it follows")
        other, by_value = next(iter(given.items()))
        if not isinstance(lists.get(other), list):
            raise UserError(f"{field}: follows '{other}', which is no axis with a list of values")
        if not isinstance(by_value, dict):
            raise UserError(f"{field}: {other}: expected a value for each of its values")
        by_key = {key_of(key): value for key, value in by_value.items()}
        wanted = {key_of(value): value for value in lists[other]}
        for key in wanted.keys() - by_key.keys():
            raise UserError(f"{field}: {other}: has no value for {wanted[key]!r}")
        for key in by_value:
            if key_of(key) not in wanted:
                hint = nearest(str(key), [str(value) for value in lists[other]])
                raise UserError(f"{field}: {other}: no value {key!r} on that axis{hint}")
        values = tuple(by_key[key_of(value)] for value in lists[other])
        linked[axis] = Linked(other, values)
        lists[axis] = list({key_of(value): value for value in values}.values())
    return lists, linked


def check_axis_values(axes: Any) -> dict[str, list[Any]]:
    axes = mapping(axes, "axes")
    if not axes:
        raise UserError("axes: at least one axis is needed")
    for axis, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"axes: {axis}: expected a list of values, found {values!r}")
        for value in values:
            _check_value(axis, value)
        counts = Counter(map(key_of, values))
        if twice := [value for value in values if counts[key_of(value)] > 1]:
            raise UserError(f"axes: {axis}: value {twice[0]!r} is given twice")
        if len(set(map(label, values))) < len(values):
            raise UserError(f"axes: {axis}: two of {values!r} have one name in reports")
        parts = axis.split(".")
        above = next((a for n in range(1, len(parts)) if (a := ".".join(parts[:n])) in axes), None)
        if above:
            raise UserError(f"axes: {axis} lies inside of another axis, {above}")
    return axes


def check_cells(axes: Mapping[str, list[Any]], linked: Mapping[str, Linked]) -> None:
    """Refuse more cells than could be planned, before any of them is created."""
    count = math.prod(len(values) for axis, values in axes.items() if axis not in linked)
    if count > CELLS:
        shown = f"{count:,}" if count < 10**15 else f"about 10^{math.log10(count):.0f}"
        raise UserError(
            f"axes: come to {shown} cells, before any is excluded; at most {CELLS:,} in a grid"
        )


def _check_value(axis: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_value(axis, item)
    elif isinstance(value, dict):
        for item in mapping(value, f"axes: {axis}").values():
            _check_value(axis, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"axes: {axis}: {value} is not a finite number")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise UserError(f"axes: {axis}: unexpected {type(value).__name__} {value!r}")


@dataclass(frozen=True, kw_only=True)
class ParentGrid:
    """The grid from whose runs the cells of another grid start.

    A cell starts from the run that has its own values at the dotted keys `match`.
    """

    spec: "GridSpec"
    match: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """The content of a grid file, with its base inlined.

    `axes` maps a dotted key of the run's config to its values; the value of a `linked` axis follows
    from that of another. A cell that matches all of one entry of `exclude` is omitted. `pruner` is
    the rule that ends hopeless cells early, None for none; `checkpoints` sets which checkpoints of
    a cell are kept once it is done. `labels` has the names of axis values in the report,
    `factors` the axes of two values whose effects it contrasts, `families` the groups of variants
    that it answers for, by name, `compare` the axes whose values it compares on the metric, each
    with its baseline, `variants` the axes besides the block's whose values are variants.
    `init_from` is the grid from whose runs the cells start.
    `source` is the file as messages name it, and `base_source` the one that holds the base. With
    `search` or `refine` the cells follow from results: `asked` has those of the rounds so far,
    whose values are then in `axes`, and `listed` the axes of the file. `until` adds seeds.
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
    labels: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    factors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    families: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    metric_matters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compare: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variants: tuple[str, ...] = ()
    init_from: ParentGrid | None = None
    linked: Mapping[str, Linked] = dataclasses.field(default_factory=dict)
    base_source: str = ""
    search: Search | None = None
    refine: Refine | None = None
    until: Until | None = None
    asked: tuple[Mapping[str, Any], ...] | None = None
    listed: Mapping[str, list[Any]] | None = None

    @property
    def wiring(self) -> tuple[str, ...]:
        """The prefixes of the axes whose values are variants."""
        return (BLOCK, *self.variants)

    def variant(self, axes: Mapping[str, Any]) -> str:
        """The name of the variant that values of the axes describe."""
        return variant(axes, self.base_config, named_values(self.labels, self.axes), self.wiring)

    @property
    def adapts(self) -> bool:
        """Whether the cells of later rounds depend on the results of earlier ones."""
        return self.search is not None or self.refine is not None

    @property
    def packs(self) -> bool:
        """Whether cells are trained in packs."""
        return packs(self.axes, self.base_config)

    def with_cells(self, cells: Sequence[Mapping[str, Any]]) -> "GridSpec":
        """The grid with the cells of its rounds so far, and their values as its axes."""
        listed = self.axes if self.listed is None else self.listed
        fields = (RATE,) if self.search is None else tuple(self.search.fields)
        axes = dict(listed)
        for field in fields if self.until is None else (*fields, SEED):
            values = {key_of(cell[field]): cell[field] for cell in cells}
            axes[field] = sorted(values.values())
        settings = tuple({axis: cell[axis] for axis in axes} for cell in cells)
        return dataclasses.replace(self, axes=axes, asked=settings, listed=listed)

    def source_of(self, key: str) -> str:
        """The file that sets a dotted key of the cells' configs, as messages name it."""
        by_axis = any(f"{key}.".startswith(f"{axis}.") for axis in self.axes)
        return self.source if by_axis else self.base_source or self.source

    def tree(self) -> dict[str, Any]:
        """The content of `grid.yaml` in the grid's folder, itself a valid grid file."""
        parent = self.init_from
        linked = {
            axis: {other: dict(zip(self.axes[other], values, strict=True))}
            for axis, (other, values) in self.linked.items()
        }
        given = {"search": self.search, "refine": self.refine, "until": self.until}
        adapts = {name: dataclasses.asdict(part) for name, part in given.items() if part}
        if self.search is not None:
            fields = adapts["search"] | {"sampler": self.search.kind}
            adapts["search"] = {k: v for k, v in fields.items() if v not in (None, "arm")}
        return {
            "name": self.name,
            "question": self.question,
            "base_config": self.base_config,
            "axes": {**(self.axes if self.listed is None else self.listed), **linked},
            "exclude": list(self.exclude),
            "metric": {"name": self.metric, "mode": self.mode, **self.metric_matters},
            "sensitivity": self.sensitivity,
            "pruner": self.pruner,
            "checkpoints": self.checkpoints,
            "labels": dict(self.labels),
            "factors": dict(self.factors),
            "compare": dict(self.compare),
            **({"variants": list(self.variants)} if self.variants else {}),
            **({"families": dict(self.families)} if self.families else {}),
            "init_from": parent and {"grid": parent.spec.tree(), "match": list(parent.match)},
            **adapts,
        }


def find_grid(grid: str | Path) -> Path:
    """Return the path of a grid file: `grid` is a path or the name of a shipped ablation.

    Raises `UserError` listing the names if it is neither.
    """
    path = Path(grid)
    if path.suffix in (".yaml", ".yml") or len(path.parts) != 1:
        if not path.is_file():
            raise UserError(f"{path}: {absent(path)}")
        return path
    shipped = {path.stem: path for path in shipped_folder().glob("*.yaml")}
    if path.name not in shipped:
        hint = nearest(path.name, shipped) or f" ({', '.join(sorted(shipped)) or 'none'})"
        raise UserError(f"{grid}: neither a YAML file nor an ablation that ships{hint}")
    return shipped[path.name]


GONE = {"published": "is no more; say what papers report on the page of the study, or in a comment"}
"""Former keys of grid files, and their replacements. Grids of that time hold them
empty."""


def without_gone(tree: Any, source: str) -> Any:
    """The tree of a grid file without empty keys of `GONE`; a filled one raises `UserError`."""
    if not isinstance(tree, dict):
        return tree
    for key, instead in GONE.items():
        if tree.get(key):
            raise UserError(f"{source}: {key}: {instead}")
    return {key: value for key, value in tree.items() if key not in GONE}


def read_spec(grid: str | Path) -> GridSpec:
    """Read and check a grid file. Raises `UserError` naming file, field and value."""
    return _read(find_grid(grid), ())


def _read(path: Path, children: tuple[Path, ...]) -> GridSpec:
    """Read a grid file. `children` are the files that name it as their parent grid."""
    if path.resolve() in children:
        raise UserError(f"{path}: init_from.grid: the grid continues itself")
    tree, text = strict_yaml.read_yaml_file(path)
    return _spec(path, tree, text, (*children, path.resolve()))


def _spec(path: Path, tree: Any, text: str, files: tuple[Path, ...], source: str = "") -> GridSpec:
    """Check the tree of a grid in the file `path`; `source` is its place in that file."""
    source = source or str(path)
    if isinstance(tree, Mapping) and KEY in tree:
        raise UserError(
            f"{source}: {KEY}: a grid file may not name code, since a grid file from elsewhere "
            f"would run it; pass --plugin FILE, or list it in {PROJECT} of the working folder"
        )
    if isinstance(tree, Mapping) and tree and {*tree} <= {*SECTIONS}:
        raise UserError(f"{source}: is a config, not a grid; ablate fit --config trains it")
    tree = without_gone(tree, source)
    file = read(GridFile, tree, source)
    # Values as in the file: the reader treats them as JSON, whose keys are strings.
    base_config: Any = tree.get("base_config")
    base_source = source
    if file.base is not None:
        with named(source):
            base_config = strict_yaml.read_yaml_file(path.parent / file.base)[0]
        base_source = str(path.parent / file.base)
        with named(base_source):
            mapping(base_config, "the file")
    parent = _parent(path, file.init_from, tree, files, source)
    with named(source):
        axes, linked = check_linked(tree.get("axes", {}))
        check_axis_values(axes)
        base_config = with_warmup(base_config, axes)
        check_cells(axes, linked)
        metric, mode = check_metric(file.metric, base_config, axes)
        fields = {**vars(file), **{name: tree.get(name) for name in _AS_WRITTEN}}
        check_rules(
            GRID_RULES,
            GridSubject(fields, axes, linked, base_config, metric, parent and parent.spec),
        )
        searched = file.search.fields if file.search is not None else {}
        bounds = {field: [values.low, values.high] for field, values in searched.items()}
        check_numbers(base_config)
        if SEED in base_config:
            check_seed(base_config[SEED])
        with named("axes"):
            for seed in axes.get(SEED, ()):
                check_seed(seed)
        check_grid(base_config, {**axes, **bounds})
        return GridSpec(
            source=source,
            name=file.name,
            question=_question(text) if file.question is None else file.question,
            base_config=base_config,
            axes=axes,
            exclude=tuple(fields["exclude"] or ()),
            metric=metric,
            mode=mode,
            sensitivity={k: v for k, v in (fields["sensitivity"] or {}).items() if v is not None},
            pruner=file.pruner,
            checkpoints=file.checkpoints or "all",
            labels=file.labels or {},
            factors=file.factors or {},
            families=file.families or {},
            metric_matters={"matters": m} if (m := file.metric and file.metric.matters) else {},
            compare=fields["compare"] or {},
            variants=tuple(file.variants or ()),
            init_from=parent,
            linked=linked,
            base_source=base_source,
            search=file.search,
            refine=file.refine,
            until=file.until,
        )


_AS_WRITTEN = ("axes", "exclude", "sensitivity", "compare")


def _parent(
    path: Path, given: InitFrom | None, tree: Any, files: tuple[Path, ...], source: str
) -> ParentGrid | None:
    """The parent grid: a shipped one, a file next to this one, or a whole grid as a mapping."""
    if given is None:
        return None
    grid = given.grid
    if isinstance(grid, str):
        is_path = grid.endswith((".yaml", ".yml")) or len(Path(grid).parts) != 1
        with named(f"{source}: init_from.grid"):
            file = find_grid(path.parent / grid if is_path else grid)
        spec = _read(file, files)
    else:
        spec = _spec(path, tree["init_from"]["grid"], "", files, f"{source}: init_from.grid")
    return ParentGrid(spec=spec, match=tuple(given.match))


def _question(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return "\n".join(lines).strip()
