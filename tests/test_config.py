"""Configs: what is completed, what is refused and in which words, and what makes two runs one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.config import IRRELEVANT, cell_id, leaves, resolve
from lightning_app.errors import UserError

SYNTHETIC = Path("ablations/base/synthetic.yaml")


def tree() -> dict[str, Any]:
    return yaml.safe_load(SYNTHETIC.read_text())


def changed(key: str, value: Any, config: dict[str, Any] | None = None) -> dict[str, Any]:
    config = tree() if config is None else config
    *parents, last = key.split(".")
    part = config
    for parent in parents:
        part = part.setdefault(parent, {})
    part[last] = value
    return config


def test_a_resolved_config_is_complete_and_resolves_to_itself() -> None:
    config = resolve(tree(), "x.yaml")
    assert config["model"]["architecture"]["positions"] == "sinusoidal"
    assert config["data"]["task"] == "translation"
    assert config["data"]["seed"] == 1
    assert resolve(config, "x.yaml") == config


def test_the_same_experiment_has_the_same_id() -> None:
    config = resolve(tree(), "x.yaml")
    identity = cell_id(config)
    assert len(identity) == 16
    for key in IRRELEVANT:
        assert key in dict(leaves(config)), key
    elsewhere = changed("trainer.devices", 4, changed("data.cache", "/tmp", tree()))
    assert cell_id(resolve(elsewhere, "x.yaml")) == identity


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed_everything", 2),
        ("model.block.preset", "post_ln"),
        ("model.block.shaped_attention", {"alpha": 0.5}),
        ("model.optimizer.lr", 1e-3),
        ("model.schedule.warmup_steps", 0),
        ("trainer.max_steps", 201),
        ("trainer.precision", "bf16-mixed"),
        ("trainer.gradient_clip_val", 1.0),
        ("data.tokens_per_batch", 1025),
    ],
)
def test_another_experiment_has_another_id(key: str, value: Any) -> None:
    before = cell_id(resolve(tree(), "x.yaml"))
    assert cell_id(resolve(changed(key, value), "x.yaml")) != before


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.block.nrom", "x", ["model.block.nrom", "did you mean 'norm'"]),
        ("trainer.max_stepz", 3, ["trainer.max_stepz", "max_steps"]),
        ("modl", 3, ["modl", "model"]),
        ("model.optimizer.lr", "fast", ["model.optimizer.lr", "a number", "'fast'"]),
        ("model.optimizer.lr", -1.0, ["lr -1.0", "above 0"]),
        ("model.schedule.warmup_steps", 1.5, ["warmup_steps", "a whole number", "1.5"]),
        ("model.block.norm_placement", "pst", ["norm_placement", "'pst'", "did you mean 'post'"]),
        ("model.block.preset", "pre_lm", ["preset", "'pre_lm'", "did you mean 'pre_ln'"]),
        ("model.block.shaped_attention", {"betaa": 1}, ["shaped_attention", "betaa", "beta"]),
        ("model.block.attention_skip", {"value": "q"}, ["attention_skip", "value", "a number"]),
        ("model.block", {"preset": "post_ln", "layout": "parallel"}, ["parallel", "post"]),
        ("model.block", {"norm_placement": "none"}, ["norm_placement none", "explodes"]),
        ("model.block", {"attention_skip": {"value": 0.0}}, ["attention_skip 0", "collapses"]),
        ("model.architecture.kind", "encoder", ["'encoder'", "translation", "encoder_decoder"]),
        ("model.architecture.num_heads", 5, ["model_dim 64", "num_heads 5"]),
        ("model.architecture.encoder_depth", 0, ["encoder_depth 0"]),
        ("model.objective.beam", 0, ["beam 0"]),
        ("data.name", "wikitext2", ["wikitext2", "masked_lm"]),
        ("data.vocab_size", "many", ["data.vocab_size", "a whole number", "'many'"]),
    ],
)
def test_a_mistake_is_one_line_that_names_file_field_and_value(
    key: str, value: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        resolve(changed(key, value), "mine.yaml")
    message = str(caught.value)
    assert message.startswith("mine.yaml: ")
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("first", ["int, float", "float, int"])
def test_the_id_does_not_depend_on_what_was_imported_before(first: str) -> None:
    """Python keeps one object for both orders of a union, the first one asked for."""
    code = (
        f"from typing import Union; Union[{first}]\n"
        "import yaml; from lightning_app.config import cell_id, resolve\n"
        f"tree = yaml.safe_load(open({str(SYNTHETIC)!r}))\n"
        "tree['trainer'] |= {'gradient_clip_val': 1, 'limit_val_batches': 2}\n"
        "config = resolve(tree, 'x')\n"
        "assert type(config['trainer']['limit_val_batches']) is int\n"
        "print(cell_id(config))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    config = changed("trainer.gradient_clip_val", 1, changed("trainer.limit_val_batches", 2))
    assert done.stdout.strip() == cell_id(resolve(config, "x"))
