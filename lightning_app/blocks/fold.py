"""Blocks of queries as sentences of a batch, each with the keys around it alone.

With T tokens, blocks of c queries and windows of W keys, maps have ``T W`` cells instead of
``T^2``, and every form of attention computes them as it computes those of short sentences.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

FEWEST = 32
"""Smaller blocks of queries leave the processor too little work in each product."""


def fold_size(multiple: int, around: int) -> int:
    """Return the number of queries of a block, given the number of keys around it.

    A multiple of `multiple`. A block of half as many queries as keys around it computes 1.5 times
    the cells of a sliding window, and copies each key 3 times.
    """
    least = max(around // 2, FEWEST)
    return multiple * -(-least // multiple)


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Texts of `length` tokens cut into blocks of `size` queries.

    The window of a block has the `before` tokens before it, the `after` tokens after it, and its
    own tokens, in this order: queries are the last keys, as in cached decoding. Places outside of
    the text hold zeros, and must be masked (`keys_at`).
    """

    length: int
    size: int
    before: int
    after: int

    @property
    def blocks(self) -> int:
        return -(-self.length // self.size)

    def queries_at(self, device: torch.device) -> Int[Tensor, "block query"]:
        """Return the positions of the queries of each block; the last may be beyond the text."""
        return torch.arange(self.blocks * self.size, device=device).unflatten(0, (-1, self.size))

    def keys_at(self, device: torch.device) -> Int[Tensor, "block key"]:
        """Return the positions of the keys of each block; some may be outside of the text."""
        own = torch.arange(self.size, device=device)
        before = torch.arange(-self.before, 0, device=device)
        after = torch.arange(self.size, self.size + self.after, device=device)
        start = self.size * torch.arange(self.blocks, device=device)[:, None]
        return start + torch.cat([before, after, own])

    def queries(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "folded head query dim"]:
        """Return the queries of each block."""
        return self._cut(self._padded(x, 0, 0), 0, self.size).flatten(0, 1)

    def keys(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "folded head key dim"]:
        """Return the keys, or values, of each block's window."""
        # Each part is cut a block at a time: the first reaches one block and `after` beyond.
        padded = self._padded(x, self.before, self.size + self.after if self.after else 0)
        places = [*range(0, self.before, self.size)]
        parts = [self._cut(padded, at, min(self.size, self.before - at)) for at in places]
        own = self.before
        for at in range(0, self.after, self.size):
            parts.append(self._cut(padded, own + self.size + at, min(self.size, self.after - at)))
        parts.append(self._cut(padded, own, self.size))
        return torch.cat(parts, dim=3).flatten(0, 1)

    def unfolded(
        self, x: Float[Tensor, "folded head query dim"]
    ) -> Float[Tensor, "batch head token dim"]:
        """Return what the queries of all blocks have, in the order of the text."""
        whole = x.unflatten(0, (-1, self.blocks)).transpose(1, 2).flatten(2, 3)
        return whole[:, :, : self.length]

    def map(
        self, x: Shaped[Tensor, "#batch #head #token token"]
    ) -> Shaped[Tensor, "#folded #head #query key"]:
        """Return the cells of a map of whole texts that the blocks hold, zeros outside."""
        batch, heads, rows, _ = x.shape
        keys = self.keys_at(x.device)
        inside = (keys >= 0) & (keys < self.length)
        columns = keys.clamp(0, self.length - 1)
        if rows > 1:
            queries = self.queries_at(x.device).clamp(max=self.length - 1)
            # (batch, head, block, query, key)
            cells = x[:, :, queries[:, :, None], columns[:, None, :]]
        else:
            cells = x[:, :, 0, columns][:, :, :, None]
        cells = cells.masked_fill(~inside[:, None], 0)
        return cells.transpose(1, 2).reshape(batch * self.blocks, heads, -1, keys.shape[1])

    def unfolded_map(
        self, x: Float[Tensor, "folded head query key"]
    ) -> Float[Tensor, "batch head token token"]:
        """Return the maps of whole texts with the cells of the blocks, zeros elsewhere."""
        keys = self.keys_at(x.device)
        inside = (keys >= 0) & (keys < self.length)
        cells = x.masked_fill(~inside.repeat(len(x) // self.blocks, 1)[:, None, None], 0)
        columns = keys.clamp(0, self.length - 1).repeat(len(x) // self.blocks, 1)[:, None, None]
        whole = x.new_zeros(*x.shape[:3], self.length)
        return self.unfolded(whole.scatter_add(3, columns.expand(x.shape), cells))

    def _padded(self, x: Tensor, before: int, after: int) -> Tensor:
        """Return `x` with zeros before it, and after it up to `after` beyond the last block."""
        after += self.blocks * self.size - self.length
        return F.pad(x, (0, 0, before, after)) if before or after else x

    def _cut(self, padded: Tensor, start: int, width: int) -> Tensor:
        """Return the first `width` of each `size` tokens from `start`, a block beside a block."""
        end = start + self.blocks * self.size
        blocks = padded[:, :, start:end].unflatten(2, (self.blocks, self.size))
        # (batch, head, block, token, dim) -> (batch, block, head, token, dim)
        return blocks[:, :, :, :width].transpose(1, 2)
