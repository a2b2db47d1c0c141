"""Fine-tuning on SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 1606.05250; 2018, 1806.03822)."""

import math
from collections.abc import Mapping
from typing import Any, Unpack, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import PAD, unigram_entropy
from lightning_app.models.encoder_heads import SpanPredictor
from lightning_app.models.heads import ArchitectureConfig, embedding_of
from lightning_app.models.loss import Evaluated, LossSums, counted_sums
from lightning_app.scores.squad import (
    Golds,
    apply_null_threshold,
    best_threshold,
    score_v1,
    score_v2,
)
from lightning_app.tasks.base import Predictions, Reading, join_ranks, task
from lightning_app.tasks.labelled import (
    LabelledBatch,
    LabelledTask,
    one_row,
    random_tokens,
)
from lightning_app.tasks.questions import (
    Answer,
    QuestionRows,
    QuestionTexts,
    check_window,
    described_windows,
)

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
        """Return the model."""
        stacks = architecture.stacks(block)
        embedding = embedding_of(architecture, stacks, vocab_size, self.pad)
        return SpanPredictor(stacks["encoder"], architecture.sizes(), embedding)

    @classmethod
    def _rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> QuestionRows:
        """Return a split as batches of windows of similar length."""
        return QuestionRows(corpus, split, window=data.window, stride=data.context_stride, **part)

    @classmethod
    def check(cls, corpus: PreparedCorpus, data: DataConfig) -> None:
        """Refuse a window that is too small for a question."""
        for split in corpus.meta["sizes"]:
            check_window(corpus, split, data.window)

    @classmethod
    def describe(cls, rows: Mapping[str, Any]) -> str:
        """Describe how many windows there are and how many questions are cut."""
        return described_windows(rows)

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
        """Return the sums over the rows of `batch`."""
        logits, real = self.logits(model, batch), batch.index >= 0
        if not torch.is_grad_enabled():
            self.last = logits_by_row(logits, batch)
        return span_sums(logits, batch.labels, real)

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
        everything = Reading(seed=None, rank=0, world_size=1)
        rows = self._rows(datamodule.corpus, split, datamodule.config, **everything)
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

    def random_batch(self, rows: int, length: int, vocabulary: int) -> LabelledBatch:
        """Return rows of random tokens without padding, whose second half is the context."""
        tokens, segments = random_tokens(rows, length, vocabulary)
        labels = torch.randint(length, (rows, 2)).sort(dim=1).values
        return LabelledBatch(tokens, segments, labels, torch.arange(rows), torch.tensor(rows))


def logits_by_row(logits: Tensor, batch: LabelledBatch) -> dict[int, np.ndarray]:
    """Return (2, token) for each row that counts, without padding."""
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).cpu().numpy()
    lengths = (batch.tokens != PAD).sum(dim=1).tolist()
    rows = zip(batch.index.tolist(), wide, lengths, strict=True)
    return {row: of[:, :length].copy() for row, of, length in rows if row >= 0}


def span_sums(
    logits: Float[Tensor, "row 2 token"],
    labels: Int[Tensor, "row 2"],
    counted: Bool[Tensor, " row"],
) -> LossSums:
    """Sum ``(CE_start + CE_end) / 2`` over the `counted` rows; rows with both are right."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = -logits.log_softmax(dim=2).gather(2, labels[:, :, None]).squeeze(2).mean(dim=1)
    return counted_sums(nll, nll, counted, lambda: (logits.argmax(dim=2) == labels).all(dim=1))


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
