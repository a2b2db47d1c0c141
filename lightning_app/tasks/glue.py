"""Fine-tuning on the tasks of GLUE (Wang et al. 2018, 1804.07461)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import unigram_entropy
from lightning_app.models.encoder_heads import TextClassifier
from lightning_app.models.heads import ArchitectureConfig, embedding_of
from lightning_app.models.loss import Evaluated, LossSums, ObjectiveConfig, counted_sums, token_sums
from lightning_app.scores.task_facts import GLUE_CORPORA, GLUE_TASKS, GlueTask
from lightning_app.tasks.base import Predictions, Reading, join_ranks, task
from lightning_app.tasks.labelled import LabelledBatch, LabelledRows, LabelledTask, one_row

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


Counts = NDArray[np.int64]
"""counts[i, j] = number of examples of label i with prediction j."""


def count_pairs(labels: Sequence[int], predictions: Sequence[int], classes: int) -> Counts:
    """Return the confusion matrix of classes 0 to `classes` - 1."""
    cells = np.asarray(labels) * classes + np.asarray(predictions)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def accuracy(counts: Counts) -> float:
    """sum_i counts[i, i] / total, a fraction."""
    return int(np.trace(counts)) / int(counts.sum())


def f1_of_class_1(counts: Counts) -> float:
    """F1 = 2 tp / (2 tp + fp + fn) of class 1 of two, a fraction; 0 if the divisor is 0."""
    (_, fp), (fn, tp) = counts.tolist()
    divisor = 2 * tp + fp + fn
    return 2 * tp / divisor if divisor else 0.0


def matthews_correlation(counts: Counts) -> float:
    """(tp tn - fp fn) / sqrt((tp + fp) (tp + fn) (tn + fp) (tn + fn)), from -1 to 1.

    0 if the root is 0, so also for constant predictions, as in scikit-learn. torchmetrics 1.9
    returns a limit there instead: 0.026 for a model that accepts every sentence of CoLA's dev set.
    Matthews 1975.
    """
    # Python integers: the product of four counts overflows int64 from 55,000 examples.
    (tn, fp), (fn, tp) = counts.tolist()
    squared = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    if not squared:
        return 0.0
    return max(-1.0, min(1.0, (tp * tn - fp * fn) / math.sqrt(squared)))


ROUNDING = 1e-12
"""The relative spread up to which values computed in float64 are one value with rounding errors."""


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative spread of one output that is computed in batches of several sizes.

    Products of matrices of other sizes add up in another order: some float32 steps, after which
    bfloat16 rounds once.
    """
    if dtype == torch.float64:
        return ROUNDING
    return max(8.0 * torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)


def pearson(labels: ArrayLike, predictions: ArrayLike, rounding: float = ROUNDING) -> float:
    """r = sum (x - mean x) (y - mean y) / (|x - mean x| |y - mean y|), from -1 to 1.

    0 if one side is constant up to rounding, that of the predictions `rounding`; SciPy and
    torchmetrics return NaN there, Cramming reports -1. All values are finite.
    """
    x, y = np.asarray(labels, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    if _constant(x, ROUNDING) or _constant(y, rounding):
        return 0.0
    return max(-1.0, min(1.0, float(_direction(x) @ _direction(y))))


def spearman(labels: ArrayLike, predictions: ArrayLike, rounding: float = ROUNDING) -> float:
    """Pearson's correlation of the ranks, with mean ranks for ties; 0 as in `pearson`."""
    from scipy import stats  # costs 50 MB and a second, so imported only here

    if _constant(np.asarray(predictions, dtype=np.float64), rounding):
        return 0.0
    return pearson(stats.rankdata(labels), stats.rankdata(predictions))


def _constant(values: NDArray[np.float64], rounding: float) -> bool:
    return bool(np.ptp(values) <= rounding * np.abs(values).max())


def _direction(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (x - mean x) / |x - mean x|."""
    scaled = x / np.abs(x).max()  # squares of large values would overflow
    deviations = scaled - scaled.mean()
    return deviations / np.linalg.norm(deviations)


OF_CLASSES = {"f1": f1_of_class_1, "matthews": matthews_correlation}
OF_SCORES = {"pearson": pearson, "spearman": spearman}


@task("glue")
@final
class Glue(LabelledTask):
    """The label of each row from the state of its first token; `data.name` is the GLUE task.

    Classes are trained on the mean cross-entropy in nats. The scores of STS-B, from 0 to 5, are
    trained on the mean squared error: `train/loss` and `val/mse`. There `nll` is the negative
    log-likelihood (y - z)^2 / 2 + ln(2 pi) / 2 of a normal distribution of variance 1 around the
    output z, in nats: it ranks models like the squared error and has the meaning of `val/nll`
    elsewhere. Accuracy is not reported for scores.

    A row counts as one predicted token in sums, rates and `tokens` of a result. `scored` has the
    label of each row and the answer: a class, or a score.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        assert config.glue is not None, "checked with the corpus"
        self.facts: GlueTask = GLUE_TASKS[config.glue]
        self.classifies = self.facts.classes is not None
        self._rounding = ROUNDING

    def build_model(
        self, architecture: ArchitectureConfig, block: BlockConfig, vocab_size: int
    ) -> nn.Module:
        """Return the model with one output per class, or one for a score."""
        stacks, outputs = architecture.stacks(block), self.facts.classes or 1
        embedding = embedding_of(architecture, stacks, vocab_size, self.pad)
        return TextClassifier(stacks["encoder"], architecture.sizes(), embedding, outputs)

    @classmethod
    def rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> LabelledRows:
        regression = GLUE_TASKS[GLUE_CORPORA[data.name]].classes is None
        return LabelledRows(corpus, split, window=data.window, regression=regression, **part)

    @classmethod
    def describe(cls, rows: Mapping[str, Any]) -> str:
        """Describe how many rows are cut."""
        cut = " / ".join(f"{of.cut:,}" for of in rows.values())
        return f"; texts of {cut} rows cut at the end, the longer one first"

    @classmethod
    def floor(cls, rows: Any, evaluated: np.ndarray | None = None) -> float:
        """Return the loss of the best constant output.

        For classes it is the entropy of their shares, for scores their variance / 2 + ln(2 pi) / 2.
        """
        labels = rows.targets(evaluated)
        if rows.regression:
            return 0.5 * float(np.var(labels)) + HALF_LOG_2_PI
        return unigram_entropy(labels)

    def logits(self, model: TextClassifier, batch: LabelledBatch) -> Tensor:
        """Return the output of each row, ``(row, class)``, or ``(row, 1)`` for scores."""
        return model(batch.tokens, batch.segments)

    def sums(self, model: TextClassifier, batch: LabelledBatch) -> LossSums:
        outputs, real = model.outputs(batch.tokens, batch.segments), batch.index >= 0
        self._rounding = rounding_of(outputs.dtype)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.classifies:
            found = token_sums(outputs, batch.labels.long(), real, self.config.smoothing)
        else:
            found = squared_sums(outputs[:, 0], batch.labels, real)
        if not torch.is_grad_enabled():
            answers = self._answers(outputs[real]).tolist()
            pairs = zip(batch.labels[real].tolist(), answers, strict=True)
            self.last = dict(zip(batch.index[real].tolist(), pairs, strict=True))
        return found

    def _answers(self, outputs: Float[Tensor, "row output"]) -> Float[Tensor, " row"]:
        """Return the likeliest class of each row, or its score; NaN if outputs are not finite.

        Their argmax would be a class: the first for NaN, which is the most frequent in RTE.
        """
        if not self.classifies:
            return outputs[:, 0]
        classes = outputs.argmax(dim=1).to(outputs)
        return classes.where(outputs.isfinite().all(dim=1), math.nan)

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return the published scores of the task over all ranks, each row counted once.

        For classes also `majority_accuracy`, the accuracy of the most frequent one.
        """
        rows = join_ranks(self.scored)
        assert len(rows) == found.tokens, "every row counts once"
        labels, answers = zip(*(rows[row] for row in sorted(rows)), strict=True)
        last = "mse" if self.facts.classes is None else "accuracy"
        scored: dict[str, float] = dict.fromkeys((*self.facts.metrics, last), math.nan)
        # A diverged run is a result: it has no score.
        if all(map(math.isfinite, answers)):
            scored |= self._scored_by(labels, answers)
        if self.facts.classes is not None:
            # A run with this accuracy may have learned nothing (Mosbach et al. 2021, 2006.04884).
            scored["majority_accuracy"] = Counter(labels).most_common(1)[0][1] / len(labels)
        return {f"{stage}/{name}": value for name, value in scored.items()}

    def _scored_by(self, labels: Sequence[float], answers: Sequence[float]) -> dict[str, float]:
        """Return the scores of finite answers."""
        if self.facts.classes is None:
            error = math.fsum((x - y) ** 2 for x, y in zip(labels, answers, strict=True))
            scored = {
                name: OF_SCORES[name](labels, answers, self._rounding)
                for name in self.facts.metrics
            }
            return {**scored, "mse": error / len(labels)}
        counts = count_pairs(
            [int(label) for label in labels], [int(x) for x in answers], self.facts.classes
        )
        further = [name for name in self.facts.metrics if name != "accuracy"]
        scored = {name: OF_CLASSES[name](counts) for name in further}
        return {**scored, "accuracy": accuracy(counts)}

    def predict(
        self, model: TextClassifier, batch: LabelledBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return the likeliest class of each row, or its score; nan if not finite."""
        found = self._answers(self.logits(model, batch)).tolist()
        texts = [f"{answer:.{0 if self.classifies else 4}f}" for answer in found]
        rows = zip(batch.index.tolist(), texts, strict=True)
        return [(row, text) for row, text in rows if row >= 0]

    def answers(self, predicted: Mapping[int, Any], datamodule: Any) -> dict[int, str]:
        """Return the answers.

        Raises:
            UserError: if one comes from outputs that are not finite.
        """
        for row, text in sorted(predicted.items()):
            if not math.isfinite(float(text)):
                raise UserError(
                    f"predict: the outputs of row {row + 1} are not finite, so the model has "
                    "diverged; the checkpoint of another step or run is needed"
                )
        return dict(predicted)

    def predictions(self, model: TextClassifier, batch: LabelledBatch) -> Predictions:
        """Return outputs and labels of the rows that count; a score is rounded to an integer."""
        real = batch.index >= 0
        return Predictions(self.logits(model, batch)[real], batch.labels[real].round().long())

    def mean_loss(self, found: Predictions) -> Tensor:
        """Return the mean training loss of `found`, with rounded scores for a regression."""
        if self.classifies:
            return super().mean_loss(found)
        every = torch.ones_like(found.labels, dtype=torch.bool)
        return squared_sums(found.logits[:, 0], found.labels, every).loss / len(found.labels)

    def alone(self, batch: LabelledBatch, token: int) -> LabelledBatch:
        """Return the row of the label number `token`, counting rows that are not blank."""
        row = int((batch.index >= 0).nonzero()[token])
        return one_row(batch, row, batch.tokens.shape[1])


def squared_sums(
    outputs: Float[Tensor, " row"], labels: Tensor, counted: Bool[Tensor, " row"]
) -> LossSums:
    """Sum ``loss = (z - y)^2`` and ``nll = loss / 2 + ln(2 pi) / 2`` over the `counted` rows."""
    loss = (outputs - labels.to(outputs)) ** 2
    nll = 0.5 * loss.detach() + HALF_LOG_2_PI
    return counted_sums(
        loss, nll, counted, lambda: torch.zeros_like(counted)
    )  # none counts as right
