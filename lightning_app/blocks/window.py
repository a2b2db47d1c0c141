"""Self-attention within a window of keys around each query."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.fold import Fold, fold_size
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.placed import Places


@dataclass(frozen=True, kw_only=True)
class Window:
    """The keys that a query at i may see: those near its block of queries.

    ``floor(i / l) l - before <= j < floor(i / l) l + l + after``, l the length of a `block`. A
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
            raise ValueError(f"localised_span query_block {self.query_block}: at least 1")
        if self.memory < 0:
            raise ValueError(f"localised_span memory {self.memory}: at least 0")

    @property
    def window(self) -> Window:
        return Window(block=self.query_block, before=self.memory)


@final
class LocalMask:
    """The keys that queries may see within a window, and the form in which maps are computed.

    The maps of long texts have only the cells around their windows: see `Fold`. Attention computes
    with queries, keys and values that have passed `queries` and `keys`, and with `mask`.

    Attributes:
        whole: The mask of the maps of whole texts.
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

    def queries(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "folded head part dim"]:
        """Return the queries of the maps that are computed."""
        return x if self._fold is None else self._fold.queries(x)

    def keys(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "folded head part dim"]:
        """Return the keys, or the values, of the maps that are computed."""
        return x if self._fold is None else self._fold.keys(x)

    def unfolded(
        self, x: Float[Tensor, "folded head part dim"]
    ) -> Float[Tensor, "batch head token dim"]:
        """Return what the queries have, in the order of the text."""
        return x if self._fold is None else self._fold.unfolded(x)

    def whole_map(
        self, x: Float[Tensor, "folded head row column"]
    ) -> Float[Tensor, "batch head query key"]:
        """Return the maps, or scores, of whole texts; zeros where no cell was computed."""
        return x if self._fold is None else self._fold.unfolded_map(x)

    def _folded(self, fold: Fold, batch: int) -> Mask:
        limits, device = self._limits, self._limits.device
        queries, keys = fold.queries_at(device), fold.keys_at(device)
        # All blocks see the same places of their windows, except those outside of the text.
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
    """Return the fold of texts under `mask`; None for those that a map of all cells serves."""
    after = 0 if mask.causal else window.after
    size = fold_size(window.block, window.before + after)
    if mask.keys <= size + window.before + after:
        return None
    return Fold(length=mask.keys, size=size, before=window.before, after=after)


def _of_each(x: Tensor, rows: int) -> Tensor:
    """Return a folded map for each of `rows`, from one for each or one for every text."""
    return x if len(x) == rows else x.repeat(rows // len(x), 1, 1, 1)


@final
class WindowMasks:
    """The masks of the layers in one pass through a stack: one for each window, made once.

    Args:
        mask: The keys that queries may see if there are no windows.
        batch: The number of texts.
        places: The positions of queries and keys; None if each text is whole. Only then can its
            blocks be folded into the batch.
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
