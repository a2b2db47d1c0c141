"""Parameters, speed and memory: the numbers of all runs, with any warm-up and rate."""

import json
import re

import pytest

from lightning_app.report.figures import sheet

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
AXES = {SEED: [1, 2], PRESET: ["post_ln", "sas"], WARMUP: [0, 60], RATE: [1e-3, 4e-3]}


def change(fake, number, **fields):
    """Change fields of `result.json`; `speed` is short for the metric."""
    path = fake.run(fake.cells[number]) / "result.json"
    record = json.loads(path.read_text())
    if "speed" in fields:
        record["metrics"]["train/tokens_per_second"] = fields.pop("speed")
    path.write_text(json.dumps(record | fields))


def test_numbers_are_those_of_the_runs(make_grid, draw):
    fake = make_grid(lambda a: 2.0, AXES, curves=False)
    truth = {}
    for number, cell in enumerate(fake.cells):
        parameters = 400_000 if cell["axes"][PRESET] == "post_ln" else 300_000
        values = {"parameters": parameters, "peak_memory_bytes": (number + 1) << 20}
        change(fake, number, speed=1000.0 + number, **values)
        truth[cell["name"]] = values | {"tokens_per_second": 1000.0 + number}
    drawn = draw(fake.folder)
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


def test_older_runs_have_no_memory(make_grid, draw):
    drawn = draw(make_grid(lambda a: 2.0, AXES, curves=False).folder)
    assert set(drawn.table("resources")["quantity"]) == {"parameters", "tokens_per_second"}
    assert "memory" not in drawn.by_name["resources"].text


def test_runs_of_several_devices_are_no_comparison(make_grid, draw):
    fake = make_grid(lambda a: 2.0, AXES, curves=False)
    change(fake, 0, device="NVIDIA H200")
    assert "2 kinds of device" in draw(fake.folder).by_name["resources"].limits


def test_very_many_runs_are_few_nodes_of_the_page(make_grid, draw, monkeypatch):
    """One path for all runs of a variant, with a dot for each of them."""
    fake = make_grid(lambda a: 2.0, AXES, curves=False)
    linked = draw(fake.folder).svg("resources")
    monkeypatch.setattr(sheet, "MOST", 3)
    drawn = draw(fake.folder)
    text = drawn.svg("resources")
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke-linecap: round', text)
    assert [path.count("M ") for path in paths] == [8] * 4  # two variants, two quantities
    assert linked.count("<title>") == 32
    assert text.count("<title>") == 0
    assert len(drawn.table("resources")) == 32 + 4
