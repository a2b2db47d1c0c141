"""A grid in one Parquet file, `results.parquet`: its table of cells and the records of its runs;
and the results of a grid, packed or not, by its name, its file or its folder.

One row per planned cell. After the columns of the table follows one column per kind of file,
such as `result.json`, with its text, or null where a run lacks it. Of `metrics.csv` only the
validations and the learning rates are kept: the losses of single training batches, which no score
uses, would be five sixths of the file. The metadata of the file hold `plan.json` and
`grid.yaml`, compressed (zlib, base64). Any reader of Parquet gets the table.
"""

import csv
import io
import json
import os
import re
import tempfile
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_app.config.grid import GridSpec, read_spec
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
)
from lightning_app.runs.records import SEAL, is_sealed, read_plan, sealed_with
from lightning_app.runs.store import locate_run, stored

if TYPE_CHECKING:
    import pandas as pd


PACKED = "results.parquet"
FILES = (RESULT, PRUNED, CONFIG, IDENTITY, BLOCK, ENVIRONMENT, METRICS)
"""The files of a run that are packed, once it has finished or was pruned."""

_LARGEST = 2**28
"""The bytes of text at most, in a file of the grid and in all runs together; more is refused before
it is in memory. The largest study of this repository has 18 MB."""

_OVER = ("ok", "diverged", "pruned", "other_data")
_ENDS = (RESULT, PRUNED)


def pack(grid: GridResults, table: "pd.DataFrame", path: Path) -> None:
    """Write the `table` of a grid, one row per cell, and the files of the finished runs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = GridFolder(grid.folder)
    packed = pa.Table.from_pandas(table, preserve_index=False)
    held = [_texts(cell) if cell.state in _OVER else {} for cell in grid.cells]
    for name in FILES:
        texts = [each.get(name) for each in held]
        packed = packed.append_column(name, pa.array(texts, pa.string()))
    grid_files = (folder.plan, folder.specification)
    whole = {file.name: b64encode(zlib.compress(file.read_bytes(), 9)) for file in grid_files}
    packed = packed.replace_schema_metadata({**(packed.schema.metadata or {}), **whole})
    sink = pa.BufferOutputStream()
    pq.write_table(packed, sink, compression="zstd", compression_level=19)
    write_whole(path, sink.getvalue().to_pybytes())


def unpack(path: Path, experiments: Path) -> GridFolder:
    """Restore the folder of a packed grid in `experiments`, under the name of the grid.

    A folder of this name stays as it is if it holds every packed file. Raises `UserError` if it
    differs, and for a file that is no packed grid.
    """
    held, runs = _contents(path)
    with output_folder(experiments), _working_folder(experiments) as made:
        for name, content in held.items():
            (made.path / name).write_bytes(content)
        plan = read_plan(made.plan)
        read_grid_file(made.specification)
        if {cell.id for cell in plan.cells} != runs.keys():
            raise UserError(f"{path}: its rows are not the cells of its plan")
        there = GridFolder(experiments / plan.name)
        for cell in plan.cells:
            folder = made.link(cell.name)
            for name, text in runs[cell.id].items():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(text.encode())
        if there.path.exists():
            _check_same(made.path, there.path, path)
            for cell in plan.cells:
                if runs[cell.id].keys().isdisjoint(_ENDS) and _has_ended(there.link(cell.name)):
                    raise UserError(
                        f"{there}: {cell.name} has ended there, but not in {path}; name another "
                        f"--experiments, or the grid instead of the study: {plan.name}"
                    )
        else:
            made.path.rename(there.path)
    return there


def _has_ended(run: Path) -> bool:
    return any((run / name).is_file() for name in _ENDS)


def is_packed(path: Path) -> bool:
    """Whether a file is a packed grid, by its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return {"id", *FILES} <= {*pq.read_schema(path).names}
    except (pa.ArrowException, OSError):
        return False


def packed_name(path: Path) -> str:
    """The name of a packed grid. Raises `UserError` for a file of another kind."""
    held, _ = _contents(path)
    return str(json.loads(held[GridFolder(Path()).plan.name])["name"])


def _contents(path: Path) -> tuple[dict[str, bytes], dict[str, dict[str, str]]]:
    """The files of the grid by name, and the files of each run by id of the cell and name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["id", *FILES]
    try:
        schema = pq.read_schema(path)
        metadata = schema.metadata or {}
        grid = GridFolder(Path())
        names = [each.name for each in (grid.plan, grid.specification)]
        held = {name: metadata.get(name.encode()) for name in names}
        if not all(held.values()) or not {*columns} <= {*schema.names}:
            raise UserError(f"{path}: holds no grid; `ablate report GRID --publish DIR` writes one")
        texts = {name: _inflated(path, name, text) for name, text in held.items() if text}
        # As dictionaries: a text that all rows share is in memory once.
        file = pq.ParquetFile(path, read_dictionary=columns)
        _check_size(path, sum(_uncompressed(file.metadata)))
        packed = file.read(columns)
        if not all(pa.types.is_dictionary(packed.schema.field(name).type) for name in columns):
            raise UserError(f"{path}: holds no grid: its columns are no texts")
        sizes = [_text_size(part) for name in FILES for part in packed.column(name).chunks]
        _check_size(path, sum(sizes))
    except (pa.ArrowException, OSError, ValueError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    runs = {
        row.pop("id"): {name: text for name, text in row.items() if text is not None}
        for row in packed.to_pylist()
    }
    return texts, runs


def _inflated(path: Path, name: str, text: bytes) -> bytes:
    """The content of a compressed file, never holding more than the limit in memory."""
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(b64decode(text), _LARGEST + 1)
    if len(data) > _LARGEST:
        _check_size(f"{path}: {name}", len(data))
    if not unpacking.eof:
        raise UserError(f"{path}: {name}: torn or damaged")
    return data


def _uncompressed(metadata: Any) -> Iterator[int]:
    """The size in memory of each column of a Parquet file, according to its footer."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            yield group.column(place).total_uncompressed_size


def _text_size(part: Any) -> int:
    """The characters of the texts of a column, each counted as often as rows have it."""
    sizes = [len(text) for text in part.dictionary.to_pylist()]
    return sum(sizes[place] for place in part.indices.to_pylist() if place is not None)


def _check_size(what: str | Path, size: int) -> None:
    if size > _LARGEST:
        raise UserError(
            f"{what}: holds more than {_LARGEST / 2**20:.0f} MiB of text, which no study has"
        )


@contextmanager
def _working_folder(experiments: Path) -> Iterator[GridFolder]:
    """A folder of a grid that is removed at the end, unless it was renamed before."""
    with tempfile.TemporaryDirectory(dir=experiments, prefix=".unpacking-") as held:
        made = GridFolder(Path(held) / "grid")
        made.runs.mkdir(parents=True)
        yield made


def _check_same(made: Path, there: Path, packed: Path) -> None:
    for file in sorted(each for each in made.rglob("*") if each.is_file()):
        name = file.relative_to(made)
        other = there / name
        if not other.is_file() or not _is_same(other, file):
            raise UserError(
                f"{there}: {name} is not the one in {packed}; name another --experiments"
            )


def _is_same(one: Path, other: Path) -> bool:
    try:
        return _packed(one) == _packed(other)
    except (ValueError, csv.Error, AttributeError):  # damaged
        return False


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
    path = cell.run.sound(name)
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
        there = f"; `ablate report {_short(study)}` shows published runs"
        raise UserError(
            f"{folder}: holds no plan yet; `ablate run {grid}` makes one"
            f"{there if (study / PACKED).is_file() else ''}"
        )
    check_same_cells(folder, spec)
    return folder.path, spec.tree()


def _short(path: Path) -> Path:
    """The path from the working folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


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
