"""Causal language modelling: every token of a text is predicted from the tokens before it."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Unpack, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.memory import SegmentMemory
from lightning_app.blocks.streams import Stream
from lightning_app.core.errors import UserError
from lightning_app.data.batching import EpochSampler, Item, Shuffle, reshuffled
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, equal_batches, share
from lightning_app.data.tokenizer import EOS, PAD, UNK
from lightning_app.models.auxiliary_heads import watched
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.loss import (
    Evaluated,
    LossSums,
    ObjectiveConfig,
    output_sums,
    sums_of_all_heads,
)
from lightning_app.tasks.base import Predictions, Reading, Task, task


class CausalBatch(NamedTuple):
    """One rank's share of a global batch of windows.

    Attributes:
        tokens: (batch, window) int64, the model's input.
        labels: (batch, predicted) int64, the tokens after the last `predicted` ones of `tokens`;
            PAD where nothing is predicted.
        index: (batch,) int64, number of the window; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts over all ranks.
        streams: () int64, the number of streams of the global batch, whose window ``t streams + b``
            is segment t of stream b; 0 if each window is a separate text.
        documents: (batch, window) int64, the number of the document of the token after each of
            `tokens`, which belongs to that document too; None if documents are joined.
    """

    tokens: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor
    streams: Tensor = torch.tensor(0)
    documents: Tensor | None = None


_LARGE = 1 << 26
"""The bytes of ids from which each batch maps their file again: a mapping keeps what was read."""


def blank_batch(predicted: int, documents: Tensor | None = None) -> CausalBatch:
    """Return the share of a rank without windows, for a batch that predicts `predicted` tokens."""
    return CausalBatch(
        tokens=torch.full((1, 1), EOS),
        labels=torch.full((1, 1), PAD),
        index=torch.full((1,), -1),
        predicted_tokens=torch.tensor(predicted),
        documents=documents,
    )


def _tokens_at(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the tokens at `places`, int64; arbitrary tokens outside the text."""
    return ids.take(places, mode="clip").astype(np.int64)


@final
class CausalRows:
    """A split of windows: (epoch, windows of a global batch) -> this rank's `CausalBatch`.

    The text is one row of tokens, in which each line ends in EOS; the first is predicted from an
    EOS before it. Window w begins `stride` tokens after window w - 1 and predicts the tokens that
    no earlier window predicts: all of its own without overlap, otherwise its last `stride`,
    each from at least ``window - stride`` earlier tokens. Thus each token of a split is
    predicted once, except those after the last whole window of training.

    At `anywhere` each epoch draws as many windows at random places of the text, as nanoGPT does:
    some tokens are then predicted several times in an epoch, and others not.

    With `masked` documents the EOS at the end of one document is the mark before the next: the
    first token of a document is predicted only from that EOS, like the first of the text.

    Args:
        corpus: A prepared corpus of running text.
        split: train, valid or test.
        window: Tokens in a window.
        stride: Tokens between the starts of two windows; None for `window`.
        seed: The seed of the order of windows; None for the order of the text, to its last token.
        rank: The rank of this process.
        world_size: Number of processes.
        masked: Whether batches give the document of each token (intra-document masking).
        anywhere: Whether the windows of training begin at random places.

    Attributes:
        ids: Every token of the split, int32.
        documents: The index of the first token of each document, int64, if `masked`.
        counts: The result of `RunningText.counts` for the split.
        remainder: The number of tokens that no window predicts.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        window: int,
        stride: int | None = None,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        masked: bool = False,
        anywhere: bool = False,
    ) -> None:
        self.ids, self._open = corpus.ids(split, "text"), partial(corpus.ids, split, "text")
        self._anywhere = anywhere and seed is not None
        self._last_drawn = -1, np.zeros(0, np.int64)  # epoch, first token of each window
        self.documents = corpus.documents(split) if masked else None
        self.counts: Mapping[str, int] = corpus.meta["text"][split]
        self.window = window
        self.stride = stride or window
        self._seed, self._rank, self._world_size = seed, rank, world_size
        if seed is not None and self.documents is not None and len(self.documents) == 1:
            raise UserError(
                f"data.intra_document_masking is true, but the {split} split is one document; "
                "it must be false, or, for data.name 'text', another data.document_separator"
            )
        beyond = len(self.ids) - window
        if seed is None:
            self._count, self.remainder = 1 + max(0, -(-beyond // self.stride)), 0
        elif beyond < 0:
            raise UserError(
                f"data.window is {window}, but the {split} split has {len(self.ids)} tokens in all"
            )
        else:
            self._count, self.remainder = divmod(len(self.ids), window)
            self.remainder *= not anywhere

    def __len__(self) -> int:
        return self._count

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, all with the same number of windows except the last.

        With overlap the first window, which predicts more than the others, forms a separate batch.
        """
        alone = int(self.stride < self.window)
        count, per_batch = len(self) - alone, max(1, tokens_per_batch // self.window)
        first = [np.zeros(1, dtype=np.int64)] * alone

        def batches(shuffle: Shuffle) -> list[np.ndarray]:
            return first + [alone + rows for rows in equal_batches(count, per_batch, shuffle)]

        return reshuffled(self._seed, batches)

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        if rows is None:
            return self.ids[: len(self.ids) - self.remainder]
        return np.concatenate([self.ids[slice(*self._predicted(row))] for row in rows])

    def reading(self) -> str:
        """Describe how the split is read."""
        begin = "at random places" if self._anywhere else f"every {self.stride} tokens"
        said = f"windows of {self.window} tokens that begin {begin}"
        if self.documents is None:
            return said
        return f"{said}, each of {len(self.documents):,} documents alone"

    def __getitem__(self, item: Item) -> CausalBatch:
        epoch, rows = item
        if self.ids.nbytes > _LARGE:
            self.ids = self._open()
        predicted = sum(end - begin for begin, end in map(self._predicted, rows))
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            return blank_batch(predicted, self._documents(np.zeros((1, 1), np.int64)))
        begins = self._drawn(epoch)[mine] if self._anywhere else mine * self.stride
        places = begins[:, None] + np.arange(self.window)
        width = self.window if 0 in rows else self.stride
        seen_before = (np.arange(self.window) < self.window - self.stride) & (mine[:, None] > 0)
        after = places >= len(self.ids)
        labels = np.where(after | seen_before, PAD, _tokens_at(self.ids, places))
        tokens = np.where(after, PAD, np.where(places == 0, EOS, _tokens_at(self.ids, places - 1)))
        return CausalBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels[:, self.window - width :]),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=torch.tensor(predicted),
            documents=self._documents(places),
        )

    def _drawn(self, epoch: int) -> np.ndarray:
        drawn = self._last_drawn  # another loader may replace it
        if drawn[0] != epoch:
            random = np.random.default_rng((self._seed or 0, epoch, 1))
            begins = random.integers(len(self.ids) - self.window + 1, size=len(self))
            self._last_drawn = drawn = epoch, begins
        return drawn[1]

    def _documents(self, places: np.ndarray) -> Tensor | None:
        """Return the number of the document of the tokens at `places`, from 0."""
        if self.documents is None:
            return None
        return torch.from_numpy(np.searchsorted(self.documents, places, side="right") - 1)

    def _predicted(self, row: int) -> tuple[int, int]:
        """Return the index of the first token that a window predicts, and of the last, plus 1."""
        end = row * self.stride + self.window
        return (end - self.stride if row else 0), min(end, len(self.ids))


@final
class CausalStreams:
    """A split of B streams: (epoch, windows of a global batch) -> this rank's `CausalBatch`.

    The text is cut into B contiguous streams of equal length, and these into segments of one window
    each (Dai et al. 2019, 1901.02860). Window ``t B + b`` is segment t of stream b; a batch has one
    segment of every stream, in the same order at every step and in every epoch. The first token of
    a stream is predicted from the token before it in the text, the first of the text from an EOS.

    Args:
        corpus: A prepared corpus of running text.
        split: train, valid or test.
        window: Tokens in a segment.
        streams: B.
        whole: Whether to read the text to its last token, as in evaluation; otherwise each stream
            ends with its last whole segment.
        rank: The rank of this process.
        world_size: Number of processes.

    Attributes:
        ids: Every token of the split, int32.
        counts: The result of `RunningText.counts` for the split.
        remainder: The number of tokens that no segment predicts.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        window: int,
        streams: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        whole: bool,
    ) -> None:
        self.ids = corpus.ids(split, "text")
        self.counts: Mapping[str, int] = corpus.meta["text"][split]
        self.window = window
        self.streams = streams
        self._rank, self._world_size = rank, world_size
        tokens = len(self.ids)
        length = -(-tokens // streams) if whole else tokens // streams
        self.segments = -(-length // window) if whole else length // window
        self._starts = np.arange(streams) * length
        ends = self._starts + (length if whole else self.segments * window)
        self._ends = np.minimum(ends, tokens)
        self.remainder = tokens - int(np.maximum(0, self._ends - self._starts).sum())
        if not self.segments:
            raise UserError(
                f"data.window is {window} and data.tokens_per_batch has {streams} of them, but the "
                f"{split} split has {tokens} tokens in all"
            )
        if not whole and streams < world_size:
            raise UserError(
                f"data.tokens_per_batch has {streams} windows of {window} tokens, but there are "
                f"{world_size} processes: each needs a stream of its own"
            )

    def __len__(self) -> int:
        return self.segments * self.streams

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch: each with one segment of every stream."""
        return EpochSampler(lambda _: equal_batches(len(self), self.streams), in_order=True)

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        places, real = self._places(np.arange(len(self)) if rows is None else rows)
        return self.ids[places[real]]

    def reading(self) -> str:
        """Describe how the split is read."""
        streams = "1 stream" if self.streams == 1 else f"{self.streams:,} streams side by side"
        return f"{streams} of {self.segments:,} segments of {self.window} tokens, one after another"

    def __getitem__(self, item: Item) -> CausalBatch:
        _, rows = item
        predicted = int(self._places(rows)[1].sum())
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            return blank_batch(predicted)
        places, real = self._places(mine)
        labels = np.where(real, _tokens_at(self.ids, places), PAD)
        tokens = np.where(real, np.where(places == 0, EOS, _tokens_at(self.ids, places - 1)), PAD)
        return CausalBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=torch.tensor(predicted),
            streams=torch.tensor(self.streams),
        )

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segment, stream = rows[:, None] // self.streams, rows[:, None] % self.streams
        places = self._starts[stream] + segment * self.window + np.arange(self.window)
        return places, places < self._ends[stream]


StreamState = tuple[int, Tensor]
"""The number of tokens read from a stream, and its memory, (layer, memory, model)."""


@final
class StreamMemory:
    """The memory before the next segment of each stream; kept outside the model's buffers.

    DDP would overwrite buffers with those of rank 0 at every step.
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
            read: The number of tokens of each stream before the segment.
            numbers: The streams of this process.
            streams: The number of streams over all processes.
            device: The device of the segment.

        Raises:
            RuntimeError: if the memory belongs to other streams or another position in them.
            UserError: if that is true of a checkpoint's memory.
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
        """Store the memory after a segment that ends after `read` tokens of each stream."""
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
        """Restore the state of all streams; the next batch names those of this process."""
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


@task("causal_lm")
@final
class CausalLanguageModelling(Task):
    """The mean negative log-likelihood of every token, given the earlier tokens in its window.

    With `model.block.memory` also given the memory of earlier segments, which probes ignore:
    they read each window as a separate text.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self._training, self._evaluation = StreamMemory(), StreamMemory()

    @classmethod
    def rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> CausalRows | CausalStreams:
        """Return a split of windows, for an evaluation if `seed` is None."""
        whole = part["seed"] is None
        if data.order == "streams":
            streams = max(1, data.tokens_per_batch // data.window)
            streams = data.evaluation_streams if whole else streams
            ranks = part.get("rank", 0), part.get("world_size", 1)
            return CausalStreams(corpus, split, data.window, streams, *ranks, whole=whole)
        stride = data.evaluation_stride if whole else None
        masked, anywhere = data.intra_document_masking, data.order == "random"
        return CausalRows(
            corpus, split, data.window, stride, **part, masked=masked, anywhere=anywhere
        )

    @classmethod
    def describe(cls, rows: Mapping[str, CausalRows | CausalStreams]) -> str:
        """Describe how the text is cut into windows and what its scores are divided by."""
        train = rows["train"]
        evaluated = {split: of for split, of in rows.items() if split != "train"}
        said = f"; read in {train.reading()}, {train.remainder} tokens left out"
        for split, of in evaluated.items():
            sizes = "of unknown bytes, so bits per byte are undefined"
            if of.counts:
                sizes = f"{of.counts['bytes']:,} bytes and {of.counts['words']:,} words, the end "
                sizes += "of a line counted as one of each"
            said += f"; {split}: each of {len(of.ids):,} tokens is predicted once, in "
            said += f"{of.reading()}; {sizes}"
            if unknown := _unknown(of.ids):
                said += f"; {unknown:,} tokens are unknown, so bits per byte are undefined"
        return said

    def logits(self, model: CausalLanguageModel, batch: CausalBatch) -> Tensor:
        """Return the logits of every predicted token, (batch, predicted, vocabulary)."""
        return model(batch.tokens, batch.documents)[:, -batch.labels.shape[1] :]

    def sums(self, model: CausalLanguageModel, batch: CausalBatch) -> LossSums:
        labels, seen = batch.labels, watched(model.auxiliary)
        states = self._states(model, batch, seen)[:, -labels.shape[1] :]
        smoothing, z_loss = self.config.smoothing, self.config.z_loss
        sums = partial(output_sums, label_smoothing=smoothing, z_loss=z_loss)
        # Windows of training do not overlap, so all layers have equally many states.
        return sums_of_all_heads(
            sums, model, states, labels, labels != PAD, seen, documents=batch.documents
        )

    def _states(
        self, model: CausalLanguageModel, batch: CausalBatch, seen: list[Stream] | None = None
    ) -> Float[Tensor, "window token model"]:
        """Return the states of a batch given its streams' memory, and update that memory."""
        if model.decoder.spec.memory is None:
            return model.states(batch.tokens, seen, batch.documents)
        rows, streams = batch.index.tolist(), int(batch.streams)
        if not streams:  # a blank batch, or one that is not part of a text
            return model.states(batch.tokens, seen)
        memory = self._training if model.training else self._evaluation
        window = batch.tokens.shape[1]
        read, numbers = rows[0] // streams * window, [row % streams for row in rows]
        before = memory.before(read, numbers, streams, batch.tokens.device)
        states, after = model.states_after(before, batch.tokens, seen)
        memory.keep(read + window, numbers, after)
        return states

    def streams(self) -> Mapping[int, StreamState]:
        """Return the memory of each stream of this rank before its next segment."""
        return self._training.state()

    def load_streams(self, streams: Mapping[int, StreamState]) -> None:
        self._training.load(streams)

    def rows_of(self, batch: CausalBatch) -> Int[Tensor, " token"]:
        """Return the window of each predicted token, including padding."""
        return batch.index.repeat_interleave(batch.labels.shape[1])

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return bits per byte and perplexity per word, if the split was read whole.

        ``sum nll / (ln 2 * bytes)`` and ``exp(sum nll / words)``, which compare across tokenizers:
        the sum is over all tokens, and `RunningText.counts` defines bytes and words. A text
        with unknown tokens has neither: predicting that a token is unknown costs less than
        predicting its spelling.
        """
        corpus = datamodule.corpus
        split = "valid" if stage == "val" else stage
        ids = corpus.ids(split, "text")
        counts = corpus.meta["text"][split]
        if found.tokens != len(ids) or _unknown(ids) or not counts:
            return {}
        return {
            f"{stage}/bits_per_byte": found.nll / (math.log(2) * counts["bytes"]),
            f"{stage}/word_perplexity": _exp(found.nll / counts["words"]),
        }

    def predict(
        self, model: CausalLanguageModel, batch: CausalBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return (number, text) of each window: the likeliest token at each predicted position."""
        best = model.embedding.logits(self._states(model, batch))
        best = best[:, -batch.labels.shape[1] :].argmax(dim=-1)
        return [
            (number, datamodule.tokenizer.decode(row[label != PAD].tolist()))
            for number, row, label in zip(batch.index.tolist(), best, batch.labels, strict=True)
            if number >= 0
        ]

    def predictions(self, model: CausalLanguageModel, batch: CausalBatch) -> Predictions:
        counted = batch.labels != PAD
        return Predictions(self.logits(model, batch)[counted], batch.labels[counted])

    def alone(self, batch: CausalBatch, token: int) -> CausalBatch:
        """Return the window of the predicted `token`, cut after the position that predicts it."""
        row, place = (batch.labels != PAD).nonzero()[token].tolist()
        before = batch.tokens.shape[1] - batch.labels.shape[1]
        return _cut(batch, row, before + place + 1)

    def real_tokens(self, batch: CausalBatch) -> dict[str, Bool[Tensor, "row token"]]:
        real = torch.zeros_like(batch.tokens, dtype=torch.bool)
        real[:, -batch.labels.shape[1] :] = batch.labels != PAD
        return {"decoder": real}

    def longest(self, batch: CausalBatch) -> CausalBatch:
        row = int((batch.tokens != PAD).sum(dim=1).argmax())
        return _cut(batch, row, int((batch.tokens[row] != PAD).sum()))


def _cut(batch: CausalBatch, row: int, length: int) -> CausalBatch:
    """Return the first `length` tokens of one row, as a batch."""
    rows = slice(row, row + 1)
    before = batch.tokens.shape[1] - batch.labels.shape[1]
    documents = batch.documents
    return batch._replace(
        tokens=batch.tokens[rows, :length],
        labels=batch.labels[rows, : length - before],
        index=batch.index[rows],
        documents=None if documents is None else documents[rows, :length],
    )


def _unknown(ids: np.ndarray) -> int:
    return int(np.count_nonzero(ids == UNK))


def _exp(x: float) -> float:
    """Return e^x; infinity if too large for a float."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
