"""Do presets and optimizers train for 50 steps on three tasks in every mode, and survive a kill?

    python benchmarks/short_runs.py --presets ngpt mhc --folder /tmp/short
    python benchmarks/short_runs.py --optimizers soap ademamix --modes ranks

Trains small models on the embedded corpus: translation, masked and causal language modelling,
float32 and bf16-mixed. Modes, each in runs of 50 steps:

    eager       one process
    killed      the process is killed at step 30 and goes on from its checkpoint of step 25; its
                last checkpoint must have the weights of `eager`, bit for bit
    compiled    with compiled blocks (`model.compile: blocks`)
    ranks       two processes, with the same global batch

Each line has the loss of validation at the end and its difference from `eager`. The exit code is 1
if a loss is not finite, a resumed run has other bits, or a run fails. Rows that `--folder` has
already are not trained again.
"""

import argparse
import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_app import fit

BASES = Path(__file__).parents[1] / "ablations" / "base"
TASKS = {
    "translation": ("synthetic.yaml", ("encoder", "decoder")),
    "masked_lm": ("synthetic_mlm.yaml", ("encoder",)),
    "causal_lm": ("synthetic_lm.yaml", ("decoder",)),
}
PRECISIONS = ("32-true", "bf16-mixed")
MODES = ("eager", "killed", "compiled", "ranks")
STEPS, SAVED, KILLED = 50, 25, 30
SMALL = {
    "trainer.max_steps": STEPS,
    "trainer.val_check_interval": SAVED,
    "trainer.limit_val_batches": 4,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "model.architecture.model_dim": 32,
    "model.architecture.ff_dim": 64,
    "model.schedule.warmup_steps": 10,
    "model.schedule.reference_steps": 10,
    "data.tokenizer": "bpe",
    "data.vocab_size": 400,
    "data.tokens_per_batch": 256,
}
RATES = {"adafactor": 2e-2, "lion": 4e-4, "signum": 4e-4, "lamb": 8e-3}  # of the others: 2e-3


class Setting:
    """What a row trains: a preset or an optimizer on one task in one precision."""

    def __init__(self, what: tuple[str, str], task: str, precision: str) -> None:
        self.name = "-".join((*what, task, precision))
        base, sides = TASKS[task]
        self.base = str(BASES / base)
        kind, value = what
        self.fields: dict[str, Any] = SMALL | {"trainer.precision": precision}
        self.fields |= {f"model.architecture.{side}_depth": 2 for side in sides}
        if kind == "preset":
            self.fields["model.block.preset"] = value
            if value == "ngpt":  # which refuses weight decay
                self.fields["model.optimizer.weight_decay"] = 0.0
        else:
            self.fields |= {"model.optimizer.kind": value}
            self.fields["model.optimizer.lr"] = RATES.get(value, 2e-3)
            if value == "schedule_free":
                self.fields["model.schedule.kind"] = "constant"
            if "muon" in value:
                self.fields["model.optimizer.momentum"] = 0.95
            if value == "rotational_adamw":  # which turns by an angle that decay sets
                self.fields["model.optimizer.weight_decay"] = 0.1

    def overrides(self, folder: Path, mode: str) -> dict[str, Any]:
        made = self.fields | {"trainer.default_root_dir": str(folder)}
        if mode == "compiled":
            made["model.compile"] = "blocks"
        if mode == "ranks":
            made |= {"trainer.devices": 2, "trainer.strategy": "ddp"}
        return made


def train(setting: Setting, folder: Path, mode: str) -> None:
    """Train one row in this process."""
    if mode == "killed":
        if (child := os.fork()) == 0:
            _be_killed(setting, folder)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise RuntimeError(f"{setting.name}: ended with status {status} before it was killed")
        fit(setting.base, setting.overrides(folder, mode), ckpt_path="last")
    else:
        torch.compiler.reset()  # graphs of other rows count as recompilations
        fit(setting.base, setting.overrides(folder, mode))


def _be_killed(setting: Setting, folder: Path) -> None:
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        register_optimizer_step_post_hook(count)
        fit(setting.base, setting.overrides(folder, "killed"))
    finally:
        os._exit(1)


def ranks(rows: list[tuple[Setting, Path]], folder: Path) -> None:
    """Train rows on two processes, which are started once."""
    calls = folder / "calls.json"
    calls.write_text(
        json.dumps(
            [
                {"base": setting.base, "overrides": setting.overrides(to, "ranks")}
                for setting, to in rows
            ]
        )
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    subprocess.run([sys.executable, *launch, __file__, "--calls", str(calls)], check=False)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
    if saved["global_step"] != STEPS:
        raise RuntimeError(f"{folder}: last.ckpt is of step {saved['global_step']}")
    return saved["state_dict"]


def first_logged(table: Path) -> int:
    with table.open(encoding="utf-8") as file:
        return min(int(row["step"]) for row in csv.DictReader(file))


def loss_of(folder: Path) -> float:
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    found = result["metrics"]["val/nll"]  # also of a run that has not learned in 50 steps
    return math.nan if found is None else float(found)


def row_of(setting: Setting, folder: Path, mode: str) -> tuple[str, bool]:
    """The line of a row, and whether it is as it should be."""
    to, eager = folder / setting.name / mode, folder / setting.name / "eager"
    if not (to / "result.json").exists():
        return f"{setting.name} {mode}: no result", False
    loss = loss_of(to)
    line, good = f"{setting.name} {mode}: val/nll {loss:.4f}", math.isfinite(loss)
    if mode != "eager" and (eager / "result.json").exists():
        line += f", {loss - loss_of(eager):+.1e} of eager"
    if mode == "killed":
        if (logged := first_logged(to / "attempts" / "2" / "metrics.csv")) <= SAVED:
            return f"{setting.name} {mode}: began at step {logged} again", False
        one, other = weights_of(to), weights_of(eager)
        same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        line, good = line + (", equal bits" if same else ", OTHER BITS"), good and same
    return line, good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presets", nargs="*", default=[])
    parser.add_argument("--optimizers", nargs="*", default=[])
    parser.add_argument("--tasks", nargs="*", default=[*TASKS], choices=TASKS)
    parser.add_argument("--precisions", nargs="*", default=[*PRECISIONS], choices=PRECISIONS)
    parser.add_argument("--modes", nargs="*", default=[*MODES], choices=MODES)
    parser.add_argument("--folder", type=Path, default=Path("short_runs"))
    parser.add_argument("--calls", type=Path, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.calls:
        for call in json.loads(args.calls.read_text()):
            fit(call["base"], call["overrides"])
        return 0
    settings = [
        Setting(what, task, precision)
        for what in [("preset", p) for p in args.presets]
        + [("optimizer", o) for o in args.optimizers]
        for task in args.tasks
        for precision in args.precisions
    ]
    args.folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for mode in args.modes:
        missing = [
            (setting, to)
            for setting in settings
            if not ((to := args.folder.resolve() / setting.name / mode) / "result.json").exists()
        ]
        if mode == "ranks" and missing:
            ranks(missing, args.folder)
        for setting in settings:
            if mode != "ranks" and setting in [each for each, _ in missing]:
                train(setting, args.folder.resolve() / setting.name / mode, mode)
            line, good = row_of(setting, args.folder, mode)
            print(line, flush=True)
            wrong += not good
    print(f"{wrong} rows are not as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
