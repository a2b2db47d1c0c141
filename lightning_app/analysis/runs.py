"""Read a grid folder: the plan, and what every planned cell has left on disk so far."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_app.analysis.papers import number_of, read_grid_file, read_plan
from lightning_app.errors import UserError
from lightning_app.mixtures import Groups, strangers
from lightning_app.records import (
    LOSS,
    OUTCOMES,
    PRUNED,
    RESULT,
    Newer,
    Unsound,
    outcome,
    read_pruned,
    read_record,
    read_result,
    read_yaml,
)
from lightning_app.tables import bytes_of, check_probes, check_table, check_text, rows_of

if TYPE_CHECKING:
    import pandas as pd

SEED = "seed_everything"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
BLOCK = "model.block."
PRESET = "model.block.preset"
OTHER_DATA = "other_data"
State = Literal[
    "ok", "diverged", "pruned", "failed", "unfinished", "waiting", "damaged", "other_data"
]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One planned run.

    `state`: `ok` or `diverged` (a result exists), `pruned` (the grid's pruner ended it), `failed`
    (the last attempt crashed), `unfinished` (an attempt runs or was cut short; files alone cannot
    tell), `waiting` (never started), `damaged` (what it left at its end cannot be read; `error`
    says why), `other_data` (finished, but on other data than the cells that it would be compared
    with: its result counts nowhere).
    `group` names the values of the axes that are no block, warm-up, rate or seed. `baseline` is the
    variant to compare with: the grid's baseline preset with this cell's other block axes.
    """

    id: str
    name: str
    folder: Path
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

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def record(self) -> Mapping[str, Any]:
        """The fields of `result.json`, none before the run has finished."""
        return self.result or {}

    @property
    def outcome(self) -> str | None:
        """How it ended, a key of `records.OUTCOMES`; None before the run has finished."""
        return None if self.result is None else outcome(self.result)

    @property
    def word(self) -> str:
        """What people read: how it ended in the words of `records.OUTCOMES`, else the state."""
        return self.state if self.result is None else OUTCOMES[outcome(self.result)]

    @cached_property
    def damage(self) -> dict[str, str]:
        """What is wrong with files in its folder, by name: those that a report reads."""
        found = {}
        for name, check in _CHECKS.items():
            path = self.folder / name
            try:
                if path.exists():
                    check(path)
            except Unsound as error:
                found[name] = str(error)
            except OSError as error:
                found[name] = f"cannot be read: {error.strerror}"
        return found

    def sound(self, name: str) -> Path | None:
        """A file of its folder, None where it is missing or damaged."""
        path = self.folder / name
        return path if name not in self.damage and path.is_file() else None

    @property
    def data(self) -> Mapping[str, Any]:
        """What the run was trained on: name, protocol, sizes."""
        return self.record.get("data") or {}

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Final metrics by tag, None where not finite; empty before the run has finished."""
        return self.record.get("metrics") or {}

    @property
    def entropy(self) -> float:
        """`H_uni` in nats per token, of the run's own validation targets; NaN if not finished."""
        return float(self.result["unigram_entropy"]) if self.result else math.nan

    @property
    def loss(self) -> float:
        """The `l` of every score, nats per token: `H_uni` if diverged, else `min(val/nll, H_uni)`.

        A stall counts as `H_uni` exactly, also where it ended a little below, so that every failure
        costs the same. One cap serves all variants: a run that has not yet learned counts as
        `H_uni` too, and `capped` tells it from a stall. NaN if not finished.
        """
        if self.state == "diverged":
            return self.entropy
        return min(_number(self.metrics.get(LOSS)), self.entropy)

    @property
    def capped(self) -> bool:
        """Whether it trained and its loss counts as less than it is, as it has not yet learned."""
        return self.state == "ok" and _number(self.metrics.get(LOSS)) > self.entropy


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid folder. `cells` holds every planned cell, finished or not, in the order of the plan.

    `config` is the grid's base over the resolved config of one run, which knows every default.
    `metric` is what the grid is judged by and `mode` whether `min` or `max` is best.
    `pruner` is the rule by which hopeless cells were ended early, if there was one. `published`
    holds the figures of papers to compare with, as the grid file has them. `parts` are the grids
    that this one joins, where it joins several (`analysis.together`). `strangers` names the cells
    whose state is `other_data`, by the digest of theirs.
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
    cells: tuple[Cell, ...]
    pruner: str | None = None
    published: tuple[Mapping[str, Any], ...] = ()
    parts: tuple["Grid", ...] = ()
    strangers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    damaged_configs: tuple[str, ...] = ()

    @cached_property
    def finished(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.finished)

    @cached_property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.variant for cell in self.cells))

    @cached_property
    def warmups(self) -> tuple[int, ...]:
        return tuple(sorted({cell.warmup for cell in self.cells if cell.warmup is not None}))

    @cached_property
    def rates(self) -> tuple[float, ...]:
        return tuple(sorted({cell.lr for cell in self.cells if cell.lr is not None}))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({cell.seed for cell in self.cells if cell.seed is not None}))

    def setting(self, key: str) -> Any:
        """The value of a dotted field that no axis varies, or None where nothing says it."""
        return None if key in self.axes else lookup(self.config, key)


def failures(cells: Iterable[Cell]) -> str:
    """How the runs that failed did so, in words: `stalled`, `non-finite` or both."""
    found = {cell.word for cell in cells if cell.state == "diverged"}
    return " or ".join(word for word in OUTCOMES.values() if word in found)


def outcomes(cells: Iterable[Cell]) -> str:
    """How many runs ended in each way that is not simply `ok`: `2 stalled, 1 non-finite`."""
    words = [cell.word for cell in cells if cell.finished]
    shown = [word for key, word in OUTCOMES.items() if key != "trained"]
    return ", ".join(f"{words.count(word)} {word}" for word in shown if word in words)


def lookup(tree: Any, key: str) -> Any:
    """The value at a dotted key, or None."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def label(value: Any) -> str:
    """A short text for the value of an axis: strings as they are, the rest as compact JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def read_grid(folder: Path) -> Grid:
    """Read `grid.yaml`, `plan.json` and each cell's `result.json`.

    A cell whose result is damaged counts as not finished. Raises `UserError` for a folder that is
    no grid, for a plan or grid file that cannot be understood, and for what a newer version made.
    """
    folder = Path(folder)
    for needed in ("grid.yaml", "plan.json"):
        if not (folder / needed).is_file():
            raise UserError(f"{folder}: holds no {needed}, so it is not the folder of a grid")
    plan, grid = read_plan(folder / "plan.json"), read_grid_file(folder / "grid.yaml")
    scores, metric = grid.get("sensitivity") or {}, grid.get("metric") or {}
    config, damaged = _config(folder, plan, grid)
    found = Grid(
        folder=folder,
        name=plan["name"],
        question=(grid.get("question") or "").strip(),
        config=config,
        axes=plan["axes"],
        metric=metric.get("name") or LOSS,
        mode=metric.get("mode") or "min",
        reference_warmup=scores.get("reference_warmup"),
        baseline=scores.get("baseline"),
        cells=tuple(_cell(folder, entry, config, grid) for entry in plan["cells"]),
        pruner=grid.get("pruner"),
        published=tuple(grid.get("published") or ()),
        damaged_configs=tuple(damaged),
    )
    return without_strangers(found)


def without_strangers(grid: Grid) -> Grid:
    """The grid without the results that were trained on other data than those beside them.

    What compares runs then never compares such ones, whatever it is.
    """
    records = {cell.name: cell.record for cell in grid.finished}
    found: Groups = strangers(records, {cell.name: cell.axes for cell in grid.finished})
    state_of = {name: state for state, names in found.items() for name in names}
    cells = tuple(
        replace(cell, state=OTHER_DATA, result=None, error=f"trained on {state_of[cell.name]}")
        if cell.name in state_of and cell.finished
        else cell
        for cell in grid.cells
    )
    return replace(grid, cells=cells, strangers={**grid.strangers, **found}) if found else grid


def damaged_files(grid: Grid) -> list[str]:
    """A line for each file that a report has to go without, with what is wrong."""
    lines = {line: None for part in grid.parts or (grid,) for line in part.damaged_configs}
    for cell in grid.cells:
        if cell.state == "damaged":
            lines[f"{cell.folder}/{cell.error}"] = None
        elif cell.finished:
            lines |= {f"{cell.folder / name}: {what}": None for name, what in cell.damage.items()}
    return list(lines)


def results_frame(grid: Grid) -> "pd.DataFrame":
    """One row per planned cell: identity, state, axes, metrics, loss, budget, device, data sizes.

    `status` is the cell's state; only `ok` and `diverged` have finished and have metrics.
    `outcome` says how those ended. `loss` is the `l` of every score (`Cell.loss`),
    `reference_warmup` what its grid compares with. A number that a run does not have, or that was
    not finite, is NaN.
    """
    import pandas as pd

    axes = [key for key in grid.axes if key not in (SEED, WARMUP, RATE)]
    text = _columns_as_text(grid.axes, axes)
    measured = [cell.metrics for cell in grid.finished]
    metrics = list(dict.fromkeys(name for each in measured for name in each)) or [grid.metric]
    parts = grid.parts or (grid,)
    references = [part.reference_warmup for part in parts for _ in part.cells]
    rows = []
    for cell, reference in zip(grid.cells, references, strict=True):
        diverged, sizes = cell.record.get("diverged") or {}, cell.data.get("sizes") or {}
        values = {key: cell.axes.get(key) for key in axes}
        rows.append(
            _identity(cell)
            | {"reference_warmup": reference}
            | {key: label(values[key]) if key in text else values[key] for key in axes}
            | {name: _number(cell.metrics.get(name)) for name in metrics}
            | {"outcome": cell.outcome, "loss": cell.loss, "unigram_entropy": cell.entropy}
            | {"diverged_step": diverged.get("step"), "diverged_rule": diverged.get("rule")}
            | {key: cell.record.get(key) for key in _BUDGET}
            | {"data": cell.data.get("name"), "protocol": cell.data.get("protocol")}
            | {f"data_{split}": sizes.get(split) for split in ("train", "valid", "test")}
        )
    columns = [*_IDENTITY, "reference_warmup", *axes, *metrics, "outcome"]
    columns += ["loss", "unigram_entropy"]
    columns += ["diverged_step", "diverged_rule", *_BUDGET]
    columns += ["data", "protocol", "data_train", "data_valid", "data_test"]
    return pd.DataFrame(rows, columns=columns).astype(_kinds(columns))


def validations_frame(grid: Grid) -> "pd.DataFrame":
    """One row per cell and validation: identity, step, tokens, seconds, every `val/` metric.

    Each `metrics.csv` is read once. `tokens` and `seconds` are sums since the start of training,
    NaN where the run did not log them at that step.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for cell in grid.cells:
        path = cell.sound("metrics.csv")
        found = {} if path is None else _validations(path)
        rows += [_identity(cell) | {"step": step} | found[step] for step in sorted(found)]
    logged = dict.fromkeys(key for row in rows for key in row if key.startswith("val/"))
    columns = [*_IDENTITY, "step", "tokens", "seconds", *(sorted(logged) or [LOSS])]
    return pd.DataFrame(rows, columns=columns).astype(_kinds(columns))


_IDENTITY = ("id", "name", "status", "group", "variant", "baseline", "warmup", "lr", "seed")
_BUDGET = ("steps", "tokens", "seconds", "parameters", "device", "devices", "precision")
_BUDGET += ("peak_memory_bytes", "attempt")
_WHOLE = (
    "warmup",
    "reference_warmup",
    "seed",
    "diverged_step",
    "step",
    "steps",
    "tokens",
    "parameters",
    "devices",
)
_WHOLE += ("peak_memory_bytes", "attempt", "data_train", "data_valid", "data_test")


def _identity(cell: Cell) -> dict[str, Any]:
    return {key: getattr(cell, "state" if key == "status" else key) for key in _IDENTITY}


def _kinds(columns: Iterable[str]) -> dict[str, str]:
    """The types that pandas would not guess: whole numbers with gaps, and columns without any."""
    whole = {key: "Int64" for key in columns if key in _WHOLE}
    return whole | {"lr": "float64", "seconds": "float64"}


def _validations(path: Path) -> dict[int, dict[str, float]]:
    """The validations of one sound `metrics.csv` by step; of a value logged twice, the last."""
    names, *rows = rows_of(path)
    kept = [at for at, name in enumerate(names) if name.startswith("val/")]
    if not kept:
        return {}
    step = names.index("step")
    sums = [at for at, name in enumerate(names) if name in _SUMS]
    validated, spent = itemgetter(*kept), itemgetter(*sums or kept)
    found: dict[int, dict[str, float]] = {}
    others: dict[int, list[str]] = {}
    for row in rows:
        if "".join(validated(row)):
            values = found.setdefault(int(float(row[step])), {})
            values |= {names[at]: float(row[at]) for at in kept if row[at]}
        if "".join(spent(row)):
            others[int(float(row[step]))] = row
    for at, values in found.items():
        row = others.get(at, [])
        values |= {_SUMS[names[n]]: float(row[n]) for n in sums if row and row[n]}
    return found


_SUMS = {"train/tokens": "tokens", "train/seconds": "seconds"}


def curve(cell: Cell, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column of the run's `metrics.csv`, both empty where it has none,
    also where the file is damaged (`Cell.damage`).

    Steps are optimizer steps, from 1.
    """
    path = cell.sound("metrics.csv")
    if path is None:
        return [], []
    names, *rows = rows_of(path)
    if tag not in names:
        return [], []
    step, column = names.index("step"), names.index(tag)
    points = {int(float(row[step])): float(row[column]) for row in rows if row[column]}
    steps = sorted(points)
    return steps, [points[step] for step in steps]


_CHECKS: Mapping[str, Callable[[Path], object]] = {
    "metrics.csv": lambda path: check_table(bytes_of(path)),
    "probes.csv": lambda path: check_probes(bytes_of(path)),
    "hypotheses.txt": lambda path: check_text(bytes_of(path)),
    "references.txt": lambda path: check_text(bytes_of(path)),
    "block.json": lambda path: _check_block(read_record(path)),
    "env.json": read_record,
}


def _check_block(tree: Mapping[str, Any]) -> None:
    for side, stack in tree.items():
        blocks = stack.get("blocks", []) if isinstance(stack, dict) else None
        if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
            raise Unsound(f"damaged: {side} is no stack of blocks")


def _config(
    folder: Path, plan: Mapping[str, Any], grid: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The config of one run under the grid's base, and a line for each damaged one before it."""
    base, damaged = grid.get("base_config") or {}, []
    for entry in plan["cells"]:
        path = folder / "runs" / entry["name"] / "config.yaml"
        try:
            return _merge(read_yaml(path), base), damaged
        except FileNotFoundError:
            continue
        except Unsound as error:
            damaged.append(f"{path}: {error}")
    return dict(base), damaged


def _merge(under: Any, over: Any) -> Any:
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: _merge(under.get(key), value) for key, value in over.items()}}


def _cell(
    folder: Path, entry: Mapping[str, Any], config: Mapping[str, Any], grid: Mapping[str, Any]
) -> Cell:
    axes, run = entry["axes"], folder / "runs" / entry["name"]

    def value(key: str, kind: Callable[[Any], float]) -> Any:
        found = axes[key] if key in axes else lookup(config, key)
        return number_of(folder / "plan.json" if key in axes else run, key, found, kind)

    metric = (grid.get("metric") or {}).get("name")
    result, state, error = _outcome(run, entry["id"], metric, grid.get("pruner") is not None)
    others = [key for key in axes if key not in (SEED, WARMUP, RATE) and not key.startswith(BLOCK)]
    baseline = (grid.get("sensitivity") or {}).get("baseline")
    if baseline is not None and PRESET in axes:
        baseline = _variant({**axes, PRESET: baseline}, config)
    return Cell(
        id=entry["id"],
        name=entry["name"],
        folder=run,
        axes=axes,
        variant=_variant(axes, config),
        baseline=baseline,
        group=", ".join(f"{key}={label(axes[key])}" for key in others) or "all",
        warmup=value(WARMUP, int),
        lr=value(RATE, float),
        seed=value(SEED, int),
        state=state,
        result=result,
        error=error,
    )


def _variant(axes: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    block = [key for key in axes if key.startswith(BLOCK) and key != PRESET]
    parts = [label(axes[PRESET])] if PRESET in axes else []
    parts += [f"{key.removeprefix(BLOCK)}={label(axes[key])}" for key in block]
    return "+".join(parts) or label(lookup(config, PRESET) or "base")


def _outcome(
    run: Path, identity: str, metric: str | None, prunes: bool
) -> tuple[dict[str, Any] | None, State, str | None]:
    """Result, state, and the last line of the error of one run folder.

    Where the grid no longer `prunes`, a run that was pruned before is an unfinished one.
    """
    name = RESULT
    try:
        if result := read_result(run / RESULT, identity, metric):
            return result, result["status"], None
        name = PRUNED
        if prunes and read_pruned(run / PRUNED, identity):
            return None, "pruned", None
    except Newer as error:
        raise UserError(f"{run / name}: {error}") from error
    except Unsound as error:
        return None, "damaged", f"{name}: {error}"
    attempts = [path for path in (run / "attempts").glob("*") if path.name.isdigit()]
    if not attempts:
        return None, "waiting", None
    error = max(attempts, key=lambda path: int(path.name)) / "error.txt"
    if not error.is_file():
        return None, "unfinished", None
    lines = error.read_text(encoding="utf-8", errors="replace").split("\n")
    return None, "failed", next((line for line in reversed(lines) if line.strip()), "no message")


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _columns_as_text(axes: Mapping[str, list[Any]], keys: Iterable[str]) -> set[str]:
    """Axes whose values do not share one primitive type, which no column of a table could hold."""
    kinds = {key: {type(value) for value in axes[key] if value is not None} for key in keys}
    return {key for key in kinds if len(kinds[key]) > 1 or kinds[key] & {dict, list}}
