"""Who needs warm-up?"""

import math
from collections.abc import Sequence

from lightning_app.analysis.exports.task_tables import task_tables
from lightning_app.analysis.formatting import DASH, nats
from lightning_app.analysis.grid_results import CellResult, failures
from lightning_app.analysis.headline import (
    SAME,
    STALLS,
    by_slice,
    own_reading,
    relation,
    stall_words,
    with_p,
)
from lightning_app.analysis.markup import Child, Markup, element
from lightning_app.analysis.page.comparison import comparison_table
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.factors import factor_table
from lightning_app.analysis.page.figure import figures
from lightning_app.analysis.page.metric import metric_table
from lightning_app.analysis.page.over_rates import over_rates
from lightning_app.analysis.page.parts import (
    column,
    estimate,
    head,
    mean_of,
    paper_table,
    scored,
    section,
    stalled_share,
)
from lightning_app.analysis.score import Score
from lightning_app.analysis.statistics import LEVEL, POWER

HEADLINE = ("delta", "relative_delta", "interaction")
SAVED = ("steps_saved", "lost_steps")


def need(contents: Contents) -> Markup:
    # The first tables of the page are the first to be numbered.
    by_score = _by_score(contents) if contents.grid.scored else []
    tables = (over_rates(contents), factor_table(contents))
    by_rate = Markup(_headline(contents) + _by_warmup(contents))
    if by_score:
        return section("need", "Who needs warm-up?", *by_score, *tables, by_rate)
    if len(contents.grid.rates) > 1:
        summary = element("summary", "Δ and the final loss at each learning rate")
        by_rate = element("details", summary, by_rate)
    return section(
        "need",
        "Who needs warm-up?",
        *tables,
        by_rate,
        comparison_table(contents),
        metric_table(contents),
        figures(contents, "need"),
    )


def _by_score(contents: Contents) -> list[Markup]:
    """The tables and figures of tasks with published scores, and what the others are about."""
    text = (
        f"The tables below are about the loss, {contents.grid.monitored.loss}, not about the "
        "scores of the tasks: a run that overfits has a higher loss with the same answers."
    )
    return [
        *(paper_table(contents, table) for table in task_tables(contents.grid)),
        comparison_table(contents),
        metric_table(contents),
        figures(contents, "need"),
        element("h3", "The loss"),
        element("p", text),
    ]


def _headline(contents: Contents) -> Markup:
    grid, scores = contents.grid, contents.scores
    shown = [s for s in scores if s.score in (*HEADLINE, *SAVED) or s.score.startswith(STALLS)]
    columns = [
        column("Variant", text=True),
        column("Warm-up", text=True),
        column(f"Against {grid.baseline}" if grid.baseline else "No baseline", text=True),
        column("Δ", "nats per token"),
        column("relative Δ", "of what is learned"),
        column("interaction", f"Δ − Δ of {grid.baseline}" if grid.baseline else "no baseline"),
        column("steps saved", "by warm-up"),
        *(
            column(failures(grid.finished) or "stalled", f"warm-up {warmup:,}")
            for warmup in grid.warmups
        ),
        column("seeds"),
    ]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        return element(
            "tr",
            head(variant),
            element("td", *_readings(own, grid.reference_warmup), class_="text"),
            element("td", with_p(relation(own), own["interaction"]), class_="text"),
            *(estimate(own[name]) for name in HEADLINE),
            _steps(own),
            *(stalled_share(own.get(f"stalls w={warmup}")) for warmup in grid.warmups),
            element("td", str(own["delta"].seeds)),
        )

    few = any(len(score.each) > 1 for score in shown)
    booted = any(score.bootstrap for score in shown)
    caption = (
        "The effect of no warm-up. Δ: loss without warm-up minus loss with it, seed by seed; "
        "interaction: Δ of the variant minus Δ of the baseline. The p value that decides a label "
        "is printed beside it, corrected by Holm. In brackets: "
        f"{LEVEL:.0%} intervals (t over seeds for Δ and the interaction, Fieller for the ratio, "
        f"Wilson for shares of runs). {'Below them: the values of the seeds. ' if few else ''}"
        f"{'Bootstrap-t intervals are in sensitivity.csv. ' if booted else ''}"
    )
    heading = "A dash is an undefined score. Notes:"
    found = scored(contents.next_table(), caption, columns, shown, row, heading)
    return Markup(found + _power(scores))


def _readings(own: dict[str, Score], reference: int | None) -> list[Child]:
    """What warm-up does to the variant, and whether its runs stall."""
    shown: list[Child] = [with_p(own_reading(own), own["delta"])]
    if stalls := stall_words(own, reference):
        shown.append(element("span", stalls, class_="interval"))
    return shown


def _steps(own: dict[str, Score]) -> Markup:
    """Steps saved with the interval, and the steps that warm-up loses by its small rates."""
    saved, lost = own.get("steps_saved"), own.get("lost_steps")
    if saved is None or math.isnan(saved.estimate):
        return element("td", DASH, title=saved.note if saved else "not in the grid")
    sign = {">=": "≥ ", "<=": "≤ "}.get(saved.bound, "")
    shown: list[Child] = [f"{sign}{saved.estimate:,.0f}".replace("-", "−")]
    if not math.isnan(saved.low):
        ends = f"[{saved.low:,.0f}, {saved.high:,.0f}]".replace("-", "−")
        shown.append(element("span", ends, class_="interval"))
    if lost is not None and not math.isnan(lost.estimate):
        shown.append(element("span", f"loses {lost.estimate:,.0f}", class_="interval"))
    return element("td", *shown)


def _power(scores: Sequence[Score]) -> Markup:
    """The differences that the grid could have found, for each group and rate."""
    smallest = {}
    for where, variants in by_slice(scores).items():
        for own in variants.values():
            score = own.get("detectable")
            if score is not None and not math.isnan(score.estimate):
                at = f", {where}" if where else ""
                found = f"{nats(score.estimate)} nats with {score.seeds} seeds{at} ({score.note})"
                smallest[found] = None
    if not smallest:
        return Markup("")
    text = (
        f"“{SAME[0].upper()}{SAME[1:]}” is not “no difference”. With the spread between seeds "
        f"here, one t test at {1 - LEVEL:.0%} finds an interaction of the following size in "
        f"{POWER:.0%} of cases. A label needs a larger one, because it is corrected over the whole "
        "grid:"
    )
    items = element("ul", *(element("li", found) for found in smallest))
    return element("div", element("p", text), items, class_="notes")


def _by_warmup(contents: Contents) -> Markup:
    grid = contents.grid
    shown = [score for score in contents.scores if score.score == "R_w"]
    columns = [
        column("Variant", text=True),
        *(column(f"warm-up {warmup:,}", f"{grid.monitored.loss}, nats") for warmup in grid.warmups),
        column("R_w"),
    ]
    finished: dict[tuple[str, str, float, int | None], list[CellResult]] = {}
    for cell in grid.finished:
        key = (cell.variant, cell.group, cell.lr or 0.0, cell.warmup)
        finished.setdefault(key, []).append(cell)

    def row(variant: str, own: dict[str, Score]) -> Markup:
        key = (variant, own["R_w"].group, own["R_w"].lr)
        return element(
            "tr",
            head(variant),
            *(mean_of(finished.get((*key, warmup), [])) for warmup in grid.warmups),
            estimate(own["R_w"]),
        )

    caption = (
        "Final loss by warm-up: mean over the finished seeds with its t interval; failures count "
        "as the unigram entropy, and there is no interval if some seeds failed and others did not. "
        "R_w shows how flat it is over warm-ups (0 is flat; formulas in the appendix). "
    )
    return scored(contents.next_table(), caption, columns, shown, row)
