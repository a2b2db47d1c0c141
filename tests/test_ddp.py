"""Two processes give, step by step, what one process gives with the same global batch."""

import csv
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_app.data.synthetic.sentences import splits
from tests import warm


def fit(
    folder: Path, base: str, devices: int, overrides: dict[str, Any], launches: bool = False
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Train; the processes are started by the test, or `launches`: by Lightning."""
    command = ["-m", "lightning_app", "fit", "--config", f"ablations/base/{base}"]
    settings = {
        "trainer.devices": devices,
        "trainer.accelerator": "cpu",
        "trainer.strategy": "ddp" if devices > 1 else "auto",
        "trainer.log_every_n_steps": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": folder,
        "model.objective.evaluate_test": "true",
        "model.schedule.warmup_steps": 0,
        **overrides,
    }
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    done = warm.run(command) if launches else warm.run_ranks(command, devices)
    assert done.returncode == 0, done.stderr[-3000:]
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "result.json").read_text())


def columns(folder: Path) -> dict[str, list[float]]:
    """The numbers of each column of a run's table that has one in every row."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: [float(row[name]) for row in rows] for name in rows[0] if all(r[name] for r in rows)
    }


def assert_two_equal_one(
    folder: Path,
    cache: str,
    base: str,
    steps: int,
    overrides: dict[str, Any],
    launches: bool = False,
) -> dict[str, Any]:
    """In float64, since Adam turns the rounding of a gradient near 0 into a step of full size."""
    precision = overrides.setdefault("trainer.precision", "64-true")
    near = 1e-5 if precision == "32-true" else 1e-10
    overrides |= {
        "trainer.max_steps": steps,
        "trainer.val_check_interval": steps,
        "data.cache": cache,
    }
    one, single = fit(folder / "one", base, 1, overrides)
    two, double = fit(folder / "two", base, 2, overrides, launches)
    assert [row["step"] for row in one] == [row["step"] for row in two]
    assert len(one) == steps
    for a, b in zip(one, two, strict=True):
        for column in ("train/loss", "train/nll", "train/grad_norm"):
            assert float(a[column]) == pytest.approx(float(b[column]), abs=near)
    assert single["id"] == double["id"]
    assert single["tokens"] == double["tokens"]
    for name, value in single["metrics"].items():
        if name.endswith("bleu"):
            assert double["metrics"][name] == value, name
        elif name != "train/tokens_per_second":
            assert double["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    parts = single["validation_parts"]
    assert sum(parts["nll"]) / sum(parts["tokens"]) == pytest.approx(single["metrics"]["val/nll"])
    assert double["validation_parts"]["tokens"] == parts["tokens"]
    assert double["validation_parts"]["nll"] == pytest.approx(parts["nll"], rel=1e-4)
    return single


def test_translation(tmp_path: Path, cache: str) -> None:
    overrides = {"model.objective.validation_bleu": 33, "trainer.limit_test_batches": 3}
    overrides |= {"trainer.precision": "32-true"}  # as users train
    result = assert_two_equal_one(tmp_path, cache, "synthetic.yaml", 5, overrides, launches=True)
    assert {"val/bleu", "test/bleu", "test/sacrebleu"} <= set(result["metrics"])
    lines = [(tmp_path / run / "hypotheses.txt").read_text() for run in ("one", "two")]
    assert lines[0] == lines[1]
    assert lines[0].count("\n") > 100


def test_masked_lm(tmp_path: Path, cache: str) -> None:
    """Both average the weights and evaluate the average."""
    average = {
        "class_path": "lightning.pytorch.callbacks.EMAWeightAveraging",
        "init_args": {"decay": 0.8},
    }
    overrides = {
        "model.block.preset": "sas_p",
        "model.schedule.kind": "constant",
        "trainer.callbacks": json.dumps([average]),
    }
    assert_two_equal_one(tmp_path, cache, "synthetic_mlm.yaml", 5, overrides)


def test_causal_lm(tmp_path: Path, cache: str) -> None:
    """Windows of an evaluation overlap; the test has all of its tokens, and so bits per byte."""
    overrides = {"data.evaluation_stride": 40, "model.schedule.kind": "cosine"}
    overrides |= {"model.schedule.warmup_steps": 2, "model.schedule.reference_steps": 2}
    overrides |= {"data.tokenizer": "char"}
    result = assert_two_equal_one(tmp_path, cache, "synthetic_lm.yaml", 5, overrides)
    assert {"val/bits_per_byte", "test/word_perplexity"} <= set(result["metrics"])


def test_streams_with_a_memory(tmp_path: Path, cache: str) -> None:
    """More than one epoch; one stream of the evaluation is on the first rank alone."""
    overrides = {
        "model.block.preset": "realformer",
        "model.block.memory.length": 48,
        "model.architecture.positions": "relative",
        "model.schedule.warmup_steps": 2,
        "model.schedule.reference_steps": 2,
        "data.order": "streams",
        "data.window": 32,
        "data.tokens_per_batch": 1000,
        "trainer.limit_train_batches": 5,
        "trainer.limit_val_batches": 20,
        "trainer.limit_test_batches": 5,
    }
    assert_two_equal_one(tmp_path, cache, "synthetic_lm.yaml", 8, overrides)


def test_profiled_skips(tmp_path: Path, cache: str) -> None:
    """Admin's skips start from the batch of both ranks; the same steps follow."""
    assert_two_equal_one(tmp_path, cache, "synthetic.yaml", 5, {"model.block.preset": "admin"})


def test_heads_that_stop_predicting(tmp_path: Path, cache: str) -> None:
    """Of three layers none below the last predicts after two of five steps."""
    overrides = {
        "model.objective.intermediate_weight": 1.0,
        "model.objective.second_target_weight": 0.5,
        "model.objective.auxiliary_tables": "own",
        "model.objective.evaluate_test": "false",
        "trainer.limit_val_batches": 1,
    }
    assert_two_equal_one(tmp_path, cache, "synthetic.yaml", 5, overrides)


def test_dynamic_spans(tmp_path: Path, cache: str) -> None:
    """Their penalty is of the mean over the tokens of both ranks, and so are the logged spans."""
    span = {"longest": 16, "ramp": 4.0, "dynamic_bias": -1.0, "penalty": 0.01}
    overrides = {
        "model.block.adaptive_span": json.dumps(span),
        "model.objective.evaluate_test": "false",
        "trainer.limit_val_batches": 1,
    }
    assert_two_equal_one(tmp_path, cache, "synthetic.yaml", 5, overrides)
    one, two = (columns(tmp_path / run) for run in ("one", "two"))
    spans = [name for name in one if name.startswith(("probe/span/", "train/aux/span"))]
    assert len([name for name in spans if name.count("/") == 4]) == (3 + 3) * 4
    for name in spans:
        assert one[name] == pytest.approx(two[name], abs=1e-5), name
        assert len(set(one[name])) == 5, name


@pytest.mark.slow
def test_halting(tmp_path: Path, cache: str) -> None:
    """The cost is divided by the tokens of both ranks, also where they stop at other steps."""
    overrides = {
        "model.block.share": "all",
        "model.block.step_signal": "learned",
        "model.block.halting": json.dumps({"ponder_weight": 0.5, "bias": -1.0}),
        "model.objective.evaluate_test": "false",
        "trainer.limit_val_batches": 1,
    }
    assert_two_equal_one(tmp_path, cache, "synthetic.yaml", 5, overrides)
    one, two = (columns(tmp_path / run) for run in ("one", "two"))
    assert one["train/aux/ponder"] == pytest.approx(two["train/aux/ponder"], abs=1e-10)
    assert len(set(one["train/aux/ponder"])) == 5


def test_odd_numbers_of_batches_and_batches_of_one_row(tmp_path: Path, cache: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    pairs = splits()["train"]
    for split, rows in {"train": pairs[:21], "valid": pairs[21:26], "test": pairs[26:31]}.items():
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in rows)
            (corpus / f"{split}.{language}").write_text(text, encoding="utf-8")
    overrides = {
        "data.name": "text",
        "data.root": corpus,
        "data.tokens_per_batch": 30,  # one or two sentences
    }
    # Twenty steps are more than one epoch.
    assert_two_equal_one(tmp_path, cache, "synthetic.yaml", 20, overrides)


def test_two_processes_print_the_predictions_of_the_split_in_order(
    tmp_path: Path, cache: str
) -> None:
    overrides = {"trainer.max_steps": 1, "trainer.limit_val_batches": 1, "data.cache": cache}
    fit(
        tmp_path / "run",
        "synthetic.yaml",
        1,
        overrides | {"model.objective.evaluate_test": "false"},
    )
    printed = []
    for devices, strategy in ((1, "auto"), (2, "ddp")):
        command = ["-m", "lightning_app", "predict", "--config", "ablations/base/synthetic.yaml"]
        command += ["--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt")]
        command += ["--data.cache", cache, "--trainer.devices", str(devices)]
        command += ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy]
        done = warm.run_ranks(command, devices)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.splitlines())
    assert len(printed[0]) == len(splits()["test"])
    assert printed[1] == printed[0]


@pytest.mark.slow
def test_two_hosts_under_torchrun_give_what_one_gives(tmp_path: Path, cache: str) -> None:
    """Two agents of one process each, as on two hosts, which meet on loopback."""
    overrides = {
        "trainer.max_steps": 4,
        "trainer.val_check_interval": 4,
        "trainer.precision": "64-true",
        "data.cache": cache,
    }
    _, single = fit(tmp_path / "one", "synthetic.yaml", 1, overrides)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    words = ["-m", "lightning_app", "fit", "--config", "ablations/base/synthetic.yaml"]
    settings = {
        **overrides,
        "trainer.devices": 1,
        "trainer.num_nodes": 2,
        "trainer.accelerator": "cpu",
        "trainer.strategy": "ddp",
        "trainer.log_every_n_steps": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": tmp_path / "two",
        "model.objective.evaluate_test": "true",
        "model.schedule.warmup_steps": 0,
    }
    words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *hosts),
                *("--node-rank", str(rank), "--master-port", str(port), *words),
            ]
        )
        for rank in (0, 1)
    ]
    assert [agent.wait(timeout=300) for agent in agents] == [0, 0]
    double = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (double["id"], double["devices"]) == (single["id"], 2)
    assert double["metrics"]["val/nll"] == pytest.approx(single["metrics"]["val/nll"], abs=1e-10)
