"""Reports are passed to trials, and bad cells are stopped."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import optuna
import pytest
import yaml
from conftest import World
from optuna.trial import TrialState

from lightning_app.grids.study import Reports, make_pruner
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.run import ReportReader, last_report, read_reports
from tests import warm
from tests.small import tiny_config

STEPS = range(10, 100, 10)


def study(pruner: str, direction: Literal["minimize", "maximize"] = "minimize") -> optuna.Study:
    return optuna.create_study(direction=direction, pruner=make_pruner(pruner))


def complete(study: optuna.Study, *losses: float) -> None:
    """Add cells that are complete, each with the same loss at every step."""
    for loss in losses:
        values = dict.fromkeys(STEPS, loss)
        study.add_trial(optuna.create_trial(value=loss, intermediate_values=values))


def reports(trial: optuna.Trial, folder: Path, attempt: int = 1) -> Reports:
    found = Reports(RunFolder(folder), attempt, "val/nll")
    found.follow(trial)
    return found


def report(folder: Path, attempt: int, step: int, value: float) -> None:
    record = folder / "attempts" / str(attempt)
    record.mkdir(parents=True, exist_ok=True)
    said = value if math.isfinite(value) else None
    line = json.dumps({"step": step, "metric": "val/nll", "value": said})
    with (record / "reports.jsonl").open("a") as file:
        file.write(line + "\n")


@pytest.mark.parametrize(("direction", "sign"), [("minimize", 1), ("maximize", -1)])
def test_the_median_rule_stops_what_is_worse_than_half(tmp_path, direction, sign: int) -> None:
    grid = study("median", direction)
    complete(grid, *(sign * loss for loss in (1.0, 2.0, 3.0, 4.0, 5.0)))
    good, bad = (reports(grid.ask(), tmp_path / name) for name in ("good", "bad"))
    report(tmp_path / "good", 1, 10, sign * 2.9)
    report(tmp_path / "bad", 1, 10, sign * 3.1)
    assert not good.look()
    assert bad.look()
    assert not (tmp_path / "good" / "attempts" / "1" / "stop").exists()
    assert (tmp_path / "bad" / "attempts" / "1" / "stop").exists()
    assert bad.look()  # as long as it has not heard
    values = [trial.intermediate_values for trial in grid.get_trials()[-2:]]
    assert values == [{10: sign * 2.9}, {10: sign * 3.1}]


def test_nothing_is_pruned_before_enough_cells_are_complete_or_what_is_not_finite(tmp_path) -> None:
    grid = study("median")
    complete(grid, 1.0, 1.0, 1.0, 1.0)
    # A fifth one of unknown origin.
    grid.add_trial(optuna.create_trial(value=1.0))
    cell = reports(grid.ask(), tmp_path)
    report(tmp_path, 1, 10, 99.0)
    assert not cell.look()
    complete(grid, 1.0)
    report(tmp_path, 1, 20, 99.0)
    assert cell.look()
    folder = tmp_path / "other"
    grid = study("median")
    complete(grid, *[1.0] * 5)
    trial = grid.ask()
    cell = reports(trial, folder)
    report(folder, 1, 10, math.nan)
    report(folder, 1, 20, math.inf)
    assert not cell.look()
    assert grid.trials[-1].intermediate_values == {}
    grid.tell(trial.number, state=TrialState.FAIL)  # by others
    report(folder, 1, 30, 1.0)
    assert not cell.look()


def test_a_cell_that_goes_on_brings_the_reports_of_its_earlier_attempts(tmp_path: Path) -> None:
    grid = study("median")
    first = grid.ask()
    report(tmp_path, 1, 10, 3.0)
    report(tmp_path, 1, 20, 2.0)
    assert not reports(first, tmp_path).look()
    grid.tell(first, state=TrialState.FAIL)
    complete(grid, *[1.0] * 5)
    second = grid.ask()
    report(tmp_path, 2, 20, 2.0)  # made again from the checkpoint at step 10
    assert reports(second, tmp_path, 2).look()
    assert (tmp_path / "attempts" / "2" / "stop").exists()
    assert not (tmp_path / "attempts" / "1" / "stop").exists()


def test_every_step_is_reported_once_whoever_reports(tmp_path: Path, recwarn) -> None:
    grid = study("median")
    trial = grid.ask()
    for step in STEPS:  # each with a new reader, as after a restart of the supervisor
        report(tmp_path, 1, step, 1.0)
        assert not reports(trial, tmp_path).look()
    assert list(grid.trials[-1].intermediate_values) == list(STEPS)
    assert [str(each.message) for each in recwarn] == []


def test_hyperband_begins_at_the_first_validation(tmp_path: Path) -> None:
    grid = study("hyperband")
    early = grid.ask()
    report(tmp_path / "early", 1, 10, 99.0)
    assert not reports(early, tmp_path / "early").look()
    complete(grid, 0.5)
    stopped = []
    for number in range(27):
        folder = tmp_path / str(number)
        cell = reports(grid.ask(), folder)
        for step in STEPS:
            report(folder, 1, step, 1.0 + number)  # each worse than the one before
            if cell.look():
                stopped.append(step)
                break
    assert 18 <= len(stopped) <= 26
    # Its brackets compare for the first time at 10, 30 and 90 steps.
    assert set(stopped) <= {10, 30, 90}
    assert 10 in stopped


def rates(world: World, *values: float, **changes: object) -> None:
    """Six seeds of a good rate and a bad one; what the stand-in reports as its loss is the rate."""
    axes: dict[str, Any] = {"model.optimizer.lr": list(values or (0.1, 9.0))}
    axes |= {"model.block.preset": ["post_ln"], "model.schedule.warmup_steps": [0]}
    world.write(seeds=6, delay=0.02, steps=40, axes=axes, **changes)


# Over 5 s: twelve cells, each of which has to last longer than a look at its reports.
def test_a_grid_with_a_pruner_ends_bad_cells_early(world: World) -> None:
    rates(world, pruner="median")
    done = world.run(workers=2)
    assert (done.returncode, done.stderr) == (0, "")
    runs = world.runs()
    pruned = sorted(name for name, run in runs.items() if run.state == "pruned")
    assert pruned
    assert all("lr9" in name for name in pruned)
    assert {run.state for run in runs.values()} == {"done", "pruned"}
    assert sorted(line[1] for line in world.lines("pruned")) == pruned
    # The queue looks at the reports from time to time, so on a busy machine one may come too late.
    assert any((runs[name].pruned or {})["step"] < 40 for name in pruned)
    assert world.states() == {"COMPLETE": 12 - len(pruned), "PRUNED": len(pruned)}
    before = world.lines("start")
    again = world.run(workers=2)
    assert again.returncode == 0
    assert [line for line in world.lines() if line[0] == "start"] == before
    rates(world)  # without the pruner the pruned cells go on
    assert world.run(workers=2).returncode == 0
    assert {run.state for run in world.runs().values()} == {"done"}
    assert world.states() == {"COMPLETE": 12}


def test_cells_of_a_grid_that_grew_are_judged_by_those_it_had(world: World) -> None:
    rates(world, 0.1, pruner="median")
    assert world.run(workers=2).returncode == 0
    rates(world, pruner="median")  # another study, which knows the first cells from disk
    assert world.run(workers=2).returncode == 0
    assert world.states() == {"COMPLETE": 6, "PRUNED": 6}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.attempt(1).path.mkdir(parents=True)
    return folder


def test_reports_are_read_as_they_come_and_only_whole(folder: RunFolder) -> None:
    path, reader = folder.attempt(1).reports, ReportReader("m")
    assert list(reader.new(folder, 1)) == []
    assert last_report(folder, "m") is None
    path.write_text('{"step": 5, "metric": "m", "value": 3.0}\n{"step": 10, "metric": "m", "val')
    assert list(reader.new(folder, 1)) == [(5, 3.0)]
    assert list(reader.new(folder, 1)) == []
    with path.open("a") as file:
        file.write('ue": 2.5}\n{"step": 15, "metric": "m", "value": null}\n')
    assert list(reader.new(folder, 1)) == [(10, 2.5)]
    reader = ReportReader("m")  # what was not dealt with comes again
    path.write_text(lines((5, "m", 3.0), (10, "m", 2.0)))
    for step, _ in reader.new(folder, 1):
        if step == 10:
            break
    assert list(reader.new(folder, 1)) == [(10, 2.0)]


def lines(*reports: tuple[int, str, float]) -> str:
    keyed = (dict(zip(("step", "metric", "value"), each, strict=True)) for each in reports)
    return "".join(json.dumps(each) + "\n" for each in keyed)


def test_the_reports_of_all_attempts_are_one_curve_of_each_metric(folder: RunFolder) -> None:
    first, second = folder.attempt(1).reports, folder.attempt(2).reports
    second.parent.mkdir()
    first.write_text(lines((5, "m", 3.0), (10, "m", 2.0)) + '\0\0\0\n{"st')
    second.write_text(lines((10, "m", 2.0), (15, "m", 1.0)))
    assert read_reports(folder, "m") == {5: 3.0, 10: 2.0, 15: 1.0}
    assert last_report(folder, "m") == 1.0
    second.unlink()
    first.write_text(lines((5, "val/nll", 3.0), (5, "val/bleu", 20.0), (10, "val/bleu", 21.0)))
    assert read_reports(folder, "val/nll") == {5: 3.0}
    assert read_reports(folder, "val/bleu") == {5: 20.0, 10: 21.0}
    assert last_report(folder, "val/nll") == 3.0


LAST = 40


def grid_of_rates(folder: Path, cache: str) -> Path:
    """Five cells that learn, then one whose rate is far too small."""
    trainer = {"max_steps": LAST, "val_check_interval": 4, "log_every_n_steps": 2}
    base = tiny_config({**trainer, "limit_val_batches": 1}, data__cache=cache)
    rates, seeds = "model.optimizer.lr", list(range(1, 6))
    tree: dict[str, Any] = {"name": "rates", "pruner": "median", "checkpoints": "best"}
    tree |= {"base_config": base, "axes": {rates: [4.0e-3, 1.0e-9], "seed_everything": seeds}}
    tree["exclude"] = [{rates: 1.0e-9, "seed_everything": seed} for seed in seeds[:-1]]
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def ablate(*words: str) -> str:
    done = warm.run(["-m", "lightning_app", *words])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "devices",
    [pytest.param(1, id="one_process"), pytest.param(2, id="two_ranks", marks=pytest.mark.slow)],
)
# Over 5 s: six real trainings and their report.
def test_a_cell_that_does_not_learn_is_ended(tmp_path: Path, cache: str, devices: int) -> None:
    path, experiments = grid_of_rates(tmp_path, cache), tmp_path / "experiments"
    where = ["--experiments", str(experiments)]
    # One worker: five cells have ended before the sixth begins, and none of them can be pruned.
    given = ["--workers", "1", "--devices-per-cell", str(devices)]
    said = ablate("run", str(path), *where, *given)
    assert re.search(r"rates: 6 cells: .*1 pruned\n", said), said
    folders = sorted((experiments / "rates" / "runs").iterdir())
    (pruned,) = [folder for folder in folders if (folder / "pruned.json").exists()]
    assert not (pruned / "result.json").exists()
    left = json.loads((pruned / "pruned.json").read_text())
    assert (left["name"], left["status"]) == (pruned.name, "pruned")
    assert "lr1e-09-seed5" in pruned.name
    assert 4 <= left["step"] < LAST
    reports = (pruned / "attempts" / "1" / "reports.jsonl").read_text().splitlines()
    last = json.loads(reports[-1])
    assert left["value"] == last["value"]
    assert last["step"] <= left["step"]
    with (pruned / "metrics.csv").open() as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    assert max(rows) == left["step"]
    assert float(rows[last["step"]]["val/nll"]) == pytest.approx(last["value"])
    for folder in folders:
        assert [each.name for each in (folder / "checkpoints").iterdir()] == ["best.ckpt"]
        if folder != pruned:
            result = json.loads((folder / "result.json").read_text())
            assert result["devices"] == len(result["slot"]["devices"]) == devices
    said = ablate("status", str(path), *where)
    assert re.search(r"rates: 6 cells: .*1 pruned\n", said), said
    page = (experiments / "rates" / "report.html").read_text()
    assert re.search(r"5 of 6 planned cells finished: (none of them|of them \d) .*, 1 prun", page)
    assert pruned.name not in page
    assert "no sensitivity is" in page
    scores = (experiments / "rates" / "sensitivity.csv").read_text().splitlines()
    assert len(scores) == 1  # its head alone
