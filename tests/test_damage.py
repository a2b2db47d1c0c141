"""A flipped bit, or other data than before: found by every command before it does anything."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_app.cli import main
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import prepare
from lightning_app.runs.records import sealed
from lightning_app.training.checkpoint import WholeCheckpoints
from lightning_app.training.run import run_cell
from tests.bits import flip
from tests.small import write_config, write_corpus
from tests.told import told

pytestmark = [
    pytest.mark.xdist_group("damage"),  # the trained cell is made once
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # in a copy of the run it has
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # to evaluate only
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    write_corpus(root)
    write_config(root)
    run_cell(root / "run", 1)
    return root


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where each path is its own; the corpus's name in the cache stays."""
    copy = shutil.copytree(trained, tmp_path / "copy")
    write_config(copy)
    result = copy / "run" / "result.json"
    result.write_text(json.dumps(sealed(json.loads(result.read_text()), copy / "run")))
    monkeypatch.chdir(copy)
    return copy


LAST = ["--ckpt_path", "last"]
COMMANDS = {
    "fit": ["fit", "--config", "config.yaml", *LAST, "--trainer.max_steps", "6"],
    "validate": ["validate", "--config", "config.yaml", *LAST],
    "test": ["test", "--config", "config.yaml", *LAST],
    "predict": ["predict", "--config", "config.yaml", *LAST],
    "probe": ["probe", "--config", "run/config.yaml", "--checkpoint", "last", "--batches", "1"],
    "translate": ["translate", "--run", "run", "--input", "corpus/test.de", "--checkpoint", "last"],
}
with_data = pytest.mark.parametrize("command", [name for name in COMMANDS if name != "translate"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(command: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    before = contents(folder / "run")
    capsys.readouterr()
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert contents(folder / "run") == before
    (line,) = said.err.splitlines()
    return line


def prepared(root: Path) -> Path:
    places: Any = {"root": str(root / "corpus"), "cache": str(root / "cache")}
    return prepare(DataConfig(name="text", tokenizer="word", vocab_size=None, **places)).folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flipped_bit_in_a_checkpoint_is_refused(command: str, folder: Path, capsys) -> None:
    flip(folder / "run" / "checkpoints" / "last.ckpt", random.Random(command))
    assert "last.ckpt: damaged:" in refused(COMMANDS[command], capsys, folder)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_sound_checkpoint_is_taken(command: str, folder: Path, capsys) -> None:
    """Or the tests above would pass with a program that refuses everything."""
    assert main(COMMANDS[command]) == 0
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.in_turn(2)
@with_data
def test_a_flipped_bit_in_the_cache_is_mended_first(command: str, folder: Path, capsys) -> None:
    cached = prepared(folder)
    whole = contents(cached)
    flip(cached / "valid.target.ids.npy", random.Random(command))
    assert main(COMMANDS[command]) == 0
    assert contents(cached) == whole
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert said == [
        f"{cached}: damaged: valid.target.ids.npy is not as it was written; renamed to "
        f"{cached.name}.damaged and made again"
    ]


def edit(folder: Path) -> None:
    path = folder / "corpus" / "train.de"
    path.write_bytes(path.read_bytes().replace(b"hund", b"wolf", 1))


@with_data
def test_a_checkpoint_of_other_data_is_refused(command: str, folder: Path, capsys) -> None:
    there = json.loads((folder / "run" / "result.json").read_text())["data"]["digest"]
    edit(folder)
    line = refused(COMMANDS[command], capsys, folder)
    said = f"last.ckpt: … data: … {there[:16]}, … "
    if command == "fit":  # refuses the folder before its checkpoint
        said = "run: holds another run (it was trained on other files of the corpus; "
    assert told(said).search(line)


def test_a_checkpoint_that_knows_no_data_is_refused(folder: Path, capsys) -> None:
    path = folder / "run" / "checkpoints" / "last.ckpt"
    stored = torch.load(path, weights_only=True)
    del stored["TextDataModule"]
    WholeCheckpoints().save_checkpoint(stored, path)
    assert f"{path}: does not record" in refused(COMMANDS["test"], capsys, folder)


def test_translate_takes_no_other_tokenizer_than_the_run_had(folder: Path, capsys) -> None:
    flip(folder / "run" / "tokenizer.model", random.Random(1))
    line = refused(COMMANDS["translate"], capsys, folder)
    assert told("run/tokenizer.model: … last.ckpt").search(line)
