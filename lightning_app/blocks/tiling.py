"""Attention maps in tiles that stay in a processor's cache, forward and backward."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.masks import Mask

# Entries of one tile: 2 MB of float32, a few of which fit a core's share of the cache.
TILE = 2**19
# Only large tiles use a GPU fully.
GPU_TILE = 2**28


class Tile(NamedTuple):
    """Some rows of the maps of some heads of one sentence, and the keys that they may see."""

    batch: int
    heads: slice
    rows: slice
    keys: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, query, dim)``."""
        return x[self.batch, self.heads, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, key, dim)``."""
        return x[self.batch, self.heads, self.keys]

    def of_map(self, x: Tensor) -> Tensor:
        """Return the tile's part of ``(batch, head, query, key)``, each but `key` perhaps of 1."""
        batch = self.batch if x.shape[0] > 1 else 0
        heads = self.heads if x.shape[1] > 1 else slice(None)
        rows = self.rows if x.shape[2] > 1 else slice(None)
        return x[batch, heads, rows, self.keys]


def tiles(query: Tensor, key: Tensor, causal: bool) -> Iterator[Tile]:
    """Cut the maps of ``(batch, head, query, key)`` into tiles.

    Causal rows are cut at least once, at half their length, so that unseen keys are skipped.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    limit = GPU_TILE if query.is_cuda else TILE
    rows = max(1, min(queries, limit // max(1, keys)))
    if causal:
        rows = min(rows, max(64, -(-queries // 4)))
    together = max(1, min(heads, limit // (rows * max(1, keys))))
    for sentence in range(batch):
        for head in range(0, heads, together):
            for row in range(0, queries, rows):
                last = min(row + rows, queries)
                yield Tile(
                    sentence,
                    slice(head, min(head + together, heads)),
                    slice(row, last),
                    slice(0, last if causal else keys),
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
        """Return ``softmax(Z / divisor)``; the mask is in Z (`Mask.bias`), except blank rows."""
        logits = scores if self.divisor == 1.0 else scores / self.divisor
        weights = logits.softmax(dim=-1)
        blank = self.mask.blank
        if blank is not None:
            weights.masked_fill_(_rows(blank, tile), 0.0)
        return weights

    def kept(self, like: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """Return 1 / (1 - dropout) where an entry stays and 0 where it is dropped."""
        if generator is None:
            return None
        stay = 1.0 - self.dropout
        return torch.empty_like(like).bernoulli_(stay, generator=generator).div_(stay)

    def backward(
        self,
        grad: Float[Tensor, "head row key"],
        weights: Float[Tensor, "head row key"],
    ) -> Float[Tensor, "head row key"]:
        """Return dL/dZ from dL/dA: ``A (dA - sum_k A dA) / divisor``."""
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        return grad if self.divisor == 1.0 else grad.div_(self.divisor)


def _rows(blank: Tensor, tile: Tile) -> Tensor:
    """Return the tile's part of ``(batch or 1, 1, query or 1, 1)``."""
    rows = tile.rows if blank.shape[2] > 1 else slice(None)
    return blank[tile.batch if len(blank) > 1 else 0, :, rows]


def accumulate(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """``total += scale * a b``, batches of matrices; `total` may be wider than a and b."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b, alpha=scale)
    else:
        total.add_(torch.bmm(a, b), alpha=scale)


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
    tile.of_queries(out).copy_(torch.bmm(weights.to(value.dtype), tile.of_keys(value)))


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
    accumulate(tile.of_keys(grad_value), dropped.to(value.dtype).transpose(1, 2), above)
    grad_map = torch.bmm(above, values.transpose(1, 2)).to(weights.dtype)
    if kept is not None:
        grad_map.mul_(kept)
    return softmax.backward(grad_map, weights)


def heads_like(like: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """Return an empty ``(batch, head, token, dim)`` that lies in memory as (batch, token, ...).

    The heads of a token are then beside each other, as the output projection reads them.
    """
    batch, heads, tokens, _ = like.shape
    return torch.empty(batch, tokens, heads, dim, dtype=dtype, device=like.device).transpose(1, 2)
