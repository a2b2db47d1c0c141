"""The parts of an attention that its drawing names, in the order of the computation."""

from collections.abc import Callable, Sequence
from dataclasses import fields

from lightning_app.blocks.attention import AttentionSpec, Projection, ProjectionGains
from lightning_app.catalogue.drawing import Inside, norm_name
from lightning_app.catalogue.folding import changed_fields, number

_ATTENTION = (
    *("carry", "score_divisor", "qk_norm", "value_norm", "head_gain", "query_key_noise", "shaping"),
    *("value", "value_gains", "output", "output_gains", "tied", "query_init"),
    *("localised_span", "adaptive_span"),
)
_SHAPING = ("alpha", "beta", "gamma", "learned", "per_head")
# Fields that have a text of their own; a new field is shown by its name.


def attention_parts(specs: Sequence[AttentionSpec], layers: range) -> tuple[Inside, ...]:
    """Return the differences of an attention from ``softmax(q k^T / sqrt(d_k)) v``."""
    first = specs[0]
    found = []

    def add(label: str, *notes: str) -> None:
        found.append(Inside(label=label, notes=notes))

    def value(of: Callable[[AttentionSpec], float]) -> str:
        return number([of(spec) for spec in specs], layers)

    for shown in changed_fields(specs, layers, known=_ATTENTION):
        add(shown)
    if first.query_init != "xavier":
        zeros = first.query_init == "zeros"
        add("W_Q = 0 at first" if zeros else f"query_init {first.query_init}")
    if any(spec.query_key_noise for spec in specs):
        add(f"q, k + {value(lambda spec: spec.query_key_noise)} noise", "in training alone")
    # One line for all three, unless a part of V must be drawn between them.
    together = first.qk_norm == first.value_norm and first.value == "full"
    if first.qk_norm != "none":
        add(f"{norm_name(first.qk_norm)} of q, k{', v' if together else ''}", "over each head")
    if first.carry == "scores":
        add("Z_n = S_n + Z_(n-1)", "S = q k^T / sqrt(d_k)")
    elif first.carry == "qk_sum":
        add("S = (sum q)(sum k)^T / sqrt(d_k)", "sums over layers 1 to n")
    elif first.carry != "none":
        add(f"carry {first.carry}")
    if first.localised_span is not None:
        block, memory = first.localised_span.query_block, first.localised_span.memory
        add("a localised span", f"{block} queries a block, and {memory} tokens before it")
    if first.adaptive_span is not None:
        names = (field.name for field in fields(first.adaptive_span))
        shown = (f"{name} {getattr(first.adaptive_span, name)}" for name in names)
        dynamic = first.adaptive_span.dynamic_bias is not None
        each = " for each token" if dynamic else ""
        add(f"a span that each head learns{each}", ", ".join(shown))
    divisor = value(lambda spec: spec.score_divisor)
    if divisor != "1":
        scores = "Z_n" if first.carry == "scores" else "S"
        add(f"A = softmax({scores} / {divisor})")
    if first.shaping is not None:
        _add_shaping(add, specs, layers)
    _add_projection(add, "V", [(s.value, s.value_gains) for s in specs], layers)
    if first.value_norm != "none" and not together:
        add(f"{norm_name(first.value_norm)} of v", "over each head")
    if first.head_gain:
        add("* 1 on each head", "learned")
    _add_projection(add, "P", [(s.output, s.output_gains) for s in specs], layers)
    if first.tied:
        add("P = V^T at first")
    return tuple(found)


def _add_shaping(add: Callable[..., None], specs: Sequence[AttentionSpec], layers: range) -> None:
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
    share = f"{trained}, one {'a head' if first.per_head else 'for all'}"
    add(label, ", ".join(starts), share, *changed_fields(shapings, layers, known=_SHAPING))


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
        case _:
            add(f"{name} = {kind}")
            return
    notes += changed_fields([gains for _, gains in projections], layers, known=("kept", "change"))
    if gains == ProjectionGains():
        add(f"{name} = {initial} + dW", *notes)
        return
    for letter, each in (
        ("a", [gains.kept for _, gains in projections]),
        ("b", [gains.change for _, gains in projections]),
    ):
        trained = "learned" if each[0].learned else "fixed"
        value = number([gain.value for gain in each], layers)
        unknown = changed_fields(each, layers, known=("value", "learned", "vector", "profiled"))
        notes.append(" ".join([f"{letter} = {value} {trained}", *unknown]))
    add(f"{name} = a {initial} + b dW", *notes)
