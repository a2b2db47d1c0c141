"""Every YAML that ships: it loads, has the cells its opening states, and its first cell trains."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.config.config import resolve
from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import read_spec
from lightning_app.grids.plan import cell_tree, expand
from lightning_app.training.run import run_cell
from tests import questions, tables
from tests.frozen.frozen import write_corpora

ROOT = Path(__file__).parents[1]
GRIDS = sorted((ROOT / "ablations").glob("*.yaml"))


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    write_corpora(folder)
    return folder


@pytest.fixture(autouse=True)
def _corpora_of_a_user(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_APP_DATA", str(user / "corpora"))
    monkeypatch.chdir(user)


def small_data(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    given, common = tree["data"], {"tokens_per_batch": 128, "window": 32, "tokenizer": "word"}
    common |= {"vocab_size": None, "cache": str(folder / "cache")}
    kind = tree["model"]["objective"]["kind"]
    if kind == "glue":
        root = tables.write_table(folder / given["name"], given["name"])
        return common | {"name": given["name"], "root": str(root)}
    if kind == "squad":
        root = questions.write_squad(folder / given["name"], given["name"])
        return common | {"name": given["name"], "root": str(root), "context_stride": 8}
    if tree["model"]["objective"].get("next_sentence"):
        # Next sentences need documents.
        kept = ("name", "root", "document_separator")
        return common | {each: given[each] for each in kept if each in given}
    return common | {"name": "synthetic"}


@pytest.mark.in_turn(40)
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_has_the_cells_that_it_states_and_the_first_one_trains(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One test, since the cells are planned for both."""
    stated = re.search(r"^# (\d+) cells: (.*)", path.read_text(), re.M)
    assert stated, "the opening states the number of cells"
    spec = read_spec(path)
    plan, _ = expand(spec, resolve, partial(identity_of, fetch=False))
    cells = sorted((*plan.cells, *plan.waiting), key=lambda cell: cell.axes["seed_everything"])
    assert plan.name == path.stem
    assert len(cells) == int(stated[1])
    assert bool(plan.waiting) == (spec.init_from is not None), "no parent is there"
    steps = re.search(r"([\d,]+)(?: to ([\d,]+))? steps", stated[2])
    assert steps
    key, base = "trainer.max_steps", spec.base_config["trainer"]["max_steps"]
    own = {cell.axes.get(key, base) for cell in cells}
    assert {min(own), max(own)} == {int(each.replace(",", "")) for each in steps.groups(steps[1])}
    # Whole seeds come first, so that an interrupted grid is a complete smaller one.
    assert cells == [*(plan.cells or plan.waiting)]
    # Two steps of a narrow model of two layers, on a small corpus, without a parent.
    tree: dict[str, Any] = cell_tree(spec.base_config, cells[0].axes)
    given = {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1}
    tree["trainer"] = {**tree["trainer"], **given}
    schedule = {**tree["model"]["schedule"], "reference_steps": 1}
    tree["model"]["schedule"] = schedule | {"warmup_steps": min(1, schedule["warmup_steps"])}
    tree["model"]["objective"] = {**tree["model"]["objective"], "evaluate_test": False}
    architecture = tree["model"]["architecture"]
    depths = [key for key in ("encoder_depth", "decoder_depth") if key in architecture]
    sizes = {"model_dim": 32, "ff_dim": 32, "num_heads": 4} | {
        key: min(2, architecture[key]) for key in depths
    }
    tree["model"]["architecture"] = {**architecture, **sizes}
    tree["data"] = small_data(tree, tmp_path_factory.getbasetemp())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolve(tree, str(path))))
    run_cell(tmp_path, attempt=1)
    assert (tmp_path / "result.json").is_file()
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
