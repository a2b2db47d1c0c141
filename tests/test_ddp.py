"""Two processes give, step by step, what one process gives with the same global batch."""

import csv
import json
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_app.data import sources
from lightning_app.data.config import DataConfig
from tests import warm

pytestmark = pytest.mark.xdist_group("ddp")  # the runs of all cases are made once


@dataclass(frozen=True)
class Case:
    """What is trained by one process and by two; in float64, since Adam turns the rounding of a
    gradient near 0 into a step of full size."""

    base: str
    steps: int = 5
    settings: dict[str, Any] = field(default_factory=dict)


def callback(path: str, **arguments: Any) -> dict[str, str]:
    return {"trainer.callbacks": json.dumps([{"class_path": path, "init_args": arguments}])}


SHORT = {"model.objective.evaluate_test": "false", "trainer.limit_val_batches": 1}
CASES = {
    # Both average the weights and evaluate the average.
    "masked_lm": Case(
        "synthetic_mlm.yaml",
        settings={
            "trainer.limit_val_batches": 5,
            "trainer.limit_test_batches": 5,
            "model.block.preset": "sas_p",
            "model.schedule.kind": "constant",
            **callback("lightning.pytorch.callbacks.EMAWeightAveraging", decay=0.8),
        },
    ),
    # Windows of an evaluation overlap; the test has all of its tokens, and so bits per byte.
    "causal_lm": Case(
        "synthetic_lm.yaml",
        settings={
            "data.evaluation_stride": 60,
            "model.architecture.decoder_depth": 2,
            "data.tokenizer": "char",
            "model.schedule.kind": "cosine",
            "model.schedule.warmup_steps": 2,
            "model.schedule.reference_steps": 2,
            **callback("lightning_app.training.callbacks.averages.LastAverage", every=2, count=2),
        },
    ),
    # More than one epoch; one stream of the evaluation is only on the first rank.
    "streams": Case(
        "synthetic_lm.yaml",
        8,
        {
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
        },
    ),
    # Admin's skips start from the batch of both ranks; the same steps follow.
    "profiled_skips": Case("synthetic.yaml", settings={**SHORT, "model.block.preset": "admin"}),
    # Of three layers none below the last predicts after two of five steps.
    "heads": Case(
        "synthetic.yaml",
        settings={
            **SHORT,
            "model.objective.intermediate_weight": 1.0,
            "model.objective.second_target_weight": 0.5,
            "model.objective.auxiliary_tables": "own",
        },
    ),
    # The z-loss is of the mean over the tokens of both ranks.
    "capped": Case(
        "synthetic.yaml",
        settings={**SHORT, "model.objective.z_loss": 0.01, "model.architecture.logit_cap": 3.0},
    ),
    # A rule reads whole matrices; only one group of parameters is warmed up. Logits are bounded by
    # the largest of both ranks.
    "muon": Case(
        "synthetic.yaml",
        settings={
            **SHORT,
            "model.optimizer.kind": "muon",
            "model.optimizer.momentum": 0.95,
            **callback("lightning_app.training.callbacks.safety.QKClip", tau=0.02),
            "model.optimizer.momentum_start": 0.85,
            "model.optimizer.weight_decay": 0.1,
            "model.optimizer.momentum_warmup_steps": 3,
            "model.schedule.warmup_of": "embeddings",
            "model.schedule.warmup_steps": 3,
            "model.schedule.batch_warmup_steps": 3,
            "model.schedule.batch_start": 0.1,
        },
    ),
    # The penalty is of the mean over the tokens of both ranks, and so are the logged spans.
    "dynamic_spans": Case(
        "synthetic.yaml",
        settings={
            **SHORT,
            "model.block.adaptive_span": json.dumps(
                {"longest": 16, "ramp": 4.0, "dynamic_bias": -1.0, "penalty": 0.01}
            ),
        },
    ),
    # The cost is divided by the tokens of both ranks, also where they stop at other steps.
    "halting": Case(
        "synthetic.yaml",
        settings={
            **SHORT,
            "model.block.share": "all",
            "model.block.step_signal": "learned",
            "model.block.halting": json.dumps({"ponder_weight": 0.5, "bias": -1.0}),
        },
    ),
    # One or two sentences per batch, an odd number of batches, and more than one epoch.
    "odd_batches": Case(
        "synthetic.yaml",
        20,
        {"data.name": "text", "data.root": "corpus", "data.tokens_per_batch": 30},
    ),
}


def arguments(folder: Path, cache: str, case: Case, devices: int) -> list[str]:
    """The words after `ablate`; the model is narrow, since no sum over ranks depends on that."""
    settings = {
        "trainer.precision": "64-true",
        "trainer.devices": devices,
        "trainer.accelerator": "cpu",
        "trainer.strategy": "ddp" if devices > 1 else "auto",
        "trainer.max_steps": case.steps,
        "trainer.val_check_interval": case.steps,
        "trainer.log_every_n_steps": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": folder,
        "model.architecture.model_dim": 16,
        "model.architecture.ff_dim": 32,
        "model.objective.evaluate_test": "true",
        "model.schedule.warmup_steps": 0,
        "data.cache": cache,
        **case.settings,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return ["fit", "--config", f"ablations/base/{case.base}", *words]


def write_corpus(folder: Path) -> None:
    folder.mkdir()
    config = DataConfig()
    pairs = sources.read(sources.locate(config), config).splits["train"]
    for split, rows in {"train": slice(21), "valid": slice(21, 26), "test": slice(26, 31)}.items():
        for column, language in {"source": "de", "target": "en"}.items():
            text = "".join(f"{line}\n" for line in pairs[column][rows])
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


SLOW = {"masked_lm", "streams", "profiled_skips", "capped"}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, cache: str, request: pytest.FixtureRequest
) -> Path:
    """The folder with the runs of the cases, NAME/one and NAME/two; two launches train them."""
    folder = tmp_path_factory.mktemp("ddp")
    write_corpus(folder / "corpus")
    selected = {item.name.partition("[")[2].rstrip("]") for item in request.session.items}
    cases = {name: of for name, of in CASES.items() if name not in SLOW or name in selected}
    for devices, name in ((1, "one"), (2, "two")):
        calls = []
        for case, what in cases.items():
            own = {"data.root": folder / "corpus"} if "data.root" in what.settings else {}
            what = Case(what.base, what.steps, what.settings | own)
            calls.append(arguments(folder / case / name, cache, what, devices))
        (folder / name).write_text(json.dumps(calls))
        done = warm.run_ranks(["-m", "tests.fits", str(folder / name)], devices)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(run: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The rows of a run's table, and its result."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((run / "result.json").read_text())


def columns(run: Path) -> dict[str, list[float]]:
    """The numbers of each column of a run's table that has one in every row."""
    rows, _ = read(run)
    full = [name for name in rows[0] if all(row[name] for row in rows)]
    return {name: [float(row[name]) for row in rows] for name in full}


def assert_two_equal_one(folder: Path, steps: int, near: float = 1e-10) -> dict[str, Any]:
    one, single = read(folder / "one")
    two, double = read(folder / "two")
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


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_like_one(runs: Path, name: str) -> None:
    assert_two_equal_one(runs / name, CASES[name].steps)


def test_what_only_some_cases_report(runs: Path) -> None:
    metrics = read(runs / "causal_lm" / "two")[1]["metrics"]
    assert {"val/bits_per_byte", "average/test/word_perplexity"} <= set(metrics)
    one, two = (columns(runs / "dynamic_spans" / run) for run in ("one", "two"))
    spans = [name for name in one if name.startswith(("probe/span/", "train/aux/span"))]
    assert len([name for name in spans if name.count("/") == 4]) == (3 + 3) * 4
    for name in spans:
        assert one[name] == pytest.approx(two[name], abs=1e-5), name
        assert len(set(one[name])) == 5, name
    one, two = (columns(runs / "muon" / run)["train/largest_logit"] for run in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-6)
    assert min(one) > 0.02, "no head would be bounded"
    one, two = (columns(runs / "halting" / run) for run in ("one", "two"))
    assert one["train/aux/ponder"] == pytest.approx(two["train/aux/ponder"], abs=1e-10)
    assert len(set(one["train/aux/ponder"])) == 5


@pytest.mark.slow
def test_translation_and_predictions(tmp_path: Path, cache: str) -> None:
    """Lightning launches the second rank, in float32 as users train; both runs predict alike.

    Takes over 5 s: the second rank starts cold.
    """
    settings = {"trainer.precision": "32-true", "model.objective.validation_bleu": 33}
    settings |= {"trainer.limit_val_batches": 10, "trainer.limit_test_batches": 3}
    for devices, name in ((1, "one"), (2, "two")):
        case = Case("synthetic.yaml", 5, settings)
        done = warm.run(["-m", "lightning_app", *arguments(tmp_path / name, cache, case, devices)])
        assert done.returncode == 0, done.stderr[-3000:]
    result = assert_two_equal_one(tmp_path, 5, near=1e-5)
    assert {"val/bleu", "test/bleu", "test/sacrebleu"} <= set(result["metrics"])
    lines = [(tmp_path / run / "hypotheses.txt").read_text() for run in ("one", "two")]
    assert lines[0] == lines[1]
    assert lines[0].count("\n") > 100

    printed = []
    for devices, strategy in ((1, "auto"), (2, "ddp")):
        command = ["-m", "lightning_app", "predict", "--config", f"{tmp_path}/one/config.yaml"]
        command += ["--ckpt_path", str(tmp_path / "one" / "checkpoints" / "last.ckpt")]
        command += ["--trainer.devices", str(devices), "--trainer.strategy", strategy]
        done = warm.run_ranks(command, devices)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.splitlines())
    assert len(printed[0]) == 500
    assert printed[1] == printed[0]


@pytest.mark.slow
def test_two_hosts_under_torchrun_give_what_one_gives(tmp_path: Path, cache: str) -> None:
    """Two agents of one process each, as on two hosts, which meet on loopback."""
    one = arguments(tmp_path / "one", cache, Case("synthetic.yaml", 4), 1)
    done = warm.run(["-m", "lightning_app", *one])
    assert done.returncode == 0, done.stderr[-3000:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    nodes = {"trainer.num_nodes": 2, "trainer.strategy": "ddp"}
    two = arguments(tmp_path / "two", cache, Case("synthetic.yaml", 4, nodes), 1)
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *hosts, "--node-rank", str(rank)),
                *("--master-port", str(port), "-m", "lightning_app", *two),
            ]
        )
        for rank in (0, 1)
    ]
    assert [agent.wait(timeout=300) for agent in agents] == [0, 0]
    single, double = (read(tmp_path / run)[1] for run in ("one", "two"))
    assert (double["id"], double["devices"]) == (single["id"], 2)
    assert double["metrics"]["val/nll"] == pytest.approx(single["metrics"]["val/nll"], abs=1e-10)
