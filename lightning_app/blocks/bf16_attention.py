"""Attention over few keys in bfloat16 on a CPU.

PyTorch's SDPA multiplies one small matrix after another there, and in bfloat16 its backward pass
takes longer than in float32. Here the maps of all heads are multiplied at once, and the backward
pass keeps the maps. The scores and their softmax are computed in float32.
"""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.double_backward import no_second_derivative
from lightning_app.blocks.masks import Mask

FEW_KEYS = 256
"""With more keys, the maps need more memory than queries, keys and values of several heads."""


@final
class Bf16Attention(torch.autograd.Function):
    """``dropout(softmax(Q K^T / sqrt(d_k) + mask)) V`` of bfloat16 Q, K and V."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "batch head query dim"],
        key: Float[Tensor, "batch head key dim"],
        value: Float[Tensor, "batch head key width"],
        mask: Mask,
        dropout: float,
    ) -> Float[Tensor, "batch head query width"]:
        q, k, v = (x.flatten(0, 1) for x in (query, key, value))
        maps = (*query.shape[:3], key.shape[2])
        scale = query.shape[-1] ** -0.5
        scores = torch.bmm(q.float() * scale, k.float().transpose(1, 2)).view(maps)
        bias = mask.bias(torch.float32)
        if bias is not None:
            scores += bias
        weights = scores.softmax(dim=-1)
        if mask.blank is not None:
            weights.masked_fill_(mask.blank, 0.0)
        weights = weights.to(value.dtype).flatten(0, 1)
        kept = None
        if dropout:
            kept = torch.empty_like(weights).bernoulli_(1.0 - dropout).div_(1.0 - dropout)
        ctx.save_for_backward(q, k, v, weights, kept)
        ctx.scale, ctx.heads = scale, maps[:2]
        dropped = weights if kept is None else weights * kept
        return torch.bmm(dropped, v).unflatten(0, ctx.heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """dZ = A (dA - sum_k A dA); dQ = dZ K / sqrt(d_k), dK = dZ^T Q / sqrt(d_k), dV = A^T dO."""
        if torch.is_grad_enabled():
            raise no_second_derivative("attention in bfloat16")
        q, k, v, weights, kept = ctx.saved_tensors
        above = grad.flatten(0, 1)
        grad_map = torch.bmm(above, v.transpose(1, 2))
        dropped = weights
        if kept is not None:
            grad_map.mul_(kept)
            dropped = weights * kept
        grad_scores = torch.ops.aten._softmax_backward_data(grad_map, weights, -1, weights.dtype)
        grad_query = torch.bmm(grad_scores, k).mul_(ctx.scale)
        grad_key = torch.bmm(grad_scores.transpose(1, 2), q).mul_(ctx.scale)
        grad_value = torch.bmm(dropped.transpose(1, 2), above)
        grads = (x.unflatten(0, ctx.heads) for x in (grad_query, grad_key, grad_value))
        return *grads, None, None


def few_bf16_keys(key: Tensor, narrow: torch.dtype, mask: Mask) -> bool:
    """Whether products in the type `narrow` with `key` are better computed in the form above.

    Without gradients SDPA is as fast.
    """
    return (
        narrow == torch.bfloat16
        and key.device.type == "cpu"
        and key.shape[2] <= FEW_KEYS
        and not mask.adds_to_scores
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def attend_few_keys(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    value: Float[Tensor, "batch head key width"],
    mask: Mask,
    dropout: float,
) -> Float[Tensor, "batch head query width"]:
    """``softmax(Q K^T / sqrt(d_k) + mask) V`` in bfloat16."""
    q, k, v = (x.to(torch.bfloat16) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return Bf16Attention.apply(q, k, v, mask, dropout)  # pyright: ignore[reportReturnType]
