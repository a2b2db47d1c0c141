"""Attention weights from scores by definition, and shaped attention without forming its map.

The definition is the reference for every fast form, and probes use it. The fast forms are
PyTorch's `scaled_dot_product_attention` and `attend_plainly` in `kernels`, and `tiling.Softmax`
for maps that are never stored whole.

``(alpha I + beta A - gamma C) V`` comes from ``A V`` and V (He & Hofmann 2023, 2311.01906, equation
6). ``C V`` is a mean of V, so that time and memory are linear in the length.
"""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.kernels.stored import no_second_derivative
from lightning_app.blocks.masks import Mask


def centred(
    value: Float[Tensor, "batch head key dim"], mask: Mask
) -> Float[Tensor, "batch head #query dim"]:
    """Return ``C V``, the mean of V over the keys that a query may see; zero where it sees none.

    A running mean if all earlier keys of a row are seen, one row if every query sees the same
    keys, else a product with the mask; summed in float32 at least.
    """
    kept = torch.promote_types(value.dtype, torch.float32)
    with torch.autocast(value.device.type, enabled=False):
        values = value.to(kept)
        if _running(mask):
            if mask.seen is not None:
                values = values * mask.seen.transpose(-2, -1)
            total = values.cumsum(dim=2)
        elif mask.seen is None:
            total = values.sum(dim=2, keepdim=True)
        else:
            total = mask.allowed.to(kept) @ values
        return (total / mask.count).to(value.dtype)


def spread(
    grad: Float[Tensor, "batch head query dim"], mask: Mask
) -> Float[Tensor, "batch head #key dim"]:
    """Return ``C^T grad``, the gradient of ``C V`` with respect to V; one row if all are equal."""
    kept = torch.promote_types(grad.dtype, torch.float32)
    with torch.autocast(grad.device.type, enabled=False):
        share = grad.to(kept)
        if _running(mask):
            share = share / mask.count
            # Key j was seen by the queries i >= j.
            later = share.sum(dim=2, keepdim=True) - share.cumsum(dim=2) + share
            return later if mask.seen is None else later * mask.seen.transpose(-2, -1)
        if mask.seen is None:
            return share.sum(dim=2, keepdim=True) / mask.count
        if mask.allowed.shape[2] == 1:
            share = share.sum(dim=2, keepdim=True)
        return mask.allowed.to(kept).transpose(-2, -1) @ (share / mask.count)


def _running(mask: Mask) -> bool:
    """Whether query i sees all keys 0..i among those that any query of its row sees."""
    return mask.causal and (mask.seen is None or mask.seen.shape[2] == 1)


@final
class Shape(torch.autograd.Function):
    """``alpha V_own + beta (A V) - gamma (C V)`` with a backward pass of few passes over memory."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: Tensor,
        value: Tensor,
        alpha: Tensor,
        beta: Tensor,
        gamma: Tensor,
        mask: Mask,
    ) -> Tensor:
        own = newest(value, attended)
        mean = centred(value, mask)
        shaped = torch.mul(own, alpha).addcmul_(attended, beta).addcmul_(mean, gamma, value=-1.0)
        ctx.save_for_backward(attended, value, alpha, beta, gamma, mean)
        ctx.mask = mask
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("shaped attention")
        attended, value, alpha, beta, gamma, mean = ctx.saved_tensors
        own = newest(value, attended)
        # One row of means serves all queries.
        all_queries = grad if mean.shape[2] > 1 else grad.sum(dim=2, keepdim=True)
        grad_value = spread(grad, ctx.mask).mul_(-gamma).expand(value.shape)
        if own.shape[2] == value.shape[2]:
            grad_value = torch.addcmul(grad_value, grad, alpha)
        else:
            grad_value = grad_value.clone()
            newest(grad_value, attended).addcmul_(grad, alpha)
        learned = ctx.needs_input_grad[2:5]
        return (
            (grad * beta).to(attended.dtype),
            grad_value.to(value.dtype),
            (grad * own).sum_to_size(alpha.shape) if learned[0] else None,
            (grad * attended).sum_to_size(beta.shape) if learned[1] else None,
            -(all_queries * mean).sum_to_size(gamma.shape) if learned[2] else None,
            None,
        )


def newest(
    value: Float[Tensor, "batch head key dim"], like: Float[Tensor, "batch head query dim"]
) -> Float[Tensor, "batch head query dim"]:
    """Return the values of the queries themselves: in cached decoding they are the last keys."""
    return value[:, :, value.shape[2] - like.shape[2] :]


def own_scores(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    mask: Mask,
) -> Float[Tensor, "batch head query key"]:
    """``Q K^T / sqrt(d_k) + B``, unmasked, in float32 at least; B is the bias of the positions."""
    kept = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(kept) @ key.to(kept).transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores if mask.score_bias is None else scores + mask.score_bias


def softmax_input(
    scores: Float[Tensor, "*batch head query key"], mask: Mask, divisor: float = 1.0
) -> Float[Tensor, "*batch head query key"]:
    """``Z / divisor`` and the weights of keys, if the mask has any; unmasked."""
    logits = scores / divisor
    return logits if mask.log_weights is None else logits + mask.log_weights


def softmax_map(
    scores: Float[Tensor, "batch head query key"], mask: Mask, divisor: float = 1.0
) -> Float[Tensor, "batch head query key"]:
    """``softmax(Z / divisor)`` over the keys that a query may see; zeros where it sees none."""
    logits = softmax_input(scores, mask, divisor).masked_fill(
        ~mask.allowed, torch.finfo(scores.dtype).min
    )
    return logits.softmax(dim=-1).masked_fill(~mask.allowed, 0.0)
