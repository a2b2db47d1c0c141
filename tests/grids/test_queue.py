import json
import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from lightning_app.config.grid import GridSpec
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import Grid
from lightning_app.grids.queue import Queue
from lightning_app.grids.storages import storage_spec
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.records import Cell, Plan
from tests.records import result as a_result

AXES = {"model.block.shaped_attention": [None, {"alpha": 1.0}, [1, 2]], "seed_everything": [1]}
CELLS = tuple(
    Cell(id=f"{k:016x}", name=f"cell{k}", axes={**dict.fromkeys(AXES, 1), next(iter(AXES)): value})
    for k, value in enumerate(AXES["model.block.shaped_attention"])
)


def plan(metric: str = "val/nll", mode: str = "min") -> Plan:
    fixed = {"name": "tiny", "hash": "abc", "made_from": "", "excluded": 0, "data": ()}
    return Plan(**fixed, metric=metric, mode=mode, axes=AXES, cells=CELLS)


def queue_of(
    folder: Path, metric: str = "val/nll", mode: str = "min", retry_failed: bool = False
) -> Queue:
    texts: Any = {
        "source": "g.yaml",
        "name": "tiny",
        "question": "",
        "metric": metric,
        "mode": mode,
    }
    spec = GridSpec(**texts, base_config={}, axes=AXES, exclude=(), sensitivity={})
    grid = Grid(spec, GridFolder(folder), plan(metric, mode))
    return Queue(grid, storage_spec(None, grid.folder.journal, {}), retry_failed=retry_failed)


def leave(folder: Path, cell: Cell, status: str = "ok", **metrics: Any) -> dict[str, Any]:
    told = {key.replace("_", "/", 1): value for key, value in metrics.items()}
    result = a_result(cell.id, status, metrics={"val/nll": 2.0, **told})
    run = folder / "runs" / cell.name
    run.mkdir(parents=True, exist_ok=True)
    (run / "result.json").write_text(json.dumps(result))
    return result


def study(folder: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    return optuna.load_study(study_name="tiny-abc", storage=storage)


def test_waiting_cells_show_their_parameters_and_come_in_order(tmp_path: Path) -> None:
    queue = queue_of(tmp_path)
    table = study(tmp_path).trials_dataframe()
    assert set(table["state"]) == {"WAITING"}
    assert list(table["user_attrs_name"]) == ["cell0", "cell1", "cell2"]
    shaped = [trial.params["model.block.shaped_attention"] for trial in study(tmp_path).trials]
    assert "params_model.block.shaped_attention" in table
    assert shaped == [None, '{"alpha": 1.0}', "[1, 2]"]
    for cell in CELLS:
        popped = queue.pop()
        assert popped is not None
        assert popped.cell == cell
        queue.done(popped, leave(tmp_path, cell, val_nll=2.0))
    assert (queue.pop(), queue.waiting) == (None, 0)
    assert set(study(tmp_path).trials_dataframe()["state"]) == {"COMPLETE"}


@pytest.mark.parametrize(
    ("marks", "order"),
    [
        ({}, ["cell0", "cell1", "cell2"]),
        ({"death": True}, ["cell1", "cell2", "cell0"]),
        ({"alone": True}, ["cell1", "cell2", "cell0"]),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_interrupted_cells_go_on_in_the_order_of_the_plan(
    tmp_path: Path, marks: dict[str, bool], order: list[str], again: bool
) -> None:
    """Otherwise a grid that is stopped and goes on has parts of all seeds, and no seed whole."""
    queue = queue_of(tmp_path)
    claim = queue.pop() or pytest.fail("empty")
    queue.put_back(claim, "killed: SIGKILL", **marks)
    if again:
        queue.close()
        queue = queue_of(tmp_path)
    names = []
    while (popped := queue.pop()) is not None:
        names.append(popped.cell.name)
    assert names == order
    failed = study(tmp_path).get_trials(states=(optuna.trial.TrialState.FAIL,))
    assert [trial.user_attrs["error"] for trial in failed] == ["killed: SIGKILL"]


@pytest.mark.parametrize(
    ("metric", "mode", "status", "value", "expected"),
    [
        ("val/nll", "min", "ok", 2.0, 2.0),
        ("val/nll", "min", "ok", 7.0, 7.0),
        ("val/nll", "min", "diverged", 7.0, 6.0),
        ("val/nll", "min", "diverged", 5.97, 6.0),
        ("val/nll", "min", "diverged", None, 6.0),
        ("val/perplexity", "min", "diverged", None, 403.4287934927351),
        ("val/perplexity", "min", "ok", None, math.inf),  # too large for a float
        ("val/bleu", "max", "diverged", None, 0.0),
        ("val/bleu", "max", "diverged", 0.3, 0.3),
        ("test/bleu", "max", "ok", 20.5, 20.5),
        ("test/nll", "min", "diverged", None, math.inf),
        ("train/tokens_per_second", "min", "diverged", None, math.inf),
    ],
)
def test_a_failed_run_is_no_better_than_those_that_trained(
    tmp_path: Path, metric: str, mode: str, status: str, value: float | None, expected: float
) -> None:
    queue = queue_of(tmp_path, metric, mode)
    claim = queue.pop() or pytest.fail("empty")
    queue.done(claim, leave(tmp_path, claim.cell, status, **{metric.replace("/", "_", 1): value}))
    minimised = study(tmp_path).direction == optuna.study.StudyDirection.MINIMIZE
    assert minimised is (mode == "min")
    complete = study(tmp_path).trials[0]
    assert complete.value == pytest.approx(expected, rel=1e-12)
    assert complete.user_attrs["diverged"] is (status == "diverged")


def test_a_metric_that_runs_do_not_report_is_the_users_mistake(tmp_path: Path) -> None:
    leave(tmp_path, CELLS[0], val_nll=1.0)
    with pytest.raises(UserError, match="'test/bleu'"):
        queue_of(tmp_path, "test/bleu", "max")


def test_results_on_disk_are_adopted_with_their_times(tmp_path: Path) -> None:
    leave(tmp_path, CELLS[1], val_nll=1.5)
    queue = queue_of(tmp_path)
    assert queue.waiting == 2
    complete = study(tmp_path).get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert [(trial.user_attrs["name"], trial.value) for trial in complete] == [("cell1", 1.5)]
    assert complete[0].duration is not None
    assert complete[0].duration.total_seconds() == 5.0


def test_a_cell_that_ended_while_it_waited_is_not_handed_out(tmp_path: Path) -> None:
    """Another supervisor, or `ablate fit` in its folder, may end a cell that waits here."""
    queue = queue_of(tmp_path)
    leave(tmp_path, CELLS[0], val_nll=1.5)
    popped = queue.pop() or pytest.fail("empty")
    assert popped.cell == CELLS[1]
    (trial,) = study(tmp_path).get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert (trial.user_attrs["name"], trial.value) == ("cell0", 1.5)


def test_running_trials_of_a_dead_supervisor_are_settled(tmp_path: Path) -> None:
    queue = queue_of(tmp_path)
    for _ in CELLS:
        queue.pop()
    leave(tmp_path, CELLS[0], val_nll=1.5)
    attempt = tmp_path / "runs" / "cell1" / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "error.txt").write_text("Traceback\nValueError: no\n")
    queue = queue_of(tmp_path)
    states = [trial.state.name for trial in study(tmp_path).trials]
    assert states == ["COMPLETE", "FAIL", "FAIL", "WAITING"]
    assert study(tmp_path).trials[1].user_attrs["error"] == "ValueError: no"
    assert study(tmp_path).trials[2].user_attrs["error"] == "its supervisor ended"
    assert queue_of(tmp_path, retry_failed=True).waiting == 2


def test_a_result_of_another_experiment_is_not_taken(tmp_path: Path) -> None:
    leave(tmp_path, CELLS[0], val_nll=1.5)
    path = tmp_path / "runs" / "cell0" / "result.json"
    path.write_text(path.read_text().replace(CELLS[0].id, "f" * 16))
    with pytest.raises(UserError, match="is not the"):
        queue_of(tmp_path)


def test_optuna_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    queue_of(tmp_path)
    assert capfd.readouterr() == ("", "")


def complete_twice(folder: Path) -> None:
    known = study(folder)
    known.add_trial(known.get_trials(states=(optuna.trial.TrialState.COMPLETE,))[0])


def of_no_cell(folder: Path) -> None:
    study(folder).add_trial(optuna.create_trial(value=1.0, user_attrs={"cell": "another"}))


def running_forever(folder: Path) -> None:
    known = study(folder)
    while "cell" in known.ask().user_attrs:
        pass


def without_its_result(folder: Path) -> None:
    known = study(folder)
    trial = known.get_trials(states=(optuna.trial.TrialState.WAITING,))[0]
    attributes = {"cell": trial.user_attrs["cell"]}
    known.add_trial(optuna.create_trial(value=1.0, user_attrs=attributes))


def another_value(folder: Path) -> None:
    trial = study(folder).get_trials(states=(optuna.trial.TrialState.COMPLETE,))[0]
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    optuna.delete_study(study_name="tiny-abc", storage=storage)
    fresh = optuna.create_study(study_name="tiny-abc", storage=storage)
    fresh.add_trial(optuna.create_trial(value=9.0, user_attrs=trial.user_attrs))


@pytest.mark.parametrize(
    "damage", [complete_twice, of_no_cell, running_forever, without_its_result, another_value]
)
def test_a_study_that_contradicts_the_disk_is_made_again(tmp_path: Path, damage: Any) -> None:
    leave(tmp_path, CELLS[0], val_nll=2.0)
    queue_of(tmp_path).close()
    damage(tmp_path)
    queue = queue_of(tmp_path)
    trials = study(tmp_path).get_trials()
    states = {"COMPLETE": [("cell0", 2.0)], "WAITING": [("cell1", None), ("cell2", None)]}
    for state, cells in states.items():
        found = [trial for trial in trials if trial.state.name == state]
        assert sorted((t.user_attrs["name"], t.value) for t in found) == cells
    assert {trial.state.name for trial in trials} <= {*states, "FAIL"}
    assert queue.elsewhere() == 0
