"""Numbers of several batches become one row; what is written is read again."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_app.probes.hooks import (
    MODEL,
    Place,
    Probed,
    Row,
    RunningStats,
    from_csv,
    ordered,
    to_csv,
)


def test_quantiles_are_those_of_all_batches() -> None:
    tally = RunningStats()
    parts = torch.randn(31), torch.randn(2, 7)
    for part in parts:
        tally.sample(Place("attention_entropy", "encoder", 1, 2), part)
    whole = np.concatenate([part.flatten().numpy() for part in parts])
    found = {row.quantity: row.value for row in tally.rows(3)}
    for percent in (5, 25, 50, 75, 95):
        expected = np.quantile(whole, percent / 100)
        assert found[f"attention_entropy_p{percent}"] == pytest.approx(expected, rel=1e-5)
    tally = RunningStats()  # what has no item has no row
    tally.mean(Place("token_cosine", "encoder", 1), torch.empty(0))
    tally.sample(Place("attention_entropy", "encoder", 1), torch.empty(0))
    assert tally.rows(0) == []


def test_rows_survive_their_file_and_have_one_order(tmp_path: Path) -> None:
    rows = [
        Row(5, "encoder", 1, "token_cosine", None, 0.123456789),
        Row(5, "encoder", 2, "alpha", 3, math.nan),
        Row(5, MODEL, None, "nll", None, 1e-30),
    ]
    path = tmp_path / "probes.csv"
    path.write_text(to_csv(rows), encoding="utf-8")
    again = from_csv(path)
    assert [row[:-1] for row in again] == [row[:-1] for row in rows]
    np.testing.assert_allclose([row.value for row in again], [row.value for row in rows])
    rows = [
        *(Row(1, MODEL, None, "nll", None, 0.0), Row(1, "decoder", 1, "a", None, 0.0)),
        *(Row(1, "encoder", 2, "a", 0, 0.0), Row(1, "encoder", 2, "a", None, 0.0)),
        Row(1, "encoder", 1, "b", None, 0.0),
    ]
    assert ordered(rows) == [rows[3], rows[2], rows[4], rows[1], rows[0]]


def test_a_variant_shows_its_last_step() -> None:
    rows = [Row(step, "encoder", n, "a", None, 10.0 * step + n) for step in (1, 2) for n in (1, 2)]
    rows.append(Row(2, MODEL, None, "nll", None, 7.0))
    variant = Probed("x", rows)
    assert variant.values("a", "encoder") == {1: 21.0, 2: 22.0}
    assert variant.values("a", "encoder", head=0) == {}
    assert variant.number("nll") == 7.0
    assert math.isnan(variant.number("loss"))
