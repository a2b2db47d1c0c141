"""Values of an axis compared on the grid's own metric, also without a question about warm-up."""

import json
import math
import random
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from lightning_app.config.rules import COMPARE, GridSubject, check_rules
from lightning_app.core.errors import UserError
from lightning_app.report.comparisons import (
    BETTER,
    EQUAL,
    WAITS,
    WORSE,
    MetricDifference,
    by_metric,
    compare_axis,
    comparison_document,
    comparisons,
)
from lightning_app.report.facts import p_value, rate
from lightning_app.report.headline import findings
from lightning_app.report.limits import limits, urgent
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import BASE, messages, write_report

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"
WIDTH = "model.architecture.model_dim"
AXES = {PRESET: ["sas", "pre_ln", "post_ln"], WIDTH: [64, 128], SEED: [1, 2, 3, 4]}


def loss(axes: Mapping[str, Any]) -> float:
    """sas is 0.5 worse than pre_ln, post_ln no different; width helps all alike."""
    noise = random.Random(str(sorted(axes.items()))).gauss(0.0, 0.02)
    return 2.5 + 0.5 * (axes[PRESET] == "sas") - axes[WIDTH] / 640 + noise


def read(fake: Any, **changes: Any) -> GridResults:
    """The grid, after changes of its grid file."""
    path = fake.folder / "grid.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return read_results(fake.folder)


def by_place(rows: list[MetricDifference]) -> dict[tuple[str, str, str], MetricDifference]:
    return {(row.axis, row.value, row.where): row for row in rows}


def test_differences_are_those_of_a_plain_computation(make_grid: Any) -> None:
    grid = read(make_grid(loss, AXES, curves=False), compare={PRESET: "pre_ln", WIDTH: 64})
    found = by_place(comparisons(grid))
    assert len(found) == 2 * 2 + 3
    table = {(c.variant, c.axes[WIDTH], c.seed): c.metrics["val/nll"] or 0.0 for c in grid.cells}
    truth = {}
    for width in (64, 128):
        for preset in ("sas", "post_ln"):
            truth[PRESET, preset, f"{WIDTH}={width}"] = [
                table[preset, width, seed] - table["pre_ln", width, seed] for seed in (1, 2, 3, 4)
            ]
    for preset in AXES[PRESET]:
        truth[WIDTH, "128", f"{PRESET}={preset}"] = [
            table[preset, 128, seed] - table[preset, 64, seed] for seed in (1, 2, 3, 4)
        ]
    assert found.keys() == truth.keys()
    ps = {}
    for axis in (PRESET, WIDTH):
        rows = [values for place, values in truth.items() if place[0] == axis]
        freedom = 3 * len(rows)
        spread = math.sqrt(sum(3 * np.var(values, ddof=1) for values in rows) / freedom)
        # Of four seeds, that of the runs themselves counts too: two have sqrt(2) times as much.
        arms = [
            [table[v, w, seed] for seed in (1, 2, 3, 4)] for v in AXES[PRESET] for w in (64, 128)
        ]
        spread = max(spread, math.sqrt(2 * np.mean([np.var(arm, ddof=1) for arm in arms])))
        for place, values in truth.items():
            if place[0] == axis:
                pooled = 2 * stats.t.sf(abs(np.mean(values)) / (spread / 2), freedom)
                own: Any = stats.ttest_1samp(values, 0)
                ps[place] = max(float(own.pvalue), float(pooled))
    order = sorted(ps, key=lambda place: ps[place])
    largest = 0.0
    for number, place in enumerate(order):
        row, values = found[place], truth[place]
        low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
        # Of the 12 comparisons that a family should have 5 are missing, and count twice.
        largest = max(largest, min(1.0, (7 + 2 * 5 - number) * ps[place]))
        assert row.estimate == pytest.approx(np.mean(values), abs=1e-12)
        assert (row.low, row.high) == pytest.approx((low, high), abs=1e-9)
        assert row.p == pytest.approx(ps[place], abs=1e-9)
        assert row.p_holm == pytest.approx(largest, abs=1e-9)
        assert row.seeds == 4
    assert found[PRESET, "sas", f"{WIDTH}=64"].reading == "worse"
    assert found[PRESET, "post_ln", f"{WIDTH}=64"].reading == "no difference shown"
    assert found[WIDTH, "128", f"{PRESET}=sas"].reading == "better"


def test_a_metric_that_is_to_be_large_reads_the_other_way(make_grid: Any) -> None:
    fake = make_grid(loss, AXES, curves=False)
    grid = read(fake, compare={WIDTH: 64}, metric={"name": "val/nll", "mode": "max"})
    assert {row.reading for row in comparisons(grid)} == {"worse", "no difference shown"}


def test_a_grid_that_does_not_ask_about_warmup_compares_its_variants(make_grid: Any) -> None:
    """With the baseline of the grid; the page asks nothing about warm-up."""
    fake = make_grid(loss, AXES, curves=False)
    grid = read_results(fake.folder)
    assert {(row.axis, row.baseline) for row in comparisons(grid)} == {(PRESET, "pre_ln")}
    said = findings(grid, sensitivity_scores(grid))
    for row in comparisons(grid):
        (sentence,) = [text for text in said if f", {row.where}: " in text]
        assert f"preset {row.value} (p {p_value(row.p_holm)})" in sentence
        assert (f"{row.value} (p {p_value(row.p_holm)}) is worse" in sentence) == (
            row.reading == WORSE
        )
    page = write_report(fake.folder, figures=False).read_text(encoding="utf-8")
    assert "Who needs warm-up?" not in page
    assert "Which is better?" in page
    assert "cannot show who needs warm-up" not in page
    assert f"<h1>{escape(said[0])}</h1>" in page
    table = (fake.folder / "comparisons.csv").read_text()
    assert table.count("\n") == 5
    readings = [comparison_document(row)["reading"] for row in comparisons(grid)]
    assert readings.count("worse") == 2


def test_a_value_whose_runs_end_with_the_numbers_of_the_baseline_changes_nothing(
    make_grid: Any,
) -> None:
    length, seeds = "data.max_length", [1, 2, 3]
    axes = {length: [100, 200, 8], SEED: seeds}
    fake = make_grid(lambda of: 2.0 + of[SEED] / 9 + (of[length] == 8) / of[SEED], axes)
    grid = read(fake, compare={length: 100})
    readings = {row.value: row.reading for row in comparisons(grid)}
    assert readings["200"] == EQUAL
    assert readings["8"] != EQUAL
    (said,) = findings(grid, sensitivity_scores(grid))
    assert "max_length 200 changes nothing" in said


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


def test_pairs_that_lack_a_run_or_a_value_are_left_out(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | str | None:
        odd = {("sas", 64, 1): "failed", ("sas", 64, 2): None, ("pre_ln", 128, 3): "waiting"}
        return odd.get((axes[PRESET], axes[WIDTH], axes[SEED]), loss(axes))

    found = by_place(comparisons(read_results(make_grid(outcome, AXES, curves=False).folder)))
    row = found[PRESET, "sas", f"{WIDTH}=64"]
    assert (row.seeds, row.note) == (
        2,
        "1 of 3 pairs lack a finite val/nll; 1 of 4 seeds not finished; "
        "some seeds of an arm failed and others did not",
    )
    assert math.isnan(row.p)
    assert [seed for seed, _ in row.values] == [3, 4]
    assert found[PRESET, "sas", f"{WIDTH}=128"].seeds == 3


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


def test_half_escaped_runs_of_few_seeds_have_no_interval_and_no_p_value(make_grid: Any) -> None:
    """A run that is late on the plateau (0.3 of the 2 nats that the others learned) is one mode."""

    def outcome(axes: Mapping[str, Any]) -> float:
        late = (axes[PRESET], axes[WIDTH], axes[SEED]) == ("sas", 64, 1)
        return 4.2 if late else loss(axes)

    for seeds, withheld in ((4, True), (5, False)):
        axes = {**AXES, SEED: list(range(1, seeds + 1))}
        folder = make_grid(outcome, axes, curves=False, name=f"of{seeds}").folder
        found = by_place(comparisons(read_results(folder)))
        row = found[PRESET, "sas", f"{WIDTH}=64"]
        assert [math.isnan(row.low), math.isnan(row.p), row.withheld] == [withheld] * 3
        assert (
            row.note
            == "runs half escaped, and 4 seeds are too few to tell it from chance" * withheld
        )
        assert not math.isnan(found[PRESET, "sas", f"{WIDTH}=128"].p)


def test_few_runs_that_agree_by_chance_at_the_baseline_make_no_label(make_grid: Any) -> None:
    """The differences share the baseline, so that only the runs show how far they differ.

    Of four values with 3 seeds one agrees with itself at 3.0, the others are 0.5 apart or so.
    """
    table = {"pre_ln": [2.0, 2.001, 2.002], "sas": [3.0, 3.002, 3.001]}
    table |= {"post_ln": [2.0, 2.4, 2.2], "keel": [2.3, 2.1, 2.5], "rezero": [2.6, 2.2, 2.4]}

    def outcome(axes: Mapping[str, Any]) -> float:
        return table[axes[PRESET]][axes[SEED] - 1]

    axes = {PRESET: list(table), SEED: [1, 2, 3]}
    grid = read(make_grid(outcome, axes, curves=False), compare={PRESET: "pre_ln"})
    row = by_place(comparisons(grid))[PRESET, "sas", "all"]
    assert row.estimate == pytest.approx(1.0)
    # The variances of three runs are 1e-6, 1e-6, and three times 0.04: a mean of 0.024.
    pooled = math.sqrt(2 * (3 * 0.04 + 2e-6) / 5)
    own: Any = stats.ttest_1samp([1.0, 1.001, 0.999], 0)
    expected = max(own.pvalue, 2 * stats.t.sf(1.0 / (pooled / math.sqrt(3)), 8))
    assert row.p == pytest.approx(expected)


def test_a_comparison_waits_for_its_planned_seeds(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | str:
        late = (axes[PRESET], axes[WIDTH], axes[SEED]) == ("sas", 64, 6)
        return "waiting" if late else loss(axes)

    axes = {**AXES, SEED: [1, 2, 3, 4, 5, 6]}
    grid = read(make_grid(outcome, axes, curves=False), compare={PRESET: "pre_ln"})
    found = by_place(comparisons(grid))
    row, other = (found[PRESET, "sas", f"{WIDTH}={width}"] for width in (64, 128))
    assert (row.reading, row.seeds, row.note) == (WAITS, 5, "1 of 6 seeds not finished")
    assert math.isnan(row.p)
    assert not math.isnan(row.low)
    assert (other.reading, other.seeds) == (WORSE, 6)
    (at_64,) = (text for text in findings(grid, []) if f"{WIDTH}=64" in text)
    assert "sas against pre_ln is open" in at_64


def test_seeds_that_ended_differently_have_no_interval(make_grid: Any) -> None:
    """A run that stalled at the entropy is no draw from the noise of those that learned."""

    def outcome(axes: Mapping[str, Any]) -> float:
        return 4.49 if (axes[PRESET], axes[SEED]) == ("sas", 1) else loss(axes)

    rows = comparisons(read_results(make_grid(outcome, AXES, curves=False).folder))
    mixed = [row for row in rows if row.value == "sas"]
    assert {math.isnan(row.p) and math.isnan(row.low) for row in mixed} == {True}
    assert {(row.reading, row.note) for row in mixed} == {
        ("", "some seeds of an arm failed and others did not")
    }


def test_an_empty_comparison_says_why(make_grid: Any) -> None:
    fake = make_grid(lambda axes: "waiting" if axes[PRESET] == "pre_ln" else loss(axes), AXES)
    rows = comparisons(read_results(fake.folder))
    assert {row.note for row in rows} == {"4 of 4 seeds not finished"}
    assert {row.seeds for row in rows} == {0}
    json.dumps([row.note for row in rows])


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ({"model.block.presets": "sas"}, "compare:.*'model.block.presets'"),
        (
            {PRESET: "keel"},
            r"compare: model.block.preset:.*\(sas, pre_ln",
        ),
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
    (said,) = findings(grid, [])
    assert "by val/bits_per_byte" in said
    assert "char" in said
    assert "better" not in said
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
    ],
)
def test_losses_that_count_other_things_have_no_label(
    make_grid: Any, axis: str, values: list[Any]
) -> None:
    _, grid = unlike_grid(make_grid, {axis: values}, compare={axis: values[0]})
    (row,) = comparisons(grid)
    assert (row.reading, row.seeds, row.comparable) == (UNLIKE, 0, False)
    assert axis in row.why_unlike
    (said,) = findings(grid, [])
    assert UNLIKE in said
    assert not {"better", "worse"} & set(said.split())
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
    assert said in findings(grid, [])[0]
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


@pytest.mark.parametrize(
    ("axis", "values", "speeds", "said"),
    [
        (WIDTH, [64, 128], [[100, 110], [40, 50]], True),
        (WIDTH, [64, 128], [[100, 60], [50, 70]], False),  # the arms overlap
        (WIDTH, [64, 128], [[100, 101], [88, 90]], False),  # as noise of a machine
        ("model.optimizer.lr", [0.1, 0.2], [[100, 110], [40, 50]], False),  # no time of a step
        (
            "model.optimizer.momentum_warmup_steps",
            [0, 9],
            [[100, 110], [40, 50]],
            True,
        ),  # not fused
    ],
)
def test_a_longer_training_is_said_where_no_noise_explains_it(
    make_grid: Any, axis: str, values: list[Any], speeds: Any, said: bool
) -> None:
    def timed(axes: Mapping[str, Any], record: dict[str, Any]) -> None:
        speed = speeds[values.index(axes[axis])][axes[SEED] % 2]
        record["metrics"]["train/tokens_per_second"] = speed
        record["provenance"] = {"cpu": "one", "matmul": "two"}

    fake, _ = unlike_grid(make_grid, {axis: values}, base=BASE)
    rewritten(fake, timed)
    (row,) = comparisons(read(fake, compare={axis: values[0]}))
    assert bool(row.budget) == said
    assert math.isnan(row.seconds_ratio) or row.seconds_ratio > 1


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


def test_an_axis_that_follows_from_the_variant_makes_groups_where_losses_are_unlike(
    make_grid: Any,
) -> None:
    """No interaction is computed between nats of two vocabularies."""
    vocabulary = "data.vocab_size"
    sizes = {"pre_ln": 12, "sas": 8}
    axes = {PRESET: list(sizes), WARMUP: [0, 60], SEED: [1, 2, 3]}
    fake = make_grid(lambda axes: nats(axes) + 0.1 * (axes[WARMUP] == 0), axes, curves=False)
    plan = json.loads((fake.folder / "plan.json").read_text())
    for cell in plan["cells"]:
        cell["axes"][vocabulary] = sizes[cell["axes"][PRESET]]
    plan["axes"][vocabulary] = list(sizes.values())
    (fake.folder / "plan.json").write_text(json.dumps(plan))
    file = yaml.safe_load((fake.folder / "grid.yaml").read_text())
    file["axes"][vocabulary] = {PRESET: sizes}
    grid = read(fake, axes=file["axes"])
    assert len({cell.group for cell in grid.cells}) == 2
    scores = {(s.variant, s.score): s for s in sensitivity_scores(grid)}
    assert scores["sas", "delta"].estimate == pytest.approx(0.1)
    assert math.isnan(scores["sas", "interaction"].estimate)
