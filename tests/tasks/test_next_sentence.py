"""The task with next sentences: it learns them, reports them once, and shows probes its rows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.spans import auxiliary_terms
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import prepare
from lightning_app.data.tokenizer import PAD
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import Evaluated, ObjectiveConfig
from lightning_app.probes.probe import attention_maps, probe
from lightning_app.tasks.masked_lm import MaskedBatch, MaskedLanguageModelling, PairRows
from tests.documents import data_fields, write_documents
from tests.test_module import Waits

FOUND = Evaluated(1.0, 1)


def task() -> MaskedLanguageModelling:
    config = ObjectiveConfig(kind="masked_lm", label_smoothing=0.0, next_sentence=True)
    return MaskedLanguageModelling(config)


def config_of(root: Path, **changes: Any) -> DataConfig:
    return DataConfig(task="masked_lm", next_sentence=True, **data_fields(root, **changes))


def model_of(vocab_size: int, width: int = 32) -> Any:
    architecture = ArchitectureConfig(
        kind="encoder", encoder_depth=2, model_dim=width, ff_dim=64, num_heads=4, dropout=0.0
    )
    return task().build_model(architecture, BlockConfig(preset="pre_ln"), vocab_size)


def rows_of(root: Path, split: str, **changes: Any) -> PairRows:
    config = config_of(root)
    seed = 1 if split == "train" else None
    found = task().rows(prepare(config), split, config, seed=seed, **changes)
    assert isinstance(found, PairRows)
    return found


@torch.no_grad()
def evaluate(scored: MaskedLanguageModelling, model: Any, rows: PairRows) -> dict[str, float]:
    scored.start_decoding()
    for item in rows.sampler(600):
        batch = rows[item]
        scored.sums(model, batch)
        scored.decode(model, batch, "val")
    return scored.scores("val", None, FOUND)


@pytest.mark.slow
@pytest.mark.parametrize("topics", [True, False])
def test_topics_are_learned_and_shuffled_words_are_not(tmp_path: Path, topics: bool) -> None:
    """By the loss of next sentences alone. A random text has the same topic in a quarter of cases,
    so that no model is right about more than 7 of 8 pairs."""
    root = write_documents(tmp_path, topics=topics)
    rows, valid, trained = rows_of(root, "train"), rows_of(root, "valid"), task()
    model = model_of(prepare(config_of(root)).meta["vocab_size"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = rows.sampler(512)
    for epoch in range(25):
        sampler.set_epoch(epoch)
        for item in sampler:
            batch = rows[item]
            trained.sums(model, batch)
            terms = auxiliary_terms(model, batch.predicted_tokens.float())
            optimizer.zero_grad()
            terms["next_sentence"].backward()
            optimizer.step()
    found = evaluate(trained, model, valid)
    chance = max(valid.random_share, 1 - valid.random_share)
    if topics:
        assert found["val/nsp_accuracy"] > 0.75
        assert found["val/nsp_nll"] < 0.55
    else:
        assert abs(found["val/nsp_accuracy"] - 0.5) < chance - 0.5 + 0.06
        assert found["val/nsp_nll"] > 0.68


def test_an_evaluation_counts_every_pair_once(tmp_path: Path) -> None:
    """The same with batches of any size, with blank rows, and after another evaluation."""
    root = write_documents(tmp_path, documents=6)
    valid, scored = rows_of(root, "valid"), task()
    model = model_of(prepare(config_of(root)).meta["vocab_size"], width=12)
    whole = valid[0, np.arange(len(valid))]
    with torch.no_grad():
        states = model.states_of_heads(whole.tokens, whole.positions, whole.segments)
        p = model.next_sentence(states.first).softmax(dim=1)
    assert whole.follows is not None
    nll = -p[torch.arange(len(p)), whole.follows].log().mean()
    right = (p.argmax(dim=1) == whole.follows).float().mean()
    for _ in range(2):
        found = evaluate(scored, model, valid)
        assert found["val/nsp_nll"] == pytest.approx(float(nll), rel=1e-5)
        assert found["val/nsp_accuracy"] == pytest.approx(float(right))
    scored.start_decoding()
    with torch.no_grad():
        for rank in (0, 1):
            for item in rows_of(root, "valid").sampler(48):
                batch = rows_of(root, "valid", rank=rank, world_size=2)[item]
                scored.sums(model, batch)
                scored.decode(model, batch, "val")
    both = scored.scores("val", None, FOUND)
    assert both["val/nsp_nll"] == pytest.approx(float(nll), rel=1e-5)
    assert both["val/nsp_accuracy"] == pytest.approx(float(right))
    # A smaller evaluation has the pairs of its own alone.
    scored.start_decoding()
    with torch.no_grad():
        scored.sums(model, valid[0, np.arange(2)])
        scored.decode(model, valid[0, np.arange(2)], "test")
    few = -p[torch.arange(2), whole.follows[:2]].log().mean()
    assert scored.scores("test", None, FOUND)["test/nsp_nll"] == pytest.approx(float(few), rel=1e-4)
    plain = MaskedLanguageModelling(ObjectiveConfig(kind="masked_lm"))
    assert plain.scores("val", None, FOUND) == {}


def test_a_step_never_waits(tmp_path: Path) -> None:
    rows = rows_of(write_documents(tmp_path, documents=6), "train")
    model, batch = model_of(26, width=12), rows[0, np.arange(9)]
    scored = task()
    with Waits() as waits:
        sums = scored.sums(model, batch)
        terms = auxiliary_terms(model, batch.predicted_tokens.float())
        (sums.loss + terms["next_sentence"]).backward()
    assert waits.seen == []
    with Waits() as waits, torch.no_grad():
        scored.sums(model, batch)
    assert {name for _, name in waits.seen} <= {"_local_scalar_dense"}


@pytest.fixture
def batch(tmp_path: Path) -> MaskedBatch:
    found = rows_of(write_documents(tmp_path, documents=6), "train")[0, np.arange(9)]
    assert (found.tokens == PAD).any()
    return found


def test_probes_measure_real_tokens(batch: MaskedBatch) -> None:
    """Padding counts in no stack: the rows one by one, without it, give the same means."""
    model = model_of(26, width=12)
    whole = probe(model, task(), [batch])
    assert all(math.isfinite(row.value) for row in whole)
    assert torch.equal(task().real_tokens(batch)["encoder"], batch.tokens != PAD)
    assert not task().real_tokens(batch._replace(index=torch.full((9,), -1)))["encoder"].any()
    wide = torch.nn.functional.pad(batch.tokens, (0, 5), value=PAD)
    assert batch.segments is not None
    positions = batch.positions + batch.positions // batch.tokens.shape[1] * 5
    padded = batch._replace(
        tokens=wide, positions=positions, segments=torch.nn.functional.pad(batch.segments, (0, 5))
    )
    for one, two in zip(whole, probe(model, task(), [padded]), strict=True):
        assert one.place == two.place
        assert one.value == pytest.approx(two.value, rel=1e-3, abs=1e-5), one.place


def test_one_row_alone_predicts_what_it_does_in_its_batch(batch: MaskedBatch) -> None:
    """The longest row has no padding then."""
    model = model_of(26, width=12)
    every = task().predictions(model, batch)
    for token in range(0, len(batch.labels), 3):
        one = task().alone(batch, token)
        assert len(one.tokens) == len(one.index) == 1
        found = task().predictions(model, one)
        torch.testing.assert_close(found.logits[-1], every.logits[token], rtol=1e-4, atol=1e-5)
        assert found.labels[-1] == batch.labels[token]
        assert int(task().rows_of(one)) == int(task().rows_of(batch)[token])
    longest = task().longest(batch)
    assert longest.tokens.shape[1] == (batch.tokens != PAD).sum(dim=1).max()
    assert (longest.tokens != PAD).all()
    (maps,) = attention_maps(model, task(), longest).values()
    assert maps.isfinite().all()
