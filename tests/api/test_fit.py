"""`fit` trains what `ablate fit` trains, with its id, its folder and its numbers."""

import csv
import json
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_app import RunResult, UserError, fit
from lightning_app.cli import main
from lightning_app.data.tokenizer import BOS, EOS
from lightning_app.grids.size import parameters
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.locks import run_lock
from lightning_app.runs.parent import read_checkpoint
from lightning_app.tasks.translation import Translation
from lightning_app.training.module import TransformerModule


def test_it_equals_the_command(translation: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    root = translation.folder.parent
    monkeypatch.chdir(root)
    words = ["--config", "config.yaml", "--model.block.preset", "post_ln"]
    words += ["--model.block.shaped_attention.alpha=0.5", "--trainer.default_root_dir", "null"]
    assert main(["fit", *words, "--seed_everything", "2"]) == 0
    (found,) = Path("experiments").rglob("result.json")
    expected = json.loads(found.read_text())
    logged = (found.parent / "metrics.csv").read_text()
    found.parent.rename(root / "by_command")
    overrides = {
        "model.block.preset": "post_ln",
        "model.block.shaped_attention.alpha": 0.5,
        "trainer.default_root_dir": None,
    }
    result = fit("config.yaml", overrides, seed_everything=2)
    assert result.folder.samefile(found.parent)
    assert result.id == expected["id"] != translation.id
    assert {k: v for k, v in result.metrics.items() if "/tokens_per" not in k} == {
        k: v for k, v in expected["metrics"].items() if "/tokens_per" not in k
    }
    texts = (logged, (result.folder / "metrics.csv").read_text())
    losses = [[row["train/loss"] for row in csv.DictReader(text.splitlines())] for text in texts]
    assert losses[0] == losses[1]
    assert any(losses[0])
    assert (result.status, result.outcome) == (expected["status"], expected["outcome"])


def test_a_mapping_and_its_file_are_one_run_trained_again_if_asked(translation, capsys) -> None:
    config = translation.folder.parent / "config.yaml"
    tree = yaml.safe_load(config.read_text())
    with pytest.raises(UserError, match="holds the finished"):
        fit(tree)
    again = fit(tree, {"data.tokens_per_batch": 64}, again=True)
    assert again.folder == translation.folder
    assert again.id == translation.id
    with pytest.raises(UserError, match="holds another run") as found:
        fit(config, {"model.optimizer.lr": 1e-4})
    assert "model.optimizer.lr" in str(found.value)
    assert "\n" not in str(found.value)
    before = (again.folder / "result.json").read_bytes()
    assert main(["fit", "--config", str(config)]) == 2
    assert "--again" in capsys.readouterr().err
    assert main(["fit", "--config", str(config), "--again", "--ckpt_path", "last"]) == 2
    assert "--again: trains from step 0, but --ckpt_path last" in capsys.readouterr().err
    assert (again.folder / "result.json").read_bytes() == before


def test_a_run_in_float64_is_loaded_as_it_is(translation: RunResult, tmp_path: Path) -> None:
    config = translation.folder.parent / "config.yaml"
    where = {"trainer.default_root_dir": str(tmp_path / "run"), "trainer.precision": "64-true"}
    loaded = fit(config, where).load("last")
    stored = read_checkpoint(loaded.checkpoint)["state_dict"]
    for name, weight in loaded.model.state_dict().items():
        assert weight.dtype == stored[f"model.{name}"].dtype
        assert torch.equal(weight.cpu(), stored[f"model.{name}"])
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float64}
    assert len(loaded.translate(["hund"])) == 1


@pytest.mark.parametrize("how", ["same", "last", "moved", "again", "file"])
def test_an_interrupted_run_loses_nothing(translation, tmp_path, monkeypatch, capsys, how: str):
    """Every validation is worse than the one before, so the first has the best checkpoint."""
    monkeypatch.chdir(tmp_path)
    config, root = translation.folder.parent / "config.yaml", {"trainer.default_root_dir": None}
    over: dict[str, Any] = {**root, "trainer.max_steps": 8, "trainer.val_check_interval": 2}
    given: dict[str, Any] = {"name": "mine"}
    if how == "moved":
        over, given = {**over, "trainer.default_root_dir": "there"}, {}
    if how == "file":
        given["ckpt_path"] = translation.folder / "checkpoints" / "last.ckpt"
        over |= {"trainer.max_steps": 14}
    worse, whole = count(), TransformerModule.training_step

    def scores(task: Any, stage: str, *_: Any) -> dict[str, float]:
        return {f"{stage}/nll": float(next(worse))}

    def stopped(module: Any, *batch: Any) -> Any:
        if module.global_step == (10 if how == "file" else 4):
            os.kill(os.getpid(), signal.SIGINT)
        return whole(module, *batch)

    monkeypatch.setattr(Translation, "scores", scores)
    monkeypatch.setattr(TransformerModule, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt, match="same call continues"):
        fit(config, over, **given)
    monkeypatch.setattr(TransformerModule, "training_step", whole)
    if how == "moved":
        Path("there").rename("here")
        over["trainer.default_root_dir"] = "here"
    given |= {"last": {"ckpt_path": "last"}, "again": {"again": True}}.get(how, {})
    capsys.readouterr()
    done = fit(config, over, **given)
    said, steps = capsys.readouterr().out, over["trainer.max_steps"]
    begun = {"again": 0, "file": 11}.get(how, 5)
    assert (f"goes on from step {begun}" in said) is (how not in ("last", "again"))
    assert done.record["steps"] == steps
    with RunFolder(done.folder).attempt(2).metrics.open() as file:
        assert int(next(csv.DictReader(file))["step"]) == begun + 1
    saved = RunFolder(done.folder)
    best = read_checkpoint(saved.checkpoint("best"))
    assert best["global_step"] == {"file": 6}.get(how, 2)


def test_a_run_goes_on_with_its_config_and_checkpoint_alone(translation, tmp_path: Path) -> None:
    config, run = translation.folder.parent / "config.yaml", RunFolder(tmp_path / "run")
    over = {"trainer.default_root_dir": str(run)}
    fit(config, over)
    run.result.unlink()
    with pytest.raises(UserError, match="the run has"):
        _ = RunResult(run.path).status
    with pytest.raises(UserError, match=r"holds another run \(trainer.max_steps"):
        fit(config, {**over, "trainer.max_steps": 9})
    last = run.checkpoint("last")
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"last.ckpt: torn.*; --again starts over"):
        fit(config, over)
    assert fit(config, over, again=True).record["steps"] == 4


@pytest.mark.parametrize(
    ("overrides", "settings", "said"),
    [
        ({"model.block.prest": "sas"}, {}, "overrides:.*mean 'preset'"),
        ({"model.block.preset": "sass"}, {}, "overrides:.*'sas'"),
        ({"model.optimizer.lr": "fast"}, {}, "model.optimizer.lr: expected a number"),
        ({"model": {"block": {}}}, {}, "would replace a"),
        ({}, {"trainer": {"max_steps": 1}}, "would replace a"),
        ({"seed_everything": 1}, {"seed_everything": 2}, "seed_everything: is given twice"),
        ({"model.block.norm": None, "model.block": {}}, {}, "model.block.norm: lies inside of"),
        ({"data.root": object()}, {}, "data holds a"),
        ({"trainer.max_steps": -2}, {}, "max_steps: -2 trains nothing"),
        ({}, {"sed_everything": 2}, "'seed_everything'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, overrides, settings: dict[str, Any], said: str) -> None:
    tree = {"trainer.default_root_dir": str(tmp_path / "run"), "trainer.max_steps": 1}
    with pytest.raises(UserError, match=said) as found:
        fit(tree, overrides, **settings)
    assert "\n" not in str(found.value)
    assert "/ablate-fit-" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_in_which_another_process_trains(translation: RunResult, tmp_path, capsys) -> None:
    config, folder = translation.folder.parent / "config.yaml", tmp_path / "run"
    words = ["fit", "--config", str(config), "--trainer.default_root_dir", str(folder), "--again"]
    with run_lock(RunFolder(folder)):
        before = sorted(folder.iterdir())
        assert main(words) == 2
        assert f"process {os.getpid()} on " in capsys.readouterr().err
        assert sorted(folder.iterdir()) == before
    with run_lock(RunFolder(folder)):
        pass


def test_languages_have_separate_tables(translation: RunResult, tmp_path: Path) -> None:
    config = translation.folder.parent / "config.yaml"
    over = {"trainer.default_root_dir": str(tmp_path / "run"), "data.vocabularies": "separate"}
    run = fit(config, over)
    loaded = run.load("last")
    tables = loaded.model.embedding.tokens, loaded.model.source_embedding.tokens
    assert len(tables[0].weight) == loaded.tokenizer.vocab_size
    assert len(tables[1].weight) == loaded.tokenizer.source.vocab_size
    result = json.loads((run.folder / "result.json").read_text())
    assert parameters(loaded.config) == result["parameters"]
    german, english = "der hund sieht die katze .", "the dog sees the cat ."
    source, target = loaded.tokenizer.source.encode(german), loaded.tokenizer.encode(english)
    read = [*source, EOS], [BOS, *target]
    with torch.no_grad():
        logits = loaded.model(*(torch.tensor([ids]) for ids in read))[0]
    labels = torch.tensor([*target, EOS])
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    (found,) = loaded.score([german], [english])
    assert found.nll == pytest.approx(float(expected), rel=1e-5)
    assert found.unknown == 0
    assert "katze" not in loaded.translate([german])[0]
