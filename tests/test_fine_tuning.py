"""Fine-tuning runs on small tables of GLUE, from the config to the result."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.grids.size import parameters
from lightning_app.runs.parent import read_checkpoint
from tests import tables, warm


def fit(tree: dict[str, Any], folder: Path, **fields: Any) -> dict[str, Any]:
    return json.loads((tables.fitted(tree, folder, **fields) / "result.json").read_text())


def single_precision(value: float) -> float:
    """Lightning keeps what a module logs in float32."""
    return float(np.float32(value))


def one_by_one(folder: Path) -> tuple[Any, Any, list[np.ndarray]]:
    """The validation rows, their corpus, and the outputs of each row computed alone."""
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    data = data_module(tree["data"])
    data.setup()
    module = transformer_module(tree["model"])
    module.build(data.vocab_size)
    state = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
    module.double().load_state_dict(state)
    module.eval()
    rows: Any = data.val_dataloader().dataset
    outputs = []
    with torch.no_grad():
        for row in range(len(rows)):
            batch = rows[0, np.array([row])]
            assert module.model is not None
            outputs.append(module.model(batch.tokens, batch.segments)[0].numpy())
    return rows, data.corpus, outputs


def on_one_and_two(tree: dict[str, Any], folder: Path, **fields: Any) -> tuple[Any, Any]:
    ddp = {"trainer__devices": 2, "trainer__strategy": "ddp"}
    single, double = fit(tree, folder / "one", **fields), fit(tree, folder / "two", **fields, **ddp)
    assert double["devices"] == 2
    assert [single[key] for key in ("id", "tokens")] == [double[key] for key in ("id", "tokens")]
    assert single["metrics"].keys() == double["metrics"].keys()
    return single, double


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", ["mrpc", "cola", "stsb", "mnli"])
def test_two_ranks_give_the_metric_of_one_exactly(tmp_path: Path, name: str) -> None:
    """71 rows on two ranks, each of them once; the scores again from rows computed alone."""
    tree = tables.fine_tuning(tables.write_table(tmp_path / "table", name), name)
    settings: dict[str, Any] = {"trainer__precision": "64-true", "trainer__max_steps": 7}
    settings |= {"trainer__val_check_interval": 7, "data__tokens_per_batch": 100}
    single, double = on_one_and_two(tree, tmp_path, **settings)
    metrics, others = single["metrics"], double["metrics"]
    exact = {"accuracy", "f1", "matthews", "majority_accuracy"}
    for key, value in metrics.items():
        if key.partition("/")[2] in exact:
            assert others[key] == value, key
        elif key != "train/tokens_per_second":
            assert others[key] == pytest.approx(value, rel=1e-6), key
    assert sum(single["validation_parts"]["tokens"]) == 71
    assert single["validation_parts"]["tokens"] == double["validation_parts"]["tokens"]

    rows, _, found = one_by_one(tmp_path / "one" / "it")
    labels, outputs = rows.labels, np.array(found)
    assert len(labels) == 71
    if name == "stsb":
        answers = outputs[:, 0]
        assert metrics["val/mse"] == pytest.approx(float(np.mean((answers - labels) ** 2)))
        correlation = float(np.corrcoef(answers, labels)[0, 1])
        assert metrics["val/pearson"] == pytest.approx(correlation)
        assert "val/spearman" in metrics
        assert not {"val/accuracy", "val/majority_accuracy"} & metrics.keys()
        nll = 0.5 * metrics["val/mse"] + 0.5 * math.log(2 * math.pi)
        floor = 0.5 * float(np.var(labels)) + 0.5 * math.log(2 * math.pi)
    else:
        answers = outputs.argmax(axis=1)
        assert metrics["val/accuracy"] == single_precision(float(np.mean(answers == labels)))
        shares = np.unique(labels, return_counts=True)[1] / 71
        assert metrics["val/majority_accuracy"] == single_precision(float(shares.max()))
        floor = float(-(shares * np.log(shares)).sum())
        shifted = outputs - outputs.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        nll = -float(np.mean(logs[np.arange(71), labels.astype(int)]))
    assert metrics["val/nll"] == pytest.approx(nll, rel=1e-6)
    assert single["unigram_entropy"] == pytest.approx(floor)
    tp = int(np.sum((answers == 1) & (labels == 1)))
    fp, fn = (int(np.sum((answers == a) & (labels == 1 - a))) for a in (1, 0))
    tn = 71 - tp - fp - fn
    if name == "mrpc":
        expected = 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0
        assert metrics["val/f1"] == single_precision(expected)
    if name == "cola":
        root = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
        expected = (tp * tn - fp * fn) / math.sqrt(root) if root else 0.0
        assert metrics["val/matthews"] == pytest.approx(expected)
    assert ("test/accuracy" in metrics) == (name == "mnli")


def test_a_diverged_regression_is_a_result(tmp_path: Path) -> None:
    """It has no correlation, which is null in the file of the result, and no number of 0."""
    tree = tables.fine_tuning(tables.write_table(tmp_path / "table", "stsb"), "stsb")
    settings: dict[str, Any] = {"trainer__max_steps": 6, "trainer__val_check_interval": 3}
    result = fit(tree, tmp_path / "one", **settings, model__optimizer__lr=1e30)
    assert result["status"] == "diverged"
    scores = {"val/nll", "val/mse", "val/pearson", "val/spearman"}
    assert {key: result["metrics"][key] for key in scores} == dict.fromkeys(scores)


def test_a_task_with_a_telling_word_is_learned(tmp_path: Path) -> None:
    tree = tables.fine_tuning(tables.write_table(tmp_path / "table", "mnli", train=150), "mnli")
    settings: dict[str, Any] = {"trainer__max_steps": 200, "trainer__val_check_interval": 100}
    settings |= {"model__optimizer__lr": 0.01, "data__tokens_per_batch": 512}
    found = fit(tree, tmp_path / "run", **settings)
    assert found["outcome"] == "trained"
    assert found["metrics"]["val/accuracy"] > 0.9
    call = ["--config", str(tmp_path / "run" / "it" / "config.yaml"), "--ckpt_path", "last"]
    done = warm.run(["-m", "lightning_app", "predict", *call])
    assert done.returncode == 0, done.stderr[-3000:]
    answers = done.stdout.split()
    lines = (tmp_path / "table" / "dev_mismatched.tsv").read_text().splitlines()[1:]
    labels = [str(tables.MNLI.index(line.split("\t")[-1])) for line in lines]
    right = sum(a == b for a, b in zip(answers, labels, strict=True))
    assert right / len(labels) == pytest.approx(found["metrics"]["test/accuracy"])


def test_a_part_of_the_validation_set_has_its_own_floor(tmp_path: Path) -> None:
    tree = tables.fine_tuning(tables.write_table(tmp_path / "table", "rte"), "rte")
    found = fit(tree, tmp_path / "run", trainer__limit_val_batches=2)
    count = sum(found["validation_parts"]["tokens"])
    assert 0 < count < 71
    assert f"{count} of 71" in found["data"]["protocol"]
    share = found["metrics"]["val/majority_accuracy"]
    assert share * count == pytest.approx(round(share * count))
    entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p)
    assert found["unigram_entropy"] == pytest.approx(entropy)


def test_parameters_are_counted(tmp_path: Path) -> None:
    counts = []
    for name in ("rte", "mnli", "stsb"):
        tree = resolve(tables.fine_tuning(tables.write_table(tmp_path / name, name), name), "a")
        objective = tree["model"]["objective"]
        assert (objective["glue"], objective["label_smoothing"]) == (tables.FOLDERS[name], 0.0)
        assert resolve(tree, "a") == tree
        data = data_module(tree["data"])
        data.setup()
        module = transformer_module(tree["model"])
        module.build(data.vocab_size)
        counts.append(parameters(tree))
        assert counts[-1] == sum(p.numel() for p in module.parameters())
    assert counts[1] - counts[0] == 13
    assert counts[0] - counts[2] == 13


LEARNED = {"model__architecture__positions": "learned", "model__architecture__max_positions": 32}
REFUSED = [
    ({"data__window": 40, **LEARNED}, "model.architecture.max_positions: 32 … data.window 40"),
    ({"model__architecture__kind": "decoder"}, "cannot serve model.objective.kind 'glue'"),
    ({"model__objective__glue": "SST-2"}, "model.objective.glue: set from data.name"),
    ({"model__objective__next_sentence": True}, "next_sentence true: … masked_lm"),
    ({"model__objective__intermediate_weight": 1.0}, "kind glue takes"),
    ({"data__root": "nowhere"}, "data.root:"),
    ({"model__init_from": "nowhere"}, "model.init_from:"),
    ({"data__init_from": "nowhere"}, "data.init_from: set from model.init_from"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_mistakes_are_one_line(tmp_path: Path, refuse: Any, fields: Any, said: str) -> None:
    refuse(tables.fine_tuning(tables.write_table(tmp_path / "table", "rte"), "rte"), said, **fields)


def test_a_table_of_one_class_is_refused(tmp_path: Path, refuse: Any) -> None:
    root = tables.write_table(tmp_path / "table", "sst2")
    (root / "dev.tsv").write_text("sentence\tlabel\na film\t1\na cat\t1\n")
    refuse(tables.fine_tuning(root, "sst2"), "all that is")
