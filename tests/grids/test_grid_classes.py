"""A grid file cannot have code imported or run, and no further file read."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.cli import main
from lightning_app.config.grid import place_below, read_spec
from lightning_app.core.errors import UserError

TRAP = (
    "import pathlib\n"
    "pathlib.Path(__file__).with_name('sprung').touch()\n"
    "def function(*_): return 1\n"
    "class Trap:\n"
    "    def __init__(self, *_, **__): pass\n"
)
EVIL = {"class_path": "trap.Trap"}
CALLBACKS = "lightning.pytorch.callbacks"


def known(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.{name}", "init_args": arguments}


def trainer(**fields: Any) -> dict[str, Any]:
    return {"trainer": fields}


NAMED: dict[str, Any] = {
    **{"list": [EVIL], "one": EVIL, "list of names": ["trap.Trap"], "name": "trap.Trap"},
    **{"JSON text": json.dumps([EVIL]), "YAML text": "{class_path: trap.Trap}"},
    "YAML text without braces": "class_path: trap.Trap",
    "text in list": ["{class_path: trap.Trap}"],
    **{"path to YAML": "evil.yaml", "path to JSON": "./evil.json"},
    "paths": ["evil.yaml", "evil.json"],
}
# Allowed contents of a base; after a '|' the allowed value of an axis.
FORMS: dict[str, dict[str, Any]] = {
    **{
        f"{field}, {name}": trainer(**{field: value})
        for field in ("callbacks", "logger", "plugins", "profiler", "strategy")
        for name, value in NAMED.items()
    },
    "trainer, path": {"trainer": "trainer.yaml"},
    "trainer, text": {"trainer": "{callbacks: [{class_path: trap.Trap}]}"},
    "model, path": {"model": "evil.yaml"},
    "model, text": {"model": "{class_path: trap.Trap}"},
    "model, class": {"model": EVIL},
    "data, path": {"data": "evil.yaml"},
    "data, class": {"data": {**EVIL, "init_args": {}}},
    "data.splits, class": {"data": {"splits": EVIL}},
    "data.splits, path": {"data": {"splits": "evil.yaml"}},
    "dotted at the top": {"trainer.callbacks": [EVIL]},
    "dotted at the top, leaf": {"trainer.callbacks.class_path": "trap.Trap"},
    "dotted in a section": trainer(**{"callbacks.class_path": "trap.Trap"}),
    "appended": trainer(**{"callbacks+": EVIL}),
    "config, path": {"config": "whole.yaml"},
    "config, list of paths": {"config": ["whole.yaml"]},
    "config, mapping": {"config": trainer(callbacks=[EVIL])},
    "LambdaCallback, short": trainer(callbacks=[{"class_path": "LambdaCallback"}]),
    **{
        argument: trainer(callbacks=[known(f"callbacks.{name}", **{argument: "trap.function"})])
        for name, argument in (
            *(("LambdaCallback", "setup"), ("ModelPruning", "apply_pruning")),
            *(("StochasticWeightAveraging", "avg_fn"), ("EMAWeightAveraging", "multi_avg_fn")),
            ("BackboneFinetuning", "lambda_func"),
        )
    },
    **{
        name: trainer(strategy=known(f"strategies.{kind}Strategy", **arguments))
        for name, kind, arguments in (
            ("ddp_comm_hook", "DDP", {"ddp_comm_hook": "trap.function"}),
            ("class inside init_args", "DDP", {"precision_plugin": EVIL}),
            ("path inside init_args", "DDP", {"precision_plugin": "evil.yaml"}),
            ("types of modules", "FSDP", {"activation_checkpointing": ["trap.Trap"]}),
        )
    },
    "class in a dict of anything": trainer(logger=known("loggers.MLFlowLogger", tags={"a": EVIL})),
    "kwargs": trainer(logger={**known("loggers.WandbLogger"), "dict_kwargs": {"settings": EVIL}}),
    "init_args as text": trainer(
        callbacks=[{"class_path": f"{CALLBACKS}.EarlyStopping", "init_args": "evil.yaml"}]
    ),
    "a function for a class": trainer(callbacks=[{"class_path": "trap.function"}]),
    "not the exact name": trainer(callbacks=[{"class_path": f"{CALLBACKS}.timer.Timer.trap"}]),
    "a module below a known one": trainer(callbacks=[{"class_path": f"{CALLBACKS}.trap.Trap"}]),
    "a class of torch": trainer(callbacks=[{"class_path": "torch.utils.cpp_extension.load"}]),
    "accelerator": trainer(accelerator=EVIL),
    "accelerator, path": trainer(accelerator="evil.yaml"),
    "max_time": trainer(max_time=EVIL),
    "block, class": {"model": {"block": EVIL}},
    "block, path": {"model": {"block": "evil.yaml"}},
    "gain, class": {"model": {"block": {"ff_skip": {**EVIL, "value": 1.0}}}},
    "gain, path": {"model": {"block": {"ff_skip": "evil.yaml"}}},
    "optimizer, class": {"model": {"optimizer": {"class_path": "torch.optim.Adam"}}},
    "a default of jsonargparse": trainer(**{"__default_config__": "whole.yaml"}),
    "a path of jsonargparse": trainer(**{"__path__": "whole.yaml", "callbacks": [EVIL]}),
    "interpolation": trainer(callbacks="${oc.env:HOME}"),
    "resolver": trainer(logger="${oc.create:{class_path: trap.Trap}}"),
    "schema": {"$schema": "whole.yaml", **trainer(callbacks=[EVIL])},
    "a subcommand": {"fit": trainer(callbacks=[EVIL])},
    "print_config": {"print_config": "skip_null"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module that must never be imported, and files that name it."""
    (tmp_path / "trap.py").write_text(TRAP)
    (tmp_path / "evil.yaml").write_text("class_path: trap.Trap\n")
    (tmp_path / "evil.json").write_text(json.dumps(EVIL))
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump({"callbacks": [EVIL]}))
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(trainer(callbacks=[EVIL])))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    imported = sys.modules.pop("trap", None)
    assert imported is None
    assert not (tmp_path / "sprung").exists()


def write(folder: Path, base: dict[str, Any], **axes: Any) -> Path:
    path = folder / "grid.yaml"
    axes = {"seed_everything": [1], **axes}
    path.write_text(yaml.safe_dump({"name": "mine", "base_config": base, "axes": axes}))
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Call `ablate` with what it must refuse, and return its one line."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("ablate: grid.yaml: ")
    assert not Path("experiments").exists()
    return line


def test_a_base_in_a_file_of_its_own_names_no_code(capsys, folder: Path) -> None:
    (folder / "grid.yaml").write_text("name: mine\nbase: base.yaml\naxes: {seed_everything: [1]}\n")
    (folder / "base.yaml").write_text(yaml.safe_dump(trainer(callbacks=[EVIL])))
    assert "found 'trap.Trap'" in refused(capsys, "plan", "grid.yaml")


AXES: dict[str, dict[str, Any]] = {
    "callbacks": {"trainer.callbacks": [None, [EVIL]]},
    "callbacks, path": {"trainer.callbacks": [None, "evil.yaml"]},
    "logger, text": {"trainer.logger": [None, "{class_path: trap.Trap}"]},
    "strategy": {"trainer.strategy": ["auto", "trap.Trap"]},
    "plugins": {"trainer.plugins": [[EVIL], None]},
    "a leaf of a class": {"trainer.logger.class_path": ["trap.Trap"]},
    "an argument of a class": {"trainer.strategy.init_args.ddp_comm_hook": ["trap.function"]},
    "the whole trainer": {"trainer": [trainer(callbacks=[EVIL])["trainer"]]},
    "the trainer's path": {"trainer": ["trainer.yaml"]},
    "the model": {"model": ["evil.yaml", "evil.json"]},
    "config": {"config": ["whole.yaml"]},
    "splits": {"data.splits.class_path": ["trap.Trap"]},
    "an empty word": {"trainer..callbacks": [[EVIL]]},
}


@pytest.mark.parametrize(
    ("base", "axes"),
    [*((form, {}) for form in FORMS.values()), *(({}, axes) for axes in AXES.values())],
    ids=[*(f"base: {form}" for form in FORMS), *(f"axis: {axis}" for axis in AXES)],
)
def test_neither_a_base_nor_an_axis_names_code(capsys, folder: Path, base, axes) -> None:
    write(folder, base, **axes)
    refused(capsys, "plan", "grid.yaml")


YAML = {
    "a tag that calls": "axes: {seed_everything: !!python/object/apply:trap.function [1]}",
    "a tag that names": "axes: {seed_everything: !!python/name:trap.Trap ''}",
    "a tag for a module": "axes: {seed_everything: [!!python/module:trap '']}",
    "a tag of our own": "axes: {seed_everything: [!trap 1]}",
    "an anchor": "question: &x trap.Trap\nbase_config: {trainer: {profiler: *x}}",
    "a merge key": (
        "base_config:\n  trainer:\n    <<: &y {callbacks: [{class_path: trap.Trap}]}\n"
        "    max_steps: 2"
    ),
    "a merge of lists": "base_config: {trainer: {<<: [{logger: {class_path: trap.Trap}}, {}]}}",
}


@pytest.mark.parametrize("text", YAML.values(), ids=YAML.keys())
def test_neither_does_the_form_of_the_file(capsys, folder: Path, text: str) -> None:
    text = "name: mine\n" + text
    text += "" if "base_config" in text else "\nbase_config: {}"
    text += "" if "axes" in text else "\naxes: {seed_everything: [1]}"
    (folder / "grid.yaml").write_text(text)
    refused(capsys, "plan", "grid.yaml")


COMMANDS = ("plan", "run", "status", "report")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", ["callbacks, path to YAML", "config, path", "dotted at the top"])
def test_every_command_refuses_it(capsys, folder: Path, command: str, form: str) -> None:
    write(folder, FORMS[form])
    refused(capsys, command, "grid.yaml")


@pytest.mark.parametrize("word", ["ddp", "auto", "simple", "pre_ln", "gain"])
def test_a_word_is_no_file(capsys, folder: Path, word: str) -> None:
    """The parser would read a file whose name is a word that may stand there."""
    content = {"value": 0.5} if word == "gain" else EVIL
    (folder / word).write_text(yaml.safe_dump(content))
    base = trainer(strategy="ddp", accelerator="auto", profiler="simple")
    base["model"] = {"block": {"preset": "pre_ln", "ff_skip": "gain" if word == "gain" else None}}
    write(folder, base)
    code = main(["plan", "grid.yaml"])
    assert (code, len(capsys.readouterr().err.splitlines())) in ((0, 0), (2, 1))


KNOWN = [
    {
        "class_path": "lightning_app.training.callbacks.probes.SignalProbe",
        "init_args": {"steps": [1, 2]},
    },
    {"class_path": f"{CALLBACKS}.LearningRateMonitor"},
    {"class_path": "DeviceStatsMonitor"},
    known("callbacks.GradientAccumulationScheduler", scheduling={0: 1, 4: 1}),
    known("callbacks.ModelCheckpoint", every_n_train_steps=1, filename="{step}", dirpath="a/b.c"),
]


def test_known_classes_and_addresses_of_servers_stay_possible(capsys, folder: Path) -> None:
    loggers = (("CSVLogger", "./logs"), ("TensorBoardLogger", "x"))
    base = trainer(
        callbacks=KNOWN,
        max_steps=8000,
        logger=[known(f"loggers.{name}", save_dir=place) for name, place in loggers],
        strategy=known("strategies.DDPStrategy", process_group_backend="gloo"),
        profiler=known("profilers.SimpleProfiler", dirpath="."),
        plugins=[known("plugins.HalfPrecision", precision="bf16-true")],
    )
    write(folder, base, **{"trainer.precision": ["32-true", "bf16-mixed"]})
    assert read_spec("grid.yaml").base_config == base
    assert main(["plan", "grid.yaml"]) == 0
    assert "2 cells" in capsys.readouterr().out
    server = known("loggers.MLFlowLogger", tracking_uri="https://mlflow.example.org:5000/a")
    write(folder, trainer(logger=[server]))
    assert read_spec("grid.yaml").base_config["trainer"]["logger"] == [server]


def test_every_listed_class_exists_and_stands_in_a_field_of_the_trainer() -> None:
    from lightning_app.config.classes import CLASSES

    for name in CLASSES:
        module, _, last = name.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), last), type), name


def test_only_a_config_of_the_command_line_may_name_classes_of_the_user(folder: Path) -> None:
    """Nothing is imported for a config that may be somebody else's."""
    from lightning_app.config.config import resolve

    (folder / "own.py").write_text(
        "import lightning.pytorch as pl\n"
        "class Own(pl.Callback):\n"
        "    def __init__(self, pace: int = 3) -> None:\n"
        "        self.pace = pace\n"
    )
    own = trainer(callbacks=[{"class_path": "own.Own"}])
    with pytest.raises(UserError, match=r"trainer\.callbacks\.class_path: .*'own\.Own'"):
        resolve(own, "own.yaml")
    assert "own" not in sys.modules
    found = resolve(own, "own.yaml", imports=True)["trainer"]["callbacks"]
    assert found == [{"class_path": "own.Own", "init_args": {"pace": 3}}]
    del sys.modules["own"]


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/b", "..", ".hidden", "a\nb", ""])
def test_a_name_cannot_leave_the_experiments_folder(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, {})
    path.write_text(path.read_text().replace("name: mine", f"name: {name!r}"))
    with pytest.raises(UserError, match="name: expected letters"):
        read_spec(path)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("loggers.CSVLogger", "save_dir", "/tmp/there"),
        ("loggers.CSVLogger", "save_dir", "../../other/runs"),
        ("loggers.CSVLogger", "save_dir", "~/curves"),
        ("loggers.CSVLogger", "version", "../victim"),
        ("loggers.TensorBoardLogger", "name", "/tmp/there"),
        ("loggers.TensorBoardLogger", "sub_dir", "a/../../b"),
        ("loggers.WandbLogger", "dir", "/tmp/there"),
        ("loggers.MLFlowLogger", "tracking_uri", "file:/tmp/there"),
        ("loggers.MLFlowLogger", "tracking_uri", "sqlite:////tmp/there.db"),
        ("loggers.MLFlowLogger", "tracking_uri", "mlruns"),
        ("loggers.MLFlowLogger", "artifact_location", "../there"),
        ("callbacks.ModelCheckpoint", "dirpath", "/tmp/there"),
        ("callbacks.ModelCheckpoint", "filename", "../../victim/checkpoints/last"),
        ("callbacks.OnExceptionCheckpoint", "dirpath", "x/../../.."),
        ("profilers.SimpleProfiler", "dirpath", "/tmp/there"),
        ("profilers.PyTorchProfiler", "filename", "/tmp/there"),
    ],
)
def test_nothing_is_written_outside_of_the_folder_of_a_cell(folder, kind, name, value: str) -> None:
    """A grid file is data: it cannot replace the files of another grid's run."""
    field = {"loggers": "logger", "callbacks": "callbacks"}.get(kind.partition(".")[0], "profiler")
    entry = {"class_path": f"lightning.pytorch.{kind}", "init_args": {name: value}}
    write(folder, trainer(**{field: entry if field == "profiler" else [entry]}))
    with pytest.raises(UserError, match=rf"{field}.*\.{name}: .*{value[-6:]}"):
        read_spec("grid.yaml")


def test_folders_of_a_cells_classes_are_below_its_own(tmp_path: Path) -> None:
    section: dict[str, Any] = {
        "logger": [
            {"class_path": "A", "init_args": {"save_dir": "logs", "name": "x"}},
            {"class_path": "B", "init_args": {"save_dir": None}},
        ],
        "callbacks": {"class_path": "C", "init_args": {"dirpath": "a/b.c"}},
        "profiler": "simple",
        "strategy": "auto",
    }
    place_below(tmp_path, section)
    assert section["logger"][0]["init_args"]["save_dir"] == str(tmp_path / "logs")
    assert section["logger"][1]["init_args"]["save_dir"] is None
    assert section["callbacks"]["init_args"]["dirpath"] == str(tmp_path / "a/b.c")
