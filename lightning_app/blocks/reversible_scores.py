"""Residual attention that keeps one map of scores for a whole chain of layers.

The running sum ``Z_n = Z_{n-1} + S_n`` of He et al. 2021 (RealFormer, 2012.11747) can be undone:
the backward pass makes the softmax again from Z_n and then subtracts ``S_n = Q_n K_n^T`` to have
Z_{n-1}. With the gradient of Z that makes two maps in total, for any depth. Both are in float32 at
least, so that the subtraction costs no accuracy.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.double_backward import no_second_derivative
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.tiling import (
    Softmax,
    accumulate,
    attend_tile,
    differentiate_tile,
    heads_like,
    tiles,
)


@final
class Chain:
    """The one map of scores that the layers of a chain share, and how many have entered it."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        mask: Mask,
    ) -> None:
        bias = mask.bias(dtype)
        self.scores: Tensor | None = torch.zeros(shape, dtype=dtype, device=mask.device)
        if bias is not None:
            self.scores.copy_(bias.expand(shape))
        self.layers = 0
        self._grad: Tensor | None = None

    def at(self, layers: int) -> Float[Tensor, "batch head query key"]:
        """Return Z_layers.

        Raises:
            RuntimeError: if the chain holds another layer's sum, as after a backward pass.
        """
        if self.scores is None or self.layers != layers:
            raise RuntimeError(
                "reversible residual attention undoes its scores once, from the last layer to the "
                "first: no second backward pass, no part of one, no checkpointed block; "
                'use `with attention_form("plain")` there'
            )
        return self.scores

    def grad(self) -> Tensor:
        """Return dL/dZ, created by the first layer of the backward pass."""
        if self._grad is None:
            assert self.scores is not None
            self._grad = torch.zeros_like(self.scores)
        return self._grad

    def release(self) -> None:
        """Free both maps."""
        self.scores = self._grad = None


class ReversibleScores(NamedTuple):
    """The state passed to the layer above: the chain, and a token that orders the backward pass."""

    chain: Chain
    token: Tensor

    @property
    def scores(self) -> Float[Tensor, "batch head query key"]:
        """The present Z, that of the last layer that ran. Masked cells are far below zero."""
        return self.chain.at(self.chain.layers)


@final
class _ReversibleLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        token: Tensor,
        chain: Chain,
        softmax: Softmax,
    ) -> tuple[Tensor, Tensor]:
        scores = chain.at(chain.layers)
        scale = query.shape[-1] ** -0.5
        generator = softmax.generator(scores.device)
        out = heads_like(query, value.dtype, value.shape[-1])
        for tile in tiles(query, key, softmax.mask.causal):
            z = tile.of_map(scores)
            q, k = tile.of_queries(query).to(z.dtype), tile.of_keys(key).to(z.dtype)
            z.baddbmm_(q, k.transpose(1, 2), alpha=scale)
            attend_tile(z, value, out, tile, softmax, generator)
        chain.layers += 1
        ctx.save_for_backward(query, key, value)
        ctx.chain, ctx.softmax, ctx.layers = chain, softmax, chain.layers
        return out, token.new_zeros(())

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor, _token: Tensor
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise no_second_derivative("reversible residual attention")
        query, key, value = ctx.saved_tensors
        chain, softmax = ctx.chain, ctx.softmax
        scores, grad_scores = chain.at(ctx.layers), chain.grad()
        scale = query.shape[-1] ** -0.5
        generator = softmax.generator(scores.device)
        grad_query = heads_like(query, scores.dtype, query.shape[-1])
        grad_key = heads_like(key, scores.dtype, key.shape[-1]).zero_()
        grad_value = heads_like(value, scores.dtype, value.shape[-1]).zero_()
        for tile in tiles(query, key, softmax.mask.causal):
            z, dz = tile.of_map(scores), tile.of_map(grad_scores)
            dz.add_(differentiate_tile(z, value, grad, grad_value, tile, softmax, generator))
            q, k = tile.of_queries(query).to(z.dtype), tile.of_keys(key).to(z.dtype)
            tile.of_queries(grad_query).copy_(torch.bmm(dz, k).mul_(scale))
            accumulate(tile.of_keys(grad_key), dz.transpose(1, 2), q, scale)
            z.baddbmm_(q, k.transpose(1, 2), alpha=-scale)
        chain.layers -= 1
        if chain.layers == 0:
            chain.release()
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad.new_zeros((), dtype=torch.float32),
            None,
            None,
        )


def attend_reversibly(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    value: Float[Tensor, "batch head key width"],
    mask: Mask,
    dropout: float,
    previous: ReversibleScores | None,
    divisor: float,
) -> tuple[Float[Tensor, "batch head query width"], ReversibleScores]:
    """``softmax((S_n + Z_{n-1}) / divisor + mask) V``; the chain's map becomes Z_n in place."""
    if previous is None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, queries, _ = query.shape
        chain = Chain((batch, heads, queries, key.shape[2]), dtype, mask)
        token = torch.zeros((), device=query.device)
        previous = ReversibleScores(chain, token)
    softmax = Softmax(mask=mask, divisor=divisor, dropout=dropout)
    with torch.autocast(query.device.type, enabled=False):
        out, token = _ReversibleLayer.apply(
            query, key, value, previous.token, previous.chain, softmax
        )  # pyright: ignore[reportGeneralTypeIssues]
    return out, ReversibleScores(previous.chain, token)
