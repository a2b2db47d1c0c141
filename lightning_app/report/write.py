"""Write the report of a grid, and publish a study as a small folder."""

import hashlib
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_app.core.files import write_whole
from lightning_app.core.project import recompute_program
from lightning_app.report.bibliography import references
from lightning_app.report.comparisons import comparison_document
from lightning_app.report.facts import earlier_runs
from lightning_app.report.figures.sheet import darken, png, save, styled
from lightning_app.report.figures.write import first_figure, write_figures
from lightning_app.report.frames import validations_frame
from lightning_app.report.packed import PACKED, pack
from lightning_app.report.page import RECOMPUTE, Report, page
from lightning_app.report.pairs import scores_frame
from lightning_app.report.results import GridResults
from lightning_app.report.table import latex, markdown
from lightning_app.report.tables import headline_table, loss_by_warmup
from lightning_app.report.warmup import bleu_scores, sensitivity_scores
from lightning_app.runs.folder import PRUNED, RESULT, VOUCHED, GridFolder


def publish(grid: GridResults, out: Path) -> None:
    """Write `results.parquet`, a packed grid, the tables of the scores (`write_scores`), and the
    figure that the report opens with: `headline-light` and `headline-dark`, `.svg` and `.png`.

    The test of differences in BLEU over sentences needs the translations, which are not packed: its
    p values are only in `sensitivity.csv`.
    """
    report = Report(grid, [*sensitivity_scores(grid), *bleu_scores(grid)], out)
    pack(grid, report.results, out / PACKED)
    write_scores(report)
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


def write(grid: GridResults, out: Path) -> Path:
    """Write the report of a grid, which may join several, and return the path of its page.

    Writes `report.html` and the files that its last section lists into the folder `out`. Raises
    `UserError` for a folder that cannot be written.
    """
    report = Report(grid, [*sensitivity_scores(grid), *bleu_scores(grid)], out)
    write_exports(report)
    drawings = write_figures(report.grid, out / "figures")
    write_whole(out / RECOMPUTE, recompute_program().read_bytes())
    text = page(report, drawings, inputs_digest(report.grid))
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
        digest.update(f"{earlier_runs(part)}\n".encode())
    return digest.hexdigest()


def write_exports(report: Report) -> None:
    """Write the exports of a report.

    `results` and `validations` as `.csv` and `.parquet`, `sensitivity.csv`, the tables of other
    questions as `.csv` if they have rows (`write_scores`), `tables/*.tex` and `.md`, and
    `references.bib`.
    """
    grid, scores, out = report.grid, report.scores, report.out
    for name, frame in (("results", report.results), ("validations", validations_frame(grid))):
        write_whole(out / f"{name}.csv", frame.to_csv(index=False))
        parquet = io.BytesIO()
        frame.to_parquet(parquet, index=False)
        write_whole(out / f"{name}.parquet", parquet.getvalue())
    write_scores(report)
    tables = report.task_tables()
    if scores and grid.finished:
        tables += [headline_table(grid, scores), loss_by_warmup(grid, scores)]
    for table in tables:
        write_whole(out / "tables" / f"{table.name}.tex", latex(table))
        write_whole(out / "tables" / f"{table.name}.md", markdown(table))
    write_whole(out / "references.bib", references(grid))


def write_scores(report: Report) -> None:
    """Write `sensitivity.csv`, and the tables of other questions if they have rows.

    Those are `effects`, `comparisons`, `failed_runs`, `failure_tests` and `task_scores.csv`; one
    of an earlier report is removed if there are no rows now.
    """
    import pandas as pd

    write_whole(report.out / "sensitivity.csv", scores_frame(report.scores).to_csv(index=False))
    tables: dict[str, list[dict[str, Any]]] = {
        "effects": [asdict(row) for row in report.effects],
        "comparisons": [comparison_document(row) for row in report.comparisons],
        "failed_runs": [asdict(row) for row in report.failed_runs],
        "failure_tests": [asdict(row) for row in report.failure_tests],
        "task_scores": [asdict(row) for row in report.task_scores],
    }
    for name, rows in tables.items():
        path = report.out / f"{name}.csv"
        if rows:
            write_whole(path, pd.DataFrame(rows).to_csv(index=False))
        else:
            path.unlink(missing_ok=True)
