"""A copy of the checkout in which what the documentation shows takes seconds.

Its grids have few cells, its configs a few steps of a narrow model, its corpora are the beginnings
of the real ones. Names of grids, paths and the package are those of a checkout.
"""

import gzip
import json
import lzma
import shutil
import sys
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

import yaml

from tests.pages import ROOT, fenced

FOLDERS = ("lightning_app", "tests", "docs", "benchmarks", "ablations")
FILES = ("Makefile", "pyproject.toml", "constraints.txt")
BIN = Path(".venv", "bin")
WARMUP = "model.schedule.warmup_steps"
ONE = ("model.optimizer.lr", "model.optimizer.bias_correction", "seed_everything")
"""Axes that keep one value."""
STEPS = {
    "max_steps": 4,
    "val_check_interval": 4,
    "log_every_n_steps": 1,
    "limit_val_batches": 2,
    "limit_test_batches": 2,
}
DAMPED = "ablations/damped.yaml"
DEPTHS = ("encoder_depth", "decoder_depth")
WIDTHS = {"model_dim": 16, "ff_dim": 16, "num_heads": 2}
_OPEN: Mapping[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}  # pyright: ignore[reportAssignmentType]


def write_checkout(folder: Path) -> None:
    """Copy the package and its files into a new `folder`, and shrink its configs and grids."""
    ignored = shutil.ignore_patterns("__pycache__", "golden")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    ablations = folder / "ablations"
    for path in ablations.glob("*.yaml"):
        tree = _read(path)
        _write(path, small_grid(tree, _read(ablations / tree["base"])))
    for path in ablations.glob("base/*.yaml"):
        _write(path, small_config(_read(path)))


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(tree), sort_keys=False), encoding="utf-8")


def small_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Four steps of a narrow model with two blocks in a stack."""
    tree["trainer"] |= STEPS
    architecture, schedule = tree["model"]["architecture"], tree["model"]["schedule"]
    architecture |= {**WIDTHS, **{name: 2 for name in DEPTHS if name in architecture}}
    schedule |= {"warmup_steps": 2, "reference_steps": 2}
    if "validation_bleu" in tree["model"]["objective"]:
        tree["model"]["objective"]["validation_bleu"] = 2
    tree["data"]["tokens_per_batch"] = 512
    if tree["data"]["vocab_size"]:
        tree["data"]["vocab_size"] = 500
    return tree


def small_grid(tree: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """One or two values of each axis. A grid and its parent still match."""
    axes, labels = tree["axes"], tree.get("labels", {})
    if WARMUP in axes:
        axes[WARMUP] = [0, 2]
        tree["sensitivity"]["reference_warmup"] = 2
    for axis, values in axes.items():
        if isinstance(values, list) and len(values) > 1:
            one = axis in ONE
            # The largest warm-up is the one that the grid compares with.
            kept = [0] if one else [0, -1 if axis == WARMUP else 1]
            axes[axis] = [values[number] for number in kept]
            if axis in labels:
                labels[axis] = [labels[axis][number] for number in kept]
    return tree


def write_corpora(folder: Path, real: Path) -> None:
    """Write the beginning of each file of the corpora in `real`."""
    for path in real.glob("**/*.*"):
        if not path.is_file():
            continue
        packed = path.suffix in _OPEN
        new = folder / path.relative_to(real)
        new = new.with_suffix("") if packed else new
        new.parent.mkdir(parents=True, exist_ok=True)
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8", newline="") as file:
            if new.suffix == ".json":
                tree = json.load(file)
                for article in tree["data"]:
                    del article["paragraphs"][2:]
                text = json.dumps(tree)
            else:
                text = "".join(islice(file, 6000 if "train" in path.name else 400))
        new.write_text(text, encoding="utf-8", newline="")


def write_files_of_the_pages(folder: Path, corpora: Path) -> None:
    """Write into the checkout what a reader of the pages has: parts of his own, and texts."""
    for name, word in (("my_blocks.py", "def damped("), ("my_module.py", "class Scaled(")):
        block = next(each for each in fenced("python") if word in each.text)
        (folder / name).write_text(block.text, encoding="utf-8")
    (block,) = [each for each in fenced("yaml") if each.text.startswith("# mytext.yaml\n")]
    _write(folder / "mytext.yaml", small_config(yaml.safe_load(block.text)))
    shutil.copytree(corpora / "tinyshakespeare", folder / "mytext")
    (block,) = [each for each in fenced("yaml") if each.text.startswith(f"# {DAMPED}\n")]
    grid, ablations = yaml.safe_load(block.text), folder / "ablations"
    _write(folder / DAMPED, small_grid(grid, _read(ablations / grid["base"])))
    for language in ("de", "en"):
        with (corpora / "iwslt14_deen" / f"train.{language}").open(encoding="utf-8") as file:
            (folder / f"my.{language}").write_text("".join(islice(file, 1000)), encoding="utf-8")
    shutil.copy(folder / "my.en", folder / "my.txt")


def write_programs(folder: Path) -> None:
    """Write the environment that `make` would install: `ablate`, and stand-ins that print their
    words for what `make test` calls."""
    programs = folder / BIN
    programs.mkdir(parents=True)
    own = {"ablate": f'exec "{sys.executable}" -m lightning_app "$@"'}
    own |= dict.fromkeys(("ruff", "pyright", "pytest"), 'echo "ran ${0##*/} $*"')
    for name, script in own.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    for name in ("installed", "installed-test"):
        (folder / ".venv" / name).touch()
