"""The published studies: their tables come out again from `runs.tar.xz`, by two ways."""

import json
import math
import re
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

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
PLACEMENTS = ("pre_ln", "post_ln")


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


def test_code_that_shares_nothing_with_the_package_gives_its_numbers(
    study: Path, oracle: ModuleType
) -> None:
    assert not re.search(r"^\s*(from|import) lightning_app", RECOMPUTE.read_text(), re.M)
    assert oracle.check(study) == []


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


def shown(values: list[float], digits: int) -> list[float]:
    """The mean and the ends of its 95 % interval by Student's t."""
    centre = sum(values) / len(values)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return [round(x, digits) for x in (centre, centre - half, centre + half)]


def test_the_outcomes_of_the_predictions_of_joint(oracle: ModuleType) -> None:
    """The figures of its page that no table has, from the losses alone."""
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

    def less(first: list[float], second: list[float]) -> list[float]:
        return [a - b for a, b in zip(first, second, strict=True)]

    shaped, plain = "post_ln+shaped", "post_ln"
    assert shown(octaves(plain, 20), 3) == [0.072, -0.026, 0.17]
    assert shown(octaves(plain, 100), 3)[0] == 0.995
    assert shown(less(octaves(shaped, 100), octaves(plain, 100)), 3) == [0.173, -0.522, 0.869]
    assert shown(less(needs(shaped), needs(plain)), 3) == [-0.416, -0.83, -0.003]
    assert min(needs("pre_ln")) > 0
    for (_, _, name, score), row in oracle.former(folder).items():
        found = needs(name) if score == "need" else octaves(name, 100)
        assert [*row.values.values()] == pytest.approx(found)


def test_the_outcomes_of_the_predictions_of_xiong_small() -> None:
    """By Student's t, as they were made, from the losses of the runs alone."""
    table: Any = pd.read_parquet(ROOT / "ablations" / "results" / "xiong_small" / TABLE)
    kind, coupling = "model.optimizer.kind", "model.schedule.coupling"

    def needs(variant: str, how: str) -> list[float]:
        own = table[(table["variant"] == variant) & (table[coupling] == how)]
        return needs_of(own[own[kind] == "adam"], 400)

    def failed(variant: str, how: str, rate: float, warmup: int) -> list[str]:
        at = (table["lr"] == rate) & (table["warmup"] == warmup) & (table[coupling] == "decoupled")
        runs = table[at & (table["variant"] == variant) & (table[kind] == how)]
        assert len(runs) == 3
        return [outcome for outcome in runs["outcome"] if outcome != "trained"]

    assert table[["status"]].isin(["ok", "diverged"]).all().all()
    assert len(table) == 144
    pre, post = ([needs(name, how) for how in ("decoupled", "paper")] for name in PLACEMENTS)
    assert [shown(values, 2) for values in pre] == [[0.22, 0.07, 0.37], [0.88, 0.81, 0.95]]
    assert [shown(values, 2) for values in post] == [[0.47, 0.34, 0.60], [1.05, 1.01, 1.10]]
    less = [[b - a for a, b in zip(*both, strict=True)] for both in (pre, post)]
    assert [shown(values, 2) for values in less] == [[0.66, 0.49, 0.83], [0.59, 0.50, 0.68]]
    assert (round(min(pre[0]), 2), round(max(pre[0]), 2)) == (0.17, 0.29)
    assert (round(min(post[0]), 2), round(max(post[0]), 2)) == (0.42, 0.52)
    for rate in (9e-3, 2.7e-2):
        assert failed("post_ln", "adam", rate, 0) == ["stalled"] * 3
    assert failed("pre_ln", "adam", 9e-3, 0) == []
    counts = [len(failed(name, "sgd", 1.5, w)) for name in PLACEMENTS for w in (0, 400)]
    assert counts == [2, 0, 3, 2]
    warm = table[table["warmup"] == 400].groupby(["variant", kind, "lr", "seed"])["val/nll"]
    pairs = [values.tolist() for _, values in warm if len(values) == 2]
    equal = [pair for pair in pairs if pair[0] == pair[1]]
    non_finite = [pair for pair in pairs if not any(map(math.isfinite, pair))]
    assert (len(pairs), len(equal), len(non_finite)) == (30, 29, 1)


def test_the_outcomes_of_the_predictions_of_iwslt14_bleu() -> None:
    table: Any = pd.read_parquet(ROOT / "ablations" / "results" / "iwslt14_bleu" / TABLE)
    bleu = table.set_index(["variant", "warmup"])["test/bleu"].to_dict()
    assert min(bleu["pre_ln", 1000], bleu["post_ln", 1000]) > 15
    assert abs(bleu["pre_ln", 1000] - bleu["post_ln", 1000]) < 2
    assert abs(bleu["pre_ln", 1000] - bleu["pre_ln", 0]) < 1
    assert bleu["post_ln", 0] > 3  # the third was false
    assert set(table["outcome"]) == {"trained"}
    page = (ROOT / "ablations" / "results" / "iwslt14_bleu" / "README.md").read_text("utf-8")
    names = table.set_index(["variant", "warmup"])["name"]
    texts = texts_of(ROOT / "ablations" / "results" / "iwslt14_bleu")
    parts = {
        key: json.loads(texts[f"runs/{name}/result.json"])["validation_parts"]
        for key, name in names.items()
    }
    for variant, error in (("post_ln", 0.009), ("pre_ln", 0.002)):
        bare, warm = (np.array(parts[variant, warmup]["nll"]) for warmup in (0, 1000))
        tokens = np.array(parts[variant, 0]["tokens"])
        assert parts[variant, 1000]["tokens"] == tokens.tolist()
        lost = bare - warm
        without = (lost.sum() - lost) / (tokens.sum() - tokens)  # one part left out of both runs
        count = len(without)
        assert count == 50
        assert round(math.sqrt((count - 1) ** 2 / count * np.var(without, ddof=1)), 3) == error
    for (variant, warmup), value in bleu.items():
        named = "none" if warmup == 0 else f"{warmup:,.0f}"
        assert f"| `{variant}` | {named} | {value:.1f} |" in page


def test_the_outcomes_of_the_predictions_of_warmup_lm(oracle: ModuleType) -> None:
    folder = ROOT / "ablations" / "results" / "warmup_lm"
    table: Any = pd.read_parquet(folder / TABLE)
    assert len(table) == 96
    stalled = table[table["outcome"] == "stalled"].groupby(["variant", "warmup", "lr"]).size()
    counts = {
        (variant, warmup): [int(stalled.get((variant, warmup, lr), 0)) for lr in rates]
        for rates in [sorted(table["lr"].unique())]
        for variant in ("post_ln", "realformer", "pre_ln", "sas")
        for warmup in (0, 100)
    }
    assert counts == {
        ("post_ln", 0): [0, 3, 3, 3],
        ("post_ln", 100): [0, 0, 0, 3],
        ("realformer", 0): [0, 2, 3, 3],
        ("realformer", 100): [0, 0, 0, 3],
        **{(name, w): [0, 0, 0, 0] for name in ("pre_ln", "sas") for w in (0, 100)},
    }
    need = {
        name: row for (*_, name, score), row in oracle.former(folder).items() if score == "need"
    }
    assert need["post_ln"].estimate < 0.2  # by the rates tried the second was false
    assert need["pre_ln"].estimate < 0.2
    assert all(math.isnan(row.low) for row in need.values())  # a best rate is at the edge
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name, bound in (("post_ln", "≤ "), ("realformer", "≤ "), ("pre_ln", "≥ "), ("sas", "? ")):
        assert f"| {bound}{need[name].estimate:.2f} (open) |" in page
    means = table.groupby(["variant", "warmup", "lr"])["val/nll"].mean().groupby(level=[0, 1]).min()
    for name in need:
        assert f"{means[name, 0]:.3f}, {means[name, 100]:.3f} |" in page
    assert round(means["post_ln", 100] - means["pre_ln", 100], 2) == 0.39
