"""What does a command cost before it does anything, and what does a refusal cost?

    python benchmarks/start_up.py                      # this version of the repository
    python benchmarks/start_up.py OLD_TREE NEW_TREE    # several, by turns

Seconds of processor time, user and system, of a command with the children that it waits for: the
median of `--rounds`. Each tree has a cache of its own, which the first `plan` fills.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "synthetic.yaml"
CALLS = {
    "import torch": ["-c", "import torch"],
    "import lightning.pytorch": ["-c", "import lightning.pytorch"],
    "mistyped command": ["pln"],
    "unknown name of a grid": ["plan", "demoo"],
    "missing grid file": ["plan", "no.yaml"],
    "unknown key in a grid file": ["plan", "key.yaml"],
    "unknown preset on an axis": ["plan", "preset.yaml"],
    "missing config of fit": ["fit", "--config", "no.yaml"],
    "unknown key of trainer in a config": ["fit", "--config", "trainer.yaml"],
    "unknown key of model in a config": ["fit", "--config", "model.yaml"],
    "unknown option of fit": ["fit", "--config", BASE, "--trainer.max_stepz", "2"],
    "unknown preset of fit": ["fit", "--config", BASE, "--model.block.preset", "pre_lm"],
    "missing checkpoint": ["test", "--config", BASE, "--ckpt_path", "no.ckpt"],
    "missing run of translate": ["translate", "--run", "nowhere"],
    "blocks": ["blocks"],
    "plan demo, an empty cache": ["plan", "demo"],
    "plan demo": ["plan", "demo"],
    "plan, 1,000 rates": ["plan", "rates.yaml"],
    "plan, 1,000 lengths": ["plan", "lengths.yaml"],
    "status demo": ["status", "demo"],
}


def write_files(folder: Path) -> None:
    base = (ROOT / "ablations" / "base" / BASE).read_text(encoding="utf-8")
    rates = [n * 1e-5 for n in range(1, 1001)]
    files = {
        BASE: base,
        "key.yaml": "name: key\naxess: {}\n",
        "trainer.yaml": base.replace("max_steps", "max_stepz"),
        "model.yaml": base.replace("num_heads", "num_haeds"),
        "preset.yaml": f"name: preset\nbase: {BASE}\naxes: {{model.block.preset: [pre_lm]}}\n",
        "rates.yaml": f"name: rates\nbase: {BASE}\naxes: {{model.optimizer.lr: {rates}}}\n",
        "lengths.yaml": f"name: lengths\nbase: {BASE}\n"
        f"axes: {{trainer.max_steps: {list(range(1, 1001))}}}\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def cost(tree: Path, folder: Path, words: list[str]) -> float:
    """Return the processor time of one call."""
    command = words if words[0] == "-c" else ["-m", "lightning_app", *words]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "LIGHTNING_APP_CACHE": str(folder / "cache"),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2):
        raise SystemExit(f"{words}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a row for each call, a column for each tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trees", type=Path, nargs="*", default=[ROOT])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    trees = [tree.resolve() for tree in args.trees]
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, str(number)) for number in range(len(trees))]
        for folder in folders:
            folder.mkdir()
            write_files(folder)
        print(f"| call | {' | '.join(tree.name for tree in trees)} |")
        print(f"|---|{'---|' * len(trees)}")
        for name, words in CALLS.items():
            rounds = 1 if "empty" in name else args.rounds
            found: list[list[float]] = [[] for _ in trees]
            for _ in range(rounds):
                for tree, folder, seconds in zip(trees, folders, found, strict=True):
                    seconds.append(cost(tree, folder, words))
            medians = (f"{statistics.median(seconds):.2f}" for seconds in found)
            print(f"| {name} | {' | '.join(medians)} |", flush=True)


if __name__ == "__main__":
    main()
