"""Cells of a grid in packs: one process for several, and the same results after a kill."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import Grid, load_plan
from lightning_app.grids.supervisor import Running
from lightning_app.runs.folder import AttemptFolder, GridFolder
from tests import warm

BASE = {
    "trainer": {"max_steps": 60, "val_check_interval": 10, "log_every_n_steps": 5},
    "model": {
        "pack": 3,
        "architecture": {"kind": "decoder", "decoder_depth": 1, "model_dim": 8, "ff_dim": 8},
        "objective": {"kind": "causal_lm", "evaluate_test": False},
        "schedule": {"kind": "constant"},
    },
    "data": {"name": "synthetic", "tokenizer": "word", "vocab_size": None, "window": 16},
}


def write(path: Path, cache: str, **fields: Any) -> Path:
    tree = json.loads(json.dumps(BASE))
    tree["trainer"] |= {"limit_val_batches": 2, "accelerator": "cpu"}
    tree["model"]["architecture"] |= {"num_heads": 2, "dropout": 0.0}
    tree["data"] |= {"cache": cache, "tokens_per_batch": 256}
    axes = {"seed_everything": 1, "model.optimizer.lr": [1e-3, 2e-3]}
    axes |= {"model.schedule.warmup_steps": [0, 5], "model.block.preset": ["pre_ln", "sas"]}
    grid = {"name": "packs", "base_config": tree, "axes": axes, "checkpoints": "last", **fields}
    path.write_text(yaml.safe_dump(grid))
    return path


def run(grid: Path, experiments: Path) -> warm.Process:
    words = ["run", str(grid), "--experiments", str(experiments), "--workers", "1"]
    return warm.start(["-m", "lightning_app", *words])


def results(experiments: Path) -> dict[str, Any]:
    found = {}
    for path in (experiments / "packs" / "runs").glob("*/result.json"):
        result = json.loads(path.read_text())
        kept = ("id", "outcome", "steps", "tokens", "validation_parts")
        found[path.parent.name] = {name: result[name] for name in kept}
    return found


def test_cells_of_a_wiring_and_seed_share_a_process_and_survive_a_kill(
    tmp_path: Path, cache: str
) -> None:
    grid = write(tmp_path / "packs.yaml", cache)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    process = run(grid, whole)
    assert process.wait(timeout=300) == 0, process.communicate()[1][-3000:]
    logs = [path.read_text() for path in (whole / "packs" / "runs").glob("*/attempts/1/log.txt")]
    led = [text for text in logs if text.startswith("in a pack with")]
    assert (len(logs), len(led)) == (8, 4)  # 2 wirings of 4 cells: packs of 3 and 1 each
    process, until = run(grid, cut), time.monotonic() + 300
    while not list((cut / "packs" / "runs").glob("*/checkpoints/last.ckpt")):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    process = run(grid, cut)
    assert process.wait(timeout=300) == 0, process.communicate()[1][-3000:]
    assert len(results(whole)) == 8
    assert results(cut) == results(whole)
    plan = load_plan(cut / "packs" / "plan.json")
    assert plan is not None
    planned = Grid(read_spec(str(grid)), GridFolder(cut / "packs"), plan)
    assert len({planned.pack(cell) for cell in planned.cells}) == 2


def test_the_cells_of_a_pack_move_and_end_together(tmp_path: Path) -> None:
    jobs = [SimpleNamespace(record=AttemptFolder(tmp_path / name), is_over=False) for name in "ab"]
    pack: list[Running] = []
    for job in jobs:
        job.record.path.mkdir()
        pack.append(Running(cast(Any, None), cast(Any, job), [], pack, moved=0.0))
    jobs[0].is_over = True  # its group came first
    jobs[1].record.progress.write_text("{}")
    for each in pack:
        each.look()
    assert pack[0].moved == pack[1].moved > 0.0
    assert [each.is_over for each in pack] == [False, False]
    jobs[1].is_over = True
    assert [each.is_over for each in pack] == [True, True]


def test_several_devices_are_refused(tmp_path: Path, cache: str) -> None:
    grid = write(tmp_path / "packs.yaml", cache)
    words = ["run", str(grid), "--experiments", str(tmp_path), "--devices-per-cell", "2"]
    done = warm.run(["-m", "lightning_app", *words])
    assert done.returncode == 2
    assert done.stderr.startswith("ablate: --devices-per-cell: 2")


@pytest.mark.parametrize("fields", [{"checkpoints": "all"}, {"pruner": "median"}])
def test_a_grid_of_packs_keeps_last_checkpoints(
    tmp_path: Path, cache: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"model\.pack"):
        read_spec(str(write(tmp_path / "packs.yaml", cache, **fields)))
