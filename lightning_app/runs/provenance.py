"""The provenance of a result: version of the code, libraries, command line, processor.

This module is fast to import, for `ablate plan`. The part that needs torch is in `hardware`.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_app.core.code import joint_digest, syntax_digest
from lightning_app.version import __version__

PACKAGES = ("torch", "lightning", "torchmetrics", "sentencepiece")
PACKAGES += ("sacrebleu", "datasets", "optuna")

APART = (
    *("api", "catalogue", "commands", "grids", "plugins", "report", "testing"),
    *("__init__.py", "__main__.py", "cli.py", "version.py"),
    *("core/code.py", "core/errors.py", "core/files.py", "core/project.py"),
    *("core/strict_yaml.py", "runs"),
    *("config/__init__.py", "config/rules.py", "config/experiment.py", "config/grid.py"),
    *("config/identity.py", "config/rulers.py", "core/schema.py"),
    *("config/sources.py", "config/tree.py", "probes/figures.py", "training/launcher.py"),
)
"""Folders and files of the package that cannot change a number of a run. All others count, so
a new file counts until it is listed here."""

_SECONDS = 10.0  # time limit of a git call
_PASSWORDS = (re.compile(r"(://[^/\s:@]*:)[^/\s]*(@)"), re.compile(r"(password=)[^&\s]*()"))


FOREIGN = ("MASTER_", "TORCHELASTIC_", "SLURM_", "SRUN_", "PMI_", "PMIX_", "OMPI_")
"""The beginnings of the variables by which launchers, MPI among them, tell a process its rank."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher other than Lightning may have started this process."""
    return any(name.startswith((*FOREIGN, "LSB_")) for name in environment)


@cache
def software() -> dict[str, Any]:
    """The software of this process: `package`, `commit` and `dirty`, `code`, `libraries`.

    It is read once, when the modules are imported: later changes of files do not affect the
    process. Forked children inherit it together with the modules.
    """
    package = Path(str(files("lightning_app")))
    libraries = {name: importlib.metadata.version(name) for name in (*PACKAGES, "numpy")}
    return {
        "package": __version__,
        **checkout(package),
        "code": code_digest(package),
        "libraries": {"python": platform.python_version(), **libraries},
    }


def code_digest(package: Path) -> str:
    """Return the digest of all files in a package's folder that can change numbers.

    Comments, docstrings and layout do not count, nor does the version of Python.
    """
    names = (path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    files = ((name, (package / name).read_bytes()) for name in names if counts(name))
    return joint_digest((name, syntax_digest(name, data)) for name, data in files)[:16]


def foreign_classes(tree: Any, apart: Iterable[str] = ()) -> dict[str, str | None]:
    """The digest of the file of every config class from outside the package and Lightning.

    Only that file counts, not its imports. None if a class is not in a file. Classes of the
    plug-ins `apart` are omitted: they have their own digests.
    """
    known = {"lightning_app", "lightning", *(name.partition(".")[0] for name in apart)}
    found: dict[str, str | None] = {}
    for name in sorted(set(_class_paths(tree))):
        if name.partition(".")[0] not in known:
            file = _file_of(name)
            found[name] = file and syntax_digest(file.name, file.read_bytes())[:16]
    return found


def checkout(package: Path) -> dict[str, Any]:
    """`commit` of the git checkout with the package, and whether the package is `dirty`.

    Both are None outside a checkout and without git.
    """
    # A folder that merely happens to be in a checkout, such as .venv, is not part of it.
    if _git(package, "ls-files", "--", "__init__.py"):
        commit = _git(package, "rev-parse", "HEAD")
        changed = _git(package, "status", "--porcelain", "--", ".")
        if commit is not None and changed is not None:
            return {"commit": commit, "dirty": bool(changed)}
    return {"commit": None, "dirty": None}


def command_line(words: Sequence[str] | None = None) -> list[str]:
    """A command line (by default this process's) as typed, without passwords, the URL of a storage
    and the folders of the program."""
    if words is None:
        program = Path(sys.argv[0])
        name = program.parent.name if program.name == "__main__.py" else program.name
        words = [name, *sys.argv[1:]]
    words = [re.sub("^--storage=.*://.*", "--storage=***", word) for word in words]
    return [
        "***" if former == "--storage" and "://" in word else without_password(word)
        for former, word in zip(["", *words], words, strict=False)
    ]


def without_password(text: str) -> str:
    """A text with the passwords in its URLs replaced by stars."""
    for pattern in _PASSWORDS:
        text = pattern.sub(r"\1***\2", text)
    return text


@cache
def cpu_model() -> str:
    """The name of this machine's processor."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        text = information.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return " ".join(match[1].split())
    if sys.platform == "darwin":
        if name := _output("sysctl", "-n", "machdep.cpu.brand_string"):
            return name
    return platform.processor() or platform.machine() or "unknown"


def counts(name: str) -> bool:
    """Whether a file, relative to the package's folder, can change a number of a run."""
    return not any(name == each or name.startswith(f"{each}/") for each in APART)


def _class_paths(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        if isinstance(path := tree.get("class_path"), str):
            yield path
        tree = [*tree.values()]
    for value in tree if isinstance(tree, list) else ():
        yield from _class_paths(value)


def _file_of(class_path: str) -> Path | None:
    module = class_path
    while "." in module:
        module = module.rpartition(".")[0]
        if module in sys.modules:
            file = getattr(sys.modules[module], "__file__", None)
            return None if file is None else Path(file)
    return None


def _git(folder: Path, *words: str) -> str | None:
    """The output of git, or None on failure. Nothing in the checkout is executed or written."""
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder))
    return _output("git", *options, *words)


def _output(*command: str) -> str | None:
    # A git hook or editor that started us may point to another repository.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
