"""Finished runs of an earlier version, of another grid, and after a value or an axis went."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.commands.grid import plan_command, status_command
from lightning_app.config.config import resolve
from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.grids.doctor import doctor_command
from lightning_app.grids.plan import Grid, expand, load_plan
from lightning_app.grids.supervisor import current_grid
from lightning_app.grids.takeover import Search, find_finished, take_over
from lightning_app.report.results import read_results as read_folder
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.records import Plan

FORMER = Path(__file__).parent / "made_at_4ea995c"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A grid and its folder as commit 4ea995c has left them."""
    shutil.copytree(FORMER / "former", tmp_path / "experiments" / "former")
    shutil.copy(FORMER / "former.yaml", tmp_path)
    return tmp_path


def planned(root: Path, name: str = "former", **changes: Any) -> Grid:
    """The grid with changes to its file, and with a new plan."""
    tree = yaml.safe_load((FORMER / "former.yaml").read_text()) | {"name": name}
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) else value
    grid = root / f"{name}.yaml"
    grid.write_text(yaml.safe_dump(tree))
    return grid_of(grid)


def grid_of(path: Path) -> Grid:
    spec = read_spec(path)
    folder = GridFolder(path.parent / "experiments" / spec.name)
    return Grid(spec, folder, expand(spec, resolve, identity_of)[0])


def states(grid: Grid) -> list[str]:
    return [grid.state(cell).state for cell in grid.cells]


def strays(grid: Grid) -> list[str]:
    return [run.name for run in grid.folder.strays({cell.name for cell in grid.cells})]


def edit(path: Path, change: Edit) -> None:
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))


def test_a_folder_of_4ea995c_is_finished_for_every_command(
    former: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, experiments = former / "former.yaml", former / "experiments"
    folder = experiments / "former"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert status_command(grid, experiments) == 0
    assert "former: 4 cells: 1 not yet learned, 3 stalled" in capsys.readouterr().out
    assert plan_command(grid, experiments) == 0
    assert "4 cells, 0 excluded, 4 done, 0 failed, 0 to run" in capsys.readouterr().out
    assert doctor_command(grid, experiments) == 0
    assert "4 results have no seal" in capsys.readouterr().out
    assert len(read_folder(folder).finished) == 4
    assert {path: path.read_bytes() for path in before} == before  # these were looks
    then = load_plan(folder / "plan.json")
    spec = read_spec(grid)
    made = current_grid(
        spec, GridFolder(folder), lambda: expand(spec, resolve, identity_of)[0], alone=True
    )
    assert then is not None
    assert made.plan.cells == then.cells
    assert states(made) == ["done"] * 4
    assert find_finished(made) == Search([], [])
    assert doctor_command(grid, experiments, seal=True) == 0
    assert "4 results sealed: sound" in capsys.readouterr().out
    assert states(planned(former)) == ["done"] * 4


@pytest.mark.parametrize("name", ["plan.json", "result.json", "pruned.json"])
def test_a_record_of_schema_1_is_refused_and_stays(
    former: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, experiments = former / "former.yaml", former / "experiments"
    plan = load_plan(experiments / "former/plan.json")
    assert plan is not None
    run = experiments / "former/runs" / plan.cells[0].name
    path = experiments / "former" / name if name == "plan.json" else run / name
    (run / "result.json").rename(run / "pruned.json") if name == "pruned.json" else None
    edit(path, lambda tree: tree.update(schema=1))
    before = path.read_bytes()
    said = rf"{name}: schema 1: .* commit \w{{7}} is the last to read; move its folder away"
    commands = [read_folder, lambda folder: status_command(grid, experiments)]
    for command in commands if name != "pruned.json" else ():  # without a pruner it is not read
        with pytest.raises(UserError, match=said):
            command(experiments / "former")
    if name != "plan.json":
        run.rename(run.with_name("stray"))
        assert doctor_command(grid, experiments, fix=True) == 1
        out = capsys.readouterr().out
        assert "schema 1: made by an early version" in out
        path = run.with_name("stray") / name
    assert path.read_bytes() == before


def test_cells_are_found_under_another_grids_name(former: Path) -> None:
    other = planned(former, name="other", checkpoints="none")
    found = find_finished(other).found
    assert len(found) == 4
    assert take_over(other, found) == [
        f"4 cells are finished in {former / 'experiments' / 'former'}: taken over"
    ]
    assert states(other) == ["done"] * 4
    assert states(planned(former)) == ["done"] * 4  # copied, not moved


def test_cells_are_found_after_a_value_or_an_axis_is_removed(former: Path) -> None:
    fewer = {"model.block.preset": ["pre_ln"], "model.schedule.warmup_steps": [2]}
    grid = planned(former, axes=fewer)
    assert states(grid) == ["done"]
    assert len(strays(grid)) == 3
    tree = yaml.safe_load((FORMER / "former.yaml").read_text())
    tree["base_config"]["model"]["schedule"]["warmup_steps"] = 2
    tree["axes"] = {"model.block.preset": ["pre_ln"]}
    (former / "former.yaml").write_text(yaml.safe_dump(tree))
    grid = grid_of(former / "former.yaml")
    assert states(grid) == ["missing"]  # the name of its folder is another
    take_over(grid, find_finished(grid).found)
    assert states(grid) == ["done"]


def test_a_look_does_not_rewrite_a_plan(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    grid = planned(tmp_path, base_config=base)
    grid.folder.path.mkdir(parents=True)
    made = []

    def make() -> Plan:
        made.append(expand(grid.spec, resolve, identity_of)[0])
        return made[-1]

    def current(alone: bool) -> Grid:
        return current_grid(grid.spec, grid.folder, make, alone)

    assert current(alone=True).plan == grid.plan
    assert current(alone=True).plan == grid.plan
    assert len(made) == 1
    grid.folder.specification.write_text("[torn")
    assert current(alone=True).plan == grid.plan
    assert read_spec(grid.folder.specification).tree() == grid.spec.tree()
    grid.folder.plan.write_text("{")
    assert current(alone=True).plan == grid.plan
    assert len(made) == 2
    (corpus / "train.de").write_text("eins\ndrei\n")
    again = current(alone=True)
    assert len(made) == 3
    assert not {cell.id for cell in again.cells} & {cell.id for cell in grid.cells}
    (corpus / "train.de").write_text("eins\nvier\n")
    with pytest.raises(UserError, match=r"from another version of .*, of its corpus or of this"):
        current(alone=False)
