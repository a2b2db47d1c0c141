"""The metric of the grid file, a table for each grid."""

import math
from collections.abc import Iterable

from lightning_app.analysis.formatting import DASH, measured
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.markup import Child, Markup, element
from lightning_app.analysis.metric import MetricMean, by_metric, judged_by, slices, why_apart
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import column, head, html_table
from lightning_app.analysis.run_summary import direction
from lightning_app.analysis.statistics import LEVEL
from lightning_app.task_facts import QualityMetric


def metric_table(contents: Contents) -> Markup:
    """Means by variant and warm-up of the values that the runs report, the best variant first."""
    grids = contents.grid.parts or (contents.grid,)
    return Markup("".join(_table(contents, grid) for grid in grids if grid.finished))


def _table(contents: Contents, grid: GridResults) -> Markup:
    measures = grid.measures
    first, *others = measures
    unit = "own score" if others else first.metric
    columns = [
        column("Variant", text=True),
        *(column(f"warm-up {warmup:,}", unit) for warmup in _warmups(grid)),
    ]
    bodies = []
    for where, variants in slices(grid, by_metric(grid)).items():
        rows = [
            element("tr", head(variant), *_cells(grid, arms)) for variant, arms in variants.items()
        ]
        if where and others:
            arm = next(iter(variants.values()))[0]
            where = f"{where}: {_words(judged_by(grid)[arm.group])}"
        if where:
            heading = element("th", where, scope="rowgroup", colspan=str(len(columns)))
            rows.insert(0, element("tr", heading, class_="slice"))
        bodies.append(element("tbody", *rows))
    of = f" of {grid.name}" if contents.grid.parts else ""
    if grid.scored and first.metric != grid.metric:
        listed = "named in each part" if others else _words(first)
        what = f"The task's own score{of}, {listed}, the best variant first. "
    else:
        what = (
            f"The metric of the grid file{of}, {grid.metric}: {direction(grid.mode)}, the best "
            "variant first. "
        )
    if why := why_apart(grid):
        what += f"Parts of the table cannot be compared with each other: {why}. "
    caption = (
        f"{what}Means of the values that the runs reported; the loss of a failed run is not "
        f"replaced by the unigram entropy. In brackets: {LEVEL:.0%} t intervals over seeds, none "
        "where only some seeds stalled. n: the number of runs; one without a finite value is left "
        "out."
    )
    return html_table(contents.next_table(), caption, columns, bodies)


def _words(measure: QualityMetric) -> str:
    return f"{measure.title}, {direction(measure.mode)}"


def _warmups(grid: GridResults) -> Iterable[int]:
    return sorted({cell.warmup or 0 for cell in grid.finished})


def _cells(grid: GridResults, arms: Iterable[MetricMean]) -> Iterable[Markup]:
    known = {arm.warmup or 0: arm for arm in arms}
    for warmup in _warmups(grid):
        arm = known.get(warmup)
        if arm is None or not arm.runs:
            yield element("td", DASH, title="no finished run with a finite value")
            continue
        shown: list[Child] = [measured(arm.mean)]
        ends = "" if math.isnan(arm.low) else f"[{measured(arm.low)}, {measured(arm.high)}] "
        lacking = f", {arm.lacking} without" if arm.lacking else ""
        shown.append(element("span", f"{ends}n = {arm.runs}{lacking}", class_="interval"))
        yield element("td", *shown)
