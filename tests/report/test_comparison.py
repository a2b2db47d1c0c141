"""Values of an axis compared on the grid's own metric, and what warm-up gives in BLEU."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sacrebleu
import yaml
from scipy import stats

from lightning_app.api.runs import RunResult
from lightning_app.config.rules import COMPARE, GridSubject, check_rules
from lightning_app.config.tree import PRESET, SEED, WARMUP
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import score_of
from lightning_app.report.comparisons import (
    BETTER,
    by_metric,
    compare_axis,
    comparison_document,
    comparisons,
    metrics_document,
    titled,
)
from lightning_app.report.facts import facts
from lightning_app.report.frames import results_frame
from lightning_app.report.headline import answer
from lightning_app.report.limits import limits, urgent
from lightning_app.report.pairs import first_step
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.tasks import MOST_TESTS, bleu_scores
from lightning_app.report.tensorboard import IndexedGrid, final_metrics, metric_tags
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import BASE, change, keep, messages, one_sentence, shown, write_report
from tests.told import told

WIDTH = "model.architecture.model_dim"
DROPOUT = "model.architecture.dropout"
AXES = {PRESET: ["sas", "pre_ln", "post_ln"], WIDTH: [64, 128], SEED: [1, 2, 3, 4]}


def loss(axes: Mapping[str, Any]) -> float:
    """sas is 0.5 worse than pre_ln, post_ln no different; width helps all alike."""
    noise = random.Random(str(sorted(axes.items()))).gauss(0.0, 0.02)
    return 2.5 + 0.5 * (axes[PRESET] == "sas") - axes[WIDTH] / 640 + noise


def read(fake: Any, **changes: Any) -> GridResults:
    """The grid, after changes of its grid file."""
    change(fake, **changes)
    return read_results(fake.folder)


def test_a_grid_compares_its_variants_or_about_warmup_only_what_it_names(make_grid: Any) -> None:
    fake = make_grid(loss, AXES, curves=False)
    grid = read_results(fake.folder)
    assert {(row.axis, row.baseline) for row in comparisons(grid)} == {(PRESET, "pre_ln")}
    said = one_sentence(answer(grid, sensitivity_scores(grid)))
    assert all(name in said for name in ("val/nll", "sas", "post_ln", "pre_ln"))
    page = write_report(fake.folder, figures=False).read_text(encoding="utf-8")
    assert not (fake.folder / "tables" / "headline.md").exists()
    assert "limits.no_bare_arm" not in dict(messages(limits(grid)))
    assert f"<h1>{escape(said)}</h1>" in page
    table = (fake.folder / "comparisons.csv").read_text()
    assert table.count("\n") == 5
    readings = [comparison_document(row)["reading"] for row in comparisons(grid)]
    assert sorted(readings) == ["undecided", "undecided", "worse", "worse"]
    axes = {PRESET: ["sas"], WARMUP: [0, 60], SEED: [1, 2]}
    fake = make_grid(lambda axes: 2.0 + axes[SEED] / 9, axes, name="warmup")
    assert comparisons(read_results(fake.folder)) == []
    write_report(fake.folder, figures=False)
    assert not (fake.folder / "comparisons.csv").exists()
    (row,) = comparisons(read(fake, compare={WARMUP: 0}))
    assert (row.axis, row.value, row.baseline, row.estimate) == (WARMUP, "60", "0", 0.0)


@pytest.mark.parametrize("lost", [0, 2])
def test_an_arm_whose_runs_became_non_finite_is_not_judged_by_the_others(make_grid, lost) -> None:
    """As where they stall: what the seeds that remain agree on is no difference of the arm."""

    def outcome(axes: Mapping[str, Any]) -> float | None:
        if axes[PRESET] == "sas":
            return None if axes[SEED] <= lost else 1.5 + 0.001 * axes[SEED]
        return 2.0 + 0.001 * axes[SEED] ** 2

    axes = {PRESET: ["pre_ln", "sas"], SEED: [*range(1, 9)]}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    (row,) = comparisons(grid)
    (arm,) = [arm for arm in by_metric(grid) if arm.variant == "sas"]
    lacking = "limits.no_metric" in dict(messages(limits(grid)))
    if not lost:
        assert (row.reading, arm.lacking, lacking) == (BETTER, 0, False)
        assert math.isfinite(row.low)
        assert math.isfinite(arm.low)
        return
    assert (row.seeds, row.reading) == (6, "")
    assert all(map(math.isnan, (row.low, row.p, row.p_holm, arm.low)))
    assert row.note.endswith("some seeds of an arm failed and others did not")
    assert (arm.lacking, lacking) == (2, True)


@pytest.mark.parametrize("metric", ["val/nll", "val/accuracy"])
def test_a_run_that_became_non_finite_has_no_value_of_a_validation_before(make_grid, metric):
    def outcome(axes: Mapping[str, Any]) -> float | None:
        return None if axes[PRESET] == "post_ln" else 2.0 + 0.01 * axes[SEED]

    axes = {PRESET: ["pre_ln", "post_ln"], SEED: [*range(1, 7)]}
    grid = {"name": metric, "mode": "min" if metric == "val/nll" else "max"}
    fake = make_grid(outcome, axes, curves=False)
    fake.rewrite(lambda at, of: of["metrics"].update({"val/nll": 1.0, "val/accuracy": 0.9}))
    fake.rewrite(lambda at, of: at[PRESET] == "pre_ln" and of["metrics"].update({metric: 0.8}))
    found = read(fake, metric=grid)
    (row,) = comparisons(found)
    first, last = by_metric(found)
    assert (row.seeds, row.reading, first.variant) == (0, "", "pre_ln")
    assert (first.mean, last.runs, last.lacking) == (pytest.approx(0.8), 0, 6)
    frame = results_frame(found).set_index("variant").loc["post_ln"]
    assert frame[metric].isna().all()
    assert (frame["train/tokens_per_second"] == 21000).all()
    part = IndexedGrid(found)
    for cell in found.cells:
        if cell.variant != "post_ln":
            continue
        assert RunResult(cell.folder).metrics[metric] is None
        assert math.isnan(final_metrics(part, cell)[metric])
        plan: Any = SimpleNamespace(metric=metric, mode=grid["mode"], name="g")
        told = score_of(plan, RunResult(cell.folder).record)
        assert told == (cell.entropy if metric == "val/nll" else 0.0)


def test_the_best_trials_of_a_search_are_compared(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | None:
        best = {"pre_ln": 0.1, "post_ln": 0.3}[axes[PRESET]]
        if axes[DROPOUT] == 0.0:  # the best of the seeds that are left is not the best trial
            return None if axes[SEED] == 1 else 1.0
        gap = 0.2 * (axes[PRESET] == "post_ln")
        return 2.0 + gap + abs(axes[DROPOUT] - best) + 0.01 * axes[SEED]

    axes = {PRESET: ["pre_ln", "post_ln"], DROPOUT: [0.0, 0.1, 0.2, 0.3], SEED: [1, 2, 3, 4]}
    fake = make_grid(outcome, axes, curves=False)
    keep(fake, lambda at: at[DROPOUT] != (0.3 if at[PRESET] == "pre_ln" else 0.1))
    field = {DROPOUT: {"low": 0.0, "high": 0.4}}
    (row,) = comparisons(read(fake, search={"fields": field, "budget": 12}))
    assert (row.axis, row.value, row.seeds, row.where) == (PRESET, "post_ln", 4, "all")
    assert row.estimate == pytest.approx(0.2)
    assert all(text in row.note for text in ("of 3 trials", "dropout=0.3", "dropout=0.1"))


def test_a_loss_is_reached_without_a_line_through_a_gap() -> None:
    nan = math.nan
    assert first_step({10: nan, 20: nan, 30: 3.0}, 4.0) == (30, False)
    assert first_step({10: 5.0, 20: nan, 30: 3.0}, 4.0) == (30, False)
    assert first_step({10: 5.0, 20: 3.0, 30: nan}, 4.0) == (15, False)
    assert first_step({10: 5.0, 20: nan, 30: 4.5}, 4.0) == (30, False)


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ({"model.block.presets": "sas"}, "compare:.*'model.block.presets'"),
        ({PRESET: "keel"}, r"compare: model.block.preset:.*\(sas, pre_ln"),
        ({SEED: 1}, "compare: seed_everything:"),
    ],
)
def test_a_mistake_in_the_grid_file_is_named(compare: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_rules([COMPARE], GridSubject({"compare": compare}, AXES, {}, {}, "val/nll"))
    check_rules([COMPARE], GridSubject({"compare": {WIDTH: 64.0}}, AXES, {}, {}, "val/nll"))


TOKENIZER, WINDOW, BATCH = "data.tokenizer", "data.window", "data.tokens_per_batch"
TEXT: dict[str, Any] = json.loads(json.dumps(BASE))
TEXT["model"]["objective"] |= {"kind": "causal_lm"}
TEXT["data"] |= {"name": "text", "tokenizer": "word", "window": 16}
THREE = {SEED: [1, 2, 3, 4]}
UNLIKE = "not comparable"
BEAM, MINE = "model.objective.beam", "model.init_args.mine"


def bits(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
    """Words have fewer bits a byte though they have more nats a token."""
    char = axes[TOKENIZER] == "char"
    record["metrics"]["val/bits_per_byte"] = 0.45 + 0.2 * char + (1 + 0.1 * char) * axes[SEED] / 100


def nats(axes: Mapping[str, Any]) -> float:
    return 1.0 + (axes.get(TOKENIZER) == "word") + axes[SEED] ** 2 / 1000


def unlike_grid(make_grid: Any, axes: Mapping[str, Any], base: Any = TEXT, **changes: Any) -> Any:
    fake = make_grid(nats, {**THREE, **axes}, base=base, sensitivity={}, curves=False)
    return fake, read(fake, **changes)


def test_bits_per_byte_take_the_place_of_nats_of_two_tokenizers(make_grid: Any) -> None:
    fake, _ = unlike_grid(make_grid, {TOKENIZER: ["word", "char"], SEED: [1, 2, 3, 4, 5, 6]})
    fake.rewrite(bits)
    grid = read(fake, compare={TOKENIZER: "word"})
    (row,) = comparisons(grid)
    assert (row.metric, row.reading, row.comparable) == ("val/bits_per_byte", "worse", True)
    assert row.estimate == pytest.approx(0.2, abs=0.01)
    assert TOKENIZER in row.note
    said = one_sentence(answer(grid, []))
    assert all(name in said for name in ("val/bits_per_byte", "char", "worse"))
    table = compare_axis(grid, TOKENIZER, "word", metric="val/nll")
    assert table["metric"].tolist() == ["val/bits_per_byte"]
    given = replace(grid, metric_matters=9.0)  # nats
    table = compare_axis(given, TOKENIZER, "word", metric="val/bits_per_byte")
    assert table["reading"].tolist() == ["worse"]
    # An unknown token costs less than what it spells, so a text with some has no bits per byte.
    first = fake.cells[0]["axes"]
    fake.rewrite(lambda at, of: at == first and of["metrics"].pop("val/bits_per_byte"))
    (row,) = comparisons(read_results(fake.folder))
    assert (row.reading, row.metric, math.isnan(row.estimate)) == (UNLIKE, "val/nll", True)
    assert "1 of 12" in row.note


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        (TOKENIZER, ["word", "char"]),
        ("data.vocab_size", [12, 8]),
        (WINDOW, [16, 32]),
        ("data.name", ["text", "wikitext2"]),
        ("data.root", ["one", "two"]),
        ("data.splits.valid", ["valid", "other"]),
        ("trainer.limit_val_batches", [None, 0.5]),
        ("data.evaluation_stride", [None, 4]),
        ("model.block.memory.evaluation_length", [16, 64]),
        (BEAM, [1, 4]),
    ],
)
def test_losses_that_count_other_things_have_no_label(make_grid: Any, axis: str, values) -> None:
    base = BASE if axis == BEAM else TEXT
    _, grid = unlike_grid(make_grid, {axis: values}, base=base, compare={axis: values[0]})
    (row,) = comparisons(grid)
    assert (row.reading, row.metric, row.seeds) == (UNLIKE, "val/nll", 0)
    assert not row.comparable
    assert axis != BEAM or "evaluation" in row.note
    assert axis in row.why_unlike
    assert axis != TOKENIZER or "of another tokenizer" in row.budget
    assert answer(grid, []) == ""
    assert comparison_document(row)["reading"] == UNLIKE
    assert any(axis in text for text in urgent(grid)) == (axis != BEAM)
    assert np.isnan(compare_axis(grid, axis, values[0])["estimate"].to_numpy()).all()


def test_bytes_are_counted_for_unlike_tokens_and_a_text_of_another_size_seen(make_grid) -> None:
    """The tokens of char are all of the text; those of word leave out every second space."""

    def spelled(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
        nll = record["metrics"]["val/nll"]
        size = 4 if axes[TOKENIZER] == "word" else 1
        record["metrics"]["val/bits_per_byte"] = nll / math.log(2) / size

    def sized(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
        bits(axes, record)
        record["metrics"]["test/bits_per_byte"] = record["metrics"]["val/bits_per_byte"]
        size = 1000 + 100 * (axes[TOKENIZER] == "char")
        nll = record["metrics"]["val/bits_per_byte"] * math.log(2) * size
        record["validation_parts"] = {"nll": [nll / 4, 3 * nll / 4], "tokens": [30, 90]}

    fake, _ = unlike_grid(make_grid, {TOKENIZER: ["char", "word"]})
    fake.rewrite(spelled)
    (row,) = comparisons(read(fake, compare={TOKENIZER: "char"}))
    assert row.tokens_ratio == pytest.approx(4)
    assert "4 times the bytes" in row.budget
    fake.rewrite(sized)
    (row,) = comparisons(read_results(fake.folder))
    assert (row.reading, row.metric) == (UNLIKE, "val/nll")


@pytest.mark.parametrize("limit", [None, 2])
def test_vocabularies_of_parents_tell_parts_of_a_split_apart(make_grid: Any, limit) -> None:
    axis = "model.init_from"
    base = {**BASE, "trainer": {"limit_val_batches": limit}}
    fake, _ = unlike_grid(make_grid, {axis: ["small", "large"]}, base=base)

    def sized(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
        record["data"] = {**record["data"], "vocab_size": 100 + 100 * (axes[axis] == "large")}
        record["metrics"]["val/bleu"] = 20.0

    fake.rewrite(sized)
    metric = {"name": "val/bleu", "mode": "max"}
    (row,) = comparisons(read(fake, compare={axis: "small"}, metric=metric))
    assert (row.reading == UNLIKE) == (limit is not None)
    assert ("the size of the vocabulary is" in row.why_unlike) == (limit is not None)


def test_an_early_end_is_no_smaller_budget_and_a_floor_tells_losses_apart(make_grid: Any) -> None:
    fake, _ = unlike_grid(make_grid, {MINE: [1, 2]})
    fake.end(fake.cells[1], None)  # of seed 1 and value 2
    fake.rewrite(lambda axes, of: of.update(tokens=10 if of["diverged"] else 1000))
    (row,) = comparisons(read(fake, compare={MINE: 1}))
    assert (row.tokens_ratio, row.budget) == (1.0, "")
    fake.end(fake.cells[1], nats(fake.cells[1]["axes"]))
    fake.rewrite(lambda axes, of: of.update(unigram_entropy=4.0 + 0.1 * axes[MINE]))
    (row,) = comparisons(read_results(fake.folder))
    assert row.reading == UNLIKE
    assert "4.1 and 4.2" in row.why_unlike.replace("4.2 and 4.1", "4.1 and 4.2")


def test_spreads_of_two_rulers_are_not_pooled(make_grid: Any) -> None:
    def loss(axes: Mapping[str, Any]) -> float:
        wide = 10 if axes[TOKENIZER] == "word" else 1
        drawn = random.Random(str(sorted(axes.items()))).gauss(0.0, 0.01)
        return 1.0 + 0.1 * (axes[PRESET] == "sas") + wide * drawn

    axes = {PRESET: ["pre_ln", "sas"], TOKENIZER: ["word", "char"], **THREE}
    fake = make_grid(loss, axes, base=TEXT, sensitivity={}, curves=False)
    found = {row.where: row for row in comparisons(read(fake, compare={PRESET: "pre_ln"}))}
    row = found[f"{TOKENIZER}=char"]
    plain: Any = stats.ttest_1samp([value for _, value in row.values], 0)
    assert row.p == pytest.approx(float(plain.pvalue), abs=1e-9)
    assert row.comparable


@pytest.mark.parametrize(
    ("ratio", "said"), [(5.8, "5.8 times the tokens"), (0.5, "0.5 times the tokens"), (1.04, "")]
)
def test_what_runs_have_read_stands_beside_a_label(make_grid: Any, ratio: float, said: str) -> None:
    fake, _ = unlike_grid(make_grid, {MINE: [1, 2]})
    fake.rewrite(lambda axes, of: of.update(tokens=round(10000 * ratio ** (axes[MINE] - 1))))
    grid = read(fake, compare={MINE: 1})
    (row,) = comparisons(grid)
    assert row.comparable
    assert row.tokens_ratio == pytest.approx(ratio)
    assert said in row.budget
    assert bool(row.budget) == bool(said)
    cautioned = dict(messages(urgent(grid))).get("limits.unequal_budgets")
    assert (cautioned is not None) == bool(said)
    assert cautioned is None or said in cautioned["values"]
    assert comparison_document(row)["budget"] == row.budget


def following(fake: Any, key: str, values: Mapping[str, Any], **changes: Any) -> GridResults:
    """The grid with an axis whose values follow from the preset."""
    plan = json.loads((fake.folder / "plan.json").read_text())
    for cell in plan["cells"]:
        cell["axes"][key] = values[cell["axes"][PRESET]]
    plan["axes"][key] = list(values.values())
    (fake.folder / "plan.json").write_text(json.dumps(plan))
    file = yaml.safe_load((fake.folder / "grid.yaml").read_text())
    return read(fake, axes=file["axes"] | {key: {PRESET: dict(values)}}, **changes)


def test_an_axis_that_follows_from_the_variant_makes_groups_where_losses_are_unlike(make_grid):
    axes = {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1, 2, 3]}
    fake = make_grid(lambda axes: nats(axes) + 0.1 * (axes[WARMUP] == 0), axes, curves=False)
    grid = following(fake, "data.vocab_size", {"pre_ln": 12, "sas": 8})
    assert len({cell.group for cell in grid.cells}) == 2
    scores = {(s.variant, s.score): s for s in sensitivity_scores(grid)}
    assert scores["sas", "delta"].estimate == pytest.approx(0.1)
    assert math.isnan(scores["sas", "interaction"].estimate)


@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_from_a_compared_axis_stands_beside_the_comparison(make_grid, fails) -> None:
    def loss(axes: Mapping[str, Any]) -> float | None:
        return None if fails and axes[PRESET] == "post_ln" else nats(axes)

    fake = make_grid(loss, {PRESET: ["pre_ln", "post_ln", "sas"], **THREE}, curves=False)
    rates = {"pre_ln": 1e-2, "post_ln": 1e-4, "sas": 1e-2}
    grid = following(fake, "model.optimizer.lr", rates, compare={PRESET: "pre_ln"})
    rows = {row.value: row for row in comparisons(grid)}
    own = "has model.optimizer.lr 0.0001 instead of 0.01"
    follows = {value: comparison_document(row)["follows"] for value, row in rows.items()}
    assert follows == {"post_ln": own, "sas": ""}
    page = write_report(fake.folder, figures=False).read_text(encoding="utf-8")
    both = "model.optimizer.lr 0.01 with pre_ln and 0.0001 with post_ln"
    assert page.count(both) == 2
    assert "every other axis equal" not in page
    assert dict(messages(limits(grid)))["limits.follows"]["text"].startswith(both)


JUDGED = {SEED: [1, 2, 3], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
BLEU = {("post_ln", 0): 3.0, ("post_ln", 60): 30.0, ("pre_ln", 0): 20.0, ("pre_ln", 60): 21.0}


def test_a_grid_that_is_judged_by_its_test_bleu(make_grid) -> None:
    """Its seeds differ by 1, one run has none; the best arm comes first, on page and terminal."""
    fake = make_grid(lambda axes: 2.0 + axes[SEED] / 10, JUDGED)
    change(fake, metric={"name": "test/bleu", "mode": "max"})
    for number, cell in enumerate(fake.cells):
        seed, preset, warmup = cell["axes"].values()
        lacks = (preset, warmup, seed) == ("pre_ln", 60, 3)
        fake.edit(number, {"test/bleu": None if lacks else BLEU[preset, warmup] + seed})
    folder: Path = fake.folder
    grid = read_results(folder)
    assert (grid.metric, grid.mode) == ("test/bleu", "max")
    assert titled(grid) == "test/bleu, higher is better"
    arms = by_metric(grid)
    assert [(arm.variant, arm.warmup, arm.mean) for arm in arms] == [
        ("post_ln", 60, 32.0),
        ("pre_ln", 0, 22.0),
        ("post_ln", 0, 5.0),
        ("pre_ln", 60, 22.5),  # of the two seeds that have a value
    ]
    assert [(arm.runs, arm.lacking) for arm in arms] == [(3, 0), (3, 0), (3, 0), (2, 1)]
    half = 4.302652729911275 / math.sqrt(3)  # of 1, 2, 3
    assert arms[0].high - arms[0].mean == pytest.approx(half, rel=1e-9)
    (document,) = metrics_document(grid)
    assert (document["metric"], document["arms"][0]["mean"]) == ("test/bleu", 32.0)
    assert document["mode"] == "max"
    path = folder / "grid.yaml"  # without a reference there are no verdicts to show instead
    path.write_text(path.read_text().replace("reference_warmup: 60", "reference_warmup: 0"))
    grid = read_results(folder)
    text = shown(grid, sensitivity_scores(grid), width=1000)
    assert told("demo: test/bleu, … [95%]").search(text)
    table = text.split("higher is better")[1]
    assert table.index("post_ln") < table.index("pre_ln")
    assert "32.000 [" in table
    assert ", 1 without" in table
    assert facts(grid)["Metric of the grid"].startswith("test/bleu, higher is better")
    assert metric_tags(grid)[0] == "test/bleu"
    page = write_report(folder, figures=False).read_text(encoding="utf-8")
    assert "test/bleu:" in page
    assert told("1 of 12 … test/bleu").search(page)
    assert "1 of pre_ln at warm-up 60" in page


def test_arms_of_one_ruler_alone_are_ranked_by_their_measured_loss(make_grid: Any) -> None:
    axes = {SEED: [1, 2], TOKENIZER: ["word", "char"], PRESET: ["post_ln", "pre_ln"]}

    def nats_of(axes: Any) -> float:
        nats = 2.0 if axes[TOKENIZER] == "word" else 0.5
        return nats + 0.1 * (axes[PRESET] == "post_ln") + axes[SEED] / 100

    fake = make_grid(nats_of, axes, sensitivity={}, curves=False)
    grid = read_results(fake.folder)
    found = [(arm.ruler, arm.variant) for arm in by_metric(grid)]
    names = [f"{TOKENIZER}={kind}" for kind in ("word", "char")]
    assert found == [(name, preset) for name in names for preset in ("pre_ln", "post_ln")]
    (told,) = metrics_document(grid)
    assert [arm["ruler"] for arm in told["arms"]] == [name for name, _ in found]
    assert TOKENIZER in shown(grid, width=1000)
    kind = "model.optimizer.kind"
    axes, alike = {SEED: [1, 2], kind: ["adam", "sgd"]}, {"sensitivity": {}, "curves": False}
    fake = make_grid(lambda at: 3.0 - (at[kind] == "sgd"), axes, name="alike", **alike)
    arms = by_metric(read_results(fake.folder))
    assert [(arm.ruler, arm.mean) for arm in arms] == [("", 2.0), ("", 3.0)]
    fake = make_grid(lambda axes: 4.49 + axes[SEED], {SEED: [1, 2]}, name="measured")
    (arm,) = by_metric(read_results(fake.folder))
    assert arm.mean == pytest.approx(fmean([5.49, 6.49]))


WORDS = ["a", "dog", "sees", "the", "old", "house", "and", "three", "cats", "near", "the", "river"]
REFERENCES = [" ".join(WORDS[i % 7 : i % 7 + 4 + i % 3]) for i in range(60)]


def translated(seed: int, warmup: int) -> list[str]:
    """Without warm-up, every second sentence lacks words; each seed spoils another one."""
    lines = list(REFERENCES)
    lines[seed] = "no"
    if warmup == 0:
        lines = [line if i % 2 else line.rsplit(" ", 2)[0] for i, line in enumerate(lines)]
    return lines


def store(grid: Any, cell: Any, **changes: Any) -> float:
    """Leave what a run that translated its test set leaves; return its BLEU."""
    path: Path = grid.run(cell)
    lines = translated(cell["axes"][SEED], cell["axes"][WARMUP])
    score = sacrebleu.BLEU(tokenize="none", lowercase=True).corpus_score(lines, [REFERENCES]).score
    for name, text in (("hypotheses", lines), ("references", REFERENCES)):
        (path / f"{name}.txt").write_text("".join(f"{line}\n" for line in text))
    changes = {"bleu_signature": "nrefs:1|case:lc|eff:no|tok:none|smooth:exp"} | changes
    grid.edit(grid.cells.index(cell), {"test/bleu": score}, **changes)
    return score


def test_bleu_is_compared_over_seeds_and_over_sentences(make_grid, outcome):
    grid = make_grid(outcome, JUDGED, curves=False)
    assert bleu_scores(read_results(grid.folder)) == []
    assert "ΔBLEU" not in write_report(grid.folder, figures=False).read_text()
    bleu = {cell["id"]: store(grid, cell) for cell in grid.cells}
    assert "ΔBLEU" in write_report(grid.folder, figures=False).read_text()
    found = {score.variant: score for score in bleu_scores(read_results(grid.folder))}
    assert set(found) == {"post_ln", "pre_ln"}
    by_point = {tuple(cell["axes"].values()): bleu[cell["id"]] for cell in grid.cells}
    changes = [by_point[seed, "pre_ln", 60] - by_point[seed, "pre_ln", 0] for seed in (1, 2, 3)]
    assert found["pre_ln"].estimate == pytest.approx(sum(changes) / 3)
    assert found["pre_ln"].low < found["pre_ln"].estimate < found["pre_ln"].high
    assert [value for _, value in found["pre_ln"].each] == pytest.approx(changes)
    # Student's p of two seeds tells nothing.
    whole = read_results(grid.folder)
    two = replace(whole, cells=tuple(cell for cell in whole.cells if cell.seed != 3))
    assert all(math.isnan(score.p) for score in bleu_scores(two))
    change(grid, until={"half_width": 0.1, "most_seeds": 9})  # an error of 3 %
    (wider,) = (s for s in bleu_scores(read_results(grid.folder)) if s.variant == "pre_ln")
    ends = stats.t.interval(0.97, 2, np.mean(changes), stats.sem(changes))
    assert (wider.low, wider.high) == pytest.approx(ends)
    assert wider.p == pytest.approx(min(1.0, found["pre_ln"].p * 5 / 3))
    # Half of the sentences lost their end: no shuffling of the two systems does that by chance.
    assert found["pre_ln"].note == "p over sentences, by seed 1: 0.001, 2: 0.001, 3: 0.001"
    assert "so no interval" in found["post_ln"].note or found["post_ln"].low < changes[0]


@pytest.mark.parametrize(
    ("tokenizer", "references", "tested"),
    [
        *(("zh", REFERENCES, True), ("char", REFERENCES, True)),
        ("ja-mecab-0.996-IPA", REFERENCES, False),  # is not installed
        *(("none", ["another"] * len(REFERENCES), False), (None, REFERENCES, False)),
    ],
)
def test_sentences_are_compared_where_they_can(make_grid, outcome, tokenizer, references, tested):
    grid = make_grid(outcome, JUDGED, curves=False)
    for cell in grid.cells:
        store(grid, cell, bleu_signature=f"nrefs:1|case:lc|eff:no|tok:{tokenizer}|smooth:exp")
        if cell["axes"][WARMUP] == 0:
            (grid.run(cell) / "references.txt").write_text("\n".join([*references, ""]))
            if tokenizer is None:
                grid.edit(grid.cells.index(cell), bleu_signature=None)
    for score in bleu_scores(read_results(grid.folder)):
        assert score.seeds == 3
        assert ("over sentences" in score.note) == tested


def test_no_more_pairs_are_tested_than_a_report_has_time_for(make_grid, outcome):
    axes = {**JUDGED, SEED: list(range(1, MOST_TESTS // 2 + 3))}
    grid = make_grid(outcome, axes, curves=False)
    for cell in grid.cells:
        store(grid, cell)
    notes = [score.note for score in bleu_scores(read_results(grid.folder))]
    assert sum(note.count("0.001") for note in notes) == MOST_TESTS
