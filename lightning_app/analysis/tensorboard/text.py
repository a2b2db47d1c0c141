"""The text of a run in the Text tab: the grid's question, the config, the block."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any
from urllib.parse import quote

from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.papers import read_mapping
from lightning_app.grid_axes import label
from lightning_app.rulers import differences, ruler
from lightning_app.run_folder import DRAWING

FENCE = "```"


def question_of(grid: GridResults) -> str:
    """The question, and the metrics by which no ranking of all runs is possible."""
    said = [
        f"Do not rank all runs by {metric}: it counts other things where {why}."
        for metric in dict.fromkeys([grid.metric, grid.monitored.loss])
        if (why := differences([ruler(cell.setting, metric) for cell in grid.cells]))
    ]
    question = grid.question or "No question is written in the grid file."
    return "\n\n".join([question, *said])


def run_text(cell: CellResult, question: str) -> str:
    """One Markdown text. A run that has not ended has no resolved block yet.

    `serve.Site` answers the link to the drawing; a TensorBoard of its own shows only its path.
    """
    parts = [f"# {cell.name}", question]
    config = cell.folder / "config.yaml"
    if config.is_file():
        text = config.read_text(encoding="utf-8", errors="replace").strip()
        parts += ["## Config", f"{FENCE}yaml\n{text}\n{FENCE}"]
    if (cell.folder / DRAWING).is_file():
        path = f"runs/{cell.folder.name}/{DRAWING}"
        parts.append(f"Drawing of the block: [{path}]({quote(path)})")
    block = cell.sound("block.json")
    if block is not None:
        parts.append("## Resolved block")
        parts += [part for side, spec in read_mapping(block).items() for part in _stack(side, spec)]
    return "\n\n".join(parts) + "\n"


def _stack(side: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """A table of one stack: a row for each field, a column for consecutive equal layers.

    An encoder reads no field of cross-attention.
    """
    blocks = [
        {key: value for key, value in block.items() if side == "decoder" or "cross" not in key}
        for block in spec.get("blocks") or []
    ]
    around = {key: value for key, value in spec.items() if key != "blocks"}
    yield f"### {side.capitalize()}"
    if around:
        yield ", ".join(f"{key} `{value}`" for key, value in _fields(around))
    runs = [list(same) for _, same in groupby(enumerate(blocks, 1), key=lambda pair: pair[1])]
    layers = [(run[0][0], run[-1][0]) for run in runs]
    columns = [dict(_fields(run[0][1])) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    heads = [f"layer {a}" if a == b else f"layers {a}-{b}" for a, b in layers]
    rows = [["field", *heads], ["---"] * (1 + len(heads))]
    rows += [[f"`{name}`", *(column.get(name, "") for column in columns)] for name in names]
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _fields(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and short values of all leaves of a tree."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", label(value)
