"""Every preset against the naive reference, forward and gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.presets import PRESETS
from tests import reference, tiny

pytestmark = pytest.mark.usefixtures("float64")

POSITIONS = torch.tensor([0, 2, 3, 13, 7])
Parameters = dict[str, np.ndarray[Any, np.dtype[np.float64]]]


def test_every_preset_has_a_reference() -> None:
    assert set(reference.REFERENCE) == set(PRESETS)


def blocks() -> list[Any]:
    kinds = [BlockConfig(preset=name) for name in PRESETS]
    kinds += [BlockConfig(preset=name, norm="rms_norm") for name in PRESETS]
    return [pytest.param(b, id=b.preset + ("-rms" if b.norm else "")) for b in kinds]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("block", blocks())
def test_translation_equals_reference(block: BlockConfig, activation: str) -> None:
    model = tiny.randomise(tiny.translator(block, activation=activation))
    source, target = tiny.sentences()
    sizes = tiny.reference_sizes(tiny.architecture(activation=activation))
    expected = reference.translate(
        block.preset, tiny.numpy_parameters(model), sizes, source.numpy(), target.numpy()
    )
    memory: list[Tensor] = []
    states: list[Tensor] = []
    model.encoder.register_forward_hook(lambda *call: memory.append(call[2]))
    model.decoder.register_forward_hook(lambda *call: states.append(call[2][0]))
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


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("block", blocks())
def test_masked_prediction_equals_reference(block: BlockConfig, activation: str) -> None:
    model = tiny.randomise(tiny.masked_model(block, activation=activation))
    tokens = tiny.words(3, 7)
    sizes = tiny.reference_sizes(tiny.architecture(kind="encoder", activation=activation))
    expected = reference.predict_masked(
        block.preset, tiny.numpy_parameters(model), sizes, tokens.numpy(), POSITIONS.numpy()
    )
    logits = model(tokens, POSITIONS)
    torch.testing.assert_close(logits, torch.from_numpy(expected), rtol=1e-11, atol=1e-11)


def slope(loss: Callable[[Parameters], float], at: Parameters, along: Parameters) -> float:
    """Return the derivative of `loss` along a direction: central differences of fourth order."""
    step = 2e-4

    def shifted(by: float) -> float:
        return loss({name: value + by * along[name] for name, value in at.items()})

    near = (shifted(step) - shifted(-step)) / (2 * step)
    far = (shifted(2 * step) - shifted(-2 * step)) / (4 * step)
    return (4 * near - far) / 3


def check_slopes(
    model: nn.Module, loss: Tensor, reference_loss: Callable[[Parameters], float]
) -> None:
    """Compare autograd with differences of the reference, in five directions over all parameters.

    Each direction is random in every parameter; the scale keeps the differences accurate.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    at = tiny.numpy_parameters(model)
    assert reference_loss(at) == pytest.approx(loss.item(), rel=1e-11)
    for _ in range(5):
        along = {name: (0.02 * torch.randn(value.shape)).numpy() for name, value in at.items()}
        ours = sum(
            float((gradient * torch.from_numpy(along[name])).sum())
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None
        )
        assert ours == pytest.approx(slope(reference_loss, at, along), rel=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_translation_gradient_equals_differences_of_reference(preset: str) -> None:
    model = tiny.randomise(tiny.translator(preset, activation="gelu"))
    source, target = tiny.sentences()
    sizes = tiny.reference_sizes(tiny.architecture(activation="gelu"))
    # The loss reads real positions alone: what stands at padding is nobody's promise.
    weight = torch.randn(*target.shape, tiny.VOCABULARY) * (target != tiny.PAD)[..., None]

    def reference_loss(parameters: Parameters) -> float:
        logits = reference.translate(
            preset, parameters, sizes, source.numpy(), target.numpy()
        ).logits
        return float((logits * weight.numpy()).sum())

    check_slopes(model, (model(source, target) * weight).sum(), reference_loss)


@pytest.mark.parametrize("preset", PRESETS)
def test_masked_gradient_equals_differences_of_reference(preset: str) -> None:
    model = tiny.randomise(tiny.masked_model(preset, activation="gelu"))
    tokens = tiny.words(3, 7)
    sizes = tiny.reference_sizes(tiny.architecture(kind="encoder", activation="gelu"))
    weight = torch.randn(len(POSITIONS), tiny.VOCABULARY)

    def reference_loss(parameters: Parameters) -> float:
        logits = reference.predict_masked(
            preset, parameters, sizes, tokens.numpy(), POSITIONS.numpy()
        )
        return float((logits * weight.numpy()).sum())

    check_slopes(model, (model(tokens, POSITIONS) * weight).sum(), reference_loss)
