"""Values of an axis compared on the grid's own metric, also without a question about warm-up."""

import json
import math
import random
from collections.abc import Callable, Mapping
from html import escape
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from lightning_app.api.runs import RunResult
from lightning_app.config.rules import COMPARE, GridSubject, check_rules
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import score_of
from lightning_app.report.comparisons import (
    BETTER,
    by_metric,
    compare_axis,
    comparison_document,
    comparisons,
)
from lightning_app.report.facts import rate
from lightning_app.report.frames import results_frame
from lightning_app.report.headline import answer
from lightning_app.report.limits import limits, urgent
from lightning_app.report.pairs import first_step
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.tensorboard import IndexedGrid, final_metrics
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import (
    BASE,
    PRESET,
    SEED,
    WARMUP,
    change,
    keep,
    messages,
    one_sentence,
    write_report,
)

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


def test_a_grid_that_does_not_ask_about_warmup_compares_its_variants(make_grid: Any) -> None:
    """With the baseline of the grid; the page asks nothing about warm-up."""
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


def test_tokens_of_two_tokenizers_are_not_counted_as_one(make_grid: Any) -> None:
    """Of a task without bits per byte nothing says how much text they spell."""
    axes = {"data.tokenizer": ["word", "char"], SEED: [1, 2]}
    fake = make_grid(loss, axes | {PRESET: ["sas"], WIDTH: [64]}, curves=False)
    grid = read(fake, compare={"data.tokenizer": "word"})
    (row,) = comparisons(grid)
    assert "of another tokenizer" in row.budget


def test_rates_that_differ_have_different_names() -> None:
    assert [rate(value) for value in (4e-3, 0.00400000001)] == ["0.004", "0.00400000001"]


def test_a_grid_about_warmup_compares_only_what_it_names(make_grid: Any) -> None:
    fake = make_grid(
        lambda axes: 2.0 + axes[SEED] / 9, {PRESET: ["sas"], WARMUP: [0, 60], SEED: [1, 2]}
    )
    assert comparisons(read_results(fake.folder)) == []
    write_report(fake.folder, figures=False)
    assert not (fake.folder / "comparisons.csv").exists()
    (row,) = comparisons(read(fake, compare={WARMUP: 0}))
    assert (row.axis, row.value, row.baseline, row.estimate) == (WARMUP, "60", "0", 0.0)


@pytest.mark.parametrize("lost", [0, 2])
def test_an_arm_whose_runs_became_non_finite_is_not_judged_by_the_others(
    make_grid: Any, lost: int
) -> None:
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
def test_a_run_that_became_non_finite_has_no_value_of_a_validation_before(
    make_grid: Any, metric: str
) -> None:
    """Whoever reads the metric; its speed is known, and its loss is that of a failure."""

    def outcome(axes: Mapping[str, Any]) -> float | None:
        return None if axes[PRESET] == "post_ln" else 2.0 + 0.01 * axes[SEED]

    axes = {PRESET: ["pre_ln", "post_ln"], SEED: [*range(1, 7)]}
    grid = {"name": metric, "mode": "min" if metric == "val/nll" else "max"}
    fake = make_grid(outcome, axes, curves=False)
    rewritten(fake, lambda at, of: of["metrics"].update({"val/nll": 1.0, "val/accuracy": 0.9}))
    rewritten(fake, lambda at, of: at[PRESET] == "pre_ln" and of["metrics"].update({metric: 0.8}))
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
    """Whatever fields it chose, which are no groups and no axis of a comparison."""

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


def test_a_number_that_means_the_same_is_the_value() -> None:
    check_rules([COMPARE], GridSubject({"compare": {WIDTH: 64.0}}, AXES, {}, {}, "val/nll"))


TOKENIZER, WINDOW, BATCH = "data.tokenizer", "data.window", "data.tokens_per_batch"
TEXT: dict[str, Any] = json.loads(json.dumps(BASE))
TEXT["model"]["objective"] |= {"kind": "causal_lm"}
TEXT["data"] |= {"name": "text", "tokenizer": "word", "window": 16}
THREE = {SEED: [1, 2, 3, 4]}
UNLIKE = "not comparable"


def rewritten(fake: Any, change: Callable[[Mapping[str, Any], dict[str, Any]], Any]) -> None:
    """Change the result of each run, given its axes."""
    for cell in fake.cells:
        path = fake.run(cell) / "result.json"
        record = json.loads(path.read_text())
        change(cell["axes"], record)
        path.write_text(json.dumps(record))


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
    rewritten(fake, bits)
    grid = read(fake, compare={TOKENIZER: "word"})
    (row,) = comparisons(grid)
    assert (row.metric, row.reading, row.comparable) == ("val/bits_per_byte", "worse", True)
    assert row.estimate == pytest.approx(0.2, abs=0.01)
    assert TOKENIZER in row.note
    said = one_sentence(answer(grid, []))
    assert all(name in said for name in ("val/bits_per_byte", "char", "worse"))
    table = compare_axis(grid, TOKENIZER, "word", metric="val/nll")
    assert table["metric"].tolist() == ["val/bits_per_byte"]
    # An unknown token costs less than what it spells, so a text with some has no bits per byte.
    first = fake.run(fake.cells[0]) / "result.json"
    record = json.loads(first.read_text())
    del record["metrics"]["val/bits_per_byte"]
    first.write_text(json.dumps(record))
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
    ],
)
def test_losses_that_count_other_things_have_no_label(
    make_grid: Any, axis: str, values: list[Any]
) -> None:
    _, grid = unlike_grid(make_grid, {axis: values}, compare={axis: values[0]})
    (row,) = comparisons(grid)
    assert (row.reading, row.seeds, row.comparable) == (UNLIKE, 0, False)
    assert axis in row.why_unlike
    assert answer(grid, []) == ""
    assert comparison_document(row)["reading"] == UNLIKE
    assert any(axis in text for text in urgent(grid))
    assert np.isnan(compare_axis(grid, axis, values[0])["estimate"].to_numpy()).all()


def test_an_axis_of_the_evaluation_is_no_treatment(make_grid: Any) -> None:
    """Also where the metric counts the same: what was trained is the same."""
    axis = "model.objective.beam"
    _, grid = unlike_grid(make_grid, {axis: [1, 4]}, base=BASE, compare={axis: 1})
    (row,) = comparisons(grid)
    assert (row.reading, row.metric, row.seeds) == (UNLIKE, "val/nll", 0)
    assert "evaluation" in row.note


def test_a_text_of_another_size_is_seen_in_the_results(make_grid: Any) -> None:
    """The tokens of char are all of the text; those of word leave out every second space. The
    bits of the test text, of which the results have no size, do not stand in either."""

    def sized(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
        bits(axes, record)
        record["metrics"]["test/bits_per_byte"] = record["metrics"]["val/bits_per_byte"]
        size = 1000 + 100 * (axes[TOKENIZER] == "char")
        nll = record["metrics"]["val/bits_per_byte"] * math.log(2) * size
        record["validation_parts"] = {"nll": [nll / 4, 3 * nll / 4], "tokens": [30, 90]}

    fake, _ = unlike_grid(make_grid, {TOKENIZER: ["word", "char"]})
    rewritten(fake, sized)
    (row,) = comparisons(read_results(fake.folder))
    assert (row.reading, row.metric) == (UNLIKE, "val/nll")


@pytest.mark.parametrize("limit", [None, 2])
def test_vocabularies_of_parents_tell_parts_of_a_split_apart(
    make_grid: Any, limit: int | None
) -> None:
    """Batches are cut by tokens, so that a limit leaves other rows of another tokenizer."""
    axis = "model.init_from"
    base = {**BASE, "trainer": {"limit_val_batches": limit}}
    fake, _ = unlike_grid(make_grid, {axis: ["small", "large"]}, base=base)

    def sized(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
        record["data"] = {**record["data"], "vocab_size": 100 + 100 * (axes[axis] == "large")}
        record["metrics"]["val/bleu"] = 20.0

    rewritten(fake, sized)
    (row,) = comparisons(
        read(fake, compare={axis: "small"}, metric={"name": "val/bleu", "mode": "max"})
    )
    assert (row.reading == UNLIKE) == (limit is not None)
    assert ("the size of the vocabulary is" in row.why_unlike) == (limit is not None)


def test_a_floor_tells_losses_apart_that_the_config_does_not(make_grid: Any) -> None:
    """As where a class of a plug-in makes the tokens."""
    axis = "model.init_args.mine"
    fake, _ = unlike_grid(make_grid, {axis: [1, 2]})
    rewritten(fake, lambda axes, of: of.update(unigram_entropy=4.0 + 0.1 * axes[axis]))
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
    """From the results, not from the name of the axis."""
    axis = "model.init_args.mine"
    fake, _ = unlike_grid(make_grid, {axis: [1, 2]})
    rewritten(fake, lambda axes, of: of.update(tokens=round(10000 * ratio ** (axes[axis] - 1))))
    grid = read(fake, compare={axis: 1})
    (row,) = comparisons(grid)
    assert row.comparable
    assert row.tokens_ratio == pytest.approx(ratio)
    assert said in row.budget
    assert bool(row.budget) == bool(said)
    cautioned = dict(messages(urgent(grid))).get("limits.unequal_budgets")
    assert (cautioned is not None) == bool(said)
    assert cautioned is None or said in cautioned["values"]
    assert comparison_document(row)["budget"] == row.budget


def test_runs_that_ended_early_are_no_smaller_budget(make_grid: Any) -> None:
    axis = "model.init_args.mine"
    fake = make_grid(
        lambda axes: None if axes[axis] == 2 and axes[SEED] == 1 else nats(axes),
        {axis: [1, 2], **THREE},
        base=TEXT,
        sensitivity={},
        curves=False,
    )
    rewritten(fake, lambda axes, of: of.update(tokens=10 if of["diverged"] else 1000))
    (row,) = comparisons(read(fake, compare={axis: 1}))
    assert (row.tokens_ratio, row.budget) == (1.0, "")


def test_bytes_are_counted_where_tokens_are_unlike(make_grid: Any) -> None:
    """Words spell four times as much: as many tokens are four times the text."""

    def spelled(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
        nll = record["metrics"]["val/nll"]
        size = 4 if axes[TOKENIZER] == "word" else 1
        record["metrics"]["val/bits_per_byte"] = nll / math.log(2) / size

    fake, _ = unlike_grid(make_grid, {TOKENIZER: ["char", "word"]})
    rewritten(fake, spelled)
    (row,) = comparisons(read(fake, compare={TOKENIZER: "char"}))
    assert row.tokens_ratio == pytest.approx(4)
    assert "4 times the bytes" in row.budget


def following(fake: Any, key: str, values: Mapping[str, Any], **changes: Any) -> GridResults:
    """The grid with an axis whose values follow from the preset."""
    plan = json.loads((fake.folder / "plan.json").read_text())
    for cell in plan["cells"]:
        cell["axes"][key] = values[cell["axes"][PRESET]]
    plan["axes"][key] = list(values.values())
    (fake.folder / "plan.json").write_text(json.dumps(plan))
    file = yaml.safe_load((fake.folder / "grid.yaml").read_text())
    return read(fake, axes=file["axes"] | {key: {PRESET: dict(values)}}, **changes)


def test_an_axis_that_follows_from_the_variant_makes_groups_where_losses_are_unlike(
    make_grid: Any,
) -> None:
    """No interaction is computed between nats of two vocabularies."""
    axes = {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1, 2, 3]}
    fake = make_grid(lambda axes: nats(axes) + 0.1 * (axes[WARMUP] == 0), axes, curves=False)
    grid = following(fake, "data.vocab_size", {"pre_ln": 12, "sas": 8})
    assert len({cell.group for cell in grid.cells}) == 2
    scores = {(s.variant, s.score): s for s in sensitivity_scores(grid)}
    assert scores["sas", "delta"].estimate == pytest.approx(0.1)
    assert math.isnan(scores["sas", "interaction"].estimate)


@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_from_a_compared_axis_stands_beside_the_comparison(
    make_grid: Any, fails: bool
) -> None:
    """In caption, limits, CSV and JSON; also where it made every run of an arm fail."""
    axes = {PRESET: ["pre_ln", "post_ln", "sas"], **THREE}
    fake = make_grid(
        lambda of: None if fails and of[PRESET] == "post_ln" else nats({WIDTH: 64, **of}),
        axes,
        curves=False,
    )
    rates = {"pre_ln": 1e-2, "post_ln": 1e-4, "sas": 1e-2}
    grid = following(fake, "model.optimizer.lr", rates, compare={PRESET: "pre_ln"})
    rows = {row.value: row for row in comparisons(grid)}
    own = "has model.optimizer.lr 0.0001 instead of 0.01"
    assert {value: comparison_document(row)["follows"] for value, row in rows.items()} == {
        "post_ln": own,
        "sas": "",
    }
    page = write_report(fake.folder, figures=False).read_text(encoding="utf-8")
    both = "model.optimizer.lr 0.01 with pre_ln and 0.0001 with post_ln"
    assert page.count(both) == 2
    assert "every other axis equal" not in page
    assert dict(messages(limits(grid)))["limits.follows"]["text"].startswith(both)
