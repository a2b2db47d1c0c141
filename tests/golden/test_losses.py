"""Training gives the numbers that the golden files hold: see `losses.py`."""

import re

import pytest

from lightning_app.blocks.presets import PRESETS
from tests import warm
from tests.golden.losses import FOLDER, TOLERANCE, path_of, read, tasks, text_of, train


def test_every_task_has_a_file_and_every_file_a_task() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == tasks()


@pytest.mark.parametrize("task", tasks())
def test_every_preset_has_its_losses(task: str) -> None:
    held = read(task)
    assert list(held["losses"]) == list(PRESETS)
    assert held["config"]["model"]["objective"]["kind"] == task
    assert {len(row) for row in held["losses"].values()} == {10}
    assert all(note["reason"] for note in held["written"])


@pytest.mark.parametrize("task", tasks())
def test_every_preset_trains_differently(task: str) -> None:
    rows = [tuple(row) for row in read(task)["losses"].values()]
    assert len(set(rows)) == len(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", tasks())
@pytest.mark.in_turn(3)
def test_losses_are_the_golden_ones(task: str, preset: str, cache: str) -> None:
    held = read(task)
    found = train(held["config"], preset, cache)
    assert found == pytest.approx(held["losses"][preset], rel=TOLERANCE)


def test_files_are_written_with_a_reason() -> None:
    """The reason joins the former ones; the config stays."""
    task = tasks()[0]
    text = text_of(task, {"pre_ln": [2.0, 1.5]}, "a second head")
    held, before = read(task), path_of(task).read_text(encoding="utf-8")
    assert text.endswith("losses:\n  pre_ln: [2.000000, 1.500000]\n")
    assert len(re.findall("reason: ", text)) == len(held["written"]) + 1
    assert text.split("written:")[0] == before.split("written:")[0]


@pytest.mark.parametrize("arguments", [[], ["--reason", " "]], ids=["none", "empty"])
def test_without_a_reason_nothing_is_written(arguments: list[str]) -> None:
    before = {path: path.read_bytes() for path in FOLDER.glob("*.yaml")}
    done = warm.run(["-m", "tests.golden.losses", *arguments])
    assert done.returncode == 2
    assert "--reason" in done.stderr
    assert {path: path.read_bytes() for path in FOLDER.glob("*.yaml")} == before
