"""Windows of a running text, each token predicted once, and the scores of its bytes and words."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.config.config import resolve
from lightning_app.config.experiment import cell_id
from lightning_app.core.errors import UserError
from lightning_app.data.config import CORPORA, DataConfig
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import EOS, PAD, UNK
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.loss import Evaluated, ObjectiveConfig
from lightning_app.tasks.base import build_task, to_device
from lightning_app.tasks.causal_lm import CausalBatch, CausalLanguageModelling, CausalRows
from tests import tiny
from tests.tasks.conftest import TEXT


def task() -> CausalLanguageModelling:
    made = build_task(ObjectiveConfig(kind="causal_lm"))
    assert isinstance(made, CausalLanguageModelling)
    return made


def everything(rows: CausalRows) -> Any:
    return rows[0, np.arange(len(rows))]


def test_the_text_is_read_as_it_is(corpus: PreparedCorpus, root: Path, text_config) -> None:
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
    # A carriage return before the end of a line is no text.
    (root / "valid.txt").write_bytes(b"the cat\r\nthe dog\r\n")
    made = prepare(text_config(root, task="causal_lm", tokenizer="char"))
    assert made.meta["text"]["valid"] == {"bytes": 16, "words": 6}


@pytest.mark.parametrize("window", [2, 5, 7])
def test_training_predicts_each_token_from_the_last(corpus: PreparedCorpus, window: int) -> None:
    rows = CausalRows(corpus, "train", window, seed=1)
    ids = np.asarray(corpus.ids("train", "text")).astype(np.int64)
    batch = everything(rows)
    whole = len(ids) // window * window
    assert (len(rows), rows.remainder) == (whole // window, len(ids) - whole)
    assert batch.labels.flatten().tolist() == ids[:whole].tolist()
    assert batch.tokens.flatten().tolist() == [EOS, *ids[: whole - 1]]
    assert batch.predicted_tokens == whole
    assert rows.targets().tolist() == ids[:whole].tolist()


def test_random_windows_are_from_anywhere_and_others_in_every_epoch(corpus) -> None:
    """As many as without overlap; two ranks and a resumed run draw the same."""
    window = 5
    rows = CausalRows(corpus, "train", window, seed=1, anywhere=True)
    ids = np.asarray(corpus.ids("train", "text")).tolist()
    text = [EOS, *ids]
    begins: list[set[int]] = []
    for epoch in (0, 1, 0):
        batch = rows[epoch, np.arange(len(rows))]
        assert batch.predicted_tokens == len(rows) * window
        spans = {tuple(text[place : place + window + 1]): place for place in range(len(ids))}
        found = set()
        for seen, wanted in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            assert seen[1:] == wanted[:-1]
            found.add(spans[(*seen, wanted[-1])])
        begins.append(found)
    assert begins[0] == begins[2] != begins[1]
    assert {begin % window for begin in begins[0]} == set(range(window))
    assert rows.remainder == 0
    assert rows.reading() == f"windows of {window} tokens that begin at random places"
    assert rows.targets().tolist() == ids
    ranks = [CausalRows(corpus, "train", window, None, 1, r, 2, anywhere=True) for r in (0, 1)]
    parts = [rank[1, np.array([4, 1, 3])].tokens.tolist() for rank in ranks]
    whole = rows[1, np.array([4, 1, 3])].tokens.tolist()
    assert [parts[0][0], parts[1][0], parts[0][1]] == whole
    evaluated = CausalRows(corpus, "valid", window, None, None, anywhere=True)
    plain = CausalRows(corpus, "valid", window)
    assert torch.equal(everything(evaluated).tokens, everything(plain).tokens)


@pytest.mark.parametrize("window", [3, 7, 100])
@pytest.mark.parametrize("stride", [1, 2, 3, None])
def test_evaluation_predicts_each_token_once_with_its_context(corpus, window, stride) -> None:
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


def test_batches_have_as_many_windows_as_the_budget_allows(corpus: PreparedCorpus) -> None:
    blank = CausalRows(corpus, "train", 6, None, 1, 2, 3)[0, np.array([4, 1])]
    assert (blank.index.tolist(), blank.labels.tolist()) == ([-1], [[PAD]])
    sizes = [len(of) for _, of in CausalRows(corpus, "train", 6, seed=1).sampler(20)]
    assert sizes[:-1] == [3] * (len(sizes) - 1)
    strides = [len(of) for _, of in CausalRows(corpus, "valid", 6, 2).sampler(20)]
    assert strides[0] == 1
    assert set(strides[1:-1]) == {3}
    # The first window predicts more than the others also where it is not alone.
    batch = everything(CausalRows(corpus, "valid", 6, 2))
    assert batch.labels[batch.labels != PAD].tolist() == corpus.ids("valid", "text").tolist()
    with pytest.raises(UserError, match=r"data\.window is 5000"):
        CausalRows(corpus, "train", 5000, seed=1)


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
def test_bits_per_byte_and_perplexity_by_hand(root: Path, text_config, tokenizer: str) -> None:
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
    assert "1 tokens are" in task().describe(rows)


DOCUMENTS = "\n\none\ntwo\n\n  \nthree\n\nfour\nfive\n"
"""Three documents: the blank lines before the first are a part of it, all others end one."""


@pytest.fixture
def documents(root: Path, text_config) -> PreparedCorpus:
    for split in TEXT:
        (root / f"{split}.txt").write_text(DOCUMENTS)
    return prepare(text_config(root, task="causal_lm", tokenizer="char"))


def spelled(corpus: PreparedCorpus, ids: Any) -> str:
    return "".join("\n" if i == EOS else corpus.tokenizer.decode([i]) for i in ids)


def test_documents_end_with_their_separators(documents: PreparedCorpus) -> None:
    ids = np.asarray(documents.ids("valid", "text")).tolist()
    begins = [*documents.documents("valid").tolist(), len(ids)]
    parts = [ids[begin:end] for begin, end in pairwise(begins)]
    texts = ["".join(spelled(documents, part).split()) for part in parts]
    assert texts == ["onetwo", "three", "fourfive"]
    assert [part.count(EOS) for part in parts] == [6, 2, 2]
    assert documents.meta["documents"] == {"train": 3, "valid": 3, "test": 3}


@pytest.mark.parametrize(
    ("lines", "begins"),
    [("a|b|---|c|---|---|d|---", [0, 3, 6]), ("---|a|--- |b", [0, 3]), ("a||b", [0]), ("---", [0])],
)
def test_a_stated_separator(lines: str, begins: list[int]) -> None:
    given: dict[str, Any] = {"document_separator": "---", "vocab_size": 9}
    config = DataConfig(name="text", task="causal_lm", root=".", **given)
    assert CORPORA["text"]().documents(config, lines.split("|")) == begins


def test_the_separator_is_a_part_of_the_prepared_corpus(root: Path, text_config) -> None:
    for split in TEXT:
        (root / f"{split}.txt").write_text("a\n\nb\n---\nc\n\nd\n" * 3)
    found = []
    for separator in ("", "---"):
        config = text_config(root, task="causal_lm", document_separator=separator)
        found.append(prepare(config).documents("train").tolist())
    assert found == [[0, 3, 10, 15, 22, 27, 34], [0, 7, 19, 31]]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("masked", "positions", "window", "stride"),
    [
        (False, "sinusoidal", 9, 3),
        *((True, "sinusoidal", *each) for each in ((9, None), (9, 3), (50, None))),
        *((True, "learned", *each) for each in ((9, None), (9, 3), (50, None))),
    ],
)
def test_windows_give_the_loss_of_an_explicit_loop(
    request: pytest.FixtureRequest, masked: bool, positions: str, window: int, stride: int | None
) -> None:
    """Each token once, from those of its window, and of its document if masked."""
    made = request.getfixturevalue("documents" if masked else "corpus")
    rows = CausalRows(made, "valid", window, stride, masked=masked)
    model: Any = task().build_model(
        tiny.architecture(kind="decoder", positions=positions),
        BlockConfig(),
        made.meta["vocab_size"],
    )
    tiny.randomise(model).eval()
    ids = np.asarray(made.ids("valid", "text")).tolist()
    begins = made.documents("valid").tolist() if masked else []
    text, expected, step = [EOS, *ids], 0.0, stride or window
    with torch.no_grad():
        for place, token in enumerate(ids):
            later = max(0, place + 1 - window)
            begin = max(-(-later // step) * step, *(b for b in begins if b <= place), 0)
            if stride is None:
                begin = max(place // window * window, begin)
            logits = model(torch.tensor([text[begin : place + 1]]))[0, -1]
            expected -= float(logits.log_softmax(dim=-1)[token])
        found = [task().sums(model, rows[0, wanted]) for _, wanted in rows.sampler(40)]
    assert sum(float(of.nll) for of in found) == pytest.approx(expected, rel=1e-12)
    assert sum(int(of.tokens) for of in found) == len(ids)


def test_batches_say_the_document_of_each_token(documents: PreparedCorpus) -> None:
    """Also to a rank without windows, in windows alone, and in a cut one."""
    batch = everything(CausalRows(documents, "train", 7, seed=1, masked=True))
    begins = documents.documents("train")
    labels = [int(sum(begins <= place)) - 1 for place in range(batch.labels.numel())]
    assert batch.documents.flatten().tolist() == labels
    blank: Any = CausalRows(documents, "train", 7, None, 1, 2, 3, masked=True)[0, np.array([1, 0])]
    assert blank.documents.tolist() == [[0]]
    alone: Any = task().alone(batch, 9)
    assert alone.documents.tolist() == batch.documents[1:2, :3].tolist()
    model: Any = tiny.randomise(tiny.causal_model("pre_ln", max_positions=7))
    words = batch._replace(tokens=tiny.words(*batch.tokens.shape))
    whole = task().predictions(model, words).logits[9]
    torch.testing.assert_close(task().predictions(model, task().alone(words, 9)).logits[-1], whole)
    assert torch.equal(to_device(batch, torch.device("cpu")).documents, batch.documents)
    joined = everything(CausalRows(documents, "train", 7, seed=1))
    assert joined.documents is None
    assert to_device(joined, torch.device("cpu")).documents is None
    assert torch.equal(joined.tokens, batch.tokens)
    assert torch.equal(joined.labels, batch.labels)


def test_a_training_split_of_one_document_is_refused(root: Path, text_config) -> None:
    (root / "train.txt").write_text("the dog\nthe cat\n" * 9)
    made = prepare(text_config(root, task="causal_lm"))
    with pytest.raises(UserError, match=r"true,.*; it must be false"):
        CausalRows(made, "train", 6, seed=1, masked=True)


MASKED, TRUE = {"intra_document_masking": True}, r"data\.intra_document_masking is true: "
SPLIT, SEPARATOR = {"document_separator": "---"}, r"data\.document_separator is "
OWN = {"name": "text", "root": "."}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**MASKED, "task": "masked_lm"}, rf"{TRUE}data\.task 'masked_lm'"),
        ({**MASKED, "name": "tinyshakespeare"}, rf"{TRUE}data\.name 'tinyshakespeare'"),
        ({**MASKED, "name": "synthetic"}, rf"{TRUE}data\.name 'synthetic'"),
        ({**MASKED, "name": "wikitext2", "order": "streams"}, rf"{TRUE}data\.order 'streams'"),
        ({**SPLIT, "name": "wikitext2"}, rf"{SEPARATOR}'---': data\.name 'wikitext2' and"),
        ({**SPLIT, **OWN, "task": "masked_lm"}, rf"{SEPARATOR}'---':.*data\.task 'masked_lm'"),
        ({"order": "random", "task": "masked_lm"}, r"data\.order is 'random': .*'masked_lm'"),
        ({"document_separator": "-\n-", **OWN}, rf"{SEPARATOR}'-\\n-'"),
        ({"evaluation_stride": 0}, r"data\.evaluation_stride is 0; .* 1 to data\.window 128"),
        ({"evaluation_stride": 129}, r"data\.evaluation_stride is 129; .* 1 to data\.window 128"),
        ({"evaluation_stride": 5, "task": "masked_lm"}, r"stride is 5: data\.task 'masked_lm'"),
        ({"tokenizer": "char", "vocab_size": 50}, r"data\.vocab_size is 50: .*'char' has every"),
        ({"tokenizer": "byte", "vocab_size": 261}, r"data\.vocab_size is 261: .*'byte' has every"),
        ({"tokenizer": "bpe"}, r"data\.vocab_size is null"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"task": "causal_lm", "tokenizer": "char", "vocab_size": None}
    with pytest.raises(UserError, match=said):
        DataConfig(**given | fields)


def masked_config(root: Path, **block: Any) -> dict[str, Any]:
    """Return a config whose windows mask documents, as a user writes it."""
    return {
        "trainer": {"max_steps": 3},
        "model": {
            "block": {"preset": "pre_ln", **block},
            "architecture": {"kind": "decoder", "decoder_depth": 1, "model_dim": 8, "ff_dim": 8},
            "objective": {"kind": "causal_lm"},
            "schedule": {"warmup_steps": 0},
        },
        "data": {
            **{"name": "text", "root": str(root), "cache": str(root / "cache"), "window": 6},
            **{"tokenizer": "char", "vocab_size": None, "intra_document_masking": True},
        },
    }


def test_blocks_of_queries_are_refused_with_documents_and_ids_tell_them(root: Path) -> None:
    """They would lie elsewhere in a document than if it were alone; a sliding window does not."""
    span = {"query_block": 2, "memory": 4}
    said = r"masking with localised_span query_block 2: .* query_block 1$"
    with pytest.raises(UserError, match=said):
        resolve(masked_config(root, localised_span=span), "mine.yaml")
    joined = masked_config(root, localised_span=span)
    joined["data"]["intra_document_masking"] = False
    resolve(joined, "mine.yaml")
    resolve(masked_config(root, localised_span={**span, "query_block": 1}), "mine.yaml")
    masked, joined = masked_config(root), masked_config(root)
    del joined["data"]["intra_document_masking"]
    one, two = (cell_id(resolve(tree, "x.yaml")) for tree in (masked, joined))
    assert one != two


def test_label_smoothing_is_off_by_default() -> None:
    assert task().config.smoothing == 0.0
    assert ObjectiveConfig(kind="causal_lm", label_smoothing=0.2).smoothing == 0.2
    assert ObjectiveConfig().smoothing == 0.1


def real(folder: Path, cache: Path, name: str, tokenizer: Any) -> PreparedCorpus:
    where = {"root": str(folder), "cache": str(cache / "cache"), "vocab_size": None}
    return prepare(DataConfig(name=name, task="causal_lm", tokenizer=tokenizer, **where))


@pytest.mark.slow
# Over 5 s: ten million bytes.
def test_wikitext2_has_the_published_counts(shared_data: Path, tmp_path: Path) -> None:
    """Merity et al. 2017: 2,088,628 / 217,646 / 245,569 tokens, the end of a line one; articles."""
    made = real(shared_data / "wikitext-2", tmp_path, "wikitext2", "byte")
    words = [made.meta["text"][split]["words"] for split in ("train", "valid", "test")]
    assert words == [2_088_628, 217_646, 245_569]
    assert len(made.ids("valid", "text")) == made.meta["text"]["valid"]["bytes"]
    assert "blank lines left out" not in made.meta["protocol"]
    assert made.meta["documents"] == {"train": 600, "valid": 60, "test": 60}
    ids = made.ids("test", "text")
    titles = [spelled(made, ids[i : i + 40]) for i in made.documents("test").tolist()]
    assert titles[0].startswith("\n= Robert <unk> =\n\n")
    assert titles[1].startswith("= Du Fu =\n\n")
    assert all(title.startswith("= ") and title[2] != "=" for title in titles[1:])


def test_tinyshakespeare_is_the_split_of_nanogpt(shared_data: Path, tmp_path: Path) -> None:
    made = real(shared_data / "tinyshakespeare", tmp_path, "tinyshakespeare", "char")
    assert made.meta["protocol"].endswith(", nanoGPT's split")
    # 65 characters: the end of a line is EOS here, and four other ids are special.
    assert made.meta["vocab_size"] == 64 + 5
    assert len(made.ids("valid", "text")) == 111_540
    assert made.meta["unknown_rate"]["valid"]["text"] == 0
