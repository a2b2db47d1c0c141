"""`ablate plan` and `ablate status`: what is counted, and what it costs."""

import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from conftest import World  # pyright: ignore[reportMissingImports]
from filelock import FileLock

from lightning_app.commands.grid import plan_command, status_command
from lightning_app.config.config import resolve
from lightning_app.grids.display import bar
from lightning_app.grids.plan import load_plan
from lightning_app.grids.program import seconds_per_step
from lightning_app.grids.slots import default_workers
from lightning_app.runs.locks import is_held
from tests.records import pruned, result
from tests.told import told

NAME = "small"
CELLS = 12
NONE = {"warmup_steps": 0}
PARAMETERS = re.compile(r"pre_ln +\d+ +\d+ +([\d,]+)")


def write(root: Path, **changes: Any) -> Path:
    sizes = {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 16, "ff_dim": 16, "num_heads": 2}
    sizes = changes.pop("sizes", sizes)
    model = {"block": {"preset": "pre_ln"}, "architecture": sizes, "schedule": NONE}
    data = {"name": "synthetic", "tokenizer": "word", "vocab_size": 100}
    base = {"trainer": {"max_steps": 10}, "model": model, "data": data}
    axes = {"seed_everything": list(range(1, CELLS + 1))}
    tree = {"name": NAME, "base_config": base, "axes": axes}
    grid = root / f"{NAME}.yaml"
    grid.write_text(yaml.safe_dump(tree | changes))
    return grid


def planned(grid: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert plan_command(grid, grid.parent) == 0
    return capsys.readouterr().out


def end(root: Path, count: int, name: str = "result.json", other_bytes: int = 0) -> None:
    """Write `count` finished runs with `other_bytes` besides their checkpoints."""
    plan: Any = load_plan(root / NAME / "plan.json")
    for cell in plan.cells[:count]:
        folder = root / NAME / "runs" / cell.name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "last.ckpt").write_bytes(bytes(12345))
        (folder / "log").write_bytes(bytes(other_bytes))
        tree = (pruned if name == "pruned.json" else result)(cell.id, seconds=3.0)
        (folder / name).write_text(json.dumps(tree))


def megabytes(text: str) -> float:
    found = re.search(r"disk: about ([\d,]+) MB", text)
    assert found
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("policy", "kept", "says"),
    [
        ("all", 2, "the last and"),
        ("last", 1, "the last checkpoint"),
        ("best", 1, "the best checkpoint"),
        ("none", 0, "no checkpoint is"),
    ],
)
def test_disk_by_what_is_kept(tmp_path: Path, capsys, policy: str, kept: int, says: str) -> None:
    wide = {"model_dim": 512, "ff_dim": 512, "encoder_depth": 1, "decoder_depth": 1}
    grid = write(tmp_path, checkpoints=policy, sizes=wide)
    text = planned(grid, capsys)
    assert told(f"MB in all; {says}\n").search(text)
    found = PARAMETERS.search(text)
    assert found
    checkpoint = 12 * int(found[1].replace(",", ""))  # and Adam's two numbers for each
    running = min(default_workers(), CELLS)  # each has both
    expected = (CELLS * kept + running * (2 - kept)) * checkpoint
    assert megabytes(text) == pytest.approx(expected / 1e6, abs=1)


def test_other_files_are_measured_on_finished_runs(tmp_path: Path, capsys) -> None:
    grid = write(tmp_path, checkpoints="none")
    before = megabytes(planned(grid, capsys))
    end(tmp_path, 2, other_bytes=1_000_000)
    assert megabytes(planned(grid, capsys)) - before == pytest.approx(CELLS, abs=2)


def test_pruned_cells_are_not_to_run_where_the_grid_has_a_pruner(tmp_path: Path, capsys) -> None:
    grid = write(tmp_path, pruner="median")
    assert "12 cells, 0 excluded, 0 done, 0 failed, 12" in planned(grid, capsys)
    end(tmp_path, 3, "pruned.json")
    assert "12 cells, 0 excluded, 0 done, 3 pruned, 0 failed, 9" in planned(grid, capsys)
    write(tmp_path)
    assert "12 cells, 0 excluded, 0 done, 0 failed, 12" in planned(grid, capsys)


def test_scripts_read_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = write(tmp_path)
    planned(grid, capsys)
    end(tmp_path, 1)
    text = planned(grid, capsys)
    assert plan_command(grid, grid.parent, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    states = told["states"]
    assert f"{states['done']} done, {states['failed']} failed, {states['to_run']}" in text
    assert (states["done"], told["cells"]) == (1, CELLS)
    assert told["seconds_left"] * told["workers"] == pytest.approx(3.0 * (CELLS - 1))
    assert f"tokens: {told['tokens']:,} in all" in text
    assert megabytes(text) == round(told["bytes"] / 1e6)
    (shape,) = told["shapes"]
    assert shape["tokens"] * CELLS == told["tokens"]


def test_a_few_steps_of_a_linear_schedule_are_measured(cache: str) -> None:
    """The schedule is that of the whole run: its decay begins after the steps measured."""
    tree = yaml.safe_load(Path("ablations/base/synthetic_mlm.yaml").read_text())
    tree["model"]["architecture"] |= {"encoder_depth": 1, "model_dim": 8, "num_heads": 2}
    tree["data"]["cache"] = cache
    given = f"{pl.__name__}.callbacks"  # the first needs a logger, the second checkpoints
    saver = {"class_path": f"{given}.ModelCheckpoint", "init_args": {"every_n_train_steps": 9}}
    tree["trainer"]["callbacks"] = [{"class_path": f"{given}.LearningRateMonitor"}, saver]
    before = torch.get_num_threads()
    assert seconds_per_step(resolve(tree, "test"), steps=3) > 0
    assert torch.get_num_threads() == before == 1


def status(world: World, capsys: pytest.CaptureFixture[str]) -> str:
    assert status_command(world.grid, world.folder.parent) == 0
    return capsys.readouterr().out


def document(world: World, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert status_command(world.grid, world.folder.parent, as_json=True) == 0
    return json.loads(capsys.readouterr().out)


# Over 5 s: twelve cells of 1 s.
def test_counts_running_cells_and_errors(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.write(seeds=1, delay=0.3, axes={"data.behaviour": ["crash", "stall", "ok"]})
    process = world.start()
    world.wait_for(lambda: len(world.lines("start")) >= 5)
    seen, tree = [""], document(world, capsys)

    def both_show_a_step() -> bool:
        seen.append(status(world, capsys))
        tree.update(document(world, capsys))
        return "/4 " in seen[-1] and any(each["step"] for each in tree["running"])

    world.wait_for(both_show_a_step)
    assert tree["states"]["running"] == len(tree["running"]) > 0
    assert {each["max_steps"] for each in tree["running"] if each["step"]} == {4}
    assert sum(tree["states"].values()) == tree["cells"] == 12
    for state, count in tree["states"].items():
        assert sum(each[state] for each in tree["variants"].values()) == count
    assert tree["seconds_left"] is not None
    assert "tiny: 12 cells: " in seen[-1]
    assert re.search(r" [12] running", seen[-1])
    assert re.search(r"_ln-warmup\d+-seed1-\S+ +[0-3]/4 +50\.0 +3\.000", seen[-1])
    assert re.search(r"time left: 0:00:\d\d with [12] workers", seen[-1])
    process.send_signal(signal.SIGKILL)
    process.communicate()
    world.assert_nothing_left()
    assert "running" not in status(world, capsys)
    assert world.run().returncode == 0
    text = status(world, capsys)
    assert "tiny: 12 cells: 4 ok, 4 stalled, 4 failed\n" in text
    assert text.count(": ValueError: a bad day\n") == 4
    end = document(world, capsys)
    assert (end["states"]["ok"], end["states"]["failed"], end["seconds_left"]) == (4, 4, None)
    assert [each["error"] for each in end["failed"]] == ["ValueError: a bad day"] * 4
    assert status_command(world.folder.name, world.folder.parent) == 0  # its file is elsewhere
    assert capsys.readouterr().out == text


def test_a_terminal_gets_a_bar_as_long_as_the_counts_say() -> None:
    states = {"ok": 1, "diverged": 0, "failed": 29, "waiting": 70}
    for width in (3, 40, 80):
        text = bar(states, width).plain
        assert len(text) == width
        assert [text.count(character) > 0 for character in "█▓×·"] == [True, False, True, True]
        assert text.count("×") == pytest.approx(0.29 * width, abs=2)
    assert bar({"ok": 7}, 20).plain == "█" * 20


@pytest.mark.xdist_group("finished")
def test_a_torn_progress_file_is_no_progress(four: World, capsys) -> None:
    run = four.folder / "runs" / next(iter(four.runs()))
    (run / "attempts" / "1" / "progress.json").write_text('{"step": 1')
    (run / "result.json").unlink()
    assert "3 ok, 1 waiting" in status(four, capsys)
    assert json.loads((four.folder / "plan.json").read_text())["name"] == "tiny"


def test_pruned_cells_count_where_the_grid_has_a_pruner(world: World, capsys) -> None:
    axes = {"model.schedule.warmup_steps": [0]}
    world.write(seeds=2, steps=1, axes=axes)
    world.run()
    name = next(iter(world.runs()))
    result = world.folder / "runs" / name / "result.json"
    tree = {**json.loads(result.read_text()), "status": "pruned", "step": 1, "value": 9.0}
    result.with_name("pruned.json").write_text(json.dumps(tree))
    result.unlink()
    assert "tiny: 4 cells: 3 ok, 1 waiting\n" in status(world, capsys)
    world.write(seeds=2, steps=1, axes=axes, pruner="median")
    assert "tiny: 4 cells: 3 ok, 1 pruned\n" in status(world, capsys)


def test_a_lock_is_seen_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, opened = tmp_path / ".lock", os.open

    def read_only(path: Path, flags: int, *mode: int, **more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "read-only")
        return opened(path, flags, *mode, **more)

    held = FileLock(lock)
    held.acquire()
    monkeypatch.setattr(os, "open", read_only)
    assert [is_held(lock), is_held(lock)] == [True, True]
    held.release()
    assert not is_held(lock)
    assert not is_held(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])
