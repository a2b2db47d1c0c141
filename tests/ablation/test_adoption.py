"""Finished runs under other names: of another grid, after an axis went, and of schema 1."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.ablation.adoption import take_over
from lightning_app.ablation.doctor import doctor_command
from lightning_app.ablation.finished_elsewhere import Search, find_finished
from lightning_app.ablation.grid import Grid
from lightning_app.ablation.grid_spec import read_spec
from lightning_app.ablation.plan import Plan, expand, load_plan
from lightning_app.ablation.plan_command import plan_command
from lightning_app.ablation.status_command import status_command
from lightning_app.ablation.supervision.runner import current_grid
from lightning_app.analysis.read_results import read_results as read_folder
from lightning_app.config.config import resolve
from lightning_app.data.corpus import resolved_data
from lightning_app.data.prepare import prepare
from lightning_app.errors import UserError
from lightning_app.experiment import identity_of
from lightning_app.grid_folder import GridFolder
from lightning_app.optim import ScheduleConfig

FORMER = Path(__file__).parent / "made_at_b91519c"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module", autouse=True)
def unchecked_warmups() -> Iterator[None]:
    """The runs of that version have 2 steps, and warm-ups that are longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduleConfig, "check", lambda self, total: None)
        yield


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A grid and its folder as commit b91519c has left them."""
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
    assert "4 of them finished under another name: `ablate run` takes them over" in text
    assert len(read_folder(folder).finished) == 4
    assert {path: path.read_bytes() for path in before} == before  # these were looks
    spec = read_spec(grid)
    made = current_grid(
        spec, GridFolder(folder), lambda: expand(spec, resolve, identity_of)[0], alone=True
    )
    plan = made.plan
    assert capsys.readouterr().out == f"4 cells are finished in {folder}: taken over\n"
    assert states(made) == ["done"] * 4
    assert load_plan(folder / "plan.json") == plan
    assert sorted(path.name for path in (folder / "runs").iterdir()) == sorted(
        cell.name for cell in plan.cells
    )
    assert len(read_folder(folder).finished) == 4
    assert status_command(grid, experiments) == 0
    assert find_finished(made) == Search([], [])
    record = json.loads((folder / "runs" / plan.cells[0].name / "result.json").read_text())
    assert (record["former_id"], record["id"]) == (plan.cells[0].former, plan.cells[0].id)


def test_doctor_takes_a_folder_of_b91519c_over(
    former: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, experiments = former / "former.yaml", former / "experiments"
    assert doctor_command(grid, experiments) == 1
    assert "is the finished run of the cell post_ln-warmup0-" in capsys.readouterr().out
    assert doctor_command(grid, experiments, fix=True) == 0
    assert "fixed: take it over" in capsys.readouterr().out
    assert doctor_command(grid, experiments) == 0
    assert states(planned(former)) == ["done"] * 4


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
    grid = planned(former)
    runs = sorted(grid.folder.runs.iterdir())
    edit(runs[0] / name, change)
    found, refused = find_finished(grid)
    assert sorted(each.folder.path for each in found) == runs[1:]
    assert [each.folder.path for each in refused] == runs[:1]
    assert strays(grid) == [run.name for run in runs]


def test_a_damaged_run_of_schema_1_runs_again(former: Path) -> None:
    grid = planned(former)
    runs = sorted(grid.folder.runs.iterdir())
    (runs[0] / "block.json").unlink()
    (runs[1] / "config.yaml").write_text("[torn")
    (runs[2] / "result.json").write_text("{")
    found, refused = find_finished(grid)
    assert [each.folder.path for each in found] == runs[3:]
    assert {each.folder.name: each.reason.partition(":")[0] for each in refused} == {
        runs[0].name: "has no block.json",
        runs[1].name: "config.yaml",
        runs[2].name: "result.json",
    }


def test_cells_are_found_under_another_grids_name(former: Path) -> None:
    take_over_all(former)
    other = planned(former, name="other", checkpoints="none")
    found = find_finished(other).found
    assert len(found) == 4
    assert take_over(other, found) == [
        f"4 cells are finished in {former / 'experiments' / 'former'}: taken over"
    ]
    assert states(other) == ["done"] * 4
    assert states(planned(former)) == ["done"] * 4  # copied, not moved


def test_cells_are_found_after_a_value_or_an_axis_is_removed(former: Path) -> None:
    take_over_all(former)
    fewer = {"model.block.preset": ["pre_ln"], "model.schedule.warmup_steps": [60]}
    grid = planned(former, axes=fewer)
    assert states(grid) == ["done"]
    assert len(strays(grid)) == 3
    tree = yaml.safe_load((FORMER / "former.yaml").read_text())
    tree["base_config"]["model"]["schedule"]["warmup_steps"] = 60
    tree["axes"] = {"model.block.preset": ["pre_ln"]}
    (former / "former.yaml").write_text(yaml.safe_dump(tree))
    grid = grid_of(former / "former.yaml")
    assert states(grid) == ["missing"]  # the name of its folder is another
    take_over(grid, find_finished(grid).found)
    assert states(grid) == ["done"]


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


def take_over_all(root: Path) -> None:
    grid = planned(root)
    assert len(take_over(grid, find_finished(grid).found)) == 1
    grid.folder.plan.unlink()
    assert plan_command(root / "former.yaml", root / "experiments") == 0


def test_runs_of_schema_1_are_found_where_an_axis_varies_the_data(former: Path) -> None:
    """One corpus, two vocabularies: each run is compared with the tokens of its own."""
    vocabularies = [60, 50]
    tree = yaml.safe_load((former / "former.yaml").read_text())
    tree["axes"] |= {"data.vocab_size": vocabularies}
    (former / "former.yaml").write_text(yaml.safe_dump(tree))
    grid = grid_of(former / "former.yaml")
    for run in grid.folder.all_runs():  # the second vocabulary, as that commit would have left it
        copy = shutil.copytree(run.path, run.path.with_name("copy"))
        config = yaml.safe_load((copy / "config.yaml").read_text())
        config["data"]["vocab_size"] = 50
        (copy / "config.yaml").write_text(yaml.safe_dump(config))
        result = json.loads((copy / "result.json").read_text())
        result["id"] = identity_of(config).former
        result["data"]["checksum"] = prepare(resolved_data(config["data"])).meta["checksum"]
        (copy / "result.json").write_text(json.dumps(result))
        copy.rename(run.path.with_name(f"{run.name[:-9]}-{result['id'][:8]}"))
    found = find_finished(grid).found
    assert len(found) == len(grid.cells) == 8
    assert take_over(grid, found) == [f"8 cells are finished in {grid.folder}: taken over"]
    for cell in grid.cells:
        config = yaml.safe_load(grid.run(cell).config.read_text())
        assert config["data"]["vocab_size"] == cell.axes["data.vocab_size"]
