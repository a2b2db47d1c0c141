"""The provenance of a run, which is stored with each attempt and in every checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_app.atomic_write import write_whole
from lightning_app.hardware import hardware
from lightning_app.saved import RUN

_MAKERS = ("code", "plugins", "libraries", "data", "cpu", "gpus", "matmul")
_LATER = (
    "classes",
    "plugins_used",
    "arithmetic",
    "devices",
)  # an earlier version did not write them


class Origin(pl.Callback):
    """Complete and store the `provenance` of a run, before its first step.

    A resumed run lists the earlier provenances under `resumed_from`, from the checkpoint.

    Args:
        path: The file of this attempt.
        software: The version of the code, libraries and command line.
        resumed: Whether the run continues from a checkpoint.
        run: What each checkpoint says of the run that wrote it: its id, its seed, its parent's id.
    """

    def __init__(
        self, path: Path, software: Mapping[str, Any], resumed: bool, run: Mapping[str, Any]
    ) -> None:
        self._path = path
        self._run = dict(run)
        self.record: dict[str, Any] = dict(software)
        # A checkpoint without a record was written by an earlier version.
        self.record["resumed_from"] = [dict.fromkeys(_MAKERS)] if resumed else []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            data: Mapping[str, Any] = getattr(trainer, "datamodule", None).description  # pyright: ignore[reportOptionalMemberAccess]
            ids = getattr(trainer, "device_ids", [0])
            self.record["data"] = data["digest"]
            self.record |= hardware(trainer.strategy.root_device, ids)
            self.record["devices"] = trainer.world_size

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        makers = [*state_dict["resumed_from"], _makers(state_dict)]
        own = _makers(self.record)
        found: list[dict[str, Any]] = []
        for each in makers:
            if each != own and each not in found:
                found.append(each)
        self.record["resumed_from"] = found

    def state_dict(self) -> dict[str, Any]:
        return {**_makers(self.record), "resumed_from": self.record["resumed_from"]}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[RUN] = self._run

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            write_whole(self._path, json.dumps(self.record, indent=1))


def _makers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a provenance that says by what the numbers were made."""
    made = {key: record[key] for key in _MAKERS}
    return {**made, **{key: record[key] for key in _LATER if key in record}}
