"""Select the runs that share a figure."""

from lightning_app.analysis.grid_results import CellResult, GridResults

MOST_PANELS = 40  # panels of one kind of figure: each takes a twentieth of a second to draw


def slices_of(grid: GridResults) -> dict[tuple[str, float | None], list[CellResult]]:
    """The finished cells by group and learning rate; those of one slice share a figure."""
    slices: dict[tuple[str, float | None], list[CellResult]] = {}
    for cell in grid.finished:
        slices.setdefault((cell.group, cell.lr), []).append(cell)
    return dict(sorted(slices.items(), key=lambda item: (item[0][0], item[0][1] or 0.0)))


def drawn_slices(grid: GridResults) -> dict[tuple[str, float | None], list[CellResult]]:
    """The first slices, at least one, with no more than `MOST_PANELS` variants in all."""
    drawn, panels = {}, 0
    for key, cells in slices_of(grid).items():
        panels += len({cell.variant for cell in cells})
        if drawn and panels > MOST_PANELS:
            break
        drawn[key] = cells
    return drawn
