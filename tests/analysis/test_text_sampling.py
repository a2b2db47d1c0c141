"""The standard error over texts: leaving parts out by hand, and against fresh samples of text."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.report import write_report
from lightning_app.analysis.sensitivity import sensitivity_scores
from lightning_app.analysis.text_sampling import jackknife, text_sampling

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
AXES = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], RATE: [1e-3, 4e-3, 8e-3], SEED: [1, 2, 3]}
TOKENS = [40, 50, 30, 60]


def parts_of(axes: Mapping[str, Any]) -> list[float]:
    """The mean loss of each part, different in every run."""
    draws = random.Random(str([axes[key] for key in AXES]))
    worse = 0.3 * (axes[WARMUP] == 0) * (1 + (axes[PRESET] == "post_ln"))
    best = abs(math.log2(axes[RATE] / 4e-3)) * 0.2
    return [2.0 + worse + best + draws.gauss(0, 0.2) for _ in TOKENS]


def total(axes: Mapping[str, Any], left_out: int | None = None) -> float:
    """The loss of a run, perhaps without one part."""
    kept = [k for k in range(len(TOKENS)) if k != left_out]
    means = parts_of(axes)
    return sum(means[k] * TOKENS[k] for k in kept) / sum(TOKENS[k] for k in kept)


def leave(grid: Any, which: Any = lambda axes: True) -> None:
    """Write the parts into the results of runs."""
    for cell in grid.cells:
        path = grid.run(cell) / "result.json"
        if path.exists() and which(cell["axes"]):
            means = parts_of(cell["axes"])
            sums = [mean * count for mean, count in zip(means, TOKENS, strict=True)]
            record = json.loads(path.read_text(encoding="utf-8"))
            record["validation_parts"] = {"nll": sums, "tokens": TOKENS}
            path.write_text(json.dumps(record), encoding="utf-8")


def test_parts_are_left_out_of_every_run_of_a_difference(make_grid: Any) -> None:
    fake = make_grid(total, AXES, curves=False)
    leave(fake)
    grid = read_results(fake.folder)
    scores = sensitivity_scores(grid)
    rows = {(r.score, r.variant, r.lr): r for r in text_sampling(grid, scores) if r.lr == r.lr}
    needs = {r.variant: r for r in text_sampling(grid, scores) if r.score == "need"}

    def loss(preset: str, warmup: int, rate: float, seed: int, without: int | None) -> float:
        return total({PRESET: preset, WARMUP: warmup, RATE: rate, SEED: seed}, without)

    def delta(preset: str, rate: float, seed: int, g: int | None) -> float:
        return loss(preset, 0, rate, seed, g) - loss(preset, 60, rate, seed, g)

    def best(preset: str, warmup: int, seed: int) -> float:
        """The rate with the smallest loss of the whole text over the other seeds."""
        others = [other for other in AXES[SEED] if other != seed]
        mean = {r: sum(loss(preset, warmup, r, s, None) for s in others) for r in AXES[RATE]}
        return min(mean, key=mean.__getitem__)

    def need(preset: str, seed: int, g: int | None) -> float:
        return loss(preset, 0, best(preset, 0, seed), seed, g) - loss(
            preset, 60, best(preset, 60, seed), seed, g
        )

    def error(value: Any) -> float:
        found = [sum(value(seed, g) for seed in AXES[SEED]) / 3 for g in range(4)]
        return math.sqrt(3 / 4 * sum((each - sum(found) / 4) ** 2 for each in found))

    checked = 0
    for preset in AXES[PRESET]:
        row = needs[preset]
        assert row.over_texts == pytest.approx(error(lambda s, g, p=preset: need(p, s, g)))
        values = [need(preset, s, None) for s in AXES[SEED]]
        (wide,) = [s.widen for s in scores if (s.score, s.variant) == ("need", preset)]
        assert row.over_seeds == pytest.approx(wide * np.std(values, ddof=1) / math.sqrt(3))
        assert row.estimate == pytest.approx(sum(values) / 3)
        for rate in AXES[RATE]:
            row = rows["delta", preset, rate]
            assert row.over_texts == pytest.approx(
                error(lambda s, g, p=preset, r=rate: delta(p, r, s, g))
            )
            assert (row.parts, row.seeds) == (4, 3)
            checked += 1
    for rate in AXES[RATE]:
        assert rows["interaction", "post_ln", rate].over_texts == pytest.approx(
            error(lambda s, g, r=rate: delta("post_ln", r, s, g) - delta("pre_ln", r, s, g))
        )
    assert checked == 6


class Run:
    """What `jackknife` reads of a run."""

    state, capped = "ok", False

    def __init__(self, nll: Any, tokens: Any) -> None:
        self.record = {"validation_parts": {"nll": nll.tolist(), "tokens": tokens.tolist()}}
        self.loss = float(nll.sum() / tokens.sum())


def test_the_error_is_the_spread_over_fresh_samples_of_text() -> None:
    """600 texts of 40 documents, whose difficulty both runs share; the runs differ by document."""
    draws = np.random.default_rng(7)
    found, errors = [], []
    for _ in range(400):
        hard = np.repeat(draws.normal(0, 1, 40), 15)
        differs = np.repeat(draws.gamma(2.0, 0.1, 40), 15)
        tokens = draws.integers(5, 40, 600)
        base = 3 + hard + draws.normal(0, 0.5, 600)
        sums = [(base + differs) * tokens, base * tokens]
        runs = [Run(of.reshape(40, 15).sum(1), tokens.reshape(40, 15).sum(1)) for of in sums]
        pair: Any = [(runs[0], 1.0), (runs[1], -1.0)]
        error, parts = jackknife(pair)
        assert parts == 40
        errors.append(error)
        found.append((sums[0].sum() - sums[1].sum()) / tokens.sum())
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.12)  # 5 % of 400 draws
    assert np.mean(errors) < 0.1 / math.sqrt(40) * 3  # what both share cancels


@pytest.mark.parametrize(
    "missing", ["old", "other parts", "other loss", "stalled", "not yet learned"]
)
def test_no_row_without_the_parts_of_every_run(make_grid: Any, missing: str) -> None:
    def outcome(axes: Mapping[str, Any]) -> float:
        odd = (axes[PRESET], axes[WARMUP], axes[SEED]) == ("post_ln", 0, 2)
        return 5.6 if odd and missing in ("stalled", "not yet learned") else total(axes)

    axes = {**AXES, RATE: [4e-3]}
    fake = make_grid(outcome, axes, curves=False)
    leave(fake, lambda a: missing != "old" or (a[PRESET], a[SEED]) != ("post_ln", 2))
    for cell in fake.cells:
        path: Path = fake.run(cell) / "result.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        if missing == "other parts" and cell["axes"][PRESET] == "post_ln":
            record["validation_parts"]["tokens"][0] += cell["axes"][SEED]
        if missing == "other loss" and cell["axes"][PRESET] == "post_ln":
            record["validation_parts"]["nll"][0] += 1.0
        if missing == "not yet learned" and record["status"] == "diverged":
            record |= {"status": "ok", "diverged": None, "outcome": "not_yet_learned"}
        path.write_text(json.dumps(record), encoding="utf-8")
    grid = read_results(fake.folder)
    assert sum(c.capped for c in grid.cells) == (missing == "not yet learned")
    found = text_sampling(grid, sensitivity_scores(grid))
    assert {(row.variant, row.score) for row in found} == {("pre_ln", "delta")}


def test_the_report_says_the_errors_and_writes_the_table(make_grid: Any) -> None:
    fake = make_grid(total, {**AXES, RATE: [4e-3]}, curves=False)
    leave(fake)
    page = write_report(fake.folder).read_text(encoding="utf-8")
    table = pd.read_csv(fake.folder / "text_sampling.csv")
    assert list(table["score"]) == ["delta", "interaction", "delta"]
    texts = table[table["score"] == "delta"]["over_texts"]
    shown = f"would change Δ by about {texts.min():.3f} to {texts.max():.3f} nats"
    assert shown in page
    assert "<dt>error over texts</dt>" in page
    bare = make_grid(total, {**AXES, RATE: [4e-3]}, curves=False, name="bare")
    page = write_report(bare.folder).read_text(encoding="utf-8")
    assert "sample of validation text" not in page
    assert "error over texts" not in page
    assert not (bare.folder / "text_sampling.csv").exists()
