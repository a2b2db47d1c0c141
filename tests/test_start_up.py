"""What a command imports: Lightning takes seconds, so no command has it that can do without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASE = ROOT / "ablations/base/synthetic.yaml"
FORMER = ROOT / "tests/grids/made_at_4ea995c/former/runs"

START = """
import contextlib, io, json, sys
from pathlib import Path

import pytest
from lightning_app.cli import main

def call(code, *words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        found = main(list(words))
    assert found == code, (words, found, said.getvalue())
    return said.getvalue()

def absent(*names):
    here = [name for name in names if name in sys.modules]
    assert not here, here
"""


def run(folder: Path, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + text, str(BASE)],
        cwd=folder,
        env={**os.environ, "LIGHTNING_APP_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def write_mistakes(folder: Path) -> None:
    base = BASE.read_text()
    (folder / "broken.yaml").write_text("a: [\n")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "latin.yaml").write_bytes(b"caf\xe9: 1\n")
    (folder / "trainer.yaml").write_text(base.replace("max_steps", "max_stepz"))
    (folder / "section.yaml").write_text("modl: {}\n")
    (folder / "model.yaml").write_text(base.replace("num_heads", "num_haeds"))
    (folder / "saved/checkpoints").mkdir(parents=True)
    (folder / "preset.yaml").write_text(base.replace("pre_ln", "pre_lm"))
    for name in ("trainer", "model", "preset"):
        grid = f"name: mine\nbase: {name}.yaml\naxes: {{seed_everything: [1]}}\n"
        (folder / f"grid_{name}.yaml").write_text(grid)


def test_a_mistake_in_a_file_or_a_name_needs_no_lightning(tmp_path: Path) -> None:
    write_mistakes(tmp_path)
    run(
        tmp_path,
        """
base = sys.argv[1]
for said, *words in [
    ("broken.yaml: line 2", "fit", "--config", "broken.yaml"),
    ("list.yaml: expected a mapping", "fit", "--config", "list.yaml"),
    ("latin.yaml: invalid UTF-8", "fit", "--config=latin.yaml"),
    ("did you mean 'max_steps'", "fit", "--config", "trainer.yaml"),
    ("did you mean 'model'", "fit", "--config", "section.yaml"),
    ("did you mean 'max_steps'", "fit", "--trainer.max_stepz=3"),
    ("did you mean 'ckpt_path'", "fit", "--ckpt_pth", "last"),
    ("no file nowhere.ckpt", "test", "--ckpt_path", "nowhere.ckpt"),
    ("no.yaml: there is no such file", "probe", "--config", "no.yaml"),
    ("best.ckpt is missing", "validate", "--run", "saved"),
    ("did you mean 'last'", "predict", "--run", "saved", "--checkpoint", "lst"),
    ("with --run only", "test", "--run", "saved", "--seed_everything", "2"),
    ("config.yaml: is missing", "show", "saved"),
    ("no shell 'sh'", "--print-completion", "sh"),
    ("trainer.yaml: unknown key", "fit", "--config", "trainer.yaml", "--seed_everything", "2"),
]:
    line = call(2, *words)
    assert said in line and line.count("\\n") == 1, line
absent("torch", "lightning", "optuna", "pandas", "matplotlib")
for said, *words in [
    ("did you mean 'num_heads'", "fit", "--config", "model.yaml"),
    ("preset.yaml: model.block.preset: unknown name", "fit", "--config", "preset.yaml"),
    ("did you mean 'pre_ln'", "fit", "--config", base, "--model.block.preset", "pre_lm"),
    ("did you mean 'norm'", "fit", "--config", base, "--model.block.nrom", "x"),
    ("did you mean 'alpha'", "fit", "--model.block.shaped_attention.alphaa=1"),
    ("did you mean 'num_heads'", "prepare", "--config", "model.yaml"),
    ("did you mean 'num_heads'", "probe", "--config", "model.yaml"),
    ("did you mean 'max_steps'", "plan", "grid_trainer.yaml"),
    ("did you mean 'num_heads'", "plan", "grid_model.yaml"),
    ("did you mean 'pre_ln'", "plan", "grid_preset.yaml"),
    ("command line: unknown key", "fit", "--config", base, "--modl.block.norm", "x"),
]:
    line = call(2, *words)
    assert said in line and line.count("\\n") == 1, line
absent("lightning", "optuna", "pandas", "matplotlib")
assert not Path("experiments").exists()
""",
    )


@pytest.mark.slow
# Over 5 s: three processes start cold.
def test_plan_and_blocks_need_torch_alone_and_status_not_even_that(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
call(0, "blocks")
call(0, "blocks", "sas")
assert "torch" in sys.modules
absent("lightning", "optuna", "pandas", "matplotlib", "datasets", "jsonargparse")
assert "20 cells" in call(0, "plan", "demo")  # which prepares the corpus, with pandas
absent("lightning", "optuna", "matplotlib", "torch._dynamo")
""",
    )
    run(
        tmp_path,
        """
assert "20 waiting" in call(0, "status", "demo")
call(2, "status", "demoo")
absent("torch", "numpy", "lightning", "optuna", "pandas", "matplotlib")
""",
    )


def test_show_and_diff_need_no_torch(tmp_path: Path) -> None:
    runs = [str(path) for path in sorted(FORMER.iterdir())[:2]]
    run(
        tmp_path,
        f"""
one, two = {runs}
call(0, "show", one)
assert "Two experiments" in call(0, "diff", one, two)
absent("torch", "numpy", "lightning", "optuna", "pandas", "matplotlib")
""",
    )
