"""The check before Lightning refuses nothing that Lightning's parser takes."""

import os
from pathlib import Path

import pytest

from lightning_app import fit
from lightning_app.config.precheck import check_launcher, precheck, source_of, written_values
from lightning_app.core.errors import UserError

BASE = Path("ablations/base/synthetic.yaml")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--config", str(BASE), "--seed_everything", "2"],
        ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=step"],
        ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val/nll"],
        ["--trainer.logger.init_args.save_dir", "x", "--trainer.callbacks.help", "Timer"],
        ["--model.block.shaped_attention.alpha=0.5", "--model.optimizer.betas", "[0.8,0.9]"],
        ["--model.block.value_gains.kept.value", "2", "--data.splits.train", "x"],
        ["--model.block", "{preset: sas}", "--model", "file.yaml", "--trainer", "file.yaml"],
        ["--model.block.preset", "pre_lm", "--model.block.preset", "sas"],
        ["--ckpt_path", "last", "--print_config=skip_null", "--weights_only", "true"],
        ["--ckpt_path=null", "--help"],
    ],
)
def test_what_the_parser_takes_passes(words: list[str]) -> None:
    precheck([BASE], words, "fit")


def test_the_last_preset_counts(tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("model: {block: {preset: pre_lm}}\n")
    right.write_text("model: {block: {preset: sas}}\n")
    precheck([wrong, right], [], "fit")
    precheck([wrong], ["--model.block.preset=sas"], "fit")
    with pytest.raises(UserError, match=r"wrong\.yaml: model\.block\.preset: .* found 'pre_lm'"):
        precheck([right, wrong], [], "fit")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [\n", "mine.yaml: line 2: "),
        ("a: \x07\n", "mine.yaml: not valid YAML"),
        ("model: &a {b: *a}\n", "mine.yaml: line 1: a value contains itself"),
        ("model: " + "[" * 5000, "mine.yaml: line 1: nested too deeply"),
        (
            "model: {block: {norm: layer}}\nmodel.block.norm: rms\n",
            "mine.yaml: key 'model.block.norm'",
        ),
        ("data.name: text\ndata:\n  name: synthetic\n", "mine.yaml: key 'data.name'"),
        ("model.block: {}\nmodel: {block: {norm: rms}}\n", "mine.yaml: key 'model.block'"),
        ("5", "mine.yaml: expected a mapping of sections, found 5"),
        ("ckpt_pth: x\n", "mine.yaml: unknown key 'ckpt_pth'; did you mean 'ckpt_path'?"),
        ("data: {splits: {trian: x}}", "mine.yaml: unknown key 'data.splits.trian'; did you mean"),
    ],
)
def test_a_file_that_no_run_can_have(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        precheck([path], [], "fit")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_numbers_of_the_trainer_keep_the_type_in_which_they_are_written(tmp_path: Path) -> None:
    """20 batches are not 20.0, which is a share; the parser's choice depends on earlier imports."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("trainer: {limit_val_batches: 20, max_steps: 3}\n")
    second.write_text("trainer: {max_steps: 4, limit_test_batches: 1.0}\n")
    words = ["fit", "-c", str(first), f"--config={second}"]
    words += ["--trainer.limit_train_batches", "7", "--trainer.callbacks=[{", "--trainer.logger"]
    words += ["--trainer.logger.init_args.version=3", "--trainer.min_steps"]
    found = written_values(words)
    assert repr(found) == (
        "{'trainer.limit_val_batches': 20, 'trainer.max_steps': 4, "
        "'trainer.limit_test_batches': 1.0, 'trainer.limit_train_batches': 7, "
        "'trainer.logger.init_args.version': 3}"
    )


@pytest.mark.parametrize(
    ("mistake", "words", "source"),
    [
        ("model.optimizer.lr: expected a number", [], "second.yaml"),
        ("model.optimizer.lr: expected a number", ["--model.optimizer.lr=x"], "command line"),
        ("unknown key 'data.nmae'", [], "first.yaml"),
        ("model.block.ff_skip: a gain", ["--model.block.ff_skip.vector", "1"], "command line"),
        ("model.optimizer: betas", [], "first.yaml"),
        ("model.optimizer: weight_decay", [], "first.yaml, second.yaml"),
        ("model.optimizer: betas", ["--model.optimizer.lr", "1"], "first.yaml"),
        ("data.nmae: x", ["--data.nmae", "y", "--config", "first.yaml"], "first.yaml"),
        (
            "model.optimizer.lr: x",
            ["--model.optimizer.lr=1", "--config=second.yaml"],
            "second.yaml",
        ),
        ("data.window: 0", ["--data", "section.yaml"], "section.yaml"),
        (
            "model: a pair that is impossible",
            ["--model.block.norm", "x"],
            "first.yaml, second.yaml",
        ),
        ("experiments/x: holds another run", [], "first.yaml, second.yaml"),
    ],
)
def test_a_mistake_names_the_source_that_sets_the_value(
    mistake: str, words: list[str], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text("model: {optimizer: {lr: 1, betas: []}}\ndata: {nmae: x}\n")
    Path("second.yaml").write_text("model: {optimizer: {lr: fast}}\n")
    Path("section.yaml").write_text("window: 0\n")
    files = ["first.yaml", "second.yaml"]
    assert source_of(mistake, files, words) == source
    assert source_of(mistake, [], []) == "command line"


TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"])
@pytest.mark.parametrize("value", ["0", "1", "x", ""])
def test_a_rank_that_no_launcher_has_set(name: str, value: str) -> None:
    """Such a run would train to its end and keep no result."""
    with pytest.raises(UserError, match=name):
        check_launcher({name: value, "MASTER_PORT": "1"})


def test_the_ranks_of_a_launcher_pass() -> None:
    check_launcher({})
    check_launcher(TORCHRUN)
    check_launcher({name: TORCHRUN[name] for name in TORCHRUN if "ELASTIC" not in name})
    check_launcher({"SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})


def test_a_launcher_of_more_processes_than_the_trainer_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="RANK=1") as found:
        fit(BASE, {"trainer.default_root_dir": str(folder), "trainer.accelerator": "cpu"})
    assert "\n" not in str(found.value)
    assert not folder.exists()
    assert set(TORCHRUN) <= os.environ.keys()
