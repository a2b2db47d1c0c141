"""A grid file cannot have code imported or run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.ablation.grid import read_grid
from lightning_app.errors import UserError

TRAP = "import pathlib; pathlib.Path(__file__).with_name('sprung').touch()\nclass Trap: pass\n"


def write(folder: Path, trainer: dict[str, Any], **axes: Any) -> Path:
    path = folder / "grid.yaml"
    seeds = {"seed_everything": [1]}
    tree = {"name": "trap", "base_config": {"trainer": trainer}, "axes": {**seeds, **axes}}
    path.write_text(yaml.safe_dump(tree))
    return path


FORMS = [
    {"callbacks": [{"class_path": "trap.Trap"}]},
    {"callbacks": {"class_path": "trap.Trap"}},
    {"callbacks": ["trap.Trap"]},
    {"callbacks": "trap.Trap"},
    {"logger": {"class_path": "trap.Trap"}},
    {"strategy": "trap.Trap"},
    {"strategy": {"class_path": "trap.Trap"}},
    {"plugins": [{"class_path": "trap.Trap"}]},
    {"profiler": "trap.Trap"},
    {
        "callbacks": [
            {
                "class_path": "lightning.pytorch.callbacks.LambdaCallback",
                "init_args": {"on_fit_start": "trap.Trap"},
            }
        ]
    },
    {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"setup": "exit"}}]},
]


@pytest.mark.parametrize("trainer", FORMS, ids=[str(form)[:50] for form in FORMS])
def test_code_is_not_imported(tmp_path: Path, trainer: dict[str, Any]) -> None:
    (tmp_path / "trap.py").write_text(TRAP)
    grid = write(tmp_path, trainer)
    result = subprocess.run(
        [sys.executable, "-m", "lightning_app", "plan", str(grid)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "may not name code to import" in result.stderr
    assert not (tmp_path / "sprung").exists()


def test_an_axis_cannot_either(tmp_path: Path) -> None:
    grid = write(tmp_path, {}, **{"trainer.callbacks": [None, [{"class_path": "os.Trap"}]]})
    with pytest.raises(UserError, match=r"trainer\.callbacks\.class_path: .* found 'os\.Trap'"):
        read_grid(grid)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system [id]", "!!python/name:os.system"])
def test_yaml_tags_of_python_are_refused(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(f"name: trap\nbase_config: {{}}\naxes:\n  seed_everything: {tag}\n")
    with pytest.raises(UserError, match="could not determine a constructor"):
        read_grid(path)


def test_known_callbacks_stay_possible(tmp_path: Path) -> None:
    probe = {"class_path": "lightning_app.callbacks.probes.SignalProbe"}
    rate = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}
    grid = read_grid(write(tmp_path, {"callbacks": [probe, rate], "max_steps": 2}))
    assert grid.base_config["trainer"]["callbacks"] == [probe, rate]


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/b", "..", ".hidden", "a\nb", ""])
def test_a_name_cannot_leave_the_experiments_folder(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, {})
    path.write_text(path.read_text().replace("name: trap", f"name: {name!r}"))
    with pytest.raises(UserError, match="name: expected letters"):
        read_grid(path)
