"""Fine-tuning grids in the report: each task's own score, failed runs, tables of tasks."""

import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from lightning_app.config.tree import PRESET, RATE, SEED, WARMUP
from lightning_app.report.comparisons import BETTER, WORSE, by_metric, compare_axis, comparisons
from lightning_app.report.figures.need import scores_by_task
from lightning_app.report.figures.sheet import Part
from lightning_app.report.headline import answer
from lightning_app.report.limits import limits
from lightning_app.report.page import Report, page
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.table import latex, markdown
from lightning_app.report.tables import comparison_table, signed, task_tables
from lightning_app.report.tasks import (
    failed_runs,
    failure_tests,
    no_averages,
    split_of,
    task_scores,
)
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.report.write import first_figure, write_exports
from lightning_app.scores.task_facts import GLUE_CORPORA, GLUE_TASKS, TASKS
from tests.report.conftest import messages, one_sentence, shown
from tests.report.glue_grid import (
    AXES,
    CORPUS,
    CORRECTED,
    FLOOR,
    GLUE_BASE,
    MAJORITY,
    Scores,
    constant,
    glue_grid,
    learned,
)


def mixed(axes: Mapping[str, Any]) -> Scores:
    """Two of five runs of RTE fail without warm-up, one of CoLA is non-finite.

    On RTE, seed 3 has right answers and a loss at the floor.
    """
    corpus, seed, bare = axes[CORPUS], axes[SEED], axes[WARMUP] == 0
    if corpus == "rte":
        if bare and seed in (1, 2):
            return constant("rte")
        return learned("rte", (0.60 if bare else 0.64) + seed / 100, FLOOR if seed == 3 else 0.5)
    if bare and seed == 5:
        return {"val/nll": None, "val/matthews": None, "val/accuracy": None}
    return learned("cola", (0.10 if bare else 0.30) + seed / 100)


@pytest.fixture
def grid(tmp_path: Path) -> GridResults:
    return read_results(glue_grid(tmp_path / "demo", mixed))


def test_every_corpus_with_labels_has_its_own_score_first() -> None:
    by_corpus = TASKS["glue"].by_corpus
    assert by_corpus.keys() == GLUE_CORPORA.keys()
    for corpus, scores in by_corpus.items():
        task = GLUE_TASKS[GLUE_CORPORA[corpus]]
        assert scores[0].metric == f"val/{task.own}"
        assert {score.metric.partition("/")[2] for score in scores} == set(task.metrics)
        assert {(score.mode, score.scale) for score in scores} == {("max", 100.0)}
    assert [score.metric for score in by_corpus["mnli"]] == ["val/accuracy", "test/accuracy"]
    assert split_of("mnli", "test/accuracy") == ("MNLI-mm", "accuracy")


def test_groups_have_the_published_names_of_tasks(tmp_path: Path, grid: GridResults) -> None:
    own: dict[str, Any] = {"labels": {CORPUS: ["acceptable", "entailed"]}}
    own["metric"] = {"name": "val/accuracy", "mode": "max"}
    named = read_results(glue_grid(tmp_path / "named", mixed, **own))
    assert {cell.group for cell in named.cells} == {"acceptable", "entailed"}
    assert {arm.metric for arm in by_metric(named)} == {"val/accuracy"}
    assert {cell.group for cell in grid.cells} == {"CoLA", "RTE"}
    assert {cell.group: grid.measure(cell).metric for cell in grid.finished} == {
        "CoLA": "val/matthews",
        "RTE": "val/accuracy",
    }


def test_failed_runs_by_hand(grid: GridResults) -> None:
    """Wilson by hand, z = 1.959964: of 2 of 5 the centre is 0.4434482, the half width 0.3258276."""
    arms = {(arm.group, arm.warmup): arm for arm in failed_runs(grid)}
    bare = arms["RTE", 0]
    assert (bare.failed, bare.runs, bare.one_class, bare.loss_at_floor) == (2, 5, 2, 3)
    assert (bare.low, bare.high) == pytest.approx((0.1176207, 0.7692757), abs=1e-6)
    # 0.5271, 0.5271, 0.63, 0.64, 0.65: the median is that of seed 3.
    assert bare.median == pytest.approx(0.63)
    assert bare.mean == pytest.approx((2 * 146 / 277 + 0.63 + 0.64 + 0.65) / 5)
    assert math.isnan(bare.mean_low)  # some failed and others did not
    ref = arms["RTE", 60]
    assert (ref.failed, ref.loss_at_floor, ref.one_class) == (0, 1, 0)  # right at a high loss
    assert (ref.low, ref.high) == pytest.approx((0.0, 3.841459 / 8.841459), abs=1e-6)
    # t of 4 degrees of freedom: 2.776445 * sd / sqrt(5), sd = sqrt(0.00025)
    half = 2.776445 * math.sqrt(0.00025 / 5)
    assert (ref.mean_low, ref.mean_high) == pytest.approx((0.67 - half, 0.67 + half), abs=1e-6)
    cola = arms["CoLA", 0]
    assert (cola.failed, cola.non_finite, cola.one_class, cola.lacking) == (1, 1, 0, 1)
    assert cola.constant == 0.0
    # -inf, 0.11, 0.12, 0.13, 0.14: the run without a score is the worst.
    assert cola.median == pytest.approx(0.12)
    assert cola.mean == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("corpus", "changes", "failed", "one_class"),
    [
        ("rte", {}, 1, 1),
        ("rte", {"val/accuracy": 1 - MAJORITY["rte"]}, 1, 1),  # always the rarer class
        ("rte", {"val/accuracy": 0.5}, 1, 0),  # worse than a constant answer
        ("rte", {"val/accuracy": 147 / 277}, 0, 0),  # one row better
        ("cola", {"val/matthews": -0.02, "val/accuracy": 0.6}, 1, 0),
        ("cola", {"val/matthews": 0.02}, 0, 0),  # the accuracy is that of the majority by chance
        ("mrpc", {}, 1, 1),
        ("mrpc", {"val/f1": 0.79}, 1, 0),  # the same accuracy with other answers
        ("mrpc", {"val/f1": 0.80, "val/accuracy": 0.71}, 0, 0),  # F1 under that of a constant
    ],
)
def test_what_failed_means(tmp_path: Path, corpus: str, changes: Scores, failed, one_class) -> None:
    axes = {SEED: [1], CORPUS: [corpus], PRESET: ["post_ln"], WARMUP: [60]}
    folder = glue_grid(tmp_path / "demo", lambda _: {**constant(corpus), **changes}, axes)
    (arm,) = failed_runs(read_results(folder))
    assert (arm.failed, arm.one_class, arm.loss_at_floor) == (failed, one_class, 1)


@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize(
    ("corpus", "ones", "rows"),
    [("rte", 131, 277), ("mrpc", 279, 408), ("cola", 721, 1043), ("sst2", 444, 872)],
)
def test_one_answer_is_seen_in_the_numbers_of_a_run(tmp_path, corpus, ones, rows, answer) -> None:
    """A run reports its scores in single precision; with one row more they are of two answers."""
    right = ones if answer else rows - ones
    found: dict[str, float] = {"val/nll": FLOOR, "val/majority_accuracy": max(ones, rows - ones)}
    found["val/majority_accuracy"] /= rows
    other = {"cola": {"val/matthews": 0.0}, "mrpc": {"val/f1": 2 * ones / (ones + rows) * answer}}
    axes = {SEED: [1, 2], CORPUS: [corpus], PRESET: ["post_ln"], WARMUP: [60]}

    def scores(of: Mapping[str, Any]) -> Scores:
        accuracy = (right - (of[SEED] == 2)) / rows
        whole = found | {"val/accuracy": accuracy} | other.get(corpus, {})
        return {name: float(np.float32(value)) for name, value in whole.items()}

    (arm,) = failed_runs(read_results(glue_grid(tmp_path / "demo", scores, axes)))
    assert (arm.failed, arm.one_class) == (2, 1)


def test_a_result_without_the_score_is_judged_by_its_loss_and_counted(tmp_path: Path) -> None:
    axes = {SEED: [1], CORPUS: ["rte"], PRESET: ["post_ln"], WARMUP: [60]}
    folder = glue_grid(tmp_path / "demo", lambda _: {"val/nll": FLOOR}, axes)
    (arm,) = failed_runs(read_results(folder))
    assert (arm.failed, arm.by_loss, arm.lacking) == (1, 1, 1)
    assert math.isnan(arm.median)
    tables = {table.name: table for table in task_tables(read_results(folder))}
    assert tables["failed_runs"].notes == (
        "1 runs have no such score and were judged by their loss",
    )


def test_failures_are_compared_by_whole_seeds_and_cautions_come_first(grid: GridResults) -> None:
    """Of the C(10, 5) ways to deal the seeds, C(7, 2) have all three failures on either side."""
    (test,) = failure_tests(grid)
    assert (test.axis, test.value, test.baseline) == (WARMUP, "60", "0")
    assert (test.failed, test.runs, test.baseline_failed, test.baseline_runs) == (0, 10, 3, 10)
    assert (test.p, test.p_holm, test.strata) == pytest.approx((42 / 252, 42 / 252, 2))
    (looked_at,) = failure_tests(replace(grid, alpha=0.03))
    assert looked_at.p_holm == pytest.approx(42 / 252 * 5 / 3)
    assert test.difference == pytest.approx(-(0.4 + 0.2) / 2)
    found = dict(messages(limits(grid)))
    places = [[*found].index(f"limits.{name}") for name in ("dev_set", "failures", "budget")]
    assert places == sorted(places)
    # 0 of 5: z^2 / (5 + z^2)
    assert found["limits.failures"]["most"] == pytest.approx(3.841459 / 8.841459)
    assert found["limits.failures"]["seeds"] == 5
    assert found["limits.no_metric"]["metric"] == "val/matthews"


def test_a_test_of_failed_runs_has_finished_seeds_and_an_axis_of_compare_its_own(tmp_path) -> None:
    presets = ["post_ln", "pre_ln"]
    axes = {**AXES, CORPUS: ["rte"], PRESET: presets}
    folder = glue_grid(tmp_path / "demo", lambda at: fails_bare(at, presets), axes)
    cells = read_results(folder).cells
    cell = next(c for c in cells if (c.variant, c.warmup, c.seed) == ("pre_ln", 60, 5))
    (cell.run.folder.path / "result.json").unlink()
    whole, part = failure_tests(read_results(folder))
    assert (part.variant, part.runs, part.baseline_runs) == ("pre_ln", 4, 5)
    assert (part.p, part.p_holm) == pytest.approx((1 / 126, 2 / 126))
    assert (whole.p, whole.p_holm) == pytest.approx((2 / 252, 2 * 2 / 252))

    def scores(axes: Mapping[str, Any]) -> Scores:
        return fails_bare(axes, () if axes[CORRECTED] else ("post_ln",))

    axes = {**TWO_SETTINGS, CORPUS: ["rte"]}
    folder = glue_grid(tmp_path / "compared", scores, axes, compare={CORRECTED: True})
    warmup, correction = failure_tests(read_results(folder))
    # One stratum has 5 of 5 against 0 of 5: 1 / C(10, 5) at either end.
    assert warmup.p == correction.p == pytest.approx(2 / 252)
    assert (correction.axis, correction.value, correction.baseline) == (CORRECTED, "false", "true")
    assert correction.difference == pytest.approx(0.5)
    assert (warmup.failed, warmup.baseline_failed) == (0, 5)


def test_the_difference_by_warm_up_is_paired_and_knows_the_direction(tmp_path: Path) -> None:
    def scores(axes: Mapping[str, Any]) -> Scores:
        effect = (0.05 if axes[CORPUS] == "cola" else -0.05) if axes[WARMUP] else 0.0
        shift = effect + 0.001 * axes[SEED] * (axes[WARMUP] > 0)
        return learned(axes[CORPUS], 0.6 + 0.03 * axes[SEED] + shift)

    axes = {**AXES, SEED: [1, 2, 3, 4, 5, 6]}
    folder = glue_grid(tmp_path / "d", scores, axes)
    rows = {row.where: row for row in comparisons(read_results(folder))}
    cola, rte = rows["CoLA"], rows["RTE"]
    assert (cola.metric, cola.mode, cola.reading) == ("val/matthews", "max", BETTER)
    assert (rte.metric, rte.reading) == ("val/accuracy", WORSE)
    half = 2.570582 * math.sqrt(3.5e-6 / 6)  # of 0.001 to 0.006, the spread of seeds is gone
    assert cola.estimate == pytest.approx(0.0535)
    assert (cola.low, cola.high) == pytest.approx((0.0535 - half, 0.0535 + half), abs=1e-8)
    assert rte.estimate == pytest.approx(-0.0465)


def test_what_is_asked_for_is_compared_and_nothing_else(tmp_path: Path) -> None:
    def scores(axes: Mapping[str, Any]) -> Scores:
        worse, shift = axes[PRESET] == "pre_ln", axes[SEED] / 1000
        return learned("rte", 0.7 - 0.1 * worse + shift, 0.5 - 0.1 * worse + shift * worse)

    axes = {**AXES, CORPUS: ["rte"], PRESET: ["post_ln", "pre_ln"]}
    grid = read_results(glue_grid(tmp_path / "demo", scores, axes, compare={PRESET: "pre_ln"}))
    for metric, mode, way, estimate in (
        ("val/nll", None, "min", -0.097),
        ("val/accuracy", None, "max", -0.1),
        (None, None, "max", -0.1),
    ):
        found = compare_axis(grid, PRESET, "post_ln", metric=metric, mode=mode)
        assert found["axis"].unique().tolist() == [PRESET]
        assert found["estimate"].tolist() == pytest.approx([estimate] * 2)
        assert found["mode"].unique().tolist() == [way]
        by_loss = metric == "val/nll"
        assert found["metric"].unique().tolist() == ["val/nll" if by_loss else "val/accuracy"]


def fails_bare(axes: Mapping[str, Any], names: Container[str]) -> Scores:
    lost = axes[PRESET] in names and axes[WARMUP] == 0
    return constant("rte") if lost else learned("rte", 0.6 + axes[SEED] / 100)


def test_the_answer_names_who_fails_without_warm_up_and_where_scores_change(tmp_path, grid) -> None:
    def of(name: str, scores: Callable[[Mapping[str, Any]], Scores], **axes: Any) -> list[str]:
        folder = glue_grid(tmp_path / name, scores, {**AXES, **axes})
        return one_sentence(answer(read_results(folder), [])).split("; ")

    none = of("none", lambda axes: learned(axes[CORPUS], 0.6 + axes[SEED] / 50))
    assert one_sentence(answer(grid, [])).split("; ") == none  # 3 of 10 may be chance
    assert "post_ln" in none[0]
    assert not any(name in clause for clause in none for name in ("CoLA", "RTE"))
    names = ["post_ln", "pre_ln", "sas", "keel", "admin", "realformer", "hybrid", "sandwich"]
    for count, failing in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 3)):
        who, said = names[:failing], f"{failing}-of-{count}"
        axes = {CORPUS: ["rte"], PRESET: names[:count]}
        found = of(said, lambda axes, who=who: fails_bare(axes, who), **axes)
        clause = next(clause for clause in found if who[0] in clause)
        assert all(name in clause for name in who)
        assert not any(name in clause for name in names[failing:])
        assert clause != none[0]

    def moved(axes: Mapping[str, Any]) -> Scores:
        effect = (0.05 if axes[CORPUS] == "cola" else -0.05) + axes[SEED] / 1000
        return learned(axes[CORPUS], 0.6 + 0.03 * axes[SEED] + effect * (axes[WARMUP] > 0))

    (rise,) = [clause for clause in of("moved", moved) if "CoLA" in clause]
    assert "RTE" not in rise


TWO_SETTINGS = {**AXES, CORRECTED: [True, False]}


def of_settings(axes: Mapping[str, Any]) -> Scores:
    """On RTE warm-up without correction is best by median and worst by mean; on CoLA warm-up."""
    seed, bare, corrected = axes[SEED], axes[WARMUP] == 0, axes[CORRECTED]
    if axes[CORPUS] == "cola":
        return learned("cola", 0.1 + (0.0 if bare else 0.2) + seed / 100)
    if not bare and not corrected:
        return learned("rte", 0.70) if seed > 2 else constant("rte")
    return learned("rte", 0.66 + seed / 1000)


def test_the_best_median_stands_beside_the_mean_of_a_fixed_setting(tmp_path: Path) -> None:
    grid = read_results(glue_grid(tmp_path / "demo", of_settings, TWO_SETTINGS))
    found = {(row.kind, row.data): row for row in task_scores(grid)}
    fixed, best = found["mean", "rte"], found["best_median", "rte"]
    assert fixed.value == pytest.approx(0.663)  # warm-up 60 with correction, the base's value
    assert (fixed.setting, fixed.settings) == ("warmup_steps 60, bias_correction true", 1)
    assert best.value == pytest.approx(0.70)  # 0.527, 0.527, 0.7, 0.7, 0.7
    assert (best.setting, best.settings) == ("warmup_steps 60, bias_correction false", 4)
    assert found["mean", "cola"].value == pytest.approx(0.33)
    tables = {table.name: table for table in task_tables(grid)}
    mean, median = tables["task_scores"].bodies
    setting = "(warmup_steps 60, bias_correction true)"
    assert mean == f"ours, mean over 5 seeds of one setting {setting}"
    assert median.startswith("ours, OPTIMISTIC: median of the best of 4 settings")
    ((_, _, cell),) = tables["task_scores"].bodies[median]
    assert cell.text == "70.00"
    assert not any(row.average for row in task_scores(grid))
    text = no_averages(grid)
    assert "glue lacks SST-2, MRPC, STS-B, QQP, MNLI-m, MNLI-mm, QNLI" in text
    assert "cramming lacks" in text


def test_one_setting_is_one_that_all_variants_have(tmp_path: Path) -> None:
    axes = {SEED: [1, 2], CORPUS: ["rte"], PRESET: ["post_ln", "pre_ln"], WARMUP: [60]}
    rates = {"post_ln": [2.5e-4, 1e-3], "pre_ln": [1e-3, 4e-3]}
    own = {RATE: sorted({rate for each in rates.values() for rate in each})}

    def by_rate(axes: Mapping[str, Any]) -> Scores:
        return learned("rte", 0.5 + 0.1 * math.log10(axes[RATE] / 1e-4))

    folder = glue_grid(tmp_path / "demo", by_rate, axes | own)
    grid = read_results(folder)

    def of(rates: Mapping[str, Any]) -> GridResults:
        cells = [cell for cell in grid.cells if cell.axes[RATE] in rates[cell.variant]]
        return replace(grid, cells=tuple(cells))

    means = [row for row in task_scores(of(rates)) if row.kind == "mean"]
    assert {row.variant: row.value for row in means} == pytest.approx(dict.fromkeys(rates, 0.6))
    apart = {"post_ln": [2.5e-4], "pre_ln": [1e-3, 4e-3]}
    assert [row for row in task_scores(of(apart)) if row.kind == "mean"] == []
    assert {row.variant for row in task_scores(of(apart))} >= set(apart)


@pytest.mark.parametrize(("more", "lost"), [([], False), (["squad1"], False), ([], True)])
def test_an_average_of_all_tasks_is_the_one_of_its_name(tmp_path, more: list[str], lost) -> None:
    values = {corpus: 0.5 + place / 50 for place, corpus in enumerate(GLUE_CORPORA)}

    def scores(axes: Mapping[str, Any]) -> Scores:
        found = {"val/nll": 0.4, "val/majority_accuracy": 0.4, "test/accuracy": 0.9}
        if axes[CORPUS] in more:
            return {"val/nll": 0.4, "val/f1": 61.0, "val/exact_match": 50.0}
        names = [f"val/{name}" for name in GLUE_TASKS[GLUE_CORPORA[axes[CORPUS]]].metrics]
        if lost and (axes[CORPUS], axes[SEED], axes[WARMUP]) == ("stsb", 2, 60):
            return dict.fromkeys(["val/nll", *names])
        return found | dict.fromkeys(names, values[axes[CORPUS]])

    axes = {SEED: [1, 2], CORPUS: [*GLUE_CORPORA, *more], PRESET: ["post_ln"], WARMUP: [0, 60]}
    grid = read_results(glue_grid(tmp_path / "demo", scores, axes))
    rows = [row for row in task_scores(grid) if row.kind == "mean" and row.average]
    found = {row.average: row.value for row in rows}
    assert {(row.runs, row.lacking) for row in rows} == {(1, 1) if lost else (2, 0)}
    (row,) = next(iter({t.name: t for t in task_tables(grid)}["task_scores"].bodies.values()))
    assert ("(glue, 1 without)" in row[-1].text) == lost
    # All but MNLI have the same value in each score; MNLI has 0.6 and 0.9.
    others = [value for corpus, value in values.items() if corpus != "mnli"]
    assert found["glue"] == pytest.approx((sum(others) + (values["mnli"] + 0.9) / 2) / 8)
    nine = (sum(others) + values["mnli"] + 0.9) / 9
    assert (found["realformer"], found["cramming"]) == pytest.approx((nine, nine))
    assert no_averages(grid) == ""


def test_a_comparison_stands_once_under_its_own_metric(grid: GridResults) -> None:
    table = comparison_table(grid, comparisons(grid))
    found = {
        heading: [(row[1].text, row[3].text) for row in rows]
        for heading, rows in table.bodies.items()
    }
    wanted: dict[str, list[tuple[str, str]]] = {}
    for row in comparisons(grid):
        wanted.setdefault(row.metric, []).append((row.where, signed(row.estimate)))
    assert len(wanted) == len(found) == 2
    for metric, rows in wanted.items():
        (heading,) = [each for each in found if f"{metric} of each value" in each]
        assert found[heading] == rows
    # Only some of its runs failed.
    by_group = {row.where: row for row in comparisons(grid)}
    assert math.isnan(by_group["RTE"].low)
    assert "some seeds of" in by_group["RTE"].note
    assert by_group["CoLA"].seeds == 4


OVERLAP = "3 of 9 rows of valid, 1 of 2 rows of test"
PARTS = [
    ("squad1", {"train_from_dev": 0.9}, "SQuAD 1.1: NOT the published splits: of dev-v1.1", True),
    ("squad1", {}, "SQuAD 1.1: 87,599 / 10,570 questions, the published counts", False),
    ("rte", {}, "GLUE RTE: the published counts; 40 of 277 rows of valid are evaluated", True),
    ("rte", {}, "GLUE RTE: the published counts; 277 of 277 rows of valid are evaluated", False),
    ("rte", {}, f"the published counts; also in train: {OVERLAP}; more", False),
]


@pytest.mark.parametrize(("corpus", "section", "protocol", "is_other"), PARTS)
def test_scores_of_other_rows_are_a_limit(tmp_path, corpus, section, protocol, is_other) -> None:
    kind = "squad" if corpus == "squad1" else "glue"
    metric = {"squad": "val/f1", "glue": "val/accuracy"}[kind]
    base = yaml.safe_load(yaml.safe_dump(GLUE_BASE))
    base["model"]["objective"]["kind"] = kind
    base["data"] |= {"name": corpus, **section}
    folder = glue_grid(
        tmp_path / "demo",
        lambda axes: {"val/nll": 0.5, metric: 0.6 + axes[SEED] / 100},
        {SEED: [1, 2], PRESET: ["post_ln"], WARMUP: [0, 60]},
        base_config=base,
    )
    for path in folder.glob("runs/*/result.json"):
        record = json.loads(path.read_text())
        record["data"] |= {"name": corpus, "protocol": protocol}
        path.write_text(json.dumps(record))
    found = dict(messages(limits(read_results(folder))))
    assert ("limits.other_rows" in found) == is_other
    overlap = {"name": corpus, "protocol": OVERLAP} if OVERLAP in protocol else None
    assert found.get("limits.overlap") == overlap


def test_page_terminal_csv_and_latex(grid: GridResults) -> None:
    folder, found = grid.folder, sensitivity_scores(grid)
    report = Report(grid, found, folder)
    write_exports(report)
    text = page(report, ())
    assert "OPTIMISTIC" in text
    assert text.count("<h1") == 1
    arms = pd.read_csv(folder / "failed_runs.csv")
    assert arms.set_index(["group", "warmup"]).loc[("RTE", 0), "failed"] == 2
    scores = pd.read_csv(folder / "task_scores.csv")
    assert set(scores["kind"]) == {"mean", "best_median"}
    tables = {path.name for path in (folder / "tables").iterdir()}
    assert tables >= {"failed_runs.tex", "failure_tests.md", "task_scores.tex"}
    assert "2 / 5 [0.12, 0.77]" in shown(grid, found, width=400)
    for table in task_tables(grid):
        assert "OPTIMISTIC" in latex(table) or table.name != "task_scores"
        assert markdown(table).count("\n| ") > 2


def test_the_first_figure_has_every_run_of_every_task(grid: GridResults) -> None:
    part = Part(grid=grid, group="all", lr=None, cells=grid.finished)
    (sketch,) = scores_by_task(part)
    assert [axes.get_title() for axes in sketch.figure.axes] == ["CoLA", "RTE"]
    runs = sketch.table.query("mark == 'run'")
    assert len(runs) == 19
    assert "Not drawn: 1" in sketch.text
    assert runs.query("failed")["seed"].tolist() == [1, 2]  # of RTE without warm-up
    medians = sketch.table.query("mark == 'median' and group == 'RTE'")
    assert medians["value"].tolist() == pytest.approx([0.63, 0.67])
    assert first_figure(grid) is not None


def test_other_tasks_have_none_of_it(make_grid: Any) -> None:
    grid = read_results(make_grid(lambda axes: 2.0, {SEED: [1], WARMUP: [0, 60]}).folder)
    assert failed_runs(grid) == failure_tests(grid) == task_scores(grid) == task_tables(grid) == []
    assert no_averages(grid) == ""
