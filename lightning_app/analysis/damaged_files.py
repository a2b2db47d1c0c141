"""The files of finished runs that a report cannot read."""

from lightning_app.analysis.grid_results import GridResults


def damaged_files(grid: GridResults) -> list[str]:
    """A line for each file that a report cannot read, with the reason."""
    lines = {line: None for part in grid.parts or (grid,) for line in part.damaged_configs}
    for cell in grid.cells:
        if cell.state == "damaged":
            lines[f"{cell.folder}/{cell.error}"] = None
        elif cell.finished:
            lines |= {f"{cell.folder / name}: {what}": None for name, what in cell.damage.items()}
    return list(lines)
