"""The fields of a grid file that need checks of their own. Each check raises `UserError`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_app.ablation.grid_yaml import mapping
from lightning_app.errors import UserError, nearest
from lightning_app.grid_axes import PRESET, WARMUP, lookup, same
from lightning_app.task_facts import DEFAULT_TASK, GENERAL, TASKS, task_facts

PRUNERS = ("median", "hyperband")
CHECKPOINTS = ("all", "last", "best", "none")


def check_metric(
    path: Path, metric: Any, base: Mapping[str, Any], axes: Mapping[str, list[Any]]
) -> tuple[str, str]:
    """The metric and its direction; without them, what the task of the grid monitors."""
    if metric is None:
        metric = {}
    metric = _fields(path, "metric", metric, ("name", "mode"))
    kinds = axes.get(TASKS.field) or [lookup(base, TASKS.field) or DEFAULT_TASK]
    monitored, *others = dict.fromkeys(task_facts(kind).monitored for kind in kinds)
    if others and "name" not in metric:
        raise UserError(f"{path}: metric.name: missing; the tasks of {TASKS.field} do not agree")
    name = metric.get("name", monitored.metric)
    mode = metric.get("mode", monitored.mode if name == monitored.metric else "min")
    known = [*GENERAL, *(score.metric for task in TASKS.values() for score in task.scores)]
    if name not in known:
        hint = nearest(str(name), known)
        raise UserError(f"{path}: metric.name: no metric {name!r}{hint}")
    if mode not in ("min", "max"):
        raise UserError(f"{path}: metric.mode: expected 'min' or 'max', found {mode!r}")
    return name, mode


def check_sensitivity(
    path: Path, sensitivity: Any, axes: Mapping[str, list[Any]]
) -> dict[str, Any]:
    if sensitivity is None:
        return {}
    sensitivity = _fields(path, "sensitivity", sensitivity, ("reference_warmup", "baseline"))
    for field, axis in (("reference_warmup", WARMUP), ("baseline", PRESET)):
        if field not in sensitivity:
            continue
        value, kind = sensitivity[field], int if field == "reference_warmup" else str
        if not isinstance(value, kind) or isinstance(value, bool):
            what = "a whole number" if kind is int else "text"
            raise UserError(f"{path}: sensitivity.{field}: expected {what}, found {value!r}")
        if axis in axes and not any(same(value, known) for known in axes[axis]):
            known = [str(value) for value in axes[axis]]
            raise UserError(
                f"{path}: sensitivity.{field}: {value!r} is not on the axis {axis} "
                f"({', '.join(known)}){nearest(str(value), known)}"
            )
    return sensitivity


def check_pruner(
    path: Path,
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
        raise UserError(f"{path}: pruner: expected {' or '.join(PRUNERS)}, found {pruner!r}{hint}")
    reason = "a pruned run has no final loss, so no sensitivity could be reported"
    if sensitivity:
        raise UserError(f"{path}: pruner: cannot be combined with 'sensitivity': {reason}")
    if len(axes.get(WARMUP, ())) > 1:
        raise UserError(f"{path}: pruner: cannot be combined with the axis {WARMUP}: {reason}")
    if not metric.startswith("val/"):
        raise UserError(
            f"{path}: pruner: judges cells by metric.name at each validation, where '{metric}' is "
            f"not known; expected one of val/..."
        )
    return pruner


def check_checkpoints(path: Path, checkpoints: Any) -> str:
    if checkpoints is None:
        return "all"
    if checkpoints not in CHECKPOINTS:
        hint = nearest(str(checkpoints), CHECKPOINTS)
        known = ", ".join(CHECKPOINTS)
        raise UserError(
            f"{path}: checkpoints: expected one of {known}, found {checkpoints!r}{hint}"
        )
    return checkpoints


def check_published(path: Path, published: Any) -> tuple[dict[str, Any], ...]:
    """Figures of papers: whose, in what setting, of which variant, and the number."""
    if published is None:
        return ()
    if not isinstance(published, list):
        raise UserError(f"{path}: published: expected a list of mappings, found {published!r}")
    return tuple(
        _figure(path, f"published entry {n}", entry) for n, entry in enumerate(published, 1)
    )


def _figure(path: Path, field: str, entry: Any) -> dict[str, Any]:
    for key, (what, holds) in _FIGURE.items():
        given = _fields(path, field, entry, tuple(_FIGURE)).get(key)
        needed = key not in ("warmup", "lr", "note")
        if given is None and needed:
            raise UserError(f"{path}: {field}: '{key}' is missing; expected {what}")
        if given is not None and not holds(given):
            raise UserError(f"{path}: {field}: {key}: expected {what}, found {given!r}")
    return dict(entry)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_FIGURE = {
    "paper": ("the key of a paper or its citation", _is_text),
    "setting": ("what was trained and measured there, as text", _is_text),
    "variant": ("the name of a variant", _is_text),
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


def _fields(path: Path, field: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
    for key in mapping(value, str(path), field):
        if key not in known:
            raise UserError(f"{path}: {field}: unknown key '{key}'{nearest(key, known)}")
    return value
