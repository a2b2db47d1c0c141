"""`benchmarks/gpu_campaign.py`: a dry run on the CPU, and what it does when a section fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu_campaign.py"
# The same program with other sections; its processes import this file too.
BROKEN = """
import os, sys, time
sys.path.insert(0, os.environ["PROGRAMS"])
import gpu_sections

def fails(where):
    '''Fails.'''
    yield "before", 1
    raise ValueError("this one is broken")

def dies(where):
    '''Dies.'''
    yield "before", 2
    os.kill(os.getpid(), 9)

def hangs(where):
    '''Hangs.'''
    yield "before", 3
    time.sleep(600.0)

def works(where):
    '''Works.'''
    yield "after", where.device

Section = gpu_sections.Section
gpu_sections.SECTIONS = {each.__name__: Section(each, 20.0) for each in (fails, dies, works)}
gpu_sections.SECTIONS["hangs"] = Section(hangs, 0.5)
import gpu_campaign
if __name__ == "__main__":
    sys.exit(gpu_campaign.main())
"""


def run(words: list[str], path: Path) -> tuple[subprocess.CompletedProcess[str], Any]:
    done = subprocess.run(
        [sys.executable, *words, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PROGRAMS": str(PROGRAM.parent)},
    )
    return done, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow  # one run of a program that is meant for a GPU
def test_a_dry_run_measures_every_section(tmp_path: Path) -> None:
    done, found = run([str(PROGRAM), "--dry-run"], tmp_path / "gpu.json")
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


def test_a_section_that_fails_dies_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    done, found = run([str(program), "--dry-run"], tmp_path / "gpu.json")
    assert done.returncode == 1, done.stderr
    sections = found["sections"]
    states = {name: each["status"] for name, each in sections.items()}
    assert states == {"fails": "failed", "dies": "failed", "works": "done", "hangs": "stopped"}
    assert "this one is" in sections["fails"]["error"]
    assert sections["dies"]["error"] == "exit code -9"
    assert sections["works"]["results"] == {"after": "cpu"}
    for name, value in (("fails", 1), ("dies", 2), ("hangs", 3)):
        assert sections[name]["results"] == {"before": value}


def test_what_the_budget_leaves_out_is_named(tmp_path: Path) -> None:
    done, found = run([str(PROGRAM), "--dry-run", "--budget", "0"], tmp_path / "gpu.json")
    assert done.returncode == 0
    for each in found["sections"].values():
        assert each["status"] == "skipped"
        assert each["reason"] == "0 s were left of the budget of 0 s"


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done, found = run([str(PROGRAM)], tmp_path / "gpu.json")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("torch finds no GPU")
    assert found is None
