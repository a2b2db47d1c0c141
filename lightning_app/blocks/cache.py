"""Keys and values that one self-attention keeps between the steps of cached decoding."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor


@final
class LayerCache:
    """Keys and values of one layer, ``(batch, head, slot, dim)``, empty at first.

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
        values: Float[Tensor, "batch head token dim"],
    ) -> tuple[Float[Tensor, "batch head slot feature"], Float[Tensor, "batch head slot dim"]]:
        """Write the newest keys and values; return those of all tokens.

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
        """Return a cache of `room` slots, of which the first hold `slots` of this one."""
        assert self.keys is not None
        assert self.values is not None
        kept = slots.shape[1]

        def move(part: Tensor) -> Tensor:
            batch, heads, _, dim = part.shape
            roomy = part.new_empty(batch, heads, room, dim)
            index = slots[:, None, :, None].expand(-1, heads, -1, dim)
            roomy[:, :, :kept] = part.gather(2, index)
            return roomy

        return LayerCache(move(self.keys), move(self.values), kept)
