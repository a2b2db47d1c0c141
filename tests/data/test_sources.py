import gzip
import lzma
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_app.core.errors import UserError
from lightning_app.data import sources
from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.sources import (
    corpus_digest,
    locate,
    read,
    read_lines,
    require_test,
    write_list,
)
from tests.told import told


def load(config: DataConfig):
    return read(locate(config), config)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_files_may_be_compressed(write_pairs, text_config, suffix: str):
    root = write_pairs()
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    for path in list(root.iterdir()):
        data = path.read_bytes()
        path.unlink()
        path.with_name(path.name + suffix).write_bytes(pack(data))
    corpus = load(text_config(root))
    assert corpus.splits["train"][0]["source"] == "der hund sieht die katze ."
    assert len(corpus.splits["valid"]) == 60


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("one\u2028 one\x85\x0bone\r\n\ntwo\n", ["one\u2028 one\x85\x0bone", "", "two"]),
        ("\ufeffone\ntwo", ["one", "two"]),
    ],
)
def test_lines_end_at_newline_only(tmp_path: Path, content: str, lines: list[str]):
    """The last one needs no newline, and a byte order mark is no text."""
    path = tmp_path / "x"
    path.write_bytes(content.encode())
    assert read_lines(path) == lines


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_invalid_utf8_names_file_and_line(tmp_path: Path, bom: bytes):
    path = tmp_path / "train.de"
    path.write_bytes(bom + b"gut\nauch gut\nk\xf6nig\n")
    with pytest.raises(UserError, match=r"train\.de: line 3.*UTF-8 \(byte 0xf6\)"):
        read_lines(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_archive_is_refused(tmp_path: Path, suffix: str):
    path = tmp_path / f"train.de{suffix}"
    whole = {".gz": gzip.compress, ".xz": lzma.compress}[suffix](b"line\n" * 1000)
    for data in (whole[:-12], b"no archive at all"):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"train\.de"):
            read_lines(path)


def test_missing_file_or_folder_is_named(write_pairs, text_config, tmp_path: Path, monkeypatch):
    root = write_pairs()
    (root / "valid.en").unlink()
    with pytest.raises(UserError, match=r"valid\.en\[\.gz\|\.xz\]"):
        load(text_config(root))
    with pytest.raises(UserError, match=r"data\.root:"):
        load(text_config(root / "nowhere"))
    monkeypatch.setenv("LIGHTNING_APP_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"LIGHTNING_APP_DATA:.*iwslt14_deen"):
        locate(DataConfig(name="iwslt14"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"valid_en": ["a", "b"]}, r"valid\.de has 60.*valid\.en has 2 lines"),
        ({"test_de": []}, r"test\.de: empty"),
        ({"test_de": ["", "  "]}, r"test\.de: empty"),
    ],
)
def test_unequal_and_empty_files_are_refused(write_pairs, text_config, files: dict, said: str):
    with pytest.raises(UserError, match=said):
        load(text_config(write_pairs(**files)))


def test_splits_name_the_stems(write_pairs, text_config):
    root = write_pairs()
    for language in ("de", "en"):
        (root / f"test.{language}").rename(root / f"flickr_2016.{language}")
    found = load(text_config(root, splits=Splits(test="flickr_2016"))).splits
    assert found.keys() == {"train", "valid", "test"}


@pytest.mark.parametrize("suffix", [".en", ".txt"])
def test_one_language(tmp_path: Path, text_config, suffix: str):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}{suffix}").write_text(f"{split} line\n")
    corpus = load(text_config(tmp_path, task="masked_lm"))
    assert corpus.splits["valid"][:] == {"text": ["valid line"]}


@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "de")])
def test_synthetic_goes_both_ways_and_has_english_alone(source: str, target: str):
    splits = load(DataConfig(source_language=source, target_language=target)).splits
    german, english = ("source", "target") if source == "de" else ("target", "source")
    words = ("Der", "der", "Die", "die", "ein", "mein", "ich", "Er")
    assert any(word in splits["train"][0][german] for word in words)
    alone = load(DataConfig(task="masked_lm")).splits["valid"]["text"]
    assert alone[:] == splits["valid"][english][:]


def test_iwslt14_real(shared_data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIGHTNING_APP_DATA", str(shared_data))
    corpus = load(DataConfig(name="iwslt14"))
    assert len(corpus.splits["valid"]) == 7283
    assert len(corpus.splits["test"]) == len(corpus.references["test"]) == 6750
    assert "fairseq's splits" in corpus.protocol
    assert "verified by checksum" in corpus.protocol
    assert told(f"{len(corpus.splits['train']):,} … 160,239 pairs").search(corpus.protocol)
    line = "We're all born. We all bring our children into the world."
    assert corpus.references["test"][3] == line


@pytest.mark.parametrize(
    ("folder", "splits", "sizes"),
    [
        ("tatoeba_deen", Splits(), (161_813, 4_000, 4_000)),
        ("multi30k_deen", Splits(valid="val", test="test_2016_flickr"), (29_000, 1_014, 1_000)),
    ],
)
def test_text_real(shared_data: Path, folder: str, splits: Splits, sizes: tuple[int, ...]):
    config = DataConfig(name="text", root=str(shared_data / folder), splits=splits)
    assert tuple(len(of) for of in load(config).splits.values()) == sizes


def test_digest_of_a_corpus_is_of_its_content_and_not_of_its_place(write_pairs, text_config):
    root = write_pairs()
    config = text_config(root)
    digest = corpus_digest(config)
    assert len(digest or "") == 64
    moved = shutil.copytree(root, root.with_name("moved"))
    assert corpus_digest(replace(config, root=str(moved))) == digest
    (moved / "protocol.txt").write_text("notes of a download")
    assert corpus_digest(replace(config, root=str(moved)), fetch=False) == digest
    path = moved / "valid.en"
    path.write_bytes(path.read_bytes().replace(b"dog", b"dig", 1))
    assert corpus_digest(replace(config, root=str(moved))) != digest
    # It knows which file is which.
    config = text_config(write_pairs(test_de=["x"], test_en=["x"], valid_de=["y"], valid_en=["y"]))
    swapped = replace(config, splits=Splits(valid="test", test="valid"))
    assert corpus_digest(config) != corpus_digest(swapped)


def test_digest_downloads_nothing_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A download that is there has one."""
    with monkeypatch.context() as offline:
        offline.setattr(sources, "fetch", lambda *_: pytest.fail("downloaded"))
        for given in (
            DataConfig(name="iwslt14"),
            DataConfig(name="iwslt14", root="hf://someone/talks"),
            DataConfig(name="wikitext2", task="masked_lm"),
        ):
            assert corpus_digest(replace(given, cache=str(tmp_path)), fetch=False) is None
        assert corpus_digest(DataConfig()) == corpus_digest(DataConfig(seed=7), fetch=False)
    downloads = tmp_path / "downloads" / "wikitext2-Salesforce--wikitext"
    downloads.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (downloads / f"wiki.{split}.tokens").write_text("a b\n")
    write_list(downloads)
    config = DataConfig(name="wikitext2", task="masked_lm", cache=str(tmp_path))
    assert corpus_digest(config, fetch=False) == corpus_digest(config)


def test_digest_needs_neither_torch_nor_lightning():
    code = """
import sys
from lightning_app.data.config import DataConfig
from lightning_app.data.sources import corpus_digest
corpus_digest(DataConfig())
assert not {"torch", "lightning", "numpy", "datasets"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_corpus_may_have_no_test_files(write_pairs, text_config, tmp_path: Path):
    """Only who evaluates that split needs it; half of one is a mistake."""
    root = write_pairs()
    (root / "test.en").unlink()
    require_test(text_config(root))
    with pytest.raises(UserError, match=r"has no file test\.en"):
        load(text_config(root))
    (root / "test.de").unlink()
    corpus = load(text_config(root))
    assert list(corpus.splits) == ["train", "valid"]
    assert "test" not in corpus.protocol
    talks = load(DataConfig(name="iwslt14", root=str(root)))
    assert talks.protocol.startswith("local files named as IWSLT14: 60 / 60 lines; valid.de")
    with pytest.raises(UserError, match=r"splits\.test: .* no file test\.de\[.* and test\.en\["):
        require_test(text_config(root))
    for split in ("train", "valid"):
        (tmp_path / f"wiki.{split}.tokens").write_text("a b\n")
    config = DataConfig(name="wikitext2", task="masked_lm", root=str(tmp_path))
    assert "<unk>: 1 / 1 lines" in load(config).protocol
    with pytest.raises(UserError, match=r"no file wiki\.test\.tokens"):
        require_test(config)
