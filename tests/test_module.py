"""The one module: checkpoints that load safely, and training that continues from them."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_app.blocks.attention import ShapingSpec
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.spans import AuxiliaryTerms, Term, auxiliary_terms
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.core.errors import UserError
from lightning_app.models.optim import ScheduleConfig
from lightning_app.models.stack import count_tokens_of, stacks, step_counts
from lightning_app.scores.task_facts import Monitored
from lightning_app.tasks.base import Task
from lightning_app.tasks.masked_lm import MaskedBatch
from lightning_app.tasks.translation import TranslationBatch
from lightning_app.training.callbacks.loggers import Progress, Throughput
from lightning_app.training.callbacks.probes import GainLogger
from lightning_app.training.callbacks.safety import DivergenceMonitor, SaveOnInterrupt
from lightning_app.training.datamodule import training_steps
from lightning_app.training.module import TransformerModule
from tests.runs import data, module, trainer


@pytest.mark.parametrize("kind", ["translation", "masked_lm", "causal_lm"])
def test_a_checkpoint_loads_with_weights_only(tmp_path: Path, cache: str, kind: str) -> None:
    gains = {"ff_branch": Gain(value=0.3, learned=True), "shaped_attention": ShapingSpec()}
    trained = module(kind, preset="sas", **gains)
    fitter = trainer(tmp_path, max_steps=3)
    fitter.fit(trained, datamodule=data(cache, kind))
    path = tmp_path / "x.ckpt"
    fitter.save_checkpoint(path)
    torch.load(path, weights_only=True)

    loaded = TransformerModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.block == trained.block
    assert loaded.architecture == trained.architecture
    assert loaded.schedule == trained.schedule
    before, after = trained.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert any("shaping.alpha" in name for name in after)


@pytest.mark.in_turn(2)
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("kind", "preset", "epochs", "precision"),
    [
        *(("translation", "realformer", -1, None), ("translation", "realformer", 3, "64-true")),
        *(("masked_lm", "realformer", -1, "bf16-true"), ("translation", "admin", -1, None)),
        ("translation", "sigma_reparam", -1, None),
    ],
)
def test_resuming_in_mid_epoch_gives_the_weights_of_an_uninterrupted_run(
    tmp_path: Path, cache: str, kind: str, preset: str, epochs: int, precision: Any
) -> None:
    """Where epochs limit the run, Lightning would go on from the first batch of the epoch."""
    limits = {"max_steps": 9, "max_epochs": epochs, "precision": precision}
    whole = module(kind, preset=preset, dropout=0.3)
    pl.seed_everything(3)
    # What a run that was killed after step 5 would have left.
    where = {"dirpath": tmp_path, "filename": "part", "enable_version_counter": False}
    saver = ModelCheckpoint(**where, every_n_train_steps=5)
    fitter = trainer(tmp_path, **limits, callbacks=[saver], enable_checkpointing=True)
    fitter.fit(whole, datamodule=data(cache, kind))
    rest = module(kind, preset=preset, dropout=0.3)
    pl.seed_everything(3)
    torch.rand(7)  # other code may draw numbers in between
    fitter = trainer(tmp_path, **limits, callbacks=[saver], enable_checkpointing=True)
    part = tmp_path / "part.ckpt"
    fitter.fit(rest, datamodule=data(cache, kind), ckpt_path=part, weights_only=True)
    for (name, a), b in zip(whole.state_dict().items(), rest.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_another_schedules_checkpoint_does_not_bring_its_rate(tmp_path: Path, cache: str) -> None:
    """A run that goes on with a constant rate has it from its first step on."""
    ends = ScheduleConfig(kind="linear", warmup_steps=0, reference_steps=1)
    first = trainer(tmp_path, max_steps=3)
    first.fit(module(schedule=ends), datamodule=data(cache))
    first.save_checkpoint(tmp_path / "x.ckpt")
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    constant = module(schedule=ScheduleConfig(kind="constant", warmup_steps=0))
    fitter = trainer(tmp_path, max_steps=5, callbacks=[Rates()])
    fitter.fit(constant, datamodule=data(cache), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert rates == [3e-3, 3e-3]


def test_the_steps_of_a_run_are_those_of_its_limits(tmp_path: Path, cache: str) -> None:
    source = data(cache)
    batches = len(source.train_dataloader())
    for limits, steps in (
        ({"max_steps": 7, "max_epochs": -1}, 7),
        ({"max_steps": -1, "max_epochs": 2}, 2 * batches),
        ({"max_steps": 5, "max_epochs": 2}, 5),
        ({"max_steps": -1, "max_epochs": 3, "limit_train_batches": 4}, 12),
        ({"max_steps": -1, "max_epochs": 2, "limit_train_batches": 0.5}, 2 * (batches // 2)),
        ({"max_steps": -1, "max_epochs": -1}, -1),
    ):
        fitter = trainer(tmp_path, **limits)
        fitter.datamodule = source  # pyright: ignore[reportAttributeAccessIssue]
        assert training_steps(fitter) == steps, limits


def test_the_trained_loss_is_that_of_the_whole_global_batch(tmp_path: Path, cache: str) -> None:
    pl.seed_everything(1)
    trained = module()
    source = data(cache)
    trainer(tmp_path, max_steps=1).fit(trained, datamodule=source)
    batch = next(iter(source.train_dataloader()))
    assert isinstance(batch, TranslationBatch)
    assert int((batch.target[:, 1:] != 0).sum()) == int(batch.predicted_tokens)
    logits = trained(batch).flatten(0, 1)
    labels = batch.target[:, 1:].flatten()
    how: dict[str, Any] = {"ignore_index": 0, "label_smoothing": 0.1}
    expected = torch.nn.functional.cross_entropy(logits, labels, **how)
    sums = trained.objective.sums(trained.model, batch)
    torch.testing.assert_close(sums.loss / batch.predicted_tokens, expected)


@pytest.mark.parametrize("how", ["setting", "callback"])
def test_gradients_are_never_means_of_unequal_batches(tmp_path: Path, cache: str, how: str) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2}
    if how == "callback":
        settings = {"callbacks": [GradientAccumulationScheduler({1: 2})], "limit_train_batches": 2}
    fitter = trainer(tmp_path, max_steps=4, **settings)
    with pytest.raises(UserError, match=r"trainer.accumulate_grad_batches: 2; must be 1"):
        fitter.fit(module(), datamodule=data(cache))
    assert fitter.global_step == (0 if how == "setting" else 2)


class Waits(TorchDispatchMode):
    """Notes the step of every operation that a host can only end once the device has."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.seen: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        name = func.overloadpacket.__name__
        # An index of truth values asks how many of them are true.
        by_truth = name in ("index", "index_put_") and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        if name in self.NAMES or by_truth:
            self.seen.append((self.step, name))
        return func(*args, **(kwargs or {}))


class Steps(pl.Callback):
    """Tells `waits` of the step that begins."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.waits.step = trainer.global_step + 1


@pytest.mark.parametrize("kind", ["translation", "masked_lm", "causal_lm"])
@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "sas"])
def test_a_step_that_is_not_logged_never_waits(tmp_path, cache, monkeypatch, kind, preset) -> None:
    monkeypatch.setattr(Progress, "_due", lambda self: False)  # of which there is one a second
    waits = Waits()
    callbacks = [
        *(Steps(waits), DivergenceMonitor(Monitored()), Throughput(), GainLogger()),
        *(Progress(tmp_path / "progress.json"), SaveOnInterrupt(tmp_path / "last.ckpt")),
    ]
    logger = CSVLogger(tmp_path, name="", version="")
    fitter = trainer(tmp_path, max_steps=6, callbacks=callbacks, log_every_n_steps=4, logger=logger)
    with waits:
        fitter.fit(module(kind, dropout=0.1, preset=preset), datamodule=data(cache, kind))
    assert {step for step, _ in waits.seen if step in (1, 4)} == {1, 4}  # they are seen at all
    assert [each for each in waits.seen if each[0] in (2, 3, 5)] == []


def test_dropout_draws_new_numbers_at_each_step_batch_and_rank(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second epoch has the same batches at other steps; two ranks have different shares."""
    trained = module(dropout=0.3)
    trained.trainer = trainer(tmp_path)
    corpus = data(cache)
    corpus.prepare_data()
    corpus.setup("fit")
    trained.build(corpus.vocab_size)
    batch = next(iter(corpus.train_dataloader()))
    draws = []
    for step, index, rank in ((0, 0, 0), (9, 0, 0), (0, 1, 0), (0, 0, 1)):
        monkeypatch.setattr(TransformerModule, "global_step", property(lambda _, s=step: s))
        monkeypatch.setattr(TransformerModule, "global_rank", property(lambda _, r=rank: r))
        trained.on_train_batch_start(batch, index)
        draws.append(float(torch.rand(())))
        trained.on_train_batch_start(batch, index)
        assert float(torch.rand(())) == draws[-1]
    assert len(set(draws)) == 4


def test_each_evaluation_is_of_its_own_weights_without_tf32(tmp_path: Path, cache: str) -> None:
    trained, corpus = module(), data(cache)
    fitter = trainer(tmp_path, limit_val_batches=2)
    (first,) = fitter.validate(trained, corpus, verbose=False)
    assert trained.model is not None
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.mul_(3.0)
    (second,) = fitter.validate(trained, corpus, verbose=False)
    (again,) = fitter.validate(trained, corpus, verbose=False)
    assert second == again
    assert second["val/nll"] != pytest.approx(first["val/nll"], rel=1e-3)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


class Penalty(torch.nn.Module, AuxiliaryTerms):
    """A stand-in for a part of a model with a penalty on its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.span = torch.nn.Parameter(torch.tensor(2.0))

    def auxiliary_terms(self) -> dict[str, Term]:
        return {"span": Term(self.span, weight=0.25)}


def one_step(folder: Path, system: TransformerModule, source: Any) -> dict[str, float]:
    fitter = trainer(folder, max_steps=1, logger=CSVLogger(folder), log_every_n_steps=1)
    fitter.fit(system, datamodule=source)
    rows = csv.DictReader(next(folder.rglob("metrics.csv")).read_text().splitlines())
    return {k: float(v) for row in rows for k, v in row.items() if v}


def test_auxiliary_terms_are_trained_and_logged(tmp_path: Path, cache: str) -> None:
    def losses(*, penalised: bool) -> tuple[dict[str, float], Any]:
        pl.seed_everything(3)
        system = module("masked_lm", preset="pre_ln")
        datamodule = data(cache, "masked_lm")
        datamodule.prepare_data()
        datamodule.setup()
        system.build(datamodule.vocab_size)
        if penalised:
            assert system.model is not None
            system.model.penalty = Penalty()
        return one_step(tmp_path / str(penalised), system, datamodule), system.model

    (plain, _), (found, model) = losses(penalised=False), losses(penalised=True)
    assert "train/aux/span" not in plain
    assert found["train/aux/span"] == 0.5
    assert found["train/loss"] == pytest.approx(plain["train/loss"] + 0.5)
    assert found["train/nll"] == plain["train/nll"]
    assert float(model.penalty.span.detach()) < 2.0


def test_the_state_of_streams_is_in_the_checkpoint(tmp_path: Path, cache: str, monkeypatch) -> None:
    trained = module("masked_lm", preset="pre_ln")
    kept = {0: torch.randn(2, 3), 7: torch.randn(2, 3)}
    monkeypatch.setattr(trained.objective, "streams", lambda: kept)
    fitter = trainer(tmp_path, max_steps=1)
    fitter.fit(trained, datamodule=data(cache, "masked_lm"))
    fitter.save_checkpoint(tmp_path / "x.ckpt")
    loaded: list[Any] = []
    monkeypatch.setattr(Task, "load_streams", lambda self, streams: loaded.append(streams))
    TransformerModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    (streams,) = loaded
    assert list(streams) == [0, 7]
    assert all(torch.equal(streams[number], kept[number]) for number in kept)


def test_halting_is_trained_and_logged(tmp_path: Path, cache: str) -> None:
    def fitted(ponder_weight: float) -> tuple[dict[str, float], Any]:
        pl.seed_everything(3)
        spec = HaltingSpec(ponder_weight=ponder_weight)
        system = module("translation", preset="pre_ln", share="all", halting=spec)
        source = data(cache, "translation")
        return one_step(tmp_path / str(ponder_weight), system, source), system.model

    (free, _), (paid, model) = fitted(0.0), fitted(0.5)
    assert free["train/aux/ponder"] == 0.0
    assert free["train/loss"] == pytest.approx(paid["train/loss"] - paid["train/aux/ponder"])
    assert free["train/nll"] == paid["train/nll"]
    assert paid["train/aux/ponder"] > 0.5
    for name, stack in stacks(model).items():
        assert 1.0 <= paid[f"train/steps/{name}"] <= stack.spec.depth
        assert 0.0 <= paid[f"train/steps_at_limit/{name}"] <= 1.0


def test_shares_of_ranks_have_the_ponder_cost_of_the_whole() -> None:
    for kind, rows, blank in (
        ("translation", [[5, 6, 3], [7, 3, 0]], [[3]]),
        ("masked_lm", [[5, 6, 7], [8, 9, 10]], [[3, 3, 3]]),
    ):
        system = module(kind, preset="post_ln", share="all", halting=HaltingSpec(bias=-1.0))
        system.build(17)
        assert system.model is not None
        model = system.model

        def cost(
            tokens: list[list[int]], index: list[int], kind: str = kind, model=model, system=system
        ) -> list[float]:
            source, real = torch.tensor(tokens), index[0] >= 0
            if kind == "translation":
                target = torch.tensor([[2, 5, 3, 0]] * len(tokens) if real else [[0, 0]])
                batch: Any = TranslationBatch(source, target, torch.tensor(index), torch.tensor(4))
            else:
                places = torch.tensor([1 + 3 * i for i in range(len(index))] if real else []).long()
                batch = MaskedBatch(source, places, places, torch.tensor(index), torch.tensor(2))
            count_tokens_of(model, system.objective.real_tokens(batch))
            system.objective.sums(model, batch)
            found = auxiliary_terms(model, torch.tensor(1.0))["ponder"].item()
            return [found, *[float(n) for each in step_counts(model).values() for n in each]]

        whole = cost(rows, [0, 1])
        parts = [cost(rows[:1], [0]), cost(rows[1:], [1]), cost(blank, [-1])]
        assert whole == pytest.approx([sum(each) for each in zip(*parts, strict=True)])
        assert parts[2] == [0.0] * len(parts[2])
