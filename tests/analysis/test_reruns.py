"""Runs under perturbed rounding measure the rerun component, and enter no score."""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lightning_app.analysis.packed_grid import PACKED, unpack
from lightning_app.analysis.publish import publish
from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.report import write_report
from lightning_app.analysis.reruns import rerun_components
from lightning_app.analysis.score import scores_frame
from lightning_app.analysis.sensitivity import sensitivity_scores

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"
ROUNDING = "model.rounding"
AXES = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], SEED: [1, 2, 3]}
REPEATED = {**AXES, ROUNDING: [0, 1, 2]}


def loss(axes: Mapping[str, Any]) -> float:
    """Rounding moves Post-LN without warm-up by 0.1, the others by nothing."""
    needs = axes[PRESET] == "post_ln" and axes[WARMUP] == 0
    seed = 2.0 + 0.2 * axes[SEED] + 0.5 * needs
    moved = needs and axes.get(ROUNDING, 0)
    return seed + (random.Random(str(sorted(axes.items()))).gauss(0.0, 0.1) if moved else 0.0)


def some(axes: Mapping[str, Any]) -> float | str:
    """Only seeds 1 and 2 are repeated, seed 2 once."""
    if axes[ROUNDING] and (axes[SEED] == 3 or (axes[SEED], axes[ROUNDING]) == (2, 2)):
        return "waiting"
    return loss(axes)


def test_the_component_is_the_spread_of_reruns(make_grid: Any) -> None:
    grid = read_results(make_grid(some, REPEATED, curves=False).folder)
    found = {(row.variant, row.warmup): row for row in rerun_components(grid)}
    assert len(found) == 4
    for (preset, warmup), row in found.items():
        point = {PRESET: preset, WARMUP: warmup}
        samples = {
            seed: [loss({**point, SEED: seed, ROUNDING: r}) for r in range(count)]
            for seed, count in ((1, 3), (2, 2))
        }
        squares = sum(np.var(of, ddof=1) * (len(of) - 1) for of in samples.values())
        assert row.rounding == pytest.approx(math.sqrt(squares / 3), abs=1e-12)
        losses = [loss({**point, SEED: seed, ROUNDING: 0}) for seed in (1, 2, 3)]
        assert row.seeds == pytest.approx(np.std(losses, ddof=1), abs=1e-12)
        assert (row.runs, row.reruns) == (2, 3)
        assert row.share == pytest.approx((row.rounding / row.seeds) ** 2)
    assert found["post_ln", 0].rounding > 0.02
    assert found["pre_ln", 0].rounding == 0.0


def test_no_score_includes_a_rerun(make_grid: Any) -> None:
    plain = read_results(make_grid(loss, AXES, curves=False, name="plain").folder)
    repeated = read_results(make_grid(loss, REPEATED, curves=False).folder)
    first, second = (scores_frame(sensitivity_scores(grid)) for grid in (plain, repeated))
    pd.testing.assert_frame_equal(first, second)
    assert len(repeated.cells) == 12
    assert len(repeated.reruns) == 24


def test_the_report_shows_the_component(make_grid: Any) -> None:
    fake = make_grid(loss, REPEATED, curves=False)
    page = write_report(fake.folder).read_text(encoding="utf-8")
    assert "between roundings" in page
    assert len(pd.read_csv(fake.folder / "reruns.csv")) == 4
    bare = make_grid(loss, AXES, curves=False, name="bare")
    assert "between roundings" not in write_report(bare.folder).read_text(encoding="utf-8")
    assert not (bare.folder / "reruns.csv").exists()


def test_a_published_study_keeps_its_reruns(make_grid: Any, tmp_path: Path) -> None:
    grid = read_results(make_grid(some, REPEATED).folder)
    publish(grid, tmp_path / "study")
    again = read_results(unpack(tmp_path / "study" / PACKED, tmp_path / "elsewhere").path)
    assert rerun_components(again) == rerun_components(grid)
    assert len(again.reruns) == 24
