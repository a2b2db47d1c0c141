"""The fields of a grid file that need checks of their own. Each check raises `UserError`."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from lightning_app.bounds import check_numbers, check_seed
from lightning_app.config.classes import OWN_CLASS
from lightning_app.errors import UserError, named, nearest
from lightning_app.grid_axes import (
    BLOCK,
    PRESET,
    RATE,
    SEED,
    WARMUP,
    key_of,
    label,
    lookup,
    named_values,
    same,
    variant,
)
from lightning_app.task_facts import DEFAULT_TASK, GENERAL, TASKS, task_facts

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
    for field, axis in (("reference_warmup", WARMUP), ("baseline", PRESET)):
        if field not in sensitivity:
            continue
        value, kind = sensitivity[field], int if field == "reference_warmup" else str
        if not isinstance(value, kind) or isinstance(value, bool):
            what = "a whole number" if kind is int else "text"
            raise UserError(f"sensitivity.{field}: expected {what}, found {value!r}")
        if axis in axes and not any(same(value, known) for known in axes[axis]):
            known = [str(value) for value in axes[axis]]
            raise UserError(
                f"sensitivity.{field}: {value!r} is not on the axis {axis} "
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
