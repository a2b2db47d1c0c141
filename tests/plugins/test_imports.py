"""What the digest of a plug-in covers: its files, what they import, and what it declares."""

import compileall
import importlib
import os
import pickle
import sys
import traceback
import zipfile
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_app import fit, plugins
from lightning_app.blocks.feed_forward import ACTIVATIONS
from lightning_app.config.experiment import named_by_content
from lightning_app.core.errors import UserError
from lightning_app.runs.mixtures import mixed, statements
from tests.plugins.conftest import Write, refused
from tests.plugins.test_use import config
from tests.small import write_config, write_corpus

HELPER = "FACTOR = 2.0\n"
USE = """
from lightning_app.blocks.feed_forward import activation


@activation("mine")
def mine(x, slope):
    return x
"""


@pytest.fixture(autouse=True)
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package, a module and a folder on the path that belong to no distribution."""
    folder = tmp_path / "lib"
    (folder / "a_helper").mkdir(parents=True)
    (folder / "a_helper" / "__init__.py").touch()
    (folder / "a_helper" / "inner.py").write_text(HELPER)
    (folder / "a_module.py").write_text(HELPER)
    (folder / "a_space").mkdir()
    (folder / "a_space" / "part.py").write_text(HELPER)
    with zipfile.ZipFile(folder / "a_zip.zip", "w") as archive:
        archive.writestr("in_zip.py", HELPER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second is to count
    importlib.invalidate_caches()
    yield folder
    for name in [*sys.modules]:
        if name.startswith(("a_", "in_zip", "my_package", "some_parts")):
            del sys.modules[name]


def digest(source: object) -> str:
    plugin = plugins.load(str(source))
    plugins.unload(plugin.name)
    return plugin.sha256


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("import a_helper.inner", "a_helper/inner.py"),
        ("import a_helper.inner", "a_helper/__init__.py"),
        ("from a_helper import inner", "a_helper/inner.py"),
        ("from a_helper.inner import *", "a_helper/inner.py"),
        ("from a_module import FACTOR", "a_module.py"),
        ("class Mine:\n    import a_module", "a_module.py"),
        ("try:\n    import a_module\nexcept ImportError:\n    pass", "a_module.py"),
        ("import a_space.part", "a_space/part.py"),
        ("import a_chain", "a_module.py"),
        ("import a_chain", "a_helper/inner.py"),
    ],
)
def test_a_module_that_is_imported_counts(write, helpers: Path, line: str, file: str) -> None:
    (helpers / "a_chain.py").write_text("import a_module, a_helper.link\n")
    (helpers / "a_helper" / "link.py").write_text("from .inner import FACTOR\n")
    path = write(f"{line}\n{USE}")
    first = digest(path)
    assert digest(path) == first
    (helpers / file).write_text("FACTOR = 2.0  # words alone\n\n")
    assert (digest(path) == first) is (file != "a_helper/__init__.py")
    (helpers / file).write_text("FACTOR = 3.0\n")
    assert digest(path) != first


def test_a_module_of_a_package_counts_and_one_for_types_alone_does_not(write: Write, helpers: Path):
    (helpers / "my_package.py").write_text("import a_module\n")
    first = digest("my_package")
    (helpers / "a_module.py").write_text("FACTOR = 3.0\n")
    assert digest("my_package") != first
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a_module\n"
    path = write(text)
    first = digest(path)
    importlib.import_module("a_module")
    assert digest(path) == first
    assert digest(write(text.replace("if ", "if not "))) != digest(write(f"{text}# types\n"))


def test_the_order_of_plugins_does_not_matter(write: Write, helpers: Path) -> None:
    """Of three that share a module, which also registers a part, and of which one imports late."""
    (helpers / "a_module.py").write_text(f"FACTOR = 2.0\n{USE}")
    paths = [
        write("import a_module\n", "a_first"),
        write("import a_helper.inner\nfrom a_module import FACTOR\n", "a_second"),
        write("def late():\n    import a_helper.inner, a_module\n", "a_third"),
    ]
    found = []
    for order in permutations(paths):
        for path in order:
            plugins.load(str(path))
        used = named_by_content(config("model.architecture.activation", "mine"))["plugins"]
        assert used.keys() == {"a_first", "a_second"}
        found.append((plugins.digests(), used))
        for name in [*plugins.loaded()]:
            plugins.unload(name)
    assert all(each == found[0] for each in found)


def test_a_module_in_an_archive_is_refused(write: Write, helpers: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(helpers / "a_zip.zip")
    assert "a_zip.zip" in refused("in_zip")
    assert "a_zip.zip" in refused(write("import in_zip\n"))


def test_an_installed_distribution_needs_no_digest(write, tmp_path: Path, monkeypatch) -> None:
    """An editable installation has its files elsewhere, and they count."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    path = write("import a_thing\n")
    (folder / "a_thing.py").write_text(HELPER)
    first = digest(path)
    del sys.modules["a_thing"]
    (folder / "a_thing.py").write_text("FACTOR = 3.0\n")
    assert digest(path) == first


LATE = """
def late():
    import {0}
    return {0}.FACTOR
"""


def test_a_module_that_a_function_imports_must_be_declared(write: Write, helpers: Path) -> None:
    """Once it has been imported: before that, nothing of it has counted."""
    plugins.load("a_helper")
    for text in (LATE.format("a_module"), LATE.format("a_chain")):
        (helpers / "a_chain.py").write_text("from a_module import FACTOR\n")
        path = write(text + USE)
        used = ["some_parts", plugins.load(str(path)).name]
        plugins.check_used(used)
        assert sys.modules["some_parts"].late() == 2.0
        with pytest.raises(UserError, match=r"no digest covers 'a_.*depends_on"):
            plugins.check_used(used)
        plugins.check_used(["a_helper"])  # a run that uses no part
        plugins.unload("some_parts")
        del sys.modules["a_module"]
    declared = "from lightning_app.plugins import depends_on\ndepends_on('lib/a_module.py')\n"
    path = write(declared + LATE.format("a_module") + USE)
    first = plugins.load(str(path)).sha256
    sys.modules["some_parts"].late()
    plugins.check_used(["some_parts"])
    plugins.unload("some_parts")
    (helpers / "a_module.py").write_text("FACTOR = 3.0\n")
    assert plugins.load(str(path)).sha256 != first


def test_a_run_looks_once_more_after_its_model_is_built(write, tmp_path, helpers: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path)
    (tmp_path / "run" / "config.yaml").unlink()
    path = write(USE.replace("    return x", "    import a_module\n\n    return x"))
    plugins.load(str(path))
    with pytest.raises(UserError, match="no digest covers 'a_module'"):
        fit(tmp_path / "config.yaml", {"model.architecture.activation": "mine"})
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_plugin_that_another_imports(write: Write) -> None:
    helper = plugins.load("a_helper")
    plugins.load(str(write("", "unused")))
    path = write(f"def late():\n    import a_helper.inner\n{USE}")
    plugin = plugins.load(str(path))
    used = named_by_content(config("model.architecture.activation", "mine"))["plugins"]
    assert used == {"a_helper": helper.sha256, "some_parts": plugin.sha256}
    sys.modules["some_parts"].late()
    plugins.check_used(used)


def package(folder: Path) -> Path:
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text(USE + LATE.format("my_package.late"))
    late = folder / "my_package" / "late.py"
    late.write_text(HELPER)
    return late


def test_what_was_taken_is_executed_whatever_becomes_of_the_files(write, helpers: Path) -> None:
    """In this process, and in a child, also by imports in functions; errors show that code."""
    late, path = package(helpers), write("import a_module\ndef fail():\n    raise ValueError(1)\n")
    for each in ("my_package", str(path)):
        plugins.load(each)
    given, digests = pickle.dumps([*plugins.loaded().values()]), plugins.digests()
    path.write_text(path.read_text() + "# a comment\n")
    assert not plugins.edited()
    path.write_text("def fail(:\n")
    late.write_text("FACTOR = 3.0\n")
    (helpers / "a_module.py").unlink()
    for child in (False, True):
        if child:
            for name in digests:
                plugins.unload(name)
            plugins.load_given(pickle.loads(given))
        plugins.check_used(digests)
        assert plugins.digests() == digests
        assert sys.modules["my_package"].late() == sys.modules["a_module"].FACTOR == 2.0
        with pytest.raises(ValueError, match="1") as caught:
            sys.modules["some_parts"].fail()
        assert f'{path}", line 3, in fail\n    raise ValueError(1)' in "".join(
            traceback.format_exception(caught.value)
        )
        assert plugins.edited() == ["a_module", "my_package/late.py", "some_parts.py"]


def test_a_stale_compiled_file_is_not_run(helpers: Path) -> None:
    """Of a source whose time and size are as before, as after a copy with times."""
    late = package(helpers)
    compileall.compile_dir(helpers / "my_package", quiet=1)
    time = late.stat().st_mtime_ns
    late.write_text("FACTOR = 7.0\n")
    os.utime(late, ns=(time, time))
    plugins.load("my_package")
    assert sys.modules["my_package"].late() == 7.0


def test_a_linked_part_of_a_package_is_in_its_digest(helpers: Path, tmp_path: Path) -> None:
    package(helpers)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "core.py").write_text(HELPER)
    (shared / "again").symlink_to(shared)  # a cycle
    (helpers / "my_package" / "layers").symlink_to(shared)
    first = digest("my_package")
    (shared / "core.py").write_text("FACTOR = 3.0\n")
    assert digest("my_package") != first


DEPENDS = f"""
import os, pathlib
from lightning_app.plugins import depends_on
depends_on("gain.json", environment=["MY_GAIN"])
GAIN = pathlib.Path(__file__).with_name("gain.json").read_text()
{USE}
"""


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_declared_is_part_of_the_digest(write, tmp_path, monkeypatch, shared: bool) -> None:
    gain, path = tmp_path / "gain.json", write(DEPENDS)
    if shared:
        gain, path = tmp_path / "lib" / "gain.json", write("import a_declarer\n")
        write(DEPENDS, "a_declarer", "lib")
        gain.write_text("0.0")
        plugins.load(str(write("import a_declarer\n", "a_first")))
    found = []
    for text, value in (("1.0", None), ("2.0", None), ("2.0", "x"), ("2.0", "y")):
        gain.write_text(text)
        if value is not None:
            monkeypatch.setenv("MY_GAIN", value)
        found.append(plugins.load(str(path)).sha256)
        assert plugins.load(str(path)).sha256 == found[-1]
        plugins.unload("some_parts")
    assert len(set(found)) == 4
    plugins.load(str(path))
    plugins.check_used(["some_parts"])
    monkeypatch.setenv("MY_GAIN", "z")
    with pytest.raises(UserError, match="MY_GAIN"):
        plugins.check_used(["some_parts"])
    monkeypatch.setenv("MY_GAIN", "y")
    plugins.check_used(["some_parts"])
    gain.write_text("3.0")
    with pytest.raises(UserError, match=r"gain\.json"):
        plugins.check_used(["some_parts"])


def test_the_names_in_a_declared_folder_count(write: Write, tmp_path: Path) -> None:
    text = "from pathlib import Path\nfrom lightning_app.plugins import depends_on\n"
    text += "depends_on(Path(__file__).parent / 'gains')\n"
    found = []
    for place, name in (("one", "relu.txt"), ("two", "relu.txt"), ("one", "gelu.txt")):
        path = write(text, folder=place)
        (path.parent / "gains").mkdir(exist_ok=True)
        for each in (path.parent / "gains").iterdir():
            each.unlink()
        (path.parent / "gains" / name).write_text("2.0")
        found.append(digest(path))
    assert found[0] == found[1] != found[2]


def test_a_wrong_declaration_and_another_constant_of_a_rule_are_refused(write: Write) -> None:
    assert "gain.json" in refused(write(DEPENDS))
    source = "from lightning_app.models.optim import OPTIMIZERS\n"
    source += "OPTIMIZERS['kl_soap'].options['init_factor'] = 50.0\n"
    assert "does not support item assignment" in refused(write(source))
    late = "from lightning_app.plugins import depends_on\ndef late():\n    depends_on('x')\n"
    plugins.load(str(write(late)))
    with pytest.raises(UserError, match="depends_on"):
        sys.modules["some_parts"].late()


def test_a_part_that_another_plugin_uses_by_its_name_counts(write: Write) -> None:
    inner = plugins.load(str(write(USE.replace("mine", "inner"), "inner_parts")))
    text = USE.replace("return x", "return ACTIVATIONS['inner'].function(x, slope)")
    text = f"from lightning_app.blocks.feed_forward import ACTIVATIONS\n{text}"
    plugin = plugins.load(str(write(text)))
    used = named_by_content(config("model.architecture.activation", "mine"))["plugins"]
    assert used == {"inner_parts": inner.sha256, "some_parts": plugin.sha256}
    ACTIVATIONS["mine"].function(torch.ones(1), 0.0)
    plugins.check_used(used)


def result(loaded: dict[str, str] | None, **used: str) -> dict[str, Any]:
    known = {} if loaded is None else {"plugins": loaded, "plugins_used": used}
    return {"provenance": {"code": "c", "classes": {}, **known}}


def test_plugins_that_were_loaded_unused_and_versions_of_one_are_mixtures() -> None:
    """An arm that uses one is the question; and one edited for that arm alone is no difference."""
    loaded, one, two, three = {}, "1" * 64, "2" * 64, "3" * 64
    assert "plugins" not in mixed({"a": result({"p": one}), "b": result({"p": two}, p=two)})
    assert "plugins" not in mixed({"a": result({}), "b": result(None)})
    several = {"a": result({"p": one}), "b": result({}), "c": result({"p": two}, p=two)}
    assert mixed(several)["plugins"] == {f"p {'1' * 16}": ["a"], "p none": ["b"], "all used": ["c"]}
    assert "plug-ins" in statements(several)["plugins"]
    arms = {"a": result(loaded), "b": result(loaded, p=one)}
    assert "code" not in mixed({**arms, "c": result(loaded, q=two)})
    several = mixed({**arms, "c": result(loaded, p=three)})
    assert several["code"] == {"c": ["a"], f"c+p {'1' * 16}": ["b"], f"c+p {'3' * 16}": ["c"]}
