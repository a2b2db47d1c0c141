"""A grid folder is read as it is: every planned cell has a state, nothing is guessed."""

import json
import math

import pandas as pd
import pytest
import yaml

from lightning_app.core.errors import UserError
from lightning_app.report.facts import state_counts
from lightning_app.report.frames import results_frame, validations_frame
from lightning_app.report.results import damaged_files, read_results
from tests.report.conftest import RATE, SEED, WARMUP, change
from tests.told import told


def test_every_planned_cell_has_a_state(make_grid):
    ends = dict(enumerate([2.0, 4.6, None, "failed", "unfinished", "waiting"], start=1))
    fake = make_grid(lambda axes: ends[axes[SEED]], {SEED: list(ends)})
    grid = read_results(fake.folder)
    states = [cell.state for cell in grid.cells]
    assert states == ["ok", "diverged", "diverged", "failed", "unfinished", "waiting"]
    assert [cell.loss for cell in grid.finished] == [2.0, 4.5, 4.5]
    assert grid.cells[3].error == "RuntimeError: <b>out of</b> memory"
    assert all(math.isnan(cell.loss) for cell in grid.cells[3:])
    (fake.run(fake.cells[3]) / "attempts" / "10").mkdir()  # another attempt after the crash
    assert read_results(fake.folder).cells[3].state == "unfinished"
    assert "more" not in state_counts(grid)
    plan = fake.folder / "plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "more": 12}))
    assert "at most 12 more" in state_counts(read_results(fake.folder))


def test_what_a_grid_file_decides_of_verdicts(make_grid):
    fake = make_grid(lambda axes: 2.0, {SEED: [1]})
    bare = read_results(fake.folder)
    assert (bare.matters, bare.metric_matters, bare.families) == (0.0, 0.0, {})
    families = {"one": ["post_ln"], "other": ["pre_ln", "sas"]}
    metric = {"name": "val/accuracy", "mode": "max", "matters": 0.02}
    change(fake, families=families, metric=metric, sensitivity={"matters": 0.01})
    grid = read_results(fake.folder)
    assert (grid.matters, grid.metric_matters, grid.families) == (0.01, 0.02, families)


def test_axes_that_are_not_in_the_grid_come_from_the_config_of_grid_or_run(make_grid):
    (cell,) = read_results(make_grid(lambda axes: 2.0, {SEED: [3]}).folder).cells
    assert (cell.variant, cell.warmup, cell.lr, cell.seed) == ("post_ln", 60, 0.004, 3)
    assert cell.group == "all"
    base = {"model": {"block": {"preset": "sas"}}}
    fake = make_grid(lambda axes: 2.0, {SEED: [3]}, base=base, name="resolved")
    (cell,) = read_results(fake.folder).cells
    assert (cell.warmup, cell.lr) == (None, None)
    resolved = "model: {optimizer: {lr: 0.5}, schedule: {warmup_steps: 7}}\n"
    (fake.run(fake.cells[0]) / "config.yaml").write_text(resolved)
    (cell,) = read_results(fake.folder).cells
    assert (cell.variant, cell.warmup, cell.lr) == ("sas", 7, 0.5)


def test_a_row_for_each_planned_cell(make_grid):
    axes = {SEED: [1, 2, 3], WARMUP: [0, 60], RATE: [0.002], "data.mixed": [1, "a", {"b": [2]}]}
    metrics = {"test/bleu": 21.5}

    def outcome(axes):
        return {1: 2.0, 2: None, 3: "failed"}[axes[SEED]]

    frame = results_frame(read_results(make_grid(outcome, axes, metrics=metrics).folder))
    assert frame["status"].value_counts().to_dict() == {"ok": 6, "diverged": 6, "failed": 6}
    first, stalled, failed = (frame.iloc[row] for row in (0, 6, -1))
    assert (first["status"], first["val/nll"], first["test/bleu"]) == ("ok", 2.0, 21.5)
    assert (first["warmup"], first["lr"], first["seed"]) == (0, 0.002, 1)
    assert (first["group"], first["baseline"], first["loss"]) == ("data.mixed=1", "pre_ln", 2.0)
    assert first["reference_warmup"] == 60
    assert (first["data_train"], first["protocol"]) == (30000, "built-in grammar, seed 0")
    assert (first["steps"], first["tokens"], first["parameters"]) == (200, 204800, 251904)
    assert pd.isna(first["peak_memory_bytes"])
    assert (stalled["status"], stalled["diverged_step"], stalled["loss"]) == ("diverged", 200, 4.5)
    assert math.isnan(stalled["val/nll"])
    assert (failed["status"], failed["seed"]) == ("failed", 3)
    assert pd.isna(failed["loss"])
    assert pd.isna(failed["steps"])
    assert set(frame["data.mixed"]) == {"1", "a", '{"b":[2]}'}


def test_a_row_for_each_validation_has_its_tokens_and_seconds(make_grid):
    ends = {1: 2.0, 2: None, 3: "failed", 4: "waiting"}
    fake = make_grid(lambda axes: ends[axes[SEED]], {SEED: [1, 2, 3, 4], WARMUP: [0, 60]})
    grid = read_results(fake.folder)
    frame = validations_frame(grid)
    assert len(frame) == 4 * 4  # four cells with a log, four validations each
    for cell in grid.cells:
        own = frame[frame["id"] == cell.id]
        assert dict(zip(own["step"], own["val/nll"], strict=True)) == cell.run.curve("val/nll")
        assert set(own["warmup"]) <= {cell.warmup}
    assert frame["tokens"].dropna().empty
    fake = make_grid(lambda axes: 2.0, {SEED: [1]}, name="timed")
    rows = ["step,train/tokens,train/seconds,val/nll,val/bleu", "50,400,1.5,,", "50,,,3.0,"]
    rows += ["75,,,2.75,", "100,800,3.0,2.5,7.5", "100,,,2.25,", "120,900,3.5,,", ""]
    (fake.run(fake.cells[0]) / "metrics.csv").write_text("\n".join(rows))
    frame = validations_frame(read_results(fake.folder))
    assert frame["step"].tolist() == [50, 75, 100]
    assert frame["val/nll"].tolist() == [3.0, 2.75, 2.25]  # of a step logged twice, the last
    assert frame["tokens"].fillna(-1).tolist() == [400, -1, 800]
    assert frame["seconds"].fillna(-1).tolist() == [1.5, -1, 3.0]
    assert frame["val/bleu"].fillna(-1).tolist() == [-1, -1, 7.5]


def test_a_folder_that_is_no_grid(tmp_path):
    with pytest.raises(UserError, match=r"nothing: has no grid.yaml"):
        read_results(tmp_path / "nothing")
    (tmp_path / "grid.yaml").write_text("name: a\n")
    with pytest.raises(UserError, match=r"has no plan.json"):
        read_results(tmp_path)


def test_a_result_of_another_cell_is_damage_and_a_damaged_config_passed_over(make_grid):
    fake = make_grid(lambda axes: 2.0, {SEED: [1, 2]})
    fake.edit(0, id="f" * 16)
    path = fake.run(fake.cells[0]) / "result.json"
    grid = read_results(fake.folder)
    assert [cell.state for cell in grid.cells] == ["damaged", "ok"]
    assert [cell.name for cell in grid.finished] == [fake.cells[1]["name"]]
    said = f"{path}: id: '{'f' * 16}' is not the planned {fake.cells[0]['id']}"
    assert damaged_files(grid) == [said]
    fake.edit(0, id=fake.cells[0]["id"])
    path = fake.run(fake.cells[0]) / "config.yaml"
    path.write_bytes(b"\xff\n")
    grid = read_results(fake.folder)
    assert grid.setting("model.schedule.coupling") == "decoupled"
    (line,) = damaged_files(grid)
    assert line.startswith(f"{path}: torn or damaged: not valid YAML")


@pytest.mark.parametrize(
    ("nll", "told", "outcome", "loss", "capped"),
    [
        (2.0, None, "trained", 2.0, False),
        (5.5, "not_yet_learned", "not_yet_learned", 4.5, True),
        (4.48, "not_yet_learned", "not_yet_learned", 4.48, False),
        (4.48, None, "stalled", 4.5, False),
        (None, None, "non_finite", 4.5, False),
    ],
)
def test_how_a_cell_ended(make_grid, nll, told, outcome, loss, capped):
    fake = make_grid(lambda axes: nll, {SEED: [1]})
    if told is not None:
        fake.edit(0, status="ok", diverged=None, outcome=told)
    (cell,) = read_results(fake.folder).cells
    assert (cell.outcome, cell.loss, cell.capped) == (outcome, loss, capped)
    assert results_frame(read_results(fake.folder)).loc[0, "outcome"] == outcome


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("plan.json", "{", "( … damaged: … JSON"),
        ("plan.json", "[]", "( … JSON"),
        ("plan.json", '{"schema": 2, "cells": []}', "("),
        ("grid.yaml", "a: [", "damaged:"),
        ("plan.json", {"axes": []}, "expected a mapping"),
        ("plan.json", {"cells": {}}, "expected a list"),
        ("plan.json", {"cells": ["a"]}, "1: … {id, name, axes, parent}, found 'a'"),
        ("plan.json", {"cells": [{"id": "a", "name": "../a", "axes": {}}]}, "expected the name"),
        ("plan.json", {"cells": [{"id": "a"}]}, "1.name:"),
        ("plan.json", {"cells": [{"id": "a", "name": "a", "axes": {"x": 1}}]}, "'x'"),
        ("plan.json", {"cells": [{"id": "a", "name": "a", "axes": {SEED: "one"}}]}, "'one'"),
        ("plan.json", {"schema": 99}, "schema 99:"),
        ("result.json", {"schema": 99}, "schema 99:"),
        ("grid.yaml", {"metric": {"mode": "most"}}, "metric.mode: expected 'min' or 'max'"),
        ("grid.yaml", {"sensitivity": {"reference_warmup": "60"}}, "reference_warmup: expected a"),
        ("grid.yaml", {"sensitivity": {"matters": 0.0}}, "matters: … 0, found 0.0"),
        ("grid.yaml", {"metric": {"matters": -0.1}}, "metric: matters: … 0, found -0.1"),
        ("grid.yaml", {"metric": {"name": "val/perplexity", "matters": 0.1}}, "val/nll"),
        ("grid.yaml", {"families": {"a": "pre_ln"}}, "families.a: expected a list"),
        ("grid.yaml", {"base_config": 3}, "base_config: … null, found 3"),
        ("grid.yaml", {"published": [{"paper": "a"}]}, "published: is no more"),
    ],
)
def test_a_wrong_field_of_the_plan_or_the_grid_file_is_named(make_grid, file, changes, said):
    fake = make_grid(lambda axes: 2.0, {SEED: [1]})
    path = next(fake.folder.rglob(file))
    whole = isinstance(changes, str)
    text = changes if whole else json.dumps({**yaml.safe_load(path.read_text()), **changes})
    path.write_text(f"{text}\n")
    with pytest.raises(UserError) as caught:
        read_results(fake.folder)
    assert str(caught.value).startswith(f"{path}: ")
    assert told(said).search(str(caught.value))
    assert "\n" not in str(caught.value)
