"""Checks on all cells of a grid together. Each raises `UserError` naming the field."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_app.config.classes import OWN_CLASS, classes_of
from lightning_app.config.grid import GridSpec
from lightning_app.config.rulers import EVALUATION, differences, in_raw_text, ruler
from lightning_app.config.rules import schedule_warnings
from lightning_app.config.tree import (
    CORPUS,
    PRESET,
    SEED,
    Tree,
    cell_setting,
    key_of,
    keys_of,
    label,
    lookup,
    same,
    value_name,
)
from lightning_app.core.errors import UserError, nearest
from lightning_app.plugins import CALLBACKS
from lightning_app.runs.records import Cell, Waiting
from lightning_app.scores.task_facts import (
    DEFAULT_TASK,
    GENERAL,
    LOSS,
    NEXT_SENTENCE,
    TASKS,
    task_facts,
)

_DEVICES = "trainer.devices"

Configs = list[dict[str, Any]]  # of the cells, in their order
Configured = tuple[Cell, Mapping[str, Any]]


def devices_of(spec: GridSpec) -> int:
    """The number of devices of each cell, from the grid file; `auto` and -1 mean 1.

    Raises `UserError` for a list of devices.
    """
    axis = spec.axes.get(_DEVICES)
    return _count(spec, axis[0] if axis else lookup(spec.base_config, _DEVICES))


def check_axes(spec: GridSpec, base: Tree) -> None:
    """Check that every axis names a field of the resolved base, or a part of an empty field."""
    fields = list(keys_of(base))
    for axis in spec.axes:
        parent = lookup(base, axis.rpartition(".")[0])
        inside = axis.rpartition(".")[0] in fields and (parent is None or parent == {})
        if axis not in fields and not inside:
            raise UserError(f"{spec.source}: axes: no field '{axis}'{nearest(axis, fields)}")


def check_identities(spec: GridSpec, cells: list[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.id, cell)
        if other is not cell:
            axes = [key for key in cell.axes if not same(cell.axes[key], other.axes[key])]
            values = [f"{key}={label(each.axes[key])}" for each in (other, cell) for key in axes]
            raise UserError(f"{spec.source}: axes: the same experiment twice: {', '.join(values)}")


def check_reference(spec: GridSpec, configs: Configs) -> None:
    schedules = [config["model"]["schedule"] for config in configs]
    schedules = [each for each in schedules if each["kind"] not in ("constant", "bert")]
    schedules = [each for each in schedules if each["coupling"] == "decoupled"]
    longest = max((each["warmup_steps"] for each in schedules), default=0)
    for each in schedules:
        if each["reference_steps"] is None or each["reference_steps"] < longest:
            raise UserError(
                f"{spec.source_of('model.schedule.reference_steps')}: "
                f"model.schedule.reference_steps: {each['reference_steps']} is "
                f"below the largest warm-up of the grid; a decoupled schedule needs {longest} or "
                f"more, the same for every cell"
            )


def check_budgets(spec: GridSpec, configs: Configs) -> None:
    """Refuse settings that end the runs of a grid before the number of steps in their configs.

    Runs of different lengths are not compared; a run that ends early for a reason outside its
    config makes its cell fail.
    """
    instead = "`ablate run --max-time` ends a grid in time, and the same command continues it"
    pruner = ", and `pruner: median` ends hopeless cells"
    for trainer in (config["trainer"] for config in configs):
        classes = (_ends_runs(*each) for each in classes_of(trainer.get("callbacks")))
        ends = [("trainer.max_time", trainer.get("max_time"), "")]
        ends += [("trainer.callbacks", name, pruner) for name in classes]
        for field, end, further in ends:
            if end is not None:
                raise UserError(
                    f"{spec.source_of(field)}: {field}: {end} would cut cells short, and only runs "
                    f"of all their steps are compared; {instead}{further}"
                )


def _ends_runs(path: str, arguments: Mapping[str, Any]) -> str | None:
    """The name of a Trainer callback, or a plug-in's subclass of one, that ends runs."""
    last = path.rpartition(".")[2]
    plugins = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in CALLBACKS.values()}
    names = [each.__name__ for each in plugins[path].__mro__] if path in plugins else [last]
    if "EarlyStopping" in names or ("Timer" in names and arguments.get("duration") is not None):
        return last
    return None


def unusual_schedules(configs: Configs) -> tuple[str, ...]:
    """The warnings about the schedules and rates of the cells, each once."""
    pairs = ((config["model"]["schedule"], config["trainer"]["max_steps"]) for config in configs)
    found = (schedule_warnings(schedule, steps) for schedule, steps in pairs)
    return tuple(dict.fromkeys(chain(chain.from_iterable(found), _capped(configs))))


def _capped(configs: Configs) -> Iterator[str]:
    """Name the rates that adafactor's own cap makes one in most steps, of each schedule."""
    rates: dict[str, tuple[dict[str, Any], int, set[float]]] = {}
    for config in configs:
        own, schedule = config["model"]["optimizer"], config["model"]["schedule"]
        steps = config["trainer"]["max_steps"]
        plain = not own.get("weight_decay") and own.get("block_rate", 1.0) == 1.0  # a decay is free
        if own["kind"] == "adafactor" and plain and steps > 0:
            rates.setdefault(label([schedule, steps]), (schedule, steps, set()))[2].add(own["lr"])
    for schedule, steps, of in rates.values():
        from lightning_app.models.optim import ScheduleConfig

        factor, every = ScheduleConfig(**schedule).factor, range(1, steps + 1)
        caps = [step**-0.5 / max(factor(step, steps), 1e-30) for step in every]
        alike = {lr: sum(cap <= lr for cap in caps) for lr in sorted(of)}
        if len(most := [lr for lr in alike if alike[lr] > steps / 2]) > 1:
            yield (
                f"model.optimizer.lr: {', '.join(map(label, most))}: adafactor takes at most 1 / "
                f"sqrt(step), so they are one rate in {alike[most[0]]} of {steps} steps"
            )


def check_devices(spec: GridSpec, configs: Configs) -> None:
    """Check that each cell runs on one host, and that all use the same number of devices."""
    devices = {_count(spec, config["trainer"].get("devices")) for config in configs}
    if len(devices) > 1:
        found = ", ".join(map(str, sorted(devices)))
        raise UserError(f"{spec.source}: trainer.devices: {found}; one number for all cells")
    for config in configs:
        nodes = config["trainer"].get("num_nodes", 1)
        if nodes != 1:
            raise UserError(
                f"{spec.source}: trainer.num_nodes: {nodes}; each cell of a grid runs on 1 host"
            )


def _count(spec: GridSpec, value: Any) -> int:
    if value in (None, "auto", -1, "-1"):
        return 1
    if isinstance(value, list) or (isinstance(value, str) and "," in value):
        raise UserError(
            f"{spec.source}: trainer.devices: {value!r} names devices; the supervisor assigns "
            f"them, so give the number of devices for each cell"
        )
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{spec.source}: trainer.devices: expected 1 or more, found {value!r}")
    return int(text)


def check_baseline(spec: GridSpec, cells: Sequence[Cell | Waiting]) -> None:
    baseline = spec.sensitivity.get("baseline")
    if baseline is None or PRESET in spec.axes:
        return
    known = list(dict.fromkeys(spec.variant(cell.axes) for cell in cells))
    if baseline not in known:
        raise UserError(
            f"{spec.source}: sensitivity.baseline: no variant '{baseline}' "
            f"({', '.join(known)}){nearest(baseline, known)}"
        )


def check_reported(spec: GridSpec, configs: Configs) -> None:
    """Check that every cell reports the grid's metric."""
    owners = [
        name
        for name, task in TASKS.items()
        if spec.metric in (task.monitored.metric, *(score.metric for score in task.scores))
    ]
    for config in configs:
        objective = config["model"].get("objective", {})
        known = spec.metric in GENERAL or owners
        if not known and lookup(config, OWN_CLASS) is None:
            raise UserError(
                f"{spec.source}: metric.name: a cell reports '{spec.metric}' only with a class in "
                f"{OWN_CLASS} that logs it"
            )
        kind = objective.get("kind", DEFAULT_TASK)
        reports = not known or spec.metric in GENERAL or kind in owners
        needed = {f"kind: {' or '.join(owners)}": reports} | _conditions(spec.metric, objective)
        for condition in (each for each, holds in needed.items() if not holds):
            raise UserError(
                f"{spec.source}: metric.name: a cell reports '{spec.metric}' only with "
                f"model.objective.{condition}"
            )


def _conditions(metric: str, objective: Mapping[str, Any]) -> dict[str, bool]:
    """The settings needed for a run of its task to report a metric, and whether they hold."""
    return {
        "evaluate_test: true": not metric.startswith("test/")
        or objective.get("evaluate_test", True),
        "next_sentence: true": metric not in [score.metric for score in NEXT_SENTENCE]
        or objective.get("next_sentence", False),
        "validation_bleu: 1 or more": metric != "val/bleu"
        or objective.get("validation_bleu", 1) > 0,
    }


def check_ranked(spec: GridSpec, cells: Sequence[Cell], configs: Configs) -> None:
    """Check that the pruner's metric counts the same things in all cells."""
    if spec.pruner is None:
        return
    settings = [cell_setting(cell.axes, of) for cell, of in zip(cells, configs, strict=True)]
    why = differences([ruler(setting, spec.metric) for setting in settings])
    if why:
        raise UserError(
            f"{spec.source}: pruner: ranks cells by '{spec.metric}', which does not count the same "
            f"in all of them ({why}); use one value of each, or no pruner"
        )


def axis_cautions(spec: GridSpec, cells: Sequence[Cell], configs: Configs) -> list[str]:
    """Return cautions: metrics that cannot compare an axis, values that read more tokens."""
    said: dict[str, None] = {}
    for axis in spec.axes:
        if axis != SEED and axis not in spec.linked:
            said |= dict.fromkeys(_cautions_of(spec, axis, cells, configs))
    return list(said)


def _cautions_of(spec: GridSpec, axis: str, cells: Sequence[Cell], configs: Configs) -> list[str]:
    if axis in EVALUATION and len(spec.axes[axis]) > 1:
        return [f"{axis}: changes only the evaluation, so no value of it can be better or worse"]
    base = key_of(spec.compare.get(axis, spec.axes[axis][0]))
    follow = {each for each, (other, _) in spec.linked.items() if other == axis}
    places: dict[Any, dict[Any, Configured]] = {}
    for cell, config in zip(cells, configs, strict=True):
        others = {k: v for k, v in cell.axes.items() if k not in (axis, SEED, *follow)}
        at = places.setdefault(label(others), {})
        at.setdefault(key_of(cell.axes[axis]), (cell, config))
    found = []
    for at in places.values():
        for other in (pair for key, pair in at.items() if base in at and key != base):
            found += _cautions_of_two(spec, axis, at[base], other)
    return found


def _cautions_of_two(spec: GridSpec, axis: str, base: Configured, other: Configured) -> list[str]:
    """The differences of two cells that differ in one axis and the axes linked to it."""
    found = []
    (cell, config), (_, config2) = base, other
    settings = [cell_setting(each.axes, of) for each, of in (base, other)]
    facts = task_facts(settings[0](TASKS.field) or DEFAULT_TASK)
    scores = facts.by_corpus.get(str(settings[0](CORPUS)), ())
    metric = scores[0].metric if scores and spec.metric == LOSS else spec.metric
    if why := differences([ruler(setting, metric) for setting in settings]):
        instead = [
            each.metric
            for each in in_raw_text(settings[0], metric)
            if not differences([ruler(setting, each.metric) for setting in settings])
            and all(
                all(_conditions(each.metric, of["model"]["objective"]).values())
                for of in (config, config2)
            )
        ]
        by = f"compared by {instead[0]} if every run has it" if instead else "not compared"
        found.append(f"{axis}: {metric} does not count the same at its values ({why}): {by}")
    value, first = (value_name(axis, each.axes[axis], {}) for each in (other[0], cell))
    read = zip(("tokens", "epochs"), most_read(config2), most_read(config), strict=True)
    for what, mine, theirs in read:
        if mine and theirs and mine != theirs:
            times = f"{mine / theirs:.2g} times the {what}"
            found.append(f"{axis}: a run at {value} reads up to {times} of one at {first}")
            break
    return found


def most_read(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the maximum tokens that a run reads, or its epochs if its steps are unbounded."""
    trainer = config["trainer"]
    if trainer["max_steps"] < 1:
        return None, trainer.get("max_epochs")
    batches = trainer["max_steps"] * (trainer.get("accumulate_grad_batches") or 1)
    schedule = config["model"]["schedule"]
    if rising := schedule.get("batch_warmup_steps"):  # not in configs from before the field
        within = min(rising, batches)
        left_out = within - within * (within + 1) / (2 * rising)
        batches -= (1.0 - schedule["batch_start"]) * left_out
    data = config["data"]
    tokens = data["tokens_per_batch"]
    facts = task_facts(config["model"]["objective"]["kind"])
    if facts.in_windows(data.get("next_sentence", False)):
        tokens -= tokens % data["window"]
    return round(batches * tokens), None
