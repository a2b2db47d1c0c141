"""One changed bit anywhere in the cache is found before anything is read from it."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.corpora import iwslt14
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.sources import LIST, corpus_digest, find_damage, locate
from lightning_app.training.datamodule import TextDataModule
from tests.bits import flip


@pytest.fixture
def corpus(write_pairs, text_config) -> PreparedCorpus:
    return prepare(text_config(write_pairs()))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_flipped_bit_in_any_file_is_found(corpus: PreparedCorpus) -> None:
    """200 of them, wherever they fall, and each file at least once."""
    files = sorted(corpus.folder.iterdir())
    chance = random.Random(13)
    chosen = [*files, *chance.choices(files, k=200 - len(files))]
    for path in chosen:
        whole = path.read_bytes()
        bit = flip(path, chance)
        assert find_damage(corpus.folder) is not None, (path.name, bit)
        path.write_bytes(whole)
    assert find_damage(corpus.folder) is None


@pytest.mark.parametrize("name", ["train.source.ids.npy", "meta.json", LIST])
def test_a_damaged_folder_is_put_aside_and_made_again(corpus, text_config, tmp_path, capsys, name):
    whole = contents(corpus.folder)
    flip(corpus.folder / name, random.Random(1))
    spoilt = contents(corpus.folder)
    again = prepare(text_config(tmp_path / "corpus"))
    assert again.folder == corpus.folder
    assert again.digest == corpus.digest
    assert contents(again.folder) == whole
    aside = corpus.folder.with_name(f"{corpus.folder.name}.damaged")
    assert contents(aside) == spoilt
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"{corpus.folder}: damaged: " in said[0]
    assert f"{aside.name}" in said[0]


@pytest.mark.parametrize("name", ["valid.source.txt", LIST])
def test_a_missing_file_is_damage(corpus: PreparedCorpus, name: str) -> None:
    (corpus.folder / ".nfs0001").touch()  # hidden files of others do no harm
    assert find_damage(corpus.folder) is None
    (corpus.folder / name).unlink()
    assert find_damage(corpus.folder) is not None


def test_damage_in_a_read_only_folder_is_named(corpus, text_config, tmp_path, monkeypatch) -> None:
    flip(corpus.folder / "valid.target.txt", random.Random(1))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match=r"valid\.target\.txt"):
        prepare(text_config(tmp_path / "corpus"))


def test_the_digest_is_of_the_data_and_not_of_its_place(corpus, text_config, tmp_path) -> None:
    assert len(corpus.digest) == 64
    root, cache = tmp_path / "corpus", str(tmp_path / "elsewhere")
    assert prepare(text_config(root, cache=cache)).digest == corpus.digest
    path = root / "valid.de"
    path.write_bytes(path.read_bytes().replace(b"hund", b"wolf", 1))
    assert prepare(text_config(root)).digest != corpus.digest


def test_a_run_verifies_its_data_once(corpus: PreparedCorpus, tmp_path: Path, monkeypatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr("lightning_app.data.prepare.find_damage", seen.append)
    places: Any = {"root": str(tmp_path / "corpus"), "cache": str(tmp_path / "cache")}
    data = TextDataModule(name="text", tokenizer="word", vocab_size=None, **places)
    data.prepare_data()
    for stage in ("fit", "validate", "test"):
        data.setup(stage)
    assert seen == [corpus.folder]


def test_damaged_downloads_return(write_pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(iwslt14, "_unpack", lambda *given: _copy(write_pairs(), given[-1]))
    config = DataConfig(name="iwslt14", cache=str(tmp_path / "cache"))
    path = locate(config).columns["valid"]["source"]
    whole, digest = path.read_bytes(), corpus_digest(config, fetch=False)
    assert digest is not None
    flip(path, random.Random(1))
    assert corpus_digest(config, fetch=False) is None
    assert corpus_digest(config) == digest
    assert path.read_bytes() == whole


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
