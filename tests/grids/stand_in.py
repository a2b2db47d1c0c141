"""A program for the grid runner that trains nothing, and misbehaves if its config says so.

Run as a script it is the supervisor: `stand_in.py GRID FOLDER WORKERS [retry] [seconds=N]`. With
index=N it writes an index whenever it may, for N seconds; with late=N the time is up at the first
index after N cells have ended.
"""

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import yaml

from lightning_app.config.identity import Identity
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.grids.workers import Job
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.parent import with_parent
from tests.records import pruned, result

BASE = {
    "seed_everything": 1,
    "trainer": {"max_steps": 4, "devices": 1},
    "model": {
        "block": {"preset": "post_ln", "norm": None, "shaped_attention": None},
        "optimizer": {"kind": "adam", "lr": 0.1},
        "schedule": {
            **{"kind": "inverse_sqrt", "coupling": "decoupled"},
            **{"warmup_steps": 0, "reference_steps": 60},
        },
        "init_from": None,
    },
    # delay: seconds for each step
    "data": {"name": "synthetic", "seed": 1, "delay": 0.02, "behaviour": "ok", "init_from": None},
}


def resolve(tree: dict, source: str) -> dict:
    """The complete config; in the run it differs from the planned one if the config says so."""

    def fill(given: dict, default: dict, where: str) -> dict:
        for key in given:
            if key not in default:
                raise UserError(f"{source}: unknown key '{where}{key}'")
        filled = {}
        for key, value in default.items():
            if isinstance(value, dict):
                filled[key] = fill(given.get(key, {}), value, f"{where}{key}.")
            else:
                filled[key] = given.get(key, value)
        return filled

    config = fill(tree, BASE, "")
    if config["model"]["block"]["preset"] == "sas" and config["model"]["block"]["norm"] == "none":
        raise UserError(f"{source}: model.block.norm: 'none' is impossible with sas")
    config["data"]["seed"] = config["seed_everything"]
    config["data"]["init_from"] = config["model"]["init_from"]
    if config["data"]["behaviour"] == "resolved otherwise" and source.endswith("config.yaml"):
        config["data"]["delay"] *= 2
    return config


CORPUS = "0" * 64


def identify(config: dict) -> Identity:
    return Identity(id=cell_id(config), corpus=CORPUS)


def cell_id(config: dict) -> str:
    if (config.get("model") or {}).get("init_from"):
        config = with_parent(config)
    relevant = {**config, "trainer": {**config["trainer"], "devices": None}}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def prepare(config: dict) -> None:
    if config["name"] == "missing":
        raise UserError("data.root: no such folder: nowhere")
    note("prepare", config["name"])


def note(*words: object) -> None:
    """Append a complete line to the ledger: an event, independent of the runner."""
    line = " ".join(map(str, words)) + "\n"
    ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, line.encode())
    os.close(ledger)


def provenance() -> dict:
    code = os.environ.get("CODE", "a")
    made = {"code": code, "libraries": {"torch": code}, "cpu": "this"}
    return made | {"gpus": [], "matmul": "MKL", "threads": 1, "data": "ab", "resumed_from": []}


def here(configs: tuple) -> dict:
    return {"provenance": provenance(), "corpora": [{"digest": "ab"}] * len(configs)}


def count_devices() -> int:
    return 0


def run_cell(job: Job, rank: int) -> None:
    run_dir, attempt = job.folder.path, job.attempt
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    steps, behaviour = config["trainer"]["max_steps"], config["data"]["behaviour"]
    note("start", run_dir.name, attempt, os.getpid())
    print("training", run_dir.name)
    record = run_dir / "attempts" / str(attempt)
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    for step in range(steps):
        progress = {"step": step, "max_steps": steps, "rate": 50.0, "loss": 3.0}
        write_whole(record / "progress.json", json.dumps(progress))
        time.sleep(config["data"]["delay"])
        misbehave(behaviour, run_dir, attempt)
        if job.metric is not None and is_pruned(job, config, step + 1, started):
            return
    seed, warmup = config["seed_everything"], config["model"]["schedule"]["warmup_steps"]
    rate = config["model"]["optimizer"]["lr"]
    too_high = behaviour == "curve" and rate > 0.3
    diverged = behaviour in ("stall", "not finite") or too_high
    nll = 9.0 if diverged else 3.0 + seed / 10 - warmup / 100
    nll += 1.0 if provenance()["code"] == "b" else 0.0
    if behaviour == "curve":  # the best rate is 0.05, and 0.1 with warm-up
        best = (0.1 if warmup else 0.05) * float(os.environ.get("SHIFT", "1"))
        nll = 9.0 if diverged else nll + 0.4 * math.log2(rate / best) ** 2
    loss = None if behaviour == "not finite" else nll
    more = {"steps": steps, "seconds": steps * config["data"]["delay"], "provenance": provenance()}
    more |= {"metrics": {"val/nll": loss, "val/bleu": 10.0}, **of_attempt(job, started)}
    ended = result(cell_id(config), "diverged" if diverged else "ok", loss, **more)
    leave_weights(job.folder, ended["id"], text=run_dir.name)
    write_whole(run_dir / "result.json", json.dumps(ended))
    note("end", run_dir.name, attempt)
    if behaviour == "crash after the result":
        raise RuntimeError("too late to matter")


def of_attempt(job: Job, started: str) -> dict:
    finished = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    name = {"name": job.folder.name, "attempt": job.attempt}
    return {**name, "started": started, "finished": finished}


def leave_weights(run: RunFolder, identity: str, text: str) -> None:
    """Write what a child of a run reads."""
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    for name in ("last", "best"):
        write_whole(run.checkpoint(name), text)
    write_whole(run.tokenizer, "a tokenizer")
    write_whole(run.identity, json.dumps({"id": identity}))


def is_pruned(job: Job, config: dict, step: int, started: str) -> bool:
    """Report the learning rate like a loss, and end the run where the supervisor stops it."""
    report = {"step": step, "metric": job.metric, "value": config["model"]["optimizer"]["lr"]}
    with job.record.reports.open("a") as file:
        file.write(json.dumps(report) + "\n")
    if stopped := job.record.stop.exists():
        tree = pruned(cell_id(config), **report, **of_attempt(job, started))
        write_whole(job.folder.pruned, json.dumps(tree))
        note("pruned", job.folder.name, job.attempt)
    return stopped


def misbehave(behaviour: str, run_dir: Path, attempt: int) -> None:
    if behaviour == "crash":
        raise ValueError("a bad\nday")
    if behaviour == "crash once" and attempt == 1:
        raise ValueError("once")
    if behaviour == "leave":
        sys.exit(0)
    if behaviour == "die" or (behaviour == "die once" and attempt == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "full disk":
        raise RuntimeError("while saving") from OSError(errno.ENOSPC, "No space left on device")
    if behaviour == "fill":
        with (run_dir / "attempts" / str(attempt) / "big").open("ab") as file:
            file.write(b"x" * (1 << 20))
    if behaviour == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if behaviour == "environment":
        names = ("RANK", "MASTER_PORT", "SLURM_JOB_ID", "PL_GLOBAL_SEED", "OMP_NUM_THREADS")
        print("environment", {name: os.environ.get(name) for name in names})


def main() -> int:
    from lightning_app.config.grid import read_spec
    from lightning_app.grids import supervisor
    from lightning_app.grids.slots import Options
    from lightning_app.grids.supervisor import run_grid
    from lightning_app.runs.folder import GridFolder

    grid, folder, workers, *rest = sys.argv[1:]
    words = {key: value for key, _, value in (word.partition("=") for word in rest)}
    options = Options(
        workers=int(workers),
        seconds=float(words.get("seconds", "inf")),
        retry_failed="retry" in words,
        rerun_stale="rerun" in words,
        retry_damaged="damaged" in words,
        storage=words.get("storage"),
        hang_limit=float(words.get("hang_limit", 1800)),
        devices_per_cell=int(words["devices"]) if "devices" in words else None,
        wait="nowait" not in words,
    )
    index_seconds = float(words.get("index", 0.0))
    if index_seconds:
        supervisor._INDEX_EVERY = 0.0  # pyright: ignore[reportPrivateUsage]

    def index(folder: Path) -> None:
        if index_seconds:
            note("index-begins")
            time.sleep(index_seconds)
            note("index-ends")
        if "late" in words and Path(os.environ["LEDGER"]).read_text().count("end ") >= int(
            words["late"]
        ):  # the time is up once so many cells have ended
            late = {**vars(time), "monotonic": lambda: math.inf}
            supervisor.time = SimpleNamespace(**late)  # pyright: ignore[reportAttributeAccessIssue]

    try:
        start = partial(run_grid, program="stand_in", corpus=lambda data: CORPUS, index=index)
        ending = start(read_spec(grid), GridFolder(Path(folder)), options)
    except UserError as error:
        print(f"ablate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"ablate: {error}", file=sys.stderr)
        return 1
    if ending.cut:
        print(f"ablate: {ending.cut}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
