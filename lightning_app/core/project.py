"""The surroundings of a run: the user's `ablate.yaml` and the files shipped with the package.

Fast to import: without torch.
"""

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_app.core.errors import UserError

PROJECT = "ablate.yaml"
"""The file of a project, in the working folder."""

_RECIPE = "see 'Runs from elsewhere' in docs/many-workers.md"


@dataclass(frozen=True, kw_only=True)
class _ProjectFile:
    plugins: list[str] | None = None
    results: Any = None  # a key of earlier versions


@dataclass(frozen=True)
class Project:
    """The content of a project's file.

    Attributes:
        path: The file, which may not exist.
        plugins: The plug-ins as written.
    """

    path: Path
    plugins: tuple[str, ...] = ()


def read_project(folder: Path | None = None) -> Project:
    """Read the project's file in a folder, by default the working folder.

    Raises:
        UserError: naming the file, the key and the value, if the file is not valid or belongs to
            another user.
    """
    path = (folder or Path.cwd()) / PROJECT
    if path.is_symlink():
        raise UserError(
            f"{path}: is a symbolic link, but its plug-ins would be those of this folder; copy the "
            "file, or work in the folder that it names"
        )
    if not path.is_file():
        return Project(path)
    check_own(path)
    # Imported here, since most commands work in a folder without such a file.
    from lightning_app.core import strict_yaml
    from lightning_app.core.schema import read

    file = read(_ProjectFile, strict_yaml.read_yaml_file(path)[0] or {}, str(path))
    if file.results is not None:
        raise UserError(f"{path}: results: no longer a key; copy the runs with rsync: {_RECIPE}")
    return Project(path, tuple(file.plugins or ()))


def check_own(path: Path) -> None:
    """Refuse a file that other users may have written, since code that it names would run.

    The file, and a link to it, must belong to the user, to root, or to the owner of this program.
    It must not be writable by others, nor by its group unless that is the owner's private group:
    one with the owner's name and no other members, as with umask 002.

    Raises:
        UserError: naming the file, and what would be right.
    """
    trusted = {os.getuid(), 0, os.stat(__file__).st_uid}
    status = path.stat()
    for owner in (path.lstat().st_uid, status.st_uid):
        if owner not in trusted:
            raise UserError(
                f"{path}: belongs to another user (uid {owner}), whose code `ablate` does not run; "
                "make the file yours, or work in another folder"
            )
    if status.st_mode & stat.S_IWOTH:
        raise UserError(f"{path}: every user may write it, so its code is not run; chmod o-w")
    if status.st_mode & stat.S_IWGRP:
        try:
            group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid).pw_name
        except KeyError:  # a group or a user without a name, as in some containers
            private = status.st_gid == status.st_uid
        else:
            private = group.gr_name == owner and not {*group.gr_mem} - {owner}
        if not private:
            raise UserError(
                f"{path}: the members of its group (gid {status.st_gid}) may write it, so its code "
                "is not run; chmod g-w"
            )


def shipped_folder() -> Path:
    """Return the folder of the shipped ablations: inside the wheel or next to it in a checkout."""
    return _shipped("shipped_ablations", "ablations")


def recompute_program() -> Path:
    """Return the program that recomputes the numbers of a report, located in the same way."""
    return _shipped("report/recompute_study.py", "docs/recompute_study.py")


def _shipped(in_wheel: str, in_checkout: str) -> Path:
    package = Path(str(files("lightning_app")))
    inside = package / in_wheel
    return inside if inside.exists() else package.parent / in_checkout
