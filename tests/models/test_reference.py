"""Every preset against the naive reference, forward and gradients."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.blocks import windows
from lightning_app.blocks.attention import ProjectionGains, ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.stack import BranchRamp
from lightning_app.blocks.windows import LocalisedSpan
from tests import tiny
from tests.reference import (
    REFERENCE,
    Projection,
    Reference,
    after_each,
    each,
    predict_masked,
    predict_next,
    prores,
    translate,
)
from tests.slopes import Parameters, check_slopes

pytestmark = pytest.mark.usefixtures("float64")

POSITIONS = torch.tensor([0, 2, 3, 13, 7])
ROPE = {"positions": "rope", "model_dim": 12}  # heads of six: three pairs


@dataclass(frozen=True)
class Case:
    """A block with its reference, and what differs from the tiny architecture."""

    block: BlockConfig
    reference: Reference
    architecture: dict[str, Any] = field(default_factory=dict)


def case(preset: str, architecture: dict[str, Any], /, **axes: Any) -> Case:
    return Case(BlockConfig(preset=preset, **axes), REFERENCE[preset], architecture)


def carrying(preset: str, carry: Any, temperature: float = 1.0, /, **architecture: Any) -> Case:
    """Residual attention on `preset`."""
    axes: dict[str, Any] = {"residual_attention": carry}
    if temperature != 1.0:
        axes["residual_temperature"] = temperature
    reference = replace(REFERENCE[preset], carry=carry, temperature=temperature)
    return Case(BlockConfig(preset=preset, **axes), reference, architecture)


def projecting(preset: str, kinds: dict[int, tuple[Projection, Projection]], **axes: Any) -> Case:
    """Self-attention whose layer n has the projections ``kinds[n]``, else those of ``kinds[0]``."""

    def projections(number: int, depth: int) -> tuple[Projection, Projection]:
        return kinds.get(number if number < depth else -1, kinds[0])

    gains = {}
    for name in ("value_gains", "output_gains"):
        if name in axes:
            gains[name] = (axes[name].kept.value, axes[name].change.value)
    reference = replace(REFERENCE[preset], projections=projections, **gains)
    return Case(BlockConfig(preset=preset, **axes), reference)


def shaping(shaped: Any, spec: ShapingSpec) -> Case:
    reference = replace(REFERENCE["pre_ln"], shaped=shaped)
    return Case(BlockConfig(preset="pre_ln", shaped_attention=spec), reference)


def inside(preset: str, architecture: dict[str, Any], /, **axes: Any) -> Case:
    """Scores, caps and sinks on `preset`."""
    reference = replace(
        REFERENCE[preset],
        cosine=axes.get("scores") == "cosine",
        cap=axes.get("score_cap"),
        sink=axes.get("sink", "no"),
    )
    return Case(BlockConfig(preset=preset, **axes), reference, architecture)


PLAIN = {name: case(name, {"activation": "gelu"}) for name in PRESETS}
ROOT_MEAN_SQUARE = {
    f"{name}-rms-rope": case(name, {**ROPE, "activation": "relu"}, norm="rms_norm")
    for name in PRESETS
}
TRAINED = Gain(value=0.5, learned=True)
ANCHORED = {"value_projection": "orthogonal_plus", "output_projection": "orthogonal_plus"}
SOME = ProjectionGains(kept=Gain(value=0.9), change=Gain(value=0.3))
OTHER = ProjectionGains(kept=Gain(value=-0.4), change=TRAINED)
SOFTMAX = {
    "post_ln-sink-zero": inside("post_ln", {}, sink="zero"),
    "pre_ln-sink-learned-rope": inside("pre_ln", ROPE, sink="learned"),
    "realformer-sink-zero": inside("realformer", {}, sink="zero"),
    "realformer-sink-learned-relative": inside(
        "realformer", {"positions": "relative"}, sink="learned"
    ),
    "pre_ln-cap": inside("pre_ln", {}, score_cap=0.7),
    "qk_norm-cap-relative": inside("qk_norm", {"positions": "relative"}, score_cap=1.5),
    "pre_ln-cosine": inside("pre_ln", {}, scores="cosine"),
    "post_ln-cosine-relative": inside("post_ln", {"positions": "relative"}, scores="cosine"),
    "realformer-cosine-sink-rope": inside("realformer", ROPE, scores="cosine", sink="learned"),
    "pre_ln-all-grouped": inside(
        "pre_ln",
        {"num_heads": 4, "kv_heads": 2, "model_dim": 16},
        **{"scores": "cosine", "score_cap": 2.0, "sink": "learned"},
    ),
    "realformer-sink-grouped": inside(
        "realformer", {"num_heads": 4, "kv_heads": 2, "model_dim": 16}, sink="zero"
    ),
    "parallel-all": inside(
        "parallel", {"positions": "relative"}, scores="cosine", score_cap=2.0, sink="learned"
    ),
}
COMBINATIONS = {
    **SOFTMAX,
    # Residual attention
    **{
        f"{preset}-{carry}": carrying(preset, carry)
        for preset in ("pre_ln", "admin")
        for carry in ("sum", "mean", "qk_sum")
    },
    "post_ln-sum": carrying("post_ln", "sum"),
    "post_ln-qk_sum": carrying("post_ln", "qk_sum"),
    "pre_ln-sum-temperature": carrying("pre_ln", "sum", 2.5),
    "pre_ln-mean-temperature": carrying("pre_ln", "mean", 0.4),
    "post_ln-qk_sum-temperature": carrying("post_ln", "qk_sum", 1.7),
    "realformer-rope": case("realformer", ROPE),
    **{
        f"{preset}-relative": case(preset, {"positions": "relative"})
        for preset in ("post_ln", "pre_ln", "realformer", "sas")
    },
    "qk_norm-relative_untied": case("qk_norm", {"positions": "relative_untied"}),
    "pre_ln-sum-relative": carrying("pre_ln", "sum", positions="relative"),
    "post_ln-qk_sum-rope": carrying("post_ln", "qk_sum", **ROPE),
    "qk_norm-mean-rope": carrying("qk_norm", "mean", **ROPE),
    "sas-mean": carrying("sas", "mean"),
    "v_skipinit-qk_sum": carrying("v_skipinit", "qk_sum"),
    "parallel-sum": carrying("parallel", "sum"),
    "dual_stream-sum": carrying("dual_stream", "sum"),
    # Streams, gates and values of the first layer
    "hyper_static": Case(
        BlockConfig(preset="hyper_connections", stream="hyper_static", streams=2),
        REFERENCE["hyper_connections"],
    ),
    "sandwich_ln-average": Case(
        BlockConfig(preset="sandwich_ln", stream="average"),
        replace(REFERENCE["sandwich_ln"], layer=after_each(REFERENCE["sandwich_ln"].layer)),
    ),
    "post_ln-gate-of-head": Case(
        BlockConfig(preset="post_ln", output_gate="head"),
        replace(REFERENCE["post_ln"], gate="head"),
    ),
    "sas_p-gate": Case(
        BlockConfig(preset="sas_p", output_gate="element"),
        replace(REFERENCE["sas_p"], gate="element"),
    ),
    "realformer-learned-values": Case(
        BlockConfig(preset="realformer", value_carry="learned"),
        replace(REFERENCE["realformer"], values="learned"),
    ),
    "pre_ln-only-first-values": Case(
        BlockConfig(value_carry="shared"), replace(REFERENCE["pre_ln"], values="first")
    ),
    "hybrid_norm-only-first-values": Case(
        BlockConfig(preset="hybrid_norm", value_carry="shared"),
        replace(REFERENCE["hybrid_norm"], values="first"),
        {"num_heads": 4, "kv_heads": 2, "model_dim": 16},
    ),
    "normformer-differential": Case(
        BlockConfig(preset="normformer", differential=True, output_gate="head", sink="learned"),
        replace(REFERENCE["normformer"], differs=True, gate="head", sink="learned"),
        {"num_heads": 4, "model_dim": 16},
    ),
    "resformer-differential": Case(
        BlockConfig(preset="resformer", differential=True, score_cap=2.0),
        replace(REFERENCE["resformer"], differs=True, cap=2.0),
        {"num_heads": 4, "kv_heads": 2, "model_dim": 16, "positions": "rope"},
    ),
    # A block's gate, values and both matrices of GEGLU have sizes of their own.
    "gated_attention-sigma_reparam": case(
        "gated_attention", {"activation": "geglu"}, sigma_reparam=True
    ),
    "v_skipinit-sigma_reparam": case(
        "v_skipinit", {}, sigma_reparam=True, value_projection="orthogonal"
    ),
    # Grouped queries
    **{
        f"{preset}-grouped-{groups}": case(
            preset, {"num_heads": 4, "kv_heads": groups, "model_dim": 16, "positions": positions}
        )
        for preset, groups, positions in (
            *(("pre_ln", 1, "sinusoidal"), ("post_ln", 2, "rope"), ("qk_norm", 2, "relative")),
            *(("normformer", 2, "sinusoidal"), ("realformer", 2, "rope")),
            *(("resformer", 2, "sinusoidal"), ("gated_attention", 4, "sinusoidal")),
        )
    },
    "pre_ln-grouped-qk_sum": carrying(
        "pre_ln", "qk_sum", num_heads=4, kv_heads=2, model_dim=16, positions="rope"
    ),
    "pre_ln-grouped-shaped": Case(
        BlockConfig(preset="pre_ln", shaped_attention=ShapingSpec()),
        replace(REFERENCE["pre_ln"], shaped="centre"),
        {"num_heads": 4, "kv_heads": 2, "model_dim": 16},
    ),
    # Projections W = a W_0 + b dW
    "sas-orthogonal_plus": projecting("sas", {0: ("anchored", "anchored")}, **ANCHORED),
    "sas-orthogonal_plus-fixed": projecting(
        "sas", {0: ("anchored", "anchored")}, **ANCHORED, value_gains=SOME, output_gains=OTHER
    ),
    "sas_p-orthogonal_plus-tied": projecting(
        "sas_p", {0: ("anchored", "anchored")}, **ANCHORED, value_gains=OTHER, tied_projections=True
    ),
    "pre_ln-identity_plus": projecting(
        "pre_ln", {0: ("anchored", "full")}, value_projection="identity_plus", value_gains=SOME
    ),
    "sas-first-and-last": projecting(
        "sas",
        {0: ("identity", "identity"), 1: ("full", "identity"), -1: ("identity", "anchored")},
        first_value_projection="full",
        last_output_projection="orthogonal_plus",
        output_gains=SOME,
    ),
    # Shaping
    "shaped-fixed": shaping("centre", ShapingSpec(alpha=0.5, beta=2.0, gamma=0.3, learned=False)),
    "shaped-fixed-shared": shaping(
        "centre", ShapingSpec(alpha=0.5, beta=2.0, gamma=0.3, learned=False, per_head=False)
    ),
    "shaped-shared": shaping("centre", ShapingSpec(per_head=False)),
    "shaped-without-centre": shaping("identity", ShapingSpec(gamma=None)),
    **{
        f"{preset}-localised-{block}-{memory}": Case(
            BlockConfig(
                preset=preset, localised_span=LocalisedSpan(query_block=block, memory=memory)
            ),
            replace(REFERENCE[preset], localised_span=(block, memory)),
        )
        for preset in ("post_ln", "pre_ln", "realformer", "sas", "v_skipinit")
        for block, memory in ((1, 3), (2, 3), (3, 0), (3, 4), (4, 1))
    },
    # A quarter of eleven, rounded up, would be three
    "mix_ln-deep": case("mix_ln", {"encoder_depth": 11, "decoder_depth": 5}),
    # Activations and positions
    "post_ln-learned": case("post_ln", {"positions": "learned", "max_positions": 19}),
    "parallel-leaky_relu": case("parallel", {"activation": "leaky_relu", "activation_slope": 0.3}),
    "normformer-geglu": case("normformer", {"activation": "geglu"}),
    "pre_ln-swiglu-dyt": case("pre_ln", {"activation": "swiglu"}, norm="dyt"),
    "sas-relu_squared-derf": case("sas", {"activation": "relu_squared"}, norm="derf"),
    "peri_ln-derf": case("peri_ln", {"activation": "gelu"}, norm="derf"),
    "sas_p-geglu": case("sas_p", {"activation": "geglu"}),
    "qk_norm-plain-rms": case("qk_norm", {}, norm="rms_norm_plain"),
    **{
        f"prores-{order}": Case(
            BlockConfig(branch_ramp=BranchRamp(steps=2, order=order)),
            replace(REFERENCE["pre_ln"], layer=each(prores(1, 2, order))),
        )
        for order in ("equal", "reverse")
    },
}
INSIDE = {name: case for name, case in COMBINATIONS.items() if "localised" in name}
# z is some units large, so that most of it lies beyond the bend.
CAPPED = {
    f"{preset}-capped": case(preset, {"logit_cap": 1.5, "activation": "gelu"})
    for preset in ("pre_ln", "mhc")
}
CAPPED["pre_ln-untied"] = case("pre_ln", {"tie_embeddings": False, "activation": "gelu"})
EVERY = PLAIN | CAPPED | ROOT_MEAN_SQUARE | COMBINATIONS
BERT = {
    f"{preset}-{norm}-of-the-embedding": case(
        preset, {"embedding_norm": norm, "positions": "learned", "activation": "gelu"}
    )
    for preset in ("post_ln", "realformer", "dual_stream")
    for norm in ("layer_norm", "rms_norm")
}
SMOOTH = (
    PLAIN
    | CAPPED
    | {
        name: replace(one, architecture={"activation": "gelu", **one.architecture})
        for name, one in COMBINATIONS.items()
        if "leaky_relu" not in name
    }
)


@pytest.fixture(autouse=True)
def _small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few tokens are folded where spans are localised."""
    monkeypatch.setattr(windows, "FEWEST", 1)


def parametrize(cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=list(cases))


def test_every_preset_has_a_reference() -> None:
    assert list(REFERENCE) == list(PRESETS)


@pytest.mark.every_shape
@parametrize(EVERY)
def test_translation_equals_reference(case: Case) -> None:
    model = tiny.randomise(tiny.translator(case.block, **case.architecture))
    source, target = tiny.sentences()
    expected = tiny.predicted(case.reference, model, source, target, **case.architecture)
    memory: list[Tensor] = []
    states: list[Tensor] = []
    model.encoder.register_forward_hook(lambda *call: memory.append(call[2]))
    model.decoder.register_forward_hook(lambda *call: states.append(call[2]))
    logits = model(source, target)

    real_source, real_target = source != tiny.PAD, target != tiny.PAD
    for ours, theirs, real in (
        (memory[0], expected.memory, real_source),
        (states[0], expected.states, real_target),
        (logits, expected.logits, real_target),
    ):
        torch.testing.assert_close(
            ours[real], torch.from_numpy(theirs)[real], rtol=1e-11, atol=1e-11
        )


@pytest.mark.every_shape
@parametrize(EVERY | BERT)
def test_masked_prediction_equals_reference(case: Case) -> None:
    model = tiny.randomise(tiny.masked_model(case.block, **case.architecture))
    tokens = tiny.words(3, 7)
    expected = tiny.predicted(case.reference, model, tokens, POSITIONS, **case.architecture)
    logits = model(tokens, POSITIONS)
    torch.testing.assert_close(logits, torch.from_numpy(expected), rtol=1e-11, atol=1e-11)


@parametrize(PLAIN | ROOT_MEAN_SQUARE | INSIDE | CAPPED | SOFTMAX)
def test_next_token_prediction_equals_reference(case: Case) -> None:
    architecture = {**case.architecture, "decoder_depth": 3}
    model = tiny.randomise(tiny.causal_model(case.block, **architecture))
    tokens = tiny.words(3, 7)
    expected = tiny.predicted(case.reference, model, tokens, **architecture)
    torch.testing.assert_close(model(tokens), torch.from_numpy(expected), rtol=1e-11, atol=1e-11)


@parametrize({name: PLAIN[name] for name in ("post_ln", "pre_ln", "realformer", "sas")} | CAPPED)
def test_next_token_gradient_equals_differences_of_reference(case: Case) -> None:
    model = tiny.randomise(tiny.causal_model(case.block, **case.architecture))
    tokens, weight = tiny.words(2, 7), torch.randn(2, 7, tiny.VOCABULARY)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder", **case.architecture))

    def reference_loss(parameters: Parameters) -> float:
        logits = predict_next(case.reference, parameters, sizes, tokens.numpy())
        return float((logits * weight.numpy()).sum())

    check_slopes(model, (model(tokens) * weight).sum(), reference_loss)


@parametrize(SMOOTH)
@pytest.mark.in_turn(3)
def test_translation_gradient_equals_differences_of_reference(case: Case) -> None:
    """On two of the sentences above: the reference goes from cell to cell, often."""
    model = tiny.randomise(tiny.translator(case.block, **case.architecture))
    source, target = (tokens[1:, :6] for tokens in tiny.sentences())
    sizes = tiny.reference_sizes(tiny.architecture(**case.architecture))
    reference = replace(case.reference, stops={})
    # The loss reads only real positions: values at padding are not specified.
    weight = torch.randn(*target.shape, tiny.VOCABULARY) * (target != tiny.PAD)[..., None]

    def reference_loss(parameters: Parameters) -> float:
        result = translate(reference, parameters, sizes, source.numpy(), target.numpy())
        return float((result.logits * weight.numpy()).sum())

    reference_loss(tiny.numpy_parameters(model))  # where gradients stop
    check_slopes(model, (model(source, target) * weight).sum(), reference_loss)


@parametrize(PLAIN | BERT | CAPPED)
def test_masked_gradient_equals_differences_of_reference(case: Case) -> None:
    model = tiny.randomise(tiny.masked_model(case.block, **case.architecture))
    tokens, positions = tiny.words(2, 5), torch.tensor([0, 2, 9, 7])
    sizes = tiny.reference_sizes(tiny.architecture(kind="encoder", **case.architecture))
    weight = torch.randn(len(positions), tiny.VOCABULARY)
    reference = replace(case.reference, stops={})

    def reference_loss(parameters: Parameters) -> float:
        logits = predict_masked(reference, parameters, sizes, tokens.numpy(), positions.numpy())
        return float((logits * weight.numpy()).sum())

    reference_loss(tiny.numpy_parameters(model))  # where gradients stop
    check_slopes(model, (model(tokens, positions) * weight).sum(), reference_loss)


def test_no_norm_is_idle_where_values_are_those_of_the_first_layer() -> None:
    """DDP refuses parameters without a gradient."""
    model = tiny.causal_model(BlockConfig(preset="hybrid_norm", value_carry="shared"))
    model(tiny.words(2, 5)).square().mean().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []
