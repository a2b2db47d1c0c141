"""Which plug-ins are loaded, and that a mistake in one is one line with its file and line."""

import os
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_app import plugins
from lightning_app.blocks.norm import NORM_KINDS
from lightning_app.cli import main, parse_arguments
from lightning_app.core.errors import UserError
from lightning_app.models.optim import OPTIMIZERS
from lightning_app.scores.task_facts import TASKS
from lightning_app.tasks.base import task_class
from tests.plugins.conftest import PARTS, Write, refused
from tests.told import told

NORM = """
from torch import nn
from lightning_app.blocks.norm import NORM_KINDS


@NORM_KINDS.register("some_norm")
def some_norm(dim):
    return nn.Identity()
"""


def test_a_file_registers_its_parts_once_and_another_of_its_name_none(write: Write) -> None:
    path = write(NORM)
    plugin = plugins.load(str(path))
    assert plugins.load(str(path)) is plugin
    assert NORM_KINDS.owner("some_norm") == "some_parts"
    assert NORM_KINDS.owner("layer_norm") is None
    second = write(NORM.replace("some_norm", "other_norm"), folder="elsewhere")
    with pytest.raises(UserError, match="'some_parts' already"):
        plugins.load(str(second))
    plugins.unload("some_parts")
    assert "some_norm" not in NORM_KINDS
    plugins.load(str(write(PARTS)))
    assert task_class("next_word").__module__ == "some_parts"
    assert TASKS.owner("next_word") == OPTIMIZERS.owner("plain_sgd") == "some_parts"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n\ndef fail():\n    raise KeyError('none')\n\n\nfail()\n", "12: KeyError: 'none'"),
        ("import sys\nsys.exit(0)\n", "10: SystemExit: 0"),
    ],
)
def test_a_file_that_raises(text: str, said: str, write: Write) -> None:
    path = write(NORM + text)
    assert refused(path) == f"{path}, line {said}"
    assert "some_norm" not in NORM_KINDS  # what it had registered is gone


def test_a_name_that_is_registered_twice(write: Write) -> None:
    path = write(NORM.replace("some_norm", "rms_norm"))
    assert f"{path}, line 6: ValueError: model.block.norm: 'rms_norm' is already" in refused(path)
    head = "from lightning_app.tasks.base import task\n\n"
    own = write(f"{head}@task('translation')\nclass A:\n    x = 1\n")
    assert f"{own}, line 3: ValueError: model.objective.kind: 'translation' is" in refused(own)
    assert task_class("translation").__module__ == "lightning_app.tasks.translation"


@pytest.mark.parametrize("arguments", ["x", "x, y, z", "x, *, slope"])
def test_an_activation_takes_the_inner_states_and_a_slope(arguments: str, write: Write) -> None:
    head = "from lightning_app.blocks.feed_forward import ACTIVATIONS, activation\n"
    path = write(f"{head}\n\n@activation('one')\ndef one({arguments}):\n    return x\n")
    assert f"{path}, line 4: ValueError: model.architecture.activation: 'one'" in refused(path)
    plugins.load(str(write(head + "@activation('one')\ndef one(x, slope=1):\n    return x\n")))
    assert plugins.loaded()


@pytest.mark.parametrize("name", ["json", "torch", "lightning_app"])
def test_a_file_that_would_hide_a_module(write: Write, name: str) -> None:
    assert f"'{name}'" in refused(write(NORM, name))


def test_a_module_and_its_package(tmp_path: Path, write: Write, monkeypatch) -> None:
    """The digest of a package is that of all its files, wherever it lies."""
    monkeypatch.syspath_prepend(tmp_path)
    write(NORM, "parts", folder="some_package")
    digest = plugins.load("some_package.parts").sha256
    assert NORM_KINDS.owner("some_norm") == "some_package.parts"
    (tmp_path / "some_package" / "table.csv").write_text("1\n")
    with pytest.raises(UserError, match="has changed since"):
        plugins.load("some_package.parts")
    plugins.unload("some_package.parts")
    assert plugins.load("some_package.parts").sha256 != digest


def test_a_module_that_is_absent_or_imported_already(tmp_path: Path, write, monkeypatch) -> None:
    assert "no module of" in refused("absent_module")
    assert "is imported already" in refused("lightning_app.models.optim")
    monkeypatch.syspath_prepend(tmp_path)
    part = write(NORM, "a_part")
    plugins.load(str(write("import a_part\n")))
    for source in ("a_part", part):
        with pytest.raises(UserError, match="name it before those that import it"):
            plugins.load(str(source))
    assert plugins.loaded().keys() == {"some_parts"}


def test_an_option_takes_the_place_of_the_project(tmp_path: Path, write: Write) -> None:
    other = write(NORM + "# an earlier version\n", folder="kept")
    path = write(NORM)
    (tmp_path / "ablate.yaml").write_text("plugins: [some_parts.py]\n")
    for given, source in (([], path), ([str(other)], other)):
        plugins.load_all(given, tmp_path)
        assert plugins.loaded()["some_parts"].source == str(source)
        plugins.unload("some_parts")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a.py\n", "{plugins, results}, found ["),
        ("results: [../theirs]\n", "results: no longer a key; … 'Runs from elsewhere'"),
    ],
)
def test_a_wrong_project_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "ablate.yaml").write_text(text)
    with pytest.raises(UserError, match=told(f"ablate.yaml … {said}")):
        plugins.load_all([], tmp_path)


def test_a_command_without_parts_loads_no_project_and_the_option_comes_first(tmp_path, monkeypatch):
    (tmp_path / plugins.PROJECT).write_text("plugins: [missing.py]\n")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    assert main(["blocks"]) == 2
    args = parse_arguments(["--plugin", "a.py", "--plugin=b.c", "blocks", "pre_ln"])
    assert args.plugin == ["a.py", "b.c"]
    assert parse_arguments(["--plugin", "a.py", "fit", "--config", "c.yaml"]).words[0] == "--config"
    with pytest.raises(UserError, match="--plugin: expected a file"):
        parse_arguments(["--plugin"])


def test_the_project_of_another_user_is_not_run(tmp_path: Path, write: Write, monkeypatch) -> None:
    write("raise AssertionError\n")
    (tmp_path / "ablate.yaml").write_text("plugins: [some_parts.py]\n")
    real = Path.stat
    monkeypatch.setattr(os, "getuid", lambda: 4321)

    def stat(self: Path, **kwargs: bool) -> os.stat_result:
        found = real(self, **kwargs)
        return os.stat_result([*found[:4], 1234, *found[5:10]])

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(UserError, match="belongs to another"):
        plugins.load_all([], tmp_path)


def test_a_project_that_a_link_leads_to_is_not_run(tmp_path: Path, write: Write) -> None:
    write("raise AssertionError\n", folder="theirs")
    (tmp_path / "mine.yaml").write_text("plugins: [some_parts.py]\n")
    (tmp_path / "theirs" / "ablate.yaml").symlink_to(tmp_path / "mine.yaml")
    with pytest.raises(UserError, match=r"ablate\.yaml: .*symbolic link"):
        plugins.load_all([], tmp_path / "theirs")
    (tmp_path / "mine.yaml").unlink()
    with pytest.raises(UserError, match="symbolic link"):
        plugins.load_all([], tmp_path / "theirs")


@pytest.mark.parametrize("name", ["ablate.yaml", "some_parts.py"])
def test_files_that_others_may_write_are_not_run(name: str, tmp_path, write, monkeypatch) -> None:
    write(NORM)
    (tmp_path / "ablate.yaml").write_text("plugins: [some_parts.py]\n")
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    for mode, group, said in (
        (0o666, "me", "every user may"),
        (0o664, "team", "members of its"),
        (0o664, "me", None),
        (0o644, "team", None),
    ):
        found = SimpleNamespace(gr_name=group, gr_mem=["me"])
        monkeypatch.setattr("grp.getgrgid", lambda _, found=found: found)
        (tmp_path / name).chmod(mode)
        if said is None:
            plugins.load_all([], tmp_path)
            plugins.unload("some_parts")
        else:
            with pytest.raises(UserError, match=rf"{name}: .*{said}"):
                plugins.load_all([], tmp_path)


@pytest.mark.parametrize("named", ["the_package", "the_package.part"])
def test_each_file_of_a_package_of_a_project_must_be_the_users(named, tmp_path, monkeypatch):
    (tmp_path / "the_package").mkdir()
    for file in ("__init__.py", "part.py", "data.txt"):
        (tmp_path / "the_package" / file).touch()
    (tmp_path / "the_package" / "data.txt").chmod(0o646)
    (tmp_path / "ablate.yaml").write_text(f"plugins: [{named}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"data\.txt:"):
        plugins.load_all([], tmp_path)


def test_an_installed_package_is_loaded(tmp_path: Path, write: Write, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(NORM, "an_installed_one")
    point = EntryPoint("mine", "an_installed_one", "lightning_app.plugins")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [point])
    plugins.load_all([], tmp_path)
    assert NORM_KINDS.owner("some_norm") == "an_installed_one"
