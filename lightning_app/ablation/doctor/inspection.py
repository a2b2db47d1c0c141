"""What is wrong in the folder of one run, as far as its files tell, and how it is mended."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_app.ablation.doctor.findings import (
    ASIDE,
    RUNS_AGAIN,
    Finding,
    damaged,
    move_aside,
    put_aside,
)
from lightning_app.ablation.plan import Cell
from lightning_app.ablation.runs import PRUNED, RESULT, is_over
from lightning_app.archive import Damaged, check_archive
from lightning_app.files import write_whole, writing_in
from lightning_app.records import (
    Newer,
    Unsound,
    check_schema,
    read_json,
    read_pruned,
    read_result,
    read_yaml,
)
from lightning_app.tables import bytes_of, check_probes, check_table, check_text, torn_table

_STANDS = "the result stands"
_PARTS = (".part", ".partial")  # names of files that were being written


@dataclass(frozen=True, kw_only=True)
class Inspector:
    """Looks at run folders of the grid in `directory`.

    `keep` says which checkpoints its cells keep, `prunes` whether one that was pruned is over;
    `identify` gives the id of a config, and `resolve` the config that a cell should have.
    """

    directory: Path
    keep: str
    prunes: bool
    identify: Callable[[dict[str, Any]], str]
    resolve: Callable[[Cell], dict[str, Any]]

    def inspect(self, folder: Path, cell: Cell) -> list[Finding]:
        """All that is wrong in `folder` as the folder of `cell`; nothing where there is none."""
        if not os.path.lexists(folder):
            return []
        if not folder.is_dir():
            aside = Finding(
                path=folder,
                what="is no folder",
                remedy=f"move it aside, {RUNS_AGAIN}",
                fix=lambda: move_aside(folder, self.directory),
            )
            return [aside]
        if newer := of_newer(folder):
            return [newer]
        files = _walk(folder, self.directory.resolve())
        if files.obstacles:
            return files.obstacles
        config = folder / "config.yaml"
        unreadable = []
        try:
            other = self._check_config(config, cell) if config.exists() else None
            if other is not None:
                return [self._of_another(folder, cell, other)]
            if not config.exists() and _has_begun(folder):
                raise Unsound("missing beside what the run left")
        except Unsound as error:
            unreadable.append(self._unreadable_config(config, cell, str(error)))
        ending = list(_ending(folder, cell))
        finished = not ending and is_over(folder, self.prunes)
        return [
            *ending,
            *unreadable,
            *_checkpoints(folder, finished),
            *(self._absent_checkpoints(folder) if finished else ()),
            *_attempts(folder, finished),
            *_side_files(folder),
            *_leftovers(files),
        ]

    def _identity(self, tree: dict[str, Any]) -> str:
        try:
            return self.identify(tree)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Unsound("torn or damaged: no config of a run") from error

    def _check_config(self, path: Path, cell: Cell) -> str | None:
        """The id of a config of another experiment, None of the cell's own. Raises `Unsound`.

        A file cut off between two lines is a config too, but one that lacks fields.
        """
        if not path.is_file():
            raise Unsound("is no file")
        tree = read_yaml(path)
        identity = self._identity(tree)
        if identity == cell.id:
            return None
        if lacking := sorted(set(_keys(self.resolve(cell))) - set(_keys(tree))):
            raise Unsound(f"torn or damaged: lacks {lacking[0]}")
        return identity

    def _of_another(self, folder: Path, cell: Cell, identity: str) -> Finding:
        """A folder whose config is of another experiment: nothing in it is this cell's."""
        return Finding(
            path=folder / "config.yaml",
            what=f"is of another experiment: its id is {identity}, the plan's is {cell.id}",
            remedy=f"move the run's folder to {ASIDE}/, {RUNS_AGAIN}",
            fix=lambda: f"run's folder {move_aside(folder, self.directory)}, {RUNS_AGAIN}",
        )

    def _unreadable_config(self, path: Path, cell: Cell, what: str) -> Finding:
        def restore() -> str:
            text = yaml.safe_dump(self.resolve(cell), sort_keys=False)
            kept = f"{put_aside(path)}, and " if path.exists() else ""
            write_whole(path, text)
            return f"{kept}written anew from the grid file"

        remedy = "write it anew from the grid file"
        return Finding(path=path, what=what, remedy=remedy, fix=restore)

    def _absent_checkpoints(self, folder: Path) -> Iterator[Finding]:
        names = {"all": ("last", "best"), "none": ()}.get(self.keep, (self.keep,))
        paths = [folder / "checkpoints" / f"{name}.ckpt" for name in names]
        if absent := [path.name for path in paths if not path.exists()]:
            yield Finding(
                path=folder / "checkpoints",
                what=f"{' and '.join(absent)} not there; {_STANDS}",
                note=True,
            )


def of_newer(folder: Path) -> Finding | None:
    """A run of a newer version of this program: nothing in its folder is ours to judge or move."""
    for name in (RESULT, PRUNED):
        try:
            check_schema(read_json(folder / name))
        except Newer as error:
            return Finding(path=folder / name, what=str(error))
        except (Unsound, OSError):
            continue  # reported where it is read for what it holds
    return None


def _has_begun(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RESULT, PRUNED, "checkpoints"))


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted key of every field of a config."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


@dataclass
class _Files:
    """What a walk over a run's folder came across."""

    obstacles: list[Finding] = field(default_factory=list)
    parts: list[Path] = field(default_factory=list)
    put_aside: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)


def _walk(folder: Path, inside: Path) -> _Files:
    """Look at every name under `folder`; links that stay `inside` are not followed either."""
    files, user = _Files(), os.geteuid()
    _look_at_link(folder, inside, files)
    folders = [] if files.obstacles else [folder]
    while folders:
        current = folders.pop()
        if not os.access(current, os.R_OK | os.W_OK | os.X_OK):
            files.obstacles.append(_out_of_reach(current, "written"))
            continue
        with os.scandir(current) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    _look_at_link(path, inside, files)
                elif entry.is_dir():
                    folders.append(path)
                elif not os.access(path, os.R_OK):
                    files.obstacles.append(_out_of_reach(path, "read"))
                if entry.stat(follow_symlinks=False).st_uid != user:
                    files.foreign.append(path)
                if entry.name.endswith(_PARTS):
                    files.parts.append(path)
                elif ".damaged" in entry.name:
                    files.put_aside.append(path)
    return files


def _look_at_link(path: Path, inside: Path, files: _Files) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(inside):
        files.obstacles.append(
            Finding(
                path=path,
                what=f"a link that leads out of the grid's folder, to {path.resolve()}",
                remedy="put what it points to in its place, or remove it",
            )
        )


def _out_of_reach(path: Path, done: str) -> Finding:
    owner = path.stat().st_uid
    return Finding(
        path=path,
        what=f"cannot be {done} by this user (its owner is user {owner})",
        remedy="its owner can give the right with chmod, an administrator with chown",
    )


def _ending(folder: Path, cell: Cell) -> Iterator[Finding]:
    """What is wrong with `result.json` and `pruned.json`."""
    sound = []
    for name, read in ((RESULT, read_result), (PRUNED, read_pruned)):
        path = folder / name
        try:
            if read(path, cell.id) is not None:
                sound.append(path)
        except Unsound as error:
            yield damaged(path, str(error), RUNS_AGAIN)
    if len(sound) == 2:
        yield damaged(sound[1], f"stands beside a {RESULT}, which a pruned run has not", _STANDS)


def _checkpoints(folder: Path, finished: bool) -> Iterator[Finding]:
    """Checkpoints that cannot be read; one to go on from is read to its last byte."""
    checkpoints = folder / "checkpoints"
    if checkpoints.exists() and not checkpoints.is_dir():
        yield damaged(checkpoints, "is no folder")
        return
    for path in sorted(checkpoints.glob("*.ckpt")):
        if path.is_dir():
            continue  # of parts, as FSDP writes one if told to
        try:
            check_archive(path, contents=not finished)
        except Damaged as error:
            then = "the cell starts without it" if path.name == "last.ckpt" else ""
            yield damaged(path, str(error), _STANDS if finished else then)


def _attempts(folder: Path, finished: bool) -> Iterator[Finding]:
    """Attempts that are none, gaps in their numbers, and logs that a resumed run would choke on."""
    attempts = folder / "attempts"
    if not attempts.exists():
        return
    if not attempts.is_dir():
        yield damaged(attempts, "is no folder")
        return
    numbers = set()
    for path in attempts.iterdir():
        if not (path.name.isascii() and path.name.isdecimal()):
            if path.name.isdigit():  # such as a raised 2, which is no number to count on from
                yield damaged(path, "is no attempt's number")
            continue
        if not path.is_dir():
            yield damaged(path, "is no folder of an attempt")
            continue
        numbers.add(int(path.name))
        if not finished:
            yield from _table(path / "metrics.csv")
    gaps = sorted(set(range(1, max(numbers, default=0))) - numbers)
    if gaps:
        missing = ", ".join(map(str, gaps[:3])) + (", ..." if len(gaps) > 3 else "")
        yield Finding(path=attempts, what=f"attempt {missing} has no folder", note=True)


def _side_files(folder: Path) -> Iterator[Finding]:
    """The tables of a finished run, its translations, the records of its model and machine."""
    yield from _table(folder / "metrics.csv")
    for name in ("block.json", "env.json"):
        path = folder / name
        try:
            if path.exists():
                read_json(path)
        except Unsound as error:
            yield damaged(path, str(error))
    texts = (("hypotheses.txt", check_text), ("references.txt", check_text))
    for name, check in (("probes.csv", check_probes), *texts):
        path = folder / name
        try:
            if path.exists():
                check(bytes_of(path))
        except Unsound as error:
            yield damaged(path, str(error))


def _table(path: Path) -> Iterator[Finding]:
    if not path.exists():
        return
    if not path.is_file():
        yield damaged(path, "is no file")
        return
    data = path.read_bytes()
    whole = torn_table(data)
    try:
        check_table(data if whole is None else data[:whole])
    except Unsound as error:
        yield damaged(path, str(error))
        return
    if whole is not None:

        def cut() -> str:
            write_whole(path, data[:whole])
            return "cut it off"

        yield Finding(path=path, what="its last line is torn", remedy="cut it off", fix=cut)


def _leftovers(files: _Files) -> Iterator[Finding]:
    for path in files.parts:

        def remove(path: Path = path) -> str:
            with writing_in(path.parent):
                path.unlink()
            return "removed"

        if path.is_file() or path.is_symlink():
            yield Finding(
                path=path, what="left over from a write that was cut short", remedy="remove it",
                fix=remove,
            )  # fmt: skip
    for path in files.put_aside:
        yield Finding(path=path, what="put aside earlier; remove it when you like", note=True)
    if files.foreign:
        count, owner = len(files.foreign), files.foreign[0].stat(follow_symlinks=False).st_uid
        yield Finding(
            path=files.foreign[0],
            what=f"belongs to user {owner}, as do {count} files of this run in all",
            note=True,
        )
