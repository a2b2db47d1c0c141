"""Shared layers, step signals and halting against the naive reference, forward and gradients."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.models.stack import count_tokens_of, stacks
from tests import tiny
from tests.models.test_reference import Parameters, check_slopes, parametrize
from tests.reference import REFERENCE, Reference, predict_masked, predict_next, translate
from tests.reference_steps import Steps

pytestmark = pytest.mark.usefixtures("float64")

DEPTHS = {"encoder_depth": 4, "decoder_depth": 5, "activation": "gelu"}
POSITIONS = torch.tensor([0, 2, 3, 13, 7])
TAU = 0.7


@dataclass(frozen=True)
class Case:
    """A shared block, with its reference and the architecture."""

    block: BlockConfig
    reference: Reference
    architecture: dict[str, Any]

    @property
    def steps(self) -> Steps:
        assert isinstance(self.reference.steps, Steps)
        return self.reference.steps

    def sizes(self, **changes: Any) -> Any:
        sizes = tiny.reference_sizes(tiny.architecture(**self.architecture, **changes))
        signals = self.steps.signal != "none" and sizes.positions != "rope"
        return replace(sizes, positions="before each step") if signals else sizes


def case(
    preset: str,
    signal: Literal["none", "sinusoidal", "learned"],
    epsilon: float | None,
    /,
    positions: str = "sinusoidal",
    **changes: Any,
) -> Case:
    """`changes` are fields of the reference; residual attention is set in the block too."""
    axes: dict[str, Any] = {"share": "all", "step_signal": signal}
    if epsilon is not None:
        axes["halting"] = HaltingSpec(epsilon=epsilon, ponder_weight=TAU, bias=-0.8)
    if preset == "sas":
        axes["first_value_projection"] = "identity"
        changes["projections"] = lambda number, depth: ("identity", "identity")
    if "carry" in changes:
        axes["residual_attention"] = changes["carry"]
    steps = Steps(signal=signal, positions=positions, epsilon=epsilon)
    architecture = {**DEPTHS, "positions": positions}
    if positions == "rope":
        architecture["model_dim"] = 12
    reference = replace(REFERENCE[preset], steps=steps, **changes)
    return Case(BlockConfig(preset=preset, **axes), reference, architecture)


MAIN = ("post_ln", "pre_ln", "realformer", "sas")
FIXED = {
    **{f"{name}-shared": case(name, "none", None) for name in MAIN},
    **{f"{name}-sinusoidal": case(name, "sinusoidal", None) for name in MAIN},
    "pre_ln-mean": case("pre_ln", "none", None, carry="mean"),
    "pre_ln-qk_sum": case("pre_ln", "learned", None, carry="qk_sum"),
    "dual_stream-shared": case("dual_stream", "none", None),
    "deepnorm-shared": case("deepnorm", "none", None),
    "rezero-rope": case("rezero", "learned", None, positions="rope"),
}
HALTING = {
    **{f"{name}-halting": case(name, "learned", 0.01) for name in MAIN},
    "pre_ln-halting-without-signals": case("pre_ln", "none", 0.01),
    "post_ln-halting-mean": case("post_ln", "sinusoidal", 0.05, carry="mean"),
    "pre_ln-halting-learned": case("pre_ln", "learned", 0.01, positions="learned"),
    "peri_ln-halting": case("peri_ln", "sinusoidal", 0.01),
    "b2t-halting-rope": case("b2t", "sinusoidal", 0.01, positions="rope"),
    "parallel-halting": case("parallel", "sinusoidal", 0.2),
}
EVERY = FIXED | HALTING


def same(ours: Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=1e-11, atol=1e-11)


@parametrize(EVERY)
def test_translation_equals_reference(case: Case) -> None:
    model = tiny.randomise(tiny.translator(case.block, **case.architecture))
    source, target = tiny.sentences()
    found = translate(
        case.reference, tiny.numpy_parameters(model), case.sizes(), source.numpy(), target.numpy()
    )
    real = {"encoder": source != tiny.PAD, "decoder": target != tiny.PAD}
    count_tokens_of(model, real)
    same(model(source, target)[real["decoder"]], found.logits[real["decoder"].numpy()])
    if case.block.halting is None:
        return
    for name, stack in stacks(model).items():
        assert stack.halting is not None
        chosen = real[name].numpy()
        steps, counts = case.steps.steps[name][chosen], stack.halting.step_counts()
        assert int(counts.steps) == steps.sum()
        assert int(counts.at_limit) == (steps == stack.spec.depth).sum()
        assert int(counts.tokens) == len(steps)
        term = stack.halting.auxiliary_terms()["ponder"]
        assert term.weight == TAU
        assert float(term.value.detach()) == pytest.approx(
            case.steps.ponder[name][chosen].sum(), rel=1e-12
        )


def test_tokens_of_the_reference_stop_after_different_steps() -> None:
    """What makes the tests above worth something: early stops, and stops at the maximum."""
    one = HALTING["pre_ln-halting"]
    model = tiny.randomise(tiny.translator(one.block, **one.architecture))
    source, target = (part.numpy() for part in tiny.sentences())
    translate(one.reference, tiny.numpy_parameters(model), one.sizes(), source, target)
    every = {int(n) for steps in one.steps.steps.values() for n in np.unique(steps)}
    assert every >= {1, 2, 3, DEPTHS["encoder_depth"]}


@parametrize(EVERY)
def test_masked_and_next_token_prediction_equal_reference(case: Case) -> None:
    """The predicted states, and those that `states` computes of the predicted tokens alone."""
    model = tiny.randomise(tiny.masked_model(case.block, **case.architecture))
    tokens = tiny.words(3, 7)
    parameters, sizes = tiny.numpy_parameters(model), case.sizes(kind="encoder")
    found = predict_masked(case.reference, parameters, sizes, tokens.numpy(), POSITIONS.numpy())
    same(model(tokens, POSITIONS), found)
    same(
        model.embedding.logits(model.states_of_heads(tokens, POSITIONS).predicted)
        + model.output_bias,
        found,
    )
    model = tiny.randomise(tiny.causal_model(case.block, **case.architecture))
    sizes = case.sizes(kind="decoder")
    found = predict_next(case.reference, tiny.numpy_parameters(model), sizes, tokens.numpy())
    same(model(tokens), found)


@parametrize(EVERY)
def test_gradient_equals_differences_of_reference(case: Case) -> None:
    """Of a loss of the predictions and of the ponder cost of all tokens."""
    model = tiny.randomise(tiny.causal_model(case.block, **case.architecture))
    tokens, sizes = tiny.words(3, 5), case.sizes(kind="decoder")
    weight = torch.randn(3, 5, tiny.VOCABULARY)

    def reference_loss(parameters: Parameters) -> float:
        logits = predict_next(case.reference, parameters, sizes, tokens.numpy())
        ponder = 0.0 if case.steps.epsilon is None else case.steps.ponder["decoder"].sum()
        return float((logits * weight.numpy()).sum() + TAU * ponder)

    count_tokens_of(model, {"decoder": torch.ones_like(tokens, dtype=torch.bool)})
    loss = (model(tokens) * weight).sum()
    if model.decoder.halting is not None:
        term = model.decoder.halting.auxiliary_terms()["ponder"]
        loss = loss + term.weight * term.value
    check_slopes(model, loss, reference_loss)
