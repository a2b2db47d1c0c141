"""Finished cells of another code, data or libraries than now: found, and put aside."""

import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lightning_app.ablation.plan import Cell, Plan
from lightning_app.ablation.runs import Run, read_run, run_folder
from lightning_app.errors import UserError
from lightning_app.files import writing_in
from lightning_app.mixtures import STALE, SUPERSEDED, Groups, counted, others, some

WORDS = {
    "code": "version of the code",
    "data": "state of the data",
    "libraries": "set of library versions",
    "device": "kind of device",
}


def lines(found: Mapping[str, Groups]) -> Iterator[str]:
    """What `ablate plan` says of them: a line for each kind."""
    for kind, of in found.items():
        total = sum(map(len, of.values()))
        cells = "1 finished cell" if total == 1 else f"{total} finished cells"
        if kind == "unrecorded":
            yield f"{cells} without a record of the code and libraries that made them: {some(of)}"
        else:
            yield f"{cells} of another {WORDS[kind]} than here and now ({counted(of)}): {some(of)}"


def supersede(directory: Path, plan: Plan, here: Mapping[str, Any]) -> list[str]:
    """Put the runs aside that are of another code, data or libraries than now, for them to run
    again; say in a line how many.

    Runs that were cut short count too: what goes on from their checkpoints would be of both.
    Nobody else may use the grid. Raises `UserError` where the folder cannot be written.
    """
    records = {cell.name: record for cell in plan.cells if (record := _record(directory, cell))}
    found = {kind: of for kind, of in others(records, here).items() if kind in STALE}
    names = dict.fromkeys(name for of in found.values() for each in of.values() for name in each)
    for name in names:
        source = directory / "runs" / name
        with writing_in(directory):
            (directory / SUPERSEDED).mkdir(exist_ok=True)
            source.rename(_free(directory / SUPERSEDED / name))
    if not names:
        return [f"{plan.name}: no cell is of another code, data or libraries than now"]
    why = "; ".join(f"{kind}: {counted(of)}" for kind, of in found.items())
    return [f"{len(names)} runs moved to {directory / SUPERSEDED}, to be done again ({why})"]


def _record(directory: Path, cell: Cell) -> Mapping[str, Any] | None:
    """What made a run so far, None where none has begun."""
    run = read_run(directory, cell)
    if run.result is not None or run.pruned is not None:
        return run.result or run.pruned
    return _of_attempt(run_folder(directory, cell), run)


def _of_attempt(folder: Path, run: Run) -> Mapping[str, Any] | None:
    if not (folder / "checkpoints" / "last.ckpt").is_file():
        return None  # it begins anew
    path = folder / "attempts" / str(run.attempts) / "provenance.json"
    try:
        return {"provenance": json.loads(path.read_text(encoding="utf-8"))}
    except FileNotFoundError:
        return {"provenance": {}}
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON; remove the file") from error


def _free(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return path if not path.exists() else next(each for each in numbered if not each.exists())
