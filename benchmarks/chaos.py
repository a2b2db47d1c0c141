"""Check that a grid with random kills and stops ends like an undisturbed grid.

    python benchmarks/chaos.py --seeds 1 2 3
    python benchmarks/chaos.py --short

Runs two grids of tiny trainings, one of single processes and one of two ranks each: first without
any disturbance, then with faults that a seeded process injects from outside. Two supervisors of two
workers share the folder of the grid. The last line of its journal is torn now and then, as by the
power cut of a host that writes it. If this user may make namespaces (root on Linux), each host is a
set of network, process and mount namespaces; otherwise it is a process group with its own home and
temporary folders.

Prints a line of JSON for each seed: the faults by kind, the attempts, the attempts without result,
the seconds. The exit code is 1 if a cell has no result or two, if a result differs in one bit from
the undisturbed one, or if a process, a file in a temporary folder or a listener other than loopback
remains. The folder is then kept, and its name printed. A supervisor that refuses its grid (exit
code 2) is started again only where a fault can be the reason; without faults it is a problem at
once.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from chaos_checks import attempts_of, grid_problems, planned
from chaos_faults import Faults, draw, kinds_for, sample_listeners, tear
from chaos_hosts import Host, Job, has_namespaces, open_hosts, wait_until_gone

PRESETS = ("post_ln", "pre_ln", "normformer", "rezero")
WORKERS = 2
TICK = 0.05  # seconds
STUCK = 300.0  # seconds without a new result
MOST_STARTS = 50  # starts of one supervisor on one grid

_TRIALS = """
import json, sys, optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
where, name = sys.argv[1:]
storage = JournalStorage(JournalFileBackend(where))
study = optuna.load_study(study_name=name, storage=storage)
trials = [(t.state.name, t.user_attrs.get("cell")) for t in study.get_trials(deepcopy=False)]
print("trials", json.dumps(trials))
"""


@dataclass(frozen=True)
class GridFile:
    """A grid to run: its file, its cells, the devices of each cell."""

    path: Path
    cells: int
    devices: int

    @property
    def name(self) -> str:
        return self.path.stem


def write_grid(root: Path, name: str, cells: int, devices: int) -> GridFile:
    """Write a grid of `cells` trainings of about a second each, with dropout and checkpoints."""
    trainer = {"max_steps": 32, "val_check_interval": 8, "limit_val_batches": 2}
    trainer |= {"log_every_n_steps": 1, "accelerator": "cpu"}
    if devices > 1:
        trainer["strategy"] = "ddp"
    # Each number of devices has another rate: equal experiments of two grids would be one run,
    # and the number of devices is not part of an experiment.
    rate = 3.0e-2 / devices
    architecture = {"kind": "encoder_decoder", "encoder_depth": 1, "decoder_depth": 1}
    architecture |= {"model_dim": 16, "ff_dim": 16, "num_heads": 2, "dropout": 0.3}
    base = {
        "trainer": trainer,
        "model": {
            "architecture": architecture,
            "objective": {"kind": "translation", "beam": 1, "evaluate_test": False},
            "optimizer": {"kind": "adam", "lr": rate},
            "schedule": {"kind": "inverse_sqrt", "coupling": "decoupled", "warmup_steps": 8},
        },
        "data": {"name": "synthetic", "tokenizer": "word", "vocab_size": None},
    }
    base["model"]["schedule"]["reference_steps"] = 8
    base["data"] |= {"tokens_per_batch": 512, "cache": str(root / "cache")}
    seeds = list(range(1, cells // len(PRESETS) + 1))
    axes = {"model.block.preset": list(PRESETS), "seed_everything": seeds}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, "base_config": base, "axes": axes}))
    return GridFile(path, cells, devices)


@dataclass
class Turn:
    """A supervisor on a host, which is started again until its grid is finished."""

    host: Host
    log: Path
    job: Job | None = None
    done: bool = False
    next_start: float = 0.0
    starts: int = 0
    codes: Counter[int] = field(default_factory=Counter)


class Stage:
    """A grid in a folder, the supervisors that run it, and the observed problems."""

    def __init__(self, root: Path, grid: GridFile, hosts: dict[str, Host]) -> None:
        self.folder = root / "experiments" / grid.name
        self.problems: dict[str, None] = {}  # in the order of observation
        self.torn = 0
        self.sockets = 0  # of killed supervisors, left in temporary folders
        self._grid = grid
        self.turns = {
            name: Turn(host, root / f"{name}-{grid.name}.log") for name, host in hosts.items()
        }
        command = [sys.executable, "-m", "lightning_app", "run", str(grid.path)]
        command += ["--experiments", str(root / "experiments"), "--workers", str(WORKERS)]
        if grid.devices > 1:
            command += ["--devices-per-cell", str(grid.devices)]
        command += ["--hang-limit", "00:00:30"]
        self._command = command
        self._plots = root.parent / "matplotlib"

    def run(self, faults: Faults | None, chance: random.Random) -> float:
        """Run the grid to its end; return the seconds."""
        began = changed = time.monotonic()
        sampled, finished = 0.0, -1
        while not all(turn.done for turn in self.turns.values()):
            now = time.monotonic()
            for turn in self.turns.values():
                self._tend(turn, chance, disturbed=faults is not None)
            count = sum(1 for _ in (self.folder / "runs").glob("*/result.json"))
            if count != finished:
                finished, changed = count, now
            if faults is not None:
                faults.tick(count, over=count == self._grid.cells)
            if now - sampled > 0.5:
                watched = {name: turn.host for name, turn in self.turns.items()}
                self.problems |= dict.fromkeys(sample_listeners(watched))
                sampled = now
            if now - changed > STUCK:
                self.problems[f"{self.folder}: stuck at {finished} results"] = None
                break
            time.sleep(TICK)
        if faults is not None:
            faults.settle()
        seconds = time.monotonic() - began
        self._look_round()
        return seconds

    def _tend(self, turn: Turn, chance: random.Random, disturbed: bool) -> None:
        """Start a supervisor like a scheduler, again if it was ended."""
        now = time.monotonic()
        if turn.job is None and not turn.done and now >= turn.next_start:
            if turn.starts and disturbed:
                alone = all(each.job is None for each in self.turns.values())
                self.torn += tear(self.folder / "optuna.journal", chance, alone)
            turn.job = turn.host.start(self._command, turn.log, MPLCONFIGDIR=str(self._plots))
            turn.starts += 1
        code = None if turn.job is None else turn.job.poll()
        if code is None:
            return
        turn.job = None
        turn.codes[code] += 1
        turn.done = code == 0
        turn.next_start = now + chance.uniform(0.2, 2.0)
        refused = code == 2 and not disturbed
        if code == 1 or refused or turn.starts >= MOST_STARTS:
            end = turn.log.read_text()[-1500:]
            self.problems[f"{turn.log}: exit code {code} at start {turn.starts}:\n{end}"] = None
            turn.done = True

    def _look_round(self) -> None:
        """Record remaining processes and files, and errors in the logs."""
        for name, turn in self.turns.items():
            for process in wait_until_gone(turn.host, 10.0):
                self.problems[f"{name}: a process is left: {process}"] = None
            # Python's socket folder, which a killed process cannot remove.
            sockets = list(turn.host.temporary.glob("pymp-*"))
            self.sockets += len(sockets)
            if len(sockets) > turn.codes[-signal.SIGKILL]:
                self.problems[f"{name}: {len(sockets)} folders of sockets are left"] = None
            for path in set(turn.host.temporary.glob("*")).difference(sockets):
                if path.name.startswith("torchinductor_"):
                    continue  # the cache of torch, which its import creates
                self.problems[f"{name}: left in the temporary folder: {path}"] = None
            _, traceback, rest = turn.log.read_text().partition("Traceback")
            if traceback:
                self.problems[f"{turn.log}: {traceback}{rest[:3000]}"] = None
            unexpected = turn.codes.keys() - {0, 1, 2, 130, -signal.SIGKILL}
            if unexpected:
                self.problems[f"{turn.log}: exit codes {sorted(unexpected)}"] = None
            for path in sockets:
                shutil.rmtree(path)

    def trials(self, host: Host) -> list[list[str]]:
        """State and cell of every trial of the study, read by Optuna alone."""
        plan = json.loads((self.folder / "plan.json").read_text())
        where = str(self.folder / "optuna.journal")
        log = self.folder.parent.parent / f"trials-{self._grid.name}.log"
        name = f"{plan['name']}-{plan['hash']}"
        host.start([sys.executable, "-W", "ignore", "-c", _TRIALS, where, name], log).wait(120)
        text = log.read_text()
        if "trials " not in text:
            raise RuntimeError(f"the study cannot be read:\n{text}")
        return json.loads(text.rpartition("trials ")[2])

    def attempts(self) -> int:
        return sum(len(attempts_of(self.folder / "runs" / c["name"])) for c in planned(self.folder))


class Round:
    """The grids run again with the faults of one seed, and the findings."""

    def __init__(self, root: Path, seed: int, args: argparse.Namespace, namespaces: bool) -> None:
        self._root = root
        self._args = args
        self._namespaces = namespaces
        self._chance = random.Random(seed)
        self._faults: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self.found: dict[str, Any] = {"seed": seed, "problems": []}

    def run(self, grids: list[GridFile], hosts: dict[str, Host], whole: Path) -> None:
        seconds = 0.0
        for grid in grids:
            stage = Stage(self._root, grid, hosts)
            seconds += self._disturb(grid, stage)
            undisturbed = whole / "experiments" / grid.name
            trials = stage.trials(hosts["first"])
            self.found["problems"] += [
                *stage.problems,
                *grid_problems(undisturbed, stage.folder, trials),
            ]
        cells = sum(grid.cells for grid in grids)
        self.found |= {
            "hosts": "namespaces" if self._namespaces else "process groups",
            "cells": {grid.name: grid.cells for grid in grids},
            "supervisors": len(hosts),
            "workers_each": WORKERS,
            **self._counts,
            "wasted_attempts": self._counts["attempts"] - cells,
            "faults": dict(sorted(self._faults.items())),
            "faults_without_a_victim": dict(self._missed),
            "seconds": round(seconds, 1),
        }

    def _disturb(self, grid: GridFile, stage: Stage) -> float:
        kinds = kinds_for(grid.cells, grid.devices, self._args.short)
        faults = Faults(
            draw(kinds, grid.cells, self._chance),
            {name: turn.host for name, turn in stage.turns.items()},
            lambda name: stage.turns[name].job,
            self._chance,
        )
        seconds = stage.run(faults, self._chance)
        self._faults += faults.counts + Counter({"journal torn": stage.torn})
        self._missed += faults.left
        self._counts["attempts"] += stage.attempts()
        self._counts["supervisor_starts"] += sum(turn.starts for turn in stage.turns.values())
        self._counts["sockets_left_by_killed_supervisors"] += stage.sockets
        return seconds


def chaos(root: Path, args: argparse.Namespace) -> bool:
    """Run everything in `root`, print each round as a line of JSON; return whether all is well."""
    sizes = {"single": (args.cells, 1), "ranks": (args.ddp_cells, 2)}
    grids = [write_grid(root, name, *size) for name, size in sizes.items() if size[0]]
    namespaces = not args.no_namespaces and has_namespaces()
    whole = root / "undisturbed"
    whole.mkdir()
    well = True
    with open_hosts(root / "hosts", ["first", "second"], namespaces) as hosts:
        seconds = 0.0
        for grid in grids:
            stage = Stage(whole, grid, {"first": hosts["first"]})
            seconds += stage.run(None, random.Random())
            if stage.problems:
                print(json.dumps({"problems": list(stage.problems)}))
                return False
        print(json.dumps({"undisturbed_seconds": round(seconds, 1)}), flush=True)
        for seed in args.seeds:
            folder = root / f"seed{seed}"
            folder.mkdir()
            each = Round(folder, seed, args, namespaces)
            each.run(grids, hosts, whole)
            print(json.dumps(each.found), flush=True)
            well = well and not each.found["problems"]
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description="A grid that is killed and stopped at random.")
    parser.add_argument("--cells", type=int, help="of one process (default: 160, short 8)")
    parser.add_argument("--ddp-cells", type=int, help="of two ranks (default: 40, short 4)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="a round for each")
    parser.add_argument("--short", action="store_true", help="few cells, no fault that takes long")
    parser.add_argument(
        "--folder", type=Path, help="the working folder (default: a temporary folder)"
    )
    parser.add_argument("--no-namespaces", action="store_true", help="process groups as hosts")
    args = parser.parse_args()
    args.cells = args.cells if args.cells is not None else 8 if args.short else 160
    args.ddp_cells = args.ddp_cells if args.ddp_cells is not None else 4 if args.short else 40
    if args.cells % len(PRESETS) or args.ddp_cells % len(PRESETS):
        parser.error(f"--cells, --ddp-cells: expected multiples of {len(PRESETS)}")
    root = Path(tempfile.mkdtemp(prefix="chaos-", dir=args.folder))
    if not chaos(root, args):
        print(f"kept: {root}", file=sys.stderr)
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
