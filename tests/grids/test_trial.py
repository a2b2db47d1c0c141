"""One run and its folder: new, interrupted, continued, and never mixed with another run."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import wait_for  # pyright: ignore[reportMissingImports]

from lightning_app.runs.provenance import software
from lightning_app.training.checkpoint import join_metrics
from tests import warm
from tests.told import told

FIT = ["-m", "lightning_app", "fit"]
TRAINER = {"log_every_n_steps": 1, "enable_progress_bar": "false", "limit_val_batches": 1}
TRAINER |= {"val_check_interval": 100}
SIZES = {"model_dim": 16, "encoder_depth": 1, "decoder_depth": 1}


def command(folder: Path, cache: str, steps: int, *more: str) -> list[str]:
    trainer = {**TRAINER, "max_steps": steps, "default_root_dir": folder / "run"}
    settings = {f"trainer.{key}": value for key, value in trainer.items()}
    settings |= {f"model.architecture.{key}": value for key, value in SIZES.items()}
    settings |= {"model.schedule.warmup_steps": 0, "data.cache": cache}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [*FIT, "--config", "ablations/base/synthetic.yaml", *words, *more]


def fit(folder: Path, cache: str, steps: int, *more: str, code: int = 0) -> str:
    """What the command prints, on stderr where it must refuse with another code than 0."""
    done = warm.run(command(folder, cache, steps, *more))
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_an_interrupted_run_goes_on(tmp_path: Path, cache: str, number: signal.Signals) -> None:
    running = warm.start(command(tmp_path, cache, 100_000))
    progress = tmp_path / "run" / "attempts" / "1" / "progress.json"

    def step() -> int:
        return json.loads(progress.read_text())["step"] if progress.is_file() else 0

    wait_for(lambda: step() > 3, lambda: running.poll() is None)
    os.kill(running.pid, number)
    said = running.communicate(timeout=240)[1]
    assert running.returncode == 130
    assert "Traceback" not in said
    assert "interrupted" in said
    assert not (tmp_path / "run" / "result.json").exists()

    last = step()
    other = ("--ckpt_path", "last", "--model.block.preset", "post_ln")
    said = fit(tmp_path, cache, 9, *other, code=2)
    assert told("model.block.preset is pre_ln … post_ln").search(said)

    steps = last + 15
    fit(tmp_path, cache, steps, "--ckpt_path", "last")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["attempt"], result["steps"]) == (2, steps)
    made_of = json.loads((tmp_path / "run" / "identity.json").read_text())
    assert made_of["id"] == result["id"]  # no grid takes it for a run of so many steps
    assert len(made_of["config"]["continued_from"]) == 1
    with (tmp_path / "run" / "metrics.csv").open() as file:
        logged = [int(row["step"]) for row in csv.DictReader(file)]
    assert logged == list(range(1, steps + 1))


def test_a_run_in_its_folder_twice_is_the_same_run_twice(tmp_path: Path, cache: str) -> None:
    results = []
    for attempt in (1, 2):
        said = fit(tmp_path, cache, 4, *["--again"] * (attempt - 1))
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert f"\n{tmp_path / 'run'}: " in said
        assert f"val/nll {result['metrics']['val/nll']:.4f}" in said
        assert result["attempt"] == attempt
        made = result["provenance"]
        assert made["code"] == software()["code"]
        assert made["command"][:3] == ["lightning_app", "fit", "--config"]
        assert made["data"] == result["data"]["digest"]
        assert made["resumed_from"] == []
        for path in ("env.json", f"attempts/{attempt}/provenance.json"):
            written = json.loads((tmp_path / "run" / path).read_text())
            assert written.get("provenance", written) == made
        results.append(result)
    for each in results:
        del each["metrics"]["train/tokens_per_second"]
    assert results[0]["metrics"] == results[1]["metrics"]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        steps = [row["step"] for row in csv.DictReader(file)]
    assert steps == ["1", "2", "3", "4"]
    assert (tmp_path / "run" / "block.json").is_file()
    assert (tmp_path / "run" / "env.json").is_file()


@pytest.mark.parametrize(
    ("logs", "joined"),
    [
        (
            ["train/loss\n1,5\n2,4\n3,3\n", "train/loss,val/nll\n3,3.5,\n3,,9\n4,2,\n"],
            [("1", "5", ""), ("2", "4", ""), ("3", "3.5", "9"), ("4", "2", "")],
        ),
        (  # interrupted after the last step, then only evaluated, then before any log
            ["train/loss,val/nll\n1,5,\n2,4,\n2,,9\n", "val/nll\n2,9\n", "train/loss\n"],
            [("1", "5", ""), ("2", "4", "9")],
        ),
    ],
)
def test_logs_of_attempts_are_joined_by_step(tmp_path: Path, logs: list[str], joined) -> None:
    paths = [tmp_path / f"{number}.csv" for number in range(len(logs))]
    for path, text in zip(paths, logs, strict=True):
        path.write_text(f"step,{text}")
    rows = csv.DictReader(join_metrics([*paths, tmp_path / "none"]).splitlines())
    assert [(r["step"], r["train/loss"], r["val/nll"]) for r in rows] == joined


def test_a_line_that_a_kill_tore_is_left_out(tmp_path: Path) -> None:
    """A run that is killed at any byte of a row and continued has undisturbed curves."""
    header = b"epoch,step,train/loss,val/nll\r\n"
    rows = [b"0,%d,%d.25,\r\n" % (step, 30 - step) for step in range(8, 16)]
    rows[2:2] = [b"0,9,,7.125\r\n"]  # a validation, after which the checkpoint was saved
    whole, torn, resumed = (tmp_path / name for name in ("whole.csv", "1.csv", "2.csv"))
    whole.write_bytes(header + b"".join(rows))
    undisturbed = join_metrics([whole])
    for last in range(3, len(rows)):
        resumed.write_bytes(header + b"".join(rows[3:]))
        for length in range(len(rows[last]) + 1):
            torn.write_bytes(header + b"".join(rows[:last]) + rows[last][:length])
            assert join_metrics([torn, resumed]) == undisturbed, rows[last][:length]
    for length in range(len(header) + 1):  # killed in the header, before any checkpoint
        torn.write_bytes(header[:length])
        assert join_metrics([torn, whole]) == undisturbed, header[:length]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("interval", [4, 6, 100])
def test_the_last_step_is_validated_and_kept(tmp_path: Path, cache: str, interval: int) -> None:
    fit(tmp_path, cache, 6, "--trainer.val_check_interval", str(interval))
    run = tmp_path / "run"
    last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 6
    assert (run / "checkpoints" / "best.ckpt").is_file()
    with (run / "metrics.csv").open() as file:
        rows = {row["step"]: row for row in csv.DictReader(file)}
    result = json.loads((run / "result.json").read_text())
    assert float(rows["6"]["val/nll"]) == pytest.approx(result["metrics"]["val/nll"])


def test_a_saver_of_the_user_does_not_decide_which_weights_are_best(tmp_path, cache: str) -> None:
    """It comes first in the Trainer; the last step, where no validation is due, is far worse."""
    saver = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(tmp_path / "mine"), "every_n_train_steps": 1},
    }
    rate = ("--model.optimizer.lr", "1.0", "--model.schedule.warmup_steps", "0")
    own = ("--trainer.callbacks", json.dumps([saver]))
    fit(tmp_path, cache, 6, "--trainer.val_check_interval", "4", *rate, *own)
    assert len(list((tmp_path / "mine").iterdir())) > 0
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = {row["step"]: row["val/nll"] for row in csv.DictReader(file)}
    assert float(rows["4"]) < float(rows["6"])
    for name, step in (("best", 4), ("last", 6)):
        path = tmp_path / "run" / "checkpoints" / f"{name}.ckpt"
        assert torch.load(path, weights_only=True)["global_step"] == step


def test_another_optimizer_does_not_go_on_from_a_checkpoint(tmp_path: Path, cache: str) -> None:
    """Lightning would restore the rate of the checkpoint, while the config says the new one."""
    fit(tmp_path, cache, 2)
    last = ("--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    other = ("--trainer.default_root_dir", str(tmp_path / "other"))
    for setting, value, said in (
        ("lr", "1e-2", "model.optimizer.lr is 0.004 there and 0.01 in the config"),
        ("weight_decay", "0.1", "model.optimizer.weight_decay is 0.0 there and 0.1 in the config"),
    ):
        changed = (f"--model.optimizer.{setting}", value)
        assert said in fit(tmp_path, cache, 4, *other, *last, *changed, code=2)
    assert not (tmp_path / "other").exists()
    fit(tmp_path, cache, 4, *other, *last)
