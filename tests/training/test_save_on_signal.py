"""A signal ends a run so that it can continue exactly: in an epoch, at its end, in a validation."""

import os
import signal
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_app.models.optim import OptimizerConfig, ScheduleConfig
from lightning_app.scores.task_facts import Monitored
from lightning_app.training.callbacks.safety import (
    BeforeAveraging,
    DivergenceMonitor,
    SaveOnInterrupt,
)
from lightning_app.training.module import TransformerModule
from lightning_app.training.run import checkpoints
from tests.runs import data, module, trainer

STEPS, EPOCH = 12, 4

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


class At(pl.Callback):
    """Call `act` in the middle of a step, or of the validation after it."""

    def __init__(self, step: int, act: Callable[[], object], *, validation: bool = False) -> None:
        self.step = step
        self.act = act
        self.validation = validation

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if not self.validation and trainer.global_step + 1 == self.step:
            self.act()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.validation and batch_idx == 0 and trainer.global_step == self.step:
            self.act()


def last_of(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


FREE: dict[str, Any] = {
    "optimizer": OptimizerConfig(kind="schedule_free", lr=3e-3, betas=(0.9, 0.98)),
    "schedule": ScheduleConfig(
        kind="constant", warmup_steps=5, batch_warmup_steps=7, batch_start=0.1
    ),
}


def fit(folder: Path, cache: str, *more: pl.Callback, by: Any = None, **how: Any) -> Any:
    """Train in `folder`, from the checkpoint that lies there if there is one."""
    last = last_of(folder)
    callbacks = [
        BeforeAveraging(DivergenceMonitor(Monitored()), last),
        *more,
        *checkpoints(folder, Monitored()),
        SaveOnInterrupt(last),
    ]
    trained = module(dropout=0.3, **by or {})
    pl.seed_everything(3, verbose=False)
    fitter = trainer(
        folder,
        max_steps=STEPS,
        limit_train_batches=EPOCH,
        limit_val_batches=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=callbacks,
        **how,
    )
    start = last if last.exists() else None
    fitter.fit(trained, datamodule=data(cache), ckpt_path=start, weights_only=True)
    return trained


Weights = dict[str, torch.Tensor]
Whole = Callable[[int], Weights]


@pytest.fixture(scope="module")
def whole(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The weights of an undisturbed run that validates every so many steps."""

    @lru_cache
    def weights(interval: int) -> Weights:
        trained = fit(tmp_path_factory.mktemp("whole"), cache, val_check_interval=interval)
        return trained.state_dict()

    return weights


def assert_exact(
    folder: Path, cache: str, whole: Whole, stop: int, signals: At, interval: int, by: Any = None
) -> None:
    """A run that `signals` stop after step `stop` goes on to the weights of a whole one."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit):
        fit(folder, cache, signals, by=by, val_check_interval=interval)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert torch.load(last_of(folder), weights_only=True)["global_step"] == stop
    rest = fit(folder, cache, by=by, val_check_interval=interval).state_dict()
    expected = whole(interval)
    assert rest.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(value, rest[name]), name


STOPS = [
    *((2, signal.SIGINT), (3, signal.SIGTERM), (3, signal.SIGINT), (EPOCH, signal.SIGTERM)),
    *((EPOCH + 1, signal.SIGINT), (2 * EPOCH, signal.SIGINT), (STEPS, signal.SIGINT)),
]
EACH_STEP, NEVER = 1, 100  # intervals of validation, beside the one in mid epoch
FIRST = {(EACH_STEP, *STOPS[3]), (NEVER, *STOPS[4])}
MATRIX = [(interval, *stop) for interval in (EACH_STEP, 3, NEVER) for stop in STOPS]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("interval", "stop", "number"),
    [
        pytest.param(*case, marks=[] if case[0] == 3 or case in FIRST else pytest.mark.slow)
        for case in MATRIX
    ],
)
def test_a_stopped_run_goes_on_to_the_same_weights(
    tmp_path: Path, cache: str, whole: Whole, interval: int, stop: int, number: int
) -> None:
    assert_exact(tmp_path, cache, whole, stop, At(stop, lambda: send(number)), interval)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("stop", "validation"), [(2, False), (EPOCH + 1, True), (STEPS, True)])
def test_a_schedule_free_run_with_a_growing_batch_goes_on_to_the_same_weights(
    tmp_path: Path, cache: str, stop: int, validation: bool
) -> None:
    """Stopped with the trained weights in the model, or with those of a validation."""
    undisturbed = fit(tmp_path / "whole", cache, by=FREE, val_check_interval=100).state_dict()
    signals = At(stop, lambda: send(signal.SIGINT), validation=validation)
    ended = stop if not validation or stop == STEPS else stop + 1
    assert_exact(tmp_path / "cut", cache, lambda _: undisturbed, ended, signals, 1, FREE)


def test_a_schedule_free_run_evaluates_its_average(tmp_path: Path, cache: str) -> None:
    """x_t, the mean of z by squared rates; y_t = 0.1 z_t + 0.9 x_t is trained."""
    z: list[Weights] = []
    seen: dict[str, list[Weights]] = {"trained": [], "validated": []}

    def weights(of: torch.nn.Module) -> Weights:
        return {name: value.detach().clone() for name, value in of.named_parameters()}

    class Recorder(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            seen["trained"].append(weights(pl_module))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            states = trainer.optimizers[0].state
            named = pl_module.named_parameters()
            z.append({name: states[each]["z"].clone() for name, each in named})

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            seen["validated"].append(weights(pl_module))

    trained = fit(tmp_path, cache, Recorder(), by=FREE, val_check_interval=5)
    rate = [min(1.0, step / 5) for step in range(1, STEPS + 1)]
    average: Weights = {name: value.clone() for name, value in seen["trained"][0].items()}
    averages: list[Weights] = []
    total = 0.0
    for t in range(STEPS):
        total += rate[t] ** 2
        share = rate[t] ** 2 / total
        average = {name: average[name].lerp(z[t][name], share) for name in average}
        averages.append(average)
    for t in range(STEPS - 1):
        for name, value in seen["trained"][t + 1].items():
            expected = 0.1 * z[t][name] + 0.9 * averages[t][name]
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    kept = torch.load(last_of(tmp_path), weights_only=True)
    evaluated = [each for place, each in enumerate(seen["validated"]) if place % 2 == 0]
    assert len(seen["validated"]) == 4
    for place, found in enumerate(evaluated):
        for name, value in averages[5 * place + 4].items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
            assert not torch.equal(found[name], seen["trained"][5 * place + 5][name])
    for name, value in averages[-1].items():
        torch.testing.assert_close(kept["state_dict"][name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(kept["state_dict"][name], trained.state_dict()[name])
        expected = 0.1 * z[-1][name] + 0.9 * averages[-1][name]
        torch.testing.assert_close(kept["trained_weights"][name], expected, rtol=1e-5, atol=1e-6)
    loaded = TransformerModule.load_from_checkpoint(last_of(tmp_path)).state_dict()
    assert all(torch.equal(loaded[name], kept["state_dict"][name]) for name in averages[-1])


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("during", "stop", "number"),
    [
        *((3, 4, signal.SIGTERM), (6, 7, signal.SIGINT), (STEPS, STEPS, signal.SIGTERM)),
        (STEPS, STEPS, signal.SIGINT),
    ],
)
def test_a_run_that_is_stopped_in_a_validation_finishes_it(
    tmp_path: Path, cache: str, whole: Whole, during: int, stop: int, number: int
) -> None:
    """Also in the last validation, after which no step would notice the signal."""
    assert_exact(tmp_path, cache, whole, stop, At(during, lambda: send(number), validation=True), 3)


class Signals:
    """Sends Ctrl-C where Python ignores every exception."""

    def __del__(self) -> None:
        send(signal.SIGINT)


def test_ctrl_c_in_del_is_not_lost(tmp_path: Path, cache: str, whole: Whole) -> None:
    """A `KeyboardInterrupt` would be: the training would go on to its last step."""
    assert_exact(tmp_path, cache, whole, 5, At(5, Signals), 100)


@pytest.mark.parametrize("validation", [False, True])
def test_a_second_ctrl_c_stops_at_once_and_saves_nothing(
    tmp_path: Path, cache: str, validation: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    reached = []

    def twice() -> None:
        send(signal.SIGINT)
        reached.append("between")
        send(signal.SIGINT)
        reached.append("after")

    with pytest.raises(SystemExit) as ending:
        fit(tmp_path, cache, At(6, twice, validation=validation), val_check_interval=3)
    assert isinstance(ending.value.__context__, KeyboardInterrupt)  # `main` returns 130 for it
    assert reached == ["between"]
    assert capfd.readouterr().err.count("Ctrl-C again stops at once") == 1
    kept = torch.load(last_of(tmp_path), weights_only=True)
    assert kept["global_step"] == 3  # of the validation before


def test_a_background_run_of_a_script_goes_on_ignoring_ctrl_c(tmp_path: Path, cache: str) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fit(tmp_path, cache, At(2, lambda: send(signal.SIGINT)), val_check_interval=100)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.load(last_of(tmp_path), weights_only=True)["global_step"] == STEPS


def test_a_run_without_checkpoints_ends_after_its_step_too(tmp_path: Path, cache: str) -> None:
    stop = At(2, lambda: send(signal.SIGINT))
    fitter = trainer(tmp_path, max_steps=STEPS, callbacks=[stop, SaveOnInterrupt(None)])
    with pytest.raises(SystemExit):
        fitter.fit(module(), datamodule=data(cache))
    assert fitter.global_step == 2
    assert list(tmp_path.rglob("*.ckpt")) == []
