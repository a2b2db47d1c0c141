"""The best rate of an arm of the study `widths`, and its shift."""

import math

import pandas as pd
import pytest

from benchmarks.widths import best, shift


def arm(least: float, moved: float = 0.0) -> pd.DataFrame:
    """Five seeds of four trials whose loss has its least at 2^least, of seed s `moved` s beside."""
    trials = [(s, x + s / 8) for s in range(5) for x in (-11.0, -9.5, -8.0, -6.5)]
    losses = [2 + 0.05 * (x - least - moved * (s - 2)) ** 2 for s, x in trials]
    rows = [(s, 2**x, loss, "trained") for (s, x), loss in zip(trials, losses, strict=True)]
    rows += [(s, 2**-5.5, 1.0, "stalled") for s in range(5)]
    return pd.DataFrame(rows, columns=["seed", "lr", "loss", "outcome"])


def test_the_best_rate_is_that_of_the_curve_through_all_trials_that_trained() -> None:
    assert best(arm(-8.3)) == pytest.approx(-8.3, abs=2e-3)
    assert best(arm(-20.0)) == pytest.approx(-11.0)  # at the end of the range
    assert math.isnan(best(arm(-8.3).head(4)))
    found = shift(arm(-8.3), arm(-9.1))
    assert found == pytest.approx((-0.8, -0.8, -0.8), abs=5e-3)
    whole, low, high = shift(arm(-8.3, 0.1), arm(-9.1))
    assert low < -0.81 < -0.79 < high
    assert whole == pytest.approx(-0.8, abs=0.1)
