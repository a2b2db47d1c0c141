"""Configs: what is completed, what is refused and in which words, and what makes two runs one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.config.config import check_rows, resolve
from lightning_app.config.experiment import cell_id
from lightning_app.core.errors import UserError
from lightning_app.data.prepare import prepare
from lightning_app.data.sources import resolved_data
from tests import warm
from tests.small import tiny_config
from tests.told import told

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
    probe = {"class_path": "lightning_app.training.callbacks.probes.SignalProbe", "init_args": {}}
    # What was written stays as it was.
    written = {"trainer": {"callbacks": [probe], "max_steps": 5000}}
    before = json.dumps(written)
    resolve(written, "mine.yaml")
    assert json.dumps(written) == before


LINEAR = ["model.schedule.reference_steps: 4000", "warmup_steps 60", "below the 200 steps"]
ACCUMULATED = ["trainer.accumulate_grad_batches: 4; must be 1", "data.tokens_per_batch 4 times"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.optimizer.lr", "fast", ["model.optimizer.lr", "a number", "'fast'"]),
        ("model.optimizer.lr", -1.0, ["lr -1.0", "1e-30"]),
        ("model.schedule", {"kind": "linear", "warmup_steps": 60}, LINEAR),
        ("trainer.accumulate_grad_batches", 4, ACCUMULATED),
        ("model.block.norm_placement", "pst", ["norm_placement", "'pst'", "did you mean 'post'"]),
        ("model.block", {"preset": "post_ln", "layout": "parallel"}, ["parallel", "post"]),
        ("model.block", {"norm_placement": "none"}, ["norm_placement none", "explodes"]),
        ("model.block", {"attention_skip": {"value": 0.0}}, ["attention_skip 0", "collapses"]),
        ("model.architecture.kind", "encoder", ["'encoder'", "translation", "encoder_decoder"]),
        ("model.architecture.num_heads", 5, ["model_dim 64", "num_heads 5"]),
        ("model.architecture.encoder_depth", 0, ["encoder_depth 0"]),
        ("model.architecture.encoder_depth", 10**12, ["encoder_depth 1000000000000", "10,000"]),
        ("model.objective.beam", 0, ["beam 0"]),
        ("data.name", "wikitext2", ["wikitext2", "masked_lm"]),
    ],
)
def test_a_mistake_names_file_field_and_value(key: str, value: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(changed(key, value), "mine.yaml")
    message = str(caught.value)
    assert message.startswith("mine.yaml: ")
    assert "\n" not in message
    for word in words:
        assert word in message, message


VECTOR = "gain vector: true … learned: true"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ff_skip", {"vector": True}, f"ff_skip: {VECTOR}"),
        ("ff_branch", {"value": float("nan")}, "ff_branch.value: nan"),
        ("value_gains", {"kept": {"vector": True}}, f"value_gains.kept: {VECTOR}"),
        ("output_gains", {"change": {"learned": True, "vector": True}}, "output_gains: … scalars:"),
    ],
)
def test_what_a_part_refuses_is_reported_with_its_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(changed(f"model.block.{key}", value), "mine.yaml")
    assert told(f"mine.yaml: model.block.{message}").match(str(caught.value))


def test_an_unfused_norm_under_autocast_says_nothing() -> None:
    code = (
        "import torch\n"
        "from lightning_app.training.run import quiet\n"
        "quiet()\n"
        "norm = torch.nn.RMSNorm(8)\n"
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    norm(torch.ones(2, 8, dtype=torch.bfloat16))\n"
    )
    done = warm.run(["-c", code])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("first", ["int, float", "float, int"])
def test_the_id_does_not_depend_on_what_was_imported_before(first: str) -> None:
    """Python keeps one object for both orders of a union, the first one asked for."""
    code = (
        f"from typing import Union; Union[{first}]\n"
        "import yaml; from lightning_app.config.config import resolve\n"
        "from lightning_app.config.experiment import cell_id\n"
        f"tree = yaml.safe_load(open({str(SYNTHETIC)!r}))\n"
        "tree['trainer'] |= {'gradient_clip_val': 1, 'limit_val_batches': 2}\n"
        "config = resolve(tree, 'x')\n"
        "assert type(config['trainer']['limit_val_batches']) is int\n"
        "print(cell_id(config))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    config = changed("trainer.gradient_clip_val", 1, changed("trainer.limit_val_batches", 2))
    assert done.stdout.strip() == cell_id(resolve(config, "x"))


def test_a_share_of_an_epoch_needs_epochs(tmp_path: Path) -> None:
    config = pairs(tmp_path)
    trainer = config["trainer"] | {"val_check_interval": 0.5}
    with pytest.raises(UserError, match=r"trainer\.val_check_interval.*0\.5"):
        resolve({**config, "trainer": trainer}, "x")
    resolve({**config, "trainer": trainer | {"check_val_every_n_epoch": 1}}, "x")


def pairs(folder: Path, **longest: int) -> dict[str, Any]:
    """Write a corpus of short pairs, with one longer line in the files that are named."""
    for split in ("train", "valid", "test"):
        for side in ("no", "en"):
            lines = ["en hund løp", "a b"] * 4
            if (words := longest.get(f"{split}_{side}")) is not None:
                lines[5] = " ".join(["hund"] * words)
            (folder / f"{split}.{side}").write_text("\n".join(lines) + "\n")
    steps = {"max_steps": 2, "val_check_interval": 2, "log_every_n_steps": 1}
    config = tiny_config(steps, width=8)
    config["model"]["architecture"] |= {"positions": "learned", "max_positions": 12}
    data = {"name": "text", "source_language": "no", "target_language": "en", "max_length": 10}
    data |= {"tokenizer": "word", "vocab_size": None, "tokens_per_batch": 64}
    return {**config, "data": {**data, "root": str(folder), "cache": str(folder / "c")}}


@pytest.mark.parametrize("file", ["valid_no", "valid_en", "test_no", "test_en"])
def test_every_row_of_every_split_must_fit_the_positions(file: str, tmp_path: Path) -> None:
    config = resolve(pairs(tmp_path, **{file: 12}), "x.yaml")
    check_rows(config)  # not prepared: nothing is known
    prepare(resolved_data(config["data"]))
    split, side = file.split("_")
    column = {"no": "source", "en": "target"}[side]
    said = rf"max_positions.* row 6 of the {split} split, whose {column} has 13 tokens"
    with pytest.raises(UserError, match=said):
        check_rows(config)
    architecture = config["model"]["architecture"]
    architecture["max_positions"] = 13
    check_rows(config)
    architecture |= {"max_positions": 12, "positions": "sinusoidal"}
    check_rows(config)


def test_a_long_training_pair_is_dropped_and_fits(tmp_path: Path) -> None:
    config = resolve(pairs(tmp_path, train_no=40, train_en=40), "x.yaml")
    prepare(resolved_data(config["data"]))
    check_rows(config)


@pytest.mark.parametrize(
    ("command", "prepared"),
    [("plan g.yaml", True), ("run g.yaml", False), ("fit --config base.yaml", False)],
)
def test_no_step_is_trained_where_a_row_does_not_fit(
    command: str, prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = pairs(tmp_path, valid_no=20)
    Path("base.yaml").write_text(yaml.safe_dump(config))
    Path("g.yaml").write_text("name: g\nbase: base.yaml\naxes: {seed_everything: [1, 2]}\n")
    if prepared:
        prepare(resolved_data(resolve(config, "x.yaml")["data"]))
    done = warm.run(["-m", "lightning_app", *command.split()], folder=tmp_path)
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("ablate: ")]
    assert "row 6" in said
    assert not Path("experiments").exists()
