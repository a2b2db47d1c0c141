"""The headline of a report in a terminal: table, plot and findings; plain ASCII when piped."""

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_app.report.comparisons import MetricMean, by_metric, slices, titled, why_apart
from lightning_app.report.facts import (
    DASH,
    bounded,
    interval,
    measured,
    nats,
    records_of,
    state_counts,
)
from lightning_app.report.headline import STALLS, by_slice, findings, own_reading, relation, with_p
from lightning_app.report.pairs import Score
from lightning_app.report.results import GridResults, different, failures
from lightning_app.report.statistics import LEVEL, mean
from lightning_app.report.tables import PaperTable, task_tables
from lightning_app.runs.mixtures import KINDS, left_out, mixed, unsealed

ROWS = 60  # of all tables together; the first one is always whole
TRACK, LEAST = 60, 16  # characters of the plot's scale: with enough room, and at least
SEVERAL = "*"
TITLES = {
    "failure_tests": "Failed runs over all tasks: no better than a constant answer [95% Wilson]",
    "failed_runs": "Failed runs of each arm [95% Wilson], median and mean over seeds",
    "task_scores": "Tasks by variant, dev set, in percent",
}
FIELDS = ("estimate", "low", "high", "bound", "p", "p_holm", "p_sign")
FIELDS += ("seeds", "cells", "diverged", "note")
WORDS = (("warm-up",), ("against",))
PLAIN = str.maketrans({"Δ": "delta", "−": "-", DASH: "-", "·": ".", "│": "|", "≥": ">=", "≤": "<="})

Words = tuple[str, ...]  # the words of a heading, between which it may break
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
    found = by_slice([score for score in scores if not math.isnan(score.lr)])
    seen = 0
    for number, (where, variants) in enumerate(found.items()):
        seen += len(variants)
        if number and seen > ROWS:
            write.line(
                f"{len(found) - number} more combinations of learning rate and other axes: "
                "see report.html and sensitivity.csv."
            )
            break
        if where:
            write.line(where, "bold")
        rows = {variant: _values(variants, own) for variant, own in variants.items()}
        write.table(_titles(variants, failures(grid.finished) or "stalled"), rows)
        write.plot(grid, variants)
    else:
        if grid.parts:
            write.line("Δ side by side, each compared with its own reference warm-up", "bold")
            write.table([(where,) for where in found], _beside(found))
    for part in grid.parts or (grid,):
        write.metric(part)
    for table in task_tables(grid, theirs=False):
        write.paper_table(table)
    said = (left_out(grid.strangers), mixture_line(grid), unsealed(records_of(grid)))
    for text in [*findings(grid, scores), *said]:
        if text:
            write.line(text)


def mixtures(grid: GridResults) -> dict[str, dict[str, list[str]]]:
    """The names of the finished cells by provenance, for each kind in which they differ."""
    return mixed({cell.name: cell.record for cell in different(grid) if cell.finished})


def mixture_line(grid: GridResults) -> str:
    """The kinds in which the finished cells differ, in one line; empty if they do not differ."""
    kinds = [f"{len(of)} {KINDS[kind]}" for kind, of in mixtures(grid).items()]
    if not kinds:
        return ""
    return f"Mixed: cells of {', '.join(kinds)}; report.html lists invalid conclusions."


def headline_document(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """The headline for scripts: for each group, rate and variant its readings and scores by name.

    `reads` is about the variant alone, `versus` compares it with the baseline.

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

    def table(self, titles: Sequence[Words], rows: Mapping[str, Sequence[str]]) -> None:
        """Rows by name as a table; on a narrow terminal each row takes a few lines."""
        self.rows(titles, list(rows.items()))

    def rows(self, titles: Sequence[Words], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
        """The same for rows of which some have the same name."""
        endless = self._console.options.update(width=10_000)
        for between in (" ", "\n"):
            table = self._table(titles, rows, between)
            if self._console.measure(table, options=endless).maximum <= self._console.width:
                self._console.print(table)
                return
        for name, values in rows:
            self.line(name, "bold")
            for title, value in zip(titles, values, strict=True):
                self.line(f"  {' '.join(title)}: {value}")

    def metric(self, grid: GridResults) -> None:
        """The metric of the grid, the best variant first."""
        whole = slices(grid, by_metric(grid))
        self.line(f"{grid.name}: {titled(grid)}, mean over runs [{LEVEL:.0%}]", "bold")
        if why := why_apart(grid):
            self.line(f"Only within each part, as between them it counts other things: {why}.")
        warmups = sorted({cell.warmup or 0 for cell in grid.finished})
        seen = 0
        for number, (where, variants) in enumerate(whole.items()):
            seen += len(variants)
            if number and seen > ROWS:
                self.line(f"{len(whole) - number} more: see report.html.")
                return
            if where:
                self.line(where)
            rows = {}
            for variant, arms in variants.items():
                known = {arm.warmup or 0: arm for arm in arms}
                rows[variant] = [_mean(known.get(warmup)) for warmup in warmups]
            metric = next(iter(variants.values()))[0].metric
            self.table([(metric, f"w={warmup}") for warmup in warmups], rows)

    def paper_table(self, table: PaperTable) -> None:
        """A table of the page, with its notes: a line a row, by the name of the variant."""
        self.line(TITLES[table.name], "bold")
        titles = [tuple(title.split(" ", maxsplit=1)) for title in table.header[1:]]
        seen = 0
        for number, (where, rows) in enumerate(table.bodies.items()):
            seen += len(rows)
            if number and seen > ROWS:
                self.line(f"{len(table.bodies) - number} more: see report.html.")
                break
            if where:
                self.line(where)
            self.rows(
                titles, [(row[0], [cell.replace("\n", " ") for cell in row[1:]]) for row in rows]
            )
        for note in table.notes:
            self.line(note)

    def plot(self, grid: GridResults, variants: Variants) -> None:
        """Loss against warm-up: one row for each variant, one letter for each warm-up."""
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
        table = Table.grid(padding=(0, 2))
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

    def _table(
        self, titles: Sequence[Words], rows: Sequence[tuple[str, Sequence[str]]], between: str
    ) -> Table:
        narrow = between != " "
        table = Table(box=None, pad_edge=False, collapse_padding=narrow, header_style="bold")
        table.add_column("variant")
        for title in titles:
            justify = "left" if title in WORDS else "right"
            table.add_column(self._text(between.join(title)), justify=justify)
        for name, values in rows:
            broken = (value.replace(" [", f"{between}[") for value in values)
            table.add_row(name, *map(self._text, broken))
        return table

    def _text(self, text: str, style: str = "") -> Text:
        return Text(text.translate(PLAIN) if self._plain else text, style)


def _titles(variants: Variants, failed: str) -> list[Words]:
    level = f"[{LEVEL:.0%}]"
    fixed = [*WORDS, ("Δ", level), ("interaction", level)]
    return [*fixed, *((failed, f"w={warmup}") for warmup in _warmups(variants))]


def _values(variants: Variants, own: Mapping[str, Score]) -> list[str]:
    return [
        with_p(own_reading(own), own["delta"]),
        with_p(relation(own), own["interaction"]),
        _estimate(own["delta"]),
        _estimate(own["interaction"]),
        *(_stalls(own.get(f"{STALLS}{warmup}")) for warmup in _warmups(variants)),
    ]


def _mean(arm: MetricMean | None) -> str:
    if arm is None or not arm.runs:
        return DASH
    ends = "" if math.isnan(arm.low) else f" [{measured(arm.low)}, {measured(arm.high)}]"
    return f"{measured(arm.mean)}{ends}{f' ({arm.lacking} without)' if arm.lacking else ''}"


def _beside(slices: Mapping[str, Variants]) -> dict[str, list[str]]:
    """Delta of each variant in every slice; a dash if it is undefined."""
    names = dict.fromkeys(name for variants in slices.values() for name in variants)
    return {
        name: [
            _estimate(variants[name]["delta"]) if name in variants else DASH
            for variants in slices.values()
        ]
        for name in names
    }


def _warmups(variants: Variants) -> list[int]:
    names = {name for own in variants.values() for name in own if name.startswith(STALLS)}
    return sorted(int(name.removeprefix(STALLS)) for name in names)


def _estimate(score: Score) -> str:
    if math.isnan(score.estimate):
        return DASH
    ends = "" if math.isnan(score.low) else f" {interval(score.low, score.high)}"
    return bounded(score) + ends


def _stalls(score: Score | None) -> str:
    return DASH if score is None or not score.cells else f"{score.diverged}/{score.cells}"


def _losses(grid: GridResults, variants: Variants) -> tuple[dict[tuple[str, int], float], float]:
    """Mean losses by variant and warm-up in one slice of the grid, and its unigram entropy."""
    own = next(iter(variants.values()))["delta"]
    found: dict[tuple[str, int], list[float]] = {}
    entropies = []
    for cell in grid.finished:
        if (cell.group, cell.lr or 0.0) == (own.group, own.lr) and math.isfinite(cell.loss):
            found.setdefault((cell.variant, cell.warmup or 0), []).append(cell.loss)
            entropies.append(cell.entropy)
    return {key: mean(losses) for key, losses in found.items()}, max(entropies, default=math.nan)
