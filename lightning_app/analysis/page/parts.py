"""Tables, notes and estimates as HTML, for all sections."""

import math
from collections.abc import Callable, Iterable, Sequence

from lightning_app.analysis.exports.tables import PaperTable
from lightning_app.analysis.formatting import (
    DASH,
    bounded,
    interval,
    nats,
    share_interval,
    share_of,
)
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.headline import by_slice, score_notes
from lightning_app.analysis.markup import Child, Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.pairing import mean_loss
from lightning_app.analysis.score import Score

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
