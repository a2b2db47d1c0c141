"""Ways to work with the package without a fork, as a user would write them.

All tests here share one grid of four cells, which `run_grid` runs.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_app import run_grid
from lightning_app.plugins import loaded, unload
from tests.small import tiny_config, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ten_ways")]

STAND_INS = Path(__file__).parent / "stand_ins"
PRESET = "model.block.preset"
BLOCK = """
from lightning_app.blocks.presets import preset
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block


@preset(equation="x' = N(x + f(x) / sqrt(2L))", paper="ours", fixes="large branches at the start")
def damped(stack: Stack) -> StackSpec:
    residual = ResidualSpec(norm_sum="layer_norm", branch=Gain(value=(2 * stack.depth) ** -0.5))
    return same_block(stack, around(residual), final_norm="none")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of a user: a corpus, a block, a grid that logs to W&B as well."""
    root = tmp_path_factory.mktemp("ten")
    folder = root / "first"
    folder.mkdir()
    write_corpus(folder)
    (folder / "my_blocks.py").write_text(BLOCK, encoding="utf-8")
    (folder / "ablate.yaml").write_text("plugins: [my_blocks.py]\n")
    steps = {"max_steps": 12, "val_check_interval": 6, "log_every_n_steps": 1}
    base = tiny_config(steps, model__objective__evaluate_test=False)
    base["data"] = {"name": "text", "root": str(folder / "corpus"), "cache": str(folder / "cache")}
    base["data"] |= {"tokenizer": "word", "vocab_size": None, "tokens_per_batch": 64}
    wandb = {"project": "wiring", "offline": True, "save_dir": "wandb"}
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": wandb}
    base["trainer"]["logger"] = [logger]
    axes = {PRESET: ["pre_ln", "damped"], "seed_everything": [1, 2]}
    tree = {"name": "mine", "base_config": base, "axes": axes}
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    packages = shutil.copytree(STAND_INS, root / "packages")
    installed = packages / "wandb-1.0.dist-info"  # Lightning asks for the version of the package
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 1.0\n")
    files = [f"{path.relative_to(packages)},," for path in packages.rglob("*.py")]
    (installed / "RECORD").write_text("\n".join([*files, "wandb-1.0.dist-info/METADATA,,"]))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(packages)
        patched.setenv("OMP_NUM_THREADS", "1")
        yield folder
    for name in list(loaded()):  # commands in this process have loaded the block
        unload(name)


@pytest.fixture(scope="module")
def frame(project: Path) -> Any:
    return run_grid("mine.yaml", workers=1)


def record(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


# Over 5 s: the grid that all tests here share is run from Python, cold.
def test_a_block_of_ones_own_beside_pre_ln(frame: Any) -> None:
    assert sorted(frame["variant"]) == ["damped", "damped", "pre_ln", "pre_ln"]
    assert set(frame["outcome"]) <= {"trained", "not_yet_learned", "stalled"}
    gains = {}
    for _, cell in frame.iterrows():
        block = json.loads((Path(cell["folder"]) / "block.json").read_text())
        gains[cell["variant"]] = block["encoder"]["blocks"][0]["around_ff"]["branch"]
        used = set(record(cell["folder"])["provenance"]["plugins_used"])
        assert used == ({"my_blocks"} if cell["variant"] == "damped" else set())
    assert gains["damped"]["value"] == pytest.approx(2**-0.5)
    assert gains["pre_ln"] != gains["damped"]
    page = Path("experiments/mine/report.html").read_text(encoding="utf-8")
    assert "damped" in page
    assert "pre_ln" in page


def test_wandb_beside_tensorboard(frame: Any, project: Path) -> None:
    logs = sorted(project.glob("experiments/mine/runs/*/added/wandb/recorded.jsonl"))
    lines = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    recorded: dict[str, dict[str, list[Any]]] = {}
    for line in map(json.loads, lines):
        recorded.setdefault(line["run"], {}).setdefault(line["call"], []).append(line["given"])
    assert recorded.keys() == set(frame["name"])
    for _, cell in frame.iterrows():
        calls, final = recorded[cell["name"]], record(cell["folder"])
        (begun,), (given,) = calls["init"], calls["config"]
        assert (begun["project"], begun["group"], begun["mode"]) == ("wiring", "mine", "dryrun")
        assert {f"preset:{cell['variant']}", f"seed:{cell['seed']}"} < {*begun["tags"]}
        assert given["id"] == cell["id"]
        assert given["model"]["block"]["preset"] == cell["variant"]
        assert len(calls["finish"]) == 1
        losses = {m["trainer/global_step"]: m["val/nll"] for m in calls["log"] if "val/nll" in m}
        assert losses.keys() == {6, 12}
        assert losses[12] == pytest.approx(final["metrics"]["val/nll"])
        events = EventAccumulator(cell["folder"])
        events.Reload()
        shown = {each.step: each.value for each in events.Scalars("val/nll")}
        assert shown == pytest.approx(losses)
