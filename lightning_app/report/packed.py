"""The runs of a grid in one archive, `runs.tar.xz`; and the results of a grid, packed or not, by
its name, its file or its folder.

The archive holds `plan.json`, `grid.yaml` and the files of the finished runs, in `runs/NAME/`. Of
`metrics.csv` only the validations and the learning rates are kept: the losses of single training
batches, which no score uses, would be five sixths of the archive. The same runs give the same
bytes.
"""

import csv
import io
import json
import lzma
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.identity import missing
from lightning_app.config.tree import canonical
from lightning_app.core.errors import UserError
from lightning_app.core.files import output_folder, write_whole
from lightning_app.core.project import shipped_folder
from lightning_app.report.results import (
    LEARNING_RATE,
    SUMS,
    CellResult,
    GridResults,
    read_grid_file,
    read_results,
    read_runs,
)
from lightning_app.runs.folder import (
    BLOCK,
    CONFIG,
    ENVIRONMENT,
    IDENTITY,
    METRICS,
    PRUNED,
    RESULT,
    STORE,
    VOUCHED,
    GridFolder,
    RunFolder,
    is_file_name,
)
from lightning_app.runs.records import SEAL, is_sealed, read_plan, sealed_with
from lightning_app.runs.store import locate_run, stored

PACKED = "runs.tar.xz"
FILES = (RESULT, PRUNED, CONFIG, IDENTITY, BLOCK, ENVIRONMENT, METRICS)
"""The files of a run that are packed, once it has finished or was pruned."""

_OVER = ("ok", "diverged", "pruned", "other_data")
_ENDS = (RESULT, PRUNED)


def pack(grid: GridResults, path: Path) -> None:
    """Write the plan, the grid file and the files of the finished runs."""
    folder, sink = GridFolder(grid.folder), io.BytesIO()
    held = {file.name: file.read_bytes() for file in (folder.specification, folder.plan)}
    for cell in sorted(grid.cells, key=lambda cell: cell.name):
        texts = _texts(cell) if cell.state in _OVER else {}
        held |= {f"runs/{cell.name}/{name}": text.encode() for name, text in texts.items()}
    with tarfile.open(fileobj=sink, mode="w:xz", preset=9) as archive:
        # Texts of one kind side by side are smaller. A new `TarInfo` has no owner and no time.
        for name in sorted(held, key=lambda name: (name.count("/"), Path(name).name)):
            member = tarfile.TarInfo(name)
            member.size = len(held[name])
            archive.addfile(member, io.BytesIO(held[name]))
    write_whole(path, sink.getvalue())


def unpack(path: Path, experiments: Path) -> GridFolder:
    """Restore the folder of a packed grid in `experiments`, under the name of the grid.

    A folder of this name stays as it is if it holds every packed file. Raises `UserError` if it
    differs, and for a file that is no packed grid.
    """
    with (
        output_folder(experiments),
        tempfile.TemporaryDirectory(dir=experiments, prefix=".unpacking-") as held,
    ):
        made = GridFolder(Path(held) / "grid")
        made.runs.mkdir(parents=True)
        with _opened(path) as archive:
            archive.extractall(made.path, _members(path, archive), filter="data")
        for file in (made.plan, made.specification):
            if not file.is_file():
                raise UserError(f"{path}: holds no {file.name}, so it is no packed grid")
        plan = read_plan(made.plan)
        read_grid_file(made.specification)
        if not {run.name for run in made.runs.iterdir()} <= {cell.name for cell in plan.cells}:
            raise UserError(f"{path}: its runs are not those of its plan")
        there = GridFolder(experiments / plan.name)
        if there.path.exists():
            _check_same(made.path, there.path, path)
            for cell in plan.cells:
                if not _has_ended(made.link(cell.name)) and _has_ended(there.link(cell.name)):
                    raise UserError(
                        f"{there}: {cell.name} has ended there, but not in {path}; name another "
                        f"--experiments, or the grid instead of the study: {plan.name}"
                    )
        else:
            made.path.rename(there.path)
    return there


def _has_ended(run: Path) -> bool:
    return any((run / name).is_file() for name in _ENDS)


def packed_name(path: Path) -> str:
    """The name of a packed grid. Raises `UserError` for a file of another kind."""
    with _opened(path) as archive:
        try:
            file = archive.extractfile(GridFolder(Path()).plan.name)
            return str(json.load(file)["name"])  # pyright: ignore[reportArgumentType]
        except (KeyError, ValueError) as error:
            raise UserError(f"{path}: is no packed grid: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """An archive. Raises `UserError` while it is read if it is damaged, or of another kind."""
    try:
        data = lzma.decompress(path.read_bytes())
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            yield archive
    except (tarfile.TarError, lzma.LZMAError, PermissionError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _members(path: Path, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of an archive; links and any other files are refused."""
    for member in archive:
        match member.name.split("/"):
            case ["plan.json" | "grid.yaml"]:
                known = True
            case ["runs", name, file]:
                known = is_file_name(name) and file in FILES
            case _:
                known = False
        if not (known and member.isreg()):
            raise UserError(f"{path}: {member.name}: is no file of a grid or of a run")
        yield member


def _check_same(made: Path, there: Path, packed: Path) -> None:
    for file in sorted(each for each in made.rglob("*") if each.is_file()):
        name = file.relative_to(made)
        # A missing or damaged file is another one.
        with suppress(FileNotFoundError, ValueError, csv.Error, AttributeError):
            if _packed(there / name) == _packed(file):
                continue
        raise UserError(f"{there}: {name} is not the one in {packed}; name another --experiments")


def _packed(path: Path) -> Any:
    """What is packed of a file, without the seal, which is over it."""
    data = path.read_bytes()
    if path.name == METRICS:
        return _without_training(data.decode())
    if path.name in _RECORDS:
        tree = _without_folders(json.loads(data))
        return {key: value for key, value in tree.items() if key not in (SEAL, "schema")}
    return data


_RECORDS = (ENVIRONMENT, RESULT, PRUNED)  # in this order: the seals cover the environment

_FOLDER = re.compile(r"""(^|[="'])(?:/|[A-Za-z]:\\)[^"']*[/\\]""")
"""The folders of an absolute path in a word of a command, also inside a quoted value."""


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    """A record whose command names files only: folders name machines and persons."""
    provenance = tree.get("provenance") or {}
    if "command" not in provenance:
        return tree
    command = [_FOLDER.sub(r"\1", word) for word in provenance["command"]]
    return {**tree, "provenance": {**provenance, "command": command}}


def _texts(cell: CellResult) -> dict[str, str]:
    """The texts of the files of a run by name, with a seal that covers what is packed."""
    texts = {name: text for name in FILES if (text := _text(cell, name)) is not None}
    for name in _RECORDS:
        before = json.loads(texts.get(name, "{}"))
        tree = _without_folders(before)
        if name != ENVIRONMENT and is_sealed(tree):
            beside = {each: texts[each].encode() for each in VOUCHED if each in texts}
            tree = sealed_with(tree, beside)
        if tree != before:
            texts[name] = json.dumps(tree, indent=1)
    return texts


def _text(cell: CellResult, name: str) -> str | None:
    path = cell.run.file(name)
    if path is None:
        return None
    if path.is_symlink():
        raise UserError(f"{path}: is a link, through which nothing is published")
    try:
        text = path.read_bytes().decode()
    except ValueError as error:
        raise UserError(f"{path}: is not a text: {error}") from error
    return _without_training(text) if name == METRICS else text


def _without_training(text: str) -> str:
    """The steps, validations and learning rates of `metrics.csv`, the sums at validations only."""
    names, *rows = csv.reader(text.splitlines())
    validation = [place for place, name in enumerate(names) if name.startswith("val/")]
    sums = [place for place, name in enumerate(names) if name in SUMS]
    rates = [place for place, name in enumerate(names) if name == LEARNING_RATE]
    step = names.index("step")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names[place] for place in (step, *rates, *sums, *validation))
    for row in rows:
        validated = any(row[place] for place in validation)
        if validated or any(row[place] for place in rates):
            shown = [row[place] if validated else "" for place in (*sums, *validation)]
            writer.writerow([row[step], *(row[place] for place in rates), *shown])
    return out.getvalue()


_CELLS = {"axes": "axes", "base_config": "base configs", "exclude": "exclusions"}
_CELLS |= {"search": "searches", "refine": "refinements"}
"""The keys of a grid file that determine its cells, besides the grid that it continues."""


class Found(NamedTuple):
    """The results of a grid, and whether its folder is temporary, as for a published study."""

    grid: GridResults
    restored: bool = False


@contextmanager
def found_results(grid: str | Path, experiments: Path) -> Iterator[Found]:
    """Yield the results of a grid; nothing is written.

    Args:
        grid: The name of a grid whose folder is in `experiments`, a grid file, the folder of a
            grid, `fit` for the runs of `ablate fit`, a folder of experiments for all runs in its
            store, or the folder of a published study. Its runs are restored in a temporary folder,
            which exists until the end of the context.
        experiments: The folder that holds the folders of grids.

    Raises:
        UserError: if there are no results, or they cannot be read.
    """
    if (runs := unplanned_runs(grid, experiments)) is not None:
        yield Found(read_runs(*runs))
    elif (study := published(grid, experiments)) is not None:
        with tempfile.TemporaryDirectory(prefix="ablate-results-") as held:
            yield Found(read_results(unpack(study, Path(held)).path), restored=True)
    else:
        yield Found(read_results(*find_planned(grid, experiments)))


def unplanned_runs(grid: str | Path, experiments: Path) -> tuple[Path, list[RunFolder]] | None:
    """The folder and the runs of `ablate fit` or of a whole store, which are not grids."""
    for folder in (Path(grid), experiments / grid):
        here = GridFolder(folder)
        if here.plan.is_file() or (folder / PACKED).is_file():
            return None
        store = folder if folder.name == STORE else folder / STORE
        if store.is_dir():
            names = sorted(name for name in os.listdir(store) if name.isalnum())
            return folder, [RunFolder(stored(store.parent, name)) for name in names]
        if here.runs.is_dir():
            links = sorted(path for path in here.runs.iterdir() if path.exists())
            return folder, [
                locate_run(here, path.name, path.readlink().name)
                if path.is_symlink()
                else RunFolder(path)
                for path in links
                if not path.name.startswith(".")
            ]
    return None


def published(grid: str | Path, experiments: Path) -> Path | None:
    """The packed grid if `grid` is the folder of a published study, else None.

    Raises:
        UserError: if it is also the name of a grid in `experiments`, which makes it ambiguous.
    """
    path, named = Path(grid), GridFolder(experiments / grid)
    if GridFolder(path).plan.is_file() or not (path / PACKED).is_file():
        return None
    if len(path.parts) == 1 and named.plan.is_file() and named.path.resolve() != path.resolve():
        raise UserError(
            f"{grid}: is the published study {path / PACKED} and the grid {named}; give the path "
            f"of one: {path.absolute()} or {named}"
        )
    return path / PACKED


def find_planned(grid: str | Path, experiments: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """The folder of a grid from its name, its file or its folder, and the content of the file.

    Raises:
        UserError: if it does not exist, or holds cells other than those of the file.
    """
    path = Path(grid)
    named = GridFolder(experiments / path)
    if GridFolder(path).plan.is_file():
        return path, None
    try:
        spec = read_spec(grid)
    except UserError:
        if len(path.parts) == 1 and named.plan.is_file():
            return named.path, None  # its file is gone or elsewhere
        raise
    folder = GridFolder(experiments / spec.name)
    if not folder.plan.is_file():
        study = shipped_folder() / "results" / spec.name
        short = study.relative_to(Path.cwd()) if study.is_relative_to(Path.cwd()) else study
        there = f"; `ablate report {short}` shows published runs"
        raise UserError(
            f"{folder}: holds no plan yet; `ablate run {grid}` makes one"
            f"{there if (study / PACKED).is_file() else ''}"
        )
    check_same_cells(folder, spec)
    return folder.path, spec.tree()


def check_same_cells(folder: GridFolder, spec: GridSpec) -> None:
    """Refuse a grid file that has other cells, or another metric, than the plan in a folder.

    Raises:
        UserError: naming what differs.
    """
    plan, held = read_plan(folder.plan), read_grid_file(folder.specification)
    if spec.adapts:
        spec = spec.with_cells([cell.axes for cell in (*plan.cells, *plan.waiting)])
    differs = "axes" if plan.axes != spec.axes else _difference_of_files(held, spec.tree())
    metric = held.get("metric") or {}
    known = {key: metric[key] for key in ("name", "mode") if metric.get(key) is not None}
    if differs is None and not known.items() <= {"name": spec.metric, "mode": spec.mode}.items():
        if needed := next(filter(None, map(missing, sorted(folder.runs.glob("*")))), ""):
            raise UserError(needed)  # it declares the metric
        differs = "metrics"
    if differs is not None:
        raise UserError(
            f"{folder}: holds another grid than {spec.source}; its {differs} differ; `ablate run` "
            "plans it again, and its present cells can be read by the path of the folder"
        )


def _difference_of_files(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The keys that determine cells and differ in two grid files or the grids they continue."""
    for key, what in _CELLS.items():
        if canonical(held.get(key) or []) != canonical(wanted.get(key) or []):
            return what
    one, other = (tree.get("init_from") or {} for tree in (held, wanted))
    if one.get("match") != other.get("match"):
        return "parents"
    differs = _difference_of_files(one["grid"], other["grid"]) if one else None
    return differs and f"parents' {differs}"
