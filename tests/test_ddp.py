"""Two processes give, step by step, what one process gives with the same global batch."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 5


def fit(folder: Path, cache: Path, base: str, devices: int) -> tuple[list[dict[str, str]], dict]:
    command = [sys.executable, "-m", "lightning_app", "fit", "--config", f"ablations/base/{base}"]
    overrides = {
        "trainer.devices": devices,
        "trainer.accelerator": "cpu",
        "trainer.strategy": "ddp" if devices > 1 else "auto",
        "trainer.max_steps": STEPS,
        "trainer.val_check_interval": STEPS,
        "trainer.log_every_n_steps": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.limit_test_batches": 3,
        "trainer.default_root_dir": folder,
        "data.cache": cache,
        "model.objective.evaluate_test": "true",
    }
    if "mlm" not in base:
        overrides["model.objective.validation_bleu"] = 33
    for key, value in overrides.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("base", ["synthetic.yaml", "synthetic_mlm.yaml"])
def test_two_processes_equal_one(tmp_path: Path, base: str) -> None:
    cache = tmp_path / "cache"
    one, single = fit(tmp_path / "one", cache, base, 1)
    two, double = fit(tmp_path / "two", cache, base, 2)
    assert [row["step"] for row in one] == [row["step"] for row in two]
    assert len(one) == STEPS
    for a, b in zip(one, two, strict=True):
        for column in ("train/loss", "train/nll", "train/grad_norm"):
            assert float(a[column]) == pytest.approx(float(b[column]), abs=1e-5)
    assert single["id"] == double["id"]
    assert single["tokens"] == double["tokens"]
    assert single["unigram_entropy"] == double["unigram_entropy"]
    for name, value in single["metrics"].items():
        if name == "train/tokens_per_second":
            continue
        if name.endswith("bleu"):
            assert double["metrics"][name] == value, name
        else:
            assert double["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-5), name
    if "mlm" not in base:
        assert {"val/bleu", "test/bleu", "test/sacrebleu"} <= set(single["metrics"])
        lines = [(tmp_path / run / "hypotheses.txt").read_text() for run in ("one", "two")]
        assert lines[0] == lines[1]
