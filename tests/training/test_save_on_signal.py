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

    def on_validation_batch_start(
        self, trainer, pl_module, batch, batch_idx, dataloader_idx=0
    ) -> None:
        if self.validation and batch_idx == 0 and trainer.global_step == self.step:
            self.act()


def last_of(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def fit(folder: Path, cache: str, *more: pl.Callback, **settings: Any) -> TransformerModule:
    """Train in `folder`, from the checkpoint that lies there if there is one."""
    last = last_of(folder)
    callbacks = [
        BeforeAveraging(DivergenceMonitor(Monitored()), last),
        *more,
        *checkpoints(folder, Monitored()),
        SaveOnInterrupt(last),
    ]
    trained = module(dropout=0.3)
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
        **settings,
    )
    fitter.fit(
        trained,
        datamodule=data(cache),
        ckpt_path=last if last.exists() else None,
        weights_only=True,
    )
    return trained


Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def whole(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Weights]:
    """The weights of an undisturbed run that validates every so many steps."""

    @lru_cache
    def weights(interval: int) -> Weights:
        trained = fit(tmp_path_factory.mktemp("whole"), cache, val_check_interval=interval)
        return trained.state_dict()

    return weights


def assert_exact(
    folder: Path, cache: str, whole: Callable[[int], Weights], stop: int, signals: At, interval: int
) -> None:
    """A run that `signals` stop after step `stop` goes on to the weights of a whole one."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit):
        fit(folder, cache, signals, val_check_interval=interval)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    kept = torch.load(last_of(folder), weights_only=True)
    assert kept["global_step"] == stop
    rest = fit(folder, cache, val_check_interval=interval).state_dict()
    expected = whole(interval)
    assert rest.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(value, rest[name]), name


STOPS = [
    (2, signal.SIGINT),
    (3, signal.SIGTERM),
    (3, signal.SIGINT),
    (EPOCH, signal.SIGTERM),
    (EPOCH + 1, signal.SIGINT),
    (2 * EPOCH, signal.SIGINT),
    (STEPS, signal.SIGINT),
]
EACH_STEP, NEVER = 1, 100  # intervals of validation, beside the one in mid epoch
FIRST = {(EACH_STEP, *STOPS[3]), (NEVER, *STOPS[4])}
MATRIX = [(interval, *stop) for interval in (EACH_STEP, 3, NEVER) for stop in STOPS]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("interval", "stop", "number"),
    [
        pytest.param(*case, marks=[] if case[0] == 3 or case in FIRST else pytest.mark.slow)
        for case in MATRIX
    ],
)
def test_a_stopped_run_goes_on_to_the_same_weights(
    tmp_path: Path,
    cache: str,
    whole: Callable[[int], Weights],
    interval: int,
    stop: int,
    number: int,
) -> None:
    assert_exact(tmp_path, cache, whole, stop, At(stop, lambda: send(number)), interval)


@pytest.mark.parametrize(
    ("during", "stop", "number"),
    [
        (3, 4, signal.SIGTERM),
        (6, 7, signal.SIGINT),
        (STEPS, STEPS, signal.SIGTERM),
        (STEPS, STEPS, signal.SIGINT),
    ],
)
def test_a_run_that_is_stopped_in_a_validation_finishes_it(
    tmp_path: Path,
    cache: str,
    whole: Callable[[int], Weights],
    during: int,
    stop: int,
    number: int,
) -> None:
    """Also in the last validation, after which no step would notice the signal."""
    signals = At(during, lambda: send(number), validation=True)
    assert_exact(tmp_path, cache, whole, stop, signals, 3)


class Signals:
    """Sends Ctrl-C where Python ignores every exception."""

    def __del__(self) -> None:
        send(signal.SIGINT)


def test_ctrl_c_in_a_finalizer_is_not_lost(
    tmp_path: Path, cache: str, whole: Callable[[int], Weights]
) -> None:
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


def test_a_run_in_the_background_of_a_script_goes_on_ignoring_ctrl_c(
    tmp_path: Path, cache: str
) -> None:
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
