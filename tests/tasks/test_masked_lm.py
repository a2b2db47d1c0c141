from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_app.core.errors import UserError
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import EOS, MASK, SPECIALS
from lightning_app.tasks.masked_lm import MaskedBatch, MaskedRows

WINDOW = 20
PREDICTED = 3  # 15 % of 20


@pytest.fixture
def corpus(tmp_path: Path, text_config) -> PreparedCorpus:
    random = np.random.default_rng(0)
    for split, lines in (("train", 900), ("valid", 300), ("test", 50)):
        words = random.integers(0, 200, (lines, 7))
        text = "".join(" ".join(f"w{w}" for w in line) + "\n" for line in words)
        (tmp_path / f"{split}.txt").write_text(text)
    return prepare(text_config(tmp_path, task="masked_lm"))


def make(corpus: PreparedCorpus, split: str = "train", **fields) -> MaskedRows:
    given = {"window": WINDOW, "probability": 0.15, "seed": 1, "rank": 0, "world_size": 1}
    return MaskedRows(corpus, split, **(given | fields))


def everything(rows: MaskedRows, epoch: int = 0) -> MaskedBatch:
    return rows[epoch, np.arange(len(rows))]


def original(batch: MaskedBatch) -> torch.Tensor:
    flat = batch.tokens.flatten().clone()
    flat[batch.positions] = batch.labels
    return flat.view(batch.tokens.shape)


def test_windows_are_the_packed_text_and_labels_all_of_it_but_eos(corpus: PreparedCorpus):
    rows = make(corpus)
    ids = np.asarray(corpus.ids("train", "text"))
    assert len(ids) == 900 * 8
    assert np.count_nonzero(ids == EOS) == 900
    assert (len(rows), rows.remainder) == divmod(len(ids), WINDOW)
    batch = everything(rows)
    assert original(batch).flatten().tolist() == ids[: len(rows) * WINDOW].tolist()
    assert ((batch.positions // WINDOW).bincount(minlength=len(batch.index)) == PREDICTED).all()
    assert (batch.labels != EOS).all()
    assert (batch.positions.diff() > 0).all()
    assert batch.predicted_tokens == len(batch.labels)
    rows = make(corpus, "valid", seed=None)
    assert rows.targets().tolist() == everything(rows).labels.tolist()
    assert make(corpus).targets().tolist() == ids[ids != EOS].tolist()


def test_every_place_is_as_likely_and_80_10_10(corpus: PreparedCorpus):
    counts, shares = torch.zeros(WINDOW), torch.zeros(3)
    total, pieces = 0, []
    for epoch in range(40):
        batch = everything(make(corpus), epoch)
        places = original(batch)
        counts += (batch.positions % WINDOW).bincount(minlength=WINDOW)
        total += (places != EOS).sum(0)
        shown = batch.tokens.flatten()[batch.positions]
        kept, masked = shown == batch.labels, shown == MASK
        shares += torch.tensor([masked.sum(), (~masked & ~kept).sum(), kept.sum()])
        pieces.append(shown[~masked & ~kept])
    rate = counts / total
    assert rate.max() - rate.min() < 0.02
    assert rate.mean() == pytest.approx(PREDICTED / (WINDOW * 7 / 8), abs=0.01)
    shares /= shares.sum()
    assert torch.allclose(shares, torch.tensor([0.8, 0.1, 0.1]), atol=0.01)
    random = torch.cat(pieces)
    assert random.min() == SPECIALS
    assert random.max() == corpus.meta["vocab_size"] - 1


def test_window_of_end_of_sentence_only(tmp_path: Path, text_config):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a\n" * 30)
    rows = make(prepare(text_config(tmp_path, task="masked_lm")), probability=0.9)
    batch = everything(rows)
    assert len(batch.labels) == len(rows) * WINDOW / 2
    assert (batch.labels != EOS).all()


def test_batches_have_as_many_windows_as_the_budget_allows(corpus: PreparedCorpus):
    rows = make(corpus)
    sizes = [len(of) for _, of in rows.sampler(95)]
    assert sizes[:-1] == [4] * (len(sizes) - 1)
    assert sum(sizes) == len(rows)
    assert {len(of) for _, of in rows.sampler(1)} == {1}
    with pytest.raises(UserError, match=r"data\.window is 500,.*400 tokens"):
        make(corpus, "test", window=500)
