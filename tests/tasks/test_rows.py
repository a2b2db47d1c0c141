"""What holds of the rows of every task: shares of ranks, blank rows, epochs, fixed evaluations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import prepare
from lightning_app.data.tokenizer import PAD
from lightning_app.tasks.causal_lm import CausalRows
from lightning_app.tasks.labelled import LabelledRows
from lightning_app.tasks.masked_lm import MaskedRows, PairRows
from lightning_app.tasks.squad import QuestionRows
from lightning_app.tasks.translation import TranslationRows
from tests import questions, tables
from tests.documents import data_fields, write_documents

KINDS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "translation": (TranslationRows, {}, 28),
    "masked": (MaskedRows, {"window": 20, "probability": 0.15}, 95),
    "pairs": (PairRows, {"window": 32, "probability": 0.15}, 128),
    "causal": (CausalRows, {"window": 6}, 20),
    "labelled": (LabelledRows, {"window": 99}, 60),
    "questions": (QuestionRows, {"window": 14, "stride": 5}, 60),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
Make = Callable[..., Any]


@pytest.fixture
def make(kind: str, tmp_path: Path, write_pairs, text_config) -> Make:
    if kind == "translation":
        config = text_config(write_pairs())
    elif kind == "labelled":
        tables.write_table(tmp_path, "rte")
        config = DataConfig(**{**tables.fine_tuning(tmp_path, "rte")["data"], "task": "glue"})
    elif kind == "questions":
        questions.write_squad(tmp_path, "squad2")
        config = DataConfig(**{**questions.answering(tmp_path, "squad2")["data"], "task": "squad"})
    else:
        task, paired = "causal_lm" if kind == "causal" else "masked_lm", kind == "pairs"
        fields = data_fields(write_documents(tmp_path, documents=6))
        config = DataConfig(task=task, next_sentence=paired, **fields)
    corpus, (build, sizes, _) = prepare(config), KINDS[kind]
    return lambda split="train", **how: build(corpus, split, **sizes, **{"seed": 1, **how})


def predicted(batch: Any) -> int:
    if hasattr(batch, "positions"):
        return len(batch.labels)
    if hasattr(batch, "target"):
        return int((batch.target[:, 1:] != PAD).sum())
    labels = batch.labels if hasattr(batch, "documents") else batch.index.clamp(-1, 0) + 1
    return int((labels != 0).sum())


def places(batch: Any) -> dict[int, dict[str, list[Any]]]:
    """The values of each real row by its number, without padding at its end."""
    names = {"source", "target", "tokens", "segments", "follows"} & {*batch._fields}
    names |= set() if hasattr(batch, "positions") else {"labels"} & {*batch._fields}
    found: dict[int, dict[str, list[Any]]] = {}
    for row, number in enumerate(batch.index.tolist()):
        parts = {name: getattr(batch, name) for name in names}
        values = {
            name: np.trim_zeros(np.atleast_1d(x[row]), "b")
            for name, x in parts.items()
            if x is not None
        }
        if number >= 0:
            found[number] = {name: value.tolist() for name, value in values.items()}
    return found


@every_kind
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_of_all_ranks_are_the_global_batch(
    make: Make, kind: str, seed: int | None, world: int
) -> None:
    """Each row once, in the same number of steps of equal width; a batch holds its budget."""
    budget = KINDS[kind][2]
    whole = make("valid", seed=seed)
    ranks = [make("valid", seed=seed, rank=rank, world_size=world) for rank in range(world)]
    for epoch in (0, 2):
        samplers = [rows.sampler(budget) for rows in (whole, *ranks)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        seen = []
        for item, *items in zip(*samplers, strict=True):
            batch = whole[item]
            shares = [rows[each] for rows, each in zip(ranks, items, strict=True)]
            assert {int(of.predicted_tokens) for of in shares} == {int(batch.predicted_tokens)}
            assert sum(map(predicted, shares)) == predicted(batch) == int(batch.predicted_tokens)
            found: dict[int, Any] = {}
            for of in shares:
                assert kind != "pairs" or of.pairs == batch.pairs == len(batch.index)
                assert not found.keys() & places(of).keys()
                found |= places(of)
            assert found == places(batch)
            seen += found
            width = max(x.shape[1] for x in batch if x is not None and x.dim() == 2)
            alone = kind == "questions" or len(found) == 1
            assert len(batch.index) * (width - 1) <= budget or alone
        assert sorted(seen) == list(range(len(seen)))
        assert seed is not None or len(seen) == len(whole)


@every_kind
def test_rows_depend_on_seed_and_epoch_but_not_in_an_evaluation_and_may_be_none(make, kind) -> None:
    def read(seed: int | None, epoch: int) -> list[Any]:
        rows = make(seed=seed)
        sampler = rows.sampler(KINDS[kind][2])
        sampler.set_epoch(epoch)
        return [[x.tolist() for x in rows[item] if x is not None] for item in sampler]

    assert read(1, 3) == read(1, 3)
    assert read(1, 3) != read(1, 4)
    assert read(1, 3) != read(2, 3)
    assert read(None, 0) == read(None, 5)
    blank, whole = (make(rank=rank, world_size=2)[0, np.array([3])] for rank in (1, 0))
    assert blank.index.tolist() == [-1]
    assert predicted(blank) == 0
    assert blank.predicted_tokens == whole.predicted_tokens > 0
