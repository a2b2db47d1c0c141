"""Several grids as one: no number of a grid changes by it, and a shared cell is one run."""

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from lightning_app.config.identity import is_irrelevant
from lightning_app.core.errors import UserError
from lightning_app.report.comparisons import comparisons, effects
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
from lightning_app.report.tables import factor_table, headline_table
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.report.write import write_figures
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
    deltas, own = (of[of["score"] == "delta"] for of in (both, apart))
    over_both = label_values(deltas["p"], deltas["p_sign"])
    assert list(deltas["p_holm"]) == pytest.approx(np.fmax(over_both, own["p_holm"]))
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


def noisy(axes: Any, name: str = "", spread: float = 0.03) -> float:
    return random.Random(f"{axes}{name}").gauss(2.3, spread)


def test_a_label_that_a_grid_lacks_alone_is_not_given_by_another(make_grid: Make) -> None:
    """Five seeds of one comparison cannot have one (sign flips); a quiet grid beside it adds no
    evidence, and neither does the same grid under another name."""

    def outcome(axes: Any) -> float:
        return noisy(axes) + 0.6 * (axes[PRESET] == "post_ln" and axes[WARMUP] == 0)

    axes = {SEED: [1, 2, 3, 4, 5], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
    grids = [make_grid(outcome, axes, name=name) for name in ("one", "two", "three")]
    alone = [score.p_holm for score in sensitivity_scores(read_results(grids[0].folder))]
    whole = sensitivity_scores(joined(*grids))
    for place, score in enumerate(whole):
        assert not score.p_holm < alone[place % len(alone)]
    assert min(score.p_holm for score in whole if score.score == "delta") > 0.05
    norms = {SEED: [1, 2, 3, 4, 5], "model.block.norm": ["layer_norm", "rms_norm"]}
    worse = [
        make_grid(
            lambda a: noisy(a) + 0.3 * (a["model.block.norm"] == "rms_norm"),
            norms,
            name=name,
            sensitivity={},
        )
        for name in ("a", "b", "c")
    ]
    assert all(row.p_holm > 0.05 for row in comparisons(joined(*worse)))


def test_a_search_that_goes_on_withholds_no_label_of_another_grid(make_grid: Make) -> None:
    axes = {SEED: [1, 2, 3, 4, 5, 6], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
    parts = [
        make_grid(lambda a, name=name: noisy(a, name), axes, name=name) for name in ("done", "more")
    ]
    plan = parts[1].folder / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"more": 12}))
    scores = [s for s in sensitivity_scores(joined(*parts)) if s.score == "delta"]
    assert [math.isnan(score.p) for score in scores] == [False, False, True, True]


def test_sentences_and_effects_name_their_grid(make_grid: Make) -> None:
    placement, norm = "model.block.norm_placement", "model.block.norm"
    axes = {SEED: [1, 2, 3, 4], placement: ["post", "pre"], norm: ["layer_norm", "rms_norm"]}
    named = {"reference_warmup": 60}
    grids = []
    for name, shift in (("up", 0.8), ("down", -0.5)):
        grid = make_grid(
            lambda a, shift=shift: noisy(a) + shift * (a[placement] == "post" and a[WARMUP] == 0),
            axes | {WARMUP: [0, 60]},
            name=name,
            sensitivity=named,
        )
        path = grid.folder / "grid.yaml"
        factors = {"factors": {"placement": placement, "norm": norm}}
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | factors))
        grids.append(grid)
    whole = joined(*grids)
    found = effects(whole, sensitivity_scores(whole))
    of = {
        row.group: row.estimate
        for row in found
        if (row.measure, row.factors) == ("delta", "placement")
    }
    assert of.keys() == {"grid=up", "grid=down"}
    assert of["grid=up"] < -0.7
    assert of["grid=down"] > 0.4
    assert "post to pre" in factor_table(whole, found).caption
    two = {SEED: [1, 2, 3, 4, 5, 6], norm: axes[norm]}
    plain = [
        make_grid(
            lambda a, s=s: noisy(a) + s * (a[norm] == "rms_norm"), two, name=name, sensitivity={}
        )
        for name, s in (("worse", 0.3), ("better", -0.3))
    ]
    whole = joined(*plain)
    sentences = findings(whole, sensitivity_scores(whole))
    assert [text.partition(":")[0] for text in sentences] == ["grid=worse", "grid=better"]


def test_each_grid_has_its_reference_in_table_and_figures(make_grid: Make, tmp_path: Path) -> None:
    axes = {SEED: [1, 2, 3], PRESET: ["post_ln", "pre_ln"]}

    def outcome(axes: Any) -> float:
        return 4.49 if axes[PRESET] == "post_ln" and axes[WARMUP] == 0 else noisy(axes)

    grids = [
        make_grid(
            outcome,
            axes | {WARMUP: [0, warmup]},
            name=f"to{warmup}",
            sensitivity={"reference_warmup": warmup, "baseline": "pre_ln"},
        )
        for warmup in (60, 20)
    ]
    whole = joined(*grids)
    table = headline_table(whole, sensitivity_scores(whole))
    rows = [row for body in table.bodies.values() for row in body]
    below = [row[1].below for row in rows if row[0].text == "post_ln"]
    assert below == [("stalls without it (3/3 against 0/3)",)] * 2
    names = [files.path.name for files in write_figures(whole, tmp_path / "figures")]
    assert {"warmup_effect-1.svg", "warmup_effect-2.svg"} <= {*names}
