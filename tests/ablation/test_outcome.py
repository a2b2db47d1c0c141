"""What a run leaves about how it ended."""

import json
from itertools import islice
from math import log
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from lightning_app.ablation.run import Run
from lightning_app.config import resolve
from lightning_app.errors import UserError
from lightning_app.objectives.base import ObjectiveConfig
from lightning_app.tasks.base import build_task


def run(folder: Path, cache: str, **optimizer: Any) -> Run:
    """A run of twelve steps and a tiny model, not yet trained."""
    tree = yaml.safe_load(Path("ablations/base/synthetic.yaml").read_text())
    tree["trainer"] |= {"max_steps": 12, "val_check_interval": 100, "limit_val_batches": 2}
    tree["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
    tree["model"]["architecture"] |= {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 16}
    tree["model"]["schedule"]["warmup_steps"] = 0
    tree["model"]["optimizer"] |= optimizer
    tree["data"] |= {"cache": cache, "tokens_per_batch": 256}
    return Run(resolve(tree, "test"), folder=folder, run=False)


@pytest.mark.parametrize(
    ("optimizer", "status", "outcome", "words"),
    [
        ({}, "ok", "not_yet_learned", "still falls"),
        ({"lr": 1e-9}, "diverged", "stalled", "less than 0.1"),
        ({"kind": "sgd", "lr": 1e30}, "diverged", "non_finite", "not finite"),
    ],
)
def test_the_result_tells_how_a_run_did_not_train(
    tmp_path: Path,
    cache: str,
    capsys: pytest.CaptureFixture[str],
    optimizer: dict[str, Any],
    status: str,
    outcome: str,
    words: str,
) -> None:
    ended = run(tmp_path / "run", cache, **optimizer)
    ended.fit(ended.model, ended.datamodule)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result.get("outcome")) == (status, outcome)
    assert words in result["outcome_rule"]
    if status == "ok":
        assert result["diverged"] is None
        assert result["metrics"]["val/nll"] > result["unigram_entropy"]
    else:
        assert result["diverged"]["rule"] == result["outcome_rule"]
    assert f": {outcome.replace('_', ' ')}, " in capsys.readouterr().out


class StopAtOnce(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


def test_a_run_of_no_step_has_failed(tmp_path: Path, cache: str) -> None:
    ended = run(tmp_path / "run", cache)
    ended.trainer.callbacks.append(StopAtOnce())  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError) as caught:
        ended.fit(ended.model, ended.datamodule)
    assert str(caught.value) == (
        "trainer: no step was trained (max_steps 12); a result needs at least 1"
    )
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_prediction_is_kept_for_each_row(tmp_path: Path, cache: str) -> None:
    """The command `predict` prints them."""
    ended = run(tmp_path / "run", cache)
    ended.model.objective = build_task(ObjectiveConfig(beam=1))
    ended.trainer.limit_predict_batches = 2  # pyright: ignore[reportAttributeAccessIssue]
    ended.predict(ended.model, ended.datamodule)
    source = ended.datamodule.predict_dataloader()
    rows = sum(len(batch.index) for batch in islice(source, 2))
    assert len(ended.predictions) == rows > 0
    assert all(isinstance(text, str) for text in ended.predictions)


def test_the_entropy_of_the_training_targets(tmp_path: Path, cache: str) -> None:
    source = run(tmp_path / "run", cache).datamodule
    source.setup("fit")
    counts: dict[int, int] = {}
    for token in source.corpus.ids("train", "target").tolist():
        counts[token] = counts.get(token, 0) + 1
    total = sum(counts.values())
    expected = -sum(n / total * log(n / total) for n in counts.values())
    assert source.training_floor() == pytest.approx(expected)
