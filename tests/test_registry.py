"""The table of named parts, and that a part from outside the package works in a run."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_app.cli import main
from lightning_app.core.errors import UserError
from lightning_app.core.registry import OWN, Registry
from lightning_app.data.config import DataConfig
from lightning_app.data.sources import corpus_digest
from lightning_app.models.optim import OPTIMIZERS, Groups, OptimizerConfig
from lightning_app.plugins import unload
from tests.plugins.conftest import PARTS

BASE = Path(__file__).parents[1] / "ablations" / "base" / "synthetic.yaml"


def test_parts_are_found_by_name_in_their_order() -> None:
    table: Registry[int] = Registry("a.b")
    table.add("two", 2)
    table.add("one", 1)
    assert list(table) == ["two", "one"]
    assert table["one"] == 1
    assert "one" in table
    assert "three" not in table
    assert len(table) == 2
    assert dict(table) == {"two": 2, "one": 1}


def test_a_decorator_without_a_name_adds_nothing_silently() -> None:
    table: Registry[type] = Registry("a.b")
    with pytest.raises(TypeError, match=r"a\.b: .*@register\('Registry'\)"):
        table.register(Registry)  # pyright: ignore[reportArgumentType]
    assert len(table) == 0


def test_an_unknown_name_is_one_line_with_the_nearest_one() -> None:
    table: Registry[int] = Registry("a.b")
    table.add("first", 1)
    table.add("second", 2)
    line = "a.b: unknown name 'frist'; did you mean 'first'?" + OWN
    with pytest.raises(UserError) as caught:
        _ = table["frist"]
    assert str(caught.value) == line
    with pytest.raises(UserError, match="'x'; expected one of 'first', 'second'"):
        _ = table["x"]


def test_a_name_is_registered_once() -> None:
    table: Registry[int] = Registry("a.b")
    table.add("one", 1)
    with pytest.raises(ValueError, match="'one' is already registered"):
        table.add("one", 2)


SHORT = [
    *("fit", "--config", str(BASE), "--trainer.max_steps", "2", "--trainer.val_check_interval"),
    *("2", "--trainer.limit_val_batches", "1", "--model.schedule.reference_steps", "1"),
    *("--model.schedule.warmup_steps", "1", "--model.objective.evaluate_test", "false"),
    *("--trainer.default_root_dir", "run"),
]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_optimizer_and_a_corpus_from_outside_train(outside: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(outside / "cache"))
    (outside / "some_own_parts.py").write_text(PARTS)
    words = ["--data.name", "counting", "--data.tokenizer", "word", "--data.vocab_size", "null"]
    words += ["--model.optimizer.kind", "plain_sgd"]
    try:
        assert main(["--plugin", "some_own_parts.py", *SHORT, *words]) == 0, capsys.readouterr().err
        (meta,) = (outside / "cache").glob("counting-*/meta.json")
        assert '"numbers: 120 pairs' in meta.read_text()
        digest = corpus_digest(DataConfig(name="counting"))
        sys.modules["some_own_parts"].LINES["target"][0] = "two one"
        assert corpus_digest(DataConfig(name="counting")) != digest
    finally:
        unload("some_own_parts")
    checkpoint = torch.load(outside / "run/checkpoints/last.ckpt", weights_only=True)
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
