"""Rows of labelled texts: their form, how they are cut, and each of them exactly once."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import BOS, EOS, PAD
from lightning_app.tasks.labelled import LabelledRows, cut_lengths
from tests import tables


def prepared(root: Path, name: str = "rte", **fields: Any) -> tuple[PreparedCorpus, DataConfig]:
    tables.write_table(root, name)
    config = DataConfig(**{**tables.fine_tuning(root, name)["data"], "task": "glue", **fields})
    return prepare(config), config


def rows_of(corpus: PreparedCorpus, **given: Any) -> LabelledRows:
    return LabelledRows(corpus, "valid", **{"window": 99, "seed": None, **given})


def reference(corpus: PreparedCorpus, row: int, window: int, pair: bool) -> tuple[Any, Any]:
    """Tokens and segments of a row, cut by the loop of google-research/bert."""
    texts = []
    for column in ("first", "second") if pair else ("first",):
        ids, offsets = corpus.ids("valid", column), corpus.offsets("valid", column)
        texts.append(ids[offsets[row] : offsets[row + 1] - 1].tolist())
    one, two = (*texts, [])[:2]
    while len(one) + len(two) > window - (3 if pair else 2):
        (one if len(one) > len(two) else two).pop()
    tokens, segments = [BOS, *one, EOS], [0] * (len(one) + 2)
    return ([*tokens, *two, EOS], segments + [1] * (len(two) + 1)) if pair else (tokens, segments)


@pytest.mark.parametrize("name", ["rte", "cola"])
@pytest.mark.parametrize("window", [5, 8, 9, 99])
def test_rows_are_berts(tmp_path: Path, name: str, window: int) -> None:
    corpus, _ = prepared(tmp_path, name)
    rows, pair = rows_of(corpus, window=window), name == "rte"
    batch = rows[0, np.arange(len(rows))]
    lengths = []
    for row in range(len(rows)):
        tokens, segments = reference(corpus, row, window, pair)
        padding = [0] * (batch.tokens.shape[1] - len(tokens))
        assert batch.tokens[row].tolist() == tokens + [PAD for _ in padding]
        assert batch.segments[row].tolist() == segments + padding
        lengths.append(len(tokens))
    assert max(lengths) <= window
    assert rows.lengths.tolist() == lengths
    assert batch.labels.tolist() == corpus.labels("valid").tolist()
    whole = [len(reference(corpus, row, 999, pair)[0]) for row in range(len(rows))]
    assert rows.cut == sum(length > window for length in whole)


def test_cut_lengths_is_the_loop_of_bert() -> None:
    for one, two, longest in product(range(8), range(8), range(2, 16)):
        a, b = one, two
        while a + b > longest:
            a, b = (a - 1, b) if a > b else (a, b - 1)
        found = cut_lengths(np.array([one]), np.array([two]), longest)
        assert [int(x[0]) for x in found] == [a, b], (one, two, longest)


def test_batches_hold_rows_of_similar_length(tmp_path: Path) -> None:
    """Sorted by length there is little padding; BERT pads every row to the longest length."""
    corpus, config = prepared(tmp_path)
    rows = rows_of(corpus, seed=1)
    places = real = 0
    orders = []
    for epoch in (0, 1):
        sampler = rows.sampler(config.tokens_per_batch)
        sampler.set_epoch(epoch)
        items = list(sampler)
        orders.append([item[1].tolist() for item in items])
        for _, of in items:
            longest = int(rows.lengths[of].max())
            assert len(of) * longest <= config.tokens_per_batch
            assert longest - int(rows.lengths[of].min()) <= 4
            places += len(of) * longest
            real += int(rows.lengths[of].sum())
    assert real / places > 0.85
    assert orders[0] != orders[1]
