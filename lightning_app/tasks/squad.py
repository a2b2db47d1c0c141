"""Fine-tuning on SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 1606.05250; 2018, 1806.03822)."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Unpack, final

import numpy as np
import torch
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.core.errors import UserError
from lightning_app.data.batching import EpochSampler
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import PAD, unigram_entropy
from lightning_app.models.encoder_heads import SpanPredictor
from lightning_app.models.heads import ArchitectureConfig, embedding_of
from lightning_app.models.loss import Evaluated, LossSums, counted_sums
from lightning_app.scores.offsets import PieceOffsets
from lightning_app.scores.squad import (
    NULL,
    SPECIAL_TOKENS,
    ContextWindow,
    Golds,
    apply_null_threshold,
    best_span,
    best_threshold,
    context_windows,
    score_v1,
    score_v2,
    window_label,
)
from lightning_app.tasks.base import Predictions, Reading, join_ranks, task
from lightning_app.tasks.labelled import (
    LabelledBatch,
    LabelledSplit,
    LabelledTask,
    MarkedRows,
    Texts,
    one_row,
    stored_texts,
)

CONTEXTS = 4
"""The number of contexts whose tokens are cached: questions about a context are consecutive."""


class Answer(NamedTuple):
    """The best non-empty answer, or "" if there is no such answer, and null score - its score."""

    text: str
    difference: float


@final
class QuestionTexts:
    """The questions of a split by number: their ids, contexts and golds.

    Args:
        corpus: A prepared corpus of questions.
        split: valid or test.

    Attributes:
        ids: The id of each question.
        golds: The texts of its gold answers; empty if it has no answer.
    """

    def __init__(self, corpus: PreparedCorpus, split: str) -> None:
        self.ids: list[str] = [json.loads(line) for line in corpus.lines(split, "id")]
        self.golds: list[list[str]] = [json.loads(line) for line in corpus.lines(split, "answers")]
        self._contexts: list[str] = [json.loads(line) for line in corpus.lines(split, "context")]
        self._offsets = lru_cache(CONTEXTS)(corpus.tokenizer.offsets)

    def offsets(self, holder: int) -> PieceOffsets:
        """Return the tokens of the context stored with question `holder`."""
        return self._offsets(self._contexts[holder])

    def answer(
        self, holder: int, windows: Sequence[ContextWindow], logits: Sequence[np.ndarray]
    ) -> Answer:
        """Return the best answer in the context stored with question `holder`.

        Args:
            holder: The question with which the context is stored.
            windows: All windows of the question.
            logits: (2, token) per window: for starts and ends.

        Raises:
            UserError: if a logit is not finite.
        """
        context = self.offsets(holder)
        starts, ends = [of[0] for of in logits], [of[1] for of in logits]
        best = best_span(windows, starts, ends, context.visible())
        text = "" if best.span is None else context.text_of(*best.span)
        return Answer(text, best.difference)


MAX_QUESTION = 64
"""The maximum tokens of a question, as in google-research/bert, `run_squad.py`; the rest is cut."""


@final
class QuestionRows(LabelledSplit):
    """Windows of contexts with the positions of an answer. A row is a window.

    A row is ``BOS question EOS window EOS``. Its label holds the positions of the first and the
    last token of the first gold answer; (0, 0), which is BOS, if the window does not contain all of
    it or the question has no answer.

    An epoch contains every window once, in batches of similar length. In an evaluation all windows
    of a question are in one global batch, so an evaluation of only some batches has whole
    questions.

    Args:
        corpus: A prepared corpus of questions.
        split: train, valid or test.
        window: The maximum tokens of a row, with marks.
        stride: Tokens between the starts of two windows.
        seed: The seed of the order of batches; None for an evaluation, ordered by length.
        rank: The rank of this process.
        world_size: Number of processes.

    Attributes:
        windows: The windows of each question.
        first_rows: The row of the first window of each question, and the number of all rows.
        labels: (row, 2) int64.
        holders: For each question, the question with which its context is stored.
        cut: The number of questions that lost tokens.

    Raises:
        UserError: if `window` has no room for a context token next to the longest question.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        *,
        window: int,
        stride: int,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_window(corpus, split, window)
        asked, contexts = (stored_texts(corpus, split, name) for name in ("question", "context"))
        self.cut = int(np.sum(asked.lengths > MAX_QUESTION))
        asked = asked._replace(lengths=np.minimum(asked.lengths, MAX_QUESTION))
        self.holders = holders(contexts.lengths)
        sizes = zip(asked.lengths.tolist(), contexts.lengths[self.holders].tolist(), strict=True)
        self.windows = [
            context_windows(
                question, context, max_question=MAX_QUESTION, max_length=window, stride=stride
            )
            for question, context in sizes
        ]
        counts = np.array([len(of) for of in self.windows])
        self.first_rows = np.concatenate([[0], np.cumsum(counts)])
        question = np.repeat(np.arange(len(counts)), counts)
        places = np.array([(w.start, w.length) for of in self.windows for w in of])
        spans = np.asarray(corpus.labels(split)).astype(np.int64)
        labels = np.array(
            [
                window_label(w, None if first < 0 else (first, last))
                for of, (first, last) in zip(self.windows, spans.tolist(), strict=True)
                for w in of
            ],
            dtype=np.int64,
        )
        starts = contexts.starts[self.holders][question] + places[:, 0]
        texts = MarkedRows(
            Texts(asked.ids, asked.starts[question], asked.lengths[question]),
            Texts(contexts.ids, starts, places[:, 1]),
        )
        super().__init__(texts, labels, seed, rank, world_size)
        self.window, self.stride = window, stride

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, each of at most that many tokens with padding.

        In an evaluation the windows of a single question may have more.
        """
        if self._seed is not None:
            return super().sampler(tokens_per_batch)
        batches = whole_questions(self.lengths, self.first_rows, tokens_per_batch)
        return EpochSampler(lambda _: batches)

    def without_answer(self) -> int:
        """Return the number of rows labelled with no answer."""
        return int(np.sum((self.labels == NULL).all(axis=1)))


def check_window(corpus: PreparedCorpus, split: str, window: int) -> None:
    """Refuse a window without room for a context token next to the longest question.

    Raises:
        UserError: naming the split and the required window.
    """
    longest = min(MAX_QUESTION, int(corpus.lengths(split, "question").max()) - 1)
    if window <= longest + SPECIAL_TOKENS:
        raise UserError(
            f"data.window is {window}: a question of {split} has {longest} tokens, which with "
            f"{SPECIAL_TOKENS} marks and a token of its context need at least "
            f"{longest + SPECIAL_TOKENS + 1}"
        )


def holders(lengths: np.ndarray) -> np.ndarray:
    """Return for each question the one that stores its context: the last one with a text."""
    return np.maximum.accumulate(np.where(lengths > 0, np.arange(len(lengths)), 0))


def whole_questions(
    lengths: np.ndarray, first_rows: np.ndarray, tokens_per_batch: int
) -> list[np.ndarray]:
    """Return global batches that contain all rows of each of their questions.

    Questions are ordered by their longest row. rows * longest <= tokens_per_batch, except for
    a question that has more.

    Args:
        lengths: The tokens of each row.
        first_rows: The first row of each question, and the number of all rows.
        tokens_per_batch: The budget, with padding.
    """
    longest = np.maximum.reduceat(lengths, first_rows[:-1])
    batches: list[np.ndarray] = []
    taken: list[np.ndarray] = []
    count = 0
    for question in np.argsort(longest, kind="stable"):
        rows = np.arange(*first_rows[question : question + 2].tolist())
        if taken and (count + len(rows)) * longest[question] > tokens_per_batch:
            batches.append(np.concatenate(taken))
            taken, count = [], 0
        taken.append(rows)
        count += len(rows)
    return [*batches, np.concatenate(taken)]


SPLITS = {"val": "valid", "test": "test"}
NOTHING = Answer("", math.inf)
WITH_NULL = "squad2"
"""The corpus in which "" may be the answer."""


@task("squad")
@final
class SQuAD(LabelledTask):
    """The first and the last token of each answer; `data.name` is the version, squad1 or squad2.

    A row is a window of a context. Its loss is ``(CE_start + CE_end) / 2`` in nats, each the
    cross-entropy of a softmax over the tokens of the row without padding; `nll` is the same, so
    that `val/nll` is a mean over windows and `val/accuracy` the share of windows whose two most
    likely places are both right. If a question has several gold answers, these use the first.

    `val/exact_match` and `val/f1` are the published scores, in percent and a mean over questions:
    each answer is the best over all windows of its question, whichever ranks hold them. In version
    2.0 the answer is empty if the null score exceeds that of the best span (threshold 0);
    `best_exact_match` and `best_f1` use the best threshold on the same questions,
    which is optimistic.

    A row counts as one predicted token in sums, rates and `tokens` of a result. `scored` has the
    logits of each row, (2, token).
    """

    def build_model(
        self, architecture: ArchitectureConfig, block: BlockConfig, vocab_size: int
    ) -> nn.Module:
        stacks = architecture.stacks(block)
        embedding = embedding_of(architecture, stacks, vocab_size, self.pad)
        return SpanPredictor(stacks["encoder"], architecture.sizes(), embedding)

    @classmethod
    def rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> QuestionRows:
        return QuestionRows(corpus, split, window=data.window, stride=data.context_stride, **part)

    @classmethod
    def check(cls, corpus: PreparedCorpus, data: DataConfig) -> None:
        """Refuse a window that is too small for a question."""
        for split in corpus.meta["sizes"]:
            check_window(corpus, split, data.window)

    @classmethod
    def describe(cls, rows: Mapping[str, Any]) -> str:
        """Describe how many windows there are and how many questions are cut."""
        counts, null, cut = (
            " / ".join(f"{count:,}" for count in of)
            for of in zip(
                *((len(x), x.without_answer(), x.cut) for x in rows.values()), strict=True
            )
        )
        first = next(iter(rows.values()))
        return (
            f"; {counts} windows of at most {first.window} tokens with their question, whose "
            f"starts are {first.stride} tokens apart, {null} of them without the whole answer; "
            f"{cut} questions cut to {MAX_QUESTION} tokens"
        )

    @classmethod
    def floor(cls, rows: Any, evaluated: np.ndarray | None = None) -> float:
        """Return the loss of the best constant output: (H(starts) + H(ends)) / 2.

        H is the entropy of the positions of starts or ends in their rows, including (0, 0). A
        model that answers only by position, such as always "no answer", does no better.
        """
        labels = rows.targets(evaluated)
        return (unigram_entropy(labels[:, 0]) + unigram_entropy(labels[:, 1])) / 2

    def logits(self, model: SpanPredictor, batch: LabelledBatch) -> Tensor:
        """Return the logits of starts and ends, ``(row, 2, token)``, -inf for padding."""
        return model(batch.tokens, batch.segments)

    def sums(self, model: SpanPredictor, batch: LabelledBatch) -> LossSums:
        logits, real = self.logits(model, batch), batch.index >= 0
        if not torch.is_grad_enabled():
            self.last = logits_by_row(logits, batch)
        # (CE_start + CE_end) / 2 of each row; rows with both are right.
        labels, logits = batch.labels, logits.to(torch.promote_types(logits.dtype, torch.float32))
        nll = -logits.log_softmax(dim=2).gather(2, labels[:, :, None]).squeeze(2).mean(dim=1)
        return counted_sums(nll, nll, real, lambda: (logits.argmax(dim=2) == labels).all(dim=1))

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return the published scores over all ranks, each question counted once.

        For version 2.0 also those of questions with and without an answer, those of the best
        threshold, and `always_no_answer`, the score of a model that never answers. The scores of a
        model whose logits are not finite are NaN.
        """
        rows = join_ranks(self.scored)
        assert len(rows) == found.tokens, "every row counts once"
        with_null = datamodule.config.name == WITH_NULL
        texts, answers = self._answers(rows, SPLITS[stage], datamodule)
        golds = {texts.ids[number]: texts.golds[number] for number in answers}
        known = {texts.ids[number]: answer or NOTHING for number, answer in answers.items()}
        scored = (scores_v2 if with_null else scores_v1)(golds, known)
        if None in answers.values():  # a diverged run is a result without a score
            scored = dict.fromkeys(scored, math.nan)
        return {f"{stage}/{name}": value for name, value in scored.items()}

    def _answers(
        self, logits: Mapping[int, np.ndarray], split: str, datamodule: Any
    ) -> tuple[QuestionTexts, dict[int, Answer | None]]:
        """Return the texts of a split and the answer to each question; None without finite logits.

        Args:
            logits: The logits of every row over all ranks; for part of a split, all rows of its
                questions.
            split: valid or test.
            datamodule: Holds the corpus.
        """
        rows = self.rows(datamodule.corpus, split, datamodule.config, seed=None)
        texts = QuestionTexts(datamodule.corpus, split)
        found: dict[int, Answer | None] = {}
        for number, windows in enumerate(rows.windows):
            mine = range(rows.first_rows[number], rows.first_rows[number + 1])
            if mine[0] not in logits:
                continue
            of = [logits[row] for row in mine]  # a question is always evaluated as a whole
            finite = all(np.isfinite(each).all() for each in of)
            holder = int(rows.holders[number])
            found[number] = texts.answer(holder, windows, of) if finite else None
        return texts, found

    def predict(
        self, model: SpanPredictor, batch: LabelledBatch, datamodule: Any
    ) -> list[tuple[int, np.ndarray]]:
        """Return the logits of each row, ``(2, token)``."""
        return list(logits_by_row(self.logits(model, batch), batch).items())

    def answers(self, predicted: Mapping[int, Any], datamodule: Any) -> dict[int, str]:
        """Return the answer to each question, in one line; in version 2.0 "" for no answer."""
        _, found = self._answers(predicted, "test", datamodule)
        with_null = datamodule.config.name == WITH_NULL
        texts = {}
        for number, answer in found.items():
            if answer is None:
                raise UserError(
                    f"predict: the logits of question {number + 1} are not finite, so the model "
                    "has diverged; the checkpoint of another step or run is needed"
                )
            silent = with_null and answer.difference > 0
            texts[number] = "" if silent else " ".join(answer.text.split())
        return texts

    def predictions(self, model: SpanPredictor, batch: LabelledBatch) -> Predictions:
        """Return logits and labels of the start and the end of each row that counts.

        A label below 0 is not predicted.
        """
        counted = (batch.index >= 0)[:, None] & (batch.labels >= 0)
        return Predictions(self.logits(model, batch)[counted], batch.labels[counted])

    def alone(self, batch: LabelledBatch, token: int) -> LabelledBatch:
        """Return the row of position `token`: starts and ends alternate; no row is blank."""
        row = int((batch.index >= 0).nonzero()[token // 2])
        alone = one_row(batch, row, batch.tokens.shape[1])
        labels = alone.labels.clone()
        labels[:, token % 2 + 1 :] = -1
        return alone._replace(labels=labels)


def logits_by_row(logits: Tensor, batch: LabelledBatch) -> dict[int, np.ndarray]:
    """Return (2, token) for each row that counts, without padding."""
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).cpu().numpy()
    lengths = (batch.tokens != PAD).sum(dim=1).tolist()
    rows = zip(batch.index.tolist(), wide, lengths, strict=True)
    return {row: of[:, :length].copy() for row, of, length in rows if row >= 0}


def scores_v1(golds: Golds, answers: Mapping[str, Answer]) -> dict[str, float]:
    """Return the scores of version 1.1, in percent."""
    found = score_v1(golds, {question: answer.text for question, answer in answers.items()})
    return {"exact_match": found.exact, "f1": found.f1}


def scores_v2(golds: Golds, answers: Mapping[str, Answer]) -> dict[str, float]:
    """Return the scores of version 2.0 with the threshold 0 and with the best one, in percent."""
    texts = {question: answer.text for question, answer in answers.items()}
    differences = {question: answer.difference for question, answer in answers.items()}
    found = score_v2(golds, apply_null_threshold(texts, differences))
    scored = {"exact_match": found.every.exact, "f1": found.every.f1}
    for name, part in (("has_answer", found.has_answer), ("no_answer", found.no_answer)):
        if part is not None:
            scored |= {f"{name}_exact_match": part.exact, f"{name}_f1": part.f1}
    scored["best_exact_match"] = best_threshold(golds, texts, differences, "exact").score
    scored["best_f1"] = best_threshold(golds, texts, differences, "f1").score
    scored["always_no_answer"] = score_v2(golds, dict.fromkeys(golds, "")).every.exact
    return scored
