"""Self-attention within a window of keys around each query, folded into blocks of queries.

A block is one sentence of a larger batch, with only the keys around it. With T tokens, blocks of c
queries and windows of W keys, maps have ``T W`` cells instead of ``T^2``, and every form of
attention computes them as it computes those of short sentences.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lightning_app.blocks.masks import Mask
from lightning_app.blocks.placed import Heads, Places

Parts = Float[Tensor, "folded head part dim"]

FEWEST = 32
"""Smaller blocks of queries leave the processor too little work in each product."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Texts of `length` tokens cut into blocks of `size` queries.

    The window of a block has the `before` tokens before it, the `after` tokens after it, and its
    own tokens, in this order: queries are the last keys, as in cached decoding. Positions outside
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
        inside = torch.arange(self.size, device=device)
        before = torch.arange(-self.before, 0, device=device)
        after = torch.arange(self.size, self.size + self.after, device=device)
        start = self.size * torch.arange(self.blocks, device=device)[:, None]
        return start + torch.cat([before, after, inside])

    def queries(self, x: Heads) -> Float[Tensor, "folded head query dim"]:
        """Return the queries of each block."""
        return _Gather.apply(x, self, [Segment(0, 0, self.size)])  # pyright: ignore[reportReturnType]

    def keys(self, x: Heads) -> Float[Tensor, "folded head key dim"]:
        """Return the keys, or values, of each block's window."""
        after = [Segment(self.before, self.size, self.after)] if self.after else []
        before = [Segment(0, -self.before, self.before)] if self.before else []
        inside = Segment(self.before + self.after, 0, self.size)
        return _Gather.apply(x, self, [*before, *after, inside])  # pyright: ignore[reportReturnType]

    def unfolded(self, x: Float[Tensor, "folded head query dim"]) -> Heads:
        """Return the values of the queries of all blocks, in the order of the text."""
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
    """Consecutive slots of a window: the `width` slots from `at` hold the tokens from `start`.

    `start` counts from the first token of a block.
    """

    at: int
    start: int
    width: int

    def parts(self, most: int) -> "list[Segment]":
        """Cut the segment into parts of at most `most` slots, which blocks do not share."""
        return [
            Segment(self.at + i, self.start + i, min(most, self.width - i))
            for i in range(0, self.width, most)
        ]

    def of_windows(self, windows: Tensor) -> Tensor:
        """Return the segment of ``(batch, block, head, place, dim)``."""
        return windows[:, :, :, self.at : self.at + self.width]

    def inner_blocks(self, fold: Fold) -> tuple[int, int]:
        """Return the first block whose segment lies within the text, and the end of their range."""
        first = min(fold.blocks, max(0, -(self.start // fold.size)))
        end = (fold.length - self.start - self.width) // fold.size + 1
        return first, min(max(first, end), fold.blocks)

    def pairs(self, windows: Tensor, x: Tensor, fold: Fold) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield equal parts of `windows` and `x` that together cover all tokens of the segment.

        `windows` are ``(batch, block, head, place, dim)``, `x` are ``(batch, head, token, dim)``.
        All blocks whose segment lies within the text form one part.
        """
        size, segment = fold.size, self.of_windows(windows)
        first, last = self.inner_blocks(fold)
        for block in [*range(first), *range(last, fold.blocks)]:
            start = block * size + self.start
            inner, end = max(0, start), min(fold.length, start + self.width)
            if inner < end:
                yield segment[:, block, :, inner - start : end - start], x[:, :, inner:end]
        if first < last:
            tokens = x[:, :, first * size + self.start :].unfold(2, self.width, size)
            # (batch, head, block, dim, place) -> (batch, block, head, place, dim)
            yield segment[:, first:last], tokens[:, :, : last - first].permute(0, 2, 1, 4, 3)


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
    """Add the contents of windows to the tokens of the text; the gradient is `_Gather`."""

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


@dataclass(frozen=True, kw_only=True)
class Window:
    """The keys that a query at i may see: those near its block of queries.

    ``floor(i / l) l - before <= j < floor(i / l) l + l + after``, with l the length of a `block`. A
    mask may hide more: in a causal stack a query sees no later key.
    """

    block: int = 1
    before: int
    after: int = 0

    def first(self, query: int) -> int:
        """Return the first position that `query` may see."""
        return max(0, query // self.block * self.block - self.before)

    def visible(
        self, query: Int[Tensor, "*#shape"], key: Int[Tensor, "*#shape"]
    ) -> Bool[Tensor, "*shape"]:
        """Whether a query at a position may see the key at another."""
        start = query - query % self.block
        return (start - self.before <= key) & (key < start + self.block + self.after)

    def hides_nothing(self, length: int, *, causal: bool) -> bool:
        """Whether every query of a text of `length` tokens may see every key, or every earlier."""
        reaches_end = causal or length <= self.block + self.after
        return self.first(max(0, length - 1)) == 0 and reaches_end


@dataclass(frozen=True, kw_only=True)
class LocalisedSpan:
    """Blocks of queries that see themselves and a memory (Parmar et al. 2018, 1802.05751, 4.3).

    The one-dimensional form: with l_q = `query_block` and l_m = `memory`, query i of a causal stack
    sees the keys ``max(0, floor(i / l_q) l_q - l_m) .. i``, and in an encoder also the rest of its
    block. l_q = 1 is a sliding window of l_m + 1 keys.
    """

    query_block: int
    """l_q, the number of tokens of a block."""
    memory: int
    """l_m, the number of tokens before a block that its queries see."""

    def __post_init__(self) -> None:
        if self.query_block < 1:
            raise ValueError(f"localised_span query_block {self.query_block}: must be at least 1")
        if self.memory < 0:
            raise ValueError(f"localised_span memory {self.memory}: must be at least 0")

    @property
    def window(self) -> Window:
        return Window(block=self.query_block, before=self.memory)


@final
class LocalMask:
    """The keys that queries may see within a window, and how maps are computed.

    The maps of long texts hold only the cells around their windows: see `Fold`. Attention computes
    with queries, keys and values that have passed `queries` and `keys`, and with `mask`.

    Attributes:
        whole: The mask of the maps over whole texts.
        mask: The mask of the maps that are computed.
    """

    def __init__(self, window: Window, mask: Mask, batch: int, places: Places | None) -> None:
        self._window = window
        self._limits = mask
        self._places = places
        self._whole: Mask | None = None
        self._fold: Fold | None = None
        if places is None and window.hides_nothing(mask.keys, causal=mask.causal):
            self._whole = mask
        elif places is None:
            self._fold = _fold(window, mask)
        self.mask = self.whole if self._fold is None else self._folded(self._fold, batch)

    def with_score_bias(self, bias: Float[Tensor, "#batch #head query key"]) -> "LocalMask":
        """Return the mask of the same keys with a bias of the scores of whole maps."""
        assert self._fold is None
        return LocalMask(self._window, self._limits.with_score_bias(bias), 1, self._places)

    @property
    def whole(self) -> Mask:
        if self._whole is None:
            limits = self._limits
            places = self._places or Places.whole(limits.keys, limits.device)
            newest, keys = places.newest, places.keys
            near = self._window.visible(newest[None, None, :, None], keys[:, None, None, :])
            seen = near & limits.allowed
            bias = limits.score_bias
            self._whole = Mask(limits.keys, limits.device, seen=seen, score_bias=bias)
        return self._whole

    @property
    def distance(self) -> Int[Tensor, "#batch 1 query key"]:
        """The distance ``|i - j|`` of queries and keys in the maps that are computed."""
        if self._fold is None:
            return self.whole_distance
        device = self._limits.device
        queries, keys = self._fold.queries_at(device)[0], self._fold.keys_at(device)[0]
        return (queries[None, None, :, None] - keys).abs()

    @property
    def whole_distance(self) -> Int[Tensor, "#batch 1 query key"]:
        """The distance of queries and keys in the maps of whole texts."""
        places = self._places or Places.whole(self._limits.keys, self._limits.device)
        newest, keys = places.newest, places.keys
        return (newest[None, None, :, None] - keys[:, None, None, :]).abs()

    def queries(self, x: Heads) -> Parts:
        """Return the queries of the maps that are computed."""
        return x if self._fold is None else self._fold.queries(x)

    def keys(self, x: Heads) -> Parts:
        """Return the keys, or the values, of the maps that are computed."""
        return x if self._fold is None else self._fold.keys(x)

    def unfolded(self, x: Parts) -> Heads:
        """Return the values of the queries, in the order of the text."""
        return x if self._fold is None else self._fold.unfolded(x)

    def whole_map(
        self, x: Float[Tensor, "folded head row column"]
    ) -> Float[Tensor, "batch head query key"]:
        """Return the maps, or scores, of whole texts; zero where no cell was computed."""
        return x if self._fold is None else self._fold.unfolded_map(x)

    def _folded(self, fold: Fold, batch: int) -> Mask:
        limits, device = self._limits, self._limits.device
        queries, keys = fold.queries_at(device), fold.keys_at(device)
        # All blocks see the same slots of their windows, except those outside the text.
        query, key = queries[0, :, None], keys[0]
        near = self._window.visible(query, key)
        near = near & (key <= query) if limits.causal else near
        seen = near & ((keys >= 0) & (keys < fold.length))[:, None]
        # (block, query, key) -> (batch * block, 1, query, key)
        seen = seen.expand(batch, *seen.shape).flatten(0, 1)[:, None]
        if limits.seen is not None:
            seen = seen & _of_each(fold.map(limits.seen), batch * fold.blocks)
        bias = limits.score_bias
        if bias is not None:
            bias = _of_each(fold.map(bias), batch * fold.blocks)
        return Mask(seen.shape[-1], device, seen=seen, score_bias=bias)


def _fold(window: Window, mask: Mask) -> Fold | None:
    """Return the fold of texts under `mask`; None if a full map serves."""
    after = 0 if mask.causal else window.after
    # A block of half as many queries as keys around it computes 1.5 times the cells of a sliding
    # window, and copies each key 3 times.
    least = max((window.before + after) // 2, FEWEST)
    size = window.block * -(-least // window.block)
    if mask.keys <= size + window.before + after:
        return None
    return Fold(length=mask.keys, size=size, before=window.before, after=after)


def _of_each(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else x.repeat(rows // len(x), 1, 1, 1)


@final
class WindowMasks:
    """The masks of the layers in one pass through a stack: one per window, built once.

    Args:
        mask: The keys that queries may see if there are no windows.
        batch: The number of texts.
        places: The positions of queries and keys; None if each text is complete. Blocks can be
            folded into the batch only then.
    """

    def __init__(self, mask: Mask, batch: int, places: Places | None) -> None:
        self._mask = mask
        self._batch = batch
        self._places = places
        self._found: dict[Window, LocalMask] = {}

    def within(self, window: Window | None) -> Mask | LocalMask:
        """Return the mask of a layer with `window`, or without one."""
        if window is None:
            return self._mask
        if window not in self._found:
            self._found[window] = LocalMask(window, self._mask, self._batch, self._places)
        return self._found[window]
