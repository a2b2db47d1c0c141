"""What a GPU computes equals what the CPU computes; run with `pytest -m gpu`."""

import pytest
import torch
from torch import Tensor

from benchmarks.bench import FORMS, AttentionInputs, Maps, in_form, residual_literally
from benchmarks.peers import Setting, batch_of, learner
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import causal_mask, full_mask
from lightning_app.blocks.presets import PRESETS
from lightning_app.tasks.base import to_device

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = Setting(depth=3, width=32, ff_dim=48, heads=2, vocabulary=41, length=19, tokens=76)


def gradients(loss: Tensor, model: torch.nn.Module) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [grad.cpu() for grad in found if grad is not None]


@pytest.mark.parametrize("task", ["translation", "masked_lm", "causal_lm"])
@pytest.mark.parametrize("preset", PRESETS)
def test_losses_and_gradients_are_those_of_the_cpu(preset: str, task: str) -> None:
    setting = Setting(**{**vars(SIZES), "task": task})
    torch.manual_seed(1)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset=preset), batch)
    elsewhere = Setting(**{**vars(setting), "device": DEVICE})
    theirs = learner(elsewhere, BlockConfig(preset=preset), to_device(batch, torch.device(DEVICE)))
    theirs.model.load_state_dict(ours.model.state_dict())
    losses = [each.loss() for each in (ours, theirs)]
    torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-5, atol=1e-6)
    grads = [gradients(*pair) for pair in zip(losses, (ours.model, theirs.model), strict=True)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 1e-3 * a.norm() + 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_residual_attention_is_the_equation(form: str, causal: bool) -> None:
    maps = Maps(length=150, tokens=300, heads=2, head_dim=16, depth=4, device=DEVICE)
    mask = (causal_mask if causal else full_mask)(maps.length, torch.device(DEVICE))
    torch.manual_seed(1)
    shape = (maps.rows, maps.length, maps.heads * maps.head_dim)
    made = [torch.randn(4, *shape, dtype=torch.float64) for _ in range(maps.depth)]
    results = []
    for forward in (in_form(form), residual_literally):  # pyright: ignore[reportArgumentType]
        dtype = torch.float64 if forward is residual_literally else torch.float32
        layers = [AttentionInputs(*(x.to(DEVICE, dtype) for x in each)) for each in made]
        leaves = [leaf.requires_grad_() for layer in layers for leaf in layer[:3]]
        total = torch.stack([each.double().pow(2).sum() for each in forward(layers, maps, mask)])
        results.append(torch.autograd.grad(total.sum(), leaves))
    for ours, truth in zip(*results, strict=True):
        assert (ours.double() - truth).norm() <= 1e-4 * truth.norm()


@pytest.mark.parametrize("preset", PRESETS)
def test_bfloat16_is_near_float32(preset: str) -> None:
    setting = Setting(**{**vars(SIZES), "device": DEVICE})
    torch.manual_seed(1)
    ours = learner(setting, BlockConfig(preset=preset), batch_of(setting))
    exact = ours.loss()
    with torch.autocast(DEVICE, torch.bfloat16):
        near = ours.loss()
    torch.testing.assert_close(near, exact, rtol=0.02, atol=0.0)
