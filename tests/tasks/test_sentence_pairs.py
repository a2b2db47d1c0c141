"""Pairs of texts: their labels, their lengths, and that no text is lost."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD
from lightning_app.models.encoder_heads import RANDOM
from lightning_app.tasks import masked_lm
from lightning_app.tasks.masked_lm import MaskedBatch, PairRows, Spans, cut_to, draw_spans
from tests.tasks.test_masked_lm import original

WINDOW = 32
DOCUMENTS = {"train": 13, "valid": 7, "test": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    """Word w<d>x<s>x<p> is at place p of sentence s of document d: every token is there once."""
    from lightning_app.data.config import DataConfig

    root = tmp_path_factory.mktemp("documents")
    random = np.random.default_rng(0)
    for split, documents in DOCUMENTS.items():
        texts = []
        for document in range(documents):
            lengths = random.integers(1, 12, random.integers(1, 40))
            lines = (
                " ".join(f"w{document}x{number}x{place}" for place in range(length))
                for number, length in enumerate(lengths)
            )
            texts.append("\n".join(lines))
        (root / f"{split}.txt").write_text("\n\n".join(texts) + "\n")
    fields: dict[str, Any] = {"tokenizer": "word", "vocab_size": None, "cache": str(root / "cache")}
    fields |= {"task": "masked_lm", "next_sentence": True}
    return prepare(DataConfig(name="text", root=str(root), **fields))


def make(corpus: PreparedCorpus, split: str = "train", **fields: Any) -> PairRows:
    given = {"window": WINDOW, "probability": 0.15, "seed": 1, "rank": 0, "world_size": 1}
    return PairRows(corpus, split, **(given | fields))


def everything(rows: PairRows, epoch: int = 0) -> Any:
    return rows[epoch, np.arange(len(rows.spans(epoch).random))]


def texts(corpus: PreparedCorpus, batch: MaskedBatch) -> list[list[list[tuple[int, ...]]]]:
    """The (document, sentence, place) of each token of both texts of each row."""
    found = []
    for row in original(batch).tolist():
        assert row[0] == BOS
        end = row.index(EOS)
        last = row.index(EOS, end + 1)
        assert set(row[last + 1 :]) <= {PAD}
        words = [corpus.tokenizer.decode(text) for text in (row[1:end], row[end + 1 : last])]
        numbers = [[word[1:].split("x") for word in text.split()] for text in words]
        found.append([[tuple(map(int, of)) for of in text] for text in numbers])
    return found


def follow(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Whether `two` is the next token of the same document, or the first of the next sentence."""
    return two in ((*one[:2], one[2] + 1), (one[0], one[1] + 1, 0))


@pytest.mark.parametrize("epoch", [0, 3])
def test_rows_are_what_their_labels_say(corpus: PreparedCorpus, epoch: int) -> None:
    """Texts are contiguous; a next one goes on in its document, a random one is of another."""
    batch = everything(make(corpus), epoch)
    joined = 0
    for (first, second), label in zip(texts(corpus, batch), batch.follows.tolist(), strict=True):
        for text in (first, second):
            assert text
            assert all(follow(one, two) for one, two in pairwise(text))
        if label == RANDOM:
            assert first[0][0] != second[0][0]
        else:
            assert first[0][0] == second[0][0]
            assert second[0][1] > first[-1][1]
            joined += follow(first[-1], second[0])
    assert joined > 0  # the others lost tokens at the seam


def test_rows_fit_segments_say_which_text_and_the_budget_of_each_predicts_no_mark(corpus) -> None:
    batch = everything(make(corpus))
    lengths = (batch.tokens != PAD).sum(1)
    assert lengths.max() == WINDOW
    assert lengths.min() >= 5
    tokens = original(batch)
    for row, segments in zip(tokens.tolist(), batch.segments.tolist(), strict=True):
        end = row.index(EOS)
        last = row.index(EOS, end + 1)
        width = len(row)
        assert segments == [0] * (end + 1) + [1] * (last - end) + [0] * (width - last - 1)
        assert row[last + 1 :] == [PAD] * (width - last - 1)
    counts = (batch.positions // batch.tokens.shape[1]).bincount(minlength=len(lengths))
    assert counts.tolist() == [max(1, round(0.15 * n)) for n in lengths.tolist()]
    for epoch in range(3):
        batch = everything(make(corpus, probability=0.9), epoch)
        assert not {PAD, BOS, EOS, MASK} & set(batch.labels.tolist())
        assert batch.predicted_tokens == len(batch.labels)
        assert (((batch.tokens == BOS) | (batch.tokens == EOS)).sum(1) == 3).all()


def drawn(sentences: list[list[int]], longest: int, seed: int = 0) -> Spans:
    """The pairs of documents, given as the lengths of their sentences."""
    starts = np.cumsum([0, *(length for of in sentences for length in of)]).tolist()
    documents = np.cumsum([0, *map(len, sentences)]).tolist()
    return draw_spans(starts, documents, longest, np.random.default_rng(seed))


def test_each_token_is_of_one_pair_of_its_document() -> None:
    """The first texts, with the second ones that follow them, are the whole text in its order."""
    random = np.random.default_rng(3)
    for seed in range(20):
        lengths = [random.integers(1, 9, random.integers(1, 20)).tolist() for _ in range(5)]
        spans = drawn(lengths, 21, seed)
        own = []
        for first, second, is_random in zip(*(of.tolist() for of in spans), strict=True):
            own.append(first)
            if not is_random:
                own.append(second)
        assert own[0][0] == 0
        assert own[-1][1] == sum(map(sum, lengths))
        assert all(end == begin for (_, end), (begin, _) in pairwise(own))


def test_a_chunk_is_long_enough_or_ends_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = [[3] * 50, [3] * 50]
    monkeypatch.setattr(masked_lm, "SHORT", 0.0)
    spans = drawn(sentences, 20)
    one, two = spans.lengths
    ends = spans.second[:, 1]
    whole = one + two >= 20
    assert (whole | np.isin(ends, [150, 300])).all()
    assert (one + two <= 22).all()  # without the last sentence it is shorter than 20
    assert whole.mean() > 0.7


def shares_by_the_loop_of_bert(lengths: list[int], target: int, rounds: int) -> tuple[float, float]:
    """The share of random pairs and of chunks of one sentence in a document, chunk by chunk."""
    draw, pairs, at_random, alone = np.random.default_rng(2), 0, 0, 0
    for _ in range(rounds):
        place, chunk = 0, 0
        while place < len(lengths):
            chunk += 1
            gathered = sum(lengths[place - chunk + 1 : place + 1])
            if gathered >= target or place == len(lengths) - 1:
                first = 1 if chunk == 1 else int(draw.integers(1, chunk))
                is_random = chunk == 1 or draw.random() < 0.5
                pairs, at_random, alone = pairs + 1, at_random + is_random, alone + (chunk == 1)
                if is_random:
                    place -= chunk - first  # the sentences of the rest are gathered again
                chunk = 0
            place += 1
    return at_random / pairs, alone / pairs


def test_share_of_random_pairs_of_long_and_short_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the bounds, since only some chunks have one sentence."""
    lengths = [9, 30, 4, 4, 4, 4, 30, 8] * 40
    expected, alone = shares_by_the_loop_of_bert(lengths, 20, 60)
    assert 0.1 < alone < 0.9
    assert expected == pytest.approx((1 + alone) / 2, abs=0.01)
    monkeypatch.setattr(masked_lm, "SHORT", 0.0)
    found = np.concatenate([drawn([lengths] * 4, 20, seed).random for seed in range(15)])
    assert found.mean() == pytest.approx(expected, abs=0.015)


def test_shorter_targets_have_their_probability() -> None:
    one, two = drawn([[1] * 30_000, [1] * 30_000], 40).lengths
    short = (one + two < 40).mean()
    # One in 39 of the shorter targets is the longest; a random text may end with its document.
    assert short == pytest.approx(0.1 * 38 / 39, abs=0.02)
    assert (np.bincount((one + two)[one + two < 40], minlength=40)[2:40] > 0).all()


def test_random_texts_are_of_every_other_document_and_place() -> None:
    sentences = [[1] * 60 for _ in range(5)]
    found = set()
    for seed in range(700):
        spans = drawn(sentences, 10, seed)
        chosen = (spans.first[spans.random], spans.second[spans.random])
        for first, second in zip(*chosen, strict=True):
            assert first[0] // 60 != second[0] // 60
            assert second[0] // 60 == (second[1] - 1) // 60
            found.add((first[0] // 60, second[0]))
    assert len(found) == 5 * 4 * 60


def reference_cut(one: int, two: int, longest: int) -> tuple[int, int]:
    """The lengths after tokens were dropped one by one."""
    while one + two > longest:
        one, two = (one - 1, two) if one > two else (one, two - 1)
    return one, two


def test_too_long_pairs_lose_tokens_of_the_longer_text_at_both_ends() -> None:
    random = np.random.default_rng(5)
    lengths = random.integers(1, 40, (3000, 2))
    first = np.stack([np.full(3000, 100), 100 + lengths[:, 0]], axis=1)
    second = np.stack([np.full(3000, 500), 500 + lengths[:, 1]], axis=1)
    spans = cut_to(Spans(first, second, np.zeros(3000, bool)), 23, random)
    found = np.stack(spans.lengths, axis=1).tolist()
    assert found == [list(reference_cut(one, two, 23)) for one, two in lengths.tolist()]
    fronts = (spans.first[:, 0] - 100).sum() + (spans.second[:, 0] - 500).sum()
    assert fronts / (lengths.sum() - np.sum(found)) == pytest.approx(0.5, abs=0.02)
    assert ((spans.first[:, 0] >= 100) & (spans.first[:, 1] <= first[:, 1])).all()


def test_epochs_have_as_many_batches_of_other_pairs(corpus: PreparedCorpus) -> None:
    rows = make(corpus)
    assert len({len(rows.spans(epoch).random) for epoch in range(6)}) > 1
    for per_batch in (1, 4):
        sampler = rows.sampler(per_batch * WINDOW)
        for epoch in range(6):
            sampler.set_epoch(epoch)
            items = [numbers for _, numbers in sampler]
            assert len(items) == len(sampler)
            assert min(map(len, items)) > 0
            covered = np.unique(np.concatenate(items))
            assert covered.tolist() == list(range(len(rows.spans(epoch).random)))
            if epoch == 0:
                assert max(map(len, items)) <= per_batch
    one, two = (make(corpus).spans(epoch) for epoch in (1, 2))
    assert one.first.tolist() != two.first.tolist()


def test_targets_are_the_labels_of_an_evaluation(corpus: PreparedCorpus) -> None:
    rows = make(corpus, "valid", seed=None)
    assert np.array_equal(np.sort(rows.targets()), np.sort(everything(rows).labels.numpy()))
    few = np.array([1, 4])
    assert rows.targets(few).tolist() == rows[0, few].labels.tolist()
    assert len(make(corpus).targets()) == len(make(corpus).ids)
    assert len(everything(make(corpus, "test")).index) > 0  # of two documents


def test_a_long_document_is_cut_at_its_end(tmp_path: Path, text_config) -> None:
    """A pair longer than any text is the two texts as they are."""
    for split in DOCUMENTS:
        (tmp_path / f"{split}.txt").write_text("a b.\n\nc d e.\n")
    made = prepare(text_config(tmp_path, task="masked_lm", next_sentence=True))
    batch = everything(make(made, window=64))
    assert batch.follows.tolist() == [RANDOM, RANDOM]
    assert (batch.tokens != PAD).sum(1).tolist() == [8, 8]
