"""Stands in for W&B, which is no dependency: it writes down what Lightning's WandbLogger gives it.

A line of `recorded.jsonl` in the run's `dir` for each call: `init`, `config`, `log`, `finish`.
"""

import json
import os
from pathlib import Path
from typing import Any

from wandb.wandb_run import Run  # pyright: ignore[reportMissingImports]

run = None


def init(**given: Any) -> Run:
    """Begin a run, as `wandb.init` does; the files of a real run are below `dir` too."""
    file = Path(given["dir"]) / "recorded.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)

    def record(call: str, content: Any) -> None:
        line = {"run": given["name"], "call": call, "given": content}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    record("init", {**given, "mode": os.environ.get("WANDB_MODE")})
    return Run(given["name"], record)
