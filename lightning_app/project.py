"""The file ``ablate.yaml`` of the working folder: a user's plug-ins and folders of results.

Fast to import: without torch.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.errors import UserError, nearest

PROJECT = "ablate.yaml"
"""The file of a project, in the working folder."""

PLUGINS = "plugins"
"""Its key for files and modules of code (`plugins`)."""

RESULTS = "results"
"""Its key for folders in which `ablate plan` and `run` look for finished cells."""


class Project(NamedTuple):
    """What a project's file lists.

    Attributes:
        path: The file, which may not exist.
        plugins: The plug-ins as written.
        results: The folders as written.
    """

    path: Path
    plugins: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    def folders_of_results(self) -> list[Path]:
        """Return the folders of results; relative ones are relative to the file.

        Raises:
            UserError: for one that does not exist.
        """
        found = [self.path.parent / Path(each).expanduser() for each in self.results]
        for folder, written in zip(found, self.results, strict=True):
            if not folder.is_dir():
                raise UserError(
                    f"{self.path}: {RESULTS}: there is no folder {folder} (written '{written}'); "
                    "list folders of experiments, or of single grids"
                )
        return found


def read_project(folder: Path | None = None) -> Project:
    """Read the project's file in a folder, by default the working folder.

    Raises:
        UserError: naming the file, the key and the value, if the file is not valid or belongs to
            another user.
    """
    path = (folder or Path.cwd()) / PROJECT
    if not path.is_file():
        return Project(path)
    owner = path.stat().st_uid
    if hasattr(os, "getuid") and owner not in (os.getuid(), 0):
        raise UserError(
            f"{path}: belongs to another user (uid {owner}), whose code `ablate` does not run; "
            "make the file yours, or work in another folder"
        )
    # Imported here, since most commands work in a folder without such a file.
    from lightning_app import strict_yaml

    tree = strict_yaml.read_yaml_file(path)[0] or {}
    known = {PLUGINS, RESULTS}
    if not isinstance(tree, dict) or set(tree) - known:
        unknown = next(iter(set(tree) - known), None) if isinstance(tree, dict) else tree
        raise UserError(
            f"{path}: expected the keys '{PLUGINS}' and '{RESULTS}', each a list, found {unknown!r}"
            f"{nearest(str(unknown), known)}"
        )
    return Project(
        path,
        _listed(path, tree, PLUGINS, "files and modules"),
        _listed(path, tree, RESULTS, "folders"),
    )


def _listed(path: Path, tree: Mapping[str, Any], key: str, what: str) -> tuple[str, ...]:
    listed = tree.get(key)
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise UserError(f"{path}: {key}: expected a list of {what}, found {listed!r}")
    return tuple(listed)
