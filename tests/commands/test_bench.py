"""`ablate bench` on tiny sizes: tables, JSON, the figure, and mistakes in one line."""

import json
from pathlib import Path

import pytest
import torch

from lightning_app.cli import main
from tests.told import told


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["bench", *words]) == 0
    return capsys.readouterr().out


def test_presets_against_the_baseline(capsys, tmp_path: Path) -> None:
    path = tmp_path / "out" / "bench.json"
    out = bench(capsys, "--quick", "--presets", "sas", "--device", "cpu", "--json", str(path))
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  pre_ln")] == [
        "pre_ln",
        "pre_ln",
    ]
    found = json.loads(path.read_text())
    step, passes = found["comparisons"]
    assert "training step" in step["title"]
    assert "forward and backward" in passes["title"]
    pre_ln, sas = step["results"]
    assert (pre_ln["name"], sas["name"]) == ("pre_ln", "sas")
    assert pre_ln["time"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert pre_ln["memory"] == 1.0
    assert sas["memory"] == sas["peak_bytes"] / pre_ln["peak_bytes"]
    assert sas["parameters"] < pre_ln["parameters"]
    assert step["results"][0]["calls"] > passes["results"][0]["calls"]
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["settings"]["width"] == 32


# A peer's import uses it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.slow
def test_all_sections_run_with_or_without_the_peers(capsys) -> None:
    out = bench(capsys, "--quick", "--attention", "--peers", "--rounds", "1", "--device", "cpu")
    for said in (
        "One attention map, causal",
        "A chain of",
        "torch.nn.Transformer",
        "residual_attn",
    ):
        assert said in out


def test_growth_draws_a_figure(capsys, tmp_path: Path) -> None:
    path = tmp_path / "growth.svg"
    words = ("--quick", "--growth", "--rounds", "1", "--device", "cpu", "--figure", str(path))
    out = bench(capsys, *words)
    assert f"figure: {path}" in out
    assert out.count("realformer, reversible") == 6  # two places on each of three axes
    assert path.read_text().startswith("<?xml")


def test_explain_says_what_is_taken_and_why(capsys) -> None:
    out = bench(capsys, "--explain", "--device", "cpu")
    rows = [line for line in out.splitlines() if "float32" in line]
    assert "stored" in next(row for row in rows if "64 x 64" in row)
    assert "reversible" in next(row for row in rows if "1024 x 1024" in row)


def test_threads_are_given_back(capsys) -> None:
    before = torch.get_num_threads()
    bench(capsys, "--explain", "--threads", "2")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--presets", "post_nl"], "did you mean 'post_ln'"),
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
        (["--width", "100"], "--width 100: … 64"),
        (["--width", "33"], "--width 33:"),
        (["--device", "gpu"], "invalid choice: 'gpu'"),
        (["--preset", "sas"], "did you mean '--presets'"),
        (["--explain", "--json", "x.json"], "--explain"),
        (["--quick", "--figure", "x.svg"], "--growth"),
        (["--tokens", "10", "--length", "64"], "--tokens 10: … 64"),
        (["--quick", "--attention", "--json", "/proc/x.json"], "/proc"),
    ],
)
def test_a_mistake_is_one_line(capsys, words: list[str], expected: str) -> None:
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert told(expected).search(line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_a_mistake(capsys) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
