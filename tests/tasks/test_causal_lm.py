"""Windows of a running text, each token predicted once, and the scores of its bytes and words."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import EOS, PAD, UNK
from lightning_app.errors import UserError
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.objectives.base import Evaluated, ObjectiveConfig
from lightning_app.tasks.base import build_task
from lightning_app.tasks.causal_lm import CausalBatch, CausalLanguageModelling, CausalRows
from tests import tiny

TEXT = {
    "train": "the dog  sees\n\n  the cat .\nit runs , and runs\n" * 9,
    "valid": "the cat sees\n\n\nthe dog .\n it runs\n",
    "test": "the dog runs .",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, text in TEXT.items():
        (tmp_path / f"{split}.txt").write_bytes(text.encode())
    return tmp_path


@pytest.fixture
def corpus(root: Path, text_config) -> PreparedCorpus:
    return prepare(text_config(root, task="causal_lm", tokenizer="char"))


def task() -> CausalLanguageModelling:
    made = build_task(ObjectiveConfig(kind="causal_lm"))
    assert isinstance(made, CausalLanguageModelling)
    return made


def everything(rows: CausalRows) -> CausalBatch:
    return rows[0, np.arange(len(rows))]


def test_the_text_is_read_as_it_is(corpus: PreparedCorpus) -> None:
    """Blank lines, runs of spaces and those at the start of a line are part of the text."""
    ids = np.asarray(corpus.ids("valid", "text"))
    lines, line = [], []
    for token in ids.tolist():
        if token == EOS:
            lines.append(corpus.tokenizer.decode(line))
            line = []
        else:
            line.append(token)
    assert "\n".join(lines) + "\n" == TEXT["valid"]
    assert line == []
    assert len(ids) == len(TEXT["valid"])


def test_a_carriage_return_before_the_end_of_a_line_is_no_text(root: Path, text_config) -> None:
    (root / "valid.txt").write_bytes(b"the cat\r\nthe dog\r\n")
    made = prepare(text_config(root, task="causal_lm", tokenizer="char"))
    assert made.meta["text"]["valid"] == {"bytes": 16, "words": 6}


@pytest.mark.parametrize("window", [2, 5, 7])
def test_training_predicts_each_token_once_from_the_one_before(
    corpus: PreparedCorpus, window: int
) -> None:
    rows = CausalRows(corpus, "train", window, seed=1)
    ids = np.asarray(corpus.ids("train", "text")).astype(np.int64)
    batch = everything(rows)
    whole = len(ids) // window * window
    assert (len(rows), rows.remainder) == (whole // window, len(ids) - whole)
    assert batch.labels.flatten().tolist() == ids[:whole].tolist()
    assert batch.tokens.flatten().tolist() == [EOS, *ids[: whole - 1]]
    assert batch.predicted_tokens == whole
    assert rows.targets().tolist() == ids[:whole].tolist()


@pytest.mark.parametrize("window", [3, 7, 100])
@pytest.mark.parametrize("stride", [1, 2, 3, None])
def test_evaluation_predicts_each_token_once_with_its_context(
    corpus: PreparedCorpus, window: int, stride: int | None
) -> None:
    """Also the tokens after the last whole window, whatever the stride."""
    rows = CausalRows(corpus, "valid", window, stride)
    ids = np.asarray(corpus.ids("valid", "text")).tolist()
    text = [EOS, *ids]  # the token at `place` is predicted from text[: place + 1]
    seen: list[int] = []
    for _, wanted in rows.sampler(4 * window):
        batch = rows[0, wanted]
        before = batch.tokens.shape[1] - batch.labels.shape[1]
        count = 0
        for row, number in enumerate(batch.index.tolist()):
            for at in (batch.labels[row] != PAD).nonzero().flatten().tolist():
                place = number * rows.stride + before + at
                seen.append(place)
                count += 1
                assert batch.labels[row, at] == ids[place]
                read = batch.tokens[row, : before + at + 1].tolist()
                assert read == text[place + 1 - len(read) : place + 1]
                assert len(read) >= min(place + 1, window - rows.stride + 1)
        assert batch.predicted_tokens == count
        assert rows.targets(wanted).tolist() == batch.labels[batch.labels != PAD].tolist()
    assert sorted(seen) == list(range(len(ids)))


def test_windows_of_one_batch_may_be_any(corpus: PreparedCorpus) -> None:
    """The first window predicts more than the others also where it is not alone."""
    rows = CausalRows(corpus, "valid", 6, 2)
    batch = everything(rows)
    assert batch.labels[batch.labels != PAD].tolist() == corpus.ids("valid", "text").tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_of_all_ranks_are_the_global_batch(corpus: PreparedCorpus, world: int) -> None:
    item = 1, np.array([5, 9, 2, 7])
    whole = CausalRows(corpus, "train", 6, seed=1)[item]
    shares = [CausalRows(corpus, "train", 6, None, 1, rank, world)[item] for rank in range(world)]
    assert sum(int((of.labels != PAD).sum()) for of in shares) == whole.predicted_tokens
    for of in shares:
        assert of.predicted_tokens == whole.predicted_tokens
        for window, row in zip(of.index, of.tokens, strict=True):
            assert torch.equal(row, whole.tokens[int((whole.index == window).nonzero())])
    blank = CausalRows(corpus, "train", 6, None, 1, 2, 3)[0, np.array([4, 1])]
    assert (blank.index.tolist(), blank.labels.tolist()) == ([-1], [[PAD]])
    assert blank.predicted_tokens == 12


def test_batches_have_as_many_windows_as_the_budget_allows(corpus: PreparedCorpus) -> None:
    sizes = [len(of) for _, of in CausalRows(corpus, "train", 6, seed=1).sampler(20)]
    assert sizes[:-1] == [3] * (len(sizes) - 1)
    strides = [len(of) for _, of in CausalRows(corpus, "valid", 6, 2).sampler(20)]
    assert strides[0] == 1
    assert set(strides[1:-1]) == {3}


@pytest.mark.usefixtures("float64")
def test_overlap_gives_the_loss_of_an_explicit_loop(corpus: PreparedCorpus) -> None:
    """Each token alone, from the tokens that its window has before it."""
    window, stride = 9, 3
    rows = CausalRows(corpus, "valid", window, stride)
    model: Any = task().build_model(
        tiny.architecture(kind="decoder"), tiny.BlockConfig(), corpus.meta["vocab_size"]
    )
    tiny.randomise(model).eval()
    ids = np.asarray(corpus.ids("valid", "text")).tolist()
    text, expected = [EOS, *ids], 0.0
    with torch.no_grad():
        for place, token in enumerate(ids):
            later = max(0, place + 1 - window)
            begin = -(-later // stride) * stride
            logits = model(torch.tensor([text[begin : place + 1]]))[0, -1]
            expected -= float(logits.log_softmax(dim=-1)[token])
        found = sum(
            float(task().sums(model, rows[0, wanted]).nll) for _, wanted in rows.sampler(40)
        )
    assert found == pytest.approx(expected, rel=1e-12)


def test_no_logit_depends_on_a_later_token() -> None:
    model = tiny.randomise(tiny.causal_model("post_ln")).eval()
    assert isinstance(model, CausalLanguageModel)
    batch = CausalBatch(tiny.words(2, 8), tiny.words(2, 8), torch.arange(2), torch.tensor(16))
    changed = batch.tokens.clone()
    changed[:, 5] = (changed[:, 5] - 4) % 12 + 5
    one, two = (task().logits(model, batch._replace(tokens=t)) for t in (batch.tokens, changed))
    assert torch.equal(one[:, :5], two[:, :5])
    assert not torch.equal(one[:, 5:], two[:, 5:])


@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_token_alone_is_predicted_as_in_its_batch(place: int) -> None:
    model = tiny.randomise(tiny.causal_model("pre_ln")).eval()
    tokens, labels = tiny.words(3, 7), tiny.words(3, 4)
    labels[0, 2:], tokens[0, 6:] = PAD, PAD
    batch = CausalBatch(tokens, labels, torch.arange(3), torch.tensor(10))
    alone = task().predictions(model, task().alone(batch, place))
    whole = task().predictions(model, batch)
    torch.testing.assert_close(alone.logits[-1], whole.logits[place])
    assert alone.labels[-1] == whole.labels[place]
    assert len(task().longest(batch).tokens[0]) == 7
    assert int(task().real_tokens(batch)["decoder"].sum()) == 10


COUNTS = {
    # The bytes and words that the tokens of the validation text spell, line ends included.
    "char": {"bytes": 34, "words": 13},
    "byte": {"bytes": 34, "words": 13},
    "word": {"bytes": 33, "words": 13},  # the space at the start of the last line is in no token
}


@pytest.mark.parametrize("tokenizer", COUNTS)
def test_bits_per_byte_and_perplexity_of_a_word_by_hand(
    root: Path, text_config, tokenizer: str
) -> None:
    made = prepare(text_config(root, task="causal_lm", tokenizer=tokenizer))
    counts = made.meta["text"]["valid"]
    assert counts == COUNTS[tokenizer]
    ids = np.asarray(made.ids("valid", "text"))
    spelled = sum(len(made.tokenizer.decode([i]).encode()) for i in ids.tolist())
    if tokenizer != "word":  # whose pieces lose the spaces between them when decoded alone
        assert spelled + np.count_nonzero(ids == EOS) == counts["bytes"]
    data: Any = SimpleNamespace(corpus=made)
    found = task().scores("val", data, Evaluated(nll=50.0, tokens=len(ids)))
    assert found["val/bits_per_byte"] == pytest.approx(50.0 / math.log(2) / counts["bytes"])
    assert found["val/word_perplexity"] == pytest.approx(math.exp(50.0 / 13))
    assert task().scores("val", data, Evaluated(nll=50.0, tokens=len(ids) - 1)) == {}
    huge = task().scores("val", data, Evaluated(nll=1e6, tokens=len(ids)))
    assert huge["val/word_perplexity"] == math.inf


def test_a_text_with_unknown_tokens_has_no_bits_per_byte(root: Path, text_config) -> None:
    (root / "valid.txt").write_text("the zebra runs\n")
    made = prepare(text_config(root, task="causal_lm"))
    ids = np.asarray(made.ids("valid", "text"))
    assert np.count_nonzero(ids == UNK) == 1
    data: Any = SimpleNamespace(corpus=made)
    assert task().scores("val", data, Evaluated(nll=5.0, tokens=len(ids))) == {}
    rows = {split: CausalRows(made, split, 2) for split in TEXT}
    assert "1 tokens are unknown, so bits per byte are undefined" in task().describe(rows)


def test_what_is_counted_is_said(corpus: PreparedCorpus) -> None:
    rows = {split: CausalRows(corpus, split, 6, 3) for split in ("valid", "test")}
    said = task().describe({"train": CausalRows(corpus, "train", 6, seed=1), **rows})
    assert (
        "; valid: each of 34 tokens is predicted once, in windows that begin every 3 tokens; "
        "34 bytes and 13 words, the end of a line counted as one of each" in said
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"evaluation_stride": 0}, r"data\.evaluation_stride is 0: 1 to data\.window 128 needed"),
        ({"evaluation_stride": 129}, r"data\.evaluation_stride is 129: 1 to data\.window 128"),
        (
            {"evaluation_stride": 5, "task": "masked_lm"},
            r"data\.evaluation_stride is 5: data\.task 'masked_lm' has no windows that could",
        ),
        ({"tokenizer": "char", "vocab_size": 50}, r"data\.vocab_size is 50: .*'char' has every"),
        ({"tokenizer": "byte", "vocab_size": 261}, r"data\.vocab_size is 261: .*'byte' has every"),
        ({"tokenizer": "bpe"}, r"data\.vocab_size is null"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"task": "causal_lm", "tokenizer": "char", "vocab_size": None}
    with pytest.raises(UserError, match=said):
        DataConfig(**given | fields)


def test_too_short_a_split_is_refused(corpus: PreparedCorpus) -> None:
    with pytest.raises(UserError, match=r"data\.window is 5000, but the train split has"):
        CausalRows(corpus, "train", 5000, seed=1)


def test_label_smoothing_is_off_by_default() -> None:
    assert task().config.smoothing == 0.0
    assert ObjectiveConfig(kind="causal_lm", label_smoothing=0.2).smoothing == 0.2
    assert ObjectiveConfig().smoothing == 0.1


def test_wikitext2_has_the_published_counts(shared_data: Path, tmp_path: Path) -> None:
    """Merity et al. 2017 count 2,088,628 / 217,646 / 245,569 tokens, the end of a line one."""
    made = prepare(
        DataConfig(
            name="wikitext2",
            task="causal_lm",
            tokenizer="byte",
            vocab_size=None,
            root=str(shared_data / "wikitext-2"),
            cache=str(tmp_path / "cache"),
        )
    )
    words = [made.meta["text"][split]["words"] for split in ("train", "valid", "test")]
    assert words == [2_088_628, 217_646, 245_569]
    assert len(made.ids("valid", "text")) == made.meta["text"]["valid"]["bytes"]
    assert "blank lines left out" not in made.meta["protocol"]


def test_tinyshakespeare_is_the_split_of_nanogpt(shared_data: Path, tmp_path: Path) -> None:
    made = prepare(
        DataConfig(
            name="tinyshakespeare",
            task="causal_lm",
            tokenizer="char",
            vocab_size=None,
            root=str(shared_data / "tinyshakespeare"),
            cache=str(tmp_path / "cache"),
        )
    )
    assert made.meta["protocol"].endswith(", nanoGPT's split")
    # 65 characters: the end of a line is EOS here, and four other ids are special.
    assert made.meta["vocab_size"] == 64 + 5
    assert len(made.ids("valid", "text")) == 111_540
    assert made.meta["unknown_rate"]["valid"]["text"] == 0
