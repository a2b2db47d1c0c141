"""`benchmarks/gpu_campaign.py`: a dry run on the CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids.test_packs import write

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu_campaign.py"


@pytest.mark.slow  # one run of a program that is meant for a GPU
def test_a_dry_run_measures_every_section(tmp_path: Path) -> None:
    path, out = tmp_path / "gpu.json", tmp_path / "out"
    grid = write(tmp_path / "packs.yaml", str(tmp_path / "cache"))
    words = [sys.executable, str(PROGRAM), "--dry-run", "--json", str(path), "--grids", str(grid)]
    done = subprocess.run(
        [*words, "--out", str(out), "--processes", "1"],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PROGRAMS": str(PROGRAM.parent)},
    )
    found = json.loads(path.read_text())
    sections = found["sections"]
    assert {name: each["status"] for name, each in sections.items()} == dict.fromkeys(
        ("tests", "cells", "packed", "steps", "attention", "compile", "peers"), "done"
    ), done.stderr
    assert done.returncode == 0
    # What comes back restores, with the records of all runs.
    shutil.unpack_archive(out / "packs.tar.gz", tmp_path)
    ablate = [sys.executable, "-m", "lightning_app", "report", str(tmp_path / "packs")]
    restored = ["--experiments", str(tmp_path / "restored")]
    subprocess.run([*ablate, *restored], check=True, stdout=subprocess.DEVNULL)
    assert len(list((tmp_path / "restored" / "packs" / "runs").glob("*/result.json"))) == 8
    assert {each["cells"] for each in sections["cells"]["results"].values()} == {2}
    stacked = sections["packed"]["results"]["width 16"]["results"]
    assert [each["name"] for each in stacked] == ["one model", "one model, compiled", "pack of 2"]
    assert found["dry_run"] is True
    for field in ("commit", "command", "device", "driver", "versions", "started", "cuda"):
        assert field in found
    assert all(each["seconds"] > 0.0 for each in sections.values())
    step = sections["steps"]["results"]
    assert all(0.0 < each["share"] < 1.0 for each in step["4096 tokens"]["results"])
    assert step["4096 tokens, profile"]["kernels"] > 0
    forms = {each["name"] for each in sections["attention"]["results"]["T=8, bf16"][2]["results"]}
    assert {"residual scores, plain", "residual scores, reversible"} <= forms
    compiled = sections["compile"]["results"]["post_ln, 4096 tokens"]
    assert compiled["losses"][0] == pytest.approx(compiled["losses"][1], rel=1e-3)
