"""A cell of a grid as a run: from the config in its folder, and from its last checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lightning_app import strict_yaml
from lightning_app.ablation.checkpoint import checkpoint_of_cell
from lightning_app.ablation.run import Run
from lightning_app.config.config import data_module
from lightning_app.experiment import cell_id
from lightning_app.run_folder import RunFolder


def run_cell(
    run_dir: Path,
    attempt: int,
    *,
    rank: int = 0,
    pruned_by: str | None = None,
    keep: str = "all",
    slot: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """Train the config in `run_dir` and write `result.json`, or `pruned.json` if it was pruned.

    Continues from the last checkpoint of an attempt that was cut short, to the same weights as an
    uninterrupted run. Runs in a separate process. Raises the error of a run that crashed.

    Args:
        run_dir: The run's folder, with the cell's config.
        attempt: The number of this attempt.
        rank: The rank of this process in the run; only rank 0 writes files.
        pruned_by: The metric to report at validations, for a pruner; None without a pruner.
        keep: The checkpoints to keep of a finished run: all, last, best or none.
        slot: The devices and threads of the run, for its result; `devices` has one for each rank.
        command: The command line that started the run; None for that of this process.
    """
    folder = RunFolder(run_dir)
    # Lightning was imported in the fork server, before this process had a rank.
    rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]
    if not folder.is_over(prunes=pruned_by is not None):
        tree = strict_yaml.load_yaml(folder.config.read_text(encoding="utf-8"))
        tree["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
        tree["trainer"] |= _devices(tree["trainer"], slot)
        data = data_module(tree["data"])
        checkpoint = checkpoint_of_cell(folder, cell_id(tree), tree["model"], data, rank)
        run = Run(
            tree,
            folder=run_dir,
            attempt=attempt,
            checkpoint=checkpoint,
            data=data,
            pruned_by=pruned_by,
            slot=slot,
            words=command,
        )
        run.fit()
    if rank == 0:
        folder.trim_checkpoints(keep)


def _devices(trainer: Mapping[str, Any], slot: Mapping[str, Any] | None) -> dict[str, Any]:
    """The Trainer's arguments for the devices of a cell, and for its strategy."""
    count = trainer["devices"]
    if slot is not None:
        count = len(slot["devices"])
    elif count == "auto":
        count = 1
    if count in (1, "1"):
        return {"devices": count, "strategy": "auto"}
    strategy = trainer["strategy"]
    return {"devices": count, "strategy": "ddp" if strategy == "auto" else strategy}
