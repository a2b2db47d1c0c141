"""The parts of which every section of the page is made: tables, notes, estimates and figures."""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lightning_app.config.tree import label
from lightning_app.report.facts import DASH, bounded, interval, nats, share_interval, share_of
from lightning_app.report.figures.sheet import FigureFiles, Question, drawn_slices, slices_of
from lightning_app.report.headline import by_slice, score_notes
from lightning_app.report.markup import Child, Markup, element
from lightning_app.report.pairs import Score, mean_loss
from lightning_app.report.results import CellResult, GridResults
from lightning_app.report.tables import PaperTable

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The grid, the values computed from it, and the folder `out` of the page.

    `results` has a row for each cell; `published` the figures of papers beside ours, `made_from`
    the digest of all inputs.
    """

    grid: GridResults
    scores: Sequence[Score]
    results: "pd.DataFrame"
    drawings: Sequence[FigureFiles]
    published: "pd.DataFrame"
    out: Path
    made_from: str = ""
    _tables: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def next_table(self) -> str:
        """Number the tables in the order of the sections."""
        return f"Table {next(self._tables)}."

    def link(self, cell: CellResult) -> str:
        """The folder of a run, as seen from the page."""
        return quote(Path(os.path.relpath(cell.folder, self.out)).as_posix()) + "/"


Row = Callable[[str, dict[str, Score]], Markup]


def section(identity: str, title: str, *children: Child) -> Markup:
    """A section to which the table of contents links."""
    return element("section", element("h2", title), *children, id=identity)


def bodies(scores: Sequence[Score], row: Row, width: int) -> list[Markup]:
    """A table body for each slice, with a heading row if there are several."""
    found = []
    for where, variants in by_slice(scores).items():
        rows = [row(variant, own) for variant, own in variants.items()]
        if where:
            heading = element("th", where, scope="rowgroup", colspan=str(width))
            rows.insert(0, element("tr", heading, class_="slice"))
        found.append(element("tbody", *rows))
    return found


def html_table(
    number: str, caption: str, columns: Sequence[Markup], rows: Iterable[Child]
) -> Markup:
    """A table in a scrollable box that can have the keyboard focus."""
    inner = element(
        "table",
        element("caption", element("div", element("b", number), f" {caption}")),
        element("thead", element("tr", *columns)),
        *rows,
    )
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=number)


def paper_table(contents: Contents, table: PaperTable) -> Markup:
    """A table that has a form for papers too; a second line of a cell is an interval."""
    columns = [column(title, text=place < table.words) for place, title in enumerate(table.header)]
    found = []
    for where, rows in table.bodies.items():
        shown = [element("tr", head(name), *map(_cell, cells)) for name, *cells in rows]
        if where:
            heading = element("th", where, scope="rowgroup", colspan=str(len(columns)))
            shown.insert(0, element("tr", heading, class_="slice"))
        found.append(element("tbody", *shown))
    listed = [element("li", note) for note in table.notes]
    notes = element("div", element("ul", *listed), class_="notes") if listed else ""
    return Markup(html_table(contents.next_table(), table.caption, columns, found) + notes)


def _cell(text: str) -> Markup:
    first, *others = text.split("\n")
    return element("td", first, *(element("span", each, class_="interval") for each in others))


def scored(
    number: str,
    caption: str,
    columns: Sequence[Markup],
    shown: Sequence[Score],
    row: Row,
    heading: str = "Notes:",
) -> Markup:
    """A table with a row for each variant of each slice, and the notes of its scores below."""
    rows = bodies(shown, row, len(columns))
    return Markup(html_table(number, caption, columns, rows) + notes(shown, heading))


def column(title: str, unit: str = "", text: bool = False) -> Markup:
    second = [element("span", unit, class_="unit")] if unit else []
    return element("th", title, *second, scope="col", class_="text" if text else None)


def head(text: str) -> Markup:
    """The first cell of a row."""
    return element("th", text, scope="row")


def notes(scores: Sequence[Score], heading: str) -> Markup:
    """The notes of scores, as a list below their table."""
    items = [element("li", note) for note in score_notes(scores)]
    if not items:
        return Markup("")
    return element("div", element("p", heading), element("ul", *items), class_="notes")


def estimate(score: Score) -> Markup:
    """Estimate, interval below it, and the values of the seeds if they are few."""
    if math.isnan(score.estimate):
        return element("td", DASH, title=score.note)
    shown: list[Child] = [bounded(score)]
    if not math.isnan(score.low):
        shown.append(element("span", interval(score.low, score.high), class_="interval"))
    if len(score.each) > 1:
        values = " · ".join(DASH if math.isnan(value) else nats(value) for _, value in score.each)
        shown.append(element("span", values, class_="interval", title="seed by seed"))
    return element("td", *shown)


def mean_of(cells: Sequence[CellResult]) -> Markup:
    """The mean loss of runs, with the t interval if it is defined."""
    if not cells:
        return element("td", DASH)
    centre, low, high = mean_loss(cells)
    shown: list[Child] = [nats(centre)]
    if not math.isnan(low):
        shown.append(element("span", interval(low, high), class_="interval"))
    return element("td", *shown)


def stalled_share(score: Score | None) -> Markup:
    """The number of stalled runs, with Wilson's interval."""
    if score is None or math.isnan(score.estimate):
        return element("td", DASH, title=score.note if score else "not in the grid")
    shown = share_of(score.diverged, score.cells)
    ends = element("span", share_interval(score.low, score.high), class_="interval")
    return element("td", element("span", shown, class_="bad") if score.diverged else shown, ends)


# Ink, paper and rules of a figure follow the page, which may be dark.
THEME = {"#222222": "var(--ink)", "#707070": "var(--muted)", "#e6e6e6": "var(--hair)"}


def headline_figure(contents: Contents) -> Markup:
    """The first figure, if it answers the question who needs warm-up; nothing without one."""
    drawing = next(iter(contents.drawings), None)
    if drawing is None or drawing.question != "need":
        return Markup("")
    return _figure(contents, drawing, 1)


def figures(contents: Contents, question: Question) -> Markup:
    """The figures of a question except the headline, or nothing if no run has data for one.

    Those of all groups of runs but the first are folded.
    """
    found: dict[str, list[Markup]] = {}
    for number, drawing in enumerate(contents.drawings, start=1):
        if drawing.question == question and not (number == 1 and question == "need"):
            found.setdefault(drawing.group, []).append(_figure(contents, drawing, number))
    if not found:
        return Markup("")
    several = [group for group in found if group != "all"]
    shown = [figure for group in ("all", *several[:1]) for figure in found.get(group, ())]
    shown += [
        element("details", element("summary", f"The same for {group}"), *found[group])
        for group in several[1:]
    ]
    groups = {group for group, _ in drawn_slices(contents.grid)}
    there = {group for group, _ in slices_of(contents.grid)}
    if len(groups) < len(there):
        text = (
            f"Only the first {len(groups)} of {len(there)} combinations of the other axes are "
            "drawn; the tables and results.csv have all."
        )
        shown.insert(0, element("p", text))
    return Markup("".join(shown))


def _figure(contents: Contents, drawing: FigureFiles, number: int) -> Markup:
    title = f"Figure {number}. {drawing.title}"
    return element(
        "figure",
        element("div", _inline(drawing, title, number), class_="card", tabindex="0"),
        element(
            "figcaption",
            element("b", f"{title}."),
            f" {drawing.text} {_setting(contents, drawing)} ",
            element("span", drawing.limits, class_="limits"),
            " ",
            element("span", *_files(drawing), class_="files"),
        ),
        id=f"figure-{number}",
    )


def _setting(contents: Contents, drawing: FigureFiles) -> str:
    seeds = len({cell.seed for cell in drawing.cells})
    parts = [f"n = {seeds} seed{'s' * (seeds != 1)}, {len(drawing.cells)} finished runs"]
    groups = list(dict.fromkeys(cell.group for cell in drawing.cells))
    parts += [] if groups == ["all"] else [" and ".join(groups)]
    known = [cell for cell in contents.grid.finished if cell.group in groups]
    several = len({cell.lr for cell in known}) > 1
    if drawing.lr is not None:
        best = any((group, drawing.lr) in drawn_slices(contents.grid) for group in groups)
        why = ", where the runs learn best" if several and best else ""
        parts.append(f"learning rate {label(drawing.lr)}{why}")
    return f"{'; '.join(parts)}."


def _files(drawing: FigureFiles) -> Iterable[Markup]:
    for suffix, name in ((".svg", "SVG"), (".pdf", "PDF"), (".csv", "data")):
        path = drawing.path.with_suffix(suffix)
        label = f"{drawing.title}: {name}"
        yield element("a", name, href=f"{path.parent.name}/{path.name}", aria_label=label)


def _inline(drawing: FigureFiles, title: str, number: int) -> Markup:
    """The SVG without its prolog, with unique ids and with the page's links and colours."""
    text = drawing.path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="f{number}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1f{number}-", text)
    text = text.replace('xlink:href="../', 'xlink:href="')
    for colour, variable in THEME.items():
        text = text.replace(colour, variable)
    text = text.replace("fill: #ffffff", "fill: none")
    named = element("title", title)
    return Markup(re.sub(r"<svg([^>]*)>", rf'<svg\1 role="group">{named}', text, count=1))
