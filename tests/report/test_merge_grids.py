"""Several grids as one: no number of a grid changes by it, and a shared cell is one run."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from lightning_app.config.identity import is_irrelevant
from lightning_app.core.errors import UserError
from lightning_app.report.comparisons import comparisons
from lightning_app.report.facts import facts, state_counts
from lightning_app.report.frames import results_frame
from lightning_app.report.headline import findings
from lightning_app.report.limits import limits
from lightning_app.report.pairs import scores_frame
from lightning_app.report.results import (
    UNSAID,
    GridResults,
    different,
    differing_settings,
    read_results,
    shared,
    together,
)
from lightning_app.report.statistics import label_values
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import messages

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"
DEPTH = "model.architecture.encoder_depth"
DEMO = {SEED: [1, 2, 3, 4, 5], PRESET: ["post_ln", "pre_ln", "sas"], WARMUP: [0, 60]}
OTHER_SEEDS = {**DEMO, SEED: [4, 5, 6, 7, 8]}  # of an id each; 4 and 5 are the demo's

Make = Callable[..., Any]


def deeper(grid: Any) -> dict[str, Any]:
    """The base of a grid with other layers and fewer steps."""
    base = copy.deepcopy(grid.base)
    base["model"]["architecture"]["encoder_depth"] = 12
    base["trainer"]["max_steps"] = 150
    return base


def joined(*grids: Any) -> GridResults:
    return together([read_results(grid.folder) for grid in grids])


@pytest.fixture
def pair(make_grid: Make, outcome: Any) -> tuple[Any, Any]:
    named = {"reference_warmup": 60, "baseline": "post_ln"}
    flat = make_grid(outcome, name="flat")
    deep = make_grid(outcome, OTHER_SEEDS, name="deep", base=deeper(flat), sensitivity=named)
    return flat, deep


def test_each_grid_has_the_scores_that_it_has_alone(pair: tuple[Any, Any]) -> None:
    both = scores_frame(sensitivity_scores(joined(*pair)))
    alone = [scores_frame(sensitivity_scores(read_results(grid.folder))) for grid in pair]
    assert len(both) > 20
    apart = pd.concat(alone, ignore_index=True)
    rest = ["group", "p_holm"]  # p values are corrected over both grids
    pd.testing.assert_frame_equal(both.drop(columns=rest), apart.drop(columns=rest))
    deltas = both[both["score"] == "delta"]
    assert list(deltas["p_holm"]) == pytest.approx(label_values(deltas["p"], deltas["p_sign"]))
    assert list(deltas["p_holm"]) != list(apart[apart["score"] == "delta"]["p_holm"])
    assert list(both["group"].unique()) == ["grid=flat", "grid=deep"]


def test_the_headline_has_the_p_values_of_the_tables(make_grid: Make) -> None:
    """Those corrected over both grids."""
    presets = ["pre_ln", "sas", "keel", "rezero", "b2t", "deepnorm", "t_fixup", "sas_p_no_norm"]
    axes = {PRESET: presets, SEED: [1, 2, 3, 4, 5]}

    def loss(axes: Any) -> float:
        place = len(axes[PRESET])
        return 2.0 + 0.002 * (axes[SEED] * place % 7) + 0.004 * place

    grid = joined(*(make_grid(loss, axes, name=name, curves=False) for name in ("a", "b")))
    rows = comparisons(grid)
    assert len(rows) == 14
    said = " ".join(findings(grid, []))
    alone = {row.value: row.p_holm for row in comparisons(grid.parts[0])}
    assert any(row.p_holm != alone[row.value] for row in rows)
    for row in rows:
        assert row.value_with_p in said
        assert said.count(row.value_with_p) == sum(r.value_with_p == row.value_with_p for r in rows)


def test_versions_that_differ_between_the_grids_are_said(make_grid: Make, outcome: Any) -> None:
    grids = [make_grid(outcome, name=name, curves=False) for name in ("a", "b")]
    first, second = (read_results(grid.folder) for grid in grids)
    cells = [
        replace(
            cell,
            id=f"{cell.id}b",
            name=f"{cell.name}b",
            result={**(cell.result or {}), "precision": "bf16-true"},
        )
        for cell in second.cells
    ]
    alike = {*limits(together([first, second]))}
    apart = together([first, replace(second, cells=tuple(cells))])
    assert any("bf16-true" in text for text in {*limits(apart)} - alike)


def test_references_and_baselines_stay_each_grids_own(make_grid: Make, outcome: Any) -> None:
    axes = {**DEMO, WARMUP: [0, 60, 120]}
    short = make_grid(outcome, axes, name="short")
    named = {"reference_warmup": 120, "baseline": "sas"}
    long = make_grid(lambda a: outcome(a) + 0.001 * a[WARMUP], axes, name="long", sensitivity=named)
    grid = joined(short, long)
    assert (grid.reference_warmup, grid.baseline) == (None, "pre_ln or sas")
    found = {(s.group, s.variant): s for s in sensitivity_scores(grid) if s.score == "delta"}
    for name, reference in (("short", 60), ("long", 120)):
        rows = results_frame(grid).query(f"grid == '{name}' and variant == 'pre_ln'")
        loss = rows.pivot(index="seed", columns="warmup", values="loss")
        expected = (loss[0] - loss[reference]).mean()
        assert found[f"grid={name}", "pre_ln"].estimate == pytest.approx(expected, abs=1e-12)
    said = findings(grid, sensitivity_scores(grid))
    assert {"grid=short" in text or "grid=long" in text for text in said} == {True}
    for name, baseline in (("short", "pre_ln"), ("long", "sas")):
        versus = [text for text in said if "compared with" in text and f"grid={name}" in text]
        assert {f"with {baseline}" in text for text in versus} == {True}


def test_a_shared_cell_counts_once_and_stands_in_both(pair: tuple[Any, Any]) -> None:
    grid = joined(*pair)
    ids = [{cell["id"] for cell in each.cells} for each in pair]
    assert shared(grid) == len(ids[0] & ids[1]) == 12
    assert len(different(grid)) == len(ids[0] | ids[1]) == 48
    assert len(grid.cells) == 60
    assert "48 of 48" in state_counts(grid)
    assert "12 of them" in state_counts(grid)
    assert dict(messages(limits(grid)))["limits.shared"] == {"cells": 12}


def test_a_cell_takes_the_result_of_the_grid_that_has_one(make_grid: Make, outcome: Any) -> None:
    done = make_grid(outcome, name="done")
    axes = {**DEMO, SEED: [5, 6]}
    begun = make_grid(lambda a: outcome(a) if a[SEED] == 6 else "failed", axes, name="begun")
    for grid in (joined(done, begun), joined(begun, done)):
        part = next(part for part in grid.parts if part.name == "begun")
        assert [cell.state for cell in part.cells if not cell.finished] == []
        adopted = [cell for cell in part.cells if cell.seed == 5]
        assert {cell.folder.parent.parent for cell in adopted} == {done.folder}
        assert {cell.group for cell in adopted} == {"grid=begun"}
    assert "failed" in {cell.state for cell in read_results(begun.folder).cells}


def test_settings_that_differ_are_listed_and_hold_for_none(pair: tuple[Any, Any]) -> None:
    grid = joined(*pair)
    assert differing_settings(grid) == {"trainer.max_steps": [200, 150], DEPTH: [3, 12]}
    assert grid.setting(DEPTH) is None
    assert grid.setting("trainer.max_steps") is None
    assert grid.setting("model.architecture.model_dim") == 64
    told = facts(grid)
    assert "flat: encoder-decoder, 3 + 3 layers" in told["Model"]
    assert "deep: encoder-decoder, 12 + 3 layers" in told["Model"]
    assert told["Compared with"] == "flat: pre_ln | deep: post_ln"
    assert told["Optimizer"] == facts(read_results(pair[0].folder))["Optimizer"]
    assert f"{DEPTH} (3 / 12)" in dict(messages(limits(grid)))["limits.between_grids"]["differ"]
    assert not [key for key in UNSAID if not is_irrelevant(key)]


def test_an_axis_of_one_grid_has_its_value_in_the_cells_of_the_other(
    make_grid: Make, outcome: Any
) -> None:
    several = make_grid(outcome, {**DEMO, DEPTH: [3, 6]}, name="several")
    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60]}
    one = make_grid(outcome, axes, name="one", base=deeper(several))
    grid = joined(several, one)
    assert grid.axes[DEPTH] == [3, 6, 12]
    assert grid.axes[SEED] == [1, 2, 3, 4, 5]
    table = results_frame(grid)
    assert {(name, depth) for name, depth in zip(table["grid"], table[DEPTH], strict=True)} == {
        ("several", 3),
        ("several", 6),
        ("one", 12),
    }
    assert {cell.group for cell in grid.cells} == {
        f"grid=several, {DEPTH}=3",
        f"grid=several, {DEPTH}=6",
        "grid=one",
    }


def test_a_grid_without_results_says_so_and_spoils_nothing(make_grid: Make, outcome: Any) -> None:
    done, bare = make_grid(outcome, name="done"), make_grid(lambda _: "waiting", OTHER_SEEDS)
    grid = joined(done, bare)
    found = {(s.group, s.variant): s for s in sensitivity_scores(grid) if s.score == "delta"}
    assert not math.isnan(found["grid=done", "pre_ln"].estimate)
    assert dict(messages(limits(grid)))["limits.missing"] == {"missing": 18, "cells": 30}


def test_what_cannot_be_compared_is_refused(make_grid: Make, outcome: Any) -> None:
    one, other = make_grid(outcome, name="one"), make_grid(outcome, name="deeper/one")
    with pytest.raises(UserError, match=r"the grid is"):
        joined(one, one)
    with pytest.raises(UserError, match="another of the"):
        joined(one, other)
    with pytest.raises(UserError, match="needs two grids"):
        joined(one)
    pruned = make_grid(outcome, name="pruned")
    pruned.prune(0)
    with pytest.raises(UserError, match=r"pruned/grid.yaml: pruner: median"):
        joined(one, pruned)
