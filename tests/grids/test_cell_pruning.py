"""Real cells, trained in a grid with a pruner."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import warm
from tests.small import tiny_config

STEPS = 40


def grid(folder: Path, cache: str, **changes: Any) -> Path:
    """Five cells that learn, then one whose rate is far too small."""
    trainer = {"max_steps": STEPS, "val_check_interval": 4, "log_every_n_steps": 2}
    base = tiny_config({**trainer, "limit_val_batches": 1}, data__cache=cache)
    rates, seeds = "model.optimizer.lr", list(range(1, 6))
    tree = {
        "name": "rates",
        "base_config": base,
        "axes": {rates: [4.0e-3, 1.0e-9], "seed_everything": seeds},
        "exclude": [{rates: 1.0e-9, "seed_everything": seed} for seed in seeds[:-1]],
        "pruner": "median",
    }
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump(tree | changes, sort_keys=False))
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
    path, experiments = grid(tmp_path, cache, checkpoints="best"), tmp_path / "experiments"
    where = ["--experiments", str(experiments)]
    # One worker: five cells have ended before the sixth begins, and none of them can be pruned.
    given = ["--workers", "1", "--devices-per-cell", str(devices)]
    said = ablate("run", str(path), *where, *given)
    assert re.search(r"rates: 6 cells: .*1 pruned\n", said), said
    folders = sorted((experiments / "rates" / "runs").iterdir())
    (pruned,) = [folder for folder in folders if (folder / "pruned.json").exists()]
    assert not (pruned / "result.json").exists()
    left = json.loads((pruned / "pruned.json").read_text())
    assert left["name"] == pruned.name
    assert "lr1e-09-seed5" in pruned.name
    assert left["status"] == "pruned"
    assert 4 <= left["step"] < STEPS
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
            assert result["devices"] == devices
            assert len(result["slot"]["devices"]) == devices
    said = ablate("status", str(path), *where)
    assert re.search(r"rates: 6 cells: .*1 pruned\n", said), said
    page = (experiments / "rates" / "report.html").read_text()
    assert re.search(r"5 of 6 planned cells finished: (none of them|of them \d) .*, 1 prun", page)
    assert pruned.name not in page
    assert "no sensitivity is" in page
    scores = (experiments / "rates" / "sensitivity.csv").read_text().splitlines()
    assert len(scores) == 1  # its head alone
