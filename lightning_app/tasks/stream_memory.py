"""The memory of the streams of text that one process reads, from batch to batch."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from lightning_app.blocks.memory import SegmentMemory
from lightning_app.errors import UserError

StreamState = tuple[int, Tensor]
"""The tokens of a stream that were read, and its memory, (layer, memory, model)."""


@final
class StreamMemory:
    """The memory before the next segment of each stream; outside of the model's buffers.

    DDP would overwrite buffers by those of rank 0 at every step.
    """

    def __init__(self) -> None:
        self._read = 0
        self._numbers: list[int] = []
        self._memory: SegmentMemory | None = None
        self._loaded: Mapping[int, StreamState] = {}

    def before(
        self, read: int, numbers: list[int], streams: int, device: torch.device
    ) -> SegmentMemory | None:
        """Return the memory before a segment of the streams `numbers`; None before the first.

        Args:
            read: The tokens of each stream before the segment.
            numbers: The streams of this process.
            streams: The number of streams of all processes.
            device: That of the segment.

        Raises:
            RuntimeError: the memory is of other streams, or of another place in them.
            UserError: so is the memory of a checkpoint.
        """
        if read == 0:
            return None
        if self._loaded:
            self._take(read, numbers, streams, device)
        if (self._read, self._numbers) != (read, numbers) or self._memory is None:
            raise RuntimeError(
                f"a segment after {read} tokens of the streams {numbers}, but {self._read} tokens "
                f"of the streams {self._numbers} were read: their memory would be of other text"
            )
        return self._memory

    def keep(self, read: int, numbers: list[int], memory: SegmentMemory) -> None:
        """Keep the memory after a segment, which ends after `read` tokens of each stream."""
        self._read, self._numbers, self._memory = read, numbers, memory
        self._loaded = {}

    def state(self) -> dict[int, StreamState]:
        """Return the state of every stream by its number, on the CPU."""
        if self._memory is None:
            return dict(self._loaded)
        layers = torch.stack(self._memory.layers, dim=1).cpu()
        return {
            number: (self._read, rows.clone())
            for number, rows in zip(self._numbers, layers, strict=True)
        }

    def load(self, streams: Mapping[int, StreamState]) -> None:
        """Go on from the state of all streams; the next batch names those of this process."""
        self._memory, self._loaded = None, streams

    def _take(self, read: int, numbers: list[int], streams: int, device: torch.device) -> None:
        places = {place for place, _ in self._loaded.values()}
        if sorted(self._loaded) != list(range(streams)) or places != {read}:
            there = " and ".join(map(str, sorted(places)))
            raise UserError(
                f"data.window and data.tokens_per_batch: the run goes on after {read} tokens of "
                f"{streams} streams, but its checkpoint has the memory after {there} tokens of "
                f"{len(self._loaded)} streams; use the values of the checkpoint's run"
            )
        # (stream, layer, memory, model) -> one tensor a layer
        found = [self._loaded[number][1] for number in numbers]
        layers = torch.stack(found, dim=1).to(device).unbind()
        self._read, self._numbers = read, numbers
        self._memory, self._loaded = SegmentMemory(layers), {}
