"""The negative log-likelihood of texts, read as an evaluation reads a split."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import EOS, UNK, Tokenizer
from lightning_app.tasks.base import Task, task_class, to_device

SPLIT = "given"


class TextScore(NamedTuple):
    """What a model gives a text.

    Attributes:
        nll: The sum of ``-ln p`` over the predicted tokens, in nats, without label smoothing.
        tokens: The number of predicted tokens, with the end mark of each line.
        unknown: How many of them mean text outside of the vocabulary. A text with such tokens is
            not to be compared: it costs less to predict that a token is unknown than to predict
            what it spells.
    """

    nll: float
    tokens: int
    unknown: int

    @property
    def nll_per_token(self) -> float:
        """Nats a predicted token, which compares only under one tokenizer."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(nll / tokens)``."""
        return math.exp(self.nll_per_token)


class GivenCorpus:
    """Texts with what tasks read of a `PreparedCorpus`: one split, each column as rows of ids."""

    def __init__(self, columns: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._columns = columns
        self.meta: dict[str, Any] = {"text": {SPLIT: {}}}

    def ids(self, split: str, column: str) -> np.ndarray:
        """Return all token ids of a column, int32."""
        rows = self._columns[column]
        return np.array([token for row in rows for token in row], dtype=np.int32)

    def offsets(self, split: str, column: str) -> np.ndarray:
        """Return where each row begins, int64, (rows + 1,)."""
        return np.cumsum([0, *map(len, self._columns[column])])

    def documents(self, split: str) -> np.ndarray:
        """Return the place of the first token of each document: each text is one."""
        return np.zeros(1, dtype=np.int64)


def score_pairs(
    task: Task,
    model: Any,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    data: DataConfig,
    device: torch.device,
) -> list[TextScore]:
    """Return the score of each target line, given its source line."""
    columns = {
        "source": [[*tokenizer.encode(line), EOS] for line in sources],
        "target": [[*tokenizer.encode(line), EOS] for line in targets],
    }
    nll, tokens = _sums_by_row(task, model, GivenCorpus(columns), data, device)
    return [
        TextScore(float(nll[row]), int(tokens[row]), ids.count(UNK))
        for row, ids in enumerate(columns["target"])
    ]


def score_text(
    task: Task,
    model: Any,
    tokenizer: Tokenizer,
    text: str,
    data: DataConfig,
    device: torch.device,
) -> TextScore:
    """Return the score of a text of one or several lines, read from its start."""
    ids = [token for line in text.split("\n") for token in (*tokenizer.encode(line), EOS)]
    corpus = GivenCorpus({"text": [ids]})
    nll, tokens = _sums_by_row(task, model, corpus, replace(data, evaluation_streams=1), device)
    return TextScore(float(nll.sum()), int(tokens.sum()), ids.count(UNK))


@torch.no_grad()
def _sums_by_row(
    task: Task, model: Any, corpus: GivenCorpus, data: DataConfig, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of nll and the predicted tokens of each row of an evaluation."""
    read = cast(PreparedCorpus, corpus)  # its own reader would need files
    rows = task_class(task.config.kind).rows(read, SPLIT, data, None)
    nll = torch.zeros(len(rows), dtype=torch.float64)
    tokens = torch.zeros(len(rows), dtype=torch.float64)
    for item in rows.sampler(data.tokens_per_batch):
        batch = to_device(rows[item], device)
        by_token = task.sums(model, batch).by_token
        assert by_token is not None
        row, (found, counted) = task.rows_of(batch).cpu(), by_token.double().cpu()
        real = row >= 0
        nll.index_add_(0, row[real], found[real])
        tokens.index_add_(0, row[real], counted[real])
    return nll, tokens
