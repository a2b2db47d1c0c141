"""The headline of a report in a terminal: tables, plot and findings; plain ASCII when piped."""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from lightning_app.report.facts import DASH, nats, records_of, state_counts
from lightning_app.report.headline import by_slice, findings, own_reading, relation
from lightning_app.report.pairs import Score
from lightning_app.report.results import GridResults
from lightning_app.report.statistics import mean
from lightning_app.report.table import Datum, Heading, ReportTable
from lightning_app.report.tables import headline_table, metric_table, task_tables
from lightning_app.report.tasks import failed_runs, failure_tests, task_scores
from lightning_app.runs.mixtures import KINDS, left_out, mixed, unsealed

ROWS = 60  # per table; its first slice is always whole
TRACK, LEAST = 60, 16  # width of the plot's scale in characters: with enough room, and at least
SEVERAL = "*"
FIELDS = ("estimate", "low", "high", "bound", "p", "p_holm", "p_sign")
FIELDS += ("seeds", "cells", "diverged", "note")
PLAIN = str.maketrans({"Δ": "delta", "−": "-", DASH: "-", "·": ".", "│": "|", "≥": ">=", "≤": "<="})

Variants = Mapping[str, Mapping[str, Score]]  # scores by variant and name


def show_report(console: Console, grid: GridResults, scores: Sequence[Score]) -> None:
    """Print each variant's reading, its scores, its loss by warm-up, and the findings."""
    write = Writer(console)
    if not grid.finished:
        write.line("No cell has finished yet, so there are no scores.")
        return
    if grid.pruner is not None:
        pruned = sum(cell.state == "pruned" for cell in grid.cells)
        write.line(f"The pruner ended {pruned} cells early, so there are no scores.")
    write.line(state_counts(grid))
    slices = by_slice([score for score in scores if not math.isnan(score.lr)])
    if slices:
        headline = headline_table(grid, scores)
        write.line(headline.title, "bold")
        write.bodies(headline, lambda where: write.plot(grid, slices[where]))
    write.table(metric_table(grid))
    for table in task_tables(grid, failure_tests(grid), failed_runs(grid), task_scores(grid)):
        write.table(table)
    notes = (left_out(grid.strangers), mixture_line(grid), unsealed(records_of(grid)))
    for text in [*findings(grid, scores), *notes]:
        if text:
            write.line(text)


def mixtures(grid: GridResults) -> dict[str, dict[str, list[str]]]:
    """The names of the finished cells by provenance, for each kind in which they differ."""
    return mixed({cell.name: cell.record for cell in grid.finished})


def mixture_line(grid: GridResults) -> str:
    """The kinds in which the finished cells differ, in one line; empty if they do not differ."""
    kinds = [f"{len(of)} {KINDS[kind]}" for kind, of in mixtures(grid).items()]
    if not kinds:
        return ""
    return f"Mixed: cells from {', '.join(kinds)}; report.html lists invalid conclusions."


def headline_document(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """The headline for scripts: readings and scores by name, per group, rate and variant.

    `reads` is only about the variant, `versus` compares it with the baseline.

    Undefined scores are NaN. Scores over all rates (`lr` NaN) have a row without readings.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for score in scores:
        key = (score.group, f"{score.lr}", score.variant)
        who = {"group": score.group, "lr": score.lr, "variant": score.variant}
        who |= {"reads": None, "versus": None}
        row = rows.setdefault(key, {**who, "scores": {}})
        row["scores"][score.score] = score
    for row in rows.values():
        if "interaction" in row["scores"]:
            row["reads"] = own_reading(row["scores"])
            row["versus"] = relation(row["scores"])
        row["scores"] = {
            name: {field: getattr(score, field) for field in FIELDS}
            for name, score in row["scores"].items()
        }
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
        self.bodies(table, lambda where: None)
        for note in table.notes:
            self.line(note)

    def bodies(self, table: ReportTable, after: Callable[[str], None]) -> None:
        """Write the slices of a table with their names, each followed by what comes `after` it.

        Of many slices only the first ones are written. A line below them gives the reason of each
        dash.
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
            after(where)
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

    def plot(self, grid: GridResults, variants: Variants) -> None:
        """Plot loss against warm-up: one row per variant, one letter per warm-up."""
        losses, top = _losses(grid, variants)
        if not losses:
            return
        letters = dict(zip(sorted({w for _, w in losses}), string.ascii_letters, strict=False))
        longest = max(map(len, variants))
        width = min(TRACK, max(LEAST, self._console.width - longest - 6))
        low, high = min(losses.values()), max(top, *losses.values())
        self.line(
            f"{grid.monitored.loss}, nats per token, mean over seeds: {nats(low)} at the left to "
            f"{nats(high)} at the right, where nothing is learned"
        )
        table = Grid.grid(padding=(0, 2))
        table.add_column(overflow="fold")
        table.add_column(no_wrap=True)
        for variant in variants:
            marks = [" "] * width
            for warmup, letter in letters.items():
                if (variant, warmup) in losses:
                    share = (losses[variant, warmup] - low) / (high - low) if high > low else 0.0
                    place = round(share * (width - 1))
                    marks[place] = letter if marks[place] == " " else SEVERAL
            table.add_row(self._text(variant), self._text(f"│{''.join(marks)}│"))
        self._console.print(table)
        key = ", ".join(f"{letter}: warm-up {warmup:,}" for warmup, letter in letters.items())
        self.line(f"{key}; {SEVERAL}: several at the same position")

    def _text(self, text: str, style: str = "") -> Text:
        return Text(text.translate(PLAIN) if self._plain else text, style)


def _shown(cell: Datum, column: Heading, between: str) -> str:
    return between.join((cell.text, *([] if column.brief else cell.below)))


def _losses(grid: GridResults, variants: Variants) -> tuple[dict[tuple[str, int], float], float]:
    """Mean losses by variant and warm-up in one slice of the grid, and its unigram entropy."""
    own = next(iter(variants.values()))["delta"]
    by_point: dict[tuple[str, int], list[float]] = {}
    entropies = []
    for cell in grid.finished:
        if (cell.group, cell.lr or 0.0) == (own.group, own.lr) and math.isfinite(cell.loss):
            by_point.setdefault((cell.variant, cell.warmup or 0), []).append(cell.loss)
            entropies.append(cell.entropy)
    return {key: mean(losses) for key, losses in by_point.items()}, max(entropies, default=math.nan)
