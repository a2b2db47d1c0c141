"""The comparisons of the grid's own metric, as a table."""

import math

from lightning_app.analysis.comparison import MetricDifference, comparisons
from lightning_app.analysis.formatting import DASH, measured, p_value
from lightning_app.analysis.markup import Child, Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import column, head, html_table
from lightning_app.analysis.run_summary import direction
from lightning_app.analysis.statistics import LEVEL


def comparison_table(contents: Contents) -> Markup:
    """A row for each comparison, a body for each axis; nothing where nothing is compared."""
    found = comparisons(contents.grid)
    if not found:
        return Markup("")
    columns = [
        column("Value", text=True),
        column("at", text=True),
        column("reads", text=True),
        column("difference"),
        column("p", "Holm"),
        column("seeds"),
    ]
    bodies = []
    axes = dict.fromkeys((row.grid, row.axis, row.baseline, row.metric, row.mode) for row in found)
    for grid, axis, baseline, metric, mode in axes:
        of = f"{grid}: " if contents.grid.parts else ""
        text = f"{of}{axis}, {metric} of each value less that of {baseline} ({direction(mode)})"
        heading = element("th", text, scope="rowgroup", colspan=str(len(columns)))
        rows = [_row(row) for row in found if (row.grid, row.axis) == (grid, axis)]
        bodies.append(element("tbody", element("tr", heading, class_="slice"), *rows))
    what = "The metric of the grid file"
    if contents.grid.scored:
        what = (
            "What warm-up and other settings do to the task's own score (not to the loss, whose Δ "
            "is below)"
        )
    caption = (
        f"{what}, compared seed by seed, with every other axis equal. In "
        f"brackets: {LEVEL:.0%} t intervals over seeds. A reading needs p under {1 - LEVEL:.0%} "
        "after Holm's correction over all rows."
    )
    return html_table(contents.next_table(), caption, columns, bodies)


def _row(row: MetricDifference) -> Markup:
    shown: list[Child] = [DASH if math.isnan(row.estimate) else signed(row.estimate)]
    if not math.isnan(row.low):
        ends = f"[{signed(row.low)}, {signed(row.high)}]"
        shown.append(element("span", ends, class_="interval"))
    if row.note:
        shown.append(element("span", row.note, class_="interval"))
    reading: list[Child] = [row.reading or DASH]
    if row.budget and row.comparable:
        reading.append(element("span", row.budget, class_="interval"))
    return element(
        "tr",
        head(row.value),
        element("td", "" if row.where == "all" else row.where, class_="text wrap"),
        element("td", *reading, class_="text"),
        element("td", *shown),
        element("td", p_value(row.p_holm)),
        element("td", str(row.seeds)),
    )


def signed(value: float) -> str:
    return measured(value).replace("-", "−")
