"""Stacks of blocks: they carry the scores from layer to layer and apply the final norm."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.block import Carries, DecoderBlock, EncoderBlock, LayerCache, Sizes
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.residual import Stream
from lightning_app.blocks.rotary import Rotation, rotation
from lightning_app.blocks.stack import StackSpec


def entering(spec: StackSpec, x: Tensor) -> Stream:
    """Return the stream that the first block reads: ``r_0 = x_0`` where there are two."""
    return Stream(x, x if spec.dual_stream else None)


def leaving(stream: Stream, final_norm: nn.Module) -> Tensor:
    """Return ``final_norm(x)``, or ``x + final_norm(r)`` where there are two streams."""
    if stream.total is None:
        return final_norm(stream.x)
    return stream.x + final_norm(stream.total)


def rotation_of(dim: int | None, start: int, length: int, device: torch.device) -> Rotation | None:
    """Return the angles of `length` rotary positions from `start` on, if the stack has such."""
    return None if dim is None else rotation(start, length, dim, device)


@final
class Encoder(nn.Module):
    """``depth`` encoder blocks, the norms of the stack before and after them."""

    def __init__(self, spec: StackSpec, sizes: Sizes) -> None:
        super().__init__()
        self.spec = spec
        self.rotary_dim = sizes.head_dim if sizes.rotary else None
        self.input_norm = build_norm(spec.input_norm, sizes.model_dim)
        self.blocks = nn.ModuleList(EncoderBlock(block, sizes) for block in spec.blocks)
        self.final_norm = build_norm(spec.final_norm, sizes.model_dim)

    def forward(
        self, x: Float[Tensor, "batch token model"], mask: Mask
    ) -> Float[Tensor, "batch token model"]:
        angles = rotation_of(self.rotary_dim, 0, x.shape[1], x.device)
        stream, carry = entering(self.spec, self.input_norm(x)), None
        for block in self.blocks:
            stream, carry = block(stream, mask, carry, angles)
        return leaving(stream, self.final_norm)


@final
class Decoder(nn.Module):
    """``depth`` decoder blocks, the norms of the stack before and after them."""

    def __init__(self, spec: StackSpec, sizes: Sizes) -> None:
        super().__init__()
        self.spec = spec
        self.rotary_dim = sizes.head_dim if sizes.rotary else None
        self.input_norm = build_norm(spec.input_norm, sizes.model_dim)
        self.blocks = nn.ModuleList(DecoderBlock(block, sizes) for block in spec.blocks)
        self.final_norm = build_norm(spec.final_norm, sizes.model_dim)

    def start(self, memory: Float[Tensor, "batch source model"]) -> list[LayerCache]:
        """Return one cache a block: keys and values of the source, none of the target yet."""
        caches, nothing = [], memory.new_empty(len(memory), 0, 0, 0)
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            caches.append(
                LayerCache(nothing, nothing, *block.cross_attention.keys_values(memory, None))
            )
        return caches

    def forward(
        self,
        x: Float[Tensor, "batch query model"],
        mask: Mask,
        source_mask: Mask,
        caches: list[LayerCache],
        position: int | None = None,
    ) -> tuple[Float[Tensor, "batch query model"], list[LayerCache]]:
        """Return the states of the newest tokens `x` and the caches with them added.

        `x` is a target from its first token on, or, where `position` is given, one token of each
        of several targets, all of which stand there.
        """
        span = (0, x.shape[1]) if position is None else (position, 1)
        angles = rotation_of(self.rotary_dim, *span, x.device)
        stream, carries, grown = entering(self.spec, self.input_norm(x)), Carries(), []
        for block, cache in zip(self.blocks, caches, strict=True):
            stream, carries, cache = block(stream, mask, source_mask, carries, cache, angles)
            grown.append(cache)
        return leaving(stream, self.final_norm), grown
