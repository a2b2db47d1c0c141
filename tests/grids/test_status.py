import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import World  # pyright: ignore[reportMissingImports]
from filelock import FileLock

from lightning_app.commands.grid import status_command
from lightning_app.core.errors import UserError
from lightning_app.grids.display import bar
from lightning_app.runs.locks import is_held


def status(world: World, capsys: pytest.CaptureFixture[str]) -> str:
    assert status_command(world.grid, world.folder.parent) == 0
    return capsys.readouterr().out


# Over 5 s: twelve cells of 1 s.
def test_counts_running_cells_and_errors(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.write(seeds=1, delay=0.3, axes={"data.behaviour": ["crash", "stall", "ok"]})
    process = world.start()
    world.wait_for(lambda: len(world.lines("start")) >= 5)
    seen = [""]
    world.wait_for(lambda: seen.append(status(world, capsys)) or "/4 " in seen[-1])
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
    assert status_command(world.folder.name, world.folder.parent) == 0  # its file is elsewhere
    assert capsys.readouterr().out == text


def test_scripts_read_the_status_as_one_document(world: World, capsys) -> None:
    world.write(seeds=1, delay=0.3, axes={"data.behaviour": ["crash", "ok"]})
    process = world.start()
    told: list[dict] = [{}]

    def look() -> object:
        assert status_command(world.grid, world.folder.parent, as_json=True) == 0
        told.append(json.loads(capsys.readouterr().out))
        running = told[-1]["running"]
        return told[-1]["seconds_left"] is not None and any(each["step"] for each in running)

    world.wait_for(lambda: (world.folder / "plan.json").is_file())
    world.wait_for(look)
    process.communicate(timeout=60)
    seen = told[-1]
    assert seen["states"]["running"] == len(seen["running"]) > 0
    assert {each["max_steps"] for each in seen["running"] if each["step"]} == {4}
    assert sum(seen["states"].values()) == seen["cells"] == 8
    for state, count in seen["states"].items():
        assert sum(each[state] for each in seen["variants"].values()) == count
    look()
    end = told[-1]
    assert (end["states"]["ok"], end["states"]["failed"], end["seconds_left"]) == (4, 4, None)
    assert [each["error"] for each in end["failed"]] == ["ValueError: a bad day"] * 4


def test_a_terminal_gets_a_bar_as_long_as_the_counts_say() -> None:
    states = {"ok": 1, "diverged": 0, "failed": 29, "waiting": 70}
    for width in (3, 40, 80):
        text = bar(states, width).plain
        assert len(text) == width
        assert [text.count(character) > 0 for character in "█▓×·"] == [True, False, True, True]
        assert text.count("×") == pytest.approx(0.29 * width, abs=2)
    assert bar({"ok": 7}, 20).plain == "█" * 20


def test_before_anything_is_planned(world: World) -> None:
    with pytest.raises(UserError, match="holds no plan"):
        status_command(world.grid, world.folder.parent)


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


@pytest.mark.xdist_group("finished")
def test_other_cells_than_those_of_the_file_are_refused(four: World) -> None:
    """Another base, other axes, other exclusions: the states would be those of other cells."""
    text = four.grid.read_text()
    changed: list[dict[str, Any]] = [{"axes": {"data.behaviour": ["ok"]}}, {"steps": 9}]
    for changes in changed:
        four.write(seeds=1, delay=0, **changes)
        with pytest.raises(UserError, match="holds another grid"):
            status_command(four.grid, four.folder.parent)
    four.grid.write_text(text.replace("Does it run?", "Another question?"))
    assert status_command(four.grid, four.folder.parent) == 0


def test_a_lock_is_seen_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another user may only be read."""
    lock, opened = tmp_path / ".lock", os.open

    def read_only(path: Path, flags: int, *mode: int, **more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "read-only")
        return opened(path, flags, *mode, **more)

    held = FileLock(lock)
    held.acquire()
    monkeypatch.setattr(os, "open", read_only)
    assert is_held(lock)
    assert is_held(lock)
    held.release()
    assert not is_held(lock)
    assert not is_held(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])
