"""The published studies: their tables come out again from `results.parquet`, by two ways."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from lightning_app.analysis.factors import effects, effects_frame
from lightning_app.analysis.grid_results import GridResults, read_results
from lightning_app.analysis.packed_grid import FILES, PACKED, unpack
from lightning_app.analysis.score import scores_frame
from lightning_app.analysis.sensitivity import sensitivity_scores

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "ablations" / "results").iterdir())
RECOMPUTE = ROOT / "docs" / "recompute_study.py"
MOST_LINES = 60


@pytest.fixture(params=STUDIES, ids=lambda path: path.name)
def study(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def grid(study: Path, tmp_path: Path) -> GridResults:
    return read_results(unpack(study / PACKED, tmp_path).path)


def test_its_runs_give_its_scores(study: Path, grid: GridResults, tmp_path: Path) -> None:
    scores = sensitivity_scores(grid)
    tables = {"sensitivity.csv": scores_frame(scores)}
    if grid.factors:
        tables["effects.csv"] = effects_frame(effects(grid, scores))
    for name, table in tables.items():
        table.to_csv(tmp_path / name, index=False)
        again, kept = (pd.read_csv(folder / name) for folder in (tmp_path, study))
        pd.testing.assert_frame_equal(again, kept, rtol=1e-9, atol=1e-9)
        assert len(kept) > 5


def recompute(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(RECOMPUTE), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_code_that_shares_nothing_with_the_package_gives_its_numbers(study: Path) -> None:
    assert not re.search(r"^\s*(from|import) lightning_app", RECOMPUTE.read_text(), re.M)
    done = recompute(study)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_changed_number_is_found(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "study")
    path = tmp_path / "study" / "sensitivity.csv"
    lines = path.read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if ",delta," in line)
    fields = lines[place].split(",")
    at = fields.index("delta") + 1
    fields[at] = repr(float(fields[at]) + 1e-6)
    lines[place] = ",".join(fields)
    path.write_text("".join(lines))
    assert recompute(tmp_path / "study").returncode == 1


def test_its_page_is_short_and_names_no_machine(study: Path) -> None:
    page = (study / "README.md").read_text(encoding="utf-8")
    assert page.count("\n") <= MOST_LINES
    for heading in ("Asked", "Predicted", "Found", "What it does not show"):
        assert f"## {heading}" in page
    assert "headline-light.svg" in page
    packed = pd.read_parquet(study / PACKED)
    for name in FILES:
        texts = [text for text in packed[name].tolist() if text is not None]
        assert {path for text in texts for path in re.findall(r'"/\w[^"]*"', text)} == set()
