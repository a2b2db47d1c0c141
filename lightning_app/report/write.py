"""Write the report of a grid, and publish a study as a small folder."""

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_app.core.files import write_whole
from lightning_app.core.project import recompute_program
from lightning_app.report.bibliography import references
from lightning_app.report.comparisons import comparisons, comparisons_frame, effects, effects_frame
from lightning_app.report.facts import superseded
from lightning_app.report.figures.sheet import darken, png, save, styled
from lightning_app.report.figures.write import first_figure, write_figures
from lightning_app.report.frames import results_frame, validations_frame
from lightning_app.report.packed import PACKED, pack
from lightning_app.report.page import RECOMPUTE, page
from lightning_app.report.pairs import Score, scores_frame
from lightning_app.report.results import GridResults, read_results, stray_runs
from lightning_app.report.tables import write_tables
from lightning_app.report.tasks import (
    failed_runs,
    failure_tests,
    failures_table,
    scores_table,
    task_scores,
)
from lightning_app.report.tensorboard import write_index
from lightning_app.report.texts import bleu_scores
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.runs.folder import PRUNED, RESULT, VOUCHED, GridFolder

if TYPE_CHECKING:
    import pandas as pd


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
    write_whole(out / RECOMPUTE, recompute_program().read_bytes())
    text = page(
        grid,
        found,
        results=results,
        drawings=drawings,
        out=out,
        made_from=inputs_digest(grid),
    )
    write_whole(out / "report.html", text)
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


Row = TypeVar("Row")


def write_tidy(grid: GridResults, out: Path) -> "pd.DataFrame":
    """Write `results` and `validations` as `.csv` and `.parquet`; return the rows of the cells."""
    results = results_frame(grid)
    _write(results, out / "results")
    _write(validations_frame(grid), out / "validations")
    return results


def write_scores(grid: GridResults, scores: Sequence[Score], out: Path) -> None:
    """Write `sensitivity.csv`, and the tables of other questions if they have rows.

    Those are `effects`, `comparisons`, `failed_runs`, `failure_tests` and `task_scores.csv`.
    """
    write_whole(out / "sensitivity.csv", scores_frame(scores).to_csv(index=False))
    _write_if(out / "effects.csv", effects(grid, scores), effects_frame)
    compared = comparisons(grid)
    _write_if(out / "comparisons.csv", compared, comparisons_frame)
    _write_if(out / "failed_runs.csv", failed_runs(grid), failures_table)
    _write_if(out / "failure_tests.csv", failure_tests(grid), failures_table)
    _write_if(out / "task_scores.csv", task_scores(grid), scores_table)


def _write_if(
    path: Path, rows: Sequence[Row], frame: Callable[[Sequence[Row]], "pd.DataFrame"]
) -> None:
    """Write the table, or remove that of an earlier report if there are no rows now."""
    if rows:
        write_whole(path, frame(rows).to_csv(index=False))
    else:
        path.unlink(missing_ok=True)


def _write(table: "pd.DataFrame", path: Path) -> None:
    write_whole(path.with_suffix(".csv"), table.to_csv(index=False))
    parquet = io.BytesIO()
    table.to_parquet(parquet, index=False)
    write_whole(path.with_suffix(".parquet"), parquet.getvalue())


def write_exports(grid: GridResults, scores: Sequence[Score], out: Path) -> "pd.DataFrame":
    """Write the exports into a folder; return the rows of `results`, one for each planned cell.

    `results` and `validations` as `.csv` and `.parquet`, `sensitivity.csv`, the tables of other
    questions as `.csv` if they have rows (`write_scores`), `tables/*.tex` and `.md`, and
    `references.bib`.
    """
    results = write_tidy(grid, out)
    write_scores(grid, scores, out)
    write_tables(grid, scores, out / "tables")
    write_whole(out / "references.bib", references(grid))
    return results
