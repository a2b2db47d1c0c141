"""`ablate plan` on a real config whose runs are written by hand: what is counted, what it costs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_app.commands.grid import plan_command
from lightning_app.config.config import resolve
from lightning_app.grids.plan import load_plan
from lightning_app.grids.program import seconds_per_step
from lightning_app.grids.slots import default_workers
from tests.records import pruned, result
from tests.told import told

NAME = "small"
CELLS = 12
NONE = {"warmup_steps": 0}
PARAMETERS = re.compile(r"pre_ln +\d+ +\d+ +([\d,]+)")


def write(root: Path, **changes: Any) -> Path:
    sizes = {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 16, "ff_dim": 16, "num_heads": 2}
    sizes = changes.pop("sizes", sizes)
    tree = {
        "name": NAME,
        "base_config": {
            "trainer": {"max_steps": 10},
            "model": {"block": {"preset": "pre_ln"}, "architecture": sizes, "schedule": NONE},
            "data": {"name": "synthetic", "tokenizer": "word", "vocab_size": 100},
        },
        "axes": {"seed_everything": list(range(1, CELLS + 1))},
    }
    trainer = changes.pop("trainer", {})
    tree["base_config"]["trainer"] |= trainer
    grid = root / f"{NAME}.yaml"
    grid.write_text(yaml.safe_dump(tree | changes))
    return grid


def planned(grid: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert plan_command(grid, grid.parent) == 0
    return capsys.readouterr().out


def end(root: Path, count: int, name: str = "result.json", other_bytes: int = 0) -> None:
    """Write `count` finished runs with `other_bytes` besides their checkpoints."""
    plan = load_plan(root / NAME / "plan.json")
    assert plan is not None
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


def test_devices_of_a_cell_are_said_where_there_are_several(tmp_path: Path, capsys) -> None:
    assert "devices:" not in planned(write(tmp_path), capsys)
    text = planned(write(tmp_path, trainer={"devices": 2}), capsys)
    assert "\ndevices: 2 for each cell\n" in text


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
    before = torch.get_num_threads()
    assert seconds_per_step(resolve(tree, "test"), steps=3) > 0
    assert torch.get_num_threads() == before == 1
