"""The forms in which one attention map is computed, and the choice between them.

Shapes: query ``(batch, head, query, head_dim)``, key and value ``(batch, head, key, head_dim)``,
scores and maps ``(batch, head, query, key)``.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, final

import psutil
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.kernels.stored import (
    Keys,
    MapGains,
    Mixed,
    Queries,
    Values,
    attend_few_keys,
    attend_with_stored_maps,
    few_bf16_keys,
    no_second_derivative,
)
from lightning_app.blocks.kernels.tiled import (
    BlockedScores,
    ReversibleScores,
    attend_in_blocks,
    attend_reversibly,
)
from lightning_app.blocks.linear import is_followed
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.norm import NORMS

Maps = Float[Tensor, "batch head query key"]
PerHead = Float[Tensor, "#head 1 1"]


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
        v_own = newest(value, attended)
        mean = centred(value, mask)
        shaped = torch.mul(v_own, alpha).addcmul_(attended, beta).addcmul_(mean, gamma, value=-1.0)
        ctx.save_for_backward(attended, value, alpha, beta, gamma, mean)
        ctx.mask = mask
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("shaped attention")
        attended, value, alpha, beta, gamma, mean = ctx.saved_tensors
        v_own = newest(value, attended)
        # One row of means serves all queries.
        all_queries = grad if mean.shape[2] > 1 else grad.sum(dim=2, keepdim=True)
        grad_value = spread(grad, ctx.mask).mul_(-gamma).expand(value.shape)
        if v_own.shape[2] == value.shape[2]:
            grad_value = torch.addcmul(grad_value, grad, alpha)
        else:
            grad_value = grad_value.clone()
            newest(grad_value, attended).addcmul_(grad, alpha)
        learned = ctx.needs_input_grad[2:5]
        return (
            (grad * beta).to(attended.dtype),
            grad_value.to(value.dtype),
            (grad * v_own).sum_to_size(alpha.shape) if learned[0] else None,
            (grad * attended).sum_to_size(beta.shape) if learned[1] else None,
            -(all_queries * mean).sum_to_size(gamma.shape) if learned[2] else None,
            None,
        )


def newest(value: Float[Tensor, "batch head key dim"], like: Queries) -> Queries:
    """Return the values of the queries themselves: in cached decoding they are the last keys."""
    return value[:, :, value.shape[2] - like.shape[2] :]


def own_scores(query: Queries, key: Keys, mask: Mask, cap: float | None = None) -> Maps:
    """``L = Q K^T / sqrt(d_k) + B``, unmasked, in float32 at least; B is the bias of the positions.

    With a cap c it is ``c tanh(L / c)``.
    """
    kept = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(kept) @ key.to(kept).transpose(-2, -1) * query.shape[-1] ** -0.5
    scores = scores if mask.score_bias is None else scores + mask.score_bias
    return scores if cap is None else cap * torch.tanh(scores / cap)


def softmax_input(
    scores: Float[Tensor, "*batch head query key"], mask: Mask, divisor: float = 1.0
) -> Float[Tensor, "*batch head query key"]:
    """``Z / divisor`` and the weights of keys, if the mask has any; unmasked."""
    logits = scores / divisor
    return logits if mask.log_weights is None else logits + mask.log_weights


def softmax_map(scores: Maps, mask: Mask, divisor: float = 1.0) -> Maps:
    """``softmax(Z / divisor)`` over the keys that a query may see; zeros where it sees none."""
    logits = softmax_input(scores, mask, divisor).masked_fill(
        ~mask.allowed, torch.finfo(scores.dtype).min
    )
    return logits.softmax(dim=-1).masked_fill(~mask.allowed, 0.0)


Form = Literal["plain", "stored", "reversible", "blocked"]
"""Forms of attention. All are exact; they differ in what they store for the backward pass. stored:
of shaped maps whose scores are not carried; a chain that carries scores is then plain."""

MOST_SHAPED = 128
"""With more keys, a shaped map takes more time than SDPA plus the mean of values."""
SHORT = 128
"""With fewer queries, maps are so small that storing them costs little."""
SMALL_ON_GPU = 2**-10
"""A map that takes a smaller share of a GPU's memory is stored in every layer: on an H200, 12
layers take 8 ms with 4 sentences of 1,024 tokens, and 18 ms with one map for all of them and
tiles of one sentence."""

_forced: ContextVar[Form | None] = ContextVar("attention_form", default=None)


@contextmanager
def attention_form(form: Form) -> Iterator[None]:
    """Use `form` instead of the policy's choice. ``plain`` uses only PyTorch's own operations:
    it can be differentiated twice and any part of its backward pass can be run again."""
    token = _forced.set(form)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(
    shape: tuple[int, int, int, int], device: torch.device, itemsize: int, *, biased: bool = False
) -> Form:
    """Return the form of residual attention over maps of ``(batch, head, query, key)``.

    The choice depends only on values that stay the same when a run is resumed: shapes, and the
    total memory of the device.
    """
    # The compiler fuses the plain form, and neither it nor vmap follows scores that change; a bias
    # of the scores has a gradient, which tiles do not give.
    if is_followed() or biased:
        return "plain"
    forced = _forced.get()
    if forced is not None:
        return "plain" if forced == "stored" else forced
    batch, heads, queries, keys = shape
    if queries < SHORT:
        return "plain"
    maps, memory = 2 * batch * heads * queries * keys * itemsize, memory_of(device)
    if device.type == "cuda" and maps / 2 < SMALL_ON_GPU * memory:
        return "plain"
    return "blocked" if maps > memory / 2 else "reversible"


def memory_of(device: torch.device) -> int:
    """Return the total memory of a GPU, or of the host, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


@final
class PlainScores(NamedTuple):
    """Z_n, which autograd keeps for every layer. Masked cells are far below zero."""

    scores: Maps


ScoreCarry = PlainScores | ReversibleScores | BlockedScores
"""The state that a chain of residual attention passes from layer to layer."""


def product_type(x: Tensor) -> torch.dtype:
    """Return the type in which a product of `x` is computed here: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def stores_map(query: Queries, key: Keys, mask: Mask) -> bool:
    """Whether a shaped map without carried scores is stored, instead of SDPA and `shape_map`.

    Only in training: without a backward pass SDPA is faster.
    """
    if is_followed():
        return False
    if mask.adds_to_scores:
        return False
    forced = _forced.get()
    if forced is not None:
        return forced == "stored"
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and torch.is_grad_enabled()
        and query.requires_grad
        and key.shape[2] <= MOST_SHAPED
    )


def attend(
    query: Queries,
    key: Keys,
    value: Values,
    mask: Mask,
    dropout: float,
    gains: MapGains | None = None,
    cap: float | None = None,
) -> Mixed:
    """``softmax(Q K^T / sqrt(d_k) + mask) V`` (Vaswani et al. 2017, equation 1).

    With `gains` the map is shaped: see `shape_map`. With `cap` it is ``softmax(c tanh(L / c) +
    mask)``, L of `own_scores`.
    """
    if cap is not None:  # SDPA has none: autograd stores all maps, in float32 at least
        with torch.autocast(query.device.type, enabled=False):
            weights = softmax_map(own_scores(query, key, mask, cap), mask)
            return F.dropout(weights, dropout).to(value.dtype) @ value
    if gains is not None and stores_map(query, key, mask):
        return attend_with_stored_maps(query, key, value, mask, dropout, gains)
    if few_bf16_keys(key, product_type(query), mask) and _forced.get() != "plain":
        heads = attend_few_keys(query, key, value, mask, dropout)
    else:
        how = mask.for_sdpa(query.dtype)
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **how)
    return heads if gains is None else shape_map(heads, value, mask, *gains)


def attend_with_carry(
    query: Queries,
    key: Keys,
    value: Values,
    mask: Mask,
    dropout: float,
    previous: ScoreCarry | None,
    divisor: float,
    gains: MapGains | None = None,
) -> tuple[Mixed, ScoreCarry]:
    """Residual attention (He et al. 2021, RealFormer, 2012.11747, section 3.2).

    ``Z_n = Q K^T / sqrt(d_k) + B + Z_{n-1}``; the map is ``softmax(Z_n / divisor + mask)``. B is
    the bias of the positions, if they have one. Weights of keys (`Mask.log_weights`) are part of
    the mask of one layer.

    Returns the output and the form of ``Z_n``: scaled, a plain sum for any divisor, in
    float32 at least, since it grows with depth. The first layer of a chain chooses the form.
    """
    if previous is None:
        kept = torch.promote_types(query.dtype, torch.float32)
        batch, heads, queries, _ = query.shape
        shape = (batch, heads, queries, key.shape[2])
        biased = mask.adds_to_scores
        form = choose(shape, query.device, kept.itemsize, biased=biased)
    else:
        form = _FORM_OF[type(previous)]
    mixed, carry = _FORMS[form](query, key, value, mask, dropout, previous, divisor)
    return mixed if gains is None else shape_map(mixed, value, mask, *gains), carry


def attend_plainly(
    query: Queries,
    key: Keys,
    value: Values,
    mask: Mask,
    dropout: float,
    previous: PlainScores | None,
    divisor: float,
) -> tuple[Mixed, PlainScores]:
    """Residual attention as in its definition; the mask enters the sum at its first layer."""
    kept = torch.promote_types(query.dtype, torch.float32)
    shape = (*query.shape[:3], key.shape[2])
    with torch.autocast(query.device.type, enabled=False):
        q = query.to(kept).flatten(0, 1) * query.shape[-1] ** -0.5
        k = key.to(kept).flatten(0, 1).transpose(1, 2)
        below = mask.bias(kept) if previous is None else previous.scores
        if below is None:
            scores = torch.bmm(q, k)
        else:
            scores = torch.baddbmm(below.expand(shape).flatten(0, 1), q, k)
        if mask.score_bias is not None:
            scores = scores + mask.score_bias.to(kept).expand(shape).flatten(0, 1)
        logits = scores / divisor if divisor != 1.0 else scores
        if mask.log_weights is not None:
            logits = logits + mask.log_weights.to(kept).expand(shape).flatten(0, 1)
        if divisor < 1.0 and mask.blank is not None:
            # Masked scores may become -inf here, and the softmax of a row of only -inf is NaN.
            logits = logits.unflatten(0, shape[:2]).masked_fill(mask.blank, 0.0).flatten(0, 1)
        weights = F.dropout(logits.softmax(dim=-1), dropout).to(value.dtype)
        heads = torch.bmm(weights, value.flatten(0, 1)).unflatten(0, shape[:2])
    if mask.blank is not None:
        heads = heads.masked_fill(mask.blank, 0.0)
    return heads, PlainScores(scores.unflatten(0, shape[:2]))


_FORMS: dict[Form, Any] = {
    "plain": attend_plainly,
    "reversible": attend_reversibly,
    "blocked": attend_in_blocks,
}
_FORM_OF: dict[type[ScoreCarry], Form] = {
    PlainScores: "plain",
    ReversibleScores: "reversible",
    BlockedScores: "blocked",
}


class QueryKeySums(NamedTuple):
    """Queries and keys of a position, summed over the layers so far; float32 at least."""

    query: Queries
    key: Keys


def attend_with_sums(
    query: Queries,
    key: Keys,
    value: Values,
    mask: Mask,
    dropout: float,
    previous: QueryKeySums | None,
    divisor: float,
    gains: MapGains | None = None,
) -> tuple[Mixed, QueryKeySums]:
    """``softmax((sum_i Q_i)(sum_i K_i)^T / (divisor sqrt(d_k)) + mask) V`` over layers i = 1 .. n.

    Su Jianlin's reading of residual attention. It adds the cross terms Q_i K_j^T, i != j, to
    RealFormer's running sum, and needs no map of the layers below: it carries sums of queries and
    keys. A bias of the positions enters each layer once.
    """
    kept = torch.promote_types(query.dtype, torch.float32)
    sums = QueryKeySums(query.to(kept), key.to(kept))
    if previous is not None:
        sums = QueryKeySums(sums.query + previous.query, sums.key + previous.key)
    cooled = (sums.query / divisor if divisor != 1.0 else sums.query).to(value.dtype)
    return attend(cooled, sums.key.to(value.dtype), value, mask, dropout, gains), sums


def shape_map(
    attended: Mixed, value: Values, mask: Mask, alpha: PerHead, beta: PerHead, gamma: PerHead | None
) -> Mixed:
    """``(alpha I + beta A - gamma C) V`` from ``A V``, without forming the shaped map.

    Without gamma there is no centre: ``(alpha I + beta A) V``, V-SkipInit (equation 4).

    He & Hofmann 2023, equation 6. The identity belongs to the newest queries: in cached decoding
    query i is key ``keys - queries + i``. Dropout acts on A only; the authors' code drops
    entries of the whole map, which deletes tokens from the identity part.
    """
    if gamma is None:
        return alpha * newest(value, attended) + beta * attended
    if mask.score_bias is not None:
        centre = mask.centre.to(value.dtype) @ value
        return alpha * newest(value, attended) + beta * attended - gamma * centre
    if is_followed() or _forced.get() == "plain":
        v_own = newest(value, attended)
        return alpha * v_own + beta * attended - gamma * centred(value, mask)
    return Shape.apply(attended, value, alpha, beta, gamma, mask)  # pyright: ignore[reportReturnType]


LEAST = 2**18
"""With fewer entries in the stream, tracking the norms takes more time than the saved memory is
worth."""


class _Again(NamedTuple):
    """The inputs from which a norm's output is recomputed, and the shape in which it was kept."""

    norm: nn.Module
    input: Tensor
    shape: torch.Size


@final
class NormOutputs:
    """The outputs of the norms in one forward pass, by the address of their memory."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], nn.Module, Tensor]] = {}

    def follow(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Record an output; a forward hook."""
        (x,) = inputs
        if output.dtype == x.dtype:
            self._known[_address(output)] = (weakref.ref(output), norm, x.detach())

    def pack(self, saved: Tensor) -> Tensor | _Again:
        """Return the tensors that autograd keeps instead of `saved`."""
        entry = self._known.get(_address(saved))
        if entry is None:
            return saved
        output, norm, x = entry
        # The memory of a freed output may hold something else by now.
        alive = output()
        if alive is None or saved.shape.numel() != alive.numel() or not saved.is_contiguous():
            return saved
        return _Again(norm, x, saved.shape)

    @staticmethod
    def unpack(packed: Tensor | _Again) -> Tensor:
        """Return the saved tensor; autograd itself connects it to the graph."""
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            # Bypass the module's hooks, which have already seen this output.
            return packed.norm.forward(packed.input).view(packed.shape)

    def forget(self) -> None:
        """Free the inputs that nothing refers to."""
        self._known.clear()


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def saves_memory(x: Tensor) -> bool:
    """Whether recomputing the norms of a stream `x` pays off: in training, on a CPU.

    Not under autocast, where a linear map keeps another tensor than the norm's output.
    """
    return (
        x.device.type == "cpu"
        and x.numel() >= LEAST
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not is_followed()
    )


@contextmanager
def recomputed_norms(stack: nn.Module) -> Iterator[None]:
    """Let backward passes in this context recompute the outputs of the norms of `stack`."""
    outputs = NormOutputs()
    # Of a subclass, a second call may give something else, as with noise.
    norms = [part for part in stack.modules() if type(part) in NORMS]
    # Must run before other hooks, which may replace the norm's output.
    handles = [norm.register_forward_hook(outputs.follow, prepend=True) for norm in norms]
    try:
        with torch.autograd.graph.saved_tensors_hooks(outputs.pack, outputs.unpack):
            yield
    finally:
        outputs.forget()
        for handle in handles:
            handle.remove()
