"""Curves of the loss: against steps and seconds."""

import csv
import re

import pytest

from lightning_app.report.figures import training
from lightning_app.report.figures.write import ALL_POINTS, FEWEST_POINTS, POINTS

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"


def column(path, name):
    """Step and value of one column of a `metrics.csv`."""
    with path.open(newline="") as file:
        rows = [(int(row["step"]), row[name]) for row in csv.DictReader(file)]
    return {step: float(value) for step, value in rows if value}


@pytest.mark.parametrize(("fewest", "tag"), [(5, "train/nll"), (4, "val/nll")])
def test_curves_are_those_of_the_runs(make_grid, draw, outcome, monkeypatch, fewest, tag):
    """Of the validations, of which each run has four, or of the batches if those are too few."""
    monkeypatch.setattr(training, "FEWEST", fewest)
    fake = make_grid(outcome)
    table = draw(fake.folder).table("training")
    found = {
        run: dict(zip(rows["step"], rows[tag], strict=True))
        for run, rows in table[table["mark"] == "run"].groupby("run")
    }
    truth = {cell["name"]: column(fake.run(cell) / "metrics.csv", tag) for cell in fake.cells}
    assert found == truth
    means = table[table["mark"] == "mean"].set_index(["variant", "warmup", "step"])[tag]
    names = [c["name"] for c in fake.cells if (c["axes"][PRESET], c["axes"][WARMUP]) == ("sas", 0)]
    assert len(names) == 5
    assert means["sas", 0, 100] == pytest.approx(sum(truth[run][100] for run in names) / 5)


def test_the_mean_ends_where_a_run_ends(make_grid, draw, table):
    """What one seed has not logged is no mean over seeds."""
    fake = make_grid(lambda a: 2.0, {SEED: [1, 2]}, curves=False)
    for cell, last in zip(fake.cells, (50, 100), strict=True):
        rows = [{"step": s, "train/nll": 5 - s / 100} for s in range(10, last + 1, 10)]
        table(fake.run(cell) / "metrics.csv", [*rows, {"step": last + 1, "train/nll": "nan"}])
    drawn = draw(fake.folder).table("training")
    assert drawn[drawn["mark"] == "mean"]["step"].max() == 50
    assert drawn["step"].max() == 100


def costs(fake, table):
    """Runs that have logged seconds at other steps than those of the validations."""
    for cell in fake.cells:
        seed = cell["axes"][SEED]
        rows = [
            {"step": s, "train/nll": 5, "train/seconds": seed * s / 10} for s in range(20, 201, 20)
        ]
        rows += [{"step": s, "val/nll": 4 + seed - s / 100} for s in (10, 50, 110, 190, 201)]
        table(fake.run(cell) / "metrics.csv", rows)


def test_costs_of_a_validation_lie_between_logged_steps(make_grid, draw, table):
    """Seconds grow evenly here, so that their places are known."""
    fake = make_grid(lambda a: 2.0, {SEED: [1, 2], WARMUP: [0, 60]}, curves=False)
    costs(fake, table)
    drawn = draw(fake.folder)
    rows = drawn.table("loss_by_seconds")
    for _, row in rows[rows["mark"] == "run"].iterrows():
        assert row["train/seconds"] == pytest.approx(row["seed"] / 10 * row["step"])
        assert row["val/nll"] == pytest.approx(4 + row["seed"] - row["step"] / 100)
    assert set(rows["step"]) == {50, 110, 190}  # before 20 and after 200 nothing is known
    means = rows[(rows["mark"] == "mean") & (rows["step"] == 110)]
    assert list(means["val/nll"]) == pytest.approx([4 + 1.5 - 1.1] * 2)
    assert list(means["train/seconds"]) == pytest.approx([16.5] * 2)
    assert drawn.by_name["loss_by_seconds"].question == "cost"


def test_older_runs_without_costs_have_no_such_figure(make_grid, draw, outcome):
    assert "loss_by_seconds" not in draw(make_grid(outcome).folder).names


def test_the_baseline_is_beside_the_others(make_grid, draw, table):
    """The baseline's mean in grey in every panel but its own, and in the text."""
    axes = {SEED: [1, 2], PRESET: ["pre_ln", "sas", "post_ln"], WARMUP: [0, 60]}
    fake = make_grid(lambda a: 2.0, axes, curves=False)
    costs(fake, table)
    drawn = draw(fake.folder)
    text = drawn.svg("loss_by_seconds")
    grey = re.findall(r'<path d="M [^"]+"[^>]*(?:stroke: #707070; stroke-width: 1.1)[^>]*>', text)
    in_legend, entropies = 1, 3
    assert len(grey) == 2 * 2 + in_legend + entropies
    assert "the baseline, pre_ln" in drawn.by_name["loss_by_seconds"].text
    alone = make_grid(lambda a: 2.0, {SEED: [1], PRESET: ["sas"]}, curves=False, name="alone")
    costs(alone, table)
    assert "baseline" not in draw(alone.folder).by_name["loss_by_seconds"].text


@pytest.mark.parametrize(
    ("largest", "label", "scale"),
    [
        (5.0, "training time (seconds)", 1),
        (600.0, "training time (minutes)", 60),
        (9e4, "training time (hours)", 3600),
    ],
)
def test_time_has_a_unit_that_fits(largest, label, scale):
    assert training._unit(training.BY_SECONDS, largest) == (label, scale)


def test_single_curves_have_fewer_points_where_there_are_many(make_grid, draw, table):
    """A page of thousands of curves stays small; the curve of the mean keeps its points."""
    seeds = ALL_POINTS // POINTS + 100
    most = ALL_POINTS // seeds
    longest = []
    for name, count in (("few", 2), ("many", seeds)):
        fake = make_grid(lambda a: 2.0, {SEED: list(range(count))}, curves=False, name=name)
        rows = [{"step": step, "train/nll": 4 + step % 2} for step in range(1, POINTS + 1)]
        for cell in fake.cells:
            table(fake.run(cell) / "metrics.csv", rows)
        text = draw(fake.folder, name).svg("training")
        lines = re.findall(r'<path d="(M [^"]+)"[^>]*stroke-opacity: 0.3', text)
        assert len(lines) == count
        longest.append(max(line.count("L ") for line in lines) + 1)
        means = re.findall(r'<path d="(M [^"]+)"[^>]*stroke-width: 1.9', text)
        assert max(mean.count("L ") for mean in means) > most
    few, many = longest
    assert POINTS <= few <= POINTS + 1
    assert FEWEST_POINTS < many <= most + 2  # the last point is kept in any case
