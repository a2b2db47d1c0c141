"""Attention in tiles that fit a processor's cache; the backward pass recomputes the scores.

A chain of residual attention keeps one map of scores for all of its layers: the running sum
``Z_n = Z_{n-1} + S_n`` of He et al. 2021 (RealFormer, 2012.11747) can be undone. The backward pass
recomputes the softmax from Z_n, then subtracts ``S_n = Q_n K_n^T`` to obtain Z_{n-1}. With the
gradient of Z this takes two maps in total, at any depth. Both are in float32 at least, so that the
subtraction costs no accuracy.

The other form stores no map: ``Z_n = sum_i Q_i K_i^T / sqrt(d_k)`` over the layers i = 1 .. n (an
exact identity: the scores of concatenated heads), summed tile by tile. Memory is linear in the
length; time grows with the square of the depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.kernels.stored import no_second_derivative
from lightning_app.blocks.masks import Mask

# Entries of one tile: 2 MB of float32, a few of which fit a core's share of the cache.
TILE = 2**19
# On a GPU a tile has the rows of many sentences, since it takes large products to fill one.
GPU_TILE = 2**24


class Tile(NamedTuple):
    """Some rows of the maps of some heads of some sentences, and the keys that they may see.

    Its parts have the sentences and their heads in one dimension, as products of batches of
    matrices want them.
    """

    batch: slice
    heads: slice
    rows: slice
    keys: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, query, dim)``."""
        return x[self.batch, self.heads, self.rows].flatten(0, 1)

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, key, dim)``."""
        return x[self.batch, self.heads, self.keys].flatten(0, 1)

    def of_map(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, query, key)``, a view."""
        # Either one sentence or all heads, so that both dimensions are one stride apart.
        part = x[self.batch, self.heads, self.rows, self.keys]
        return part.view(part.shape[0] * part.shape[1], *part.shape[2:])

    def split(self, part: Tensor) -> Tensor:
        """Return a part ``(batch * head, query, ...)`` as ``(batch, head, query, ...)``, a view."""
        sentences = self.batch.stop - self.batch.start
        return part.view(sentences, len(part) // sentences, *part.shape[1:])

    def of_bias(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, query, key)``; all but `key` may be 1."""
        return self.of_blank(x)[..., self.keys]

    def of_blank(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, query, 1)``; all may be 1."""
        batch = self.batch if x.shape[0] > 1 else slice(None)
        heads = self.heads if x.shape[1] > 1 else slice(None)
        rows = self.rows if x.shape[2] > 1 else slice(None)
        return x[batch, heads, rows]

    def add_queries(self, total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """``total += scale * a b`` in the tile's part of ``(batch, head, query, dim)``."""
        _accumulate(total[self.batch, self.heads, self.rows], a, b, scale)

    def add_keys(self, total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """``total += scale * a b`` in the tile's part of ``(batch, head, key, dim)``."""
        _accumulate(total[self.batch, self.heads, self.keys], a, b, scale)

    def set_queries(self, x: Tensor, part: Tensor) -> None:
        """Write the tile's part of ``(batch, head, query, dim)``."""
        target = x[self.batch, self.heads, self.rows]
        target.copy_(part.view(target.shape))


def _accumulate(total: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """``total += scale * a b``, batches of matrices; `total` may be wider than a and b."""
    if len(total) == 1 and total.dtype == a.dtype:
        total[0].baddbmm_(a, b, alpha=scale)
    else:
        total.add_(torch.bmm(a, b).view(total.shape), alpha=scale)


def tile_limits(query: Tensor) -> tuple[int, int]:
    """Return the most entries and the most sentences of a tile on the device of `query`.

    One sentence on a CPU: more would fill its cache and save little.
    """
    return (GPU_TILE, len(query)) if query.is_cuda else (TILE, 1)


def tiles(query: Tensor, key: Tensor, causal: bool) -> Iterator[Tile]:
    """Cut the maps of ``(batch, head, query, key)`` into tiles.

    Causal rows are cut at least once, at half their length, so that unseen keys are skipped.
    """
    batch, heads, queries, _ = query.shape
    keys = max(1, key.shape[2])
    limit, most = tile_limits(query)
    rows = max(1, min(queries, limit // keys))
    if causal:
        rows = min(rows, max(64, -(-queries // 4)))
    together = max(1, min(heads, limit // (rows * keys)))
    sentences = max(1, min(most, limit // (heads * rows * keys)))
    for sentence in range(0, batch, sentences):
        for head in range(0, heads, together):
            for row in range(0, queries, rows):
                last = min(row + rows, queries)
                yield Tile(
                    slice(sentence, min(sentence + sentences, batch)),
                    slice(head, min(head + together, heads)),
                    slice(row, last),
                    slice(0, last if causal else key.shape[2]),
                )


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """``dropout(softmax(Z / divisor + mask))`` of a tile of scores Z, and its gradient.

    Dropout uses a separate generator, so that the backward pass, which recomputes the map,
    drops the same entries.
    """

    mask: Mask
    divisor: float
    dropout: float
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        seed = int(torch.randint(2**62, ())) if self.dropout else 0
        object.__setattr__(self, "seed", seed)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return a generator that repeats its last draws; None without dropout."""
        if not self.dropout:
            return None
        return torch.Generator(device).manual_seed(self.seed)

    def weights(self, scores: Tensor, tile: Tile) -> Tensor:
        """Return ``softmax(Z / divisor)``; the mask is in Z (`Mask.bias`) except in blank rows."""
        logits = scores if self.divisor == 1.0 else scores / self.divisor
        weights = logits.softmax(dim=-1)
        blank = self.mask.blank
        if blank is not None:
            tile.split(weights).masked_fill_(tile.of_blank(blank), 0.0)
        return weights

    def kept(self, like: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """Return 1 / (1 - dropout) where an entry is kept and 0 where it is dropped."""
        if generator is None:
            return None
        stay = 1.0 - self.dropout
        return torch.empty_like(like).bernoulli_(stay, generator=generator).div_(stay)

    def backward(
        self, grad: Float[Tensor, "head row key"], weights: Float[Tensor, "head row key"]
    ) -> Float[Tensor, "head row key"]:
        """Return dL/dZ from dL/dA: ``A (dA - sum_k A dA) / divisor``."""
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        return grad if self.divisor == 1.0 else grad.div_(self.divisor)


def attend_tile(
    scores: Tensor,
    value: Tensor,
    out: Tensor,
    tile: Tile,
    softmax: Softmax,
    generator: torch.Generator | None,
) -> None:
    """Write ``A V`` of a tile into `out`, ``(batch, head, query, dim)``."""
    weights = softmax.weights(scores, tile)
    kept = softmax.kept(weights, generator)
    if kept is not None:
        weights.mul_(kept)
    tile.set_queries(out, torch.bmm(weights.to(value.dtype), tile.of_keys(value)))


def differentiate_tile(
    scores: Tensor,
    value: Tensor,
    grad: Tensor,
    grad_value: Tensor,
    tile: Tile,
    softmax: Softmax,
    generator: torch.Generator | None,
) -> Tensor:
    """Add a tile's part to dL/dV and return its dL/dZ, given ``grad`` = dL/d(AV)."""
    weights = softmax.weights(scores, tile)
    kept = softmax.kept(weights, generator)
    dropped = weights if kept is None else weights * kept
    above, values = tile.of_queries(grad), tile.of_keys(value)
    tile.add_keys(grad_value, dropped.to(value.dtype).transpose(1, 2), above)
    grad_map = torch.bmm(above, values.transpose(1, 2)).to(weights.dtype)
    if kept is not None:
        grad_map.mul_(kept)
    return softmax.backward(grad_map, weights)


def heads_like(like: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """Return an empty ``(batch, head, token, dim)`` that lies in memory as (batch, token, ...).

    The heads of a token are then adjacent, as the output projection reads them.
    """
    batch, heads, tokens, _ = like.shape
    return torch.empty(batch, tokens, heads, dim, dtype=dtype, device=like.device).transpose(1, 2)


@final
class Chain:
    """The one map of scores that the layers of a chain share, and how many have entered it."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, mask: Mask) -> None:
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
        """The current Z, that of the last layer that ran. Masked cells are far below zero."""
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
            tile.set_queries(grad_query, torch.bmm(dz, k).mul_(scale))
            tile.add_keys(grad_key, dz.transpose(1, 2), q, scale)
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
        tile.split(z).copy_(tile.of_bias(bias))
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
                tile.add_queries(totals[layer], dz, k, scale)
                tile.add_keys(totals[layers + layer], dz.transpose(1, 2), q, scale)
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
