"""The losses of the first steps of every preset on every task, and the files that keep them.

A file `tests/golden/TASK.yaml` holds the config of one task and, for each preset, the training loss
of each step: float32, one thread, CPU. `test_losses.py` compares them within 1e-4, which is wider
than the difference between processors and versions of torch and far smaller than what a change of
an equation, an initial value, a seed, a batch, a schedule or an optimizer makes.

A change that moves the numbers on purpose writes the files again and says why:

    python -m tests.golden.losses --reason "..."
"""

import argparse
import datetime
import platform
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from lightning_app.blocks.presets import PRESETS
from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.scores.task_facts import TASKS
from lightning_app.training.module import loss_of

FOLDER = Path(__file__).parent
TOLERANCE = 1e-4
"""The largest difference of a loss, as a share of the loss."""
HEADER = """\
# The config of one task and the training losses of its first steps for every preset (float32, one
# thread, CPU). Compared within 1e-4 by tests/golden/test_losses.py on any processor. Written by
#     python -m tests.golden.losses --reason "..."
"""


class Losses(pl.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(loss_of(outputs)))


def tasks() -> list[str]:
    """Return the name of every task that a model can be trained for."""
    return sorted(TASKS)


def path_of(task: str) -> Path:
    return FOLDER / f"{task}.yaml"


def read(task: str) -> dict[str, Any]:
    """Return what the file of `task` holds: `config`, `written` and `losses`."""
    return yaml.safe_load(path_of(task).read_text(encoding="utf-8"))


def train(config: Mapping[str, Any], preset: str, cache: str) -> list[float]:
    """Return the training loss of each step of `config`.

    Args:
        config: The sections of a run's config, as a user writes them.
        preset: The wiring of the blocks.
        cache: The folder of prepared corpora.
    """
    tree = deepcopy(dict(config))
    tree["model"]["block"] = {"preset": preset}
    tree["data"]["cache"] = cache
    if preset == "ngpt":  # which refuses weight decay
        tree["model"]["optimizer"]["weight_decay"] = 0.0
    if preset == "differential":  # which pairs heads
        tree["model"]["architecture"]["num_heads"] = 2
    tree = resolve(tree, f"{tree['model']['objective']['kind']}.yaml")
    settings = {"accelerator": "cpu", "limit_val_batches": 0, "logger": False}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False}
    settings |= {"enable_model_summary": False, "use_distributed_sampler": False}
    kept = {name: tree["trainer"][name] for name in ("max_steps", "precision", "gradient_clip_val")}
    losses = Losses()
    torch.set_num_threads(1)
    pl.seed_everything(tree["seed_everything"], workers=True, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(**kept, **settings, default_root_dir=folder, callbacks=[losses])
        trainer.fit(transformer_module(tree["model"]), datamodule=data_module(tree["data"]))
    return losses.losses


def text_of(task: str, losses: Mapping[str, list[float]], reason: str) -> str:
    """Return the new text of a file: the config and the former reasons stay."""
    held = read(task)
    note = {"date": f"{datetime.date.today()}", "torch": str(torch.__version__)}
    note |= {"machine": platform.machine(), "reason": reason}
    head = {"config": held["config"], "written": [*(held.get("written") or ()), note]}
    text = yaml.safe_dump(head, sort_keys=False, width=96, allow_unicode=True)
    rows = [f"  {preset}: [{', '.join(f'{x:.6f}' for x in row)}]" for preset, row in losses.items()]
    return "\n".join([HEADER + text + "losses:", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden losses of every task again.")
    parser.add_argument("--reason", required=True, help="why the numbers move; the files keep it")
    reason = parser.parse_args().reason.strip()
    if not reason:
        parser.error("--reason: say why the numbers move")
    with tempfile.TemporaryDirectory() as cache:
        for task in tasks():
            config = read(task)["config"]
            losses = {preset: train(config, preset, cache) for preset in PRESETS}
            path_of(task).write_text(text_of(task, losses, reason), encoding="utf-8")


if __name__ == "__main__":
    main()
