"""`benchmarks/gpu_campaign.py`: a dry run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu_campaign.py"


@pytest.mark.slow  # one run of a program that is meant for a GPU
def test_a_dry_run_measures_every_section(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--dry-run", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PROGRAMS": str(PROGRAM.parent)},
    )
    found = json.loads(path.read_text())
    sections = found["sections"]
    assert {name: each["status"] for name, each in sections.items()} == dict.fromkeys(
        ("tests", "steps", "attention", "compile", "slots", "tiles", "presets", "peers"), "done"
    ), done.stderr
    assert done.returncode == 0
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
    for each in sections["slots"]["results"].values():
        assert each["steps_per_second"] == pytest.approx(sum(each["each"]))
