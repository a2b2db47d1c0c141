"""The cache of decoding: what has room for more tokens is written in place."""

import pytest
import torch

from lightning_app.blocks.masks import Mask, causal_mask, full_mask, padding_mask
from lightning_app.blocks.memory import LayerCache
from lightning_app.models.positions import Places
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

BATCH, SOURCE, TARGET, MODEL = 2, 3, 5, 10


def source_mask() -> Mask:
    return padding_mask(torch.arange(SOURCE) < torch.tensor([3, 2])[:, None])


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
