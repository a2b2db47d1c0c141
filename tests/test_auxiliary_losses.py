"""Runs with auxiliary losses: what is logged, evaluated, resumed, counted and refused."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_app.cli import main
from lightning_app.config.config import resolve, transformer_module
from lightning_app.config.experiment import cell_id
from lightning_app.core.errors import UserError
from lightning_app.grids.size import parameters
from lightning_app.training.module import TransformerModule
from tests.runs import data, module, trainer
from tests.test_config import changed, tree
from tests.told import told

BOTH = {"intermediate_weight": 1.0, "second_target_weight": 0.5, "auxiliary_tables": "own"}
ALONE = {"intermediate_weight": 1.0, "auxiliary_tables": "own"}
OF_KIND = {"translation": BOTH, "masked_lm": ALONE}
MASKED, SHALLOW = {"objective": {"kind": "masked_lm"}}, {"kind": "encoder", "encoder_depth": 1}
FIRST = {"objective.intermediate_weight": 0.5}
SECOND_TARGET = {"objective.second_target_weight": 0.5}
INTERMEDIATE = "train/aux/intermediate"
SECOND = "train/aux/second_target"


class Saved(pl.Callback):
    """Saves a checkpoint after the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def run(
    folder: Path, cache: str, kind: str, objective: Any, **settings: Any
) -> tuple[list[dict[str, float]], TransformerModule]:
    pl.seed_everything(3)
    objective = {"label_smoothing": 0.0, **objective}
    trained = module(kind, decoder_depth=2, dropout=0.1, preset="pre_ln", objective=objective)
    settings = {"max_steps": 8, **settings}
    ckpt_path = settings.pop("ckpt_path", None)
    fitter = trainer(folder, logger=CSVLogger(folder), log_every_n_steps=1, **settings)
    fitter.fit(trained, datamodule=data(cache, kind), ckpt_path=ckpt_path, weights_only=True)
    rows = csv.DictReader(next(folder.rglob("metrics.csv")).read_text().splitlines())
    found = [{name: float(value) for name, value in row.items() if value} for row in rows]
    return [row for row in found if "train/loss" in row], trained


@pytest.mark.parametrize("kind", OF_KIND)
def test_the_parts_of_the_loss_are_logged_and_the_last_layer_alone_is_the_nll(
    tmp_path: Path, cache: str, kind: str
) -> None:
    rows, trained = run(tmp_path / "with", cache, kind, OF_KIND[kind])
    plain, _ = run(tmp_path / "without", cache, kind, {})
    assert trained.model is not None
    # Of two layers the first predicts in steps 1 and 2, while less than 2 of 8 steps are done.
    assert [row[INTERMEDIATE] > 0.0 for row in rows] == [True] * 2 + [False] * 6
    assert all(row[INTERMEDIATE] == 0.0 for row in rows[2:])
    assert all((SECOND in row) == (kind == "translation") for row in rows)
    for row in rows:
        parts = row["train/nll"] + row[INTERMEDIATE] + row.get(SECOND, 0.0)
        assert row["train/loss"] == pytest.approx(parts, rel=1e-5)
    # Initial values and dropout are those of the run without, so the first step is too.
    assert rows[0]["train/nll"] == plain[0]["train/nll"]
    assert rows[1]["train/nll"] != plain[1]["train/nll"]
    assert not any(name.startswith("train/aux") for row in plain for name in row)


def test_a_validation_is_that_of_a_model_without_heads(tmp_path: Path, cache: str) -> None:
    _, trained = run(tmp_path, cache, "translation", BOTH)
    bare = module("translation", decoder_depth=2, preset="pre_ln")
    bare.build(trained.vocab_size)
    bare.load_state_dict(trained.state_dict(), strict=False)
    found = [
        trainer(tmp_path, limit_val_batches=2).validate(one, data(cache), verbose=False)
        for one in (trained, bare)
    ]
    assert found[0] == found[1]


def test_a_resumed_run_switches_at_the_same_step(tmp_path: Path, cache: str) -> None:
    saver = Saved(tmp_path / "x")
    whole, first = run(tmp_path / "whole", cache, "translation", BOTH, callbacks=[saver])
    stored = torch.load(tmp_path / "x", weights_only=True)
    assert (stored["global_step"], stored["total_steps"]) == (1, 8)
    for steps in (8, 12):
        settings = {"max_steps": steps, "ckpt_path": tmp_path / "x"}
        rest, second = run(tmp_path / f"{steps}", cache, "translation", BOTH, **settings)
        assert second.total_steps == 8
        assert [row[INTERMEDIATE] > 0.0 for row in rest] == [True] + [False] * (steps - 2)
        for a, b in zip(whole[1:], rest, strict=False):
            assert a["train/loss"] == b["train/loss"]
        weights = first.state_dict(), second.state_dict()
        same = [torch.equal(value, weights[1][name]) for name, value in weights[0].items()]
        assert all(same) == (steps == 8)


def test_branches_rise_with_the_steps_of_a_run_that_goes_on(tmp_path: Path, cache: str) -> None:
    def train(folder: Path, steps: int, **settings: Any) -> tuple[list[float], dict[str, Any]]:
        pl.seed_everything(3)
        trained = module("translation", decoder_depth=2, dropout=0.1, preset="prores")
        fitter = trainer(folder, max_steps=steps, callbacks=[Saved(tmp_path / "x")])
        fitter.fit(trained, datamodule=data(cache), weights_only=True, **settings)
        names = (f"model.decoder.blocks.{layer}.around_ff.branch.factor" for layer in range(2))
        return [float(trained.get_buffer(name)) for name in names], trained.state_dict()

    whole, weights = train(tmp_path / "whole", 6)
    assert whole == pytest.approx([6 / 50, 6 / 100])
    again, others = train(tmp_path / "again", 6, ckpt_path=tmp_path / "x")
    assert again == whole
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    stored = torch.load(tmp_path / "x", weights_only=True)["state_dict"]
    factor = stored["model.decoder.blocks.1.around_self.branch.factor"]
    assert float(factor) == pytest.approx(1 / 100)


def test_another_run_of_the_same_module_has_steps_of_its_own(tmp_path: Path, cache: str) -> None:
    _, trained = run(tmp_path / "one", cache, "translation", BOTH, max_steps=3)
    path = tmp_path / "x.ckpt"
    assert isinstance(trained.trainer, pl.Trainer)
    trained.trainer.save_checkpoint(path)
    loaded = TransformerModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.total_steps == 3
    trainer(tmp_path, max_steps=5).fit(loaded, datamodule=data(cache))
    assert loaded.total_steps == 5


def test_epochs_may_set_the_number_of_steps_and_time_may_not(tmp_path: Path, cache: str) -> None:
    limits = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 3}
    rows, trained = run(tmp_path / "epochs", cache, "translation", BOTH, **limits)
    assert trained.total_steps == 6
    assert [row[INTERMEDIATE] > 0.0 for row in rows] == [True] * 2 + [False] * 4
    limits = {"max_steps": -1, "max_time": "00:00:01:00"}
    with pytest.raises(UserError, match="set max_steps or max_epochs"):
        run(tmp_path / "time", cache, "translation", BOTH, **limits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective.intermediate_weight": -1.0}, "intermediate_weight -1.0:"),
        ({"objective.second_target_weight": -0.5}, "second_target_weight -0.5:"),
        ({"objective.intermediate_weight": float("nan")}, "intermediate_weight: nan"),
        ({"objective.auxiliary_tables": "own"}, "auxiliary_tables own:"),
        ({"objective.auxiliary_tables": "shared"}, "found 'shared'"),
        ({"objective.auxiliary_tables": "own", **SECOND_TARGET}, "auxiliary_tables own:"),
        ({**FIRST, "architecture.decoder_depth": 1}, "intermediate_weight: 0.5, and decoder_depth"),
        ({**MASKED, **SECOND_TARGET, "architecture.kind": "encoder"}, "second_target_weight: 0.5"),
        ({**MASKED, **FIRST, "architecture": SHALLOW}, "intermediate_weight: 0.5, and encoder"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    config = tree()
    for field, value in fields.items():
        config = changed(f"model.{field}", value, config)
    with pytest.raises(UserError) as caught:
        resolve(config, "mine.yaml")
    assert str(caught.value).startswith("mine.yaml: ")
    assert told(message).search(str(caught.value))
    assert "\n" not in str(caught.value)


def with_losses(config: dict[str, Any] | None = None, **losses: Any) -> dict[str, Any]:
    """The demo's config, or `config`, with some fields of the objective."""
    for field, value in losses.items():
        config = changed(f"model.objective.{field}", value, config)
    return tree() if config is None else config


def test_a_run_that_time_alone_ends_is_refused_before_it_starts(tmp_path: Path, capsys) -> None:
    def limited(**losses: Any) -> dict[str, Any]:
        config = changed("trainer.max_steps", -1)
        return with_losses(changed("trainer.max_time", "00:00:01:00", config), **losses)

    resolve(limited(second_target_weight=0.5), "mine.yaml")
    resolve(changed("trainer.max_epochs", 2, limited(intermediate_weight=1.0)), "mine.yaml")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(limited(intermediate_weight=1.0)))
    assert main(["fit", "--config", str(tmp_path / "run.yaml")]) == 2
    line = capsys.readouterr().err
    assert "trainer.max_steps:" in line
    assert line.count("\n") == 1


def test_losses_that_are_off_change_no_id_and_each_that_is_on_does() -> None:
    off = {"intermediate_weight": 0, "second_target_weight": 0.0, "auxiliary_tables": "tied"}
    cases = [{}, off, {"intermediate_weight": 1.0}, ALONE, {"second_target_weight": 0.5}]
    ids = [cell_id(resolve(with_losses(**losses), "x.yaml")) for losses in cases]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


@pytest.mark.parametrize("objective", [{}, BOTH, {**BOTH, "auxiliary_tables": "tied"}], ids=str)
def test_a_plan_counts_the_parameters_that_a_run_trains(objective: dict[str, Any]) -> None:
    config = resolve(changed("data.vocab_size", 50, with_losses(**objective)), "x.yaml")
    built = transformer_module(config["model"])
    built.build(50)
    assert built.model is not None
    assert parameters(config) == sum(p.numel() for p in built.model.parameters())
