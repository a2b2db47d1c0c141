"""A grid file: what it says, strictly read.

The classes that a grid file may name, and where they may write.

A grid file, and the config of a run, may come from somebody else. Nothing is imported and no file
is read because they name it: classes are looked up in the tables of `config.classes`.

The fields of a grid file that need checks of their own. Each check raises `UserError`.

The grid file: where it lies, and what it says. Every check here needs no resolved config.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from lightning_app.config.bounds import check_numbers, check_seed
from lightning_app.config.classes import (
    CLASS_FIELDS,
    FIELDS,
    OWN_CLASS,
    known_path,
    refusal,
    require_plugin,
)
from lightning_app.config.schema import hints_of, read
from lightning_app.config.sources import merged, nested
from lightning_app.config.trainer import ClassSpec, TrainerConfig
from lightning_app.config.tree import (
    BLOCK,
    PRESET,
    RATE,
    SECTIONS,
    SEED,
    WARMUP,
    key_of,
    label,
    lookup,
    named_values,
    same,
    variant,
)
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, named, nearest
from lightning_app.core.project import PROJECT, shipped_folder
from lightning_app.plugins import KEY
from lightning_app.runs.parent import FIELD
from lightning_app.scores.task_facts import DEFAULT_TASK, GENERAL, TASKS, task_facts

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
"""Fields of the Trainer that take a class or a word, and the words of a grid file."""

_TEXT = ("api_key", "artifact_location", "checkpoint_name", "comment", "dir", "dirpath")
_TEXT += ("experiment_name", "filename", "filename_suffix", "monitor", "name", "prefix", "project")
_TEXT += ("run_name", "save_dir", "sub_dir", "tracking_uri", "version", "workspace")
"""Arguments of classes that may be any text; others are one word, and no path."""

_FOLDERS = ("dir", "dirpath", "save_dir", "sub_dir")
"""Those of them that name a folder: in a cell it lies below the folder of the run."""

_ADDRESSES = ("artifact_location", "tracking_uri")
_ADDRESS = re.compile(r"(?!file:|sqlite:)[a-z][a-z0-9+.-]*://[^/]")
_WORD = re.compile(r"[\w:=-]*")


def check_grid(base: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> None:
    """Refuse a grid with a class that is in no table, or that writes elsewhere than in the folder
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
    """Refuse a config, as written or resolved, with an unknown section, or a class in no table.

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
    """Refuse an argument that names a class, or unless `text` is allowed a path or code."""
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
    """Let the classes of a complete section `trainer` write below `folder`, where they name one.

    Relative to the working folder they could replace the files of another run.
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
    """Refuse an argument by which a class would write outside of the folder of its run."""
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


PRUNERS = ("median", "hyperband")
CHECKPOINTS = ("all", "last", "best", "none")
CELLS = 100_000
"""The most cells of a grid, before any is excluded."""


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
    """The axes with their distinct values, and those that are linked to another axis.

    A linked axis is written `{other: {value of other: value}}`, with each value of the other.
    """
    axes = mapping(axes, "axes")
    found, linked = dict(axes), {}
    for axis, given in axes.items():
        if not isinstance(given, dict):
            continue
        field = f"axes: {axis}"
        if len(given) != 1:
            raise UserError(f"{field}: expected a list of values, or the one axis it follows")
        other, by_value = next(iter(given.items()))
        if not isinstance(axes.get(other), list):
            raise UserError(f"{field}: follows '{other}', which is no axis with a list of values")
        if not isinstance(by_value, dict):
            raise UserError(f"{field}: {other}: expected a value for each of its values")
        known = {key_of(key): value for key, value in by_value.items()}
        wanted = {key_of(value): value for value in axes[other]}
        for key in wanted.keys() - known.keys():
            raise UserError(f"{field}: {other}: has no value for {wanted[key]!r}")
        for key in by_value:
            if key_of(key) not in wanted:
                hint = nearest(str(key), [str(value) for value in axes[other]])
                raise UserError(f"{field}: {other}: no value {key!r} on that axis{hint}")
        values = tuple(known[key_of(value)] for value in axes[other])
        linked[axis] = Linked(other, values)
        found[axis] = list({key_of(value): value for value in values}.values())
    return found, linked


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
        twice = next((value for value in values if counts[key_of(value)] > 1), _check_value)
        if twice is not _check_value:
            raise UserError(f"axes: {axis}: value {twice!r} is given twice")
        if len(set(map(label, values))) < len(values):
            raise UserError(f"axes: {axis}: two of {values!r} have one name in reports")
        parts = axis.split(".")
        above = next((a for n in range(1, len(parts)) if (a := ".".join(parts[:n])) in axes), None)
        if above:
            raise UserError(f"axes: {axis} lies inside of another axis, {above}")
    return axes


def check_cells(
    axes: Mapping[str, list[Any]],
    linked: Mapping[str, Linked],
    exclude: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse more cells than could be planned, before any of them is made."""
    count = math.prod(len(values) for axis, values in axes.items() if axis not in linked)
    if count > CELLS:
        shown = f"{count:,}" if count < 10**15 else f"about 10^{math.log10(count):.0f}"
        raise UserError(
            f"axes: come to {shown} cells, before any is excluded; at most {CELLS:,} in a grid"
        )
    if (shapes := len({tuple(entry) for entry in exclude})) * count > 1_000 * CELLS:
        raise UserError(
            f"exclude: names {shapes:,} sets of axes, each looked for in {count:,} cells; at most "
            f"{1_000 * CELLS // count:,} for that many cells"
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


def check_config_numbers(base: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> None:
    """Seeds are whole numbers as they are written, and no number is NaN or infinite."""
    check_numbers(base)
    if SEED in base:
        check_seed(base[SEED])
    with named("axes"):
        for seed in axes.get(SEED, ()):
            check_seed(seed)


def check_exclude(exclude: Any, axes: Mapping[str, list[Any]]) -> tuple[dict[str, Any], ...]:
    if exclude is None:
        return ()
    if not isinstance(exclude, list):
        raise UserError(f"exclude: expected a list of mappings, found {exclude!r}")
    known = {axis: set(map(key_of, values)) for axis, values in axes.items()}
    for entry in exclude:
        if not mapping(entry, "exclude"):
            raise UserError("exclude: an empty entry would exclude every cell")
        for axis, value in entry.items():
            if axis not in axes:
                raise UserError(f"exclude: no axis '{axis}'{nearest(axis, axes)}")
            if key_of(value) not in known[axis]:
                hint = nearest(str(value), [str(each) for each in axes[axis]])
                raise UserError(f"exclude: {axis}: no value {value!r} on the axis{hint}")
    return tuple(exclude)


def check_init_from(given: Any) -> tuple[str | dict[str, Any], tuple[str, ...]] | None:
    """The parent grid, as its name, path or whole tree, and the keys by which cells match."""
    if given is None:
        return None
    fields = _fields("init_from", given, ("grid", "match"))
    grid, match = fields.get("grid"), fields.get("match")
    if not isinstance(grid, dict) and not (isinstance(grid, str) and grid):
        raise UserError(f"init_from.grid: expected the name or path of a grid, found {grid!r}")
    texts = isinstance(match, list) and all(isinstance(key, str) for key in match)
    if not texts or not match or len(set(match)) < len(match):
        raise UserError(
            "init_from.match: expected a list of different dotted keys of a config, such as "
            f"[{PRESET}, {SEED}], found {match!r}"
        )
    return grid, tuple(match)


def check_metric(
    metric: Any, base: Mapping[str, Any], axes: Mapping[str, list[Any]]
) -> tuple[str, str]:
    """The metric, by default the one that the task monitors, and its direction."""
    metric = {} if metric is None else _fields("metric", metric, ("name", "mode"))
    kinds = axes.get(TASKS.field) or [lookup(base, TASKS.field) or DEFAULT_TASK]
    monitored, *others = dict.fromkeys(task_facts(kind).monitored for kind in kinds)
    if others and "name" not in metric:
        raise UserError(f"metric.name: missing; the tasks of {TASKS.field} do not agree")
    name = metric.get("name", monitored.metric)
    logged = str(name).startswith(("val/", "test/")) and _has_own_class(base, axes)
    scores = {score.metric: score.mode for task in TASKS.values() for score in task.scores}
    best = GENERAL | scores | {monitored.metric: monitored.mode}
    if not isinstance(name, str) or (name not in best and not logged):
        raise UserError(f"metric.name: no metric {name!r}{nearest(str(name), best)}")
    if name not in best and "mode" not in metric:
        raise UserError(
            f"metric.mode: missing; only {OWN_CLASS} knows whether min or max of {name!r} is best"
            f"{nearest(name, best)}"
        )
    mode = metric.get("mode", best.get(name))
    if mode not in ("min", "max"):
        raise UserError(f"metric.mode: expected 'min' or 'max', found {mode!r}")
    return name, mode


def _has_own_class(base: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> bool:
    """Whether a grid trains a class of a plug-in, which may log metrics of its own."""
    return any(each is not None for each in axes.get(OWN_CLASS, [lookup(base, OWN_CLASS)]))


def check_sensitivity(sensitivity: Any, axes: Mapping[str, list[Any]]) -> dict[str, Any]:
    if sensitivity is None:
        return {}
    sensitivity = _fields("sensitivity", sensitivity, ("reference_warmup", "baseline"))
    for key, axis in (("reference_warmup", WARMUP), ("baseline", PRESET)):
        if key not in sensitivity:
            continue
        value, kind = sensitivity[key], int if key == "reference_warmup" else str
        if not isinstance(value, kind) or isinstance(value, bool):
            what = "a whole number" if kind is int else "text"
            raise UserError(f"sensitivity.{key}: expected {what}, found {value!r}")
        if axis in axes and not any(same(value, known) for known in axes[axis]):
            known = [str(value) for value in axes[axis]]
            raise UserError(
                f"sensitivity.{key}: {value!r} is not on the axis {axis} "
                f"({', '.join(known)}){nearest(str(value), known)}"
            )
    return sensitivity


def check_pruner(
    pruner: Any,
    axes: Mapping[str, list[Any]],
    metric: str,
    sensitivity: Mapping[str, Any],
) -> str | None:
    """The pruner, which only a grid that looks for its best cells can have."""
    if pruner is None:
        return None
    if pruner not in PRUNERS:
        hint = nearest(str(pruner), PRUNERS)
        raise UserError(f"pruner: expected {' or '.join(PRUNERS)}, found {pruner!r}{hint}")
    reason = "a pruned run has no final loss, so no sensitivity could be reported"
    if sensitivity:
        raise UserError(f"pruner: cannot be combined with 'sensitivity': {reason}")
    if len(axes.get(WARMUP, ())) > 1:
        raise UserError(f"pruner: cannot be combined with the axis {WARMUP}: {reason}")
    if not metric.startswith("val/"):
        raise UserError(
            f"pruner: judges cells by metric.name at each validation, where '{metric}' is "
            f"not known; expected one of val/..."
        )
    return pruner


def check_labels(labels: Any, axes: Mapping[str, list[Any]]) -> dict[str, list[str]]:
    """The names of the values of axes in a report; an empty one of the block is left out.

    Names of the block's axes are joined to the name of a variant, those of other axes to the name
    of a group of runs. Both must be another for each setting.
    """
    found = {} if labels is None else mapping(labels, "labels")
    known = [axis for axis in axes if axis not in (SEED, WARMUP, RATE)]
    for axis, names in found.items():
        if axis not in known:
            raise UserError(
                f"labels: {axis}: no axis of the grid that sets variants or groups of runs apart"
                f"{nearest(axis, known)}"
            )
        count = len(axes[axis])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"labels: {axis}: expected a list of {count} texts, found {names!r}")
        if len(names) != count or len(set(names)) != count:
            raise UserError(
                f"labels: {axis}: expected {count} different texts, one for each value, found "
                f"{names!r}"
            )
        kept = axis != PRESET and axis.startswith(BLOCK)
        for name in names:
            plain = " ".join(re.findall(r"[^+,\s]+", name))
            if name != plain or name == "all" or not (name or kept):
                raise UserError(
                    f"labels: {axis}: expected words with single spaces, without + and comma, not "
                    f"'all'{'' if kept else ' and not empty'}, found {name!r}"
                )
    block = [axis for axis in axes if axis.startswith(BLOCK)] if found else []
    known_names = named_values(found, axes)
    settings = [dict(zip(block, of, strict=True)) for of in product(*(axes[a] for a in block))]
    counts = Counter(variant(setting, {}, known_names) for setting in settings)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise UserError(
            f"labels: {', '.join(found)}: '{name}' would name {count} variants; expected another "
            "name for each"
        )
    return found


def check_compare(compare: Any, axes: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The axes whose values the report compares, on the grid's metric, by axis the baseline."""
    found = {} if compare is None else mapping(compare, "compare")
    for axis, baseline in found.items():
        if axis not in axes:
            hint = nearest(axis, axes) or f"; the axes are {', '.join(axes)}"
            raise UserError(f"compare: no axis {axis!r}{hint}")
        if axis == SEED:
            raise UserError(f"compare: {axis}: seeds are what differences are averaged over")
        if not any(same(baseline, value) for value in axes[axis]):
            known = ", ".join(map(label, axes[axis]))
            raise UserError(
                f"compare: {axis}: expected one of its values ({known}), found {label(baseline)}"
            )
    return found


def check_factors(factors: Any, axes: Mapping[str, list[Any]]) -> dict[str, str]:
    """The axes of two values whose effects the report contrasts, by the name of the factor."""
    found = {} if factors is None else mapping(factors, "factors")
    for name, axis in found.items():
        if axis not in axes:
            raise UserError(f"factors: {name}: no axis {axis!r}{nearest(str(axis), axes)}")
        if axis in (SEED, WARMUP, RATE):
            raise UserError(f"factors: {name}: {axis} has measures of its own and is no factor")
        if len(axes[axis]) != 2:
            raise UserError(
                f"factors: {name}: {axis} has {len(axes[axis])} values; a factor has two"
            )
    if len(set(found.values())) < len(found):
        raise UserError("factors: an axis is given twice")
    return found


def check_checkpoints(checkpoints: Any) -> str:
    if checkpoints is None:
        return "all"
    if checkpoints not in CHECKPOINTS:
        hint = nearest(str(checkpoints), CHECKPOINTS)
        known = ", ".join(CHECKPOINTS)
        raise UserError(f"checkpoints: expected one of {known}, found {checkpoints!r}{hint}")
    return checkpoints


def check_published(published: Any) -> tuple[dict[str, Any], ...]:
    """Figures of papers: whose, in what setting, of which variant, on which data, the number."""
    if published is None:
        return ()
    if not isinstance(published, list):
        raise UserError(
            f"published: expected a list of mappings, or the path of a file that holds one, found "
            f"{published!r}"
        )
    return tuple(_figure(f"published entry {n}", entry) for n, entry in enumerate(published, 1))


def _figure(field: str, entry: Any) -> dict[str, Any]:
    for key, (what, holds) in _FIGURE.items():
        given = _fields(field, entry, tuple(_FIGURE)).get(key)
        needed = key not in ("data", "warmup", "lr", "note")
        if given is None and needed:
            raise UserError(f"{field}: '{key}' is missing; expected {what}")
        if given is not None and not holds(given):
            raise UserError(f"{field}: {key}: expected {what}, found {given!r}")
    return dict(entry)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_FIGURE = {
    "paper": ("the key of a paper or its citation", _is_text),
    "setting": ("what was trained and measured there, as text", _is_text),
    "variant": ("the name of a variant", _is_text),
    "data": ("a value of data.name, or null if the grid has one task", _is_text),
    "warmup": (
        "a whole number of updates, or null if the paper does not say it",
        lambda value: isinstance(value, int) and _is_number(value) and value >= 0,
    ),
    "lr": (
        "a number above 0, or null if the paper does not say it",
        lambda value: _is_number(value) and value > 0,
    ),
    "metric": ("the name of a metric, such as test/bleu", _is_text),
    "value": (
        "a number, or 'diverged'",
        lambda value: _is_number(value) or value == "diverged",
    ),
    "note": ("text", _is_text),
}


def _fields(field: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
    for key in mapping(value, field):
        if key not in known:
            raise UserError(f"{field}: unknown key '{key}'{nearest(key, known)}")
    return value


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
    axes: dict[str, list[Any] | dict[str, Any]] = dataclasses.field(default_factory=dict)
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
    labels: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    factors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compare: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    init_from: ParentGrid | None = None
    linked: Mapping[str, Linked] = dataclasses.field(default_factory=dict)
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
