"""Measure everything that needs a GPU, on one GPU, in one command of under 10 minutes.

    pip install -e '.[test,bench]'
    python benchmarks/gpu_campaign.py --json gpu.json
    python benchmarks/gpu_campaign.py --dry-run --json dry.json
    python benchmarks/gpu_campaign.py --grids ablations/widths.yaml --out studies --json gpu.json

Sections (`gpu_sections.py`) run one after another in order of worth, each in a process of its own
with a limit. The JSON has device, driver, versions, commit, command, and for each section its time
and results; it is complete after every section. A section that fails or is stopped keeps what it
had measured, and its error is in the JSON; one that the budget leaves no time for is named with
the reason. `--dry-run` runs every section on the CPU with tiny sizes; its figures mean nothing.

With `--grids` these grids run first, each for at most a share of the budget. What has ended by then
lies in `OUT/NAME.tar.gz`, a published study, which `ablate report NAME` restores once it is
unpacked; `ablate run` then continues it.

The exit code is 1 if a section failed or was stopped, 2 if there is no GPU.
"""

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_sections import ROOT, SECTIONS, Where
from benchmarks.measure import as_mappings, machine
from lightning_app.core.files import write_whole
from lightning_app.runs.provenance import checkout

BUDGET = 570.0
LEAST = 10.0  # a section is not started with fewer seconds left


def about(where: Where) -> dict[str, Any]:
    """Return the device with its driver, the versions, the commit and the command."""
    found = {
        **machine(where.device),
        **checkout(ROOT / "lightning_app"),
        "command": [sys.executable, *sys.argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "driver": None,
    }
    if where.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = [properties.major, properties.minor]
        asked = "name,driver_version,clocks.max.sm,power.limit,mig.mode.current"
        found["driver"] = said(["nvidia-smi", f"--query-gpu={asked}", "--format=csv"])
    return found


def said(command: list[str]) -> str:
    """Return what a command prints, or why it did not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()


def write(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(as_mappings(content), indent=1) + "\n")


class RunGrids(NamedTuple):
    """Where the studies go, the processes at a time, and the share of the budget for all."""

    out: Path
    processes: int
    share: float


def measure(name: str, where: Where, path: Path) -> int:
    """Measure one section in this process, and write its results as they come."""
    torch.set_num_threads(1)
    gc.freeze()  # a collection before each measurement then skips the imported modules
    results: dict[str, Any] = {}
    write(path, {"results": results})
    try:
        for what, value in SECTIONS[name].measure(where):
            results[what] = value
            write(path, {"results": results})
    except Exception:
        write(path, {"results": results, "error": traceback.format_exc()})
        return 1
    return 0


def alone(name: str, where: Where, path: Path) -> None:
    """Measure one section at the head of a process group, so that its processes end with it."""
    os.setsid()
    sys.exit(measure(name, where, path))


def apart(name: str, where: Where, path: Path, limit: float) -> dict[str, Any]:
    """Measure a section in a process of its own, which is killed after `limit` seconds.

    The process is forked from one that has imported the package and has not touched the device.
    """
    began = time.perf_counter()
    child = multiprocessing.get_context("forkserver").Process(
        target=alone, args=(name, where, path)
    )
    child.start()
    child.join(limit)
    stopped = child.is_alive()
    if stopped:
        assert child.pid is not None
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    found: dict[str, Any] = {"status": "done", "seconds": time.perf_counter() - began}
    if path.exists():
        found |= json.loads(path.read_text(encoding="utf-8"))
    if stopped:
        found |= {"status": "stopped", "reason": f"its limit of {limit:.0f} s"}
    elif child.exitcode:
        found = {"error": f"exit code {child.exitcode}", **found, "status": "failed"}
    return found


def run_grid(grid: Path, out: Path, processes: int, seconds: float) -> dict[str, Any]:
    """Run a grid for at most `seconds`, and pack what has ended into `out`."""
    name, began = grid.stem, time.monotonic()
    minutes, rest = divmod(round(max(1.0, seconds)), 60)
    ablate = [sys.executable, "-m", "lightning_app"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        at = ["--experiments", folder]
        words = [*ablate, "run", str(grid), *at, "--workers", str(processes)]
        if torch.cuda.is_available():
            words += ["--slots-per-device", str(processes)]
        words += ["--max-time", f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"]
        study = Path(folder) / "published" / name
        publish = [*ablate, "report", str(grid), *at, "--publish", str(study)]
        for what, command in (("run", words), ("publish", publish)):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found |= {what: done.returncode, f"{what}_said": (done.stdout + done.stderr)[-3000:]}
            found |= {f"{what}_seconds": time.monotonic() - began}
        if study.is_dir():
            out.mkdir(parents=True, exist_ok=True)
            shutil.make_archive(str(out / name), "gztar", study.parent, name)
    return found


def campaign(
    where: Where, path: Path, names: list[str], budget: float, grids: list[Path], how: RunGrids
) -> int:
    """Run the grids and the sections, and write the JSON after each; return the exit code."""
    ends = time.monotonic() + budget
    content: dict[str, Any] = {**about(where), "dry_run": where.dry, "budget": budget}
    content |= {"grids": {}, "sections": {}}
    for grid in grids:
        print(f"{grid}", flush=True)
        share = how.share * budget / len(grids)
        content["grids"][grid.stem] = run_grid(grid, how.out, how.processes, share)
        write(path, content)
    for name in names:
        section, left = SECTIONS[name], ends - time.monotonic()
        if left < LEAST:
            found: dict[str, Any] = {
                "status": "skipped",
                "reason": f"{max(0.0, left):.0f} s were left of the budget of {budget:.0f} s",
            }
        else:
            print(f"{name}: {section.title}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                slower = 10 if where.dry else 1  # a CPU shared with other work
                limit = min(slower * section.limit, left)
                found = apart(name, where, Path(folder) / "section.json", limit)
        content["sections"][name] = {"title": section.title, **found}
        write(path, content)
        shown = [f"{found['seconds']:.0f} s"] if "seconds" in found else []
        print(f"  {', '.join([found['status'], *shown, found.get('reason', '')]).rstrip(', ')}")
    print(f"numbers: {path}")
    if any(each["publish"] for each in content["grids"].values()):
        return 1
    failed = {"failed", "stopped"}
    return int(any(each["status"] in failed for each in content["sections"].values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_campaign.json"), metavar="FILE")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument("--grids", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("studies"), metavar="DIR")
    parser.add_argument("--processes", type=int, default=6, help="of a grid, at a time")
    parser.add_argument("--share", type=float, default=0.5, help="of the budget, for grids")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("torch finds no GPU; --dry-run tries the program on the CPU", file=sys.stderr)
        return 2
    where = Where("cpu" if args.dry_run else "cuda", args.dry_run)
    multiprocessing.set_forkserver_preload(["benchmarks.bench"])
    how = RunGrids(args.out, args.processes, args.share)
    return campaign(where, args.json, args.sections, args.budget, args.grids, how)


if __name__ == "__main__":
    sys.exit(main())
