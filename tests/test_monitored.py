"""What a task monitors reaches checkpoints, the judgement of a run, the grid and the analysis."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_app.cli import main
from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.report.results import read_results
from lightning_app.scores.task_facts import TASKS, Monitored
from tests.report.conftest import FakeGrid

BASE = Path(__file__).parents[1] / "ablations" / "base" / "synthetic_mlm.yaml"
OTHER = Monitored(metric="val/accuracy", mode="max", loss="val/perplexity", floor="loss of luck")


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked language modelling, with another metric, loss and floor."""
    parts = {**TASKS, "masked_lm": replace(TASKS["masked_lm"], monitored=OTHER)}
    monkeypatch.setattr(TASKS, "_parts", parts)


def test_the_tasks_of_the_package_monitor_their_loss() -> None:
    for facts in TASKS.values():
        floor = "loss of the best constant output" if facts.labelled else "unigram entropy"
        assert facts.monitored == Monitored(
            metric="val/nll", mode="min", loss="val/nll", floor=floor, counts=facts.monitored.counts
        )


@pytest.mark.usefixtures("other")
def test_a_grid_without_a_metric_takes_that_of_its_task(tmp_path: Path) -> None:
    def metric(**fields: Any) -> tuple[str, str]:
        base = {"model": {"objective": {"kind": "masked_lm"}}}
        tree = {"name": "tiny", "base_config": base, "axes": {"seed_everything": [1, 2]}}
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(tree | fields))
        found = read_spec(tmp_path / "grid.yaml")
        return found.metric, found.mode

    assert metric() == metric(metric={"mode": "max"}) == ("val/accuracy", "max")
    assert metric(metric={"name": "val/nll"}) == ("val/nll", "min")
    assert metric(base_config={}) == ("val/nll", "min")
    axes = {"model.objective.kind": ["translation", "masked_lm"]}
    assert metric(axes=axes, metric={"name": "test/nll"}) == ("test/nll", "min")
    with pytest.raises(UserError, match=r"metric\.name:.*model\.objective"):
        metric(axes=axes)


@pytest.mark.usefixtures("other")
def test_a_run_keeps_its_best_checkpoint_by_the_metric_and_is_judged_by_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        *("fit", "--config", str(BASE), "--trainer.max_steps", "3"),
        *("--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1"),
        *("--model.schedule.kind", "constant", "--model.schedule.warmup_steps", "0"),
        *("--model.objective.evaluate_test", "false"),
        *("--model.optimizer.lr", "0.01", "--trainer.default_root_dir", "run"),
    ]
    assert main(given) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "run/result.json").read_text())
    loss = result["metrics"]["val/perplexity"]
    bar = result["unigram_entropy"] - 0.05
    said = f"val/perplexity {loss:.4f} is not below {bar:.4f}, the loss of luck less 0.05"
    assert result["outcome_rule"].startswith(said)
    last, best = (
        torch.load(tmp_path / f"run/checkpoints/{name}.ckpt", weights_only=True)
        for name in ("last", "best")
    )
    (saver,) = (state for name, state in last["callbacks"].items() if "val/accuracy" in name)
    assert saver["monitor"] == "val/accuracy"
    # The last step is validated after the training; its checkpoint is kept if it is better.
    better = result["metrics"]["val/accuracy"] > float(saver["best_model_score"])
    assert best["global_step"] == (3 if better else 2)


@pytest.mark.usefixtures("other")
def test_the_analysis_compares_the_loss_of_the_task(tmp_path: Path) -> None:
    base = {"model": {"objective": {"kind": "masked_lm"}}}
    fake = FakeGrid(tmp_path / "demo", lambda axes: 2.0, {"seed_everything": [1]}, base=base)
    fake.edit(0, {"val/perplexity": 1.25})
    (cell,) = read_results(fake.folder).cells
    assert cell.loss == 1.25
    assert read_results(fake.folder).monitored == OTHER
