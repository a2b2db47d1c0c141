"""The store of runs, `experiments/.runs/ID`: equal ids are the same experiment for every grid.

A grid names its runs by relative links, `experiments/GRID/runs/NAME`, so that a run finished by one
grid is finished for all, and two grids that need a run at the same time meet at its lock. If a file
system has no links, a run lies in the folder of its grid, and other grids cannot use it."""

import errno
import os
import shutil
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

from filelock import FileLock

from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole, writing_in
from lightning_app.runs.folder import NAMED, STORE, GridFolder, RunFolder, is_file_name
from lightning_app.runs.records import Unsound, read_yaml

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES)


def stored(experiments: Path, identity: str) -> Path:
    """The path of a run in the store of a folder of experiments.

    Raises:
        UserError: if anything other than a folder of this user is there.
    """
    path = experiments / STORE / identity
    if not is_file_name(identity):
        raise UserError(f"{experiments / STORE}: expected the id of a run, found {identity!r}")
    try:
        status = path.lstat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path}: is not a folder; a run lies in its own folder: move this away")
    if status.st_uid not in (os.geteuid(), 0, path.parent.lstat().st_uid):
        raise UserError(
            f"{path}: belongs to another user (uid {status.st_uid}); copy the runs of others as "
            "'Runs from elsewhere' in docs/many-workers.md shows"
        )
    return path


def locate_run(grid: GridFolder, name: str, identity: str) -> RunFolder:
    """The folder of a run of a grid, which need not exist yet.

    It is named by its link, or by its path in the store while this grid has no link to it.

    Raises:
        UserError: for a link that does not lead to the run in the store, and for a file.
    """
    link = grid.link(name)
    place = stored(grid.experiments, identity)
    try:
        mode = link.lstat().st_mode
    except FileNotFoundError:
        return RunFolder(place if place.exists() else link)
    except OSError as error:
        raise UserError(f"{link}: cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        return RunFolder(link)
    if not stat.S_ISLNK(mode):
        raise UserError(f"{link}: is not a folder; {_mend(grid)}")
    if (leads := os.readlink(link)) != _target(identity):
        raise UserError(
            f"{link}: is a link to {leads}, expected one to {_target(identity)}; {_mend(grid)}"
        )
    if not place.parent.is_dir():
        raise UserError(
            f"{link}: leads to {place.parent}, which does not exist; copy the folder of a grid "
            "together with it, or with links followed (cp -rL, rsync -L)"
        )
    if not place.exists():
        _check_brought(grid, place.parent)
    return RunFolder(link)


def _check_brought(grid: GridFolder, store: Path) -> None:
    """Refuse a grid with links to runs of which none is in the store: it was copied without them,
    and would be read as a grid that never started."""
    links = 0
    with os.scandir(grid.runs) as entries:
        for entry in entries:
            if os.path.exists(entry.path):  # mostly the first one
                return
            links += entry.is_symlink()
    if grid.plan.is_file() and links > 1:
        raise UserError(
            f"{grid.runs}: of the {links} runs linked there none is in {store}; copy them, "
            "or the folder of the grid with links followed (cp -rL, rsync -L), or remove "
            f"{grid.runs} to train all again"
        )


def _target(identity: str) -> str:
    return f"../../{STORE}/{identity}"


def _mend(grid: GridFolder) -> str:
    return f"remove it, and `ablate run {grid.name}` links the run again"


def place_run(grid: GridFolder, name: str, identity: str) -> RunFolder:
    """Create the folder in the store for a run about to start, and this grid's link to it.

    Raises:
        UserError: as in `locate_run`, and if a folder cannot be written.
    """
    link, place = grid.link(name), stored(grid.experiments, identity)
    if link.is_dir() and not link.is_symlink():
        return locate_run(grid, name, identity)
    for folder in (place, grid.runs):
        with writing_in(folder):
            folder.mkdir(parents=True, exist_ok=True)
    link_run(grid, name, identity)
    folder = locate_run(grid, name, identity)
    if folder.path != link and not any(place.iterdir()):  # no support for links
        with suppress(OSError):  # another process has started to fill it
            place.rmdir()
            with writing_in(link):
                link.mkdir(exist_ok=True)
    return locate_run(grid, name, identity)


def link_run(grid: GridFolder, name: str, identity: str) -> None:
    """Link a run in the store into a grid's folder, unless it is there or links are unsupported.

    The run's folder lists the grid first, so that every link is known to its run.
    A run whose folder was removed and which restarts behind the same link lists it again.
    """
    link, place = grid.link(name), RunFolder(stored(grid.experiments, identity))
    listing = place.listed / grid.path.resolve().name
    is_there = os.path.lexists(link)
    if not place.path.is_dir() or (is_there and (listing.exists() or not link.is_symlink())):
        return
    with writing_in(grid.path), FileLock(grid.link_lock):  # of several supervisors one writes
        write_whole(listing, f"{name}\n")
    if is_there:
        return
    with writing_in(grid.runs):
        grid.runs.mkdir(parents=True, exist_ok=True)
        try:
            os.symlink(_target(identity), link, target_is_directory=True)
        except FileExistsError:
            return  # another process of this grid has created it
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    if not link.exists() or not link.samefile(place.path):  # no links, or `runs` is elsewhere
        link.unlink(missing_ok=True)
        listing.unlink(missing_ok=True)  # the run may have been put aside meanwhile
        with suppress(OSError):  # not empty: other grids list it
            place.listed.rmdir()


def drop_links(grid: GridFolder, planned: set[str]) -> None:
    """Remove links into the store of runs that a grid no longer plans; the runs stay there."""
    for link in grid.runs.iterdir() if grid.runs.is_dir() else ():
        if link.name in planned or not link.is_symlink():
            continue
        if os.readlink(link).startswith(f"../../{STORE}/"):
            link.unlink()


def put_aside(
    experiments: Path, identity: str, folder: Path | None = None, word: str = "superseded"
) -> Path:
    """Rename a run in the store to `ID@superseded-N`, to make room for a new one.

    Other grids that list the run then list the new one. No process may be training the run. With
    `folder`, that folder is renamed instead, and the run in the store stays. `word` is the reason
    for keeping it.

    Returns:
        The new path.
    """
    place = stored(experiments, identity)
    names = (f"{identity}@{word}-{number}" for number in count(1))
    target = next(place.with_name(name) for name in names if not place.with_name(name).exists())
    with writing_in(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder or place, target)
        if folder is None:
            RunFolder(place).listed.mkdir(parents=True, exist_ok=True)
        for path in RunFolder(target).listed.glob("*") if folder is None else ():
            shutil.copyfile(path, RunFolder(place).listed / path.name)
    return target


def superseded(experiments: Path, ids: set[str]) -> list[Path]:
    """The earlier runs with these ids that were put aside."""
    store = experiments / STORE
    paths = sorted(store.iterdir()) if store.is_dir() else []
    return [path for path in paths if path.name.partition("@superseded-")[0] in ids - {path.name}]


def trim_checkpoints(folder: RunFolder, keep: str) -> None:
    """Remove the checkpoints of a finished run that are not kept by any grid that lists it.

    `keep` is the setting of the grid that trained it: `all`, `last`, `best` or `none`.
    """
    experiments = folder.path.resolve().parent.parent
    others = folder.grids().keys() - {folder.grid}
    wanted = {keep, *(_kept_by(GridFolder(experiments / grid)) for grid in others)}
    for name in NAMED:
        if not wanted & {"all", name}:
            folder.checkpoint(name).unlink(missing_ok=True)


def _kept_by(grid: GridFolder) -> str:
    """What a grid keeps; everything if that cannot be read, as for single runs."""
    try:
        return str(read_yaml(grid.specification).get("checkpoints") or "all")
    except (FileNotFoundError, Unsound):
        return "all"
