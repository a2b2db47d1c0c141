"""The table of named parts, and that a part from outside the package works in a run."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_app.cli import main
from lightning_app.core.errors import UserError
from lightning_app.core.registry import Registry
from lightning_app.data.config import DataConfig
from lightning_app.data.sources import corpus_digest
from lightning_app.models.optim import OPTIMIZERS, Groups, OptimizerConfig
from lightning_app.plugins import unload
from tests.plugins.conftest import PARTS

BASE = Path(__file__).parents[1] / "ablations" / "base" / "synthetic.yaml"


def test_parts_are_found_by_name_in_their_order_and_an_unknown_one_is_one_line() -> None:
    table: Registry[int] = Registry("a.b")
    table.add("two", 2)
    table.add("one", 1)
    assert list(table) == ["two", "one"]
    assert table["one"] == 1
    assert "one" in table
    assert "three" not in table
    assert dict(table) == {"two": 2, "one": 1}
    with pytest.raises(ValueError, match="'one' is already registered"):
        table.add("one", 2)
    with pytest.raises(TypeError, match=r"a\.b: .*@register\('Registry'\)"):
        table.register(Registry)  # pyright: ignore[reportArgumentType]
    assert len(table) == 2
    with pytest.raises(UserError, match=r"^a\.b: unknown name 'tow'; .* 'two'"):
        _ = table["tow"]
    with pytest.raises(UserError, match="'x'; expected one of 'two', 'one'"):
        _ = table["x"]


SHORT = [
    *("fit", "--config", str(BASE), "--trainer.max_steps", "2", "--trainer.val_check_interval"),
    *("2", "--trainer.limit_val_batches", "1", "--model.schedule.reference_steps", "1"),
    *("--model.schedule.warmup_steps", "1", "--model.objective.evaluate_test", "false"),
    *("--trainer.default_root_dir", "run"),
]


def test_an_optimizer_and_a_corpus_from_outside_train(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "some_own_parts.py").write_text(PARTS)
    words = ["--data.name", "counting", "--data.tokenizer", "word", "--data.vocab_size", "null"]
    words += ["--model.optimizer.kind", "plain_sgd"]
    try:
        assert main(["--plugin", "some_own_parts.py", *SHORT, *words]) == 0, capsys.readouterr().err
        (meta,) = (tmp_path / "cache").glob("counting-*/meta.json")
        assert '"numbers: 120 pairs' in meta.read_text()
        digest = corpus_digest(DataConfig(name="counting"))
        sys.modules["some_own_parts"].LINES["target"][0] = "two one"
        assert corpus_digest(DataConfig(name="counting")) != digest
    finally:
        unload("some_own_parts")
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    (group, *_) = checkpoint["optimizer_states"][0]["param_groups"]
    assert group["momentum"] == 0
    assert "betas" not in group


def test_groups_are_what_an_optimizer_takes() -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    groups: Groups = [{"params": [matrix], "weight_decay": 0.5, "role": "matrices"}]
    for build in OPTIMIZERS.values():
        optimizer = build(OptimizerConfig(lr=0.25), groups, fused=False)
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert optimizer.param_groups[0]["weight_decay"] == 0.5
