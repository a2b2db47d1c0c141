"""The files that a run writes at its end; `result.json` or `pruned.json` comes last."""

import csv
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_app.core.errors import peak_resident_bytes
from lightning_app.core.files import write_whole
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.records import CUT_SHORT, sealed
from lightning_app.runs.run import words_of_short


def write_result(folder: RunFolder, result: Mapping[str, Any], model: Any, data: Any) -> None:
    """Write the files of a finished run, `result.json` last, and print its scores.

    Args:
        folder: The run's folder, with the metrics of the whole run.
        result: The content of `result.json`.
        model: The LightningModule after its evaluation.
        data: The LightningDataModule.
    """
    shutil.copyfile(data.corpus.tokenizer_file, folder.tokenizer)
    stacks = model.architecture.stacks(model.block)
    resolved = {side: asdict(spec) for side, spec in stacks.items()}
    write_whole(folder.block, json.dumps(resolved, indent=1))
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": result["device"],
        "slot": result["slot"],
        "versions": result["versions"],
        "provenance": result["provenance"],
    }
    write_whole(folder.environment, json.dumps(environment, indent=1))
    for path, lines in (
        (folder.hypotheses, model.objective.hypotheses),
        (folder.references, model.objective.targets),
    ):
        if lines:
            write_whole(path, "".join(f"{line}\n" for line in lines))
    write_whole(folder.result, json.dumps(sealed(result, folder.path), indent=1))
    folder.pruned.unlink(missing_ok=True)  # from an earlier grid with a pruner
    scores = ", ".join(f"{k} {v:.4f}" for k, v in result["metrics"].items() if v is not None)
    ended = result["outcome"].replace("_", " ")
    if result["outcome"] == CUT_SHORT:
        ended = words_of_short(result["steps"], result["steps_asked"])
    print(f"{folder}: {ended}, {scores}")


def write_pruned(folder: RunFolder, pruned: Mapping[str, Any]) -> None:
    """Write `pruned.json`, and print where the run ended."""
    write_whole(folder.pruned, json.dumps(sealed(pruned, folder.path), indent=1))
    ended = f"{pruned['metric']} {pruned['value']}"
    print(f"{folder}: pruned after step {pruned['step']}, {ended}")


def device_name(trainer: pl.Trainer) -> str:
    """The name of the device of a run, and the number of its processes if there are several."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return f"{trainer.world_size} x {name}" if trainer.world_size > 1 else name


def peak_memory_bytes(trainer: pl.Trainer) -> int:
    """The peak memory of the first rank: tensor memory on a GPU, the whole process on a CPU."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def join_metrics(logs: list[Path]) -> str:
    """Join the logs of successive attempts into one CSV table with one row per step.

    If several attempts logged a step, the last one counts. An unterminated last line was cut off
    when the process was killed. Its step follows the checkpoint, so a later attempt logs it again.
    """
    rows: dict[int, dict[str, str]] = {}
    columns: dict[str, None] = {"epoch": None, "step": None}
    for log in logs:
        if not log.exists():
            continue
        data = log.read_bytes()
        whole = data[: data.rfind(b"\n") + 1].decode("utf-8")
        seen: dict[int, dict[str, str]] = {}
        for row in csv.DictReader(whole.splitlines()):
            step = int(float(row["step"]))
            given = {key: value for key, value in row.items() if value}
            seen.setdefault(step, {}).update(given)
            columns |= dict.fromkeys(given)
        if not seen:
            continue
        first = min(seen)
        # After an attempt interrupted at its last step, only the evaluation is repeated.
        seen[first] = rows.get(first, {}) | seen[first]
        rows = {step: row for step, row in rows.items() if step < first} | seen
    lines = [",".join(columns)]
    lines += [",".join(rows[step].get(c, "") for c in columns) for step in sorted(rows)]
    return "\n".join(lines) + "\n"
