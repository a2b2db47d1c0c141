"""All pieces of a word are masked together."""

from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS, UNK
from lightning_app.tasks.masked_lm import (
    MaskedBatch,
    MaskedLanguageModelling,
    MaskedRows,
    Masking,
    PairRows,
)

WINDOW = 24


@pytest.fixture
def corpus(tmp_path: Path, text_config) -> PreparedCorpus:
    """Words of one to six letters, in few pieces more than there are letters."""
    random = np.random.default_rng(0)
    for split in ("train", "valid", "test"):
        lines = []
        for _ in range(150):
            sizes = random.integers(1, 7, 6)
            lines.append(" ".join("".join(random.choice(list("abcdefgh"), n)) for n in sizes))
        text = "\n".join(line if number % 10 else f"\n{line}" for number, line in enumerate(lines))
        (tmp_path / f"{split}.txt").write_text(text + "\n")
    fields: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 40, "task": "masked_lm"}
    return prepare(text_config(tmp_path, next_sentence=True, **fields))


def words_of(corpus: PreparedCorpus, row: list[int]) -> list[list[int]]:
    """The places of each word of a row, in a plain reading of its pieces."""
    starts = corpus.tokenizer.word_starts()
    words: list[list[int]] = []
    inside = False
    for place, token in enumerate(row):
        if token in (PAD, BOS, EOS):
            inside = False
            continue
        if inside and not starts[token]:
            words[-1].append(place)
        else:
            words.append([place])
        inside = True
    return words


@pytest.mark.parametrize("kind", [MaskedRows, PairRows])
def test_masks_are_whole_words_within_the_budget(corpus: PreparedCorpus, kind: Any) -> None:
    """No word is masked in part, and none that would still fit is left out."""
    starts = corpus.tokenizer.word_starts()
    rows = kind(corpus, "train", window=WINDOW, probability=0.3, seed=1, word_starts=starts)
    of_several = skipped = 0
    for epoch in range(3):
        count = len(rows.spans(epoch).random) if kind is PairRows else len(rows)
        batch: MaskedBatch = rows[epoch, np.arange(count)]
        width = batch.tokens.shape[1]
        flat = batch.tokens.flatten().clone()
        flat[batch.positions] = batch.labels
        masked = torch.zeros_like(flat, dtype=torch.bool)
        masked[batch.positions] = True
        pairs = zip(flat.view(-1, width).tolist(), masked.view(-1, width).tolist(), strict=True)
        for row, of in pairs:
            budget = max(1, round(0.3 * sum(token != PAD for token in row)))
            words = words_of(corpus, row)
            chosen = [word for word in words if of[word[0]]]
            assert sorted(place for word in chosen for place in word) == np.flatnonzero(of).tolist()
            spent = sum(map(len, chosen))
            assert spent <= budget
            left = [len(word) for word in words if word not in chosen]
            assert all(size > budget - spent for size in left)
            of_several += sum(len(word) > 1 for word in chosen)
            skipped += spent < budget
        assert not {PAD, BOS, EOS, MASK} & set(batch.labels.tolist())
        assert batch.predicted_tokens == len(batch.labels)
    assert of_several > 50
    assert skipped > 5


def test_marks_end_a_word_and_a_row_without_one_that_fits_predicts_none() -> None:
    """A piece after a mark begins a word, also one without the sign of a space."""
    starts = [True] * SPECIALS + [True, False]
    row = np.array([[BOS, 6, 6, EOS, 6, 5, 6, EOS, PAD, PAD]])
    found = set()
    for number in range(200):
        chosen = Masking(7, 1, starts).choose(0, np.array([number]), row, np.array([2]))
        found.add(tuple(np.flatnonzero(chosen)))
    assert found == {(1, 2), (5, 6), (4,)}  # with 4 alone, no other word fits
    masking = Masking(7, 1, starts)
    row = np.array([[5, 6, 6, 6]])
    batch = masking.batch(0, np.array([0]), row, np.array([3]), 0, 1)
    assert len(batch.labels) == 0
    assert batch.predicted_tokens == 1  # a step divides by it
    assert not masking.choose(0, np.array([0]), np.array([[EOS, EOS]]), np.array([1])).any()
    # Each word of a window of equal words has the same chance, the first and the last too.
    tokens = np.tile([5, 6, 6], (4000, 4))
    chosen = masking.choose(0, np.arange(4000), tokens, np.full(4000, 3))
    assert (chosen.sum(1) == 3).all()
    rate = chosen[:, ::3].mean(0)
    assert (chosen[:, ::3] == chosen[:, 2::3]).all()
    assert rate == pytest.approx(0.25, abs=0.03)


def test_a_word_of_a_word_tokenizer_is_one_piece(tmp_path: Path, text_config) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a few words here\n" * 40)
    config = text_config(tmp_path, task="masked_lm", window=8, whole_word=True)
    made = prepare(config)
    assert all(made.tokenizer.word_starts())
    plain = MaskedLanguageModelling.rows(made, "train", text_config(tmp_path, window=8), seed=1)
    whole = MaskedLanguageModelling.rows(made, "train", config, seed=1)
    for one, two in zip(plain[0, np.arange(9)], whole[0, np.arange(9)], strict=True):
        assert (one is None and two is None) or torch.equal(one, two)  # pyright: ignore[reportArgumentType]


def test_the_config_asks_for_whole_words_which_begin_with_a_mark(corpus, text_config) -> None:
    fields: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 40, "task": "masked_lm"}
    fields |= {"window": WINDOW, "mask_probability": 0.3}
    root, task_rows = corpus.folder, cast(Any, MaskedLanguageModelling.rows)
    rows = {
        whole: task_rows(corpus, "train", text_config(root, whole_word=whole, **fields), seed=1)
        for whole in (False, True)
    }
    batches = [of[0, np.arange(40)] for of in rows.values()]
    counts = [of.positions.numpy() // WINDOW for of in batches]
    assert {len(list(group)) for _, group in groupby(counts[0])} == {7}
    assert max(len(list(group)) for _, group in groupby(counts[1])) == 7
    assert not torch.equal(batches[0].tokens, batches[1].tokens)
    # UNK goes on with its word, except where each piece is a word.
    tokenizer = corpus.tokenizer
    starts = tokenizer.word_starts()
    assert len(starts) == tokenizer.vocab_size
    for word in ("abc", "hgfedcba", "a"):
        pieces = tokenizer.encode(word)
        assert [starts[piece] for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    ids = tokenizer.encode("abz c")
    assert UNK in ids
    assert sum(starts[piece] for piece in ids) == 2
    assert not starts[UNK]


@pytest.mark.parametrize("kind", [MaskedRows, PairRows])
@pytest.mark.parametrize("probability", [0.08, 0.9])
def test_words_that_no_row_can_predict_are_named(corpus, kind: Any, probability: float) -> None:
    """Of epoch 0, by a plain count; in the description of the data, which results record."""
    starts, split = corpus.tokenizer.word_starts(), {"window": WINDOW, "probability": probability}
    rows = kind(corpus, "train", **split, seed=1, word_starts=starts)
    words = longer = 0
    for row in rows._whole(0, np.arange(len(rows)))[0].tolist():
        sizes = [len(word) for word in words_of(corpus, row)]
        budget = max(1, round(probability * sum(token != PAD for token in row)))
        words, longer = words + len(sizes), longer + sum(size > budget for size in sizes)
    assert (longer > words / 4) == (probability < 0.5)
    said = MaskedLanguageModelling.describe({"train": rows})
    assert (f"; {100 * longer / words:.2g} % of training words have more" in said) == (longer > 0)
    plain = kind(corpus, "train", **split, seed=1)
    assert "of training words" not in MaskedLanguageModelling.describe({"train": plain})
