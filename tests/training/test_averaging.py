"""Averages of weights: of the whole model, evaluated, kept, and gone on with to the last bit."""

import csv
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.config.config import resolve
from lightning_app.config.rules import check_traits, declared
from lightning_app.core.errors import UserError
from lightning_app.models.optim import OptimizerConfig, ScheduleConfig
from lightning_app.training.checkpoint import check_checkpoint
from lightning_app.training.module import TransformerModule
from lightning_app.training.run import TrainingRun
from tests.runs import data, module, trainer
from tests.tables import changed
from tests.told import told

DECAY = 0.8


def averaging(name: str = "EMAWeightAveraging", **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": arguments}


EMA = averaging(decay=DECAY)


def last(count: int = 3, every: int = 2) -> dict[str, Any]:
    path = "lightning_app.training.callbacks.averages.LastAverage"
    return {"class_path": path, "init_args": {"every": every, "count": count}}


LAST = last()  # of 9 steps: 5, 7 and 9
SWA = averaging("StochasticWeightAveraging", swa_lrs=0.1, device=None)
TWO = [averaging("WeightAveraging"), EMA]


def run(
    folder: Path,
    cache: str,
    *callbacks: dict[str, Any],
    steps: int = 9,
    checkpoint: Path | None = None,
    preset: str = "pre_ln",
    free: bool = False,
    test: bool = False,
    **trainer: Any,
) -> TrainingRun:
    """A run of a tiny model with dropout, which no validation falls on."""
    tree = yaml.safe_load(Path("ablations/base/synthetic.yaml").read_text())
    tree["trainer"] |= {"max_steps": steps, "val_check_interval": 100, "limit_val_batches": 2}
    tree["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
    tree["trainer"] |= {"callbacks": list(callbacks), **trainer}
    tree["model"]["architecture"] |= {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 16}
    tree["model"]["architecture"]["dropout"] = 0.2
    tree["model"]["schedule"]["warmup_steps"] = 0
    tree["model"]["block"]["preset"] = preset
    if free:
        tree["model"]["optimizer"]["kind"] = "schedule_free"
        tree["model"]["schedule"]["kind"] = "constant"
    tree["model"]["objective"]["evaluate_test"] = test
    tree["data"] |= {"cache": cache, "tokens_per_batch": 256}
    tree = resolve(tree, "test")
    verified = None if checkpoint is None else check_checkpoint(checkpoint, tree["model"])
    return TrainingRun(tree, folder=folder, checkpoint=verified)


def fit(folder: Path, cache: str, *callbacks: dict[str, Any], **settings: Any) -> TrainingRun:
    given = run(folder, cache, *callbacks, **settings)
    given.fit()
    return given


def metrics(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "result.json").read_text())["metrics"]
    return {name: value for name, value in found.items() if not name.startswith("train/")}


def load(folder: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


class Weights(pl.Callback):
    """The raw weights after each step, and those of each validation."""

    def __init__(self) -> None:
        self.raw: list[dict[str, torch.Tensor]] = []
        self.evaluated: list[dict[str, torch.Tensor]] = []

    @staticmethod
    def copied(module: pl.LightningModule) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        self.raw.append(self.copied(pl_module))

    def on_validation_batch_start(
        self, trainer, pl_module, batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.evaluated.append(self.copied(pl_module))

    def average(self, steps: int) -> dict[str, torch.Tensor]:
        """The moving average over the first steps, by its equation."""
        average = self.raw[0]
        for raw in self.raw[1:steps]:
            average = {n: DECAY * average[n] + (1 - DECAY) * p for n, p in raw.items()}
        return average


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("interval", [3, 100])
def test_all_weights_are_averaged_and_kept(tmp_path: Path, cache: str, interval: int) -> None:
    """Whether a validation falls on the last step or not."""
    given = run(tmp_path, cache, EMA, val_check_interval=interval, limit_val_batches=1)
    weights = Weights()
    given.trainer.callbacks.append(weights)  # pyright: ignore[reportAttributeAccessIssue]
    given.fit()
    average, raw = weights.average(9), weights.raw[-1]
    whole = sum(p.numel() for p in average.values())
    moved = sum(int((average[name] != raw[name]).sum()) for name in average)
    assert moved > 0.5 * whole  # embeddings of words that were not seen stay
    at = [3, 6, 9] if interval == 3 else [9]
    assert len(weights.evaluated) == len(at)
    for step, evaluated in zip(at, weights.evaluated, strict=True):
        assert_close(evaluated, weights.average(step))
    assert_close(dict(given.model.named_parameters()), average)

    last = load(tmp_path)
    parameters = dict(given.model.named_parameters())
    assert parameters.keys() <= last["state_dict"].keys()
    assert_close(last["state_dict"], average)
    for name in parameters:
        assert torch.equal(last["current_model_state"][name], raw[name]), name
    path = tmp_path / "checkpoints" / "best.ckpt"
    best = TransformerModule.load_from_checkpoint(path, weights_only=True)
    at_best = weights.average(load(tmp_path, "best")["global_step"])
    assert_close(dict(best.named_parameters()), at_best)
    result = json.loads((tmp_path / "result.json").read_text())
    evaluated = run(tmp_path / "again", cache, val_check_interval=interval, limit_val_batches=1)
    evaluated.model.build(best.vocab_size)
    evaluated.model.load_state_dict(last["state_dict"])
    found = evaluated.trainer.validate(evaluated.model, evaluated.datamodule, verbose=False)
    assert found[0]["val/nll"] == pytest.approx(result["metrics"]["val/nll"], rel=1e-6)


def test_an_average_that_is_known_once_built_is_checked_then(tmp_path, cache, monkeypatch) -> None:
    """An optimizer of a plug-in, whose class a plan does not know, and a scalar with a range."""
    free = OptimizerConfig(kind="schedule_free")
    with pytest.raises(UserError, match=r"schedule\.kind: inverse_sqrt with"):
        trainer(tmp_path, max_steps=1).fit(module(optimizer=free), datamodule=data(cache))
    constant = ScheduleConfig(kind="constant", warmup_steps=0)

    class Own(EMAWeightAveraging):
        pass

    with pytest.raises(UserError, match=r"EMAWeightAveraging with .* schedule_free"):
        trainer(tmp_path, max_steps=1, callbacks=[Own()]).fit(
            module(optimizer=free, schedule=constant), datamodule=data(cache)
        )
    averaged = [trait for trait in free.traits if trait[0] == "averages"]
    with pytest.raises(UserError, match=r"strategy: FSDPStrategy, which splits .* use ddp"):
        check_traits([*averaged, *declared((), (), "FSDPStrategy")])
    monkeypatch.setattr("lightning_app.training.module.check_traits", lambda _: None)
    ramps = module(optimizer=free, preset="prores")
    with pytest.raises(UserError, match=r"schedule_free .* model\..*branch sets or follows"):
        trainer(tmp_path, max_steps=1).fit(ramps, datamodule=data(cache))
    spans = module(optimizer=free, adaptive_span=AdaptiveSpan(longest=8, ramp=2.0))
    with pytest.raises(UserError, match=r"schedule_free .* model\..*span sets or follows"):
        trainer(tmp_path, max_steps=1).fit(spans, datamodule=data(cache))


class Cut(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int
    ) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("cut short")


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("average", [EMA, LAST])
def test_a_run_that_goes_on_averages_as_one_without_a_break(
    tmp_path: Path, cache: str, average: dict[str, Any]
) -> None:
    """From the checkpoint of a validation, two steps before it was cut short."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    fit(whole, cache, average, val_check_interval=5)
    cut = run(part, cache, average, val_check_interval=5)
    cut.trainer.callbacks.append(Cut())  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="cut short"):
        cut.fit()
    begun = part / "checkpoints" / "last.ckpt"
    assert load(part)["global_step"] == 5
    fit(part, cache, average, val_check_interval=5, checkpoint=begun)
    assert metrics(part) == metrics(whole)
    expected, found = load(whole), load(part)
    added = ("current_model_state", "averaging_state")
    if average is LAST:
        added = ("sums",)
        expected, found = (each | each["callbacks"]["LastAverage"] for each in (expected, found))
    for key in ("state_dict", *added):
        assert expected[key].keys() == found[key].keys()
        for name, value in expected[key].items():
            assert torch.equal(found[key][name], value), (key, name)


def test_an_average_changes_no_step_and_its_checkpoint_needs_its_callback(tmp_path, cache) -> None:
    fit(tmp_path / "with", cache, EMA)
    fit(tmp_path / "without", cache)
    raw = load(tmp_path / "with")["current_model_state"]
    for name, value in load(tmp_path / "without")["state_dict"].items():
        assert torch.equal(raw[name], value), name
    for source, callbacks in ("with", []), ("without", [EMA]):
        path = tmp_path / source / "checkpoints" / "last.ckpt"
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=f"--ckpt_path {path}: .*averaged weights"):
            run(tmp_path / "next", cache, *callbacks, checkpoint=path)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("callbacks", "settings", "message"),
    [
        ([SWA], {}, "test: trainer.callbacks: StochasticWeightAveraging … EMAWeightAveraging"),
        ([EMA], {"preset": "ngpt"}, "trainer.callbacks: EMAWeightAveraging … unit_matrices"),
        ([EMA], {"preset": "prores"}, "trainer.callbacks: EMAWeightAveraging … branch_ramp"),
        (TWO, {}, "trainer.callbacks: WeightAveraging and EMAWeightAveraging:"),
        ([last(1)], {}, "test: trainer.callbacks: LastAverage: count 1: … 2 or more"),
        ([last(every=0)], {}, "test: trainer.callbacks: LastAverage: every 0: … 1 or more"),
        ([LAST], {"steps": 4}, "LastAverage: count 3 and every 2 … 4 steps, found 4"),
        ([LAST, EMA], {}, "LastAverage with trainer.callbacks: EMAWeightAveraging, … remove"),
        ([LAST], {"free": True}, "LastAverage with model.optimizer.kind: schedule_free, … remove"),
        ([LAST], {"strategy": "fsdp"}, "LastAverage … trainer.strategy: fsdp splits; use ddp"),
        ([LAST], {"preset": "prores"}, "LastAverage with model.block: branch_ramp, … remove"),
    ],
)
def test_averages_that_would_not_be_right_are_refused(
    tmp_path: Path, cache: str, callbacks: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", cache, *callbacks, **settings)
    assert told(message).search(str(caught.value))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model__optimizer__weight_decay": 0.1}, "model.optimizer.weight_decay: 0.1 with"),
        ({"trainer__strategy": "fsdp"}, "which trainer.strategy: fsdp splits"),
    ],
)
def test_unit_matrices_need_whole_rows_without_decay(fields: dict[str, Any], said: str) -> None:
    tree = yaml.safe_load(Path("ablations/base/synthetic.yaml").read_text())
    with pytest.raises(UserError) as caught:
        resolve(changed(tree, model__block__preset="ngpt", **fields), "test")
    assert said in str(caught.value)


def test_an_average_that_begins_too_late_is_refused(tmp_path: Path, cache: str) -> None:
    """Its validation would be of the initial weights."""
    late = averaging(update_starting_at_step=7)
    for step, settings in (4, {"val_check_interval": 4}), (6, {"steps": 6}):
        folder = tmp_path / str(step)
        with pytest.raises(UserError, match=f"callbacks: EMAWeightAveraging .* by step {step},"):
            fit(folder, cache, late, **settings)
        assert not (folder / "result.json").exists()
        assert not (folder / "checkpoints").exists()


def test_the_last_weights_are_averaged_beside_the_run(tmp_path: Path, cache: str) -> None:
    """All else is as in a run without the callback, which translates otherwise by step 80."""
    settings = {"steps": 80, "val_check_interval": 30, "limit_test_batches": 1, "test": True}
    plain = fit(tmp_path / "without", cache, **settings)
    given = run(tmp_path / "with", cache, last(every=30), **settings)
    weights = Weights()
    given.trainer.callbacks.append(weights)  # pyright: ignore[reportAttributeAccessIssue]
    given.fit()
    found, expected = metrics(given.folder.path), metrics(plain.folder.path)
    average = {n.removeprefix("average/"): found.pop(n) for n in [*found] if n[0] == "a"}
    assert found == expected
    assert average.keys() == expected.keys() > {"val/nll", "test/nll", "test/bleu"}
    assert given.trainer.callback_metrics == plain.trainer.callback_metrics
    assert given.model.validation_parts == plain.model.validation_parts
    hypotheses = given.folder.hypotheses.read_text()
    assert hypotheses == plain.folder.hypotheses.read_text()
    tables = [one.folder.metrics.read_text().splitlines() for one in (given, plain)]
    for row, other in zip(*map(csv.DictReader, tables), strict=True):
        assert row.keys() == other.keys()
        assert all(row[name] == other[name] for name in (*expected, "step", "train/nll"))
    for name in ("last", "best"):
        one, two = (load(each.folder.path, name)["state_dict"] for each in (given, plain))
        assert all(torch.equal(one[key], two[key]) for key in two)
    for name, parameter in given.model.named_parameters():
        assert torch.equal(parameter, weights.raw[-1][name])
        parameter.data = torch.stack([weights.raw[step - 1][name] for step in (20, 50, 80)]).mean(0)
    again = dict(given.trainer.validate(given.model, given.datamodule, verbose=False)[0])
    again |= given.trainer.test(given.model, given.datamodule, verbose=False)[0]
    assert average == pytest.approx({name: again[name] for name in average}, rel=1e-6)
    assert given.model.objective.hypotheses != hypotheses.splitlines()


class Poison(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        next(pl_module.parameters()).data.fill_(torch.nan)


@pytest.mark.filterwarnings("ignore:Be aware that when using")  # without checkpoints of its own
def test_what_has_no_average_of_its_last_weights(tmp_path: Path, cache: str) -> None:
    """A run that failed, and one that goes on from a sum of other steps."""
    failed = run(tmp_path / "failed", cache, LAST)
    failed.trainer.callbacks.append(Poison())  # pyright: ignore[reportAttributeAccessIssue]
    failed.fit()
    assert metrics(tmp_path / "failed").keys() == {"val/nll", "val/accuracy", "val/perplexity"}
    fit(tmp_path / "short", cache, LAST, steps=5)
    begun = tmp_path / "short" / "checkpoints" / "last.ckpt"
    for steps, said in (
        (9, r"steps \[5, 7, 9\], .* of \[7, 9\]"),
        (5, r"\[3, 5\], .* \[1, 3, 5\]"),
    ):
        folder, average = tmp_path / f"to {steps}", LAST if steps == 9 else last(2)
        more = {} if steps == 9 else {"enable_checkpointing": False}
        with pytest.warns(UserWarning, match=f"LastAverage: no average: .* {said}"):
            fit(folder, cache, average, steps=steps, checkpoint=begun, **more)
        assert not any(name.startswith("average/") for name in metrics(folder))
    fit(tmp_path / "longer", cache, LAST, steps=10, checkpoint=begun)
    assert load(tmp_path / "longer")["callbacks"]["LastAverage"]["added"] == [6, 8, 10]
    again = {"steps": -1, "max_epochs": 1, "limit_train_batches": 4, "checkpoint": begun}
    before = (tmp_path / "short" / "result.json").read_bytes()
    with pytest.raises(UserError, match=r"LastAverage: count 3 and every 2 .* found 4"):
        fit(tmp_path / "short", cache, LAST, **again)
    assert (tmp_path / "short" / "result.json").read_bytes() == before
