"""Ten ways to work with the package without a fork, each as a user would write it.

1. A block of one's own beside `pre_ln` in a grid: here.
2. `Block("sas", dim=512, heads=8)(x, causal=True)` in plain torch: here; without Lightning in
   `tests/api/test_blocks.py::test_blocks_need_no_lightning`.
3. `fit`, `run_grid`, `results` and `load_run(...).translate` from Python: here.
4. W&B offline beside TensorBoard, with the name and the config of the cell: here.
5. `test` and `predict` with `--run`: `test` here; `predict` in
   `tests/commands/test_named_run.py::test_predict_writes_a_line_for_each_row_and_nothing_else`.
6. A variant against a baseline for `val/accuracy` over an axis that is no warm-up: here.
7. `ablate diff` of two runs: `tests/commands/test_show.py::test_two_runs_are_compared`.
8. `ablate init --data`: `tests/plugins/test_init.py::test_a_project_of_a_corpus`.
9. Shell completion: `tests/test_cli.py::test_bash_completes_commands_options_and_files`.
10. A finished cell found again under another grid's name: here.

All tests here share one grid of four cells, which `run_grid` runs.
"""

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_app import Block, compare, fit, load_run, results, run_grid
from lightning_app.cli import main
from lightning_app.plugins import loaded, unload
from tests.small import ENGLISH, GERMAN, write_corpus
from tests.warm import run

pytestmark = pytest.mark.xdist_group("ten_ways")

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


def config(folder: Path) -> dict[str, Any]:
    """A translation of three sentences, with a tiny model."""
    return {
        "trainer": {"max_steps": 12, "val_check_interval": 6, "log_every_n_steps": 1}
        | {"accelerator": "cpu"},
        "model": {
            "architecture": {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 16}
            | {"ff_dim": 16, "num_heads": 2, "dropout": 0.0},
            "objective": {"beam": 1, "evaluate_test": False},
            "optimizer": {"lr": 0.02},
            "schedule": {"warmup_steps": 2, "reference_steps": 4},
        },
        "data": {"name": "text", "root": str(folder / "corpus"), "cache": str(folder / "cache")}
        | {"tokenizer": "word", "vocab_size": None, "tokens_per_batch": 64},
    }


def write_grid(path: Path, base: dict[str, Any], seeds: list[int]) -> None:
    axes = {PRESET: ["pre_ln", "damped"], "seed_everything": seeds}
    tree = {"name": path.stem, "base_config": base, "axes": axes}
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of a user: a corpus, a block, a grid that logs to W&B as well."""
    root = tmp_path_factory.mktemp("ten")
    folder = root / "first"
    folder.mkdir()
    write_corpus(folder)
    (folder / "my_blocks.py").write_text(BLOCK, encoding="utf-8")
    (folder / "ablate.yaml").write_text("plugins: [my_blocks.py]\n")
    base = config(folder)
    wandb = {"project": "wiring", "offline": True, "save_dir": "wandb"}
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": wandb}
    base["trainer"]["logger"] = [logger]
    write_grid(folder / "mine.yaml", base, [1, 2])
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
    """The table of the finished grid."""
    return run_grid("mine.yaml", workers=1)


@pytest.fixture(scope="module")
def trained(project: Path) -> Path:
    """The same experiment as one of the cells, trained by `fit` outside of the store."""
    apart = str(project / "experiments/fit/runs/apart")
    where = {PRESET: "pre_ln", "trainer.default_root_dir": apart}
    return fit(config(project), where, seed_everything=1).folder


def record(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


# Over 5 s: the grid that all tests here share is run from Python, cold.
def test_1_a_block_of_ones_own_beside_pre_ln(frame: Any) -> None:
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


def test_2_a_block_in_plain_torch() -> None:
    x = torch.randn(2, 6, 512)
    with pytest.warns(UserWarning, match="give depth and"):  # its gains depend on the place
        block = Block("sas", dim=512, heads=8)
    for parameter in block.parameters():  # at the start its attention is the identity
        torch.nn.init.normal_(parameter, std=0.05)
    y = block(x, causal=True)
    assert y.shape == x.shape
    changed = torch.cat([x[:, :4], torch.randn(2, 2, 512)], dim=1)
    torch.testing.assert_close(block(changed, causal=True)[:, :4], y[:, :4])
    assert not torch.allclose(block(changed)[:, :4], block(x)[:, :4])


def test_3_runs_and_grids_from_python(frame: Any, trained: Path) -> None:
    (cell,) = frame[(frame["variant"] == "pre_ln") & (frame["seed"] == 1)].to_dict("records")
    result = record(trained)
    assert result["id"] == cell["id"]
    assert result["metrics"]["val/nll"] == pytest.approx(cell["val/nll"], rel=1e-5)
    assert results("mine.yaml")["val/nll"].tolist() == frame["val/nll"].tolist()
    translated = load_run(trained).translate(GERMAN)
    assert translated == load_run(cell["folder"]).translate(GERMAN)
    assert len(translated) == 3
    words = {word for line in ENGLISH for word in line.split()}
    assert {word for line in translated for word in line.split()} <= words
    assert any(translated)


def test_4_wandb_beside_tensorboard(frame: Any, project: Path) -> None:
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


def test_5_a_run_is_tested_by_its_name(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The splits of this corpus are equal, so that the loss is that of the last validation."""
    name = f"fit/{trained.name}"
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert main(["test", "--run", name, "--checkpoint", "last"]) == 0
    found = re.search(r"test/nll\W+([0-9.]+)", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(record(trained)["metrics"]["val/nll"], rel=1e-5)
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_6_a_variant_against_a_baseline(frame: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd

    found = compare("mine.yaml", axis=PRESET, baseline="pre_ln", metric="val/accuracy", mode="max")
    (row,) = found.to_dict("records")
    by = frame.set_index(["variant", "seed"])["val/accuracy"]
    differences = [by["damped", seed] - by["pre_ln", seed] for seed in (1, 2)]
    assert [row["seed 1"], row["seed 2"]] == pytest.approx(differences)
    assert row["estimate"] == pytest.approx(sum(differences) / 2)
    assert (row["value"], row["mode"], row["seeds"]) == ("damped", "max", 2)
    words = ["--compare", f"{PRESET}=pre_ln", "--metric", "val/accuracy", "--csv"]
    assert main(["results", "mine.yaml", *words]) == 0
    (shown,) = pd.read_csv(io.StringIO(capsys.readouterr().out)).to_dict("records")
    assert shown["estimate"] == pytest.approx(row["estimate"])
    assert shown["mode"] == "max"


def test_10_a_finished_cell_under_another_grids_name(frame, project: Path, monkeypatch) -> None:
    """After the copy of the runs that `docs/many-workers.md` makes with rsync."""
    second = project.parent / "second"
    second.mkdir()
    monkeypatch.chdir(second)
    write_grid(Path("other.yaml"), config(project), [1])  # without W&B, which is part of no id
    shutil.copy(project / "my_blocks.py", second)
    Path("ablate.yaml").write_text("plugins: [my_blocks.py]\n")
    shutil.copytree(project / "experiments" / ".runs", Path("experiments") / ".runs")
    theirs = frame[frame["seed"] == 1].set_index("name")

    def to_run() -> int:
        done = run(["-m", "lightning_app", "plan", "other.yaml", "--json"], folder=second)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["states"]["to_run"]

    assert to_run() == 0
    done = run(["-m", "lightning_app", "run", "other.yaml", "--workers", "1"], folder=second)
    assert done.returncode == 0, done.stderr
    found: Any = results("other.yaml").set_index("name")
    assert found["val/nll"].to_dict() == theirs["val/nll"].to_dict()
    for name, folder in found["folder"].items():
        assert record(folder) == record(Path("../first", theirs["folder"][name]))
    # Another version of the block is another experiment, and `pre_ln` does not use it.
    Path("my_blocks.py").write_text(BLOCK + "CHANGED = 1\n", encoding="utf-8")
    assert to_run() == 1
