"""Curves of the loss: against steps and seconds."""

import csv
import re

import pytest

from lightning_app.report.figures import training
from lightning_app.report.write import ALL_POINTS, FEWEST_POINTS, POINTS

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
