"""The answer of a report and its tables in a terminal; plain ASCII when piped."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from lightning_app.report.facts import DASH, records_of, state_counts
from lightning_app.report.headline import answer
from lightning_app.report.pairs import Score
from lightning_app.report.results import GridResults, grouped
from lightning_app.report.statistics import ALPHA
from lightning_app.report.table import Datum, Heading, ReportTable
from lightning_app.report.tables import metric_table, task_tables, verdict_table
from lightning_app.report.verdicts import verdicts
from lightning_app.runs.mixtures import KINDS, left_out, mixed, unsealed

ROWS = 60  # per table; its first slice is always whole
FIELDS = ("estimate", "low", "high", "bound", "p", "p_holm", "p_sign", "holm_low", "holm_high")
FIELDS += ("seeds", "cells", "diverged", "note")
PLAIN = str.maketrans({"Δ": "delta", "−": "-", DASH: "-", "·": ".", "│": "|", "≥": ">=", "≤": "<="})


def show_report(console: Console, grid: GridResults, scores: Sequence[Score]) -> None:
    """Print the answer, the verdict on each variant, and its loss by warm-up."""
    write = Writer(console)
    if not grid.finished:
        write.line("No cell has finished yet, so there are no scores.")
        return
    if grid.pruner is not None:
        ended = sum(cell.state in ("pruned", "damaged") for cell in grid.cells)
        write.line(f"{ended} cells are damaged or ended early by the pruner: there are no scores.")
    if said := answer(grid, scores):
        write.line(said, "bold")
    write.line(state_counts(grid))
    if (table := verdict_table(grid, scores)).bodies:
        write.table(table)
        open_ = [verdict for verdict in verdicts(grid, scores) if verdict.more]
        field = "until" if grid.alpha < ALPHA else "axes.seed_everything"
        for more, found in grouped(open_, lambda verdict: verdict.more).items():
            names = ", ".join(verdict.variant for verdict in found)
            write.line(f"{more} {names} ({field} in the grid file)")
    else:
        write.table(metric_table(grid))
    for table in task_tables(grid):
        write.table(table)
    notes = (left_out(grid.strangers), mixture_line(grid), unsealed(records_of(grid)))
    for text in filter(None, notes):
        write.line(text)


def mixtures(grid: GridResults) -> dict[str, dict[str, list[str]]]:
    """The names of the finished cells by provenance, for each kind in which they differ."""
    return mixed({cell.name: cell.record for cell in grid.finished})


def mixture_line(grid: GridResults) -> str:
    """The kinds in which the finished cells differ, in one line; empty if they do not differ."""
    kinds = [f"{len(of)} {KINDS[kind]}" for kind, of in mixtures(grid).items()]
    return f"Mixed: cells from {', '.join(kinds)}; report.html lists what is invalid." * bool(kinds)


def headline_document(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """The scores for scripts by name, per group, rate (NaN: over all rates) and variant.

    Undefined scores are NaN.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for score in scores:
        key = (score.group, f"{score.lr}", score.variant)
        who = {"group": score.group, "lr": score.lr, "variant": score.variant}
        row = rows.setdefault(key, {**who, "scores": {}})
        row["scores"][score.score] = {field: getattr(score, field) for field in FIELDS}
    return list(rows.values())


class Writer:
    """A console that writes tables to a terminal, and plain text without boxes to a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plain = not console.is_terminal or console.options.ascii_only

    def line(self, text: str, style: str = "") -> None:
        self._console.print(self._text(text, style))

    def table(self, table: ReportTable) -> None:
        """A table with its title and its notes."""
        self.line(table.title, "bold")
        self.bodies(table)
        for note in table.notes:
            self.line(note)

    def bodies(self, table: ReportTable) -> None:
        """Write the slices of a table with their names, of many slices only the first ones.

        A line below them gives the reason of each dash.
        """
        columns, seen = table.on("terminal"), 0
        written, reasons = 0, dict[str, dict[str, None]]()
        for number, (where, rows) in enumerate(table.bodies.items()):
            seen += len(rows)
            if number and seen > ROWS:
                break
            if where:
                self.line(where, "bold")
            self._rows(columns, rows)
            for row in rows:
                for n, _ in columns:
                    if row[n].text == DASH and row[n].title:
                        reasons.setdefault(row[n].title, {})[row[0].text] = None
            written = number + 1
        if reasons:
            listed = (f"{reason} ({', '.join(names)})" for reason, names in reasons.items())
            self.line(f"{DASH}: {'; '.join(listed)}")
        if written < len(table.bodies):
            self.line(f"{len(table.bodies) - written} more parts are in report.html.")

    def _rows(
        self, columns: Sequence[tuple[int, Heading]], rows: Sequence[Sequence[Datum]]
    ) -> None:
        """Write rows as a table, or on a narrow terminal as a few lines each."""
        endless = self._console.options.update(width=10_000)
        for between in (" ", "\n"):
            made = Grid(
                box=None, pad_edge=False, collapse_padding=between != " ", header_style="bold"
            )
            for _, column in columns:
                title = between.join(column.title.split(" ", maxsplit=1))
                made.add_column(self._text(title), justify="left" if column.words else "right")
            for row in rows:
                made.add_row(*(self._text(_shown(row[n], of, between)) for n, of in columns))
            if self._console.measure(made, options=endless).maximum <= self._console.width:
                self._console.print(made)
                return
        for row in rows:
            self.line(row[0].text, "bold")
            for n, column in columns[1:]:
                self.line(f"  {column.title}: {_shown(row[n], column, ' ')}")

    def _text(self, text: str, style: str = "") -> Text:
        return Text(text.translate(PLAIN) if self._plain else text, style)


def _shown(cell: Datum, column: Heading, between: str) -> str:
    return between.join((cell.text, *([] if column.brief else cell.below)))
