"""Two versions of the code in one grid, with the real program: each command names both."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from lightning_app.commands.grid import plan_command, report_command
from lightning_app.runs.provenance import code_digest
from tests import warm
from tests.small import tiny_config
from tests.told import told

ROOT = Path(__file__).parents[2]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def run(folder: Path, code: Path, cache: str, seeds: list[int]) -> None:
    base = tiny_config({"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1})
    tree = {"name": "two", "base_config": base, "axes": {"seed_everything": seeds}}
    (folder / "two.yaml").write_text(yaml.safe_dump(tree))
    words = ["-m", "lightning_app", "run", "two.yaml", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(code), "LIGHTNING_APP_CACHE": cache}
    if code == ROOT:
        done = warm.run(words, folder=folder, environment=environment)
    else:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def test_every_command_names_both(tmp_path: Path, cache: str, capsys, monkeypatch) -> None:
    """Takes over 5 s: the other version starts cold."""
    ours = code_digest(ROOT / "lightning_app")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "lightning_app", copy / "lightning_app")
    edit(copy / "lightning_app" / "blocks" / "norm.py", "The norms over", "Norms over")
    (copy / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "recompute_study.py", copy / "docs")  # a report has a copy of it
    (copy / "tests").mkdir()
    (copy / "tests" / "test_norm.py").write_text("assert 1 + 1 == 2\n")
    assert code_digest(copy / "lightning_app") == ours

    run(tmp_path, ROOT, cache, [1])
    edit(copy / "lightning_app" / "blocks" / "linear.py", "SMALL = 2**20", "SMALL = 2**19")
    theirs = code_digest(copy / "lightning_app")
    assert theirs != ours
    run(tmp_path, copy, cache, [1, 2])

    grid, experiments = tmp_path / "two.yaml", tmp_path / "experiments"
    names = {}
    for path in (experiments / "two" / "runs").glob("*/result.json"):
        result = json.loads(path.read_text())
        if result["provenance"]["code"] == theirs:
            assert result["provenance"]["commit"] is None  # the copy is no checkout
        assert str(tmp_path) not in json.dumps(result["provenance"])
        names[result["provenance"]["code"]] = result["name"]
    assert set(names) == {ours, theirs}

    monkeypatch.setenv("LIGHTNING_APP_CACHE", cache)
    assert plan_command(grid, experiments) == 0
    said = capsys.readouterr().out
    assert told(f"1 … ({theirs}").search(said)
    assert names[theirs] in said
    assert plan_command(grid, experiments, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["stale"] == {"code": {theirs: [names[theirs]]}}

    assert report_command(grid, experiments, as_json=True) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["mixtures"]["code"] == {code: [n] for code, n in names.items()}
    assert told("Mixed: … 2").search(out.err)
    page = (experiments / "two" / "report.html").read_text(encoding="utf-8")
    assert page.count(ours)
    assert page.count(theirs)
