"""Grids whose parts have other rates, names or data: none is taken for another."""

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lightning_app.config.tree import PRESET, RATE, SEED, WARMUP, label
from lightning_app.report.facts import facts, schedules, state_counts
from lightning_app.report.figures.need import loss_by_rate
from lightning_app.report.figures.sheet import Part
from lightning_app.report.frames import results_frame
from lightning_app.report.limits import limits
from lightning_app.report.results import OTHER_DATA, failures, read_results
from lightning_app.report.tables import delta_table, over_rates_table
from lightning_app.report.terminal import mixture_line, mixtures
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.report.write import publish
from lightning_app.runs.folder import STORE
from tests.report.conftest import change, keep, messages, write_report, written
from tests.told import told

KIND = "model.optimizer.kind"
AXES = {PRESET: ["pre_ln", "post_ln"], WARMUP: [0, 60], SEED: [1, 2, 3]}


def loss(axes: Mapping[str, Any]) -> float:
    return 2.0 + 0.3 * (axes.get(WARMUP) == 0) + random.Random(str(axes)).gauss(0.0, 0.05)


@pytest.mark.parametrize("by", [KIND, PRESET])
def test_one_rate_for_each_group_or_variant(make_grid: Any, by: str) -> None:
    rates = {"adam": 0.001, "sgd": 0.1, "pre_ln": 0.001, "post_ln": 0.1}
    axes = {**AXES, KIND: ["adam", "sgd"], RATE: [0.001, 0.1]}
    fake = make_grid(loss, axes, curves=False)
    keep(fake, lambda at: at[RATE] == rates[at[by]])
    grid = read_results(fake.folder)
    scores = sensitivity_scores(grid)
    assert over_rates_table(grid, scores).bodies == {}
    found = [(v.score.score, v.lr) for v in verdicts(grid, scores) if v.kind == "arm"]
    assert sorted(found) == [("delta", 0.001)] * 2 + [("delta", 0.1)] * 2


def test_seeds_that_lack_a_rate_are_named_and_leave_the_others(make_grid: Any) -> None:
    """`exclude` may name a seed and a rate."""
    axes, lacking = {**AXES, RATE: [0.001, 0.002, 0.003, 0.004, 0.005]}, {1: 0.001, 2: 0.002}
    for more, seeds, rates in (({}, 1, 5), ({3: 0.003}, 3, 2)):
        fake = make_grid(loss, axes, curves=False, name=f"demo{seeds}")
        keep(fake, lambda at, of={**lacking, **more}: at[RATE] != of.get(at[SEED]))
        rows = [r for r in sensitivity_scores(read_results(fake.folder)) if math.isnan(r.lr)]
        found = {row.score: row for row in rows if row.variant == "pre_ln"}
        assert found["tuned"].seeds == found["mean_over_rates"].seeds == seeds
        assert ("2 of 3 seeds have fewer rates" in found["tuned"].note) == (seeds == 1)
        assert f"over {rates} rates" in found["mean_over_rates"].note


def test_schedules_are_those_of_cells_and_limits_those_of_runs(make_grid: Any) -> None:
    pairs = {"linear": "paper", "inverse_sqrt": "decoupled"}
    kind, coupling = "model.schedule.kind", "model.schedule.coupling"
    fake = make_grid(loss, {**AXES, kind: [*pairs], coupling: [*pairs.values()]}, curves=False)
    keep(fake, lambda at: pairs[at[kind]] == at[coupling])
    assert set(schedules(read_results(fake.folder))) == set(pairs.items())
    waiting = make_grid(lambda axes: "waiting", AXES, curves=False, name="later")
    found = dict(messages(limits(read_results(waiting.folder))))
    assert "limits.missing" in found
    assert found.keys().isdisjoint({"limits.scope", "limits.one_seed", "limits.budget"})


def test_each_panel_has_the_entropy_of_its_own_runs(make_grid: Any) -> None:
    axes = {**AXES, "data.name": ["first", "second"], RATE: [0.001, 0.002]}
    fake = make_grid(loss, axes, curves=False)
    tops = {"first": 6.5, "second": 4.5}
    for number, cell in enumerate(fake.cells):
        name = cell["axes"]["data.name"]
        fake.edit(number, unigram_entropy=tops[name], data={"name": name, "digest": name})
    grid = read_results(fake.folder)
    part = Part(grid=grid, cells=grid.finished, group="all", lr=None)
    (sketch,) = loss_by_rate(part)
    for axes_ in sketch.figure.axes:
        if axes_.get_title():
            (top,) = {
                y
                for line in axes_.lines
                if line.get_linestyle() != "-"
                for y in np.asarray(line.get_ydata(), dtype=float).tolist()
            }
            assert top == tops["first" if "first" in axes_.get_title() else "second"]
    assert dict(messages(limits(grid)))["limits.scope"]["corpora"] == "2 corpora"


def test_means_of_a_figure_are_of_the_seeds_that_have_every_rate(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | str:
        if axes[SEED] == 3 and axes[RATE] != 0.002:
            return "waiting"
        return 2.0 + 0.1 * abs(math.log2(axes[RATE] / 0.002)) + 0.5 * (axes[SEED] == 3)

    fake = make_grid(outcome, {**AXES, RATE: [0.001, 0.002, 0.004]}, curves=False)
    grid = read_results(fake.folder)
    (sketch,) = loss_by_rate(Part(grid=grid, cells=grid.finished, group="all", lr=None))
    means = [row for row in sketch.table.to_dict("records") if row["mark"] == "mean"]
    assert [row["n"] for row in means] == [2] * 12
    assert [row["value"] for row in means] == pytest.approx([2.1, 2.0, 2.1] * 4)


def test_ranges_of_rates_are_of_each_group_and_alike_ones_are_told_apart(make_grid: Any) -> None:
    axes = {**AXES, KIND: ["adam", "sgd"], RATE: [0.001, 0.01, 0.5, 1.5]}
    fake = make_grid(loss, axes, curves=False)
    keep(fake, lambda at: (at[RATE] > 0.1) == (at[KIND] == "sgd"))
    rates = dict(messages(limits(read_results(fake.folder))))["limits.rates"]["rates"]
    assert rates == f"from 0.001 to 0.01 ({KIND}=adam); from 0.5 to 1.5 ({KIND}=sgd)"
    axes = {**AXES, RATE: [0.004, 0.00400000001]}
    fake = make_grid(loss, axes, curves=False, name="alike")
    page = write_report(fake.folder, figures=False).read_text(encoding="utf-8")
    assert page.count("0.00400000001") > 3
    assert [label(lr) for lr in read_results(fake.folder).rates] == ["0.004", "0.00400000001"]


@pytest.mark.parametrize("references", [{}, {"reference_warmup": 60}])
def test_warmups_of_one_rate_each(make_grid: Any, tmp_path, references) -> None:
    rates = {0: 0.001, 60: 0.004}
    fake = make_grid(loss, {**AXES, RATE: [0.001, 0.004]}, curves=False)
    change(fake, sensitivity=references)
    keep(fake, lambda at: at[RATE] == rates[at[WARMUP]])
    assert "<h1>" in write_report(fake.folder).read_text(encoding="utf-8")
    scores = [s for s in sensitivity_scores(read_results(fake.folder)) if s.variant == "pre_ln"]
    names = [(s.score, s.lr) for s in scores if math.isnan(s.lr)]
    assert "tuned" in dict(names)
    assert len(names) == len({name for name, _ in names})
    publish(read_results(fake.folder), tmp_path / "study")
    assert (tmp_path / "study" / "headline-light.svg").is_file()


def test_a_run_that_was_cut_short_counts_nowhere(make_grid: Any) -> None:
    fake = make_grid(loss, AXES, curves=False)
    fake.edit(0, steps_asked=201)
    grid = read_results(fake.folder)
    (cell,) = (each for each in grid.cells if not each.finished)
    assert cell.state == "failed"
    assert "cut short" in (cell.error or "")


def test_a_refined_rate_of_one_arm_has_losses_and_no_empty_comparison(make_grid: Any) -> None:
    fake = make_grid(loss, {**AXES, RATE: [0.001, 0.002, 0.004]}, curves=False)
    keep(fake, lambda at: at[RATE] != 0.004 or at[WARMUP] == 60)
    change(fake, refine={"budget": 12})
    grid = read_results(fake.folder)
    written(grid)
    table = delta_table(grid, sensitivity_scores(grid))
    assert [*table.bodies] == ["learning rate 0.001", "learning rate 0.002"]
    assert "0.004" in (fake.folder / "tables" / "loss_by_warmup.md").read_text()


def test_words_of_a_failure_are_those_of_its_runs(make_grid: Any) -> None:
    grid = read_results(make_grid(lambda at: None if at[WARMUP] == 0 else loss(at), AXES).folder)
    table = delta_table(grid, sensitivity_scores(grid))
    (column,) = [n for n, each in enumerate(table.columns) if each.title.endswith("warm-up 0")]
    assert table.columns[column].title.startswith(failures(grid.finished))
    assert "stall" not in failures(grid.finished)
    shown = [row[column].text for body in table.bodies.values() for row in body]
    assert shown == ["3 / 3"] * 2


def test_a_table_without_rows_is_removed(make_grid: Any) -> None:
    fake = make_grid(loss, AXES)
    write_report(fake.folder, figures=False)
    table = fake.folder / "tables" / "headline.md"
    assert table.is_file()
    for result in fake.folder.glob("runs/*/result.json"):
        result.unlink()
    write_report(fake.folder, figures=False)
    assert not table.exists()


PLANNED = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], SEED: [1, 2, 3]}
MADE = {"code": "aaaa", "libraries": {"torch": "2.13.0"}, "cpu": "EPYC", "matmul": "MKL"}
OTHER = {"name": "synthetic", "digest": "2" * 64}


def test_results_of_other_data_are_never_pooled(make_grid, outcome) -> None:
    made = make_grid(outcome, PLANNED)
    made.edit(0, data=OTHER)
    stranger = made.cells[0]["name"]
    grid = read_results(made.folder)
    assert [cell.name for cell in grid.cells if cell.state == OTHER_DATA] == [stranger]
    assert len(grid.finished) == 11
    assert grid.strangers == {"2" * 64: [stranger]}
    assert all(stranger not in str(score) for score in sensitivity_scores(grid))
    deltas = [score for score in sensitivity_scores(grid) if score.score == "delta"]
    assert {score.variant: score.seeds for score in deltas} == {"post_ln": 2, "pre_ln": 3}
    frame = results_frame(grid).set_index("name").loc[stranger]
    assert frame["status"] == OTHER_DATA
    assert frame[["val/nll", "loss"]].isna().all()
    assert "1 left out" in state_counts(grid)
    assert limits(grid)[0].startswith("1 finished cell was trained on other data than the rest")
    assert "limits.missing" not in dict(messages(limits(grid)))

    page = write_report(made.folder, figures=False).read_text(encoding="utf-8")
    assert stranger in page
    assert "trained on other" in page
    # Axes of the data are no mixture.
    made = make_grid(lambda axes: 2.0, {**PLANNED, "data.window": [16, 32]}, name="axes")
    for number, cell in enumerate(made.cells):
        if cell["axes"]["data.window"] == 32:
            made.edit(number, data=OTHER)
    assert len(read_results(made.folder).finished) == len(made.cells)


def test_old_code_is_not_recorded_and_every_other_mixture_is_stated(make_grid, outcome) -> None:
    made = make_grid(outcome, PLANNED)
    grid = read_results(made.folder)
    assert facts(grid)["Code"] == "not recorded"
    assert any("version of the" in text for text in limits(grid))
    assert mixture_line(grid) == ""
    made.rewrite(lambda _, record: record.update(provenance=MADE))
    grid = read_results(made.folder)
    assert not any("version" in text for text in limits(grid))
    assert facts(grid)["Code"] == "aaaa"
    for number in range(len(made.cells)):
        made.edit(number, provenance={**MADE, "code": "aaaa" if number % 2 else "bbbb"})
    made.edit(0, provenance={**MADE, "cpu": "Xeon"}, precision="bf16-mixed")
    (made.folder.parent / STORE / f"{made.cells[0]['id']}@superseded-1").mkdir(parents=True)
    grid = read_results(made.folder)
    assert len(grid.finished) == len(made.cells)
    assert set(mixtures(grid)) == {"code", "device", "precision"}
    line = mixture_line(grid)
    assert told("2 … , 2 … , 2 precisions").search(line)
    page = write_report(made.folder, figures=False).read_text(encoding="utf-8")
    cautions = page[page.index("What may not be concluded") :]
    assert told("of 2 … (aaaa: 7; bbbb: 5)").search(cautions)
    assert told("of 2 … (Xeon: 1; EPYC: 11)").search(cautions)
    assert facts(grid)["Code"] == "aaaa: 7; bbbb: 5"
    assert facts(grid)["Superseded"].startswith("1 earlier runs, kept as .runs/ID@superseded-N")
