"""The inputs of earlier segments, and the keys and values of earlier tokens, that a layer reads."""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_app.blocks.masks import Mask, causal_mask
from lightning_app.blocks.placed import Places
from lightning_app.blocks.windows import Window


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """The memory of each layer (Dai et al. 2019, Transformer-XL, 1901.02860, section 3.2).

    With h the input of a layer and m its last M inputs before the segment, without gradient:

    ``Q = N(h) W_q``, ``K = N([m ; h]) W_k``, ``V = N([m ; h]) W_v``, ``m' = last M of [m ; h]``

    N is the norm before the sub-layer, if any. A token sees the whole memory and the
    tokens of its segment up to itself. The memory is empty at the start of a text. Read in this
    way, a text has the states that it has in one pass with
    ``localised_span: {query_block: T, memory: M}``, where T is the length of a segment; the
    gradients differ.
    """

    length: int = 0
    """M in training, in tokens; 0 for no memory."""
    evaluation_length: int | None = None
    """M in evaluation, and the number of earlier tokens that a generated token sees; 0 shows it
    all of them; null for the value of length."""
    same_length: bool = False
    """Each token sees the same number of keys, the last M including itself."""

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"memory length {self.length}: must be at least 0")
        if self.evaluation_length is not None and self.evaluation_length < 0:
            raise ValueError(
                f"memory evaluation_length {self.evaluation_length}: must be at least 0"
            )
        if self.same_length and min(self.lengths) == 0:
            raise ValueError(
                "memory same_length true with a length of 0: no token would see a key; take false"
            )

    @property
    def lengths(self) -> tuple[int, int]:
        """M in training and in evaluation."""
        evaluation = self.length if self.evaluation_length is None else self.evaluation_length
        return self.length, evaluation

    def tokens(self, *, training: bool) -> int:
        """Return M."""
        return self.lengths[0 if training else 1]

    def window(self, *, training: bool) -> Window | None:
        """Return the keys that a segment of one token sees; None for all earlier ones if M is 0."""
        tokens = self.tokens(training=training)
        return Window(before=tokens - int(self.same_length)) if tokens else None

    def check(self, longest: int) -> None:
        """Refuse a memory that is shorter than the spans of the heads, `longest` at most.

        Raises:
            ValueError: naming the fields and what would be right.
        """
        least = longest + int(self.same_length)
        short = [tokens for tokens in self.lengths if 0 < tokens < least]
        if short:
            raise ValueError(
                f"memory of {short[0]} tokens with adaptive_span longest {longest}, same_length "
                f"{str(self.same_length).lower()}: tokens of a segment would see less far back "
                f"than their spans reach; use a memory of at least {least}"
            )


@final
class SegmentMemory(NamedTuple):
    """The last inputs of each layer, oldest first; the same number of tokens in every layer."""

    layers: tuple[Float[Tensor, "batch memory model"], ...]

    @property
    def tokens(self) -> int:
        return self.layers[0].shape[1]

    def after(self, inputs: list[Float[Tensor, "batch token model"]], most: int) -> "SegmentMemory":
        """Return the memory after a segment with the `inputs` of its layers, without gradient."""
        joined = [torch.cat(pair, dim=1) for pair in zip(self.layers, inputs, strict=True)]
        return SegmentMemory(tuple(x[:, max(0, x.shape[1] - most) :].detach() for x in joined))


@final
class Recurrence(NamedTuple):
    """One pass over a segment: the memory before it, and the inputs of its layers so far."""

    memory: SegmentMemory
    inputs: list[Tensor]


def empty_memory(layers: int, x: Float[Tensor, "batch token model"]) -> SegmentMemory:
    """Return the memory at the start of texts whose embedding is `x`."""
    return SegmentMemory((x.detach()[:, :0],) * layers)


def segment_mask(
    tokens: int, memory: int, limit: int | None, device: torch.device
) -> tuple[Mask, Places | None]:
    """Return the keys that each token of a segment sees, and the positions of tokens and keys.

    Positions count from the first token of the memory.

    Args:
        tokens: The tokens of the segment.
        memory: The tokens of the memory, which are the first keys.
        limit: The number of keys that a token sees, including itself; None for all.
        device: The device of the segment.
    """
    if not memory and (limit is None or tokens <= limit):
        return causal_mask(tokens, device), None
    keys = torch.arange(memory + tokens, device=device)
    newest = keys[memory:]
    distance = newest[:, None] - keys
    seen = distance >= 0
    if limit is not None:
        seen = seen & (distance < limit)
    return Mask(len(keys), device, seen=seen[None, None]), Places(newest, keys[None], memory)


@final
class LayerCache:
    """Keys and values of one layer, ``(batch, head, slot, dim)``, empty at first.

    Values may have other heads than keys.

    The first `filled` slots are written; the others are free. `append` writes in place.
    """

    def __init__(
        self, keys: Tensor | None = None, values: Tensor | None = None, filled: int = 0
    ) -> None:
        self.keys = keys
        self.values = values
        self.filled = filled

    @property
    def room(self) -> int:
        """Slots, written or not."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(
        self,
        keys: Float[Tensor, "batch head token feature"],
        values: Float[Tensor, "batch pair token dim"],
    ) -> tuple[Float[Tensor, "batch head slot feature"], Float[Tensor, "batch pair slot dim"]]:
        """Append the newest keys and values; return those of all tokens.

        The first call creates the slots; later calls need free slots (see `moved`).
        """
        end = self.filled + keys.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values = keys, values
        else:
            self.keys[:, :, self.filled : end] = keys
            self.values[:, :, self.filled : end] = values
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select(self, rows: Int[Tensor, " kept"]) -> "LayerCache":
        """Return the cache of `rows` of the batch, which may repeat."""
        if self.keys is None or self.values is None:
            return LayerCache()
        keys, values = (part.index_select(0, rows) for part in (self.keys, self.values))
        return LayerCache(keys, values, self.filled)

    def moved(self, slots: Int[Tensor, "batch kept"], room: int) -> "LayerCache":
        """Return a cache of `room` slots, the first of which hold `slots` of this one."""
        assert self.keys is not None
        assert self.values is not None
        keys, values = (_moved(part, slots, room) for part in (self.keys, self.values))
        return LayerCache(keys, values, slots.shape[1])


def _moved(part: Tensor, slots: Int[Tensor, "batch kept"], room: int) -> Tensor:
    batch, heads, _, dim = part.shape
    roomy = part.new_empty(batch, heads, room, dim)
    index = slots[:, None, :, None].expand(-1, heads, -1, dim)
    roomy[:, :, : slots.shape[1]] = part.gather(2, index)
    return roomy
