"""The command `ablate generate`, on a tiny model of characters."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from lightning_app.api.trained import ids_of, text_of
from lightning_app.cli import main
from lightning_app.data.prepare import prepare
from lightning_app.data.tokenizer import EOS, Bytes
from tests.api.conftest import causal_config
from tests.runs import data, module, trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    folder = tmp_path_factory.mktemp("run")
    source, fitter = data(cache, "causal_lm"), trainer(folder, max_steps=3)
    fitter.fit(module("causal_lm"), datamodule=source)
    fitter.save_checkpoint(folder / "checkpoints" / "best.ckpt")
    shutil.copy(prepare(source.config).folder / "tokenizer.model", folder)
    return folder


def test_a_seed_gives_a_text_again(run: Path, printed) -> None:
    words = ("generate", "--run", run, "--prompt", "the", "--tokens", "12")
    one = printed(*words)
    assert one.startswith("the")
    assert printed(*words) == one
    assert printed(*words, "--seed", "2") != one
    greedy = printed(*words, "--temperature", "0")
    assert greedy == printed(*words, "--top-k", "1", "--seed", "5")
    assert greedy == printed(*words, "--top-p", "1e-9")
    several = printed(*words, "--texts", "3").split("-" * 20 + "\n")
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
def test_a_mistake_is_one_line(run: Path, refused, options: list[str], said: str) -> None:
    refused(said, "generate", "--run", run, *options)


def test_a_run_of_bytes_and_documents_ends_with_its_text(tmp_path, monkeypatch, printed) -> None:
    data = {"tokenizer": "byte", "evaluation_stride": None, "intra_document_masking": True}
    config = causal_config(tmp_path, **data)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "run.yaml"]) == 0
    (found,) = tmp_path.rglob("result.json")
    result = json.loads(found.read_text())
    for documents in (40, 6):  # of train and valid
        assert f"each of {documents} documents alone" in result["data"]["protocol"]
    assert result["metrics"]["val/bits_per_byte"] > 0
    words = ("generate", "--run", found.parent, "--prompt", "ß", "--tokens", "3")
    assert printed(*words).startswith("ß")


def test_lines_end_where_they_ended_in_training() -> None:
    text = "one\n\n two \n"
    ids = ids_of(text, Bytes())
    assert ids[0] == EOS
    assert ids.count(EOS) == 4
    assert text_of(ids[1:], Bytes()) == text
