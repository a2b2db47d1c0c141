"""Attention whose maps are stored for the backward pass, in float32 part by part or in bfloat16.

Shaped attention (He & Hofmann 2023, 2311.01906, equation 6) in one pass:

``A = dropout(softmax(Q K^T / sqrt(d_k) + mask))``, ``M = alpha I + beta A - gamma C``, ``O = M V``

Each product over a batch is one call per head for all sentences (or the reverse). It reads
queries, keys and values where the projections left them. Plain autograd copies them first.

Over few keys in bfloat16 on a CPU, PyTorch's SDPA multiplies one small matrix after another, and
its backward pass takes longer than in float32. Here the maps of all heads are multiplied at once,
and the backward pass keeps the maps. The scores and their softmax are computed in float32.

PyTorch's `once_differentiable` raises an error only if the incoming gradient requires a gradient.
If only a saved tensor requires one, it omits terms without an error. So our backward passes check
`torch.is_grad_enabled()`, which is true only in a backward pass with `create_graph=True`.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.linear import is_followed
from lightning_app.blocks.masks import Mask

Queries = Float[Tensor, "batch head query dim"]
Keys = Float[Tensor, "batch head key dim"]
Values = Float[Tensor, "batch head key width"]
Mixed = Float[Tensor, "batch head query width"]


def no_second_derivative(name: str) -> RuntimeError:
    """Return the error that a backward pass raises under `create_graph=True`."""
    return RuntimeError(
        f'{name} has no second derivative; take `attention_form("plain")` and `token_sums` of all '
        "logits"
    )


class MapGains(NamedTuple):
    """The weights of the shaped map, each of shape ``(head or 1, 1, 1)``; without gamma no C."""

    alpha: Tensor
    beta: Tensor
    gamma: Tensor | None


class _MapPlan(NamedTuple):
    """The non-differentiable inputs of one attention call."""

    mask: Mask
    dropout: float
    batch: int
    heads: int

    @property
    def by_head(self) -> bool:
        """Whether a part is one head of all sentences rather than all heads of one sentence."""
        return self.heads <= self.batch

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the parts ``(other, ...)`` of ``(batch, head, ...)``; dimensions may be 1."""
        shape = (self.batch, self.heads, *x.shape[2:])
        return x.expand(shape).unbind(1 if self.by_head else 0)

    def empty(self, like: Tensor, tokens: int, width: int) -> Tensor:
        """Return an empty ``(part, other, token, width)``."""
        first, second = self.batch, self.heads
        if self.by_head:
            first, second = second, first
        return like.new_empty(first, second, tokens, width)

    def joined(self, x: Tensor) -> Tensor:
        """Return ``(part, other, ...)`` as ``(batch, head, ...)``."""
        return x.transpose(0, 1) if self.by_head else x

    def by_gain(self, sums: list[Tensor], like: Tensor) -> Tensor:
        """Return, per gain, the sum over the parts of their sums ``(head or 1,)``."""
        by_part = torch.stack(sums)  # (head, 1) or (sentence, head)
        by_head = by_part if self.by_head else by_part.sum(dim=0)[:, None]
        return by_head[..., None].sum_to_size(like.shape)


@final
class _StoredAttention(torch.autograd.Function):
    # One part is finished before the next begins, so that its maps stay in the processor's cache.

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor,
        beta: Tensor,
        gamma: Tensor | None,
        plan: _MapPlan,
    ) -> Tensor:
        length, width = key.shape[2], value.shape[-1]
        weights = plan.empty(query, query.shape[2], length)
        kept = None
        if plan.dropout:
            kept = torch.empty_like(weights, dtype=torch.bool).bernoulli_(1.0 - plan.dropout)
        out = plan.empty(query, query.shape[2], width)
        shape_parts = _shape_parts(alpha, beta, gamma, plan, query)
        bias = plan.mask.bias(query.dtype)
        biases = None if bias is None else plan.parts(bias)
        blank = plan.mask.blank
        blanks = None if blank is None else plan.parts(blank)
        scale = query.shape[-1] ** -0.5
        parts = zip(*map(plan.parts, (query, key, value)), weights, out, strict=True)
        for i, (q, k, v, w, o) in enumerate(parts):
            if biases is None:
                torch.baddbmm(w, q, k.transpose(1, 2), beta=0, alpha=scale, out=w)
            else:
                torch.baddbmm(biases[i], q, k.transpose(1, 2), alpha=scale, out=w)
            torch.softmax(w, dim=-1, out=w)
            if blanks is not None:
                w.masked_fill_(blanks[i], 0.0)
            mapped = w if kept is None else (w * kept[i]).div_(1.0 - plan.dropout)
            mapped = torch.addcmul(shape_parts.rest[i], mapped, shape_parts.beta[i])
            torch.bmm(mapped, v, out=o)
        ctx.save_for_backward(query, key, value, weights, kept, alpha, beta, gamma)
        ctx.plan = plan
        return plan.joined(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("attention with stored maps")
        query, key, value, weights, kept, alpha, beta, gamma = ctx.saved_tensors
        plan: _MapPlan = ctx.plan
        shape_parts = _shape_parts(alpha, beta, gamma, plan, query)
        grads = [plan.empty(x, x.shape[2], x.shape[3]) for x in (query, key, value)]
        sums: list[list[Tensor]] = [[], [], []]
        offset = key.shape[2] - query.shape[2]
        scale = query.shape[-1] ** -0.5
        parts = zip(*map(plan.parts, (query, key, value, grad)), weights, *grads, strict=True)
        for i, (q, k, v, g, w, dq, dk, dv) in enumerate(parts):
            dropped = w if kept is None else (w * kept[i]).div_(1.0 - plan.dropout)
            dm = torch.bmm(g, v.transpose(1, 2))
            mapped = torch.addcmul(shape_parts.rest[i], dropped, shape_parts.beta[i])
            sums[0].append(_each_head(dm.diagonal(offset, dim1=-2, dim2=-1), plan))
            sums[1].append(_each_head(dm, plan, dropped))
            if shape_parts.centre is not None:
                sums[2].append(_each_head(dm, plan, shape_parts.centre[i]).neg_())
            dm.mul_(shape_parts.beta[i])
            torch.bmm(mapped.transpose(1, 2), g, out=dv)
            if kept is not None:
                dm.mul_(kept[i]).div_(1.0 - plan.dropout)
            dz = torch.ops.aten._softmax_backward_data(dm, w, -1, w.dtype)
            torch.baddbmm(dq, dz, k, beta=0, alpha=scale, out=dq)
            torch.baddbmm(dk, dz.transpose(1, 2), q, beta=0, alpha=scale, out=dk)
        gains = (
            plan.by_gain(one, like) if one and like is not None else None
            for one, like in zip(sums, (alpha, beta, gamma), strict=True)
        )
        return *map(plan.joined, grads), *gains, None


class _ShapeParts(NamedTuple):
    """``alpha I - gamma C``, beta and C of each part; None without gamma."""

    rest: tuple[Tensor, ...]
    beta: tuple[Tensor, ...]
    centre: tuple[Tensor, ...] | None


def _shape_parts(
    alpha: Tensor, beta: Tensor, gamma: Tensor | None, plan: _MapPlan, query: Tensor
) -> _ShapeParts:
    dtype, keys = query.dtype, plan.mask.keys
    # The queries are the newest keys.
    rest = alpha * torch.eye(keys, dtype=dtype, device=query.device)[keys - query.shape[2] :]
    centre = None
    if gamma is not None:
        centre = plan.mask.allowed.to(dtype) / plan.mask.count.to(dtype)
        rest = rest - gamma * centre
        centre = plan.parts(centre)
    rest = rest if rest.dim() == 4 else rest[None]
    return _ShapeParts(plan.parts(rest), plan.parts(beta[None]), centre)


def _each_head(x: Tensor, plan: _MapPlan, factor: Tensor | None = None) -> Tensor:
    """Return the sum of ``x * factor`` over a part ``(other, ...)``: by head if it holds heads."""
    kept = x.shape[0] if not plan.by_head else 1
    if factor is None:
        return x.reshape(kept, -1).sum(dim=-1)
    return torch.linalg.vecdot(x.reshape(kept, -1), factor.expand(x.shape).reshape(kept, -1))


def attend_with_stored_maps(
    query: Queries, key: Keys, value: Values, mask: Mask, dropout: float, gains: MapGains
) -> Mixed:
    """Return O of queries, keys and values of one type; the queries are the newest keys."""
    plan = _MapPlan(mask, dropout, *query.shape[:2])
    with torch.autocast(query.device.type, enabled=False):
        return _StoredAttention.apply(query, key, value, *gains, plan)  # pyright: ignore[reportReturnType]


FEW_KEYS = 256
"""With more keys, the maps need more memory than queries, keys and values of several heads."""


@final
class Bf16Attention(torch.autograd.Function):
    """``dropout(softmax(Q K^T / sqrt(d_k) + mask)) V`` of bfloat16 Q, K and V."""

    @staticmethod
    def forward(
        ctx: Any, query: Queries, key: Keys, value: Values, mask: Mask, dropout: float
    ) -> Mixed:
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
    """Whether products in the type `narrow` with `key` are faster in the form above.

    Without gradients SDPA is as fast.
    """
    return (
        narrow == torch.bfloat16
        and key.device.type == "cpu"
        and key.shape[2] <= FEW_KEYS
        and not mask.adds_to_scores
        and torch.is_grad_enabled()
        and not is_followed()
    )


def attend_few_keys(query: Queries, key: Keys, value: Values, mask: Mask, dropout: float) -> Mixed:
    """``softmax(Q K^T / sqrt(d_k) + mask) V`` in bfloat16."""
    q, k, v = (x.to(torch.bfloat16) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return Bf16Attention.apply(q, k, v, mask, dropout)  # pyright: ignore[reportReturnType]
