"""Runs that predict next sentences, from the config to the result."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.config.config import resolve
from lightning_app.config.experiment import cell_id
from lightning_app.config.rulers import MetricChoice, check_metric
from lightning_app.core.errors import UserError
from lightning_app.grids.size import parameters
from tests import warm
from tests.documents import run_tree, write_documents
from tests.tables import changed, fitted


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    return run_tree(write_documents(tmp_path, documents=9))


def fit(tree: dict[str, Any], folder: Path, **fields: Any) -> tuple[list[dict[str, str]], Any]:
    run = fitted(tree, folder, **fields)
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((run / "result.json").read_text())


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(tmp_path: Path, tree: dict[str, Any]) -> None:
    """Every step, and the scores of every pair once; 3 epochs, so that pairs are drawn again."""
    settings: dict[str, Any] = {"trainer__precision": "64-true", "trainer__max_steps": 12}
    settings |= {"trainer__val_check_interval": 12, "data__whole_word": True}
    settings |= {"model__objective__label_smoothing": 0.0}
    ddp = {"trainer__devices": 2, "trainer__strategy": "ddp"}
    one, single = fit(tree, tmp_path / "one", **settings)
    two, double = fit(tree, tmp_path / "two", **settings, **ddp)
    assert len(one) == len(two) == 12
    for a, b in zip(one, two, strict=True):
        for column in ("train/loss", "train/nll", "train/aux/next_sentence", "train/grad_norm"):
            assert float(a[column]) == pytest.approx(float(b[column]), abs=1e-10), column
        total = float(a["train/nll"]) + float(a["train/aux/next_sentence"])
        assert float(a["train/loss"]) == pytest.approx(total, abs=1e-10)
    assert single["id"] == double["id"]
    metrics = single["metrics"]
    for name in ("nll", "accuracy", "nsp_nll", "nsp_accuracy"):
        for stage in ("val", "test"):
            found = double["metrics"][f"{stage}/{name}"]
            assert found == pytest.approx(metrics[f"{stage}/{name}"], rel=1e-5), name
    assert single["validation_parts"]["tokens"] == double["validation_parts"]["tokens"]
    assert "16 tokens" in single["data"]["protocol"]


def test_label_smoothing_is_of_masked_words_alone(tmp_path: Path, tree: dict[str, Any]) -> None:
    plain, _ = fit(tree, tmp_path / "plain", model__objective__label_smoothing=0.0)
    smooth, _ = fit(tree, tmp_path / "smooth", model__objective__label_smoothing=0.2)
    first = [float(rows[0]["train/aux/next_sentence"]) for rows in (plain, smooth)]
    assert first[0] == first[1]
    assert float(plain[0]["train/nll"]) == float(smooth[0]["train/nll"])
    assert float(plain[0]["train/loss"]) != float(smooth[0]["train/loss"])


def test_a_complete_config_is_read_again_and_defaults_keep_their_id(tree: dict[str, Any]) -> None:
    for value in (True, False):
        given = changed(tree, model__objective__next_sentence=value)
        given["data"].pop("next_sentence", None)
        complete = resolve(given, "a")
        assert complete["data"]["next_sentence"] is value
        assert resolve(complete, "a") == complete
    with pytest.raises(UserError, match=r"data\.next_sentence: set from model\.objective"):
        resolve(changed(complete, data__next_sentence=True), "a")

    # Explicit false and absent fields are one experiment; true is another.
    def whole(*, pairs: bool, words: bool) -> dict[str, Any]:
        given = changed(tree, model__objective__next_sentence=pairs, data__whole_word=words)
        return resolve(given, "a")

    plain = changed(tree)
    del plain["model"]["objective"]["next_sentence"]
    assert resolve(plain, "a") == whole(pairs=False, words=False)
    every = [(pairs, words) for pairs in (False, True) for words in (False, True)]
    assert len({cell_id(whole(pairs=pairs, words=words)) for pairs, words in every}) == 4


def test_parameters_are_counted(tree: dict[str, Any]) -> None:
    """The pooler and the two logits with their biases, and two segments, of width 12."""
    with_head = parameters(resolve(tree, "a"))
    without = parameters(resolve(changed(tree, model__objective__next_sentence=False), "a"))
    assert with_head - without == 12 * 12 + 12 + 2 * 12 + 2 + 2 * 12


REFUSED = [
    ({"model__objective__kind": "causal_lm", "model__architecture__kind": "decoder"}, "causal_lm"),
    ({"model__block": {"preset": "pre_ln", "memory": {"length": 4}}}, "memory"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_mistakes_are_one_line(tree: Any, refuse: Any, fields: Any, said: str) -> None:
    refuse(tree, said, **fields)


def test_a_grid_on_next_sentences_needs_them(tmp_path: Path, tree: dict[str, Any]) -> None:
    for name, mode in (("val/nsp_nll", "min"), ("val/nsp_accuracy", "max")):
        assert check_metric(MetricChoice(name=name), {}, {}) == (name, mode)
    grid = {
        "name": "mine",
        "base_config": changed(tree, model__objective__next_sentence=False),
        "axes": {"model.block.preset": ["post_ln", "pre_ln"]},
        "metric": {"name": "val/nsp_nll"},
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    done = warm.run(["-m", "lightning_app", "plan", str(path)])
    assert done.returncode == 2
    assert "only with model.objective.next_sentence: true" in done.stderr
    path.write_text(yaml.safe_dump({**grid, "base_config": tree}))
    assert warm.run(["-m", "lightning_app", "plan", str(path)]).returncode == 0
