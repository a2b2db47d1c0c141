"""What a plug-in imports, opens and changes is in its digest, or it is refused."""

import compileall
import importlib
import math
import os
import py_compile
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import RandomSampler

from lightning_app import plugins
from lightning_app.blocks import norm
from lightning_app.blocks.feed_forward import ACTIVATIONS
from lightning_app.blocks.norm import NORM_KINDS
from lightning_app.config.experiment import named_by_content
from lightning_app.core.errors import UserError
from lightning_app.plugins.imports import window
from lightning_app.runs.mixtures import mixed, statements
from tests.plugins.conftest import PARTS, Write
from tests.plugins.test_use import config

HELPER = "FACTOR = 2.0\n"
USE = """
from lightning_app.blocks.feed_forward import activation


@activation("mine")
def mine(x, slope):
    return x
"""


@pytest.fixture(autouse=True)
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package and a module on the path that belong to no distribution."""
    folder = tmp_path / "lib"
    (folder / "a_helper").mkdir(parents=True)
    (folder / "a_helper" / "__init__.py").touch()
    (folder / "a_helper" / "inner.py").write_text(HELPER)
    (folder / "a_module.py").write_text(HELPER)
    (folder / "a_space").mkdir()
    (folder / "a_space" / "part.py").write_text(HELPER)
    with zipfile.ZipFile(folder / "a_zip.zip", "w") as archive:
        archive.writestr("in_zip.py", HELPER)
    py_compile.compile(str(folder / "a_module.py"), str(folder / "compiled.pyc"))
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield folder
    for name in [*sys.modules]:
        if name.startswith(("a_", "in_zip", "compiled", "my_package", "some_parts")):
            del sys.modules[name]


def refused(source: object) -> str:
    with pytest.raises(UserError) as caught:
        plugins.load(str(source))
    assert not plugins.loaded()
    assert "\n" not in str(caught.value)
    return str(caught.value)


OPENED = {
    "package": "import a_helper.inner",
    "module": "from a_module import FACTOR",
    "namespace": "import a_space.part",
    "in a function": "def late():\n    import a_helper.inner",
    "by name": "import importlib\nm = importlib.import_module('a_' + 'module')",
    "subfolder": "import sys\nsys.path.insert(0, LIB + '/a_helper')\nimport inner",
    "exec": "with open(LIB + '/a_module.py') as f:\n    exec(f.read())",
    "bytes": "import os\nos.read(os.open(LIB + '/a_module.py', os.O_RDONLY), 100)",
    "runpy": "import runpy\nrunpy.run_path(LIB + '/a_module.py')",
    "loader": "from importlib.machinery import SourceFileLoader as S\n"
    "import types\nS('x', LIB + '/a_module.py').exec_module(types.ModuleType('x'))",
    "spec": "import importlib.util as u\ns = u.spec_from_file_location('x', LIB + '/a_module.py')\n"
    "s.loader.exec_module(u.module_from_spec(s))",
    "zip": "import sys\nsys.path.insert(0, LIB + '/a_zip.zip')\nimport in_zip",
    "compiled": "import compiled",
    "text in a text": "exec('import a_module', {})",
    "caught": "try:\n    import a_module\nexcept Exception:\n    pass",
    "data": "import pathlib\nG = pathlib.Path(LIB, 'a_space', 'gain.json').read_text()",
    "in a thread": "import pathlib\nfrom concurrent.futures import ThreadPoolExecutor as E\n"
    "with E(1) as e:\n    e.submit(pathlib.Path(LIB, 'a_space', 'gain.json').read_text).result()",
    "database": "import sqlite3\nsqlite3.connect(LIB + '/a_space/gain.json')",
    "data by a library": "import numpy\nG = numpy.loadtxt(LIB + '/a_space/gain.json')",
}


@pytest.mark.parametrize("way", OPENED)
def test_what_no_digest_covers_is_refused(write: Write, helpers: Path, way: str) -> None:
    (helpers / "a_space" / "gain.json").write_text("1.0\n")
    path = write(f"LIB = {str(helpers)!r}\n{OPENED[way]}\n{USE}")
    assert str(helpers) in refused(path)
    assert "mine" not in ACTIVATIONS


def test_a_neighbour_of_a_module_is_refused(helpers: Path) -> None:
    (helpers / "my_package.py").write_text("import a_module\n")
    assert "a_module" in refused("my_package")


def test_a_module_in_an_archive_is_no_plugin(
    helpers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(helpers / "a_zip.zip")
    assert "a_zip.zip" in refused("in_zip")


def test_a_module_that_was_there_before_is_refused(write: Write) -> None:
    importlib.import_module("a_module")
    assert "a_module" in refused(write("from a_module import FACTOR\n"))


def test_an_installed_distribution_needs_no_digest(write: Write, helpers: Path) -> None:
    """Only the files that it records: a file that was put beside them counts as code of one's own.

    An editable installation records none of its sources.
    """
    record = helpers / "a_thing-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("a_helper/__init__.py,sha256=0,0\na_helper/inner.py,,\n")
    path = write("import a_helper.inner\n")
    plugins.load(str(path))
    plugins.unload("some_parts")
    write("import a_helper.other\n")
    (helpers / "a_helper" / "other.py").touch()
    assert "other.py" in refused(path)


def test_a_package_that_is_a_plugin_may_be_imported(write: Write) -> None:
    helper = plugins.load("a_helper")
    path = write(f"import importlib\nimportlib.import_module('a_helper.inner')\n{USE}")
    plugin = plugins.load(str(path))
    used = named_by_content(config("model.architecture.activation", "mine"))["plugins"]
    assert used == {"a_helper": helper.sha256, "some_parts": plugin.sha256}
    plugins.check_used(used)


LATE = """
def late():
    import my_package.late
    return my_package.late.FACTOR
"""


def package(folder: Path) -> Path:
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text(USE + LATE)
    late = folder / "my_package" / "late.py"
    late.write_text(HELPER)
    return late


def test_a_submodule_that_changed_is_not_imported(helpers: Path) -> None:
    late = package(helpers)
    used = {"my_package": plugins.load("my_package").sha256}
    plugins.check_used(used)
    late.write_text("FACTOR = 3.0\n")
    with pytest.raises(UserError, match=r"late\.py has changed"):
        sys.modules["my_package"].late()
    late.write_text(HELPER)
    with pytest.raises(UserError, match=r"late\.py has changed"):  # it has been
        plugins.check_used(used)


def test_a_run_ends_without_a_result_after_a_change(helpers: Path) -> None:
    late = package(helpers)
    used = {"my_package": plugins.load("my_package").sha256}
    late.write_text("FACTOR = 3.0\n")
    plugins.check_used({})  # a run that uses no part
    with pytest.raises(UserError, match=r"late\.py has changed"):
        plugins.check_used(used)


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
    first = plugins.load("my_package").sha256
    plugins.unload("my_package")
    (shared / "core.py").write_text("FACTOR = 3.0\n")
    assert plugins.load("my_package").sha256 != first


DEPENDS = f"""
import os, pathlib
from lightning_app.plugins import depends_on
depends_on("gain.json", environment=["MY_GAIN"])
GAIN = pathlib.Path(__file__).with_name("gain.json").read_text()
{USE}
"""


# Over 5 s: a plug-in is loaded ten times, each time with a search for what it patches.
def test_what_is_declared_is_part_of_the_digest(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain, path = tmp_path / "gain.json", write(DEPENDS)
    found = []
    for text, value in (("1.0", None), ("2.0", None), ("2.0", "x"), ("2.0", "y")):
        gain.write_text(text)
        if value is not None:
            monkeypatch.setenv("MY_GAIN", value)
        found.append(plugins.load(str(path)).sha256)
        assert plugins.load(str(path)).sha256 == found[-1]
        plugins.unload("some_parts")
    assert len(set(found)) == 4
    used = {"some_parts": plugins.load(str(path)).sha256}
    plugins.check_used(used)
    monkeypatch.setenv("MY_GAIN", "z")
    with pytest.raises(UserError, match="MY_GAIN"):
        plugins.check_used(used)
    with pytest.raises(UserError):
        plugins.load_given(plugins.given())
    monkeypatch.setenv("MY_GAIN", "y")
    plugins.check_used(used)
    gain.write_text("3.0")
    with pytest.raises(UserError, match=r"gain\.json"):
        plugins.check_used(used)


def test_the_names_in_a_declared_folder_count(write: Write, tmp_path: Path) -> None:
    """And its place does not, however it is named."""
    text = "from pathlib import Path\nfrom lightning_app.plugins import depends_on\n"
    text += "depends_on(Path(__file__).parent / 'gains')\n"
    found = []
    for place, name in (("one", "relu.txt"), ("two", "relu.txt"), ("one", "gelu.txt")):
        path = write(text, folder=place)
        (path.parent / "gains").mkdir(exist_ok=True)
        for each in (path.parent / "gains").iterdir():
            each.unlink()
        (path.parent / "gains" / name).write_text("2.0")
        found.append(plugins.load(str(path)).sha256)
        plugins.unload("some_parts")
    assert found[0] == found[1] != found[2]


def test_a_file_that_is_opened_to_append_and_read(write: Write, tmp_path: Path) -> None:
    (tmp_path / "gain.txt").write_text("2.0")
    read = f"with open({str(tmp_path / 'gain.txt')!r}, %r):\n    pass\n"
    assert "gain.txt" in refused(write(read % "a+"))
    (tmp_path / "empty.txt").touch()
    plugins.load(str(write(read.replace("gain", "empty") % "a+")))
    plugins.load(str(write(read % "w+", "more_parts")))


def test_a_wrong_declaration(write: Write) -> None:
    assert "gain.json" in refused(write(DEPENDS))
    late = "from lightning_app.plugins import depends_on\ndef late():\n    depends_on('x')\n"
    plugins.load(str(write(late)))
    with pytest.raises(UserError, match="depends_on"):
        sys.modules["some_parts"].late()


def test_a_file_that_a_run_opens(write: Write, tmp_path: Path) -> None:
    """Refused when it is opened, unless it is of the corpus or the run's folder."""
    plugins.load(
        str(write("import pathlib\ndef late(path):\n    return pathlib.Path(path).read_text()\n"))
    )
    for name in ("gain.json", "corpus/train.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    late = sys.modules["some_parts"].late
    with window("run", [tmp_path / "corpus"]):
        assert late(tmp_path / "corpus" / "train.txt") == "1"
        assert late("/proc/self/stat")
        with pytest.raises(UserError, match=r"gain\.json"):
            late(tmp_path / "gain.json")
    with pytest.raises(UserError, match=r"gain\.json"):
        plugins.check_used({})


def test_a_file_that_a_plugin_writes_it_may_read(write: Write, tmp_path: Path) -> None:
    """Such as a temporary file; what it held before counts."""
    late = "import tempfile\ndef late(path):\n    with open(path, 'w') as file:\n"
    late += "        file.write('1')\n    with tempfile.NamedTemporaryFile('w+') as file:\n"
    late += "        file.write('1')\n        file.flush()\n        open(file.name).close()\n"
    plugins.load(str(write(late + "    with open(path) as file:\n        return file.read()\n")))
    with window("run"):
        assert sys.modules["some_parts"].late(tmp_path / "own.txt") == "1"
    plugins.check_used({})


def test_a_file_that_the_package_reads_for_a_plugin(write: Write, tmp_path: Path) -> None:
    """The plug-in opens it, by whatever reader; what a run itself reads is not the plug-in's."""
    (tmp_path / "gain.yaml").write_text("gain: 2.0\n")
    late = "from lightning_app.core.strict_yaml import read_yaml_file\n"
    late += "def late(path):\n    return read_yaml_file(path)[0]['gain']\n"
    plugins.load(str(write(late)))
    with window("run"), pytest.raises(UserError, match=r"gain\.yaml"):
        sys.modules["some_parts"].late(tmp_path / "gain.yaml")


def test_a_refused_plugin_leaves_others_alone(write: Write, tmp_path: Path) -> None:
    (tmp_path / "gain.json").write_text("2")
    read = f"import pathlib\nG = pathlib.Path({str(tmp_path / 'gain.json')!r}).read_text()\n"
    good = write("GOOD = 1\n", name="some_parts")
    plugins.load(str(good))
    bad = write(read, name="some_parts_too")
    with pytest.raises(UserError, match=r"gain\.json"):
        plugins.load(str(bad))
    plugins.check_used({})
    declared = f"from lightning_app.plugins import depends_on\ndepends_on('gain.json')\n{read}"
    plugins.load(str(write(declared, name="some_parts_too")))
    assert len(plugins.loaded()) == 2


def test_what_a_plugin_that_failed_has_replaced_ends_every_run(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_LEFT", [])
    monkeypatch.setattr(norm, "EPSILON", norm.EPSILON)  # put back after the test
    source = "import lightning_app.blocks.norm as n\nn.EPSILON = 5.0\nraise RuntimeError('oops')\n"
    with pytest.raises(UserError, match="oops"):
        plugins.load(str(write(source)))
    with pytest.raises(UserError, match=r"norm.*failed to load.*start Python again"):
        plugins.check_used({})


def test_the_constants_of_a_rule_are_not_replaced(write: Write) -> None:
    source = "from lightning_app.models.optim import OPTIMIZERS\n"
    source += "OPTIMIZERS['kl_soap'].options['init_factor'] = 50.0\n"
    assert "does not support item assignment" in refused(write(source))


PATCHES = {
    "assigned": "import torch, lightning_app.blocks.feed_forward as ff\n"
    "ff.F.relu = lambda x, inplace=False: torch.clamp(x, min=0) * 5.0",
    "by a known function": "from torch.nn import functional as g\nsetattr(g, 'relu', g.gelu)",
    "through a dictionary": "import sys\nvars(sys.modules['torch.nn.functional'])['relu'] = abs",
    "code": "import sys\nF = sys.modules['torch.nn'].functional\nf = lambda x, inplace=False: x\n"
    "f = F.relu.__class__(f.__code__, {})\ng = F.relu\ng.__code__ = f.__code__",
    "a method": "import sys\ntype.__setattr__(sys.modules['torch.nn'].LayerNorm, 'forward', abs)",
    "a method that was inherited": "import sys\n"
    "type.__setattr__(sys.modules['torch.nn'].LayerNorm, '__call__', abs)",
    "a name that shadows": "import sys\nvars(sys.modules['torch.nn.functional'])['abs'] = max",
    "a library": "import sys\nvars(sys.modules['math'])['nothing'] = 1\nimport math\nmath.tau = 6",
    "a table": "from lightning_app.blocks.norm import NORM_KINDS as n\n"
    "n._parts['layer_norm'] = n._parts['rms_norm']",
    "later": "import torch\ndef late():\n    torch.nn.functional.relu = abs",
    "by another name": "import sacrebleu as s\nc = s.metrics.bleu.BLEU\n"
    "c.nothing = 1\ndel c.nothing",
    "of a module that it imports first": "import lightning_app.scores.squad as s\n"
    "vars(s)['NOTHING'] = 1",
    "the order of rows": "import sys\nc = sys.modules['torch.utils.data'].RandomSampler\n"
    "c.__iter__ = sys.modules['torch.utils.data'].SequentialSampler.__iter__",
}


@pytest.mark.parametrize("way", PATCHES)
def test_a_plugin_that_patches_counts_for_every_run(
    write: Write, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(functional, "relu", functional.relu)
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", torch.nn.LayerNorm.forward)
    monkeypatch.setattr(math, "tau", math.tau)
    monkeypatch.setattr(RandomSampler, "__iter__", RandomSampler.__iter__)
    monkeypatch.setitem(NORM_KINDS._parts, "layer_norm", NORM_KINDS["layer_norm"])
    relu, code = functional.relu, functional.relu.__code__
    try:
        plugin = plugins.load(str(write(f"{PATCHES[way]}\n{USE}")))
        assert plugin.patches
        assert named_by_content(config())["plugins"] == {"some_parts": plugin.sha256}
    finally:
        relu.__code__ = code
        functional.__dict__.pop("abs", None)
        if "__call__" in vars(torch.nn.LayerNorm):
            del torch.nn.LayerNorm.__call__


def test_a_plugin_that_patches_nothing(write: Write) -> None:
    """Also where everything is loaded, as in the process of a cell."""
    importlib.import_module("lightning_app.grids.program")
    assert not plugins.load(str(write(PARTS))).patches
    plugins.check_used({})


@pytest.mark.parametrize(
    "patch",
    ["vars(g)['relu'] = f", "type(g.relu).__setattr__(g.relu, '__code__', f.__code__)"],
)
def test_a_plugin_that_patches_in_a_run(
    write: Write, monkeypatch: pytest.MonkeyPatch, patch: str
) -> None:
    relu, code = functional.relu, functional.relu.__code__
    monkeypatch.setattr(functional, "relu", relu)
    late = "import sys\ndef f(x, inplace=False):\n    return x\n"
    late += f"def late():\n    g = sys.modules['torch.nn.functional']\n    {patch}\n"
    assert not plugins.load(str(write(late))).patches
    plugins.check_used({})
    sys.modules["some_parts"].late()
    try:
        with pytest.raises(UserError, match=r"functional\.relu"):
            plugins.check_used({})
    finally:
        relu.__code__ = code


def test_a_part_that_another_plugin_uses_by_its_name_counts(write: Write) -> None:
    inner = plugins.load(str(write(USE.replace("mine", "inner"), "inner_parts")))
    for name, told in (("'inner'", True), ("'in' + 'ner'", False)):
        text = USE.replace("return x", f"return ACTIVATIONS[{name}].function(x, slope)")
        text = f"from lightning_app.blocks.feed_forward import ACTIVATIONS\n{text}"
        plugin = plugins.load(str(write(text)))
        used = named_by_content(config("model.architecture.activation", "mine"))["plugins"]
        assert (used.get("inner_parts") == inner.sha256) is told
        assert used["some_parts"] == plugin.sha256
        ACTIVATIONS["mine"].function(torch.ones(1), 0.0)
        if told:
            plugins.check_used(used)
        else:
            with pytest.raises(UserError, match="inner_parts"):
                plugins.check_used(used)
        plugins.unload("some_parts")


def result(loaded: dict[str, str] | None, **used: str) -> dict[str, Any]:
    known = {} if loaded is None else {"plugins": loaded, "plugins_used": used}
    return {"provenance": {"code": "c", "classes": {}, **known}}


@pytest.mark.parametrize(
    "way",
    [
        "import sys\nm = sys.modules['a_gain']",
        "import importlib as i\nm = i.import_module('a_' + 'gain')",
    ],
)
def test_another_plugin_counts_however_it_is_reached(write: Write, way: str) -> None:
    inner = plugins.load(str(write("GAIN = 2.0\n", "a_gain")))
    plugins.load(str(write(f"{way}\nGAIN = m.GAIN\n{USE}")))
    used = named_by_content(config("model.architecture.activation", "mine"))["plugins"]
    assert used["a_gain"] == inner.sha256


def test_plugins_that_were_loaded_without_being_used_are_a_mixture() -> None:
    """An arm that uses one is the question; and one edited for that arm alone is no difference."""
    one, two = "1" * 64, "2" * 64
    assert "plugins" not in mixed({"a": result({"p": one}), "b": result({"p": two}, p=two)})
    assert "plugins" not in mixed({"a": result({}), "b": result(None)})
    several = {"a": result({"p": one}), "b": result({}), "c": result({"p": two}, p=two)}
    assert mixed(several)["plugins"] == {
        f"p {'1' * 16}": ["a"],
        "p none": ["b"],
        "all used": ["c"],
    }
    assert "plug-ins" in statements(several)["plugins"]
