"""Packs: a cell's numbers do not depend on its neighbours, and are those of the cell alone."""

import csv
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_app.config.config import resolve
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError
from lightning_app.runs.folder import RunFolder
from lightning_app.training.packs import PackedModule, run_pack
from lightning_app.training.run import run_cell
from tests.tables import changed

KINDS = {
    "causal_lm": {"kind": "decoder", "decoder_depth": 2},
    "masked_lm": {"kind": "encoder", "encoder_depth": 2},
    "translation": {"kind": "encoder_decoder", "encoder_depth": 1, "decoder_depth": 2},
}
LOW, HIGH, WARM, NEVER_FINITE = (1e-3, 0), (8e-3, 0), (4e-3, 6), (1e30, 0)
"""Rates and warm-ups of cells."""


class World:
    """The folders of cells, and their configs."""

    def __init__(self, root: Path, cache: str) -> None:
        self.root, self.cache = root, cache

    def cell(self, name: str, rate: tuple[float, int], **fields: Any) -> RunFolder:
        folder = RunFolder(self.root / name)
        folder.path.mkdir(parents=True)
        folder.config.write_text(strict_yaml.dump_yaml(self.config(rate, **fields)))
        return folder

    def config(
        self, rate: tuple[float, int], task: str = "causal_lm", pack: int = 3, **fields: Any
    ) -> dict[str, Any]:
        trainer = {"max_steps": 20, "val_check_interval": 7, "log_every_n_steps": 4}
        trainer |= {"gradient_clip_val": 0.5, "limit_val_batches": 2, "accelerator": "cpu"}
        sizes = {"model_dim": 16, "ff_dim": 32, "num_heads": 2, "dropout": 0.0}
        model = {
            "pack": pack,
            "block": {"preset": "pre_ln"},
            "architecture": {**sizes, **KINDS[task]},
            "objective": {"kind": task, "evaluate_test": task == "causal_lm"},
            "optimizer": {"kind": "adamw", "lr": rate[0], "weight_decay": 0.1, "eps": 1e-6},
            "schedule": {"kind": "inverse_sqrt", "warmup_steps": rate[1]},
        }
        data = {"name": "synthetic", "cache": self.cache, "tokenizer": "word", "vocab_size": None}
        data |= {"tokens_per_batch": 256} | ({} if task == "translation" else {"window": 16})
        tree = {"seed_everything": 3, "trainer": trainer, "model": model, "data": data}
        return resolve(changed(tree, **fields), "test")


@pytest.fixture
def world(tmp_path: Path, cache: str) -> World:
    return World(tmp_path, cache)


def result(folder: RunFolder) -> dict[str, Any]:
    return json.loads(folder.result.read_text())


def weights(folder: RunFolder) -> Mapping[str, torch.Tensor]:
    return torch.load(folder.checkpoint("last"), weights_only=True)["state_dict"]


def scores(folder: RunFolder) -> dict[str, float]:
    metrics = result(folder)["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("train/")}


def rows(folder: RunFolder) -> list[dict[str, str]]:
    with folder.metrics.open() as file:
        return list(csv.DictReader(file))


def assert_same(one: RunFolder, other: RunFolder) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name], b[name], 0.0, 0.0, equal_nan=True) for name in a)
    assert scores(one) == scores(other)
    assert result(one)["validation_parts"] == result(other)["validation_parts"]


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        ("causal_lm", "post_ln"),
        ("causal_lm", "sas"),
        ("causal_lm", "hyper_connections"),
        ("masked_lm", "realformer"),
        ("translation", "pre_ln"),
        pytest.param("causal_lm", "rezero", marks=pytest.mark.slow),  # a gain is registered twice
        pytest.param("translation", "admin", marks=pytest.mark.slow),  # skips start from a batch
    ],
)
def test_a_cell_is_that_with_other_neighbours_and_nearly_that_alone(
    world: World, task: str, preset: str
) -> None:
    how: dict[str, Any] = {"task": task, "model__block__preset": preset}
    if task == "translation":
        # MKL rounds small products in float32 by the address of a matrix, so by the place in a
        # pack, where its rows are no multiple of 64 bytes; MKL_CBWR=AVX2 would end that.
        how["trainer__precision"] = "64-true"
    one, high = world.cell("one", WARM, **how), world.cell("high", HIGH, **how)
    run_pack([(high.path, 1), (one.path, 1)], keep="last")
    other, bad = world.cell("other", WARM, **how), world.cell("bad", NEVER_FINITE, **how)
    run_pack([(other.path, 1), (bad.path, 1)], keep="last")
    assert_same(one, other)
    alone = world.cell("alone", WARM, **{**how, "pack": 1})
    run_cell(alone.path, 1, keep="last")
    assert scores(alone).keys() == scores(one).keys()
    assert scores(one) == pytest.approx(scores(alone), rel=1e-5)
    assert all(torch.isfinite(value).all() for value in weights(one).values())
    assert result(bad)["outcome"] == "non_finite"
    same = ("steps", "tokens", "parameters", "trained_by", "steps_asked", "unigram_entropy")
    assert {name: result(one)[name] for name in same} == {
        name: result(alone)[name] for name in same
    }


def test_a_cell_that_diverges_ends_as_it_does_alone(world: World) -> None:
    bad, alone = world.cell("bad", NEVER_FINITE), world.cell("alone", NEVER_FINITE, pack=1)
    run_pack([(bad.path, 1), (world.cell("good", LOW).path, 1)], keep="last")
    run_cell(alone.path, 1, keep="last")
    same = ("outcome", "steps", "tokens", "diverged", "validation_parts")
    assert [result(bad)[name] for name in same] == [result(alone)[name] for name in same]
    assert scores(bad) == scores(alone)
    assert len(rows(bad)) == len(rows(alone))
    assert bad.checkpoint("last").exists() == alone.checkpoint("last").exists()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"model__optimizer__kind": "adam", "trainer__gradient_clip_algorithm": "value"},
        {"model__schedule__warmup_of": "matrices", "model__optimizer__block_rate": 0.5},
    ],
)
def test_a_cell_in_float64_has_the_weights_of_the_cell_alone(
    world: World, fields: dict[str, Any]
) -> None:
    fields = {**fields, "trainer__precision": "64-true"}
    one, alone = world.cell("one", WARM, **fields), world.cell("alone", WARM, pack=1, **fields)
    run_pack([(one.path, 1)], keep="last")
    run_cell(alone.path, 1, keep="last")
    a, b = weights(one), weights(alone)
    assert list(a) == list(b)
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-12
    # Each could go on from the checkpoint of the other.
    saved = [torch.load(each.checkpoint("last"), weights_only=True) for each in (one, alone)]
    assert saved[0]["lr_schedulers"] == saved[1]["lr_schedulers"]
    groups = [checkpoint["optimizer_states"][0]["param_groups"] for checkpoint in saved]
    rates = [[group["lr"] for group in of] for of in groups]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    for of_one, of_alone in zip(*map(rows, (one, alone)), strict=True):
        assert of_one.keys() == of_alone.keys()
        for name in ("step", "train/loss", "train/lr", "train/grad_norm", "val/nll"):
            pair = [float(row[name] or 0.0) for row in (of_one, of_alone)]
            assert pair[0] == pytest.approx(pair[1], rel=1e-7), name


def test_a_killed_pack_goes_on_to_the_same_bits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = (LOW, WARM, NEVER_FINITE)
    whole = [world.cell(f"whole{rate}", rate) for rate in rates]
    run_pack([(folder.path, 1) for folder in whole], keep="last")
    cut = [world.cell(f"cut{rate}", rate) for rate in rates]
    step = PackedModule.training_step

    def stopping(self: PackedModule, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(PackedModule, "training_step", stopping)
        with pytest.raises(SystemExit):
            run_pack([(folder.path, 1) for folder in cut], keep="last")
    saved = [torch.load(folder.checkpoint("last"), weights_only=True) for folder in cut]
    assert [checkpoint["global_step"] for checkpoint in saved] == [11, 11, 11]
    # A kill between two checkpoints leaves one of an earlier step, or none.
    cut[1].checkpoint("last").unlink()
    run_pack([(folder.path, 2) for folder in cut], keep="last")
    for one, other in zip(whole, cut, strict=True):
        assert_same(one, other)
        assert result(one)["steps"] in (4, 20)
        for name in ("steps", "tokens", "outcome_rule"):
            assert result(one)[name] == result(other)[name]
        assert len(rows(one)) == len(rows(other))
    assert [result(folder)["attempt"] for folder in cut] == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize(("task", "preset"), [("causal_lm", "sas"), ("translation", "realformer")])
def test_on_a_gpu_a_cell_is_that_with_other_neighbours(
    world: World, task: str, preset: str
) -> None:
    how = {"task": task, "model__block__preset": preset, "trainer__accelerator": "gpu"}
    one, high = world.cell("one", WARM, **how), world.cell("high", HIGH, **how)
    run_pack([(high.path, 1), (one.path, 1)], keep="last")
    other, bad = world.cell("other", WARM, **how), world.cell("bad", NEVER_FINITE, **how)
    run_pack([(other.path, 1), (bad.path, 1)], keep="last")
    assert_same(one, other)
    assert result(bad)["outcome"] == "non_finite"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pack": 0}, "model.pack"),
        ({"model__optimizer__kind": "lion", "model__optimizer__eps": 1e-9}, "model.optimizer.kind"),
        ({"model__architecture__dropout": 0.1}, "model.architecture.dropout"),
        ({"model__block__preset": "ngpt"}, "unit_matrices"),
        ({"model__block__preset": "sigma_reparam"}, "sigma_reparam"),
        ({"trainer__callbacks": [{"class_path": "SignalProbe"}]}, "trainer.callbacks"),
        ({"trainer__precision": "16-mixed"}, "trainer.precision"),
        ({"trainer__detect_anomaly": True}, "trainer.detect_anomaly"),
        ({"task": "translation", "model__objective__evaluate_test": True}, "evaluate_test"),
        ({"task": "translation", "model__objective__validation_bleu": 9}, "validation_bleu"),
    ],
)
def test_what_a_pack_cannot_train_is_refused(
    world: World, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=r"model\.pack") as refused:
        world.config(LOW, **fields)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
