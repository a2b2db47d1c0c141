"""Probes, curves of the loss, parameters, speed and memory: the numbers of the runs."""

import csv
import re

import pytest

from lightning_app.report import write
from lightning_app.report.figures import sheet, training
from lightning_app.report.write import ALL_POINTS, FEWEST_POINTS, POINTS
from tests.report.conftest import PRESET, RATE, SEED, WARMUP

AXES = {SEED: [1, 2], PRESET: ["post_ln", "sas"], WARMUP: [0, 60], RATE: [1e-3, 4e-3]}
STEPS = (1, 10, 100)
LAYERS = (1, 2, 3)


def outcome(axes):
    """Post-LN stalls without warm-up at 4e-3; the higher rate is better for sas."""
    if axes[PRESET] == "post_ln" and axes[WARMUP] == 0 and axes[RATE] == 4e-3:
        return 4.5
    return 2.5 - 100 * axes[RATE] * (axes[PRESET] == "sas") + axes[SEED] / 100


def signal(number, step, layer):
    """A value that tells where it comes from."""
    return number + step / 1000 + layer / 10


def probe_rows(number):
    """Rows as the probe writes them, in another order, and with a value that is not finite."""
    rows = []
    for step in reversed(STEPS):
        for stack in ("encoder", "decoder"):
            for layer in (0, *LAYERS):
                value = signal(number, step, layer)
                rows.append((step, stack, layer, "token_cosine", None, value))
                if layer:
                    rows.append((step, stack, layer, "w2_gradient", None, value))
                    rows.append((step, stack, layer, "sum_norm", None, 1e9))
        value = signal(number, step, 0) if step > 1 else "nan"
        rows.append((step, "model", None, "output_information", None, value))
    names = ("step", "stack", "layer", "quantity", "head", "value")
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.fixture
def probed(make_grid, table):
    """A grid whose runs were probed: the number of a run is in each of its values."""
    fake = make_grid(outcome, AXES, curves=False)
    for number, cell in enumerate(fake.cells):
        table(fake.run(cell) / "probes.csv", probe_rows(number))
    return fake


def number_of(fake, name):
    return next(n for n, cell in enumerate(fake.cells) if cell["name"] == name)


def test_a_stalled_run_stands_beside_its_twin(probed, draw):
    drawn = draw(probed.folder, "probes", "explanations")
    (drawing,) = [d for d in drawn.list if d.path.stem.startswith("probes")]
    stalled, twin = drawing.cells
    assert (stalled.state, twin.state) == ("diverged", "ok")
    assert (stalled.variant, stalled.lr, stalled.seed) == (twin.variant, twin.lr, twin.seed)
    assert (stalled.variant, stalled.warmup, twin.warmup) == ("post_ln", 0, 60)
    assert drawing.lr == 4e-3
    assert "warm-up 0, which ended stalled" in drawing.text
    table = drawn.table("probes")
    assert set(table["run"]) == {stalled.name, twin.name}
    for _, row in table.iterrows():
        layer = 0 if row["stack"] == "model" else row["layer"]
        number = number_of(probed, row["run"])
        assert row["value"] == pytest.approx(signal(number, row["step"], layer))
    # Two stacks of cosines (4 layers) and gradients (3), 3 steps; of the model, 2 are finite.
    assert len(table) == 2 * (2 * (4 + 3) * 3 + 2)
    assert not [d for d in drawn.list if d.path.stem.startswith("explanations")]


def test_a_stall_without_a_twin_has_no_panels(make_grid, draw, table):
    for name, end, probed_warmups in (
        ("all", lambda a: 4.5, (0, 60)),
        ("none", lambda a: 2.0, (0, 60)),
        ("one", lambda a: 4.5 if a[WARMUP] == 0 else 2.0, (0,)),
    ):
        fake = make_grid(end, {SEED: [1], WARMUP: [0, 60]}, curves=False, name=name)
        for cell in fake.cells:
            if cell["axes"][WARMUP] in probed_warmups:
                table(fake.run(cell) / "probes.csv", probe_rows(0))
        drawn = draw(fake.folder, "probes", "resources")
        assert "probes" not in drawn.names
        assert "resources" in drawn.names


@pytest.mark.slow
def test_variants_that_are_not_drawn_are_named(make_grid, draw, table, monkeypatch):
    monkeypatch.setattr(write, "FIGURES", 2)
    axes = {SEED: [1], PRESET: ["a", "b", "c"], WARMUP: [0, 60]}
    fake = make_grid(lambda a: 2.0 if a[WARMUP] else 4.5, axes, curves=False)
    for cell in fake.cells:
        table(fake.run(cell) / "probes.csv", probe_rows(0))
    drawings = [d for d in draw(fake.folder, "probes").list if d.path.stem.startswith("probes")]
    assert [d.path.stem for d in drawings] == ["probes-1", "probes-2"]
    drawn = [d.cells[0].variant for d in drawings]
    (rest,) = {"a", "b", "c"} - {*drawn}
    assert drawings[1].text.endswith(f": {rest}.")
    assert not drawings[0].text.endswith(f": {rest}.")


def updates(number):
    """Rows of `UpdateProbe`, beside those of `SignalProbe`."""
    rows = []
    for step in STEPS:
        value = signal(number, step, 0)
        for name in ("update_rms", "row_angle", "row_equilibrium"):
            rows.append(("model", None, name, step, value))
        rows.append(("encoder", None, "output_change", step, value))
        for n in LAYERS:
            rows.append(("decoder", n, "qk_singular_value", step, signal(number, step, -n)))
    names = ("stack", "layer", "quantity", "step", "value")
    added = [{"head": None, **dict(zip(names, row, strict=True))} for row in rows]
    return [*probe_rows(number), *added]


def test_explanations_show_the_shortest_and_the_longest_warmup(make_grid, draw, table):
    fake = make_grid(outcome, {**AXES, WARMUP: [0, 30, 60]}, curves=False)
    for number, cell in enumerate(fake.cells):
        table(fake.run(cell) / "probes.csv", updates(number))
    drawn = draw(fake.folder, "explanations")
    (drawing,) = [d for d in drawn.list if d.path.stem.startswith("explanations")]
    found = [(c.variant, c.warmup, c.lr, c.seed) for c in drawing.cells]
    assert found == [("post_ln", 0, 4e-3, 1), ("post_ln", 60, 4e-3, 1)]
    rows = drawn.table(drawing.path.stem)
    for _, row in rows.iterrows():
        number = number_of(fake, row["run"])
        if row["quantity"] == "w2_gradient":  # of the last layer over the first
            first, last = (signal(number, row["step"], n) for n in (LAYERS[0], LAYERS[-1]))
            expected = last / first
        else:  # the last layer's; of singular values the largest, which the first layer has
            layer = {"token_cosine": LAYERS[-1], "qk_singular_value": -LAYERS[0]}
            expected = signal(number, row["step"], layer.get(row["quantity"], 0))
        assert row["value"] == pytest.approx(expected), row["quantity"]
    of = dict(zip(rows["quantity"], rows["explanation"], strict=True))
    assert of["row_equilibrium"] == of["row_angle"] == "E3"
    assert of["output_change"] == "E7"
    assert set(rows[rows["quantity"] == "row_equilibrium"]["mark"]) == {"theory"}


def column(path, name):
    """Step and value of one column of a `metrics.csv`."""
    with path.open(newline="") as file:
        rows = [(int(row["step"]), row[name]) for row in csv.DictReader(file)]
    return {step: float(value) for step, value in rows if value}


@pytest.mark.parametrize(("fewest", "tag"), [(5, "train/nll"), (4, "val/nll")])
def test_curves_are_those_of_the_runs(make_grid, draw, outcome, monkeypatch, fewest, tag):
    monkeypatch.setattr(training, "FEWEST", fewest)
    fake = make_grid(outcome)
    table = draw(fake.folder, "training").table("training")
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
    fake = make_grid(lambda a: 2.0, {SEED: [1, 2]}, curves=False)
    for cell, last in zip(fake.cells, (50, 100), strict=True):
        rows = [{"step": s, "train/nll": 5 - s / 100} for s in range(10, last + 1, 10)]
        table(fake.run(cell) / "metrics.csv", [*rows, {"step": last + 1, "train/nll": "nan"}])
    drawn = draw(fake.folder, "training").table("training")
    assert drawn[drawn["mark"] == "mean"]["step"].max() == 50
    assert drawn["step"].max() == 100


def test_single_curves_have_fewer_points_where_there_are_many(make_grid, draw, table):
    seeds = ALL_POINTS // POINTS + 100
    most = ALL_POINTS // seeds
    longest = []
    for name, count in (("few", 2), ("many", seeds)):
        fake = make_grid(lambda a: 2.0, {SEED: list(range(count))}, curves=False, name=name)
        rows = [{"step": step, "train/nll": 4 + step % 2} for step in range(1, POINTS + 1)]
        for cell in fake.cells:
            table(fake.run(cell) / "metrics.csv", rows)
        text = draw(fake.folder, "training", out=name).svg("training")
        lines = re.findall(r'<path d="(M [^"]+)"[^>]*stroke-opacity: 0.3', text)
        assert len(lines) == count
        longest.append(max(line.count("L ") for line in lines) + 1)
        means = re.findall(r'<path d="(M [^"]+)"[^>]*stroke-width: 1.9', text)
        assert max(mean.count("L ") for mean in means) > most
    few, many = longest
    assert POINTS <= few <= POINTS + 1
    assert FEWEST_POINTS < many <= most + 2  # the last point is kept in any case


def test_numbers_are_those_of_the_runs(make_grid, draw):
    fake = make_grid(lambda a: 2.0, AXES, curves=False)
    truth = {}
    for number, cell in enumerate(fake.cells):
        parameters = 400_000 if cell["axes"][PRESET] == "post_ln" else 300_000
        values = {"parameters": parameters, "peak_memory_bytes": (number + 1) << 20}
        fake.edit(number, {"train/tokens_per_second": 1000.0 + number}, **values)
        truth[cell["name"]] = values | {"tokens_per_second": 1000.0 + number}
    drawn = draw(fake.folder, "resources")
    table = drawn.table("resources")
    runs = table[table["mark"] == "run"].pivot(index="run", columns="quantity", values="value")
    assert runs.to_dict("index") == truth
    means = table[table["mark"] == "mean"].set_index(["quantity", "variant"])
    assert set(means["n"]) == {8}
    assert means.loc[("parameters", "sas"), "value"] == 300_000
    ours = [n for n, cell in enumerate(fake.cells) if cell["axes"][PRESET] == "sas"]
    speed = sum(1000.0 + n for n in ours) / 8
    assert means.loc[("tokens_per_second", "sas"), "value"] == pytest.approx(speed)
    assert drawn.by_name["resources"].lr is None
    assert "noisy" in drawn.by_name["resources"].limits
    assert len(drawn.by_name["resources"].cells) == 16
    fake.edit(0, device="NVIDIA H200")
    assert "2 kinds of device" in draw(fake.folder, "resources").by_name["resources"].limits


def test_very_many_runs_are_few_nodes_of_the_page(make_grid, draw, monkeypatch):
    fake = make_grid(lambda a: 2.0, AXES, curves=False)
    linked = draw(fake.folder, "resources").svg("resources")
    monkeypatch.setattr(sheet, "MOST", 3)
    drawn = draw(fake.folder, "resources")
    text = drawn.svg("resources")
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke-linecap: round', text)
    assert [path.count("M ") for path in paths] == [8] * 4  # two variants, two quantities
    assert linked.count("<title>") == 32
    assert text.count("<title>") == 0
    assert len(drawn.table("resources")) == 32 + 4
