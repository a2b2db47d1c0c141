"""Norm outputs that are computed again: the same gradients to the last bit."""

from collections.abc import Callable
from copy import deepcopy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.kernels import choose as module
from lightning_app.blocks.kernels.choose import NormOutputs, recomputed_norms, saves_memory
from lightning_app.blocks.norm import Norm, build_norm
from lightning_app.blocks.presets import PRESETS
from lightning_app.training.module import compile_blocks
from tests import tiny

NORMS: tuple[Norm, ...] = ("layer_norm", "rms_norm")


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", 0)


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_every_preset_are_the_same_bits(preset: str, dropout: float) -> None:
    model = tiny.randomise(tiny.translator(preset, dropout=dropout)).train()
    source, target = tiny.sentences()
    stacks = (model.encoder, model.decoder)
    seen: list[bool] = []

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model(source, target).pow(2).sum()

    found, state = [], deepcopy(model.state_dict())
    for recomputes in (False, True):
        model.load_state_dict(state)  # estimates in buffers improve with each pass
        for stack in stacks:
            stack.recomputes_norms = recomputes
        with mock.patch.object(NormOutputs, "unpack", staticmethod(watched(seen))):
            found.append(gradients(model, loss))
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    has_norms = any(isinstance(part, module.NORMS) for s in stacks for part in s.blocks.modules())
    # Norms of branches only: a sum keeps no output of theirs for its gradient.
    assert any(seen) == (has_norms and preset != "swin_v2")


def watched(seen: list[bool]) -> Callable[[object], Tensor]:
    """Return `unpack` that notes whether it computed an output again."""
    unpack = NormOutputs.unpack

    def note(packed: object) -> Tensor:
        seen.append(not isinstance(packed, Tensor))
        return unpack(packed)  # pyright: ignore[reportArgumentType]

    return note


@pytest.mark.parametrize("norm", NORMS)
def test_a_second_derivative_is_right(norm: Norm) -> None:
    """`unpack` returns a constant, but autograd connects what it saved to the graph."""
    torch.manual_seed(1)
    layer = nn.Sequential(build_norm(norm, 5), nn.Linear(5, 4)).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def second() -> list[Tensor]:
        (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.pow(2).sum(), [x, *layer.parameters()]))

    expected = second()
    with recomputed_norms(layer):
        found = second()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_memory_that_holds_something_else_now_is_not_computed_again() -> None:
    outputs, norm, x = NormOutputs(), nn.LayerNorm(4), torch.randn(2, 4)
    output = norm(x)
    outputs.follow(norm, (x,), output)
    assert not isinstance(outputs.pack(output.view(8)), Tensor)
    assert isinstance(outputs.pack(output[:1]), Tensor)
    assert isinstance(outputs.pack(output.t()), Tensor)
    other = output.detach()
    del output
    assert isinstance(outputs.pack(other), Tensor)


class Noisy(nn.LayerNorm):
    """Its second output may be another one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.5 * torch.randn_like(input)


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("replaced", [True, False], ids=["by a hook", "by a subclass"])
def test_an_output_that_a_norm_alone_does_not_give_is_kept(replaced: bool) -> None:
    norm = nn.LayerNorm(8) if replaced else Noisy(8)
    if replaced:
        norm.register_forward_hook(lambda *call: 2.0 * call[2])
    model = nn.Sequential(norm, nn.Linear(8, 8)).double()
    x, found = torch.randn(4, 3, 8, dtype=torch.float64), []

    def loss() -> Tensor:
        torch.manual_seed(2)
        return model(x).pow(2).sum()

    found.append(gradients(model, loss))
    with recomputed_norms(model):
        found.append(gradients(model, loss))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hooks_go_with_the_context() -> None:
    layer = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    with mock.patch.object(NormOutputs, "follow", return_value=None) as follow:
        with recomputed_norms(layer):
            layer(torch.zeros(2, 4))
        layer(torch.zeros(2, 4))
        assert follow.call_count == 1
        with pytest.raises(RuntimeError, match="normalized_shape"), recomputed_norms(layer):
            layer(torch.zeros(2, 5))
        layer(torch.zeros(2, 4))
        assert follow.call_count == 1


def test_only_large_streams_in_training_without_autocast_or_compilation() -> None:
    large = torch.zeros(2, 512, 256)
    assert saves_memory(large)
    assert not saves_memory(large[:1, :511])
    with torch.no_grad():
        assert not saves_memory(large)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not saves_memory(large)
    model = tiny.translator("pre_ln")
    with mock.patch.object(nn.Module, "compile"):
        compile_blocks(model)
    assert not model.encoder.recomputes_norms
    assert not model.decoder.recomputes_norms
