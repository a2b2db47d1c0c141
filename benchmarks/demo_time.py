"""Compare the time of the demo's cells, or of the whole demo, in two trees of this repository.

    git archive COMMIT | tar -x -C /tmp/before
    python benchmarks/demo_time.py /tmp/before . --cells 0 10 20 30 --rounds 3
    python benchmarks/demo_time.py /tmp/before . --whole

The trees alternate. A cell runs like in a worker: in a child of a process that has imported the
program. Prints CPU seconds (user and system) and wall-clock seconds of A and of B, and their ratios
B / A: the medians of the rounds; with --whole those of `ablate run demo` with all its processes.
The metrics in `result.json` are compared, and the largest difference is printed. CPU time depends
least on other load of the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The environment that the supervisor sets for its cells.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}

CELL = """
import json, multiprocessing, resource, sys, time
from pathlib import Path
from lightning_app.ablation import program
from lightning_app.ablation.grid_spec import read_spec
from lightning_app.ablation.cells import cell_tree, combinations
from lightning_app.ablation.supervision.process import Job, prepare_data, run_rank
from lightning_app.ablation.supervision.slots import Slot
from lightning_app.run_folder import RunFolder

fork = multiprocessing.get_context("fork")

def in_child(function, *arguments):
    # What is made here would be there in the cell already.
    child = fork.Process(target=function, args=arguments)
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(child.exitcode)

def plan(tree, sender):
    config = program.resolve(tree, "demo")
    prepare_data(program.__name__, (config["data"],))
    if hasattr(program, "identify"):
        sender.send(program.identify(config).id)
    else:
        sender.send(program.cell_id(config))  # of versions before ids of schema 2

def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

folder, number = Path(sys.argv[1]), int(sys.argv[2])
grid = read_spec("demo")
tree = cell_tree(grid.base_config, list(combinations(grid))[number])
receiver, sender = fork.Pipe(duplex=False)
in_child(plan, tree, sender)
slot = Slot(group=0, visible=None, devices=1, threads=1, sharing=1, workers=2)
job = Job(program=program.__name__, folder=RunFolder(folder), attempt=1, tree=tree,
    identity=receiver.recv(), slot=slot, metric=None, keep="all")
cpu, wall = used(), time.perf_counter()
in_child(run_rank, job, 0)
print(json.dumps({"cpu": used() - cpu, "wall": time.perf_counter() - wall}))
"""

WHOLE = """
import ctypes, json, os, resource, subprocess, sys, time
# The fork server outlives the supervisor a little: as an orphan it becomes ours, with the time of
# its cells. PR_SET_CHILD_SUBREAPER, Linux alone.
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
wall = time.perf_counter()
subprocess.run([sys.executable, "-m", "lightning_app", "run", "demo", "--workers", "2"],
    cwd=sys.argv[1], check=True, stdout=subprocess.DEVNULL)
wall = time.perf_counter() - wall
try:
    while True:
        os.wait()
except ChildProcessError:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"cpu": usage.ru_utime + usage.ru_stime, "wall": wall}))
"""


def measure(tree: Path, program: str, *arguments: str) -> dict[str, float]:
    """Run `program` with the package of `tree`; return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(tree.resolve())},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of every cell under `folder`, by its name."""
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("result.json")}


def difference(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> float:
    """Return the largest relative difference of a metric other than speeds.

    Raises:
        SystemExit: if cells, their statuses or the numbers of tokens differ.
    """
    if a.keys() != b.keys() or not a:
        sys.exit("the trees ran other cells")
    worst = 0.0
    for name, one in a.items():
        other = b[name]
        for field in ("id", "status", "steps", "tokens", "parameters"):
            if one[field] != other[field]:
                sys.exit(f"{name}: {field} is {one[field]} in A and {other[field]} in B")
        for metric, value in one["metrics"].items():
            if metric != "train/tokens_per_second" and value is not None:
                worst = max(worst, abs(other["metrics"][metric] / value - 1.0))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("a", type=Path, help="a tree, such as an archive of an older commit")
    parser.add_argument("b", type=Path, help="the other tree")
    parser.add_argument("--cells", type=int, nargs="+", default=[0, 10, 20, 30])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="time `ablate run demo` instead")
    options = parser.parse_args()
    kinds = ["whole"] if options.whole else [str(cell) for cell in options.cells]
    trees = {"A": options.a, "B": options.b}
    for kind in kinds:
        seen: dict[str, list[dict[str, float]]] = {"A": [], "B": []}
        worst = 0.0
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                order = ("A", "B") if number % 2 == 0 else ("B", "A")
                for name in order:
                    place = Path(folder) / name / "cell"
                    place.mkdir(parents=True)
                    program = (WHOLE, str(place)) if options.whole else (CELL, str(place), kind)
                    seen[name].append(measure(trees[name], *program))
                parts = [results(Path(folder) / name) for name in ("A", "B")]
                worst = max(worst, difference(*parts))
        for clock in ("cpu", "wall"):
            a, b = (statistics.median(each[clock] for each in seen[name]) for name in seen)
            pairs = zip(seen["A"], seen["B"], strict=True)
            ratios = sorted(two[clock] / one[clock] for one, two in pairs)
            spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            print(f"{kind} {clock}: A {a:.1f} s, B {b:.1f} s, B / A {b / a:.3f} ({spread})")
        print(f"{kind}: metrics differ by at most {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
