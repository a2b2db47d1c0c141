"""The command `ablate generate`, on a tiny model of characters."""

import json
from pathlib import Path

import pytest
import yaml

from lightning_app.api.trained import ids_of, text_of
from lightning_app.cli import main
from lightning_app.data.prepare import prepare
from lightning_app.data.tokenizer import EOS, Bytes
from tests.runs import data, module, trainer
from tests.told import told


def trained(folder: Path, cache: str, kind: str) -> Path:
    source, fitter = data(cache, kind), trainer(folder, max_steps=3)
    fitter.fit(module(kind), datamodule=source)
    fitter.save_checkpoint(folder / "checkpoints" / "best.ckpt")
    model = prepare(source.config).folder / "tokenizer.model"
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    return trained(tmp_path_factory.mktemp("run"), cache, "causal_lm")


def generated(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    assert main(["generate", "--run", str(run), *options]) == 0
    return capsys.readouterr().out


def test_a_seed_gives_a_text_again(run: Path, capsys) -> None:
    options = ("--prompt", "the", "--tokens", "12")
    one = generated(capsys, run, *options)
    assert one.startswith("the")
    assert generated(capsys, run, *options) == one
    assert generated(capsys, run, *options, "--seed", "2") != one
    greedy = generated(capsys, run, *options, "--temperature", "0")
    assert greedy == generated(capsys, run, *options, "--top-k", "1", "--seed", "5")
    assert greedy == generated(capsys, run, *options, "--top-p", "1e-9")
    several = generated(capsys, run, *options, "--texts", "3").split("-" * 20 + "\n")
    assert len(several) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "0"], "--tokens 0: expected at least 1"),
        (["--texts", "-1"], "--texts -1: expected at least 1"),
        (["--temperature", "-2"], "--temperature -2.0: must be at least 0"),
        (["--top-k", "-2"], "--top-k -2: must be at least 1"),
        (["--top-p", "2"], "--top-p 2.0: must be above 0 … 1"),
        (["--prompt", "zebra 😀"], "--prompt 'zebra 😀':"),
        (["--checkpoint", "last"], "last.ckpt is missing"),
    ],
)
def test_a_mistake_is_one_line(run: Path, capsys, options: list[str], said: str) -> None:
    assert main(["generate", "--run", str(run), *options]) == 2
    captured = capsys.readouterr()
    assert told(said).search(captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_run_of_another_task_is_refused(tmp_path: Path, cache: str, capsys) -> None:
    trained(tmp_path, cache, "masked_lm")
    assert main(["generate", "--run", str(tmp_path)]) == 2
    said = "holds a model for masked language modelling, not for causal language modelling"
    assert said in capsys.readouterr().err


def test_a_run_of_bytes_and_documents_ends_with_its_text(tmp_path, monkeypatch, capsys) -> None:
    """From the config to the result, and from there to a text."""
    for split in ("train", "valid"):
        (tmp_path / f"{split}.txt").write_text("the dog ß\nsees\n\nthe cat\n\n" * 30)
    config = {
        "trainer": {"max_steps": 2, "val_check_interval": 2},
        "model": {
            "architecture": {"kind": "decoder", "decoder_depth": 1, "model_dim": 8, "ff_dim": 8},
            "objective": {"kind": "causal_lm", "evaluate_test": False},
            "schedule": {"warmup_steps": 0},
        },
        "data": {
            **{"name": "text", "root": ".", "cache": "cache", "window": 16},
            **{"tokenizer": "byte", "vocab_size": None, "intra_document_masking": True},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "run.yaml"]) == 0
    (found,) = tmp_path.rglob("result.json")
    result = json.loads(found.read_text())
    assert result["data"]["protocol"].count("each of 60 documents alone") == 2
    assert result["metrics"]["val/bits_per_byte"] > 0
    capsys.readouterr()
    assert generated(capsys, found.parent, "--prompt", "ß", "--tokens", "3").startswith("ß")


def test_lines_end_where_they_ended_in_training() -> None:
    text = "one\n\n two \n"
    ids = ids_of(text, Bytes())
    assert ids[0] == EOS
    assert ids.count(EOS) == 4
    assert text_of(ids[1:], Bytes()) == text
