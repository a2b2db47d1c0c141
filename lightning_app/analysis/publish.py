"""A study as a small folder to keep: what its numbers come from, its scores and its figure."""

from pathlib import Path

from lightning_app.analysis.bleu import bleu_scores
from lightning_app.analysis.exports.tidy import write_scores
from lightning_app.analysis.figures.dark import darken
from lightning_app.analysis.figures.files import png, save
from lightning_app.analysis.figures.style import styled
from lightning_app.analysis.figures.write import first_figure
from lightning_app.analysis.frames import results_frame
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.packed_grid import PACKED, pack
from lightning_app.analysis.sensitivity import sensitivity_scores
from lightning_app.atomic_write import write_whole


def publish(grid: GridResults, out: Path) -> None:
    """Write `results.parquet`, a packed grid, the tables of the scores (`write_scores`), and the
    figure that the report opens with: `headline-light` and `headline-dark`, `.svg` and `.png`.

    The test of differences in BLEU over sentences needs the translations, which are not packed: its
    p values are in `sensitivity.csv` alone.
    """
    pack(grid, results_frame(grid), out / PACKED)
    write_scores(grid, [*sensitivity_scores(grid), *bleu_scores(grid)], out)
    for old in out.glob("headline-*"):
        old.unlink()
    with styled():
        for look, change in (("light", None), ("dark", darken)):
            figure = first_figure(grid)
            if figure is None:
                return
            if change is not None:
                change(figure)
            save(figure, out / f"headline-{look}.svg")
            write_whole(out / f"headline-{look}.png", png(figure))
