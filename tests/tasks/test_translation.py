import numpy as np
import pytest
import torch

from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import BOS, EOS, PAD
from lightning_app.tasks.translation import TranslationRows


@pytest.fixture
def corpus(write_pairs, text_config) -> PreparedCorpus:
    return prepare(text_config(write_pairs()))


def test_batch_is_the_text(corpus: PreparedCorpus):
    batch = TranslationRows(corpus, "train")[0, np.array([0, 1])]
    encode = corpus.tokenizer.encode
    long, short = encode("der hund sieht die katze ."), encode("die katze schläft .")
    assert batch.source.tolist() == [[*long, EOS], [*short, EOS, PAD, PAD]]
    long, short = encode("the dog sees the cat ."), encode("the cat sleeps .")
    assert batch.target.tolist() == [[BOS, *long, EOS], [BOS, *short, EOS, PAD, PAD]]
    assert batch.index.tolist() == [0, 1]
    assert batch.normalizer == 7 + 5
    assert batch.normalizer.dtype == torch.float32
    assert batch.source.dtype == batch.target.dtype == batch.index.dtype == torch.int64


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares_of_all_ranks_are_the_global_batch(corpus: PreparedCorpus, world: int):
    rows = np.array([4, 0, 8, 5])
    whole = TranslationRows(corpus, "train")[0, rows]
    shares = [TranslationRows(corpus, "train", None, rank, world)[0, rows] for rank in range(world)]
    for of in shares:
        assert of.normalizer == pytest.approx(float(whole.normalizer) / world)
    predicted = sum(int((of.target[:, 1:] != PAD).sum()) for of in shares)
    assert predicted == whole.normalizer
    indices = [i for of in shares for i in of.index.tolist() if i >= 0]
    assert sorted(indices) == [0, 4, 5, 8]


def test_blank_row(corpus: PreparedCorpus):
    batch = TranslationRows(corpus, "train", None, 1, 2)[0, np.array([3])]
    assert batch.source.tolist() == [[EOS]]
    assert batch.target.tolist() == [[PAD, PAD]]
    assert batch.index.tolist() == [-1]


def test_sampler_counts_the_longer_side_with_eos(corpus: PreparedCorpus):
    for _, rows in TranslationRows(corpus, "train", seed=1).sampler(14):
        longest = max(corpus.lengths("train", c)[rows].max() for c in ("source", "target"))
        assert len(rows) * longest <= 14
    without = TranslationRows(corpus, "valid").sampler(14)
    without.set_epoch(0)
    first = [rows.tolist() for _, rows in without]
    without.set_epoch(1)
    assert [rows.tolist() for _, rows in without] == first
