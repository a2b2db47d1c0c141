"""Compare the time of the demo's cells, or of the whole demo, in two trees of this repository.

    git archive COMMIT | tar -x -C /tmp/before
    python benchmarks/demo_time.py /tmp/before . --cells 0 10 20 30 --rounds 3
    python benchmarks/demo_time.py /tmp/before . --whole

The trees alternate. A cell is `ablate fit` with the config of that cell, in a child of a process
that has imported the program, with one thread. Prints for A and B the CPU seconds (user and
system) and wall-clock seconds of a cell, the CPU milliseconds of a training step (the median over
the steps, from the end of one update to the end of the next), and their ratios B / A: the medians
of the rounds; with --whole those of `ablate run demo` with all its processes. The metrics in
`result.json` are compared, and the largest difference is printed. CPU time depends least on
other load of the machine.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ABLATIONS = Path(__file__).resolve().parent.parent / "ablations"

# The environment of a grid's cells. Before commit cc0635a the supervisor set the allocator with it;
# now `keep_freed_blocks` does the same in the process that trains.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}

# A program with: the folder of the experiments, and the arguments of `fit`. A first run of one step
# prepares the corpus.
CELL = """
import json, multiprocessing, os, resource, statistics, sys, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from lightning_app import cli
from lightning_app.grids import program  # imports what a run needs

fork = multiprocessing.get_context("fork")
folder, arguments = sys.argv[1], ["fit", *sys.argv[2:]]

def fit(place, more, sender):
    os.makedirs(place)
    os.chdir(place)
    ends = []
    register_optimizer_step_post_hook(
        lambda *_: ends.append(time.process_time()))
    os.dup2(2, 1)  # standard output is for the times
    torch.set_num_threads(1)
    code = cli.main([*arguments, *more])
    sender.send(ends)
    sys.exit(code)

def in_child(place, more=()):
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=fit, args=(os.path.join(folder, place), more, sender))
    child.start()
    sender.close()
    ends = receiver.recv()
    child.join()
    if child.exitcode:
        sys.exit(child.exitcode)
    return [after - before for before, after in zip(ends, ends[1:])]

def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

in_child("warm", ["--trainer.max_steps=1", "--trainer.limit_val_batches=1"])
cpu, wall = used(), time.perf_counter()
steps = in_child("cell")
cpu, wall = used() - cpu, time.perf_counter() - wall
print(json.dumps({"cpu": cpu, "wall": wall, "step": 1e3 * statistics.median(steps)}))
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


def cell_arguments(number: int) -> list[str]:
    """Return the arguments of `fit` for a cell of the demo: presets vary slowest, seeds fastest."""
    spec = yaml.safe_load((ABLATIONS / "demo.yaml").read_text(encoding="utf-8"))
    cells = list(itertools.product(*spec["axes"].values()))
    values = zip(spec["axes"], cells[number], strict=True)
    overrides = [f"--{axis}={value}" for axis, value in values]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    return ["--config", str(ABLATIONS / spec["base"]), *overrides, *quiet]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of every cell under `folder`, by its name without an id."""
    found = [json.loads(path.read_text()) for path in folder.rglob("result.json")]
    return {result["name"].rpartition("-")[0]: result for result in found}


def difference(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> float:
    """Return the largest relative difference of a metric other than speeds.

    Ids and words for an outcome may differ between versions.

    Raises:
        SystemExit: if cells or the numbers of steps, tokens or parameters differ.
    """
    if a.keys() != b.keys() or not a:
        sys.exit(f"the trees ran other cells: {sorted(a)} in A and {sorted(b)} in B")
    worst = 0.0
    for name, one in a.items():
        other = b[name]
        for field in ("steps", "tokens", "parameters"):
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
                    place = Path(folder) / name
                    place.mkdir(parents=True)
                    if options.whole:
                        program = (WHOLE, str(place))
                    else:
                        program = (CELL, str(place), *cell_arguments(int(kind)))
                    seen[name].append(measure(trees[name], *program))
                where = "." if options.whole else "cell"
                parts = [results(Path(folder) / name / where) for name in ("A", "B")]
                worst = max(worst, difference(*parts))
        for clock in seen["A"][0]:
            unit = "ms" if clock == "step" else "s"
            a, b = (statistics.median(each[clock] for each in seen[name]) for name in seen)
            pairs = zip(seen["A"], seen["B"], strict=True)
            ratios = sorted(two[clock] / one[clock] for one, two in pairs)
            spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            print(f"{kind} {clock}: A {a:.1f} {unit}, B {b:.1f} {unit}, ", end="")
            print(f"B / A {b / a:.3f} ({spread}), {a / b:.2f} times as fast")
        print(f"{kind}: metrics differ by at most {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
