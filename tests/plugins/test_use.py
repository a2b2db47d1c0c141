"""A plug-in is part of the identity of the cells that use it, and of no others."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_app import load_run, plugins
from lightning_app.blocks.norm import NORM_KINDS
from lightning_app.config import identity as run_plugins
from lightning_app.config.config import resolve
from lightning_app.config.experiment import cell_id, named_by_content, stacks_of
from lightning_app.config.grid import check_config, read_spec
from lightning_app.config.identity import Record, write_record
from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import prepare
from lightning_app.grids.plan import made_from
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.provenance import foreign_classes
from tests.plugins.conftest import PARTS, Write
from tests.records import result as trained_result
from tests.small import write_corpus
from tests.tables import changed

CONFIG = """
trainer: {max_steps: 4}
model:
  architecture: {encoder_depth: 2, decoder_depth: 1, model_dim: 8, ff_dim: 8, num_heads: 2}
  schedule: {warmup_steps: 1, reference_steps: 1}
  objective: {evaluate_test: false}
data: {tokenizer: word, vocab_size: null}
"""


def config(field: str = "", value: Any = None, more: Mapping[str, Any] | None = None) -> Any:
    fields = {**({field: value} if field else {}), **(more or {})}
    dotted = {key.replace(".", "__"): of for key, of in fields.items()}
    return resolve(changed(yaml.safe_load(CONFIG), **dotted), "a test", imports=True)


DECODER = {"model.architecture.kind": "decoder"}
USES: dict[str, tuple[str, str, Mapping[str, Any] | None]] = {
    "preset": ("model.block.preset", "max_post", None),
    "norm": ("model.block.norm", "max_norm", None),
    "residual rule": ("model.block.residual_rule", "leaky", None),
    "norm of heads": ("model.block.qk_norm", "max_norm", None),
    "activation": ("model.architecture.activation", "squared_relu", None),
    "positions": ("model.architecture.positions", "falling", None),
    "schedule": ("model.schedule.kind", "halved", None),
    "optimizer": ("model.optimizer.kind", "plain_sgd", None),
    "corpus": ("data.name", "counting", None),
    "task": ("model.objective.kind", "next_word", DECODER),
}


def test_a_cell_that_uses_a_part_has_its_digest(write: Write) -> None:
    path = write(PARTS)
    plugin = plugins.load(str(path))
    trees = {use: config(*fields) for use, fields in USES.items()}
    first = {use: cell_id(tree) for use, tree in trees.items()}
    for use, tree in trees.items():
        assert named_by_content(tree)["plugins"] == {"some_parts": plugin.sha256}, use
    assert "plugins" not in named_by_content(config())
    unused = cell_id(config())
    plugins.unload("some_parts")
    assert cell_id(config()) == unused
    plugins.load(str(write(PARTS, folder="moved")))
    assert cell_id(trees["preset"]) == first["preset"]
    plugins.unload("some_parts")
    path.write_text(PARTS + "ANOTHER = 1\n")
    plugins.load(str(path))
    for use, tree in trees.items():
        assert cell_id(tree) != first[use], use


def test_a_parent_with_another_version_of_a_part_is_refused(write: Write, tmp_path: Path) -> None:
    """Its weights would be loaded into another block of the same name."""
    plugin = plugins.load(str(write(PARTS)))
    run = RunFolder(tmp_path / "parent")
    run.checkpoints.mkdir(parents=True)
    for file in (run.checkpoint("last"), run.tokenizer, run.config):
        file.write_text("of the parent")
    child = config("model.block.preset", "max_post")
    child = {**child, "model": {**child["model"], "init_from": str(run.path)}}

    def trained(used: Mapping[str, str]) -> None:
        fields = {f"plugins.{name}": digest for name, digest in used.items()}
        write_record(run.path, Record(config=fields, blocks={}, corpus=None))
        identity = json.loads(run.identity.read_text())["id"]
        run.result.write_text(json.dumps(trained_result(identity)))

    for used in ({"some_parts": plugin.sha256}, {}, {"others": "0" * 64}):
        trained(used)
        assert named_by_content(child)["plugins"] == {"some_parts": plugin.sha256}
    trained({"some_parts": "0" * 64})
    with pytest.raises(UserError, match=r"some_parts.*sha256 0000000000000000"):
        named_by_content(child)


@pytest.mark.slow
def test_a_plugin_that_is_loaded_first_owns_its_own_parts_alone(write: Write) -> None:
    """In a process that has imported no part of the package, as at the start of a command."""
    program = (
        "import sys; from lightning_app import plugins; plugins.load(sys.argv[1]); "
        "from lightning_app.core.registry import owners; "
        "print(*(owners(f'model.{key}', name) for key, name in ("
        "('block.preset', 'pre_ln'), ('block.norm', 'layer_norm'), ('optimizer.kind', 'adam'), "
        "('architecture.positions', 'rope'), ('objective.kind', 'glue'), "
        "('block.preset', 'max_post'))))"
    )
    words = [sys.executable, "-c", program, str(write(PARTS))]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert found == "set() set() set() set() set() {'some_parts'}\n"


@pytest.mark.parametrize(("number", "name"), [(1, "max_post"), (2, "leaky_pre")])
def test_a_part_that_only_a_preset_names_counts(write: Write, number: int, name: str) -> None:
    """The preset is of one plug-in, its norm or rule of another, which the config does not name."""
    head, *presets = PARTS.split("@preset(")
    plugins.load(str(write(head, "the_part")))
    imports = "\n".join(line for line in head.splitlines() if "import" in line)
    preset = presets[number - 1].split("\n\n\n")[0]
    plugins.load(str(write(f"{imports}\n\n@preset({preset}\n", "the_preset")))
    tree = config("model.block.preset", name)
    assert sorted(named_by_content(tree)["plugins"]) == ["the_part", "the_preset"]


def test_a_function_that_an_argument_names_counts(write: Write) -> None:
    hooks = {"on_train_start": "some_parts.hook"}
    callback = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": hooks}
    plugin = plugins.load(str(write("def hook(trainer, module):\n    pass\n")))
    tree = config("trainer.callbacks", [callback])
    assert run_plugins.used_by(tree, stacks_of(tree)) == {"some_parts": plugin.sha256}


def test_a_part_that_no_plugin_registers_is_refused() -> None:
    """An id that says nothing of its code would be that of every version of it."""
    NORM_KINDS.register("stray_norm")(torch.nn.LayerNorm)
    try:
        with pytest.raises(UserError) as caught:
            cell_id(config("model.block.norm", "stray_norm"))
    finally:
        del NORM_KINDS._parts["stray_norm"]
    assert str(caught.value) == (
        f"model.block.norm: 'stray_norm' was registered by '{__name__}', which is no plug-in, so "
        "that no id would tell its versions apart; put it into a file and load that with --plugin "
        "FILE, ablate.yaml or lightning_app.plugins.load"
    )


READER = """
from lightning_app.data.config import CORPORA
from lightning_app.data.corpora.texts import Text

from own_reader.cleaning import clean


@CORPORA.register("cleaned")
class Cleaned(Text):
    def parse(self, columns, path):
        return {name: [clean(line) for line in lines] for name, lines in columns.items()}
"""


def test_a_corpus_is_prepared_again_after_a_change_of_its_plugin(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_corpus(tmp_path)
    data: dict[str, Any] = {"name": "cleaned", "tokenizer": "word", "vocab_size": None}
    data |= {"root": str(tmp_path / "corpus"), "cache": str(tmp_path / "cache")}
    write(READER, "__init__", "own_reader")
    found = []
    for way in ("lower", "upper"):
        write(f"clean = str.{way}  # {way}\n", "cleaning", "own_reader")
        plugins.load("own_reader")
        corpus = prepare(DataConfig(**data))
        found.append(corpus.lines("valid", "target")[0])
        plugins.unload("own_reader")
    assert found == ["the dog sees the cat .", "THE DOG SEES THE CAT ."]


def test_a_callback_counts_and_a_grid_may_name_it(write: Write) -> None:
    callback = {"class_path": "some_parts.Loud"}
    trainer = {"trainer": {"callbacks": [callback]}}
    with pytest.raises(UserError, match=r"\(--plugin FILE\), found"):
        check_config(trainer)
    plugin = plugins.load(str(write(PARTS)))
    check_config(trainer)
    with pytest.raises(UserError, match="may only name"):
        check_config({"trainer": {"callbacks": [{"class_path": "some_parts.Callback"}]}})
    tree = {**config(), "trainer": {**config()["trainer"], "callbacks": [callback]}}
    assert run_plugins.used_by(tree, stacks_of(tree)) == {"some_parts": plugin.sha256}
    assert foreign_classes(tree, apart=plugins.digests()) == {}


def test_a_plan_is_made_again_after_a_change(write: Write, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "name: g\nbase_config: {trainer: {max_steps: 1}, model: {schedule: {warmup_steps: 0}}}\n"
        "axes: {seed_everything: [1]}\n"
        "metric: {name: val/nll, mode: min}\n"
    )
    spec = read_spec(grid)
    before = made_from(spec)
    path = write(PARTS)
    plugins.load(str(path))
    first = made_from(spec)
    plugins.unload("some_parts")
    path.write_text(PARTS + "CHANGED = 1\n")
    plugins.load(str(path))
    assert len({before, first, made_from(spec)}) == 3


def test_a_grid_file_may_not_name_a_plugin(tmp_path: Path, write: Write) -> None:
    grid = tmp_path / "grid.yaml"
    marker = tmp_path / "executed"
    path = write(f"open({str(marker)!r}, 'w')\n")
    grid.write_text(f"name: g\nplugins: [{path}]\nbase_config: {{}}\naxes: {{}}\n")
    with pytest.raises(UserError, match="a grid file"):
        read_spec(grid)
    assert not marker.exists()


def kept_run(folder: Path, tree: Any = None) -> RunFolder:
    """A run's folder as `Run` leaves it; by default of a cell that uses the plug-in."""
    run, tree = RunFolder(folder), tree or config("model.block.preset", "max_post")
    run.path.mkdir()
    run_plugins.keep_copies(run, run_plugins.used_by(tree, stacks_of(tree)))
    write_record(run.path, Record.of(named_by_content(tree), stacks_of(tree), None))
    return run


def test_a_run_says_which_plugin_it_needs(write: Write, tmp_path: Path) -> None:
    path = write(PARTS)
    plugin = plugins.load(str(path))
    run, plain = kept_run(tmp_path / "run"), kept_run(tmp_path / "plain", config())
    assert not plain.plugins.exists()
    copy = run.plugin_copies / "some_parts.py"
    assert copy.read_bytes() == path.read_bytes()
    run_plugins.require(run.path)
    run_plugins.require_of(run.checkpoint("best"))
    plugins.unload("some_parts")
    run_plugins.require(plain.path)
    checks = [(run_plugins.require, run.path), (run_plugins.require_of, run.checkpoint(""))]
    for check, place in checks:
        with pytest.raises(UserError) as caught:
            check(place)
        line = f"run {run} needs the plug-in some_parts.py (sha256 {plugin.sha256}): pass --plugin"
        assert str(caught.value).startswith(line)
    plugins.load(str(copy))  # by the user's own word
    run_plugins.require(run.path)
    plugins.unload("some_parts")
    marker = tmp_path / "executed"
    copy.write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(UserError, match="needs the plug-in"):
        run_plugins.require(run.path)
    assert not marker.exists()
    path.write_text(PARTS + "CHANGED = 1\n")
    now = plugins.load(str(path))
    with pytest.raises(UserError, match=f"{path} has sha256 {now.sha256}"):
        run_plugins.require(run.path)


def test_a_checkpoint_of_another_run_needs_its_plugins_and_a_mistake_names_them(write, tmp_path):
    """Its weights would else be used with other code, through a run that needs no plug-in."""
    plugins.load(str(write(PARTS)))
    run = kept_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"^a mistake$"), run_plugins.hinting([run.path]):
        raise UserError("a mistake")
    plugins.unload("some_parts")
    plain = RunFolder(tmp_path / "plain")
    for needed in (run.checkpoint("best"), plain.tokenizer):
        needed.parent.mkdir(exist_ok=True)
        needed.write_bytes(b"")
    with pytest.raises(UserError, match=r"run.*some_parts\.py"):
        load_run(plain.path, run.checkpoint("best"))
    with pytest.raises(UserError, match=r"a mistake; run"), run_plugins.hinting([run.path]):
        raise UserError("a mistake")
