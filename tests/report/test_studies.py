"""The published studies: their tables come out again from `runs.tar.xz`, by two ways."""

import math
import re
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from lightning_app.report.comparisons import effects
from lightning_app.report.packed import PACKED, unpack
from lightning_app.report.pairs import scores_frame
from lightning_app.report.results import GridResults, read_grid_file, read_results
from lightning_app.report.statistics import row_document
from lightning_app.report.tasks import bleu_scores
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.report.write import FILE

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "ablations" / "results").iterdir())
RECOMPUTE = ROOT / "docs" / "recompute_study.py"
MOST_LINES = 60
TABLE = "results.parquet"


@pytest.fixture(params=STUDIES, ids=lambda path: path.name)
def study(request: pytest.FixtureRequest) -> Path:
    return request.param


def texts_of(study: Path) -> dict[str, str]:
    """The files of a packed study."""
    with tarfile.open(study / PACKED) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


@pytest.fixture
def grid(study: Path, tmp_path: Path) -> GridResults:
    return read_results(unpack(study / PACKED, tmp_path).path, read_grid_file(study / FILE))


@pytest.mark.in_turn(5)
def test_its_runs_give_its_scores(study: Path, grid: GridResults, tmp_path: Path) -> None:
    scores = [*sensitivity_scores(grid), *bleu_scores(grid)]
    tables = {"sensitivity.csv": scores_frame(scores)}
    if grid.factors:
        tables["effects.csv"] = pd.DataFrame(map(row_document, effects(grid, scores)))
    for name, table in tables.items():
        table.to_csv(tmp_path / name, index=False)
        again, kept = (pd.read_csv(folder / name) for folder in (tmp_path, study))
        pd.testing.assert_frame_equal(again, kept, rtol=1e-9, atol=1e-9)
        assert len(kept) > len(grid.variants)


@pytest.mark.in_turn(5)
def test_code_that_shares_nothing_with_the_package_gives_its_numbers(study: Path, oracle) -> None:
    assert not re.search(r"^\s*(from|import) lightning_app", RECOMPUTE.read_text(), re.M)
    assert oracle.check(study) == []


@pytest.mark.in_turn(5)
def test_its_page_is_short_and_names_no_machine(study: Path) -> None:
    page = (study / "README.md").read_text(encoding="utf-8")
    assert page.count("\n") <= MOST_LINES
    for heading in ("Question", "Predictions", "Results", "What it does not show"):
        assert f"## {heading}" in page
    assert ("headline-light.svg" in page) == (study / "headline-light.svg").exists()
    for text in texts_of(study).values():
        assert re.findall(r'"/\w[^"]*"', text) == []


def tolerated(losses: Any, top: float) -> float:
    """log2 of the largest rate, going up from the best, with at most a tenth of the best lost."""
    rates, values = losses["lr"].tolist(), losses["loss"].tolist()
    best = min(range(len(rates)), key=lambda place: values[place])
    limit = values[best] + 0.1 * (top - values[best])
    for place in range(best, len(rates) - 1):
        if values[place + 1] > limit:
            share = (limit - values[place]) / (values[place + 1] - values[place])
            ends = [math.log2(rates[place]), math.log2(rates[place + 1])]
            return ends[0] + share * (ends[1] - ends[0])
    return math.log2(rates[-1])


def needs_of(runs: Any, warmup: int) -> list[float]:
    """N of each seed: what `warmup` saves at the rate that is best for the other seeds."""
    found = []
    for seed in sorted(set(runs["seed"])):
        ends = []
        for steps in (0, warmup):
            own = runs[runs["warmup"] == steps]
            others = own[own["seed"] != seed].groupby("lr")["loss"].mean()
            chosen = own[(own["seed"] == seed) & (own["lr"] == others.idxmin())]
            ends.append(float(chosen["loss"].iloc[0]))
        found.append(ends[0] - ends[1])
    return found


def test_the_outcomes_of_the_predictions_of_joint(oracle: ModuleType) -> None:
    folder = ROOT / "ablations" / "results" / "joint"
    table: Any = pd.read_parquet(folder / TABLE)
    theta = {
        key: tolerated(runs.sort_values("lr"), float(runs["unigram_entropy"].mean()))
        for key, runs in table.groupby(["variant", "warmup", "seed"])
    }
    seeds = (1, 2, 3, 4, 5)

    def octaves(variant: str, warmup: int) -> list[float]:
        return [theta[variant, warmup, seed] - theta[variant, 0, seed] for seed in seeds]

    def needs(variant: str) -> list[float]:
        return needs_of(table[table["variant"] == variant], 100)

    for (_, _, name, score), row in oracle.former(folder).items():
        found = needs(name) if score == "need" else octaves(name, 100)
        assert [*row.values.values()] == pytest.approx(found)


def test_the_outcomes_of_the_predictions_of_iwslt14_bleu() -> None:
    table: Any = pd.read_parquet(ROOT / "ablations" / "results" / "iwslt14_bleu" / TABLE)
    bleu = table.set_index(["variant", "warmup"])["test/bleu"].to_dict()
    page = (ROOT / "ablations" / "results" / "iwslt14_bleu" / "README.md").read_text("utf-8")
    for (variant, warmup), value in bleu.items():
        named = "none" if warmup == 0 else f"{warmup:,.0f}"
        assert f"| `{variant}` | {named} | {value:.1f} |" in page


def test_the_outcomes_of_the_predictions_of_warmup_lm(oracle: ModuleType) -> None:
    folder = ROOT / "ablations" / "results" / "warmup_lm"
    table: Any = pd.read_parquet(folder / TABLE)
    rows = oracle.former(folder).items()
    need = {name: row for (*_, name, score), row in rows if score == "need"}
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name, bound in (("post_ln", "≤ "), ("realformer", "≤ "), ("pre_ln", "≥ "), ("sas", "? ")):
        assert f"| {bound}{need[name].estimate:.2f} (open) |" in page
    means = table.groupby(["variant", "warmup", "lr"])["val/nll"].mean().groupby(level=[0, 1]).min()
    for name in need:
        assert f"{means[name, 0]:.3f}, {means[name, 100]:.3f} |" in page
    assert round(means["post_ln", 100] - means["pre_ln", 100], 2) == 0.39
