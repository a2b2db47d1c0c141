"""Ids: what changes one, what does not, and how new fields and defaults leave old ids alone."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.blocks import presets
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.config import identity as relevance
from lightning_app.config.config import resolve
from lightning_app.config.experiment import cell_id, identity_of, stacks_of
from lightning_app.config.identity import (
    Record,
    experiment_id,
    leaves,
    pins,
    read_record,
    relevant,
    relevant_blocks,
    without_evaluation_limits,
    write_record,
)
from lightning_app.config.tree import canonical
from tests.tables import changed

BASE = {"model": {"architecture": {"encoder_depth": 2, "decoder_depth": 2}}}
KINDS = ("callbacks", "strategies", "plugins")
CALLBACK, STRATEGY, PLUGIN = (f"lightning.pytorch.{kind}." for kind in KINDS)
STOPPING = {"class_path": f"{CALLBACK}EarlyStopping", "init_args": {"monitor": "val/nll"}}
PROBE = {"class_path": "lightning_app.training.callbacks.probes.SignalProbe"}
UPDATES = {"class_path": "lightning_app.training.callbacks.probes.UpdateProbe"}
BAR = {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}
CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "x"}}
OTHER_CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "y"}}


def config(**fields: Any) -> dict[str, Any]:
    """A resolved config with fields set by dotted keys, `__` for the dot."""
    return resolve(changed(BASE, **fields), "x.yaml", imports=True)


@pytest.fixture(scope="module")
def plain() -> str:
    return cell_id(config())


@pytest.mark.parametrize(
    "fields",
    [
        {"trainer__callbacks": [STOPPING]},
        {"trainer__callbacks": [PROBE, STOPPING]},
        {"trainer__plugins": {"class_path": "lightning.pytorch.plugins.DoublePrecision"}},
        {"trainer__strategy": "deepspeed"},
        {"trainer__strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"}},
        {"trainer__limit_val_batches": 2},
        {"trainer__limit_test_batches": 2},
        {"trainer__gradient_clip_val": 1.0},
        {"model__block__shaped_attention": {}},
        {"model__block__share": "all"},
        {"model__block__share": "all", "model__block__step_signal": "learned"},
        {"model__block__share": "all", "model__block__halting": {}},
        {"model__block__adaptive_span": {"longest": 32, "dynamic_bias": -4.0}},
        {"model__architecture__activation": "gelu"},
        {"seed_everything": 2},
        {"model__block__preset": "post_ln"},
        {"model__optimizer__lr": 3e-3},
        {"model__schedule__warmup_steps": 0},
        {"trainer__max_steps": 20001},
        {"trainer__precision": "bf16-mixed"},
        {"data__tokens_per_batch": 1025},
        {"data__window": 64},
        {"data__splits": {"train": "other"}},
    ],
    ids=str,
)
def test_what_can_change_a_result_changes_the_id(fields: dict[str, Any], plain: str) -> None:
    assert cell_id(config(**fields)) != plain


@pytest.mark.parametrize(
    "fields",
    [
        {"trainer__callbacks": [PROBE]},
        {"trainer__callbacks": [BAR, PROBE, UPDATES]},
        {"trainer__callbacks": []},
        {"trainer__plugins": {"class_path": "lightning.pytorch.plugins.TorchCheckpointIO"}},
        {"trainer__strategy": "ddp"},
        {"trainer__devices": 4},
        {"trainer__logger": False},
        {"trainer__logger": CSV},
        {"trainer__logger": [CSV, OTHER_CSV]},
        {"trainer__profiler": "simple"},
        {"trainer__limit_predict_batches": 2},
        {"model__compile": "blocks"},
        {"data__cache": "/somewhere"},
        {"data__num_workers": 2},
    ],
    ids=str,
)
def test_what_cannot_change_a_result_leaves_the_id(fields: dict[str, Any], plain: str) -> None:
    assert cell_id(config(**fields)) == plain


SCHEDULE = {"warmup_steps": 1, "reference_steps": 1}
PATIENT = {"monitor": "val/nll", "patience": 3, "min_delta": 1}
DOUBLE = {"device": "cpu", "precision_plugin": {"class_path": f"{PLUGIN}DoublePrecision"}}
MIXED, PRINTING = {"precision": "bf16-mixed", "device": "cpu"}, {"on_train_start": "builtins.print"}
FROZEN_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "2b365ddc6e91d666": ("callbacks", f"{CALLBACK}EMAWeightAveraging", {"decay": 0.99}),
    "c998d2582fbfd694": ("callbacks", "EMAWeightAveraging", {"decay": 0.9, "use_buffers": False}),
    "383e6513d674269f": ("callbacks", f"{CALLBACK}WeightAveraging", {}),
    "841585bac18dc9ff": ("callbacks", f"{CALLBACK}EarlyStopping", PATIENT),
    "7cf256cf6a71d087": ("callbacks", f"{CALLBACK}SpikeDetection", {}),
    "693e3731d74342cc": ("callbacks", "QKClip", {"tau": 50}),
    "657637a83f74bcdd": ("callbacks", "LastAverage", {"every": 1, "count": 3}),
    "11be3ece502e3415": ("callbacks", f"{CALLBACK}LambdaCallback", PRINTING),
    "6d38599dad11575b": ("strategy", f"{STRATEGY}SingleDeviceStrategy", DOUBLE),
    "b9cf6ec999f7a4b2": ("plugins", f"{PLUGIN}MixedPrecision", MIXED),
    "f36b0f1c19ab71bc": ("plugins", f"{PLUGIN}HalfPrecision", {}),
}


def test_the_defaults_of_a_class_are_in_the_id() -> None:
    """As Lightning 2.6 has them: an id does not move with how they are found."""
    for identity, (field, path, given) in FROZEN_CLASSES.items():
        entry = {"class_path": path, "init_args": given}
        trainer = {"max_steps": 4, field: [entry] if field == "callbacks" else entry}
        tree = {"trainer": trainer, "model": {"schedule": SCHEDULE}}
        assert cell_id(resolve(tree, "x.yaml", imports=True)) == identity, path


def test_a_number_of_batches_is_no_share_and_one_of_the_test_counts_where_it_is_evaluated() -> None:
    """For the Trainer 1 is one batch and 1.0 is all; a pinned default keeps its type."""
    whole = relevance.relevant(config(seed_everything=1))
    changed = relevance.relevant({**config(), "seed_everything": 1.0})
    assert changed == {**whole, "seed_everything": 1.0}
    some, share = (cell_id(config(trainer__limit_train_batches=n)) for n in (1, 1.0))
    assert some != share
    without = {"model__objective__evaluate_test": False}
    limited = config(**without, trainer__limit_test_batches=2)
    assert cell_id(limited) == cell_id(config(**without))
    assert without_evaluation_limits(limited) == config(**without)


def test_another_definition_of_a_preset_is_another_experiment(plain: str, monkeypatch) -> None:
    same = presets.PRESETS["pre_ln"]

    def redefined(stack: Stack) -> StackSpec:
        return replace(same(stack), embedding_gain=2.0)

    written = config()
    stacks = stacks_of(written)
    assert identity_of(written).id == plain
    parts = {**presets.PRESETS, "pre_ln": redefined}
    monkeypatch.setattr(presets.PRESETS, "_parts", parts)
    sizes = config(model__architecture__max_positions=1025)  # nothing of it was resolved before
    assert stacks_of(sizes) != stacks
    corpus = identity_of(written).corpus
    assert experiment_id(relevant(written), relevant_blocks(stacks_of(sizes)), corpus) != plain


def test_an_edited_corpus_is_another_experiment_and_a_moved_one_is_not(tmp_path: Path) -> None:
    def write(folder: Path, last: str = "drei\n") -> str:
        folder.mkdir(exist_ok=True)
        for split in ("train", "valid", "test"):
            (folder / f"{split}.de").write_text("eins\nzwei\n" + last)
            (folder / f"{split}.en").write_text("one\ntwo\nthree\n")
        return cell_id(config(data__name="text", data__root=str(folder)))

    here = write(tmp_path / "here")
    assert write(tmp_path / "there") == here
    assert write(tmp_path / "here", "vier\n") != here
    assert write(tmp_path / "here") == here


def test_every_field_of_today_has_a_pin() -> None:
    """A new field needs one: its value that stands for what was before, under `added`.

    A new slot of a block needs none where it is absent by default: no id holds it then.
    """
    known = {**pins()["config"], **pins()["added"]}
    assert [key for key, _ in leaves(config()) if key not in known] == []
    full = config(
        model__block__preset="sas",
        model__block__shaped_attention={"alpha": 1.0},
        model__block__attention_skip={"value": 0.5},
        model__block__value_gains={"kept": {"learned": True}},
    )
    assert [key for key, _ in leaves(full["model"], "model.") if key not in known] == []
    blocks = {**pins()["blocks"], **pins()["added_blocks"]}
    for side in stacks_of(full).values():
        around = {key: value for key, value in side.items() if key != "blocks"}
        first = dict(leaves(json.loads(json.dumps(side["blocks"][0])), "blocks."))
        assert [key for key in around if key not in blocks] == []
        unpinned = {key: value for key, value in first.items() if key not in blocks}
        assert [key for key, value in unpinned.items() if value not in (None, False, "none")] == []


def test_a_new_field_at_its_default_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    written = config()
    blocks = relevant_blocks(stacks_of(written))
    before = experiment_id(relevant(written), blocks, "c")
    wider = deepcopy(written)
    wider["model"]["architecture"]["memory"] = 0
    added = {**pins(), "added": {**pins()["added"], "model.architecture.memory": 0}}
    monkeypatch.setattr(relevance, "pins", lambda: added)
    assert experiment_id(relevant(wider), blocks, "c") == before
    wider["model"]["architecture"]["memory"] = 1
    assert experiment_id(relevant(wider), blocks, "c") != before


def test_ids_of_schema_2_stay_as_they_are() -> None:
    """Pinned: a change here is another schema, and orphans every finished run."""
    assert experiment_id({"a": 1}, {"encoder": {}}, "c") == "0a73a8977a01d14b"
    assert cell_id(config()) == "d1b3919c43aedd92"
    assert cell_id(config(model__block__preset="sas", seed_everything=2)) == "4aa4506fdfb2ff21"
    demo = yaml.safe_load(Path("ablations/base/synthetic.yaml").read_text())
    demo["trainer"]["val_check_interval"] = 100  # as when these ids were written
    assert cell_id(resolve(demo, "x")) == "6a95e08dd3579078"
    spans = config(model__block__adaptive_span={"longest": 32})  # before spans could be dynamic
    assert cell_id(spans) == "81c99c0a6af8f554"


def record(corpus: str = "c", **fields: Any) -> Record:
    tree = config(model__schedule__warmup_steps=0, **fields)
    return Record.of(tree, stacks_of(tree), corpus)


def test_a_record_says_how_two_runs_differ(tmp_path: Path) -> None:
    mine = record()
    write_record(tmp_path, mine)
    assert read_record(tmp_path) == mine
    tree = config(model__schedule__warmup_steps=0)
    assert mine.id == experiment_id(relevant(tree), mine.blocks, "c")
    assert mine.difference(record("d")) == "it was trained on other files of the corpus"
    other = record(trainer__max_steps=7)
    assert mine.difference(other) == "trainer.max_steps is 20000 there and 7 here"
    assert mine.with_config({"trainer.max_steps": 7}).id == other.id
    defined: Mapping[str, Any] = {**mine.blocks, "encoder": {"embedding_gain": 2.0}}
    assert mine.difference(replace(mine, blocks=defined)) == "its blocks are defined otherwise"
    assert read_record(tmp_path / "nowhere") is None


def test_a_run_from_the_checkpoint_of_another_is_another_experiment() -> None:
    short, long = record(trainer__max_steps=4), record(trainer__max_steps=6)
    assert short.going_on(short, "x") == short  # its own checkpoint
    extended = long.going_on(short, "x")
    assert extended.id not in (short.id, long.id)
    assert extended.apart() == long
    assert long.going_on(extended, "y") == extended  # cut short and gone on with
    assert long.going_on(None, "z").id not in (long.id, extended.id)
    longer = record(trainer__max_steps=8).going_on(extended, "y")
    assert longer.config["continued_from"] == ["x", "y"]


@pytest.mark.parametrize("absent", [None, False, "none"])
def test_a_new_slot_changes_no_id_of_blocks_without_it(absent: Any) -> None:
    block = {"around_self": {"norm_input": "layer_norm"}, "layout": "sequential"}
    before = relevant_blocks({"encoder": {"blocks": [block]}})
    around = {"norm_input": "layer_norm", "new_gate": absent}
    after = {"around_self": around, "layout": "sequential", "new_slot": absent}
    assert relevant_blocks({"encoder": {"blocks": [after]}}) == before
    used = relevant_blocks({"encoder": {"blocks": [{**after, "new_slot": "conv"}]}})
    assert used["encoder.0"] == {**before["encoder.0"], "new_slot": "conv"}


def test_keys_of_several_kinds_have_one_order() -> None:
    """As of an axis that follows one with null: ``lr: {model.block.norm: {null: 1, a: 2}}``."""
    one, other = {None: 1, "a": {True: [{2: 3, "b": 4}]}}, {"a": {True: [{"b": 4, 2: 3}]}, None: 1}
    assert canonical(one) == canonical(other)
    assert canonical(one) != canonical({**one, None: 2})
    assert json.loads(canonical(one)) == {"null": 1, "a": {"true": [{"2": 3, "b": 4}]}}
