"""Select the runs that share a figure."""

from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.statistics import mean

MOST_PANELS = 40  # panels of one kind of figure: each takes a twentieth of a second to draw


def slices_of(grid: GridResults) -> dict[tuple[str, float | None], list[CellResult]]:
    """The finished cells by group and learning rate; those of one slice share a figure."""
    slices: dict[tuple[str, float | None], list[CellResult]] = {}
    for cell in grid.finished:
        slices.setdefault((cell.group, cell.lr), []).append(cell)
    return dict(sorted(slices.items(), key=lambda item: (item[0][0], item[0][1] or 0.0)))


def drawn_slices(grid: GridResults) -> dict[tuple[str, float | None], list[CellResult]]:
    """The slices with figures: of each group the learning rate at which its runs learn best.

    That is the rate with the smallest mean loss over all finished runs. Of many groups the first,
    at least one, with no more than `MOST_PANELS` variants in all.
    """
    best: dict[str, tuple[float, float | None]] = {}
    slices = slices_of(grid)
    for (group, lr), cells in slices.items():
        loss = mean([cell.loss for cell in cells])
        if group not in best or loss < best[group][0]:
            best[group] = (loss, lr)
    drawn, panels = {}, 0
    for group, (_, lr) in best.items():
        panels += len({cell.variant for cell in slices[group, lr]})
        if drawn and panels > MOST_PANELS:
            break
        drawn[group, lr] = slices[group, lr]
    return drawn
