import json
import math
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from lightning_app.config.grid import GridSpec
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import Grid
from lightning_app.grids.queue import Claim, Queue
from lightning_app.grids.storages import storage_spec
from lightning_app.grids.study import Study
from lightning_app.runs.folder import GridFolder, RunFolder
from lightning_app.runs.locks import run_lock
from lightning_app.runs.records import Cell, Plan
from lightning_app.runs.run import Run
from tests.records import result as a_result

AXES = {"model.block.shaped_attention": [None, {"alpha": 1.0}, [1, 2]], "seed_everything": [1]}
CELLS = tuple(
    Cell(id=f"{k:016x}", name=f"cell{k}", axes={**dict.fromkeys(AXES, 1), next(iter(AXES)): value})
    for k, value in enumerate(AXES["model.block.shaped_attention"])
)


def plan(metric: str = "val/nll", mode: str = "min") -> Plan:
    fixed = {"name": "tiny", "hash": "abc", "made_from": "", "excluded": 0, "data": ()}
    return Plan(**fixed, metric=metric, mode=mode, axes=AXES, cells=CELLS)


def queue_of(folder: Path, metric: str = "val/nll", mode: str = "min", **options: bool) -> Queue:
    texts: Any = {"source": "g.yaml", "name": "tiny", "question": ""}
    texts |= {"metric": metric, "mode": mode}
    spec = GridSpec(**texts, base_config={}, axes=AXES, exclude=(), sensitivity={})
    folder.mkdir(exist_ok=True)
    grid = Grid(spec, GridFolder(folder), plan(metric, mode))
    return Queue(grid, storage_spec(None, grid.folder.journal, {}), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tiny"


def pop(queue: Queue) -> Claim:
    """Claim a cell and start an attempt, as a supervisor does."""
    claim = queue.pop() or pytest.fail("no cell is free")
    attempt = claim.folder.last_attempt() + 1
    claim.folder.attempt(attempt).path.mkdir(parents=True)
    queue.started(claim, attempt)
    return claim


def end(queue: Queue, claim: Claim) -> None:
    queue.ended(claim, Run(claim.folder).state)


def crash(queue: Queue, claim: Claim, error: str) -> None:
    claim.folder.attempt(claim.attempt).error.write_text(f"Traceback\n{error}\n")
    queue.failed(claim, error)


def leave(folder: Path, cell: Cell, status: str = "ok", **metrics: Any) -> dict[str, Any]:
    told = {key.replace("_", "/", 1): value for key, value in metrics.items()}
    result = a_result(cell.id, status, metrics={"val/nll": 2.0, **told})
    link = folder / "runs" / cell.name
    run = link if link.exists() else folder.parent / ".runs" / cell.id
    run.mkdir(parents=True, exist_ok=True)
    (run / "result.json").write_text(json.dumps(result))
    return result


def study(folder: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    return optuna.load_study(study_name="tiny-abc", storage=storage)


def test_trials_show_parameters_and_come_in_order(folder: Path) -> None:
    with queue_of(folder) as queue:
        for left, cell in zip((2, 1, 0), CELLS, strict=True):
            claim = pop(queue)
            assert (claim.cell, queue.waiting) == (cell, left)
            leave(folder, cell, val_nll=2.0)
            end(queue, claim)
        assert queue.pop() is None
    table = study(folder).trials_dataframe()
    assert list(table["user_attrs_name"]) == ["cell0", "cell1", "cell2"]
    shaped = [trial.params["model.block.shaped_attention"] for trial in study(folder).trials]
    assert "params_model.block.shaped_attention" in table
    assert shaped == [None, '{"alpha": 1.0}', "[1, 2]"]
    assert set(table["state"]) == {"COMPLETE"}


@pytest.mark.parametrize(
    ("marks", "order"),
    [
        ({}, ["cell0", "cell1", "cell2"]),
        ({"death": True}, ["cell1", "cell2", "cell0"]),
        ({"death": True, "alone": True}, ["cell1", "cell2", "cell0"]),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_interrupted_cells_go_on_in_the_order_of_the_plan(folder, marks, order, again) -> None:
    with queue_of(folder) as queue:
        queue.put_back(pop(queue), "killed: SIGKILL", **marks)
        claims = [] if again else [pop(queue) for _ in CELLS]
    with queue_of(folder) as queue:
        claims = claims or [pop(queue) for _ in CELLS]
    assert [claim.cell.name for claim in claims] == order
    last = next(claim for claim in claims if claim.cell == CELLS[0])
    assert last.retries.deaths == len(marks) - ("alone" in marks)
    assert last.retries.alone is ("alone" in marks)
    failed = study(folder).get_trials(states=(optuna.trial.TrialState.FAIL,))
    assert failed[0].user_attrs["error"] == "killed: SIGKILL"


def test_a_claimed_cell_is_of_one_supervisor_until_its_process_ends(folder: Path) -> None:
    """Whatever its process does meanwhile; and a worker may outlive its supervisor."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.grids.test_queue import queue_of\n"
        "with queue_of(Path(sys.argv[1]), alone=False) as queue:\n"
        "    print(queue.pop().cell.name, flush=True); sys.stdin.read()\n"
    )
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "cell0\n"
    with queue_of(folder, alone=False) as queue:
        assert [pop(queue).cell.name for _ in range(2)] == ["cell1", "cell2"]
        assert (queue.pop(), queue.waiting, queue.elsewhere()) == (None, 1, 1)
        process.kill()
        process.communicate()
        assert queue.elsewhere() == 0
        with run_lock(RunFolder(folder / "runs" / "cell0")):
            assert (queue.pop(), queue.elsewhere()) == (None, 1)
        assert pop(queue).cell.name == "cell0"


def test_a_retry_is_of_one_crash_whoever_runs_it(folder: Path) -> None:
    with queue_of(folder) as queue:
        for death in (True, True):
            queue.put_back(pop(queue), "killed", death=death)
        for _ in CELLS:
            crash(queue, pop(queue), "ValueError: no")
        assert (queue.pop(), queue.waiting) == (None, 0)
    with queue_of(folder) as queue:
        assert queue.total == 0
    with queue_of(folder, retry_failed=True) as queue:
        assert queue.total == 3
    with queue_of(folder) as queue, queue_of(folder, alone=False) as second:
        assert (queue.total, second.total) == (3, 3)
        claims = [pop(each) for each in (queue, queue, queue)]
        assert [claim.retries.deaths for claim in claims] == [0, 0, 0]
        for claim in claims:
            crash(queue, claim, "ValueError: again")
        assert (second.pop(), second.waiting) == (None, 0)


@pytest.mark.parametrize(
    ("metric", "mode", "status", "value", "expected"),
    [
        ("val/nll", "min", "ok", 2.0, 2.0),
        ("val/nll", "min", "ok", 7.0, 6.0),
        ("val/nll", "min", "diverged", 7.0, 6.0),
        ("val/nll", "min", "diverged", 5.97, 6.0),
        ("val/nll", "min", "diverged", None, 6.0),
        ("val/perplexity", "min", "diverged", None, 403.4287934927351),
        ("val/perplexity", "min", "ok", None, math.exp(6.0)),  # too large for a float
        ("val/bleu", "max", "diverged", None, 0.0),
        ("val/bleu", "max", "diverged", 0.3, 0.3),
        ("test/bleu", "max", "ok", 20.5, 20.5),
        ("test/nll", "min", "diverged", None, math.inf),
        ("train/tokens_per_second", "min", "diverged", None, math.inf),
    ],
)
def test_a_failed_run_is_no_better(folder, metric, mode, status, value, expected) -> None:
    with queue_of(folder, metric, mode) as queue:
        claim = pop(queue)
        leave(folder, claim.cell, status, **{metric.replace("/", "_", 1): value})
        end(queue, claim)
    minimised = study(folder).direction == optuna.study.StudyDirection.MINIMIZE
    assert minimised is (mode == "min")
    complete = study(folder).trials[0]
    assert complete.value == pytest.approx(expected, rel=1e-12)
    assert complete.user_attrs["diverged"] is (status == "diverged")


def test_a_result_of_another_metric_or_experiment_is_not_taken(folder: Path) -> None:
    leave(folder, CELLS[0], val_nll=1.0)
    with pytest.raises(UserError, match="'test/bleu'"):
        queue_of(folder, "test/bleu", "max")
    path = folder.parent / ".runs" / CELLS[0].id / "result.json"
    path.write_text(path.read_text().replace(CELLS[0].id, "f" * 16))
    with pytest.raises(UserError, match="is not the"):
        queue_of(folder)


def test_a_study_that_does_not_answer_delays_no_cell(folder: Path, monkeypatch, capsys) -> None:
    hangs = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("lightning_app.grids.study._HURRY", 0.2)
        patch.setattr(Study, "_begin", lambda *_: hangs.wait(60))
        began = time.monotonic()
        with queue_of(folder) as queue:
            for cell in CELLS:
                claim = pop(queue)
                leave(folder, cell)
                end(queue, claim)
        assert time.monotonic() - began < 5
    assert capsys.readouterr().out.count("the study is caught up later\n") == 1
    hangs.set()
    with queue_of(folder):
        pass
    assert {trial.state.name for trial in study(folder).trials} == {"COMPLETE"}
    assert len(study(folder).trials) == len(CELLS)


def test_results_on_disk_are_adopted_with_their_times(folder: Path) -> None:
    leave(folder, CELLS[1], val_nll=1.5)
    with queue_of(folder) as queue:
        assert queue.waiting == 2
        leave(folder, CELLS[0], val_nll=2.5)  # it ends while it waits, and is not handed out
        assert pop(queue).cell == CELLS[2]
    complete = study(folder).get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    found = [(trial.user_attrs["name"], trial.value) for trial in complete]
    assert found == [("cell1", 1.5), ("cell0", 2.5)]
    assert complete[0].duration is not None
    assert complete[0].duration.total_seconds() == 5.0


def test_running_trials_of_a_dead_supervisor_are_settled(folder: Path) -> None:
    with queue_of(folder) as queue:
        claims = [pop(queue) for _ in CELLS]
    leave(folder, CELLS[0], val_nll=1.5)
    claims[1].folder.attempt(1).error.write_text("Traceback\nValueError: no\n")
    with queue_of(folder) as queue:
        assert queue.waiting == 1
    states = [trial.state.name for trial in study(folder).trials]
    assert states == ["COMPLETE", "FAIL", "FAIL"]
    errors = [trial.user_attrs["error"] for trial in study(folder).trials[1:]]
    assert errors == ["ValueError: no", "its supervisor ended"]


def complete_twice(folder: Path) -> None:
    known = study(folder)
    known.add_trial(known.get_trials(states=(optuna.trial.TrialState.COMPLETE,))[0])


def of_cell(folder: Path, cell: str) -> None:
    study(folder).add_trial(optuna.create_trial(value=1.0, user_attrs={"cell": cell}))


def running_forever(folder: Path) -> None:
    known = study(folder)
    while "cell" in known.ask().user_attrs:
        pass


def another_value(folder: Path) -> None:
    trial = study(folder).get_trials(states=(optuna.trial.TrialState.COMPLETE,))[0]
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    optuna.delete_study(study_name="tiny-abc", storage=storage)
    fresh = optuna.create_study(study_name="tiny-abc", storage=storage)
    fresh.add_trial(optuna.create_trial(value=9.0, user_attrs=trial.user_attrs))


OF = [partial(of_cell, cell=cell) for cell in ("another", CELLS[1].id)]  # without a result


@pytest.mark.parametrize("damage", [complete_twice, running_forever, another_value, *OF])
def test_a_study_that_contradicts_the_disk_is_made_again(folder: Path, damage: Any) -> None:
    leave(folder, CELLS[0], val_nll=2.0)
    for damaging in (damage, lambda _: None):
        with queue_of(folder):
            pass
        damaging(folder)
    trials = study(folder).get_trials()
    found = [(t.user_attrs["name"], t.state.name, t.value) for t in trials]
    assert found == [("cell0", "COMPLETE", 2.0)]
