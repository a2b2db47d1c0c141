"""The rules of two parts: of a run's config and of a grid file, each a row of a table.

A rule of one field is beside its field, a rule of all cells in `grids/plan_checks.py`. A new
refusal of two parts is one row: a name, its fields, when they do not go together, a sentence. Parts
that would need a row for each pair declare traits instead, and `CLASHES` has the pairs of traits.
Fast to import: without torch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from lightning_app.config.classes import classes_of
from lightning_app.config.rulers import BUDGET, EVALUATION, differences, ruler
from lightning_app.config.tree import (
    BLOCK,
    PRESET,
    RATE,
    SEED,
    WARMUP,
    label,
    lookup,
    named_values,
    same,
    variant,
)
from lightning_app.core.errors import UserError, nearest
from lightning_app.runs.parent import FIELD as _PARENT
from lightning_app.scores.task_facts import LOSS


class Refusal(NamedTuple):
    """Fields that do not always go together.

    `broken` takes the subject and the values of the fields. It returns or yields nothing where they
    go together, else the values for `sentence`: one, a tuple, or true for those of the fields.
    """

    name: str
    fields: tuple[str, ...]
    broken: Callable[..., Any]
    sentence: str = "{0}"


def check_rules(rules: Iterable[Refusal], subject: Any) -> None:
    """Refuse a subject that breaks a rule. Raises `UserError` naming the rule's first field."""
    for rule in rules:
        values = tuple(subject.value(field) for field in rule.fields)
        clash = rule.broken(subject, *values)
        if isinstance(clash, Iterator):
            clash = next(clash, None)
        if clash:
            given = values if clash is True else clash if isinstance(clash, tuple) else (clash,)
            raise UserError(f"{rule.fields[0]}: {rule.sentence.format(*given)}")


# --- A run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSubject:
    """A complete config: its `tree`, its section `model` as an object, the facts of its `task`, and
    the memory of the stack that predicts, if it has one. `trains`: whether it is to be trained;
    else an earlier version may have accepted its schedule."""

    tree: Mapping[str, Any]
    model: Any
    task: Any
    memory: Any
    trains: bool

    def value(self, field: str) -> Any:
        return lookup(self.tree, field)


def _few_positions(run: RunSubject, longest: Any, kind: str) -> Any:
    needed = run.tree["data"][run.task.length] + run.task.marks
    few = run.model.architecture.order().longest < needed
    return few and (longest, kind, run.task.length, needed - run.task.marks, needed)


_STACKED: Mapping[str, tuple[Any, ...]] = {
    "model.objective.kind": ("causal_lm", "masked_lm", "translation"),
    "model.objective.next_sentence": (False,),
    "model.objective.validation_bleu": (0,),
    "model.objective.intermediate_weight": (0.0,),
    "model.objective.second_target_weight": (0.0,),
    "model.optimizer.kind": ("adam", "adamw"),
    "model.optimizer.bias_correction": (True,),
    "model.optimizer.second_moment_start": ("zero",),
    "model.optimizer.momentum_warmup_steps": (0,),
    "model.architecture.dropout": (0.0,),
    "model.architecture.attention_dropout": (0.0,),
    "model.block.query_key_noise": (None, 0.0),
    "model.block.stochastic_depth": (None, 0.0),
    "model.block.localised_span": (None,),
    "model.block.adaptive_span": (None,),
    "model.block.halting": (None,),
    "model.block.memory": (None,),
    "model.compile": ("none",),
    "model.init_from": (None,),
    "model.class_path": (None,),
    "data.class_path": (None,),
    "trainer.callbacks": (None, []),
    "trainer.logger": (None, True, False),
    "trainer.detect_anomaly": (False,),
    "trainer.plugins": (None, []),
    "trainer.strategy": ("auto",),
    "trainer.devices": ("auto", 1, "1"),
    "trainer.precision": ("32-true", "64-true", "bf16-mixed", 32, 64, "32", "64"),
}
"""The values that the cells of a pack may have: `torch.vmap` follows no draws and no parts that
keep a state, and what a pack logs and stores is that of plain runs."""


def _unstackable(run: RunSubject, pack: int) -> Iterator[str]:
    """Yield what a pack of models cannot have."""
    if pack < 1:
        yield f"{pack}; must be at least 1"
    for field, usual in _STACKED.items() if pack > 1 else ():
        if (value := run.value(field)) not in usual:
            least = f"use 1, or {' or '.join(map(str, usual))}"
            yield f"{pack} with {field} {value}, which stacked models do not have; {least}"
    task = run.value("model.objective")
    if pack > 1 and task["kind"] == "translation" and task["evaluate_test"]:
        yield f"{pack} with model.objective.evaluate_test true, which decodes; use 1, or false"


RUN_RULES = (
    Refusal(
        "a task has its architecture",
        ("model.architecture.kind", "model.objective.kind"),
        lambda run, kind, task: (
            run.task.architecture != kind and (kind, task, run.task.architecture)
        ),
        "'{0}' cannot serve model.objective.kind '{1}'; use '{2}'",
    ),
    Refusal(
        "a share of an epoch is one between epochs",
        ("trainer.val_check_interval", "trainer.check_val_every_n_epoch"),
        lambda _, interval, epochs: isinstance(interval, float) and epochs is None,
        "expected a whole number of steps, found {0}; a share of an epoch needs "
        "trainer.check_val_every_n_epoch",
    ),
    Refusal(
        "a run ends",
        ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time"),
        lambda _, steps, epochs, time: steps == -1 and epochs in (None, -1) and not time,
        "-1 never ends; set it, max_epochs or max_time",
    ),
    Refusal(
        "a schedule knows its end",
        ("trainer.max_steps", "model.schedule.kind"),
        lambda run, steps, _: run.model.schedule.ends and steps < 1,
        "the {1} schedule needs a number of steps",
    ),
    Refusal(
        "branches grow within the run",
        ("model.block.branch_ramp", "trainer.max_steps"),
        lambda run, ramp, steps: (
            run.trains and ramp and 0 < steps < ramp["steps"] and (ramp["steps"], steps)
        ),
        "steps {0}, within which the branches grow to their size; expected at most the {1} steps "
        "of the run",
    ),
    Refusal(
        "a batch that grows cuts no stream",
        ("model.schedule.batch_warmup_steps", "data.order"),
        lambda _, steps, order: steps and order == "streams",
        "{0} with data.order streams, each of which goes on in every batch; use 0",
    ),
    Refusal(
        "texts have positions",
        ("model.architecture.max_positions", "model.architecture.positions"),
        _few_positions,
        "{0} {1} positions are too few for data.{2} {3}; at least {4}",
    ),
    Refusal(
        "widths have rules",
        ("model.architecture.parametrization", "model.optimizer.kind", "model.objective.kind"),
        lambda _, rules, optimizer, task: (
            rules == "mup"
            and (optimizer not in ("adam", "adamw") or task not in ("causal_lm", "translation"))
        ),
        "mup has rules for model.optimizer.kind adam and adamw and for model.objective.kind "
        "causal_lm and translation, not for '{1}' with '{2}'; use standard",
    ),
    Refusal("a pack stacks models", ("model.pack",), _unstackable),
    Refusal(
        "a memory reads streams",
        ("data.order",),
        lambda run, order: run.memory is not None and order != "streams",
        "'{0}' with model.block.memory, which needs the segments of a text one after another; use "
        "'streams'",
    ),
)

_AVERAGED = ", which evaluates an average of weights"


class Clash(NamedTuple):
    """Two traits of parts that cannot be in one run; `{0}` and `{1}` are the parts."""

    traits: tuple[str, str]
    sentence: str


CLASHES = (
    Clash(("reads_whole", "splits"), "{0} reads whole parameters, which {1} splits; use ddp"),
    Clash(("averages", "splits"), f"{{1}}, which splits models, with {{0}}{_AVERAGED}; use ddp"),
    Clash(
        ("averages", "decays_rate"),
        f"{{1}} with {{0}}{_AVERAGED}, and which needs no decay of the rate; use constant",
    ),
    Clash(("averages", "changes_weights"), f"{{1}} with {{0}}{_AVERAGED}; remove one of them"),
    Clash(
        ("averages", "follows_steps"),
        f"{{1}} with {{0}}{_AVERAGED}: an average does not keep what the steps set or follow; use "
        "another kind",
    ),
    Clash(("averages_last", "averages_all"), f"{{0}} with {{1}}{_AVERAGED}; remove one of them"),
    Clash(("averages_last", "follows_steps"), "{0} with {1}, which no average keeps; remove one"),
    Clash(("packed", "follows_steps"), "{0} stacks models, which {1} does not allow; use pack 1"),
    Clash(("keeps_norms", "decays_weights"), "{1} with {0}, which undoes it; use 0"),
    Clash(
        ("scales_logits", "other_logits"),
        "{0} scales queries and keys, which does not serve {1}; remove one of them",
    ),
)
"""The traits are declared by the optimizer, the schedule and the blocks (`traits` of each) and, for
Lightning's parts, in the two tables below."""

CALLBACK_TRAITS: Mapping[str, tuple[str, ...]] = {
    "WeightAveraging": ("changes_weights", "averages_all"),
    "EMAWeightAveraging": ("changes_weights", "averages_all"),
    "LastAverage": ("changes_weights", "averages_last", "reads_whole"),
    "QKClip": ("changes_weights", "reads_whole", "scales_logits"),
}
_SPLITTING = ("fsdp", "deepspeed", "modelparallel", "model_parallel")


def declared(
    parts: Iterable[Any], callbacks: Iterable[str], strategy: Any
) -> Iterator[tuple[str, str]]:
    """Yield each trait of the parts of a run, with the part.

    Args:
        parts: The optimizer and the schedule as configs, and the specification of each block.
        callbacks: The names of the callbacks, and of the classes that they extend.
        strategy: The field of that name, or the name of its class.
    """
    for part in parts:
        yield from part.traits
    for name in callbacks:
        for trait in CALLBACK_TRAITS.get(name, ()):
            yield trait, f"trainer.callbacks: {name}"
    for path, _ in classes_of(strategy):
        if any(word in path.lower() for word in _SPLITTING):
            yield "splits", f"trainer.strategy: {path}"


def check_traits(traits: Iterable[tuple[str, str]]) -> None:
    """Refuse parts whose traits clash. Raises `UserError` naming both."""
    parts: dict[str, str] = {}
    for trait, part in traits:
        parts.setdefault(trait, part)
    for clash in CLASHES:
        if all(trait in parts for trait in clash.traits):
            raise UserError(clash.sentence.format(*(parts[trait] for trait in clash.traits)))


LONG_WARMUP = 0.5
"""The share of a run's steps above which its warm-up is long. Published warm-ups take 1 % (BERT) to
10 % (fine-tuning); up to half, the rate is at its peak or after it for most of the run."""


def schedule_warnings(schedule: Mapping[str, Any], steps: int) -> Iterator[str]:
    """Warn that a warm-up takes more than `LONG_WARMUP` of the steps, or that no step decays.

    Mean rates then differ by more than the effect of the warm-up itself. `inverse_sqrt` without a
    decay is not refused, as the kinds that end with the run are: a short trial of a run has none.
    """
    warmup, reference = schedule["warmup_steps"], schedule["reference_steps"]
    if 0 < steps * LONG_WARMUP < warmup:
        yield (
            f"model.schedule.warmup_steps: {warmup} is more than half of the {steps} steps of the "
            "run, which is below its peak rate for most of them"
        )
    decays = schedule["kind"] == "inverse_sqrt" and schedule["coupling"] == "decoupled"
    if decays and 0 < steps <= reference:
        yield (
            f"model.schedule.reference_steps: {reference}, where inverse_sqrt begins to decay: in "
            f"the {steps} steps of the run the rate stays constant after its warm-up; use kind "
            "constant, or a smaller reference_steps"
        )


# --- A grid file ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridSubject:
    """A grid file: its fields with their values as written, the `axes` with the values of each, the
    axes `linked` to another, the `base` config, the `metric`, and the parent grid, if any."""

    fields: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    linked: Mapping[str, tuple[str, Any]]
    base: Mapping[str, Any]
    metric: str
    parent: Any = None

    def value(self, field: str) -> Any:
        return self.fields.get(field)


def _values(grid: GridSubject, axis: str, value: Any) -> list[str]:
    values = grid.axes[axis]
    return [] if any(same(value, other) for other in values) else [str(other) for other in values]


def _exclude(grid: GridSubject, exclude: Any, _: Any) -> Iterator[str]:
    for entry in exclude or ():
        if not entry:
            yield "an empty entry would exclude every cell"
        for axis, value in entry.items():
            if axis not in grid.axes:
                yield f"no axis '{axis}'{nearest(str(axis), grid.axes)}"
            elif values := _values(grid, axis, value):
                yield f"{axis}: no value {value!r} on the axis{nearest(str(value), values)}"


def _reference(key: str, axis: str) -> Refusal:
    def broken(grid: GridSubject, _: Any, sensitivity: Any) -> Iterator[tuple[Any, ...]]:
        value = (sensitivity or {}).get(key)
        if value is not None and axis in grid.axes and (values := _values(grid, axis, value)):
            yield value, axis, ", ".join(values), nearest(str(value), values)

    fields = (f"sensitivity.{key}", "sensitivity")
    sentence = "{0!r} is not on the axis {1} ({2}){3}"
    return Refusal("a reference is a value", fields, broken, sentence)


def _searched(grid: GridSubject, _: Any, search: Any) -> Iterator[str]:
    for field, values in search.fields.items() if search else ():
        clash = [
            a for a in grid.axes if f"{a}.".startswith(f"{field}.") or field.startswith(f"{a}.")
        ]
        if clash or field == SEED:
            yield f"{field}: is also on the axis {clash[0] if clash else SEED}"
        if isinstance(base := lookup(grid.base, field), bool | str | list | dict):
            yield f"{field}: expected a field that is a number, found {base!r} in the base"

        def at(value: Any, field: str = field) -> Callable[[str], Any]:
            first = {axis: values[0] for axis, values in grid.axes.items()} | {field: value}
            return lambda key: first[key] if key in first else lookup(grid.base, key)

        ends = [ruler(at(value), grid.metric) for value in (values.low, values.high)]
        if field in (*EVALUATION, *BUDGET) or differences(ends):
            yield (
                f"{field}: changes what {grid.metric} counts, or how much a run reads, so that "
                "trials cannot be ranked by it; search other fields, and make it an axis"
            )


def _few(grid: GridSubject, given: Any, together: int) -> Any:
    """The least budget, if the one that is given does not suffice for a round."""
    if given.budget is None:
        return None
    seeds = len(grid.axes.get(SEED, [None]))
    return given.budget < together * seeds and (together * seeds, together, seeds, given.budget)


_BUDGET = "expected at least {0} runs per arm, for the first {1} %s with {2} seeds, found {3}"


def _continued(grid: GridSubject, _: Any) -> Iterator[str]:
    above = grid.parent
    if above is None:
        return
    if above.name == grid.value("name"):
        yield f"has the name of this grid, '{above.name}', and so its folder"
    if above.adapts:
        yield (
            f"the runs of '{above.name}' depend on its search or refinement; list the values that "
            "it chose as axes of a grid of their own"
        )
    if above.checkpoints not in ("all", "last"):
        yield (
            f"'{above.name}' keeps checkpoints: {above.checkpoints}, but cells start from the last "
            "checkpoint of a run; set it to last or all there"
        )
    if above.pruner is not None:
        yield f"'{above.name}' has a pruner, and a pruned run cannot be continued; remove it there"


def _variants(grid: GridSubject, variants: Any, _: Any) -> Iterator[str]:
    """Variants are compared in one group; axes that are not of the model, its optimizer or its
    schedule change what is read, counted or how long."""
    of_model = [a for a in grid.axes if a.startswith("model.") and a not in (WARMUP, RATE)]
    axes = [axis for axis in of_model if not axis.startswith("model.objective.")]
    for axis in variants or ():
        if axis.startswith(BLOCK):
            hint = "; those of model.block are variants anyway"
        else:
            hint = nearest(axis, axes)
        if axis not in axes or axis.startswith(BLOCK):
            yield f"{axis}: expected an axis of the grid that changes the model{hint}"
    if len(set(variants or ())) < len(variants or ()):
        yield "an axis is given twice"


def _labels(grid: GridSubject, labels: Any, variants: Any) -> Iterator[str]:
    """Names of the values of variants are joined to that of a variant, where an empty one is left
    out, and those of other axes to that of a group of runs."""
    wiring = (BLOCK, *(variants or ()))
    axes = [axis for axis in grid.axes if axis not in (SEED, WARMUP, RATE)]
    for axis, names in (labels or {}).items():
        if axis not in axes:
            hint = nearest(axis, axes)
            yield f"{axis}: no axis of the grid that sets variants or groups of runs apart{hint}"
        elif not len(names) == len(set(names)) == len(grid.axes[axis]):
            wanted = f"{len(grid.axes[axis])} different texts, one for each value"
            yield f"{axis}: expected {wanted}, found {names!r}"
        may_be_empty = axis != PRESET and axis.startswith(wiring)
        for name in names:
            plain = " ".join(name.replace("+", " ").replace(",", " ").split())
            if name != plain or name == "all" or not (name or may_be_empty):
                yield (
                    f"{axis}: expected words with single spaces, without + and comma, not 'all'"
                    f"{'' if may_be_empty else ' and not empty'}, found {name!r}"
                )
    names = _variant_names(grid, variants, labels) if labels else []
    for name, count in Counter(names).most_common(1):
        if count > 1:
            yield (
                f"{', '.join(labels)}: '{name}' would name {count} variants; expected another name "
                "for each"
            )


def _variant_names(grid: GridSubject, variants: Any, labels: Any) -> list[str]:
    wiring = (BLOCK, *(variants or ()))
    block = [axis for axis in grid.axes if axis.startswith(wiring)]
    names = named_values(labels or {}, grid.axes)
    points = product(*(grid.axes[axis] for axis in block))
    return [variant(dict(zip(block, point, strict=True)), {}, names, wiring) for point in points]


def _factors(grid: GridSubject, factors: Any, _: Any) -> Iterator[str]:
    for name, axis in (factors or {}).items():
        if axis not in grid.axes:
            yield f"{name}: no axis '{axis}'{nearest(axis, grid.axes)}"
        elif axis in (SEED, WARMUP, RATE):
            yield f"{name}: {axis} has measures of its own and is no factor"
        elif (count := len(grid.axes[axis])) != 2:
            yield f"{name}: {axis} has {count} values; a factor has two"
    if len(set((factors or {}).values())) < len(factors or ()):
        yield "an axis is given twice"


def _families(grid: GridSubject, families: Any, variants: Any, labels: Any) -> Iterator[str]:
    block = [axis for axis in grid.axes if axis.startswith((BLOCK, *(variants or ())))]
    names = named_values(labels or {}, grid.axes)
    texts = _variant_names(grid, variants, labels)
    texts += [label(value) for axis in block for value in grid.axes[axis]]
    texts += [name for axis in block for name in names.get(axis, {}).values()]
    for name, members in (families or {}).items():
        if not members:
            yield f"{name}: expected at least one variant"
        for member in members:
            if label(member) not in texts:
                hint = nearest(label(member), texts)
                yield f"{name}: {member!r} is no variant and no value of an axis of variants{hint}"


def _compare(grid: GridSubject, compare: Any, _: Any) -> Iterator[str]:
    for axis, baseline in (compare or {}).items():
        if axis not in grid.axes:
            hint = nearest(str(axis), grid.axes) or f"; the axes are {', '.join(grid.axes)}"
            yield f"no axis {axis!r}{hint}"
        elif axis == SEED:
            yield f"{axis}: seeds are what differences are averaged over"
        elif _values(grid, axis, baseline):
            values = ", ".join(map(label, grid.axes[axis]))
            yield f"{axis}: expected one of its values ({values}), found {label(baseline)}"


def _coarse(grid: GridSubject, _: Any, search: Any) -> Any:
    """Steps that are lost in 8 or 11 bits: each rate or warm-up trains another share of weights."""
    swept = [a for a in (RATE, WARMUP) if len(grid.axes.get(a, ())) > 1]
    swept += [a for a in (RATE, WARMUP) if search and a in search.fields]
    given = grid.axes.get("trainer.precision", [lookup(grid.base, "trainer.precision")])
    coarse = [precision for precision in given if precision in ("bf16-true", "16-true")]
    return swept and coarse and (swept[0], coarse[0])


def packs(axes: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether cells of a grid are trained in packs."""
    widths = axes.get("model.pack", [lookup(base, "model.pack")])
    return any(isinstance(width, int) and width > 1 for width in widths)


def _packs(grid: GridSubject, keep: Any, pruner: Any) -> Any:
    wrong = keep not in ("last", "none") or pruner
    return wrong and packs(grid.axes, grid.base) and (label(keep), label(pruner))


COMPARE = Refusal("comparisons have a baseline", ("compare", "axes"), _compare)
_NO_FINAL_LOSS = "a pruned run has no final loss, so no sensitivity could be reported"

GRID_RULES = (
    Refusal(
        "a cell starts from one parent",
        ("init_from",),
        lambda grid, _: (
            grid.parent and (lookup(grid.base, _PARENT) is not None or _PARENT in grid.axes)
        ),
        f"cannot be combined with {_PARENT}; give one of them",
    ),
    Refusal("a parent grid has runs to start from", ("init_from.grid",), _continued),
    Refusal(
        "a pack keeps last checkpoints",
        ("checkpoints", "pruner"),
        _packs,
        "{0} and pruner {1} with model.pack; a pack needs checkpoints last or none, and no pruner",
    ),
    Refusal("exclusions are cells", ("exclude", "axes"), _exclude),
    _reference("reference_warmup", WARMUP),
    _reference("baseline", PRESET),
    _reference("control", PRESET),
    Refusal(
        "a pruned run has no sensitivity",
        ("pruner", "sensitivity"),
        lambda _, pruner, sensitivity: pruner and any((sensitivity or {}).values()),
        f"cannot be combined with 'sensitivity': {_NO_FINAL_LOSS}",
    ),
    Refusal(
        "a pruned run has no warm-up to compare",
        ("pruner", "search"),
        lambda grid, pruner, search: (
            pruner and (len(grid.axes.get(WARMUP, ())) > 1 or (search and WARMUP in search.fields))
        ),
        f"cannot be combined with the axis {WARMUP}: {_NO_FINAL_LOSS}",
    ),
    Refusal(
        "a pruner sees its metric",
        ("pruner", "metric"),
        lambda grid, pruner, _: pruner and not grid.metric.startswith("val/") and grid.metric,
        "judges cells by metric.name at each validation, where '{0}' is not known; expected one of "
        "val/...",
    ),
    Refusal(
        "settings are chosen by the validation split",
        ("metric.name", "refine", "search"),
        lambda grid, _, refine, search: (
            (refine or search) and not grid.metric.startswith("val/") and grid.metric
        ),
        "'{0}' would choose settings by the split on which they are tested; expected one of "
        "val/..., and the report has the scores of the test split beside it",
    ),
    Refusal(
        "one of two chooses rates",
        ("refine", "search"),
        lambda _, refine, search: bool(refine and search),
        "cannot be combined with 'search'; a search chooses its own rates",
    ),
    Refusal("a search has free numbers", ("search.fields", "search"), _searched),
    Refusal(
        "a search has a round",
        ("search.budget", "search"),
        lambda grid, _, search: search and _few(grid, search, search.together),
        _BUDGET % "trials",
    ),
    Refusal(
        "a refinement needs final losses",
        ("pruner", "refine"),
        lambda _, pruner, refine: bool(pruner and refine),
        "cannot be combined with 'refine', which needs final losses",
    ),
    Refusal(
        "a refinement starts from rates",
        ("refine", "axes"),
        lambda grid, refine, _: (
            refine
            and (len(rates := grid.axes.get(RATE, [])) < 2 or RATE in grid.linked)
            and (RATE, len(rates))
        ),
        "expected an axis {0} of at least two rates, found {1}",
    ),
    Refusal(
        "nothing follows rates that are chosen",
        ("axes", "refine"),
        lambda grid, _, refine: (
            axis for axis, (other, _) in grid.linked.items() if refine and other == RATE
        ),
        f"{{0}}: follows {RATE}, whose further values refine chooses; give it values of its own",
    ),
    Refusal(
        "no rate is excluded that is chosen",
        ("exclude", "refine"),
        lambda _, exclude, refine: refine and any(RATE in entry for entry in exclude or ()),
        f"names {RATE}, which refine chooses by results; exclude by other axes",
    ),
    Refusal(
        "a refinement has a round",
        ("refine.budget", "refine"),
        lambda grid, _, refine: refine and _few(grid, refine, len(grid.axes[RATE])),
        _BUDGET % "rates",
    ),
    Refusal(
        "seeds are added to tuning studies",
        ("until", "search", "sensitivity"),
        lambda grid, until, search, sensitivity: (
            until
            and not (
                search
                and search.per == "seed"
                and grid.metric == LOSS
                and {0, (sensitivity or {}).get("reference_warmup")} <= {*grid.axes.get(WARMUP, ())}
            )
        ),
        f"needs search with per: seed, the metric {LOSS}, and an axis {WARMUP} with 0 and "
        "sensitivity.reference_warmup",
    ),
    Refusal(
        "further seeds are possible",
        ("until.most_seeds", "until", "axes"),
        lambda grid, _, until, __: (
            until
            and not 5 <= len(grid.axes.get(SEED, ())) <= until.most_seeds
            and (until.most_seeds, len(grid.axes.get(SEED, ())))
        ),
        f"expected at least the seeds of the axis {SEED}, 5 or more: found {{0}} and {{1}} seeds",
    ),
    Refusal(
        "nothing names seeds that are added",
        ("until", "exclude", "axes"),
        lambda grid, until, exclude, _: (
            until
            and (
                any(SEED in entry for entry in exclude or ())
                or any(SEED in (axis, other) for axis, (other, _) in grid.linked.items())
            )
        ),
        f"no axis may follow {SEED} and no exclusion may name it, since seeds are added",
    ),
    Refusal(
        "weights move at every rate",
        ("axes", "search"),
        _coarse,
        "{0}: several values with trainer.precision {1}, in which small steps leave weights "
        "unchanged, more of them at smaller rates; use bf16-mixed or 32-true",
    ),
    Refusal("variants are of the model", ("variants", "axes"), _variants),
    Refusal("labels name variants and groups", ("labels", "variants"), _labels),
    Refusal("factors have two values", ("factors", "axes"), _factors),
    Refusal("families have variants", ("families", "variants", "labels"), _families),
    COMPARE,
)
