"""The plug-ins of a run: its folder names the ones it needs and keeps copies of their files.

Nothing in the folder is executed: a message names the plug-in that must be loaded.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_app.config.identity import read_record
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.plugins import KEY, loaded
from lightning_app.runs.folder import RunFolder


def keep_copies(folder: RunFolder, used: Mapping[str, str]) -> None:
    """Write the plug-ins of a run into its folder: `plugins.json`, and a copy of each file."""
    if not used:
        return
    known: dict[str, Any] = {}
    for name in used:
        plugin = loaded()[name]
        known[name] = {"source": plugin.source, "sha256": plugin.sha256}
        if plugin.content is not None:
            folder.plugin_copies.mkdir(exist_ok=True)
            (folder.plugin_copies / plugin.shown).write_bytes(plugin.content)
    write_whole(folder.plugins, json.dumps(known, indent=1))


def needed_by(folder: Path) -> dict[str, str]:
    """Return the digest of each plug-in that the run in a folder needs, by name."""
    record = read_record(folder)
    config = {} if record is None else record.config
    start = f"{KEY}."
    return {key.removeprefix(start): config[key] for key in config if key.startswith(start)}


def missing(folder: Path) -> str:
    """Name a plug-in of a run that is not loaded or has changed; empty otherwise."""
    for name, digest in needed_by(folder).items():
        copy = RunFolder(folder).plugin_copies / f"{name}.py"
        shown = copy.name if copy.is_file() else name
        plugin = loaded().get(name)
        if plugin is not None and plugin.sha256 == digest:
            continue
        other = "" if plugin is None else f"; {plugin.source} has sha256 {plugin.sha256}"
        kept = f", such as its copy {copy} if you trust it" if copy.is_file() else ""
        option = "--plugin FILE" if copy.is_file() else "--plugin MODULE"
        return (
            f"run {folder} needs the plug-in {shown} (sha256 {digest}): pass {option}{kept}{other}"
        )
    return ""


def require(folder: Path) -> None:
    """Refuse a run whose plug-ins are not loaded or have changed. None of its code is executed.

    Raises:
        UserError: naming the plug-in, its digest and what to do.
    """
    if message := missing(folder):
        raise UserError(message)


def require_of(checkpoint: Path) -> None:
    """Do the same for the run of a checkpoint inside or next to its folder."""
    parent = checkpoint.parent
    require(parent.parent if parent.name == "checkpoints" else parent)


@contextmanager
def hinting(folders: Iterable[Path]) -> Iterator[None]:
    """Add to a mistake that runs in these folders need a plug-in that is not loaded."""
    try:
        yield
    except UserError as error:
        absent = (missing(each) for each in folders if needed_by(each).keys() - loaded().keys())
        found = next(absent, "")
        raise UserError(f"{error}; {found}" if found else str(error)) from error
