"""The sections of the page, one for each question."""

import math
from collections.abc import Iterable, Sequence

from lightning_app.config.tree import label, value_name
from lightning_app.report.comparisons import (
    MEASURES,
    TIMES,
    Effect,
    MetricDifference,
    MetricMean,
    by_metric,
    comparisons,
    effects,
    judged_by,
    slices,
    why_apart,
)
from lightning_app.report.facts import DASH, direction, interval, measured, nats, p_value, rate
from lightning_app.report.figures.sheet import has_probes
from lightning_app.report.headline import (
    SAME,
    STALLS,
    by_slice,
    own_reading,
    relation,
    stall_words,
    with_p,
)
from lightning_app.report.markup import Child, Markup, element
from lightning_app.report.page_parts import (
    Contents,
    column,
    estimate,
    figures,
    head,
    html_table,
    mean_of,
    paper_table,
    scored,
    section,
    stalled_share,
)
from lightning_app.report.pairs import Score
from lightning_app.report.results import CellResult, GridResults, failures
from lightning_app.report.statistics import LEVEL, POWER, mean
from lightning_app.report.tables import task_tables
from lightning_app.scores.task_facts import QualityMetric


def stable(contents: Contents) -> Markup:
    title = "Where is each variant stable?"
    rates = contents.grid.rates
    if len(rates) < 2:
        only = f", {label(rates[0])}" if rates else ""
        text = (
            f"This grid has one learning rate{only}, so it cannot show up to which rate a variant "
            "is stable. The table of Δ shows how many runs stalled at each warm-up. A grid with "
            "several values of model.optimizer.lr has a map and a frontier here."
        )
        return section("stable", title, element("p", text))
    return section("stable", title, _largest(contents), figures(contents, "stable"))


def _largest(contents: Contents) -> Markup:
    grid = contents.grid
    shown = [score for score in contents.scores if score.score.startswith("eta_max")]
    columns = [
        column("Variant", text=True),
        *(column("η_max", f"warm-up {warmup:,}") for warmup in grid.warmups),
    ]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        found = [own.get(f"eta_max w={warmup}") for warmup in grid.warmups]
        values = (element("td", DASH if s is None else rate(s.estimate)) for s in found)
        return element("tr", head(variant), *values)

    rates = ", ".join(label(lr) for lr in grid.rates)
    caption = (
        "η_max: the largest learning rate of the grid at which no finished run stalled or was "
        f"non-finite. Rates: {rates}; nothing is known between them or outside. "
    )
    return scored(contents.next_table(), caption, columns, shown, row)


ASKS = "trainer.callbacks: [{class_path: lightning_app.training.callbacks.probes.SignalProbe}]"


def inside(contents: Contents) -> Markup:
    probed = any(has_probes(cell) for cell in contents.grid.finished)
    said = "" if probed else _unprobed()
    return section("inside", "What happened inside?", figures(contents, "inside"), said)


def _unprobed() -> Markup:
    return element(
        "p",
        "No run was probed, so signals and attention inside the blocks were not measured. With ",
        element("code", ASKS),
        " in the grid's base, each run records them; it does not change the training.",
    )


_SCORES = ("need", "octaves", "rate_sensitivity", "stall_difference")


def over_rates(contents: Contents) -> Markup:
    """The table of the variants with several rates; nothing without any."""
    # A variant with one rate has its difference of stalls at that rate, and no other of these.
    scores = [s for s in contents.scores if s.score in _SCORES and math.isnan(s.lr)]
    several = {(s.group, s.variant) for s in scores if s.score == "stall_difference"}
    several &= {(s.group, s.variant) for s in scores if s.score == "need"}
    shown = [score for score in scores if (score.group, score.variant) in several]
    if not shown:
        return Markup("")
    columns = [
        column("Variant", text=True),
        column("Warm-up", "at the best rates", text=True),
        column("N", "nats per token"),
        column("p", "Holm"),
        column("O", "octaves of rate"),
        column("S(0) − S(ref)", "nats per token"),
        column("runs that stall", "without − with"),
        column("p", "exact, Holm"),
    ]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        stalls = own["stall_difference"]
        return element(
            "tr",
            head(variant),
            element("td", own_reading(own, "need"), class_="text"),
            estimate(own["need"]),
            element("td", p_value(own["need"].p_holm)),
            estimate(own["octaves"]),
            estimate(own["rate_sensitivity"]),
            element("td", DASH if math.isnan(stalls.estimate) else f"{stalls.estimate:.0%}"),
            element("td", p_value(stalls.p_holm)),
        )

    rates = ", ".join(label(lr) for lr in contents.grid.rates)
    caption = (
        "Over all learning rates. N: loss without warm-up minus loss with it, each at its own best "
        "rate, which is chosen on the other seeds. O: log2 of the largest tolerated rate with "
        "warm-up over that without. S: how much the loss rises over the rates. ≥ and ≤: a best or "
        "a tolerated rate is at the edge of those tried, or no run without warm-up trained; (?): "
        f"both directions are open. Rates: {rates}."
    )
    return scored(contents.next_table(), caption, columns, shown, row)


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


NAMES = {
    "octaves": "O, octaves of rate that warm-up buys",
    "need": "N, nats that warm-up saves at the best rates",
    "delta": "Δ, nats that warm-up saves",
    "rate_sensitivity": "S(0) − S(reference), nats",
    "steps_saved": "steps saved by warm-up",
}


def factor_table(contents: Contents) -> Markup:
    """Main effects and interactions on each measure; nothing for a grid without factors."""
    grid = contents.grid
    found = effects(grid, contents.scores)
    # Scores at single rates are in effects.csv where those over all rates say more.
    over_rates = any(math.isnan(effect.lr) for effect in found)
    shown = [effect for effect in found if math.isnan(effect.lr) or not over_rates]
    if not shown:
        return Markup("")
    columns = [
        column("Effect", text=True),
        column("estimate"),
        column("p"),
        column("p", "Holm"),
        column("seeds"),
    ]
    bodies = []
    for measure in MEASURES:
        rows = [_factor_row(effect) for effect in shown if effect.measure == measure]
        if rows:
            heading = element("th", NAMES[measure], scope="rowgroup", colspan=str(len(columns)))
            bodies.append(element("tbody", element("tr", heading, class_="slice"), *rows))
    levels = "; ".join(
        f"{name}: {' to '.join(value_name(axis, value, grid.labels) for value in grid.axes[axis])}"
        for name, axis in grid.factors.items()
    )
    caption = (
        f"Effects of the factors ({levels}) on what warm-up gives. A main effect is the mean "
        "difference between the second value of a factor and the first, over all values of the "
        f"other factors; an interaction (a{TIMES}b) is how much the effect of a changes with b. "
        f"In brackets: {LEVEL:.0%} t intervals over seeds."
    )
    return html_table(contents.next_table(), caption, columns, bodies)


def _factor_row(effect: Effect) -> Markup:
    rest = "" if effect.group == "all" else f", {effect.group}"
    name = head(f"{effect.factors}{rest}")
    if math.isnan(effect.estimate):
        empty = element("td", DASH, title=effect.note)
        return element("tr", name, empty, *[element("td", DASH)] * 2, element("td", "0"))
    shown: list[Child] = [nats(effect.estimate)]
    if not math.isnan(effect.low):
        shown.append(element("span", interval(effect.low, effect.high), class_="interval"))
    if effect.note:
        shown.append(element("span", effect.note, class_="interval"))
    return element(
        "tr",
        name,
        element("td", *shown),
        element("td", p_value(effect.p)),
        element("td", p_value(effect.p_holm)),
        element("td", str(effect.seeds)),
    )


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
        rows = [_comparison_row(row) for row in found if (row.grid, row.axis) == (grid, axis)]
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


def _comparison_row(row: MetricDifference) -> Markup:
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
