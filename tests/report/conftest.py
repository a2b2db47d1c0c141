"""GridResults folders written by hand, file by file, as a finished grid leaves them."""

import csv
import hashlib
import importlib.util
import io
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from scipy import stats

from lightning_app.report import write as report
from lightning_app.report.facts import Message
from lightning_app.report.page import Report
from lightning_app.report.pairs import Score
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.statistics import t_interval
from lightning_app.report.tasks import bleu_scores
from lightning_app.report.tensorboard import write_index
from lightning_app.report.terminal import show_report
from lightning_app.report.warmup import sensitivity_scores
from tests.records import pruned

ENTROPY = 4.5
STARTED = "2026-01-02T03:04:05+00:00"
FINISHED = "2026-01-02T03:04:25+00:00"
PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
SHORT = {PRESET: "", WARMUP: "w", RATE: "lr", SEED: "s"}

BASE: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {"max_steps": 200, "precision": "32-true"},
    "model": {
        "block": {"preset": "post_ln"},
        "architecture": {
            **{"kind": "encoder_decoder", "encoder_depth": 3, "decoder_depth": 3},
            **{"model_dim": 64, "ff_dim": 128, "num_heads": 4, "dropout": 0.0},
        },
        "objective": {"kind": "translation", "label_smoothing": 0.1, "evaluate_test": False},
        "optimizer": {"kind": "adam", "lr": 0.004},
        "schedule": {
            **{"kind": "inverse_sqrt", "coupling": "decoupled"},
            **{"warmup_steps": 60, "reference_steps": 60},
        },
    },
    "data": {"name": "synthetic", "tokens_per_batch": 1024},
}
DEMO = {SEED: [1, 2, 3, 4, 5], PRESET: ["post_ln", "pre_ln", "sas"], WARMUP: [0, 60]}
DATA: dict[str, Any] = {"name": "synthetic", "protocol": "built-in grammar, seed 0"}
DATA |= {"sizes": {"train": 30000, "valid": 500, "test": 500}, "vocab_size": 900}
DATA |= {"tokenizer_sha256": "0" * 64, "digest": "1" * 64}

Outcome = float | str | None  # final val/nll (stalled near the entropy), a state, or not finite


class FakeGrid:
    """Writes one grid folder. `outcome(axes)` says how each cell ended:

    a number is its final val/nll, None a loss that was not finite, `failed`, `unfinished` and
    `waiting` a cell without a result.
    """

    def __init__(
        self,
        folder: Path,
        outcome: Callable[[Mapping[str, Any]], Outcome],
        axes: Mapping[str, Sequence[Any]] = DEMO,
        *,
        base: Mapping[str, Any] = BASE,
        sensitivity: Mapping[str, Any] | None = None,
        question: str = "Which blocks need warm-up?",
        curves: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.folder, self.base, self.curves, self.metrics = folder, base, curves, metrics or {}
        self.cells = []
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            digest = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:16]
            short = [f"{SHORT.get(key, key[-4:])}{str(point[key])[:12]}" for key in point]
            name = "-".join([*short, digest[:8]]).replace("/", "_").replace("<", "_")
            self.cells.append({"id": digest, "name": name, "axes": point})
        if sensitivity is None:
            sensitivity = {"reference_warmup": 60, "baseline": "pre_ln"}
        grid = {"name": folder.name, "question": question, "base_config": base, "axes": axes}
        grid |= {"exclude": [], "metric": {"name": "val/nll", "mode": "min"}}
        grid |= {"sensitivity": sensitivity}
        plan = {"schema": 2, "name": folder.name, "hash": "abcd", "made_from": "abcd", "data": []}
        plan |= {"metric": "val/nll", "mode": "min", "axes": axes, "excluded": 0}
        plan |= {"cells": self.cells}
        folder.mkdir(parents=True)
        grid = json.loads(json.dumps(grid))
        text = yaml.dump(grid, Dumper=yaml.CSafeDumper, sort_keys=False)
        (folder / "grid.yaml").write_text(text, encoding="utf-8")
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        for cell in self.cells:
            self.end(cell, outcome(cell["axes"]))

    def run(self, cell: Mapping[str, Any]) -> Path:
        return self.folder / "runs" / cell["name"]

    def end(self, cell: Mapping[str, Any], outcome: Outcome) -> None:
        """Write the files of a run with this outcome."""
        if outcome == "waiting":
            return
        run = self.run(cell)
        attempt = run / "attempts" / "1"
        attempt.mkdir(parents=True, exist_ok=True)
        config = json.loads(json.dumps(self.base))
        for key, value in cell["axes"].items():
            *path, last = key.split(".")
            tree = config
            for part in path:
                tree = tree.setdefault(part, {})
            tree[last] = value
        text = yaml.dump(config, Dumper=yaml.CSafeDumper)
        (run / "config.yaml").write_text(text, encoding="utf-8")
        (attempt / "log.txt").write_text("started\n", encoding="utf-8")
        if outcome == "failed":
            text = "Traceback (most recent call last):\n  ...\nRuntimeError: <b>out of</b> memory\n"
            (attempt / "error.txt").write_text(text, encoding="utf-8")
        elif not isinstance(outcome, str):
            if self.curves:
                self.metrics_csv(run / "metrics.csv", outcome)
            self.result(run, cell, outcome)

    def prune(self, *cells: int) -> None:
        """Name a pruner in the grid file, and end these cells by it."""
        change(self, pruner="median")
        for number in cells:
            run = self.run(self.cells[number])
            (run / "result.json").unlink(missing_ok=True)
            record = json.dumps(pruned(self.cells[number]["id"]))
            (run / "pruned.json").write_text(record, encoding="utf-8")

    def rewrite(self, change: Callable[[Mapping[str, Any], dict[str, Any]], object]) -> None:
        """Change the result of each finished run, given its axes."""
        for number, cell in enumerate(self.cells):
            self._change(number, partial(change, cell["axes"]))

    def edit(self, number: int, metrics: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Change metrics and fields of the result of a cell."""
        self._change(number, lambda of: (of.update(fields), of["metrics"].update(metrics or {})))

    def _change(self, number: int, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.run(self.cells[number]) / "result.json"
        if path.is_file():
            record = json.loads(path.read_text())
            change(record)
            path.write_text(json.dumps(record))

    def metrics_csv(self, path: Path, loss: float | None) -> None:
        end = ENTROPY if loss is None else loss
        fields = ["epoch", "step", "train/loss", "train/nll", "train/grad_norm", "train/lr"]
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*fields, "val/nll"])
            writer.writeheader()
            for step in [1, 2, 5, *range(10, 201, 10)]:
                value = end + (7 - end) * 0.97**step
                row = {"epoch": 0, "step": step, "train/nll": value, "train/loss": value + 0.3}
                writer.writerow({**row, "train/grad_norm": 1 / step, "train/lr": 0.004})
                if step % 50 == 0:
                    last = value if step < 200 else end
                    writer.writerow({"epoch": 0, "step": step, "val/nll": last})

    def result(self, run: Path, cell: Mapping[str, Any], loss: float | None) -> None:
        diverged = loss is None or loss >= ENTROPY - 0.05
        rule = "val/nll >= unigram entropy - 0.05"
        record = {
            "schema": 2,
            "id": cell["id"],
            "name": cell["name"],
            "status": "diverged" if diverged else "ok",
            "outcome": "trained" if not diverged else "non_finite" if loss is None else "stalled",
            "diverged": {"step": 200, "rule": rule, "last_finite_loss": loss} if diverged else None,
            "metrics": {
                "val/nll": loss,
                "val/perplexity": None if loss is None else 2.718281828**loss,
                "val/accuracy": None if loss is None else 0.5,
                "train/tokens_per_second": 21000.0,
                **self.metrics,
            },
            **{"unigram_entropy": ENTROPY, "steps": 200, "tokens": 204800, "parameters": 251904},
            **{"seconds": 9.75, "device": "cpu", "precision": "32-true", "data": DATA},
            "versions": {"torch": "2.13.0", "lightning": "2.6.6", "lightning_app": "0.1.0"},
            **{"sacrebleu_signature": None, "attempt": 1, "started": STARTED, "finished": FINISHED},
        }
        (run / "result.json").write_text(json.dumps(record), encoding="utf-8")


def messages(texts: Iterable[Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The names and values of the messages among some texts, each before those inside it."""
    found = []
    for text in texts:
        if isinstance(text, Message):
            found += [(text.name, text.values), *messages(text.values.values())]
        elif isinstance(text, list):
            found += messages(text)
    return found


@pytest.fixture(autouse=True)
def pdf_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave PDF files empty, which take as long as the SVG, where no test looks into them."""
    if request.node.get_closest_marker("pdf_files") is None:
        monkeypatch.setattr(report, "pdf", lambda figure: b"%PDF")


def write_report(folder: Path, out: Path | None = None, *, figures: bool = True) -> Path:
    """Write the report of a grid, by default into its folder, whose index is updated then.

    Most of the time goes into the figures, which a test of words or of numbers does without.
    """
    with pytest.MonkeyPatch.context() as patched:
        if not figures:
            patched.setattr(report, "write_figures", lambda grid, folder: [])
        path = report.write(read_results(folder), folder if out is None else out)
    if out is None:
        write_index(folder)
    return path


def shown(grid: GridResults, scores: Sequence[Score] = (), **console: Any) -> str:
    """What a terminal shows of a report."""
    out = io.StringIO()
    show_report(Console(file=out, highlight=False, **console), grid, scores)
    return out.getvalue()


def keep(fake: Any, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Leave cells out of the plan, as `exclude:` does."""
    path = fake.folder / "plan.json"
    plan = json.loads(path.read_text())
    plan["cells"] = [cell for cell in plan["cells"] if wanted(cell["axes"])]
    path.write_text(json.dumps(plan))


def change(fake: Any, **fields: Any) -> None:
    """Give the grid file these fields."""
    path = fake.folder / "grid.yaml"
    tree = yaml.load(path.read_text(), yaml.CSafeLoader) | fields
    path.write_text(yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False))


def link(fake: Any, axis: str, other: str, values: Mapping[Any, Any]) -> None:
    """Let an axis follow from another one, in the grid file and in the plan."""
    keep(fake, lambda at: at[axis] == values[at[other]])
    axes = yaml.safe_load((fake.folder / "grid.yaml").read_text())["axes"]
    change(fake, axes={**axes, axis: {other: dict(values)}})


def written(grid: GridResults, out: Path | None = None) -> Path:
    """The tables of a report, without its figures."""
    out = out or grid.folder
    report.write_exports(Report(grid, [*sensitivity_scores(grid), *bleu_scores(grid)], out))
    return out


def arm(centre: float, half: float, count: int = 5, *, name: str = "v", **more: Any) -> Score:
    """A score whose 95 % interval is `centre +- half`; without an interval if half is 0."""
    places = np.arange(count) - (count - 1) / 2
    unit = stats.t.ppf(0.975, count - 1) * stats.sem(places) if count > 1 else 1.0
    values = (centre + half / unit * places).tolist()
    low, high, p = t_interval(values)
    return Score(
        **{"group": "all", "lr": math.nan, "variant": name, "score": "tuned", "inner": True}
        | {"tried": (4, 4), **more},
        **{"estimate": centre, "low": low, "high": high, "p": p if count > 2 else math.nan},
        **{"seeds": count, "values": tuple(enumerate(values))},
    )


def stalls(share: float, p: float, name: str = "v") -> Score:
    identity = {"group": "all", "lr": math.nan, "variant": name, "score": "stall_difference"}
    return Score(**identity, estimate=share, p=p, p_holm=p)


def one_sentence(text: str) -> str:
    """The answer of a report, which is one sentence of at most 30 words without brackets."""
    assert text.endswith(".")
    assert ". " not in text
    assert not {*"()[]{}"} & {*text}
    assert len(text.split()) <= 30, text
    return text


@pytest.fixture
def make_grid(tmp_path: Path) -> Callable[..., FakeGrid]:
    """`make_grid(outcome, axes, ...)` writes a grid folder named `demo` and returns it."""

    def make(outcome: Any, *args: Any, **kwargs: Any) -> FakeGrid:
        return FakeGrid(tmp_path / kwargs.pop("name", "demo"), outcome, *args, **kwargs)

    return make


def typical(axes: Mapping[str, Any]) -> float:
    """Post-LN stalls without warm-up; the others get slightly worse. Seeds differ."""
    seed, warmup = axes.get(SEED, 1), axes.get(WARMUP, 60)
    preset = axes.get(PRESET, "post_ln")
    noise = random.Random(f"{seed} {preset} {warmup}").gauss(0.0, 0.04)
    if preset == "post_ln" and warmup == 0:
        return ENTROPY - 0.01 + 0.1 * noise
    gap = {"post_ln": 0.6, "pre_ln": 0.12, "sas": 0.05}.get(preset, 0.3)
    best = {"post_ln": 2.1, "pre_ln": 2.2, "sas": 2.4}.get(preset, 2.5)
    return best + (gap if warmup == 0 else 0.0) + noise


@pytest.fixture
def outcome() -> Callable[[Mapping[str, Any]], float]:
    return typical


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The program as a module: a process for each grid would import pandas again."""
    path = Path(__file__).parents[2] / "docs" / "recompute_study.py"
    spec = importlib.util.spec_from_file_location("recompute_study", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module
