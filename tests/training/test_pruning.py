"""A run reports at validations and ends on request; otherwise nothing changes."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_app.core.errors import UserError
from lightning_app.scores.task_facts import Monitored
from lightning_app.training.callbacks.safety import Pruned, Pruning
from lightning_app.training.module import TransformerModule
from lightning_app.training.run import checkpoints
from tests.runs import data, module, trainer
from tests.training.test_save_on_signal import At

STEPS = 12


def say(stop: Path, step: int) -> At:
    """Whoever prunes, from outside: the file appears in the middle of a step."""
    return At(step, lambda: stop.write_text("pruned\n"))


def pruning(folder: Path, metric: str = "val/nll") -> Pruning:
    folder.mkdir(exist_ok=True)
    return Pruning(metric, folder / "reports.jsonl", folder / "stop")


def fit(
    folder: Path, cache: str, *callbacks: pl.Callback, lr: float = 3e-3, **settings: Any
) -> TransformerModule:
    """Train in `folder`, from the checkpoint that lies there if there is one."""
    last = folder / "checkpoints" / "last.ckpt"
    trained = module(dropout=0.3)
    trained.optimizer = type(trained.optimizer)(lr=lr)
    pl.seed_everything(3, verbose=False)
    settings = {"max_steps": STEPS, "log_every_n_steps": 2, "val_check_interval": 4} | settings
    fitter = trainer(
        folder,
        limit_train_batches=6,
        limit_val_batches=2,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=[*callbacks, *checkpoints(folder, Monitored())],
        **settings,
    )
    source = data(cache)
    resumed = last if last.exists() else None
    fitter.fit(trained, datamodule=source, ckpt_path=resumed, weights_only=True)
    fitter.validate(trained, datamodule=source, verbose=False)
    return trained


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "reports.jsonl").read_text().splitlines()]


def test_what_is_reported_is_the_metric_of_each_validation(tmp_path: Path, cache: str) -> None:
    fit(tmp_path, cache, pruning(tmp_path))
    found = reports(tmp_path)
    assert [each["step"] for each in found] == [4, 8, 12]  # that after the training is not there
    best = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    saver = next(v for k, v in best["callbacks"].items() if "val/nll" in k)
    assert float(saver["best_model_score"]) == min(each["value"] for each in found)
    large = tmp_path / "large"
    fit(large, cache, pruning(large), lr=1e30)
    assert reports(large)[-1]["value"] is None  # a loss that is not finite


@pytest.mark.parametrize(
    ("said", "interval", "logged", "ends"),
    [
        (3, 4, 2, 4),  # at the next logged step
        (4, 4, 100, 4),  # at the validation, where nothing is logged for long
        (5, 4, 100, 8),
        (7, 100, 2, 8),
    ],
)
def test_a_run_ends_soon_after_it_was_pruned(tmp_path, cache, said, interval, logged, ends) -> None:
    callback = pruning(tmp_path)
    settings = {"val_check_interval": interval, "log_every_n_steps": logged}
    with pytest.raises(Pruned) as ending:
        fit(tmp_path, cache, callback, say(callback.stop, said), **settings)
    assert ending.value.step == ends


def test_a_word_that_comes_with_the_last_step_is_too_late(tmp_path: Path, cache: str) -> None:
    callback = pruning(tmp_path)
    trained = fit(tmp_path, cache, callback, say(callback.stop, STEPS), log_every_n_steps=1)
    assert trained.trainer.global_step == STEPS


def test_a_metric_that_is_not_known_is_the_users_mistake(tmp_path: Path, cache: str) -> None:
    with pytest.raises(UserError, match=r"report no 'val/bleu' \(val/accuracy, val/nll"):
        fit(tmp_path, cache, pruning(tmp_path, "val/bleu"))


@pytest.mark.in_turn(3)
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("said", [5, 6, 7])
def test_reporting_and_ending_change_nothing(tmp_path: Path, cache: str, said: int) -> None:
    """A run that was ended early and then continued has the weights of an undisturbed one."""
    plain = fit(tmp_path / "plain", cache)
    broken = tmp_path / "broken"
    callback = pruning(broken)
    with pytest.raises(Pruned):
        fit(broken, cache, callback, say(callback.stop, said))
    callback.stop.unlink()
    rest = fit(broken, cache, pruning(broken))
    assert [each["step"] for each in reports(broken)] == [4, 8, 12]
    for (name, a), b in zip(plain.state_dict().items(), rest.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
