"""Residual attention that stores no map: scores are recomputed and summed, tile by tile.

``Z_n = sum_i Q_i K_i^T / sqrt(d_k)`` over the layers i = 1 .. n (an exact identity: the scores of
concatenated heads). Memory is linear in the length; time grows with the square of the depth.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.double_backward import no_second_derivative
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.tiling import (
    Softmax,
    Tile,
    accumulate,
    attend_tile,
    differentiate_tile,
    heads_like,
    tiles,
)


class BlockedScores(NamedTuple):
    """The state passed to the layer above: the queries and keys of all layers so far."""

    queries: tuple[Float[Tensor, "batch head query dim"], ...]
    keys: tuple[Float[Tensor, "batch head key dim"], ...]

    @property
    def scores(self) -> Float[Tensor, "batch head query key"]:
        """Z, computed on request; unmasked."""
        kept = torch.promote_types(self.queries[0].dtype, torch.float32)
        pairs = zip(self.queries, self.keys, strict=True)
        scale = self.queries[0].shape[-1] ** -0.5
        products = (q.to(kept) @ k.to(kept).transpose(-2, -1) * scale for q, k in pairs)
        total = next(products)
        for product in products:
            total = total + product
        return total


def _summed(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], softmax: Softmax, tile: Tile):
    """Return Z of a tile, masked."""
    kept = torch.promote_types(queries[0].dtype, torch.float32)
    first = tile.of_queries(queries[0])
    shape = (first.shape[0], first.shape[1], tile.keys.stop)
    bias = softmax.mask.bias(kept)
    z = torch.zeros(shape, dtype=kept, device=first.device)
    if bias is not None:
        z.copy_(tile.of_map(bias).expand(shape))
    for query, key in zip(queries, keys, strict=True):
        q, k = tile.of_queries(query).to(kept), tile.of_keys(key).to(kept)
        z.baddbmm_(q, k.transpose(1, 2), alpha=query.shape[-1] ** -0.5)
    return z


@final
class _RecomputedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, softmax: Softmax, *inputs: Tensor) -> Tensor:
        layers = len(inputs) // 2
        queries, keys = inputs[:layers], inputs[layers:]
        generator = softmax.generator(value.device)
        out = heads_like(queries[0], value.dtype, value.shape[-1])
        for tile in tiles(queries[0], keys[0], softmax.mask.causal):
            z = _summed(queries, keys, softmax, tile)
            attend_tile(z, value, out, tile, softmax, generator)
        ctx.save_for_backward(value, *inputs)
        ctx.softmax = softmax
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("residual attention in blocks")
        value, *inputs = ctx.saved_tensors
        layers = len(inputs) // 2
        queries, keys = tuple(inputs[:layers]), tuple(inputs[layers:])
        kept = torch.promote_types(queries[0].dtype, torch.float32)
        scale = queries[0].shape[-1] ** -0.5
        generator = ctx.softmax.generator(value.device)
        totals = [heads_like(x, kept, x.shape[-1]).zero_() for x in (*queries, *keys)]
        grad_value = heads_like(value, kept, value.shape[-1]).zero_()
        for tile in tiles(queries[0], keys[0], ctx.softmax.mask.causal):
            z = _summed(queries, keys, ctx.softmax, tile)
            dz = differentiate_tile(z, value, grad, grad_value, tile, ctx.softmax, generator)
            for layer in range(layers):
                q = tile.of_queries(queries[layer]).to(kept)
                k = tile.of_keys(keys[layer]).to(kept)
                accumulate(tile.of_queries(totals[layer]), dz, k, scale)
                accumulate(tile.of_keys(totals[layers + layer]), dz.transpose(1, 2), q, scale)
        grads = (total.to(x.dtype) for total, x in zip(totals, inputs, strict=True))
        return grad_value.to(value.dtype), None, *grads


def attend_in_blocks(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    value: Float[Tensor, "batch head key width"],
    mask: Mask,
    dropout: float,
    previous: BlockedScores | None,
    divisor: float,
) -> tuple[Float[Tensor, "batch head query width"], BlockedScores]:
    """``softmax(sum_i Q_i K_i^T / (divisor sqrt(d_k)) + mask) V``, one tile of a map at a time."""
    below = BlockedScores((), ()) if previous is None else previous
    carry = BlockedScores((*below.queries, query), (*below.keys, key))
    softmax = Softmax(mask=mask, divisor=divisor, dropout=dropout)
    with torch.autocast(query.device.type, enabled=False):
        out = _RecomputedLayer.apply(value, softmax, *carry.queries, *carry.keys)
    return out, carry  # pyright: ignore[reportReturnType]
