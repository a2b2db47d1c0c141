"""The time that Lightning, callbacks, logging and the loader add to a step of a bare loop.

    python benchmarks/harness_overhead.py
    python benchmarks/harness_overhead.py --steps 2000 --rounds 5 --log-every 10

The same model, batches, seeds, optimizer and schedule run alternately like in `ablate run`
(loggers, callbacks, resumable loader; no validation) and in a bare loop; both must end at the same
loss. Prints milliseconds of CPU time for each step of this process, medians of the rounds. The
added time hardly depends on the model; with a small model it is a larger share.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.models.optim import build_optimizer, build_schedule
from lightning_app.training.module import loss_of
from lightning_app.training.run import TrainingRun

WARM = 50  # first steps, which are not measured
BASE = Path(__file__).parent.parent / "ablations/base/synthetic.yaml"


class Clock(pl.Callback):
    """Records CPU seconds after the warm steps and after the last step, and the last loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if trainer.global_step in (WARM, trainer.max_steps):
            self.seconds.append(time.process_time())
            self.loss = float(loss_of(outputs))


def harness(config: dict[str, Any]) -> tuple[float, float]:
    """Return the CPU milliseconds of a step in a run, and its last loss."""
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(config, folder=Path(folder), attempt=1)
        clock = Clock()
        run.trainer.callbacks.append(clock)  # pyright: ignore[reportAttributeAccessIssue]
        run.trainer.fit(run.model, datamodule=run.datamodule)
    return milliseconds(clock.seconds, config), clock.loss


def bare(config: dict[str, Any]) -> tuple[float, float]:
    """Return the CPU milliseconds of a step of a bare loop, and its last loss."""
    steps = config["trainer"]["max_steps"]
    pl.seed_everything(config["seed_everything"], verbose=False)
    module, data = transformer_module(config["model"]), data_module(config["data"])
    data.setup()
    module.build(data.vocab_size, data.source_vocab)
    assert module.model is not None
    module.model.train()
    optimizer = build_optimizer(module.optimizer, module.model, fused=True)
    schedule = build_schedule(module.schedule, optimizer, steps)
    loader = data.train_dataloader()
    seconds, done, loss = [], 0, torch.tensor(0.0)
    while done < steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = module.objective.sums(module.model, batch).loss / batch.predicted_tokens
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done in (WARM, steps):
                seconds.append(time.process_time())
            if done == steps:
                break
        loader.sampler.set_epoch(loader.sampler.epoch + 1)
    return milliseconds(seconds, config), float(loss.detach())


def milliseconds(seconds: list[float], config: dict[str, Any]) -> float:
    return 1e3 * (seconds[1] - seconds[0]) / (config["trainer"]["max_steps"] - WARM)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--log-every", type=int, default=50, help="trainer.log_every_n_steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tree = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    tree["model"]["architecture"] |= {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 16}
    tree["model"]["architecture"]["ff_dim"] = 16
    tree["data"]["tokens_per_batch"] = 64
    tree["trainer"] |= {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": options.steps,
        "val_check_interval": options.steps + 1,  # never
        "log_every_n_steps": options.log_every,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    config = resolve(tree, str(BASE))
    data_module(config["data"]).prepare_data()
    added = []
    for number in range(options.rounds):
        ours, loss = harness(config)
        base, other = bare(config)
        assert abs(loss - other) <= 1e-5 * abs(other), f"{loss} is not {other}"
        added.append(ours - base)
        print(f"{number + 1}: harness {ours:.2f} ms, bare {base:.2f} ms, added {added[-1]:.2f} ms")
    print(f"added, median: {statistics.median(added):.2f} ms a step")


if __name__ == "__main__":
    main()
