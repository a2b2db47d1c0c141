"""Every score of a report comes out again from `results.parquet` by the cells that it prints."""

import html
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from lightning_app.analysis.bleu import bleu_scores
from lightning_app.analysis.exports.appendix import BLEU, METRICS, NotebookCell, notebook
from lightning_app.analysis.exports.tidy import write_tidy
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.merge_grids import together
from lightning_app.analysis.published import comparison
from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.report import write_report
from lightning_app.analysis.score import Score, scores_frame
from lightning_app.analysis.sensitivity import sensitivity_scores
from lightning_app.analysis.statistics import ended_alike, t_interval

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
KEYS = ["group", "lr", "variant", "score"]
NUMBERS = ["estimate", "low", "high", "p", "p_holm"]
PRESETS = ["post_ln", "pre_ln", "sas", "realformer"]


def noise(axes: Mapping[str, Any], spread: float = 0.1) -> float:
    return random.Random(str(sorted(axes.items()))).gauss(0.0, spread)


def regular(axes):
    return 2.0 + 0.4 * (axes[PRESET] == "post_ln" and axes[WARMUP] == 0) + noise(axes)


def mixed(axes):
    """Some runs of Post-LN stall without warm-up, one of RealFormer's with any warm-up."""
    if axes[PRESET] == "post_ln" and axes[WARMUP] == 0 and axes[SEED] % 2:
        return 4.49
    return 4.6 if axes[PRESET] == "realformer" and axes[SEED] == 1 else regular(axes)


def missing(axes):
    preset, warmup, seed = axes[PRESET], axes[WARMUP], axes[SEED]
    if preset in ("sas", "pre_ln") and warmup == 60 and seed == 2:
        return "waiting"
    if preset == "post_ln" and warmup == 20 and seed == 1:
        return None
    return "failed" if preset == "realformer" and warmup == 20 else regular(axes)


def at_rates(axes):
    if axes[RATE] > 0.003 and axes[WARMUP] == 0 and axes[PRESET] != "pre_ln":
        return 4.5
    return regular(axes) + 100 * abs(axes[RATE] - 0.002)


def never(axes):
    return 4.43 + noise(axes, 0.001) if axes[PRESET] == "post_ln" else regular(axes)


def axes_of(seeds: int, *warmups: int) -> dict[str, list[Any]]:
    return {SEED: list(range(1, seeds + 1)), PRESET: PRESETS, WARMUP: list(warmups)}


GRIDS = {
    "regular": (regular, axes_of(3, 0, 60)),
    "many seeds": (mixed, axes_of(6, 0, 60)),
    "mixed stalls": (mixed, axes_of(3, 0, 20, 60)),
    "missing runs": (missing, axes_of(4, 0, 20, 60)),
    "one seed": (regular, axes_of(1, 0, 60)),
    "several rates": (at_rates, axes_of(3, 0, 20, 60) | {RATE: [0.001, 0.002, 0.004]}),
    "another axis": (regular, axes_of(3, 0, 60) | {"model.architecture.model_dim": [64, 128]}),
    "one variant never learned": (never, axes_of(3, 0, 60)),
    "all stall without warm-up": (
        lambda axes: regular(axes) if axes[WARMUP] else 4.7,
        axes_of(3, 0, 60),
    ),
    "nothing learned": (lambda axes: 4.7, axes_of(3, 0, 60)),
    "nothing finite": (lambda axes: None, axes_of(2, 0, 60)),
    "no warm-up axis": (lambda axes: 2 + noise(axes), {SEED: [1, 2, 3], PRESET: PRESETS}),
    "no arm without warm-up": (regular, axes_of(3, 20, 60)),
    "no seed axis": (regular, {PRESET: PRESETS, WARMUP: [0, 60]}),
}


def run(cells: list[NotebookCell], folder: Path, monkeypatch: Any) -> dict[str, Any]:
    """The names that the cells leave, run as a notebook would in the folder of the report."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell.code, cell.title, "exec"), names)
    return names


def recomputed(cells: list[NotebookCell], folder: Path, monkeypatch: Any) -> pd.DataFrame:
    """The tables that the cells leave, joined."""
    names = run(cells, folder, monkeypatch)
    tables = dict.fromkeys(cell.table for cell in cells if cell.table)
    return pd.concat([names[table].reindex(columns=[*KEYS, *NUMBERS]) for table in tables])


def same_numbers(expected: pd.DataFrame, found: pd.DataFrame) -> None:
    """Every number of every score, to 1e-9; a score that is not defined may have no row."""
    assert not found.duplicated(KEYS).any()
    both = expected.merge(found, on=KEYS, how="left", suffixes=("", "_again"))
    # The power of a test is an integral, taken by two rules.
    allowed = both["score"].map(lambda score: 1e-6 if score == "detectable" else 1e-9)
    for number in NUMBERS:
        ours, again = both[number].astype(float), both[f"{number}_again"].astype(float)
        assert ours.isna().tolist() == again.isna().tolist(), number
        apart = (ours - again).abs() / ours.abs().clip(lower=1) / allowed
        assert max(apart.fillna(0).tolist()) <= 1, number


def written(fake: Any) -> tuple[GridResults, list[Score]]:
    """The grid and its scores; its tables lie in its folder."""
    grid = read_results(fake.folder)
    write_tidy(grid, grid.folder)
    return grid, sensitivity_scores(grid)


@pytest.mark.parametrize("name", GRIDS)
def test_the_printed_cells_give_every_score(make_grid, monkeypatch, name):
    outcome, axes = GRIDS[name]
    grid, rows = written(make_grid(outcome, axes, curves=False))
    found, expected = recomputed(notebook(grid, rows), grid.folder, monkeypatch), scores_frame(rows)
    same_numbers(expected, found)
    # No score that the report does not have, but the means of its second table.
    again = found.dropna(subset="estimate")["score"]
    scored = [score for score in again if not score.startswith("loss w=")]
    assert sorted(scored) == sorted(expected.dropna(subset="estimate")["score"])


def test_these_grids_have_every_score_and_number(make_grid):
    frames = []
    for name in ("regular", "several rates"):
        fake = make_grid(*GRIDS[name], curves=False, name=name)
        frames.append(
            scores_frame(sensitivity_scores(read_results(fake.folder))).dropna(subset="estimate")
        )
    defined = pd.concat(frames)
    names = {score.split()[0] for score in defined["score"]}
    assert names == {
        *("delta", "relative_delta", "interaction", "detectable", "stalls"),
        *("R_w", "eta_max", "need", "octaves", "rate_sensitivity", "stall_difference"),
    }
    assert all(len(defined[number].dropna()) > 2 for number in NUMBERS)


def test_several_grids_keep_their_references(make_grid, monkeypatch):
    axes = axes_of(3, 0, 20, 60)
    first = make_grid(regular, axes, name="a", curves=False)
    other = {"reference_warmup": 20, "baseline": "sas"}
    second = make_grid(
        at_rates, axes | {RATE: [0.001, 0.004]}, name="b", sensitivity=other, curves=False
    )
    grid = together([read_results(first.folder), read_results(second.folder)])
    rows = sensitivity_scores(grid)
    folder = first.folder.parent / "both"
    write_tidy(grid, folder)
    same_numbers(scores_frame(rows), recomputed(notebook(grid, rows), folder, monkeypatch))


@pytest.mark.parametrize("name", ["missing runs", "several rates"])
def test_what_the_page_prints_gives_what_lies_beside_it(make_grid, monkeypatch, name):
    page = write_report(make_grid(*GRIDS[name], curves=False).folder)
    printed = re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", page.read_text(), re.DOTALL)
    codes = [code for code in map(html.unescape, printed) if not code.startswith("tensorboard")]
    assert len(codes) >= 10
    names: dict[str, Any] = {}
    monkeypatch.chdir(page.parent)
    for code in codes:
        exec(code, names)
    tables = ("delta", "relative", "versus", "power", "stalls", "flat", "rates")
    tables += ("exact", "needed", "bought", "risen")
    left = [names[table].reindex(columns=[*KEYS, *NUMBERS]) for table in tables if table in names]
    same_numbers(pd.read_csv("sensitivity.csv"), pd.concat(left))


@pytest.mark.parametrize("name", ["mixed stalls", "missing runs", "several rates"])
def test_the_printed_cells_give_every_mean_loss(make_grid, monkeypatch, name):
    outcome, axes = GRIDS[name]
    grid, rows = written(make_grid(outcome, axes, curves=False))
    found = recomputed(notebook(grid, rows), grid.folder, monkeypatch)
    found = found.to_dict("records")
    found = [row for row in found if row["score"].startswith("loss w=")]
    arms: dict[tuple[Any, ...], list[Any]] = {}
    for cell in grid.finished:
        if math.isfinite(cell.loss):
            key = (cell.group, cell.lr, cell.variant, f"loss w={cell.warmup}")
            arms.setdefault(key, []).append(cell)
    assert len(found) == len(arms)
    for row in found:
        cells = arms[tuple(row[key] for key in KEYS)]
        losses = [cell.loss for cell in cells]
        low, high, _ = t_interval(losses)
        if not ended_alike([cell.state == "diverged" for cell in cells]):
            low = high = math.nan
        expected = (sum(losses) / len(losses), low, high)
        again = tuple(row[number] for number in ("estimate", "low", "high"))
        assert again == pytest.approx(expected, abs=1e-9, nan_ok=True)


def change(fake: Any, changed: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Rewrite every result: `changed(axes, result)` changes it in place."""
    for cell in fake.cells:
        path = fake.run(cell) / "result.json"
        if path.is_file():
            result = json.loads(path.read_text())
            changed(cell["axes"], result)
            path.write_text(json.dumps(result))


@pytest.mark.parametrize("name", ["mixed stalls", "missing runs", "one seed", "another axis"])
def test_the_printed_cells_give_every_bleu_difference(make_grid, monkeypatch, name):
    def translated(axes: dict[str, Any], result: dict[str, Any]) -> None:
        if axes[PRESET] != "sas":
            result["metrics"]["test/bleu"] = 30 + noise(axes, 2.0)

    fake = make_grid(*GRIDS[name], curves=False)
    change(fake, translated)
    grid, rows = written(fake)
    rows += bleu_scores(grid)
    assert len({row.variant for row in rows if row.score == "bleu"}) == 3
    found = recomputed(notebook(grid, rows), grid.folder, monkeypatch)
    same_numbers(scores_frame(rows), found)


@pytest.mark.parametrize("name", ["missing runs", "another axis", "no warm-up axis"])
def test_the_printed_cells_give_what_runs_took(make_grid, monkeypatch, name):
    def took(axes: dict[str, Any], result: dict[str, Any]) -> None:
        result["parameters"] = 1000 * (1 + PRESETS.index(axes[PRESET]))
        result["seconds"] = 100 + noise(axes)
        if axes[PRESET] != "sas":  # as an older version leaves it
            result["peak_memory_bytes"] = 10**9

    fake = make_grid(*GRIDS[name], curves=False)
    change(fake, took)
    grid, rows = written(fake)
    names = run(notebook(grid, rows), grid.folder, monkeypatch)
    for group, variant in names["cost"].index:
        own = [c for c in grid.finished if (c.group, c.variant) == (group, variant)]
        seconds = [float(cell.record["seconds"]) for cell in own]
        row = names["cost"].loc[(group, variant)]
        assert row["seconds"] == pytest.approx(sum(seconds) / len(own))
        assert names["hours"].loc[(group, variant)] == pytest.approx(sum(seconds) / 3600)
        assert pd.isna(row["peak_memory_bytes"]) == (variant == "sas")
        ratio = names["ratios"].loc[(group, variant), "parameters"]
        assert ratio == pytest.approx((1 + PRESETS.index(variant)) / 2)
    states = [cell.state for cell in grid.cells]
    assert names["states"].to_dict() == {state: states.count(state) for state in set(states)}


def test_the_printed_cells_give_ours_beside_published_figures(make_grid, monkeypatch):
    fake = make_grid(*GRIDS["missing runs"], curves=False)
    figures = [
        {"paper": "x", "setting": "x", "variant": variant, "value": 1.0, "warmup": warmup}
        | {"metric": "val/nll"}
        for variant in PRESETS
        for warmup in (0, 20, 60)
    ]
    path = fake.folder / "grid.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"published": figures}))
    grid, rows = written(fake)
    metrics = run(notebook(grid, rows), grid.folder, monkeypatch)["metrics"]["val/nll"]
    known = 0
    for row in comparison(grid).to_dict("records"):
        if row["seeds"] and "instead" not in row["differences"]:
            again = metrics.loc[("all", 0.004, row["variant"], row["warmup"])]
            assert again["mean"] == pytest.approx(row["ours"], abs=1e-9)
            assert again["count"] == row["seeds"]
            known += 1
    assert known == 11  # of RealFormer at warm-up 20 every run failed


def test_a_cell_is_short(make_grid):
    grid = read_results(make_grid(*GRIDS["several rates"], curves=False).folder)
    cells = [*notebook(grid, sensitivity_scores(grid)), BLEU, METRICS]
    assert len(cells) == len({cell.title for cell in cells}) == 27
    for cell in cells:
        lines = cell.code.splitlines()
        assert len(lines) <= 10, cell.title
        assert max(map(len, lines)) <= 100, cell.title


def test_a_grid_without_reference_or_baseline_has_fewer_cells(make_grid, monkeypatch):
    grid, rows = written(make_grid(regular, axes_of(3, 0, 60), sensitivity={}, curves=False))
    found = recomputed(notebook(grid, rows), grid.folder, monkeypatch)
    defined = {row.score.split()[0] for row in rows if not math.isnan(row.estimate)}
    assert defined == {"stalls", "R_w"}
    assert {score.split()[0] for score in found["score"]} == {"stalls", "R_w", "loss"}


@pytest.mark.parametrize("prunes", [False, True])
def test_nothing_to_recompute(make_grid, prunes):
    fake = make_grid(lambda axes: 2.0 if prunes else "waiting", {SEED: [1, 2]})
    if prunes:
        fake.prune(0)
    grid = read_results(fake.folder)
    assert notebook(grid, sensitivity_scores(grid)) == []
