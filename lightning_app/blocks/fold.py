"""Blocks of queries as sentences of a batch, each with the keys around it alone.

With T tokens, blocks of c queries and windows of W keys, maps have ``T W`` cells instead of
``T^2``, and every form of attention computes them as it computes those of short sentences.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

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

    @property
    def keys_a_block(self) -> int:
        return self.before + self.after + self.size

    def queries(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "folded head query dim"]:
        """Return the queries of each block."""
        return _Gather.apply(x, self, [Segment(0, 0, self.size)])  # pyright: ignore[reportReturnType]

    def keys(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "folded head key dim"]:
        """Return the keys, or values, of each block's window."""
        after = [Segment(self.before, self.size, self.after)] if self.after else []
        before = [Segment(0, -self.before, self.before)] if self.before else []
        own = Segment(self.before + self.after, 0, self.size)
        return _Gather.apply(x, self, [*before, *after, own])  # pyright: ignore[reportReturnType]

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


class Segment(NamedTuple):
    """Consecutive places of a window: `width` of them, from `at`, hold the tokens from `start`.

    `start` counts from the first token of a block.
    """

    at: int
    start: int
    width: int

    def parts(self, most: int) -> "list[Segment]":
        """Cut the segment into parts of at most `most` places, which blocks do not share."""
        return [
            Segment(self.at + i, self.start + i, min(most, self.width - i))
            for i in range(0, self.width, most)
        ]

    def of_windows(self, windows: Tensor) -> Tensor:
        """Return the segment of ``(batch, block, head, place, dim)``."""
        return windows[:, :, :, self.at : self.at + self.width]

    def inner_blocks(self, fold: Fold) -> tuple[int, int]:
        """Return the first block whose segment lies within the text, and the end of these."""
        first = min(fold.blocks, max(0, -(self.start // fold.size)))
        end = (fold.length - self.start - self.width) // fold.size + 1
        return first, min(max(first, end), fold.blocks)

    def pairs(self, windows: Tensor, x: Tensor, fold: Fold) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield equal parts of `windows` and of `x`, which together are all tokens of the segment.

        `windows` are ``(batch, block, head, place, dim)``, `x` are ``(batch, head, token, dim)``.
        The blocks whose segment lies within the text are one part.
        """
        size, here = fold.size, self.of_windows(windows)
        first, last = self.inner_blocks(fold)
        for block in [*range(first), *range(last, fold.blocks)]:
            start = block * size + self.start
            inner, end = max(0, start), min(fold.length, start + self.width)
            if inner < end:
                yield here[:, block, :, inner - start : end - start], x[:, :, inner:end]
        if first < last:
            tokens = x[:, :, first * size + self.start :].unfold(2, self.width, size)
            # (batch, head, block, dim, place) -> (batch, block, head, place, dim)
            yield here[:, first:last], tokens[:, :, : last - first].permute(0, 2, 1, 4, 3)


@final
class _Gather(torch.autograd.Function):
    """Copy the tokens of a text into windows; the gradient is `_Scatter`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fold: Fold, segments: list[Segment]) -> Tensor:
        ctx.fold, ctx.segments = fold, segments
        batch, heads, _, dim = x.shape
        places = sum(segment.width for segment in segments)
        windows = x.new_empty(batch, fold.blocks, heads, places, dim)
        for segment in segments:
            first, last = segment.inner_blocks(fold)
            segment.of_windows(windows)[:, :first].zero_()
            segment.of_windows(windows)[:, last:].zero_()
            for window, tokens in segment.pairs(windows, x, fold):
                window.copy_(tokens)
        return windows.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Scatter.apply(grad, ctx.fold, ctx.segments), None, None  # pyright: ignore[reportReturnType]


@final
class _Scatter(torch.autograd.Function):
    """Add what windows hold to the tokens of the text; the gradient is `_Gather`."""

    @staticmethod
    def forward(ctx: Any, windows: Tensor, fold: Fold, segments: list[Segment]) -> Tensor:
        ctx.fold, ctx.segments = fold, segments
        blocks = windows.unflatten(0, (-1, fold.blocks))
        batch, _, heads, _, dim = blocks.shape
        x = windows.new_zeros(batch, heads, fold.length, dim)
        for segment in segments:
            for part in segment.parts(fold.size):
                for window, tokens in part.pairs(blocks, x, fold):
                    tokens.add_(window)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Gather.apply(grad, ctx.fold, ctx.segments), None, None  # pyright: ignore[reportReturnType]
