"""Whole stacks: gradients by `gradcheck`, and the cache of decoding."""

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.masks import Mask, causal_mask, full_mask, padding_mask
from lightning_app.blocks.memory import LayerCache
from lightning_app.blocks.presets import PRESETS
from lightning_app.models.positions import Places
from lightning_app.models.stack import BlockStack
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

BATCH, SOURCE, TARGET, MODEL = 2, 3, 5, 10
# The gradient of GPAS is none of a function: it stops on its way.
every_preset = pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"gpas"}))


def source_mask() -> Mask:
    return padding_mask(torch.arange(SOURCE) < torch.tensor([3, 2])[:, None])


def leaves(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Encoding(nn.Module):
    """An encoder as a function of the stream alone."""

    def __init__(self, encoder: BlockStack) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, source_mask())


class Decoding(nn.Module):
    """A decoder as a function of the stream and of the encoder's output alone."""

    def __init__(self, decoder: BlockStack) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return tiny.decode(self.decoder, x, memory, source_mask())


def check_gradients(module: nn.Module, *inputs: Tensor) -> None:
    """Compare autograd with differences, in `inputs` and in every parameter of `module`."""
    names, parameters = zip(*tiny.randomise(module).named_parameters(), strict=True)

    def run(*tensors: Tensor) -> Tensor:
        values = dict(zip(names, tensors[len(inputs) :], strict=True))
        return torch.func.functional_call(module, values, tensors[: len(inputs)])

    assert torch.autograd.gradcheck(run, (*inputs, *parameters), fast_mode=True)


@pytest.mark.unchecked_shapes
@every_preset
@pytest.mark.in_turn(4)
def test_encoder_passes_gradcheck(preset: str) -> None:
    check_gradients(Encoding(tiny.encoder(preset, depth=2)), leaves(BATCH, SOURCE, MODEL))


@pytest.mark.unchecked_shapes
@every_preset
@pytest.mark.in_turn(4)
def test_decoder_passes_gradcheck(preset: str) -> None:
    inputs = leaves(BATCH, TARGET, MODEL), leaves(BATCH, SOURCE, MODEL)
    check_gradients(Decoding(tiny.decoder(preset)), *inputs)


@pytest.mark.unchecked_shapes
@every_preset
@pytest.mark.in_turn(4)
def test_one_block_passes_the_full_gradcheck(preset: str) -> None:
    """Every entry of the Jacobian in the stream, of one block with padding."""
    module = tiny.randomise(tiny.encoder(preset, depth=1))
    x = leaves(BATCH, SOURCE, MODEL)
    assert torch.autograd.gradcheck(lambda x: module(x, source_mask()), (x,))


@every_preset
def test_cache_grows_by_the_newest_tokens(preset: str) -> None:
    module = tiny.decoder(preset)
    memory = module.remember(torch.randn(BATCH, SOURCE, MODEL), source_mask())
    caches = [LayerCache() for _ in module.blocks]
    x = torch.randn(BATCH, TARGET, MODEL)
    module(x, causal_mask(TARGET, x.device), memory, caches)
    for cache in caches:
        assert cache.filled == cache.room == TARGET
        assert cache.keys is not None
        assert cache.values is not None
        assert cache.keys.shape[2] == cache.values.shape[2] == TARGET


@torch.no_grad()
def test_a_cache_with_room_is_written_and_not_copied() -> None:
    """Four tokens, then the last on its own, as in one pass; what lies in the room is not read."""
    module = tiny.randomise(tiny.decoder("realformer"))
    memory, x = torch.randn(BATCH, SOURCE, MODEL), torch.randn(BATCH, TARGET, MODEL)
    whole = tiny.decode(module, x, memory, source_mask())
    before = TARGET - 1
    first, mask = x[:, :before], causal_mask(before, x.device)
    caches = [LayerCache() for _ in module.blocks]
    remembered = module.remember(memory, source_mask())
    module(first, mask, remembered, caches)
    slots = torch.arange(before).expand(BATCH, -1)
    caches = [cache.moved(slots, TARGET + 2) for cache in caches]
    parts = [(cache.keys, cache.values) for cache in caches]
    for keys, values in parts:
        assert keys is not None
        assert values is not None
        keys[:, :, before:] = values[:, :, before:] = torch.nan
    mask = full_mask(TARGET, x.device)
    places = Places(torch.tensor([before]), torch.arange(TARGET)[None], before)
    last = module(x[:, before:], mask, remembered, caches, places)
    torch.testing.assert_close(last[:, 0], whole[:, before], rtol=1e-12, atol=1e-12)
    for cache, (keys, values) in zip(caches, parts, strict=True):
        assert cache.filled == TARGET
        assert cache.keys is keys
        assert cache.values is values
