"""Every YAML that ships: it loads, has the cells its opening states, and its first cell trains."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.ablation.cells import cell_tree
from lightning_app.ablation.grid_spec import read_spec
from lightning_app.ablation.plan import expand
from lightning_app.ablation.run_cell import run_cell
from lightning_app.config import resolve
from lightning_app.experiment import identity_of

ROOT = Path(__file__).parents[1]
GRIDS = sorted((ROOT / "ablations").glob("*.yaml"))
BASES = sorted((ROOT / "ablations/base").glob("*.yaml"))
BOOKS = "A book. It has two sentences.\nA line.\n-------\nAnother book. It has a line.\n" * 2


@pytest.fixture(autouse=True)
def _folder_with_books(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    """The working directory of a user with texts for the grids that need some."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("books", "pretraining"):
        (folder / name).mkdir()
        for split in ("train", "valid"):
            (folder / name / f"{split}.txt").write_text(BOOKS)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("path", BASES, ids=lambda path: path.stem)
def test_a_base_is_a_config_of_its_own(path: Path) -> None:
    resolve(yaml.safe_load(path.read_text()), str(path))
    assert f"ablate fit --config {path.relative_to(ROOT)}" in path.read_text()


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_has_the_cells_that_it_states(path: Path) -> None:
    stated = re.search(r"^# (\d+) cells: (.*)", path.read_text(), re.M)
    assert stated, "the opening states the number of cells"
    plan, configs = expand(read_spec(path), resolve, partial(identity_of, fetch=False))
    assert plan.name == path.stem
    assert len(plan.cells) == int(stated[1])
    steps = re.search(r"([\d,]+) steps", stated[2])
    assert steps
    assert {config["trainer"]["max_steps"] for config in configs} == {
        int(steps[1].replace(",", ""))
    }
    # Whole seeds come first, so that an interrupted grid is a complete smaller one.
    seeds = [cell.axes["seed_everything"] for cell in plan.cells]
    assert seeds == sorted(seeds)


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_the_first_cell_of_a_grid_trains(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two steps, on the built-in corpus and with small batches."""
    grid = read_spec(path)
    plan, _ = expand(grid, resolve, partial(identity_of, fetch=False))
    tree: dict[str, Any] = cell_tree(grid.base_config, plan.cells[0].axes)
    tree["trainer"] = {**tree["trainer"], "max_steps": 2, "limit_val_batches": 1}
    schedule = {**tree["model"]["schedule"], "reference_steps": 1}
    tree["model"]["schedule"] = schedule | {"warmup_steps": min(1, schedule["warmup_steps"])}
    tree["model"]["objective"] = {**tree["model"]["objective"], "evaluate_test": False}
    # Next sentences need documents.
    books = ("name", "root", "document_separator")
    pairs = tree["model"]["objective"].get("next_sentence")
    tree["data"] = {
        **({name: tree["data"][name] for name in books} if pairs else {"name": "synthetic"}),
        "tokenizer": "word",
        "vocab_size": None,
        "tokens_per_batch": 128,
        "window": 32,
        "cache": str(tmp_path_factory.getbasetemp() / "cache"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolve(tree, str(path))))
    run_cell(tmp_path, attempt=1)
    assert (tmp_path / "result.json").is_file()
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
