"""Finished runs under other names: of another grid, after an axis went, and of schema 1."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.ablation.adoption import find_finished, strays, take_over
from lightning_app.ablation.commands import plan_command, status_command
from lightning_app.ablation.doctor.command import doctor_command
from lightning_app.ablation.grid import read_grid
from lightning_app.ablation.plan import Plan, expand, load_plan
from lightning_app.ablation.runs import read_run
from lightning_app.ablation.supervision.runner import current_plan
from lightning_app.analysis.grid_results import read_results as read_folder
from lightning_app.config import resolve
from lightning_app.errors import UserError
from lightning_app.experiment import identity_of

FORMER = Path(__file__).parent / "made_at_b91519c"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A grid and its folder as commit b91519c has left them."""
    shutil.copytree(FORMER / "former", tmp_path / "experiments" / "former")
    shutil.copy(FORMER / "former.yaml", tmp_path)
    return tmp_path


def planned(root: Path, name: str = "former", **changes: Any) -> tuple[Path, Plan]:
    """A plan of the grid, with changes to its file, and the folder of a grid of this name."""
    tree = yaml.safe_load((FORMER / "former.yaml").read_text()) | {"name": name}
    for key, value in changes.items():
        tree[key] = tree[key] | value
    grid = root / f"{name}.yaml"
    grid.write_text(yaml.safe_dump(tree))
    return root / "experiments" / name, expand(read_grid(grid), resolve, identity_of)[0]


def states(folder: Path, plan: Plan) -> list[str]:
    return [read_run(folder, cell).state for cell in plan.cells]


def edit(path: Path, change: Edit) -> None:
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))


def test_a_folder_of_b91519c_is_finished_for_every_command(
    former: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, experiments = former / "former.yaml", former / "experiments"
    folder = experiments / "former"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert status_command(grid, experiments) == 0
    assert "former: 4 cells: 4 stalled" in capsys.readouterr().out
    assert plan_command(grid, experiments) == 0
    text = capsys.readouterr().out
    assert "4 cells, 0 excluded, 4 done, 0 failed, 0 to run" in text
    assert "4 of them finished under another name: taken over by run" in text
    assert len(read_folder(folder).finished) == 4
    assert {path: path.read_bytes() for path in before} == before  # these were looks
    spec = read_grid(grid)
    plan = current_plan(spec, folder, lambda: expand(spec, resolve, identity_of)[0], alone=True)
    assert capsys.readouterr().out == f"4 cells are finished in {folder}: taken over\n"
    assert states(folder, plan) == ["done"] * 4
    assert load_plan(folder) == plan
    assert sorted(path.name for path in (folder / "runs").iterdir()) == sorted(
        cell.name for cell in plan.cells
    )
    assert len(read_folder(folder).finished) == 4
    assert status_command(grid, experiments) == 0
    assert find_finished(folder, plan) == []
    record = json.loads((folder / "runs" / plan.cells[0].name / "result.json").read_text())
    assert (record["former_id"], record["id"]) == (plan.cells[0].former, plan.cells[0].id)


def test_doctor_takes_a_folder_of_b91519c_over(
    former: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, experiments = former / "former.yaml", former / "experiments"
    assert doctor_command(grid, experiments) == 1
    assert "is the finished run of the cell post_ln-warmup0-" in capsys.readouterr().out
    assert doctor_command(grid, experiments, fix=True) == 0
    assert "taken over as post_ln-warmup0-" in capsys.readouterr().out
    assert doctor_command(grid, experiments) == 0
    folder, plan = planned(former)
    assert states(folder, plan) == ["done"] * 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.yaml", lambda tree: tree["trainer"].update(callbacks=[{"class_path": "x.Y"}])),
        ("config.yaml", lambda tree: tree["trainer"].update(strategy="deepspeed")),
        ("block.json", lambda tree: tree["encoder"].update(final_norm="rms_norm")),
        ("result.json", lambda tree: tree["data"].update(checksum="0123456789abcdef")),
        ("result.json", lambda tree: tree.pop("data")),
        ("result.json", lambda tree: tree.update(status="fine")),
    ],
)
def test_what_ids_of_schema_1_left_out_is_compared(former: Path, name: str, change: Edit) -> None:
    """These runs had the same id as the planned cell, and are other experiments."""
    folder, plan = planned(former)
    runs = sorted((folder / "runs").iterdir())
    edit(runs[0] / name, change)
    found = find_finished(folder, plan)
    assert sorted(each.folder for each in found) == runs[1:]
    assert strays(folder, plan) == [run.name for run in runs]


def test_a_damaged_run_of_schema_1_runs_again(former: Path) -> None:
    folder, plan = planned(former)
    runs = sorted((folder / "runs").iterdir())
    (runs[0] / "block.json").unlink()
    (runs[1] / "config.yaml").write_text("[torn")
    (runs[2] / "result.json").write_text("{")
    assert [each.folder for each in find_finished(folder, plan)] == runs[3:]


def test_cells_are_found_under_another_grids_name(former: Path) -> None:
    take_over_all(former)
    folder, plan = planned(former, name="other")
    found = find_finished(folder, plan)
    assert len(found) == 4
    assert take_over(folder, found, "all") == [
        f"4 cells are finished in {former / 'experiments' / 'former'}: taken over"
    ]
    assert states(folder, plan) == ["done"] * 4
    old, plan = planned(former)
    assert states(old, plan) == ["done"] * 4  # copied, not moved


def test_cells_are_found_after_a_value_or_an_axis_is_removed(former: Path) -> None:
    take_over_all(former)
    fewer = {"model.block.preset": ["pre_ln"], "model.schedule.warmup_steps": [60]}
    folder, plan = planned(former, axes=fewer)
    assert states(folder, plan) == ["done"]
    assert len(strays(folder, plan)) == 3
    tree = yaml.safe_load((FORMER / "former.yaml").read_text())
    tree["base_config"]["model"]["schedule"]["warmup_steps"] = 60
    tree["axes"] = {"model.block.preset": ["pre_ln"]}
    (former / "former.yaml").write_text(yaml.safe_dump(tree))
    plan = expand(read_grid(former / "former.yaml"), resolve, identity_of)[0]
    assert states(folder, plan) == ["missing"]  # the name of its folder is another
    take_over(folder, find_finished(folder, plan), "all")
    assert states(folder, plan) == ["done"]


def test_a_look_does_not_rewrite_a_plan(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take_over_all(former)
    grid, experiments = former / "former.yaml", former / "experiments"
    before = [(experiments / "former" / name).read_bytes() for name in ("grid.yaml", "plan.json")]
    tree = yaml.safe_load(grid.read_text())
    tree["axes"]["seed_everything"] = [1, 2]
    (former / "wider.yaml").write_text(yaml.safe_dump(tree))
    assert plan_command(former / "wider.yaml", experiments) == 0
    assert "8 cells, 0 excluded, 4 done, 0 failed, 4 to run" in capsys.readouterr().out
    after = [(experiments / "former" / name).read_bytes() for name in ("grid.yaml", "plan.json")]
    assert after == before
    assert status_command(grid, experiments) == 0
    with pytest.raises(UserError, match="its axes differ"):
        status_command(former / "wider.yaml", experiments)


def test_a_plan_holds_no_longer_once_its_corpus_is_edited(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.de").write_text("eins\nzwei\n")
        (corpus / f"{split}.en").write_text("one\ntwo\n")
    data = {"name": "text", "root": str(corpus), "tokenizer": "word", "vocab_size": None}
    base = yaml.safe_load((FORMER / "former.yaml").read_text())["base_config"] | {"data": data}
    folder, plan = planned(tmp_path, base_config=base)
    spec = read_grid(tmp_path / "former.yaml")
    folder.mkdir(parents=True)
    made = []

    def make() -> Plan:
        made.append(expand(spec, resolve, identity_of)[0])
        return made[-1]

    assert current_plan(spec, folder, make, alone=True) == plan
    assert current_plan(spec, folder, make, alone=True) == plan
    assert len(made) == 1
    (corpus / "train.de").write_text("eins\ndrei\n")
    again = current_plan(spec, folder, make, alone=True)
    assert len(made) == 2
    assert not {cell.id for cell in again.cells} & {cell.id for cell in plan.cells}
    (corpus / "train.de").write_text("eins\nvier\n")
    with pytest.raises(UserError, match="on another state of its corpus"):
        current_plan(spec, folder, make, alone=False)


def take_over_all(root: Path) -> None:
    folder, plan = planned(root)
    assert len(take_over(folder, find_finished(folder, plan), "all")) == 1
    (folder / "plan.json").unlink()
    assert plan_command(root / "former.yaml", root / "experiments") == 0
