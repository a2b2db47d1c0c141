"""What identifies the code, the checkout, the plug-ins and the command line of a run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_app.runs import provenance
from lightning_app.runs.provenance import checkout, code_digest, command_line, foreign_classes
from tests.test_layers import PACKAGE, ROOT, imports, module_name

SYNTAX = '''"""A module."""
from typing import Protocol
SMALL = 2**20
"""Multiplications."""
class Shape(Protocol):
    """Has a size."""
    def size(self, *, at: int | None = None, to=(), **more) -> int: ...
def show(x, w, y=-0.0, z=1e-5, *rest):
    """Say it."""
    merged = {None: 1, **more}
    a, *b = [f"{x!r:>{w}} {y:.3f}{z=}", f"", "ü\\u200b" "é", b"\\xff", 3j, ..., not x]
    try:
        with open("f") as f, open("g"):
            return lambda q, /, r: (yield q[1:2, ::3])
    except* ValueError as error:
        raise KeyError from error
    match x:
        case {"a": [1, *_], **others} if w:
            pass
        case Shape(size=1) | None:
            return
'''
DIGEST = "e6afc7c58681353d"  # as 3.11, 3.12 and 3.13 have it


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    for name in ("blocks/norm.py", "training/run.py", "grids/plan.py", "report/texts.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SYNTAX, encoding="utf-8")
    return folder


def edit(package: Path, old: str, new: str, name: str = "blocks/norm.py") -> str:
    path = package / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return code_digest(package)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
@pytest.mark.in_turn(3)
def test_digest_of_this_package_is_the_same_under_other_pythons(version: str) -> None:
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{version}*/bin/python"))
    other = next((path for path in beside if path.exists()), None)
    if other is None:
        pytest.skip(f"no Python {version} is installed beside this one")
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from lightning_app.runs.provenance import code_digest;"
        "print(code_digest(Path(sys.argv[1], 'lightning_app')))"
    )
    done = subprocess.run([other, "-Sc", program, ROOT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == code_digest(ROOT / PACKAGE)


ALIKE = [
    *(('"""Say it."""', '"""Say it otherwise."""'), ('    """Say it."""\n', "")),
    *(('"""Multiplications."""', "# a comment"), ('"f") as f, open', "'f') as f, open")),
    ("SMALL = 2**20", "SMALL = (\n    2 ** 20\n)  # why"),
]
OTHER = [
    *(("2**20", "2**21"), ("z=1e-5", "z=1e-6"), ("{None: 1, **more}", "{**more, **more}")),
    *(("at: int | None = None", "at: int | None"), ("y=-0.0", "y=0.0"), ("not x", "x")),
    *(("{y:.3f}", "{y:.4f}"), ("\\u200b", "\\u200c")),
]


@pytest.mark.parametrize(("old", "new"), ALIKE + OTHER)
def test_words_and_layout_are_no_other_version(package: Path, old: str, new: str) -> None:
    assert code_digest(package) == DIGEST
    assert (edit(package, old, new) == DIGEST) == ((old, new) in ALIKE)


def test_new_code_is_another_version(package: Path) -> None:
    before = code_digest(package)
    assert edit(package, "2**20", "2**21", "grids/plan.py") == before
    assert edit(package, "2**20", "2**21", "report/texts.py") == before
    (package / "blocks" / "notes.md").write_text("words")
    assert code_digest(package) == before
    digests = [code_digest(package), edit(package, "2**20", "2**21", "training/run.py")]
    (package / "averaging.py").write_text("decay = 0.9\n")
    digests.append(code_digest(package))
    (package / "averaging.py").write_text("decay = 0.9\ndecay = 0.9\n")
    digests.append(code_digest(package))
    (package / "averaging.py").rename(package / "average.py")
    digests.append(code_digest(package))
    assert len(set(digests)) == 5
    # Code that cannot be parsed counts as it is.
    torn = edit(package, "def show(", "def show((")
    assert edit(package, "2**20", "2**21") != torn


def test_what_trains_counts() -> None:
    """Whatever a run imports of this package is in the digest, or known to change no number."""
    files = {module_name(path): path for path in (ROOT / PACKAGE).rglob("*.py")}
    seen: set[str] = set()
    left = [f"{PACKAGE}.training.run"]
    while left:
        name = left.pop()
        if name in files and name not in seen:
            seen.add(name)
            left += imports(files[name])
    names = {files[name].relative_to(ROOT / PACKAGE).as_posix() for name in seen}
    counted = {name for name in names if provenance.counts(name)}
    assert {"blocks/attention.py", "models/optim.py", "training/run.py"} <= counted
    harmless = {"__init__.py", "version.py", "probes/figures.py", "training/launcher.py"}
    harmless |= {
        f"core/{name}.py"
        for name in ("code", "errors", "files", "project", "schema", "strict_yaml")
    }
    names = {name for name in names - counted if not name.startswith(("plugins/", "runs/"))}
    parts = ("catalogue/", "report/", "config/", "grids/")  # they draw, name and supervise
    assert {name for name in names if not name.startswith(parts)} <= harmless
    assert [name for name in provenance.APART if not (ROOT / PACKAGE / name).exists()] == []


def test_this_process() -> None:
    found = provenance.software()
    assert found["code"] == code_digest(ROOT / PACKAGE)
    assert {"python", "torch", "lightning", "numpy"} <= set(found["libraries"])
    assert str(ROOT) not in str(found)


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"commit": None, "dirty": None}
    package = tmp_path / "package"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("a = 1\n")
    assert checkout(package) == nothing
    git(tmp_path, "init")
    assert checkout(package) == nothing  # it only lies there, as an installed package in .venv
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "Begin")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert checkout(package) == {"commit": commit, "dirty": False}
    (tmp_path / "notes").write_text("beside the package")
    assert checkout(package) == {"commit": commit, "dirty": False}
    source.write_text("a = 2\n")
    assert checkout(package) == {"commit": commit, "dirty": True}
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert checkout(package) == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(package) == nothing


def test_command_line_holds_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["ablate", "run", "demo", "--url", "postgresql://user:s3c:r@t@host:5433/db?a=1"]
    assert command_line(given)[-1] == "postgresql://user:***@host:5433/db?a=1"
    assert command_line(["--url=postgresql://u@h/d?password=s3cret&b=2"]) == [
        "--url=postgresql://u@h/d?password=***&b=2"
    ]
    assert command_line(["--storage", "x://u@h/d", "--storage=x://u@h/d", "--storage=a"]) == [
        *("--storage", "***", "--storage=***", "--storage=a")
    ]
    assert command_line(given[:3]) == ["ablate", "run", "demo"]
    monkeypatch.setattr(sys, "argv", ["/home/me/.venv/bin/ablate", "run", "demo"])
    assert command_line() == ["ablate", "run", "demo"]


def test_foreign_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "my_callbacks.py"
    module.write_text("class Mine:\n    rate = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("my_callbacks")
    ours = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {}}
    tree = {"trainer": {"callbacks": [ours, {"class_path": "my_callbacks.Mine"}]}}
    first = foreign_classes(tree)
    assert list(first) == ["my_callbacks.Mine"]
    module.write_text("class Mine:\n    rate = 1  # a comment\n")
    assert foreign_classes(tree) == first
    module.write_text("class Mine:\n    rate = 2\n")
    assert foreign_classes(tree) != first
    assert foreign_classes({"class_path": "nowhere.Thing"}) == {"nowhere.Thing": None}
    monkeypatch.delitem(sys.modules, "my_callbacks")
