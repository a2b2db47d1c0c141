"""Stacks of blocks: they carry the scores from layer to layer and apply the final norm."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.block import DecoderBlock, DecoderScores, EncoderBlock, LayerCache, Sizes
from lightning_app.blocks.kernels import Mask
from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.presets import StackSpec


@final
class Encoder(nn.Module):
    """``depth`` encoder blocks and the stack's final norm."""

    def __init__(self, spec: StackSpec, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(block, sizes) for block in spec.blocks)
        self.final_norm = build_norm(spec.final_norm, sizes.model_dim)

    def forward(
        self, x: Float[Tensor, "batch token model"], mask: Mask
    ) -> Float[Tensor, "batch token model"]:
        scores = None
        for block in self.blocks:
            x, scores = block(x, mask, scores)
        return self.final_norm(x)


@final
class Decoder(nn.Module):
    """``depth`` decoder blocks and the stack's final norm."""

    def __init__(self, spec: StackSpec, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(block, sizes) for block in spec.blocks)
        self.final_norm = build_norm(spec.final_norm, sizes.model_dim)

    def start(self, memory: Float[Tensor, "batch source model"]) -> list[LayerCache]:
        """Return one cache a block: keys and values of the source, none of the target yet."""
        caches = []
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            keys, values = block.cross_attention.keys_values(memory)
            caches.append(LayerCache(keys[:, :, :0], values[:, :, :0], keys, values))
        return caches

    def forward(
        self,
        x: Float[Tensor, "batch query model"],
        mask: Mask,
        source_mask: Mask,
        caches: list[LayerCache],
    ) -> tuple[Float[Tensor, "batch query model"], list[LayerCache]]:
        """Return the states of the newest tokens `x` and the caches with them added."""
        scores = DecoderScores()
        grown = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, scores, cache = block(x, mask, source_mask, scores, cache)
            grown.append(cache)
        return self.final_norm(x), grown
