"""What does it cost, in loss, in time and in memory?"""

import math
from collections.abc import Sequence

from lightning_app.analysis.formatting import DASH
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.markup import Child, Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.figure import figures
from lightning_app.analysis.page.parts import column, estimate, head, html_table, scored, section
from lightning_app.analysis.score import Score
from lightning_app.analysis.statistics import mean

RATE = "train/tokens_per_second"


def cost(contents: Contents) -> Markup:
    return section(
        "cost",
        "What does it cost?",
        _bleu(contents),
        _resources(contents),
        figures(contents, "cost"),
    )


def _bleu(contents: Contents) -> Markup:
    """The gain of BLEU by warm-up, if the test set was translated."""
    shown = [score for score in contents.scores if score.score == "bleu"]
    if not shown:
        return Markup("")
    columns = [column("Variant", text=True), column("ΔBLEU", "0-100"), column("seeds")]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        score = own["bleu"]
        return element("tr", head(variant), estimate(score), element("td", str(score.seeds)))

    caption = (
        "The gain of test BLEU by warm-up: with the reference warm-up minus without, seed by seed, "
        "with the t interval over seeds. The notes have, for each seed, the p value over test "
        "sentences: paired approximate randomisation (Riezler and Maxwell 2005, as in sacreBLEU), "
        "not corrected for the number of tests."
    )
    return scored(contents.next_table(), caption, columns, shown, row)


def _resources(contents: Contents) -> Markup:
    grid = contents.grid
    columns = [
        column("Variant", text=True),
        column("parameters"),
        column("tokens per second"),
        column("peak memory", "MiB"),
        column("seconds a run"),
        column("all runs", "hours"),
        column("runs"),
    ]
    arms: dict[tuple[str, str], list[CellResult]] = {}
    for cell in grid.finished:
        arms.setdefault((cell.group, cell.variant), []).append(cell)
    groups: dict[str, list[Markup]] = {}
    for (group, variant), cells in arms.items():
        against = arms.get((group, cells[0].baseline or ""))
        row = element("tr", head(variant), *_spent(cells, against), element("td", str(len(cells))))
        groups.setdefault(group, []).append(row)
    found = []
    for group, rows in groups.items():
        if group != "all":
            heading = element("th", group, scope="rowgroup", colspan=str(len(columns)))
            rows.insert(0, element("tr", heading, class_="slice"))
        found.append(element("tbody", *rows))
    caption = (
        "Time and memory: means over all finished runs of a variant; below them the ratio to "
        f"the baseline{f' {grid.baseline}' if grid.baseline else ''}. Seconds include validation "
        "and start. If several cells shared a machine, the speeds depend on that and "
        f"are no measure of the block: ablate bench measures it."
    )
    return html_table(contents.next_table(), caption, columns, found)


def _spent(cells: Sequence[CellResult], against: Sequence[CellResult] | None) -> list[Markup]:
    def of(cell: CellResult, key: str) -> float:
        value = cell.metrics.get(RATE) if key == RATE else cell.record.get(key)
        return math.nan if value is None else float(value)

    def both(key: str, scale: float = 1.0) -> Markup:
        ours = [of(cell, key) * scale for cell in cells]
        theirs = [of(cell, key) * scale for cell in against or ()]
        ours, theirs = ([v for v in each if math.isfinite(v)] for each in (ours, theirs))
        if not ours:
            return element("td", DASH, title="not recorded")
        shown: list[Child] = [f"{mean(ours):,.0f}"]
        if theirs and mean(theirs) and against is not cells:
            ratio = f"{mean(ours) / mean(theirs):.3f} ×"
            shown.append(element("span", ratio, class_="interval"))
        return element("td", *shown)

    hours = math.fsum(filter(math.isfinite, (of(cell, "seconds") for cell in cells))) / 3600
    return [
        both("parameters"),
        both(RATE),
        both("peak_memory_bytes", 2.0**-20),
        both("seconds"),
        element("td", f"{hours:,.2f}"),
    ]
