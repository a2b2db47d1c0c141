"""Causal language modelling: every token of a text is predicted from the tokens before it."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.residual import Stream
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import PAD, SPECIALS, UNK
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
from lightning_app.tasks.causal_rows import (
    CausalBatch,
    CausalRows,
    CausalStreams,
    StreamMemory,
    StreamState,
)


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
    def _rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> CausalRows | CausalStreams:
        """Return a split of windows, for an evaluation if `seed` is None."""
        whole = part["seed"] is None
        if data.order == "streams":
            streams = max(1, data.tokens_per_batch // data.window)
            return CausalStreams(
                corpus,
                split,
                data.window,
                data.evaluation_streams if whole else streams,
                whole=whole,
                rank=part["rank"],
                world_size=part["world_size"],
            )
        stride = data.evaluation_stride if whole else None
        masked = data.intra_document_masking
        return CausalRows(corpus, split, data.window, stride, **part, masked=masked)

    @classmethod
    def describe(cls, rows: Mapping[str, CausalRows | CausalStreams]) -> str:
        """Describe how the text is cut into windows and what its scores are divided by."""
        train = rows["train"]
        evaluated = {split: of for split, of in rows.items() if split != "train"}
        said = f"; read in {train.reading()}, {train.remainder} tokens left out"
        for split, of in evaluated.items():
            said += (
                f"; {split}: each of {len(of.ids):,} tokens is predicted once, in {of.reading()}; "
                f"{of.counts['bytes']:,} bytes and {of.counts['words']:,} words, the end of a line "
                "counted as one of each"
            )
            if unknown := _unknown(of.ids):
                said += f"; {unknown:,} tokens are unknown, so bits per byte are undefined"
        return said

    def logits(self, model: CausalLanguageModel, batch: CausalBatch) -> Tensor:
        """Return the logits of every predicted token, (batch, predicted, vocabulary)."""
        return model(batch.tokens, batch.documents)[:, -batch.labels.shape[1] :]

    def sums(self, model: CausalLanguageModel, batch: CausalBatch) -> LossSums:
        """Return the sums over the predicted tokens of `batch`."""
        labels, seen = batch.labels, watched(model.auxiliary)
        states = self._states(model, batch, seen)[:, -labels.shape[1] :]
        sums = partial(output_sums, label_smoothing=self.config.smoothing)
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
        if found.tokens != len(ids) or _unknown(ids):
            return {}
        counts = corpus.meta["text"][split]
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
        """Return logits and labels of all predicted tokens."""
        counted = batch.labels != PAD
        return Predictions(self.logits(model, batch)[counted], batch.labels[counted])

    def alone(self, batch: CausalBatch, token: int) -> CausalBatch:
        """Return the window of the predicted `token`, cut after the position that predicts it."""
        row, place = (batch.labels != PAD).nonzero()[token].tolist()
        before = batch.tokens.shape[1] - batch.labels.shape[1]
        return _cut(batch, row, before + place + 1)

    def real_tokens(self, batch: CausalBatch) -> dict[str, Bool[Tensor, "row token"]]:
        """Return the tokens that predict another."""
        real = torch.zeros_like(batch.tokens, dtype=torch.bool)
        real[:, -batch.labels.shape[1] :] = batch.labels != PAD
        return {"decoder": real}

    def longest(self, batch: CausalBatch) -> CausalBatch:
        """Return the window with the most tokens, without padding."""
        row = int((batch.tokens != PAD).sum(dim=1).argmax())
        return _cut(batch, row, int((batch.tokens[row] != PAD).sum()))

    def texts(self, batch: CausalBatch) -> tuple[Int[Tensor, "row token"], ...]:
        """Return the window."""
        return (batch.tokens,)

    def random_batch(self, rows: int, length: int, vocabulary: int) -> CausalBatch:
        """Return windows of random tokens, all of which are predicted."""
        tokens = torch.randint(SPECIALS, vocabulary, (rows, length + 1))
        return CausalBatch(
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            index=torch.arange(rows),
            predicted_tokens=torch.tensor(rows * length),
        )


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
    """Return the number of tokens that replace text outside the vocabulary."""
    return int(np.count_nonzero(ids == UNK))


def _exp(x: float) -> float:
    """Return e^x; infinity if too large for a float."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
