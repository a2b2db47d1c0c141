"""A grid in one Parquet file, `results.parquet`: its table of cells and the records of its runs.

One row per planned cell. After the columns of the table follows one column per kind of file,
such as `result.json`, with its text, or null where a run lacks it. Of `metrics.csv` only the
validations and the learning rates are kept: the losses of single training batches, which no score
uses, would be five sixths of the file. The metadata of the file hold `plan.json` and
`grid.yaml`, compressed (zlib, base64). Any reader of Parquet gets the table.
"""

import csv
import io
import json
import tempfile
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.core.errors import UserError
from lightning_app.core.files import output_folder, write_whole
from lightning_app.report.frames import SUMS
from lightning_app.report.results import LEARNING_RATE, CellResult, GridResults, read_grid_file
from lightning_app.runs.folder import (
    BLOCK,
    CONFIG,
    ENVIRONMENT,
    IDENTITY,
    METRICS,
    PRUNED,
    RESULT,
    VOUCHED,
    GridFolder,
)
from lightning_app.runs.records import SEAL, is_sealed, read_plan, sealed_with

if TYPE_CHECKING:
    import pandas as pd


PACKED = "results.parquet"
FILES = (RESULT, PRUNED, CONFIG, IDENTITY, BLOCK, ENVIRONMENT, METRICS)
"""The files of a run that are packed, once it has finished or was pruned."""

_LARGEST = 2**28
"""The bytes of text at most, in a file of the grid and in all runs together; more is refused before
it is in memory. The largest study of this repository has 18 MB."""

_OVER = ("ok", "diverged", "pruned", "other_data")


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
        else:
            made.path.rename(there.path)
    return there


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
    if path.name in (RESULT, PRUNED):
        return {
            key: value for key, value in json.loads(data).items() if key not in (SEAL, "schema")
        }
    return data


def _texts(cell: CellResult) -> dict[str, str]:
    """The texts of the files of a run by name, with a seal that covers what is packed."""
    texts = {name: text for name in FILES if (text := _text(cell, name)) is not None}
    for name in (RESULT, PRUNED):
        tree = json.loads(texts.get(name, "{}"))
        if is_sealed(tree):
            beside = {each: texts[each].encode() for each in VOUCHED if each in texts}
            texts[name] = json.dumps(sealed_with(tree, beside), indent=1)
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
