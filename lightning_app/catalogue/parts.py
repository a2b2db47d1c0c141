"""The drawing of a stack and of its attention, part by part.

Equal layers are grouped, and their numbers and other fields are described in a short text.

A drawing is data: the parts on the stream of a stack, in order. `draw_stack` builds it from a
specification; `text` and `svg` render it. It can also be described in sentences, for readers who
cannot see the picture. The parts of an attention are named in the order of the computation.

Everything is read from the specification; nothing here knows the name of a preset. Fields that
have no place in a drawing are listed by name and value below it, so that nothing is omitted
silently.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from itertools import groupby
from typing import Any, Literal

from lightning_app.blocks.attention import (
    AttentionSpec,
    CarryKind,
    Projection,
    ProjectionGains,
    reads_tokens,
)
from lightning_app.blocks.block import BlockSpec, InitSpec
from lightning_app.blocks.norm import Norm
from lightning_app.blocks.residual import SUM, Gain, ResidualSpec, Rule
from lightning_app.blocks.stack import StackSpec
from lightning_app.blocks.streams import DUAL, PLAIN, STREAM_RULES

Side = Literal["encoder", "decoder", "decoder only"]
"""A stack in a model; a decoder-only model has no cross-attention."""


def runs_of(blocks: Sequence[BlockSpec], side: Side) -> list[tuple[range, list[BlockSpec]]]:
    """Group consecutive blocks of the same form: (layers counted from 1, blocks) of each group."""
    runs, layer = [], 1
    for _, equal in groupby(blocks, key=lambda block: (type(block), *_forms(block, side))):
        run = list(equal)
        runs.append((range(layer, layer + len(run)), run))
        layer += len(run)
    return runs


def used_fields(block: BlockSpec, side: Side) -> list[Field[Any]]:
    """Return the fields that a stack of `side` uses: only some have cross-attention."""
    return [field for field in fields(block) if side == "decoder" or "cross" not in field.name]


def layer_names(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def form(part: Any) -> Any:
    """Return a specification without its numbers, but with the mark of an absent (zero) gain."""
    if is_dataclass(part):
        inner = tuple(form(getattr(part, field.name)) for field in fields(part))
        return type(part), isinstance(part, Gain) and part.absent, *inner
    return None if isinstance(part, float) else (part is None, part)


def _forms(block: BlockSpec, side: Side) -> list[Any]:
    return [form(getattr(block, field.name)) for field in used_fields(block, side)]


def number(values: Sequence[float], layers: range) -> str:
    """Return a number that may depend on the layer n: ``0.71``, ``n``, ``1/sqrt(n)`` or a list."""
    if len(set(values)) == 1:
        return f"{values[0]:.4g}"
    if all(value == n for value, n in zip(values, layers, strict=True)):
        return "n"
    if all(math.isclose(value, n**-0.5) for value, n in zip(values, layers, strict=True)):
        return "1/sqrt(n)"
    shown = [f"{value:.4g}" for value in values]
    return ", ".join(shown if len(shown) <= 3 else [shown[0], "...", shown[-1]])


def changed_fields(
    parts: Sequence[Any], layers: range, handled: Collection[str] = (), default: Any = MISSING
) -> list[str]:
    """Return `name value` for each field in which parts of one form differ from `default`.

    Fields in `handled` are left out because the caller shows them in another form. A field without
    its own drawing is still shown. Without a `default`, each field is compared with its own
    default.
    """
    shown = []
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        own = default is MISSING
        usual = _default_of(field) if own else getattr(default, field.name, MISSING)
        if field.name not in handled and any(value != usual for value in values):
            shown.append(f"{field.name} {phrase(values, usual, layers)}")
    return shown


def phrase(parts: Sequence[Any], default: Any, layers: range, *, outer: bool = False) -> str:
    """Describe a value of the same form in several layers by its differences from `default`."""
    first = parts[0]
    if isinstance(first, Gain):
        flags = ("learned", "vector", "profiled")
        words = [name for name in flags if getattr(first, name)]
        words += changed_fields(parts, layers, handled=("value", *flags))
        return " ".join([number([part.value for part in parts], layers), *words])
    if is_dataclass(first):
        changed = ", ".join(changed_fields(parts, layers, default=default))
        return changed if outer else f"({changed})"
    if isinstance(first, bool):
        return "yes" if first else "no"
    return number(parts, layers) if isinstance(first, float) else str(first)


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


SubLayer = Literal["SA", "CA", "FF"]

NAMES: dict[SubLayer, str] = {"SA": "self-attention", "CA": "cross-attention", "FF": "feed-forward"}
_NORMS: dict[str, str] = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "dyt": "DyT",
    "derf": "Derf",
    "rms_norm_plain": "RMSNorm",
    "l2": "L2 norm",
}


@dataclass(frozen=True, kw_only=True)
class NormPart:
    """A norm on the stream or on a branch."""

    kind: Norm

    @property
    def name(self) -> str:
        return norm_name(self.kind)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A gain on the stream or on a branch: its initial value and how it is trained."""

    value: str
    notes: tuple[str, ...] = ()


Part = NormPart | Factor


@dataclass(frozen=True, kw_only=True)
class Inside:
    """One difference of a sub-layer from the plain one, in the order of the computation."""

    label: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A sub-layer, with the norms and gains before and after it."""

    kind: SubLayer
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    inside: tuple[Inside, ...] = ()
    carry: CarryKind = "none"


@dataclass(frozen=True, kw_only=True)
class Sum:
    """One residual formula: branches that share an input and a skip.

    `skip` holds the gains on the skip; it is None without one. `bottom` adds the layer's
    input through the same gains. `shared` comes before the branches fork. `rule` joins the skip and
    the branch: the sum, or a rule of a plug-in, whose name then replaces the plus.
    """

    branches: tuple[Branch, ...]
    shared: tuple[Part, ...] = ()
    skip: tuple[Part, ...] | None = ()
    bottom: bool = False
    norm: tuple[Part, ...] = ()
    rule: Rule = SUM

    @property
    def joins(self) -> bool:
        """Whether there is anything to add: a skip or a second branch."""
        return self.skip is not None or len(self.branches) > 1


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Consecutive layers that differ only in numbers."""

    first: int
    last: int
    sums: tuple[Sum, ...]
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return layer_names(self.first, self.last)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A whole stack: norms before its first layer, its layers, norms after its last layer.

    With `dual`, a second stream sums all branches, and only that stream passes `exit`.
    """

    side: Side
    entry: tuple[Part, ...] = ()
    runs: tuple[LayerRun, ...]
    exit: tuple[Part, ...] = ()
    dual: bool = False
    notes: tuple[str, ...] = ()

    def sums(self) -> list[Sum]:
        return [one for run in self.runs for one in run.sums]


def norm_name(kind: str) -> str:
    """Return the name of a norm in a drawing, by default that of its kind."""
    return _NORMS.get(kind, kind)


def formula(one: Sum) -> str:
    """Return a residual formula as one line, with its operations in words."""

    def through(parts: tuple[Part, ...], inner: str) -> str:
        for part in parts:
            if isinstance(part, NormPart):
                inner = f"{part.name}({inner})"
            else:
                inner = f"{' '.join(part.notes)} gain {part.value} times {inner}".strip()
        return inner

    source = through(one.shared, "x")
    terms = [] if one.skip is None else [through(one.skip, "x")]
    terms += [through(one.skip or (), "the layer's input")] * one.bottom
    for branch in one.branches:
        inside = f"{NAMES[branch.kind]} of {through(branch.before, source)}"
        terms.append(through(branch.after, inside))
    joined = " + ".join(terms) if one.rule == SUM else f"{one.rule}({', '.join(terms)})"
    return f"x becomes {through(one.norm, joined)}"


def description(drawings: Iterable[Drawing]) -> str:
    """Return the content of the drawings in sentences."""
    sentences = []
    for drawing in drawings:
        side = drawing.side
        sentences += [f"{side}: {part_name(part)} on what enters." for part in drawing.entry]
        for run in drawing.runs:
            sentences.append(f"{side}, {run.label}: {'; '.join(map(formula, run.sums))}.")
            for branch in (branch for one in run.sums for branch in one.branches):
                inner = [", ".join((part.label, *part.notes)) for part in branch.inside]
                sentences += [f"{NAMES[branch.kind]}: {'; '.join(inner)}."] * bool(inner)
            sentences += [f"{note}." for note in run.notes]
        sentences += [f"{note}." for note in drawing.notes]
        sentences += [f"A second stream adds up all branches of the {side}."] * drawing.dual
        where = "on the second stream after" if drawing.dual else "after"
        sentences += [f"{side}: {part_name(part)} {where} the last layer." for part in drawing.exit]
    return " ".join(sentences)


def part_name(part: Part) -> str:
    """Return a part in full words."""
    if isinstance(part, NormPart):
        return part.name
    return " ".join(("gain", part.value, *part.notes))


_ATTENTION = (
    *("carry", "score_divisor", "qk_norm", "value_norm", "head_gain", "query_key_noise", "shaping"),
    *("value", "value_gains", "output", "output_gains", "tied", "query_init"),
    *("localised_span", "adaptive_span", "output_gate", "value_carry", "output_norm"),
    *("scores", "score_cap", "sink", "difference", "attention"),
)
GATES = ("head", "element")
_SHAPING = ("alpha", "beta", "gamma", "learned", "per_head")
# Fields with their own text; a new field is shown by its name.


def attention_parts(specs: Sequence[AttentionSpec], layers: range) -> tuple[Inside, ...]:
    """Return the differences of an attention from ``softmax(q k^T / sqrt(d_k)) v``."""
    first = specs[0]
    inside = []

    def add(label: str, *notes: str) -> None:
        inside.append(Inside(label=label, notes=notes))

    def value(of: Callable[[AttentionSpec], float]) -> str:
        return number([of(spec) for spec in specs], layers)

    for shown in changed_fields(specs, layers, handled=_ATTENTION):
        add(shown)
    if first.difference is not None:
        add("differences of two maps", f"lambda_0 {value(lambda spec: spec.difference or 0.0)}")
    if first.query_init != "xavier":
        zeros = first.query_init == "zeros"
        add("W_Q = 0 at first" if zeros else f"query_init {first.query_init}")
    if any(spec.query_key_noise for spec in specs):
        add(f"q, k + {value(lambda spec: spec.query_key_noise)} noise", "only in training")
    # One line for all three, unless a part of V must be drawn between them.
    together = first.qk_norm == first.value_norm and first.value == "full"
    if first.qk_norm != "none":
        add(f"{norm_name(first.qk_norm)} of q, k{', v' if together else ''}", "over each head")
    scores = "q k^T / sqrt(d_k)"
    if first.scores == "cosine":
        scores = "exp(s_h) cos(q, k)"
        add(f"S = {scores}", "s_h learned from ln 10, at most ln 100")
    elif first.scores == "cosine_features":
        scores = "sqrt(d_k) (s q / |q|)(s k / |k|)^T"
        add(f"S = {scores}", "s a learned vector from 1")
    if first.carry == "scores":
        add("Z_n = S_n + Z_(n-1)", f"S = {scores}")
    elif first.carry == "qk_sum":
        add("S = (sum q)(sum k)^T / sqrt(d_k)", "sums over layers 1 to n")
    elif first.carry != "none":
        add(f"carry {first.carry}")
    if first.localised_span is not None:
        block, memory = first.localised_span.query_block, first.localised_span.memory
        add("a localised span", f"{block} queries a block, and {memory} tokens before it")
    if first.adaptive_span is not None:
        shown = (f"{name} {value}" for name, value in vars(first.adaptive_span).items())
        dynamic = first.adaptive_span.dynamic_bias is not None
        each = " for each token" if dynamic else ""
        add(f"a span that each head learns{each}", ", ".join(shown))
    if first.attention != "softmax":
        add(f"attention {first.attention}", "in place of the softmax")
    if first.score_cap is not None:
        cap = value(lambda spec: spec.score_cap or 0.0)
        add(f"S <- {cap} tanh(S / {cap})")
    divisor = value(lambda spec: spec.score_divisor)
    if divisor != "1":
        scores = "Z_n" if first.carry == "scores" else "S"
        add(f"A = softmax({scores} / {divisor})")
    if first.sink != "none":
        learned = first.sink == "learned"
        notes = ("s_h learned from 0",) if learned else ()
        add(f"softmax over [S, {'s_h' if learned else '0'}]", *notes)
    if first.shaping is not None:
        _add_shaping(add, specs, layers)
    _add_projection(add, "V", [(s.value, s.value_gains) for s in specs], layers)
    if first.value_norm != "none" and not together:
        add(f"{norm_name(first.value_norm)} of v", "over each head")
    if first.value_carry != "none":
        read = "ids of tokens" if reads_tokens(first.value_carry) else "v of layer 1"
        add(f"v with {read}: {first.value_carry}")
    if first.head_gain:
        add("* 1 on each head", "learned")
    if first.output_gate != "none":
        gate = "* sigmoid(u W_g):" if first.output_gate in GATES else "gate"
        add(f"{gate} {first.output_gate}", "before P")
    if first.output_norm != "none":
        add(f"{norm_name(first.output_norm)} of all heads", "before P")
    _add_projection(add, "P", [(s.output, s.output_gains) for s in specs], layers)
    if first.tied:
        add("P = V^T at first")
    return tuple(inside)


def _add_shaping(add: Callable[..., None], specs: Sequence[AttentionSpec], layers: range) -> None:
    shapings = [spec.shaping for spec in specs if spec.shaping is not None]
    first = shapings[0]
    centred = first.gamma is not None
    names = ("alpha", "beta", "gamma") if centred else ("alpha", "beta")
    starts = [
        f"{name} {number([getattr(one, name) for one in shapings], layers)}" for name in names
    ]
    label = "alpha I + beta A" + " - gamma C" * centred
    trained = "learned" if first.learned else "fixed"
    share = f"{trained}, one {'a head' if first.per_head else 'for all'}"
    add(label, ", ".join(starts), share, *changed_fields(shapings, layers, handled=_SHAPING))


_SINGLE = {"orthogonal": "orthogonal at first", "identity": "= I"}
_SUMS = {  # W_0, and what holds at the start
    "identity_plus": ("I", "dW = 0 at first"),
    "orthogonal_plus": ("W_0", "W_0 orthogonal, fixed", "dW = 0 at first"),
}


def _add_projection(
    add: Callable[..., None],
    name: str,
    projections: list[tuple[Projection, ProjectionGains]],
    layers: range,
) -> None:
    kind, gains = projections[0]
    if kind not in _SUMS:
        if kind != "full":
            add(f"{name} {_SINGLE.get(kind, f'= {kind}')}")
        return
    initial, *notes = _SUMS[kind]
    notes += changed_fields([gains for _, gains in projections], layers, handled=("kept", "change"))
    if gains == ProjectionGains():
        add(f"{name} = {initial} + dW", *notes)
        return
    for letter, each in (
        ("a", [gains.kept for _, gains in projections]),
        ("b", [gains.change for _, gains in projections]),
    ):
        trained = "learned" if each[0].learned else "fixed"
        value = number([gain.value for gain in each], layers)
        unknown = changed_fields(each, layers, handled=("value", "learned", "vector", "profiled"))
        notes.append(" ".join([f"{letter} = {value} {trained}", *unknown]))
    add(f"{name} = a {initial} + b dW", *notes)


_STACK = (
    *("blocks", "final_norm", "input_norm", "dual_stream", "stream", "streams", "embedding_gain"),
    *("share", "step_signal", "halting", "memory"),
)
_BLOCK = (
    *("around_self", "around_cross", "around_ff", "self_attention", "cross_attention", "ff_norm"),
    *("layout", "bottom_to_top", "share_branch_gain", "init", "ff_scale", "unit_matrices"),
    "sigma_reparam",
)
_RESIDUAL = (
    *("norm_input", "input_scale", "norm_branch", "norm_sum", "skip", "branch", "rule"),
    "drop",
)
_GAIN = ("value", "learned", "vector", "profiled", "ramp")
_INIT = {"query_key": "q, k", "value": "V", "output": "P", "ff": "FF", "ff_outer": "W_2"}
_INIT |= {"branch_norm": "norms of branches"}
# The fields that have a place in the drawing; other fields are listed by name.


def stack_drawing(spec: StackSpec, side: Side) -> Drawing:
    """Return the drawing of a stack; consecutive layers of one form are one run."""
    runs = [_run(blocks, layers, side) for layers, blocks in runs_of(spec.blocks, side)]
    rule = STREAM_RULES[spec.rule]
    if not rule.joins:
        runs = [
            replace(run, sums=tuple(replace(one, rule=spec.rule) for one in run.sums))
            for run in runs
        ]
    gain = number([spec.embedding_gain], range(1))
    return Drawing(
        side=side,
        entry=norm(spec.input_norm),
        runs=tuple(_merged(list(equal)) for _, equal in groupby(runs, key=_outside)),
        exit=norm(spec.final_norm),
        dual=spec.rule == DUAL,
        notes=(
            *(f"start: token embeddings * {gain}",) * (gain != "1"),
            *(f"stream {spec.rule}{rule.in_words(spec.streams)}",)
            * (spec.rule not in (PLAIN, DUAL)),
            *_step_notes(spec),
            *_memory_notes(spec),
            *changed_fields([spec], range(1), handled=_STACK),
        ),
    )


def _step_notes(spec: StackSpec) -> list[str]:
    """Return what the layers share, and what happens between them."""
    notes = ["one block for all layers"] * (spec.share == "all")
    if spec.step_signal != "none":
        signal = f"a {spec.step_signal} signal of the layer"
        notes.append(
            f"before each layer: + {signal}, and the table of positions where they have one"
        )
    if spec.halting is not None:
        shown = [f"{name} {value:.4g}" for name, value in vars(spec.halting).items()]
        notes.append(f"each token halts; the average of its states goes on; {', '.join(shown)}")
    return notes


def _memory_notes(spec: StackSpec) -> list[str]:
    if spec.memory is None:
        return []
    length, evaluation = spec.memory.lengths
    note = f"keys and values also of the last {length} inputs before a segment"
    if evaluation != length:
        note += f", {evaluation} in evaluation"
    return [note + ", the same number for each token" * spec.memory.same_length]


def norm(kind: Norm) -> tuple[Part, ...]:
    return () if kind == "none" else (NormPart(kind=kind),)


def _factor(gains: Iterable[Gain], layers: range, *, shared: bool = False) -> tuple[Part, ...]:
    gains = list(gains)
    first = gains[0]
    if all(gain == Gain() for gain in gains):
        return ()
    notes = ["learned vector" if first.vector else "learned"] if first.learned else []
    notes += ["profiled"] * first.profiled + ["shared in the layer"] * shared
    if first.ramp:
        notes.append(f"rises in {number([gain.ramp for gain in gains], layers)} steps")
    notes += changed_fields(gains, layers, handled=_GAIN)
    return (Factor(value=number([g.value for g in gains], layers), notes=tuple(notes)),)


def _run(blocks: list[BlockSpec], layers: range, side: Side) -> LayerRun:
    def before(specs: Sequence[ResidualSpec]) -> tuple[Part, ...]:
        scales = [spec.input_scale for spec in specs]
        scale = (Factor(value=number(scales, layers)),) * any(one != 1.0 for one in scales)
        return norm(specs[0].norm_input) + scale

    def after(specs: Sequence[ResidualSpec]) -> tuple[Part, ...]:
        factor = _factor([spec.branch for spec in specs], layers, shared=block.share_branch_gain)
        return norm(specs[0].norm_branch) + factor

    def skip(specs: Sequence[ResidualSpec]) -> tuple[Part, ...] | None:
        gains = [spec.skip for spec in specs]
        return None if gains[0].absent else _factor(gains, layers)

    def attention(kind: SubLayer, specs: Sequence[AttentionSpec]) -> Branch:
        return Branch(kind=kind, inside=attention_parts(specs, layers), carry=specs[0].carry)

    def around(branch: Branch, specs: Sequence[ResidualSpec], *, bottom: bool = False) -> Sum:
        whole, over = replace(branch, before=before(specs), after=after(specs)), skip(specs)
        bottom, first = bottom and over is not None, specs[0]
        return Sum(
            branches=(whole,), skip=over, bottom=bottom, norm=norm(first.norm_sum), rule=first.rule
        )

    block = blocks[0]
    around_self = [each.around_self for each in blocks]
    around_cross = [each.around_cross for each in blocks]
    around_ff = [each.around_ff for each in blocks]
    own = attention("SA", [each.self_attention for each in blocks])
    cross = attention("CA", [each.cross_attention for each in blocks])
    inner = () if block.ff_norm == "none" else (Inside(label=f"{norm_name(block.ff_norm)} inside"),)
    if block.ff_scale:
        inner += (Inside(label="s * (W_1 u)", notes=("s a learned vector from sqrt(d)",)),)
    feed = Branch(kind="FF", inside=inner)
    crossed = around(cross, around_cross)
    if block.layout == "parallel":
        forks = (replace(own, after=after(around_self)), replace(feed, after=after(around_ff)))
        joined = Sum(branches=forks, shared=before(around_self), skip=skip(around_ff))
        sums = [joined, crossed]
    else:
        fed = around(feed, around_ff, bottom=block.bottom_to_top)
        sums = [around(own, around_self), crossed, fed]
    if side != "decoder":
        sums.remove(crossed)
    notes = [*_starts([each.init for each in blocks], layers), *_unknown(blocks, layers, side)]
    notes += ["rows of matrices have length 1 after each step"] * block.unit_matrices
    if block.drops:
        drops = {
            "self-attention": [each.drop for each in around_self],
            "cross-attention": [each.drop for each in around_cross] * (side == "decoder"),
            "feed-forward": [each.drop for each in around_ff],
        }
        dropped = {name: number(each, layers) for name, each in drops.items() if any(each)}
        same = len(dropped) == sum(map(bool, drops.values())) and len({*dropped.values()}) == 1
        for name, chances in dropped.items():
            branch = "a branch" if same else name
            note = f"a text skips {branch} in training with a chance of {chances}"
            notes += [note] * (note not in notes)
    notes += ["each matrix has a learned largest singular value"] * block.sigma_reparam
    return LayerRun(first=layers[0], last=layers[-1], sums=tuple(sums), notes=tuple(notes))


def _unknown(blocks: Sequence[BlockSpec], layers: range, side: Side) -> list[str]:
    """Return name and value of fields without a place in the drawing."""
    shown = changed_fields(blocks, layers, handled=_BLOCK)
    if blocks[0].layout not in ("sequential", "parallel"):
        shown.append(f"layout {blocks[0].layout}")
    for name in ("around_self", "around_cross", "around_ff"):
        if side == "decoder" or name != "around_cross":
            around = [getattr(block, name) for block in blocks]
            shown += [
                f"{name} {each}" for each in changed_fields(around, layers, handled=_RESIDUAL)
            ]
    return shown


def _outside(run: LayerRun) -> tuple[Any, ...]:
    """Return the parts on the stream of a run, without the parts inside its sub-layers."""
    bare = [
        replace(one, branches=tuple(replace(branch, inside=()) for branch in one.branches))
        for one in run.sums
    ]
    return *bare, run.notes


def _merged(runs: list[LayerRun]) -> LayerRun:
    """Merge runs with equal parts on the stream into one that names the layers of other parts."""
    sums = []
    for same in zip(*(run.sums for run in runs), strict=True):
        branches = [
            replace(versions[0], inside=_united(runs, [version.inside for version in versions]))
            for versions in zip(*(one.branches for one in same), strict=True)
        ]
        sums.append(replace(same[0], branches=tuple(branches)))
    return replace(runs[0], last=runs[-1].last, sums=tuple(sums))


def _united(runs: list[LayerRun], insides: list[tuple[Inside, ...]]) -> tuple[Inside, ...]:
    """Return the lines of all runs in order, with their layers where only some runs have them."""
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


def _starts(inits: Sequence[InitSpec], layers: range) -> list[str]:
    """Return the initial distribution of the matrices if it is not the default one."""
    usual, first = InitSpec(), inits[0]
    factors: dict[str, list[str]] = {}
    for name, matrix in _INIT.items():
        values = [init.outer if name == "ff_outer" else getattr(init, name) for init in inits]
        if any(getattr(init, name) != getattr(usual, name) for init in inits):
            factors.setdefault(number(values, layers), []).append(matrix)
    shown = [f"gain {gain} of {', '.join(names)}" for gain, names in factors.items()]
    shown += ["not in cross-attention"] * (not first.cross)
    shown += changed_fields(inits, layers, handled=("distribution", "cross", *_INIT))
    if not shown and first.distribution == usual.distribution:
        return []
    return ["; ".join([f"start: Xavier {first.distribution}", *shown])]
