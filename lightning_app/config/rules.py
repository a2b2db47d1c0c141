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
from typing import Any, NamedTuple, Protocol

from lightning_app.config.classes import classes_of
from lightning_app.config.tree import (
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
from lightning_app.core.errors import UserError, nearest
from lightning_app.runs.parent import FIELD as _PARENT


class HasFields(Protocol):
    """What the rows of a table are about."""

    def value(self, field: str) -> Any:
        """Return the value of a dotted field."""
        ...


class Refusal(NamedTuple):
    """Two or more fields that do not go together.

    `broken` takes the subject and the values of the fields. It returns nothing where they go
    together, else the values for `sentence`: one, a tuple, or true for those of the fields.
    """

    name: str
    fields: tuple[str, ...]
    broken: Callable[..., Any]
    sentence: str


def check_rules(rules: Iterable[Refusal], subject: HasFields) -> None:
    """Refuse a subject that breaks a rule. Raises `UserError` naming the rule's first field."""
    for rule in rules:
        values = [subject.value(field) for field in rule.fields]
        if found := rule.broken(subject, *values):
            given = values if found is True else found if isinstance(found, tuple) else (found,)
            raise UserError(f"{rule.fields[0]}: {rule.sentence.format(*given)}")


def _first(found: Iterable[Any]) -> Any:
    return next(iter(found), None)


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
        lambda _, steps, epochs, time: steps == -1 and not (epochs or time),
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
    Clash(("keeps_norms", "decays_weights"), "{1} with {0}, which undoes it; use 0"),
    Clash(
        ("scales_logits", "other_logits"),
        "{0} scales queries and keys, which does not serve {1}; remove one of them",
    ),
)
"""The traits are declared by the optimizer, the schedule and the blocks (`traits` of each) and, for
Lightning's parts, in the two tables below."""

CALLBACK_TRAITS: Mapping[str, tuple[str, ...]] = {
    "WeightAveraging": ("changes_weights",),
    "EMAWeightAveraging": ("changes_weights",),
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
        if any(each in path.lower() for each in _SPLITTING):
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


def long_warmup(warmup: int, steps: int) -> str | None:
    """Warn that a warm-up takes more than `LONG_WARMUP` of the steps; None if it does not.

    The rate is then below its peak in most steps, and the mean rates of runs with different
    warm-ups differ by more than the effect of the warm-up itself.
    """
    if not 0 < steps * LONG_WARMUP < warmup:
        return None
    return (
        f"model.schedule.warmup_steps: {warmup} is more than half of the {steps} steps of the run, "
        "which is below its peak rate for most of them"
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

    @property
    def seeds(self) -> int:
        return len(self.axes.get(SEED, [None]))


def _off_axis(axes: Mapping[str, list[Any]], axis: str, value: Any) -> bool:
    return not any(same(value, each) for each in axes[axis])


def _texts(values: Iterable[Any]) -> list[str]:
    return [str(value) for value in values]


def _no_axis(given: Iterable[str], axes: Iterable[str]) -> Any:
    """The first name that is no axis, and a hint."""
    known = list(axes)
    return _first((name, nearest(str(name), known)) for name in given if name not in known)


def _excluded_value(grid: GridSubject, exclude: Any) -> Any:
    values_of = {axis: set(map(key_of, values)) for axis, values in grid.axes.items()}
    return _first(
        (axis, value, nearest(str(value), _texts(grid.axes[axis])))
        for entry in exclude or ()
        for axis, value in entry.items()
        if key_of(value) not in values_of[axis]
    )


def _reference(key: str, axis: str) -> Refusal:
    def broken(grid: GridSubject, sensitivity: Any) -> Any:
        value = (sensitivity or {}).get(key)
        if value is None or axis not in grid.axes or not _off_axis(grid.axes, axis, value):
            return None
        values = _texts(grid.axes[axis])
        return value, axis, ", ".join(values), nearest(str(value), values)

    fields = (f"sensitivity.{key}", "sensitivity")
    sentence = "{0!r} is not on the axis {1} ({2}){3}"
    return Refusal("a reference is a value", fields, lambda grid, _, s: broken(grid, s), sentence)


def _fixed(grid: GridSubject, search: Any) -> Any:
    """A searched field that an axis sets as well, and the axis."""
    for field in search.fields if search else ():
        clash = _first(a for a in grid.axes if f"{a}.".startswith(f"{field}."))
        clash = clash or _first(a for a in grid.axes if field.startswith(f"{a}."))
        if clash or field == SEED:
            return field, clash or SEED
    return None


def _searched_other(grid: GridSubject, search: Any) -> Any:
    fields = search.fields if search else ()
    return _first(
        (field, found)
        for field in fields
        if isinstance(found := lookup(grid.base, field), bool | str | list | dict)
    )


def _few(grid: GridSubject, given: Any, together: int) -> Any:
    """The least budget, if the one that is given does not suffice for a round."""
    least = together * grid.seeds
    return given.budget < least and (least, together, grid.seeds, given.budget)


_BUDGET = "expected at least {0} runs per arm, for the first {1} %s with {2} seeds, found {3}"


def _unlike_variants(grid: GridSubject, variants: Any, _: Any) -> Any:
    """An entry of `variants` that is no axis of the model, its optimizer or its schedule: variants
    are compared in one group, and other axes change what is read, counted or how long."""
    of_model = [a for a in grid.axes if a.startswith("model.") and a not in (WARMUP, RATE)]
    known = [axis for axis in of_model if not axis.startswith("model.objective.")]
    for axis in variants or ():
        if axis.startswith(BLOCK):
            return axis, "; those of model.block are variants anyway"
        if axis not in known:
            return axis, nearest(axis, known)
    return None


def _no_group(grid: GridSubject, labels: Any, _: Any) -> Any:
    known = [axis for axis in grid.axes if axis not in (SEED, WARMUP, RATE)]
    return _no_axis(labels or (), known)


def _unlike_counts(grid: GridSubject, labels: Any, _: Any) -> Any:
    return _first(
        (axis, len(grid.axes[axis]), repr(names))
        for axis, names in (labels or {}).items()
        if not len(names) == len(set(names)) == len(grid.axes[axis])
    )


def _wiring(grid: GridSubject) -> tuple[str, ...]:
    return (BLOCK, *(grid.value("variants") or ()))


def _unclear_name(grid: GridSubject, labels: Any, _: Any) -> Any:
    """A name that could not be joined to that of a variant; an empty one is omitted there."""
    for axis, names in (labels or {}).items():
        may_be_empty = axis != PRESET and axis.startswith(_wiring(grid))
        for name in names:
            words = name.replace("+", " ").replace(",", " ").split()
            if name != " ".join(words) or name == "all" or not (name or may_be_empty):
                return axis, "" if may_be_empty else " and not empty", repr(name)
    return None


def _name_of_several(grid: GridSubject, labels: Any, _: Any) -> Any:
    if not labels:
        return None
    wiring = _wiring(grid)
    block = [axis for axis in grid.axes if axis.startswith(wiring)]
    names = named_values(labels, grid.axes)
    settings = (
        dict(zip(block, values, strict=True))
        for values in product(*(grid.axes[axis] for axis in block))
    )
    counts = Counter(variant(setting, {}, names, wiring) for setting in settings)
    name, count = counts.most_common(1)[0]
    return count > 1 and (", ".join(labels), name, count)


def _compared(grid: GridSubject, compare: Any, _: Any) -> Any:
    return _first(
        (axis, nearest(str(axis), grid.axes) or f"; the axes are {', '.join(grid.axes)}")
        for axis in compare or ()
        if axis not in grid.axes
    )


def _no_baseline(grid: GridSubject, compare: Any, _: Any) -> Any:
    return _first(
        (axis, ", ".join(map(label, grid.axes[axis])), label(value))
        for axis, value in (compare or {}).items()
        if _off_axis(grid.axes, axis, value)
    )


def _doubled(given: Any) -> Any:
    return _first(each for each, count in Counter(given or ()).items() if count > 1)


COMPARE_RULES = (
    Refusal("a comparison has an axis", ("compare", "axes"), _compared, "no axis {0!r}{1}"),
    Refusal(
        "seeds are averaged over",
        ("compare", "axes"),
        lambda _, compare, __: SEED in (compare or ()) and SEED,
        "{0}: seeds are what differences are averaged over",
    ),
    Refusal(
        "a baseline is a value",
        ("compare", "axes"),
        _no_baseline,
        "{0}: expected one of its values ({1}), found {2}",
    ),
)

_NO_FINAL_LOSS = "a pruned run has no final loss, so no sensitivity could be reported"

GRID_RULES = (
    Refusal(
        "a cell starts from one parent",
        ("init_from",),
        lambda grid, _: (
            grid.parent
            and (lookup(grid.base, _PARENT) is not None or _PARENT in grid.axes)
            and _PARENT
        ),
        "cannot be combined with {0}; give one of them",
    ),
    Refusal(
        "a parent grid has its folder",
        ("init_from.grid", "name"),
        lambda grid, _, name: grid.parent and grid.parent.name == name and name,
        "has the name of this grid, '{0}', and so its folder",
    ),
    Refusal(
        "a parent grid lists its values",
        ("init_from.grid",),
        lambda grid, _: grid.parent and grid.parent.adapts and grid.parent.name,
        "the runs of '{0}' depend on its search or refinement; list the values that it chose as "
        "axes of a grid of their own",
    ),
    Refusal(
        "a parent grid keeps its checkpoints",
        ("init_from.grid",),
        lambda grid, _: (
            grid.parent
            and grid.parent.checkpoints not in ("all", "last")
            and (grid.parent.name, grid.parent.checkpoints)
        ),
        "'{0}' keeps checkpoints: {1}, but cells start from the last checkpoint of a run; set it "
        "to last or all there",
    ),
    Refusal(
        "a parent grid has no pruner",
        ("init_from.grid",),
        lambda grid, _: grid.parent and grid.parent.pruner and grid.parent.name,
        "'{0}' has a pruner, and a pruned run cannot be continued; remove it there",
    ),
    Refusal(
        "an exclusion says what",
        ("exclude",),
        lambda _, exclude: not all(exclude or ()),
        "an empty entry would exclude every cell",
    ),
    Refusal(
        "an exclusion has axes",
        ("exclude", "axes"),
        lambda grid, exclude, _: _no_axis((a for e in exclude or () for a in e), grid.axes),
        "no axis '{0}'{1}",
    ),
    Refusal(
        "an exclusion has values",
        ("exclude",),
        _excluded_value,
        "{0}: no value {1!r} on the axis{2}",
    ),
    _reference("reference_warmup", WARMUP),
    _reference("baseline", PRESET),
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
        "one of two chooses rates",
        ("refine", "search"),
        lambda _, refine, search: bool(refine and search),
        "cannot be combined with 'search'; a search chooses its own rates",
    ),
    Refusal(
        "a searched field is on no axis",
        ("search.fields", "search"),
        lambda g, _, s: _fixed(g, s),
        "{0}: is also on the axis {1}",
    ),
    Refusal(
        "a searched field is a number",
        ("search.fields", "search"),
        lambda grid, _, search: _searched_other(grid, search),
        "{0}: expected a field that is a number, found {1!r} in the base",
    ),
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
            refine and _first((a, RATE) for a, (other, _) in grid.linked.items() if other == RATE)
        ),
        "{0}: follows {1}, whose further values refine chooses; give it values of its own",
    ),
    Refusal(
        "no rate is excluded that is chosen",
        ("exclude", "refine"),
        lambda _, exclude, refine: refine and any(RATE in each for each in exclude or ()) and RATE,
        "names {0}, which refine chooses by results; exclude by other axes",
    ),
    Refusal(
        "a refinement has a round",
        ("refine.budget", "refine"),
        lambda grid, _, refine: refine and _few(grid, refine, len(grid.axes[RATE])),
        _BUDGET % "rates",
    ),
    Refusal(
        "variants are of the model",
        ("variants", "axes"),
        _unlike_variants,
        "{0}: expected an axis of the grid that changes the model{1}",
    ),
    Refusal(
        "a variant's axis is given once",
        ("variants",),
        lambda _, variants: _doubled(variants),
        "an axis is given twice",
    ),
    Refusal(
        "a label sets runs apart",
        ("labels", "axes"),
        _no_group,
        "{0}: no axis of the grid that sets variants or groups of runs apart{1}",
    ),
    Refusal(
        "a label for each value",
        ("labels", "axes"),
        _unlike_counts,
        "{0}: expected {1} different texts, one for each value, found {2}",
    ),
    Refusal(
        "a label can be joined",
        ("labels", "variants"),
        _unclear_name,
        "{0}: expected words with single spaces, without + and comma, not 'all'{1}, found {2}",
    ),
    Refusal(
        "a name is one variant's",
        ("labels", "variants"),
        _name_of_several,
        "{0}: '{1}' would name {2} variants; expected another name for each",
    ),
    Refusal(
        "a factor has an axis",
        ("factors", "axes"),
        lambda grid, factors, _: _first(
            (name, axis, nearest(axis, grid.axes))
            for name, axis in (factors or {}).items()
            if axis not in grid.axes
        ),
        "{0}: no axis '{1}'{2}",
    ),
    Refusal(
        "a measure is no factor",
        ("factors", "axes"),
        lambda _, factors, __: _first(
            item for item in (factors or {}).items() if item[1] in (SEED, WARMUP, RATE)
        ),
        "{0}: {1} has measures of its own and is no factor",
    ),
    Refusal(
        "a factor has two values",
        ("factors", "axes"),
        lambda grid, factors, _: _first(
            (name, axis, len(grid.axes[axis]))
            for name, axis in (factors or {}).items()
            if len(grid.axes[axis]) != 2
        ),
        "{0}: {1} has {2} values; a factor has two",
    ),
    Refusal(
        "a factor's axis is given once",
        ("factors",),
        lambda _, factors: _doubled((factors or {}).values()),
        "an axis is given twice",
    ),
    *COMPARE_RULES,
)
