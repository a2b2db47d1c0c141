"""Files of token ids, and tokenizers made by the libraries themselves."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lightning_app.core.errors import UserError
from lightning_app.data import tokenizer
from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.prepare import corpus_summary, prepare, shifted
from lightning_app.data.sources import known_digest
from lightning_app.data.tokenizer import Ready, load_tokenizer, unigram_entropy
from lightning_app.tasks import causal_lm
from lightning_app.tasks.causal_lm import CausalRows
from lightning_app.training.datamodule import TextDataModule

SPECIALS = 5
IDS = np.random.default_rng(0).integers(0, 300, 5000)


@pytest.fixture(scope="session")
def lines() -> list[str]:
    splits = TextDataModule(tokenizer="word", vocab_size=None).corpus
    return [*splits.lines("valid", "source"), *splits.lines("valid", "target")]


@pytest.fixture(scope="session")
def files(tmp_path_factory, lines) -> dict[str, Path]:
    """A tokenizer.json that encodes bytes, and SentencePiece's own default model."""
    folder = tmp_path_factory.mktemp("ready")
    whole = tokenizers.Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    whole.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    whole.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    whole.enable_truncation(3)  # a setting of the file that must not cut a text
    whole.save(str(folder / "tokenizer.json"))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=120, minloglevel=2
    )
    (folder / "x.model").write_bytes(model.getvalue())
    return {"json": folder / "tokenizer.json", "pieces": folder / "x.model"}


def ids_of(file: Path, lines: list[str]) -> list[list[int]]:
    if file.suffix == ".json":
        theirs = tokenizers.Tokenizer.from_file(str(file))
        theirs.no_truncation()
        return [theirs.encode(line, add_special_tokens=False).ids for line in lines]
    return sentencepiece.SentencePieceProcessor(model_file=str(file)).encode(lines)


@pytest.mark.parametrize("kind", ["json", "pieces"])
def test_a_ready_tokenizer_gives_the_ids_of_its_library(files, lines, kind):
    many = [f"{line} {i}" for i, line in enumerate((lines * 11)[:10_000])]
    ours, theirs = load_tokenizer(files[kind]), ids_of(files[kind], many)
    assert [[i - SPECIALS for i in ours.encode(line)] for line in many] == theirs
    assert max(map(max, theirs)) + SPECIALS < ours.vocab_size
    known = [line for line in lines if kind == "json" or SPECIALS not in ours.encode(line)]
    assert len(known) > 900
    assert [ours.decode([1, *ours.encode(line), 3]) for line in known] == known
    text = "das haus , das große haus"
    offsets = ours.offsets(text)
    assert offsets.ids.tolist() == ours.encode(text)
    assert offsets.text_of(*offsets.pieces_of(11, 14)) == "das"


def test_pieces_that_drop_characters_have_no_offsets():
    dropping = Ready(9, lambda text: ([1, 2], [0, 5], [3, 8]), str)
    assert len(dropping.offsets("ein  tag")) == 2
    with pytest.raises(UserError, match=r"data\.tokenizer_file"):
        dropping.offsets("eins tag")


@pytest.mark.parametrize(("kind", "known"), [("json", True), ("pieces", False)])
def test_bytes_are_known_where_decoding_gives_the_text_back(tmp_path, files, kind, known):
    text = "ein  satz\nund noch einer \n"
    for split in ("train", "valid"):
        (tmp_path / f"{split}.txt").write_text(text * (9 if split == "train" else 1))
    config = DataConfig(
        name="text",
        task="causal_lm",
        root=str(tmp_path),
        tokenizer="file",
        tokenizer_file=str(files[kind]),
        vocab_size=None,
    )
    counts = prepare(config).meta["text"]["valid"]
    assert counts == ({"bytes": len(text), "words": 7} if known else {})
    before = known_digest(config)
    copy = tmp_path / "copy"
    copy.write_bytes(files[kind].read_bytes())
    assert known_digest(replace(config, tokenizer_file=str(copy))) == before
    copy.write_bytes(files["pieces" if known else "json"].read_bytes())
    assert known_digest(replace(config, tokenizer_file=str(copy))) != before


def config_of(root: Path, **fields) -> DataConfig:
    usual = {"tokenizer": "ids", "vocab_size": None, "window": 16, "tokens_per_batch": 64}
    return DataConfig(name="tokens", task="causal_lm", root=str(root), **{**usual, **fields})


def with_header(ids: np.ndarray, kind: str, *numbers: int) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = numbers
    return header.tobytes() + ids.astype(kind).tobytes()


def test_files_of_each_format_hold_the_same_ids(tmp_path):
    half = len(IDS) // 2
    parts = {
        "plain": {"train.bin": IDS.astype("<u2").tobytes()},
        "gpt2": {
            f"x_train_{n}.bin": with_header(part, "<u2", 20240520, 1, half)
            for n, part in enumerate((IDS[:half], IDS[half:]))
        },
        "llama": {"train.bin": with_header(IDS, "<u4", 20240801, 7, len(IDS))},
    }
    for name, contents in parts.items():
        (tmp_path / name).mkdir()
        for file, content in {**contents, "my_val.bin": IDS[:99].astype("<u2").tobytes()}.items():
            (tmp_path / name / file).write_bytes(content)
        corpus = prepare(config_of(tmp_path / name, splits=Splits(valid="my_val")))
        assert np.array_equal(corpus.ids("train", "text"), IDS + SPECIALS)
        assert corpus.meta["vocab_size"] == 300 + SPECIALS
        assert corpus.tokenizer.decode(corpus.ids("valid", "text")[:2]) == f"{IDS[0]} {IDS[1]}"
        assert corpus.tokenizer.encode(f"{IDS[0]} 299") == [IDS[0] + SPECIALS, 304]


def test_written_ids_are_read_as_the_text_is(tmp_path, monkeypatch):
    for split, count in (("train", 40), ("valid", 4)):
        (tmp_path / f"{split}.txt").write_text("ein  satz – so\n\nund noch einer\n" * count)
    shared = {"task": "causal_lm", "vocab_size": None, "window": 16, "tokens_per_batch": 64}
    text = prepare(DataConfig(name="text", root=str(tmp_path), tokenizer="char", **shared))
    text.write_ids(tmp_path / "ids")
    file = str(tmp_path / "ids" / "tokenizer.model")
    read = prepare(config_of(tmp_path / "ids", tokenizer="file", tokenizer_file=file))
    for key in ("vocab_size", "text", "unigram_entropy", "tokens", "tokenizer_sha256"):
        theirs, ours = (corpus.meta[key] for corpus in (text, read))
        if key == "text":
            theirs, ours = theirs["valid"], ours["valid"]
        assert theirs == ours
    monkeypatch.setattr(causal_lm, "_LARGE", 0)  # each batch maps the file again
    ours, theirs = (CausalRows(corpus, "train", 16, seed=1) for corpus in (read, text))
    for place in range(len(ours)):
        item = 0, np.array([place])
        assert all(a.equal(b) for a, b in zip(ours[item][:4], theirs[item][:4], strict=True))
    for corpus, folder in ((prepare(config_of(tmp_path / "ids")), "again"), (text, "ids")):
        with pytest.raises(UserError, match="--tokens"):
            corpus.write_ids(tmp_path / folder)


def test_ids_beyond_a_tokenizer_are_refused_and_its_text_is_shown(tmp_path, files, lines):
    ids = np.concatenate(ids_of(files["json"], lines))
    for split in ("train", "val"):
        ids.astype("<u2").tofile(tmp_path / f"{split}.bin")
    right, wrong = (
        config_of(tmp_path, tokenizer="file", tokenizer_file=str(files[kind]))
        for kind in ("json", "pieces")
    )
    spelled = "".join(lines)
    assert prepare(right).meta["text"]["valid"]["bytes"] == len(spelled.encode())
    with pytest.raises(UserError, match=r"data\.(tokenizer_file|vocab_size)"):
        prepare(wrong)
    assert f"valid begins {lines[0][:30]!r}"[:-1] in corpus_summary(prepare(right), 64)


PLAIN = IDS.astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        (PLAIN[:-1], {}, ["train.bin", "9,999"]),
        (with_header(IDS[1:], "<u2", 20240520, 1, 5000), {}, ["train.bin", "11,024", "5,000"]),
        (with_header(IDS, "<u2", 20240520, 2, 5000), {}, ["train.bin", "version 2"]),
        (with_header(IDS, "<u2", 20240522, 1, 5000), {}, ["train.bin", "20240522"]),
        (b"", {}, ["train.bin", "0 bytes"]),
        (PLAIN, {"vocab_size": 205}, ["train.bin", "199", f"{np.argmax(IDS >= 200):,}"]),
        (PLAIN, {"splits": "test"}, ["val"]),
        (PLAIN, {"tokenizer": "bpe", "vocab_size": 300}, ["data.tokenizer", "'bpe'", "'ids'"]),
        (PLAIN, {"tokenizer": "file"}, ["data.tokenizer_file"]),
        (PLAIN, {"tokenizer": "file", "tokenizer_file": "no.json"}, ["tokenizer_file", "no.json"]),
        (PLAIN, {"task": "masked_lm"}, ["data.name", "'masked_lm'"]),
        (PLAIN, {"intra_document_masking": True}, ["intra_document_masking", "'tokens'"]),
    ],
    ids=range(12),
)
def test_wrong_input_is_named(tmp_path, content, fields, said):
    (tmp_path / "train.bin").write_bytes(content)
    if "splits" not in fields:
        (tmp_path / "val.bin").write_bytes(PLAIN)
    fields = {key: value for key, value in fields.items() if key != "splits"}
    with pytest.raises(UserError) as raised:
        prepare(replace(config_of(tmp_path), **fields))
    assert "\n" not in str(raised.value)
    for word in said:
        assert word in str(raised.value)


@pytest.mark.parametrize("content", [b"{}", b"no model", b""])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=r"file: is not a SentencePiece model or a tokenizer\.json"):
        load_tokenizer(tmp_path / "file")


def test_padding_is_no_token_of_a_text(tmp_path):
    (tmp_path / "train.bin").write_bytes(PLAIN)
    with pytest.raises(UserError, match="is 0, but ids are from 1"):
        list(shifted(tmp_path / "train.bin", 400, 0, "<u2"))


def test_an_entropy_in_parts_is_that_of_the_whole(monkeypatch):
    whole = unigram_entropy(IDS)
    monkeypatch.setattr(tokenizer, "_PLACES", 7)
    assert unigram_entropy(IDS) == whole
