"""Write the report of a grid, and publish a study as a small folder."""

import hashlib
from pathlib import Path

from lightning_app.core.files import write_whole
from lightning_app.core.project import recompute_program
from lightning_app.report.exports import write_exports, write_scores
from lightning_app.report.facts import superseded
from lightning_app.report.figures.sheet import darken, png, save, styled
from lightning_app.report.figures.write import first_figure, write_figures
from lightning_app.report.frames import results_frame
from lightning_app.report.packed import PACKED, pack
from lightning_app.report.page import RECOMPUTE, page
from lightning_app.report.page_parts import Contents
from lightning_app.report.published import comparison
from lightning_app.report.results import GridResults, read_results, stray_runs
from lightning_app.report.tensorboard import write_index
from lightning_app.report.texts import bleu_scores
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.runs.folder import PRUNED, RESULT, VOUCHED, GridFolder


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


_HEAD = 1000  # characters of a page that hold the digest of its inputs


def write_report(grid_dir: Path, out_dir: Path | None = None) -> Path:
    """Write the report of the runs that have finished so far, and return the path of its page.

    Writes `report.html` and the files that its last section lists into `out_dir`. The default is
    the grid folder, whose TensorBoard index is then updated as well. Raises `UserError` for a
    folder that does not belong to a grid or cannot be written.
    """
    grid = read_results(grid_dir)
    path = write(grid, grid.folder if out_dir is None else Path(out_dir))
    if out_dir is None:
        write_index(grid.folder)
    return path


def write(grid: GridResults, out: Path) -> Path:
    """Write the report of a grid, which may join several, into a folder."""
    found = [*sensitivity_scores(grid), *bleu_scores(grid)]
    results = write_exports(grid, found, out)
    drawings = write_figures(grid, out / "figures")
    contents = Contents(
        grid=grid,
        scores=found,
        results=results,
        drawings=drawings,
        published=comparison(grid),
        out=out,
        made_from=inputs_digest(grid),
    )
    write_whole(out / RECOMPUTE, recompute_program().read_bytes())
    write_whole(out / "report.html", page(contents))
    return out / "report.html"


def is_current(grid: GridResults, path: Path) -> bool:
    """Whether a page was made from the present files of a grid, whatever their times are."""
    try:
        with path.open(encoding="utf-8") as file:
            return inputs_digest(grid) in file.read(_HEAD)
    except (OSError, ValueError):
        return False


def inputs_digest(grid: GridResults) -> str:
    """A digest of what a report is made from: the plan, which has that of the code, the grid file,
    and the state and the files of every run."""
    digest = hashlib.sha256()
    for part in grid.parts or (grid,):
        folder = GridFolder(part.folder)
        files = [folder.plan, folder.specification]
        for cell in part.cells:
            files += [cell.folder / name for name in (RESULT, PRUNED, *VOUCHED)]
            digest.update(f"{cell.name} {cell.state} {cell.error}\n".encode())
        for path in filter(Path.is_file, files):
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        # Finished runs that are not planned, and repeated ones, are counted.
        digest.update(f"{stray_runs(part)} {superseded(part)}\n".encode())
    return digest.hexdigest()
