"""A stack as a drawing: what stands on its stream, in order, as data that `text` and `svg` set.

Everything is read from the specification; nothing here knows the name of a preset.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, Literal

from lightning_app.blocks.attention import AttentionSpec, CarryKind, Projection, ProjectionGains
from lightning_app.blocks.block import BlockSpec, InitSpec
from lightning_app.blocks.norm import Norm
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue.folding import Side, layer_names, number, phrase, runs_of

Kind = Literal["SA", "CA", "FF"]

NAMES: dict[Kind, str] = {"SA": "self-attention", "CA": "cross-attention", "FF": "feed-forward"}
DRAWN = {
    *("carry", "score_divisor", "qk_norm", "value_norm", "head_gain", "query_key_noise", "shaping"),
    *("value", "value_gains", "output", "output_gains", "tied", "query_init"),
}
"""Fields of an attention that have words of their own; a new field is shown by its name."""
NORMS: dict[Norm, str] = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


@dataclass(frozen=True, kw_only=True)
class NormPart:
    """A norm that the stream or a branch passes."""

    kind: Norm


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A gain that the stream or a branch passes: its start, and how it is trained."""

    value: str
    notes: tuple[str, ...] = ()


Part = NormPart | Factor


@dataclass(frozen=True, kw_only=True)
class Inside:
    """One thing inside a sub-layer that the plain one does not have, in the order of the signal."""

    label: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A sub-layer and what stands between the stream and it, on both sides."""

    kind: Kind
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    inside: tuple[Inside, ...] = ()
    carry: CarryKind = "none"


@dataclass(frozen=True, kw_only=True)
class Sum:
    """One residual formula: the branches that read one place and join one skip.

    `skip` is what the skip passes, None where there is no skip. `bottom` adds the layer's input,
    through the same factors. `shared` stands before the fork of several branches.
    """

    branches: tuple[Branch, ...]
    shared: tuple[Part, ...] = ()
    skip: tuple[Part, ...] | None = ()
    bottom: bool = False
    norm: tuple[Part, ...] = ()

    @property
    def joins(self) -> bool:
        """Whether anything is added here at all."""
        return self.skip is not None or len(self.branches) > 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive layers that differ in numbers at most."""

    first: int
    last: int
    sums: tuple[Sum, ...]
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return layer_names(self.first, self.last)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A whole stack: what stands before its first layer, its layers, what stands after its last.

    With `dual`, a second stream takes every branch, and `exit` stands on that one alone.
    """

    side: Side
    entry: tuple[Part, ...] = ()
    runs: tuple[Run, ...]
    exit: tuple[Part, ...] = ()
    dual: bool = False
    notes: tuple[str, ...] = ()

    def sums(self) -> list[Sum]:
        return [one for run in self.runs for one in run.sums]

    def parts(self) -> list[Part]:
        """Return every norm and factor of the drawing, wherever it stands."""
        found = [*self.entry, *self.exit]
        for one in self.sums():
            found += [*one.shared, *(one.skip or ()), *one.norm]
            found += [part for branch in one.branches for part in (*branch.before, *branch.after)]
        return found


def draw(spec: StackSpec, side: Side) -> Drawing:
    """Return the drawing of a stack, consecutive layers of one form folded into one run."""
    runs = [_run(blocks, layers, side) for layers, blocks in runs_of(spec.blocks, side)]
    gain = number([spec.embedding_gain], range(1))
    return Drawing(
        side=side,
        entry=norm(spec.input_norm),
        runs=tuple(_merged(list(equal)) for _, equal in groupby(runs, key=_outside)),
        exit=norm(spec.final_norm),
        dual=spec.dual_stream,
        notes=(f"start: token embeddings * {gain}",) * (gain != "1"),
    )


def norm(kind: Norm) -> tuple[Part, ...]:
    return () if kind == "none" else (NormPart(kind=kind),)


def _factor(gains: Iterable[Gain], layers: range, *, shared: bool = False) -> tuple[Part, ...]:
    gains = list(gains)
    first = gains[0]
    if all(gain == Gain() for gain in gains):
        return ()
    notes = ["learned vector" if first.vector else "learned"] if first.learned else []
    notes += ["profiled"] * first.profiled + ["shared in the layer"] * shared
    return (Factor(value=number([g.value for g in gains], layers), notes=tuple(notes)),)


def _run(blocks: list[BlockSpec], layers: range, side: Side) -> Run:
    def each(of: Callable[[BlockSpec], Any]) -> list[Any]:
        return [of(block) for block in blocks]

    def before(of: Callable[[BlockSpec], ResidualSpec]) -> tuple[Part, ...]:
        scales = each(lambda block: of(block).input_scale)
        scale = (Factor(value=number(scales, layers)),) * any(one != 1.0 for one in scales)
        return norm(of(block).norm_input) + scale

    def after(of: Callable[[BlockSpec], ResidualSpec]) -> tuple[Part, ...]:
        gains = each(lambda block: of(block).branch)
        factor = _factor(gains, layers, shared=block.share_branch_gain)
        return norm(of(block).norm_branch) + factor

    def skip(of: Callable[[BlockSpec], ResidualSpec]) -> tuple[Part, ...] | None:
        gains = each(lambda block: of(block).skip)
        return None if gains[0].absent else _factor(gains, layers)

    def attention(kind: Kind, of: Callable[[BlockSpec], AttentionSpec]) -> Branch:
        specs = each(of)
        return Branch(kind=kind, inside=_inside(specs, layers), carry=specs[0].carry)

    def around(branch: Branch, of: Callable[[BlockSpec], ResidualSpec], bottom: bool) -> Sum:
        whole = replace(branch, before=before(of), after=after(of))
        over = skip(of)
        return Sum(
            branches=(whole,),
            skip=over,
            bottom=bottom and over is not None,
            norm=norm(of(block).norm_sum),
        )

    block = blocks[0]
    own = attention("SA", lambda block: block.self_attention)
    cross = attention("CA", lambda block: block.cross_attention)
    inner = () if block.ff_norm == "none" else (Inside(label=f"{NORMS[block.ff_norm]} inside"),)
    feed = Branch(kind="FF", inside=inner)
    crossed = around(cross, lambda block: block.around_cross, False)
    if block.layout == "parallel":
        joined = Sum(
            branches=(
                replace(own, after=after(lambda block: block.around_self)),
                replace(feed, after=after(lambda block: block.around_ff)),
            ),
            shared=before(lambda block: block.around_self),
            skip=skip(lambda block: block.around_ff),
        )
        sums = [joined, crossed]
    else:
        sums = [
            around(own, lambda block: block.around_self, False),
            crossed,
            around(feed, lambda block: block.around_ff, block.bottom_to_top),
        ]
    if side == "encoder":
        sums.remove(crossed)
    notes = _starts(each(lambda block: block.init), layers)
    return Run(first=layers[0], last=layers[-1], sums=tuple(sums), notes=notes)


def _outside(run: Run) -> tuple[Any, ...]:
    """Return what stands on the stream in a run, without what is inside its sub-layers."""
    bare = [
        replace(one, branches=tuple(replace(branch, inside=()) for branch in one.branches))
        for one in run.sums
    ]
    return *bare, run.notes


def _merged(runs: list[Run]) -> Run:
    """Return runs that look alike from outside as one, which says where their insides differ."""
    sums = []
    for same in zip(*(run.sums for run in runs), strict=True):
        branches = [
            replace(versions[0], inside=_united(runs, [version.inside for version in versions]))
            for versions in zip(*(one.branches for one in same), strict=True)
        ]
        sums.append(replace(same[0], branches=tuple(branches)))
    return replace(runs[0], last=runs[-1].last, sums=tuple(sums))


def _united(runs: list[Run], insides: list[tuple[Inside, ...]]) -> tuple[Inside, ...]:
    """Return the lines of all runs in their order, each with its layers where some lack it."""
    order: list[Inside] = []
    for lines in insides:
        place = 0
        for line in lines:
            if line not in order:
                while place < len(order) and order[place] not in lines:
                    place += 1
                order.insert(place, line)
            place = order.index(line) + 1
    united = []
    for line in order:
        where = [run.label for run, lines in zip(runs, insides, strict=True) if line in lines]
        place = "" if len(where) == len(runs) else f" in {' and '.join(where)}"
        united.append(replace(line, label=line.label + place))
    return tuple(united)


def _inside(specs: list[AttentionSpec], layers: range) -> tuple[Inside, ...]:
    """Return what an attention has besides ``softmax(q k^T / sqrt(d_k)) v``."""
    first = specs[0]
    found = []

    def add(label: str, *notes: str) -> None:
        found.append(Inside(label=label, notes=notes))

    def value(of: Callable[[AttentionSpec], float]) -> str:
        return number([of(spec) for spec in specs], layers)

    for field in fields(AttentionSpec):
        values = [getattr(spec, field.name) for spec in specs]
        if field.name not in DRAWN and any(one != field.default for one in values):
            add(f"{field.name} {phrase(values, field.default, layers)}")
    if first.query_init == "zeros":
        add("W_Q = 0 at first")
    if any(spec.query_key_noise for spec in specs):
        add(f"q, k + {value(lambda spec: spec.query_key_noise)} noise", "in training alone")
    # One line for all three, unless what V does must stand between.
    together = first.qk_norm == first.value_norm and first.value == "full"
    if first.qk_norm != "none":
        add(f"{NORMS[first.qk_norm]} of q, k{', v' if together else ''}", "over each head")
    if first.carry == "scores":
        add("Z_n = S_n + Z_(n-1)", "S = q k^T / sqrt(d_k)")
    if first.carry == "qk_sum":
        add("S = (sum q)(sum k)^T / sqrt(d_k)", "sums over layers 1 to n")
    divisor = value(lambda spec: spec.score_divisor)
    if divisor != "1":
        scores = "Z_n" if first.carry == "scores" else "S"
        add(f"A = softmax({scores} / {divisor})")
    if first.shaping is not None:
        _add_shaping(add, specs, layers)
    _add_projection(add, "V", [(s.value, s.value_gains) for s in specs], layers)
    if first.value_norm != "none" and not together:
        add(f"{NORMS[first.value_norm]} of v", "over each head")
    if first.head_gain:
        add("* 1 on each head", "learned")
    _add_projection(add, "P", [(s.output, s.output_gains) for s in specs], layers)
    if first.tied:
        add("P = V^T at first")
    return tuple(found)


def _add_shaping(add: Callable[..., None], specs: list[AttentionSpec], layers: range) -> None:
    shapings = [spec.shaping for spec in specs if spec.shaping is not None]
    first = shapings[0]
    starts = [f"alpha {number([one.alpha for one in shapings], layers)}"]
    starts += [f"beta {number([one.beta for one in shapings], layers)}"]
    label = "alpha I + beta A"
    if first.gamma is not None:
        label += " - gamma C"
        gammas = [one.gamma for one in shapings if one.gamma is not None]
        starts += [f"gamma {number(gammas, layers)}"]
    trained = "learned" if first.learned else "fixed"
    add(label, ", ".join(starts), f"{trained}, one {'a head' if first.per_head else 'for all'}")


def _add_projection(
    add: Callable[..., None],
    name: str,
    projections: list[tuple[Projection, ProjectionGains]],
    layers: range,
) -> None:
    kind, gains = projections[0]
    match kind:
        case "full":
            return
        case "orthogonal":
            add(f"{name} orthogonal at first")
            return
        case "identity":
            add(f"{name} = I")
            return
        case "identity_plus":
            initial, notes = "I", ["dW = 0 at first"]
        case "orthogonal_plus":
            initial, notes = "W_0", ["W_0 orthogonal, fixed", "dW = 0 at first"]
    if gains == ProjectionGains():
        add(f"{name} = {initial} + dW", *notes)
        return
    for letter, each in (
        ("a", [gains.kept for _, gains in projections]),
        ("b", [gains.change for _, gains in projections]),
    ):
        trained = "learned" if each[0].learned else "fixed"
        notes.append(f"{letter} = {number([gain.value for gain in each], layers)} {trained}")
    add(f"{name} = a {initial} + b dW", *notes)


def _starts(inits: list[InitSpec], layers: range) -> tuple[str, ...]:
    """Return how the matrices start where that is not the usual way."""
    usual, first = InitSpec(), inits[0]
    matrices = {"query_key": "q, k", "value": "V", "output": "P", "ff": "FF"}
    factors: dict[str, list[str]] = {}
    for name, matrix in matrices.items():
        values = [getattr(init, name) for init in inits]
        if any(value != getattr(usual, name) for value in values):
            factors.setdefault(number(values, layers), []).append(matrix)
    if not factors and first.distribution == usual.distribution:
        return ()
    gains = [f"gain {gain} of {', '.join(names)}" for gain, names in factors.items()]
    return (f"start: Xavier {first.distribution}" + "".join(f"; {gain}" for gain in gains),)


def formula(one: Sum) -> str:
    """Return a sum as one line of mathematics in full words."""

    def through(parts: tuple[Part, ...], inner: str) -> str:
        for part in parts:
            if isinstance(part, NormPart):
                inner = f"{NORMS[part.kind]}({inner})"
            else:
                inner = f"{' '.join(part.notes)} gain {part.value} times {inner}".strip()
        return inner

    source = through(one.shared, "x")
    terms = [] if one.skip is None else [through(one.skip, "x")]
    terms += [through(one.skip or (), "the layer's input")] * one.bottom
    for branch in one.branches:
        inside = f"{NAMES[branch.kind]} of {through(branch.before, source)}"
        terms.append(through(branch.after, inside))
    return f"x becomes {through(one.norm, ' + '.join(terms))}"


def description(drawings: Iterable[Drawing]) -> str:
    """Return in sentences what the drawings show, for those who cannot see them."""
    said = []
    for drawing in drawings:
        side = drawing.side
        said += [f"{side}: {part_name(part)} on what enters." for part in drawing.entry]
        for run in drawing.runs:
            said.append(f"{side}, {run.label}: {'; '.join(map(formula, run.sums))}.")
            for branch in (branch for one in run.sums for branch in one.branches):
                inner = [", ".join((part.label, *part.notes)) for part in branch.inside]
                said += [f"{NAMES[branch.kind]}: {'; '.join(inner)}."] * bool(inner)
            said += [f"{note}." for note in run.notes]
        said += [f"{note}." for note in drawing.notes]
        said += [f"A second stream adds up all branches of the {side}."] * drawing.dual
        where = "on the second stream after" if drawing.dual else "after"
        said += [f"{side}: {part_name(part)} {where} the last layer." for part in drawing.exit]
    return " ".join(said)


def part_name(part: Part) -> str:
    """Return a part in full words."""
    if isinstance(part, NormPart):
        return NORMS[part.kind]
    return " ".join(("gain", part.value, *part.notes))
