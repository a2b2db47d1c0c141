"""The tables of a report, one function each, shared by every output."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lightning_app.config.tree import label, value_name
from lightning_app.report.comparisons import (
    MEASURES,
    TIMES,
    Effect,
    MetricDifference,
    MetricMean,
    by_metric,
    followers,
    slices,
    titled,
    why_apart,
)
from lightning_app.report.facts import (
    DASH,
    bounded,
    direction,
    in_group,
    in_short,
    interval,
    measured,
    nats,
    p_value,
    say,
)
from lightning_app.report.headline import STALLS, by_slice, score_notes
from lightning_app.report.pairs import Score, arms, stall_counts
from lightning_app.report.results import (
    OTHER_DATA,
    CellResult,
    GridResults,
    as_number,
    failures,
    grouped,
)
from lightning_app.report.statistics import LEVEL, mean, seeds_interval
from lightning_app.report.table import Columns, Datum, Heading, Link, Output, ReportTable, laid_out
from lightning_app.report.tasks import (
    FailedRuns,
    FailureTest,
    TaskScore,
    columns,
    failed_runs,
    failure_tests,
    no_averages,
    score_facts,
    split_of,
    task_scores,
)
from lightning_app.report.tensorboard import run_url, tensorboard_path
from lightning_app.report.verdicts import Verdict, verdicts
from lightning_app.runs.records import OUTCOMES
from lightning_app.scores.task_facts import QualityMetric

if TYPE_CHECKING:
    import pandas as pd


Own = Mapping[str, Score]  # the scores of a variant, by name
NAME = Heading("variant", words=True)
AGAINST = "against_baseline w="
PAGE: tuple[Output, ...] = ("page",)
PRINTED: tuple[Output, ...] = ("page", "paper")


def _of_scores(
    name: str, shown: Sequence[Score], columns: Columns[Own], caption: str, **more: Any
) -> ReportTable:
    """One row per variant and slice; the table takes over the notes of the scores."""
    slices = by_slice(shown).items()
    named = (NAME, lambda own: next(iter(own.values())).variant)
    rows = ((where, own) for where, variants in slices for own in variants.values())
    more = {"notes": tuple(score_notes(shown)), **more}
    return laid_out(name, [named, *columns], rows, caption=caption, **more)


def _datum(text: str, *below: str, **more: Any) -> Datum:
    """A text, and the lines below it that are not empty."""
    return Datum(text, tuple(filter(None, below)), **more)


def _score(name: str) -> Callable[[Own], Datum]:
    return lambda own: estimate(own[name])


_whole = "{:,.0f}".format


def _number_of_steps(score: Score | None, *more: str) -> Datum:
    if score is None or math.isnan(score.estimate):
        return Datum(DASH, title=score.note if score else "not in the grid")
    texts = (bounded(score, _whole), interval(score.low, score.high, _whole), *more)
    return _datum(*(text.replace("-", "−") for text in texts))


def estimate(score: Score) -> Datum:
    """An estimate, its interval, and the values of the seeds if there are few."""
    if math.isnan(score.estimate):
        return Datum(DASH, title=score.note)
    each = [DASH if math.isnan(value) else nats(value) for _, value in score.each]
    aside = " · ".join(each) if len(each) > 1 else ""
    return _datum(bounded(score), interval(score.low, score.high), aside=aside)


def stalled_share(score: Score | None) -> Datum:
    """The number of stalled runs, with Wilson's interval."""
    if score is None or math.isnan(score.estimate):
        return Datum(DASH, title=score.note if score else "not in the grid")
    shown = _task_share(score.diverged, score.cells, score.low, score.high)
    return replace(shown, bad=score.diverged > 0)


def verdict_table(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """The verdict on each arm, and on all of them, with the numbers that decide it."""
    found = verdicts(grid, scores)
    every = {(score.group, score.variant, score.score): score for score in scores}
    counted = {
        (arm.group, arm.variant): stall_counts([arm], grid.reference_warmup) for arm in arms(grid)
    }
    several = any(verdict.score.score == "tuned" for verdict in found)

    def beside(verdict: Verdict, *names: str) -> Score | None:
        own = (every.get((verdict.group, verdict.variant, name)) for name in names)
        return next(filter(None, own), None) if verdict.kind == "arm" else None

    def saved(verdict: Verdict) -> Datum:
        below = filter(None, [interval(verdict.low, verdict.high)])
        return replace(estimate(verdict.score), below=tuple(below))

    def against(verdict: Verdict) -> Datum:
        score = beside(verdict, "tuned_interaction", "interaction")
        if score is None or math.isnan(score.estimate):
            return Datum(DASH, title=score.note if score else "")
        return _datum(bounded(score), interval(score.holm_low, score.holm_high))

    def failed(side: int) -> Callable[[Verdict], Datum]:
        def of(verdict: Verdict) -> Datum:
            text = counted.get((verdict.group, verdict.variant), (DASH, DASH))[side]
            p = side and not math.isnan(verdict.failures_p)
            below = f"p {p_value(verdict.failures_p)}" if p else ""
            return _datum(text, below, bad=text[0] not in ("0", DASH))

        return of

    def best(side: int) -> Callable[[Verdict], str]:
        return lambda v: DASH if math.isnan(v.score.best[side]) else label(v.score.best[side])

    def steps(verdict: Verdict) -> Datum:
        return _number_of_steps(beside(verdict, "tuned_steps_saved", "steps_saved"))

    baseline = grid.baseline or "the baseline"
    columns: Columns[Verdict] = [
        (NAME, lambda verdict: verdict.variant),
        (
            Heading("verdict", words=True, between="; ", brief=True),
            lambda v: _datum(v.word, v.more),
        ),
        (Heading("saved by warm-up", grid.unit), saved),
        (Heading(f"minus that of {baseline}", grid.unit), against),
        *([(Heading("best rate without"), best(0)), (Heading("with"), best(1))] if several else []),
        (Heading("failed without"), failed(0)),
        (Heading("failed with"), failed(1)),
        (Heading("steps saved", outputs=PAGE), steps),
        (Heading("p", "Holm"), lambda verdict: p_value(verdict.p)),
        (Heading("seeds"), lambda verdict: str(verdict.seeds)),
    ]
    rows = (("" if each.group == "all" else each.group, each) for each in found)
    of = "" if grid.reference_warmup is None else f" of {grid.reference_warmup:,} updates"
    best_of = f", each seed at the best of its {grid.trials} trials" if grid.trials else ""
    matters = f"{grid.matters:g} nats" if grid.matters else "not named in the grid file"
    words = {"of": of, "matters": matters, "data": in_short(grid)}
    shown = [verdict.score for verdict in found]
    return laid_out(
        "headline",
        columns,
        rows,
        caption=say("captions.verdicts", **words),
        title=f"Warm-up{of} against none{best_of} [the interval that decides]",
        notes=tuple(score_notes(shown)),
        heading="A dash marks an undefined score. Notes:",
    )


def delta_table(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """What warm-up does to the loss of each variant, at each rate that compares warm-ups."""
    wanted = ("delta", "interaction", "steps_saved", "lost_steps", STALLS)
    shown = _at_shared_rates(grid, [s for s in scores if s.score.startswith(wanted)])
    stalled = failures(grid.finished) or "stalled"
    columns: Columns[Own] = [
        (Heading("Δ", grid.unit), _score("delta")),
        (Heading("interaction", "Δ − Δ of the baseline"), _score("interaction")),
        (Heading("p of Δ", "Holm"), lambda own: p_value(own["delta"].p_holm)),
        (Heading("steps saved", "by warm-up", outputs=PAGE), _steps),
        *(
            (
                Heading(f"{stalled}, warm-up {warmup:,}", brief=True),
                lambda own, name=f"{STALLS}{warmup}": stalled_share(own.get(name)),
            )
            for warmup in grid.warmups
        ),
        (Heading("seeds", outputs=PRINTED), lambda own: str(own["delta"].seeds)),
    ]
    of = "" if grid.reference_warmup is None else f" of {grid.reference_warmup:,} updates"
    words = {"of": of, "baseline": grid.baseline or "the baseline", "level": 1 - grid.alpha}
    return _of_scores(
        "delta",
        shown,
        columns,
        say("captions.headline", **words, data=in_short(grid)),
        page_caption="Below them: the values of the seeds. " * any(len(s.each) > 1 for s in shown),
        heading="A dash marks an undefined score. Notes:",
    )


def _at_shared_rates(grid: GridResults, scores: Sequence[Score]) -> Sequence[Score]:
    """Without rates that a search or a refinement added to arms of one warm-up only."""
    if not grid.chosen:
        return scores
    warmups: dict[tuple[str, float, str], set[int | None]] = {}
    for cell in grid.cells:
        key = (cell.group, cell.lr or 0.0, cell.variant)
        warmups.setdefault(key, set()).add(cell.warmup)
    compared = {key[:2] for key, found in warmups.items() if len(found) > 1}
    return [score for score in scores if (score.group, score.lr) in compared]


def _steps(own: Own) -> Datum:
    """Steps saved with the interval, and the steps that warm-up loses by its small rates."""
    lost, more = own.get("lost_steps"), ""
    if lost is not None and not math.isnan(lost.estimate):
        more = f"loses {lost.estimate:,.0f}"
    return _number_of_steps(own.get("steps_saved"), more)


def loss_by_warmup(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """The mean final loss of each arm."""
    shown = [score for score in scores if score.score == "delta"]
    arms = grouped(grid.finished, lambda c: (c.variant, c.group, c.lr or 0.0, c.warmup))

    def loss(warmup: int) -> Callable[[Own], Datum]:
        def of(own: Own) -> Datum:
            score = own["delta"]
            cells = arms.get((score.variant, score.group, score.lr, warmup))
            if not cells:
                return Datum(DASH)
            losses = [cell.loss for cell in cells]
            low, high, _ = seeds_interval(losses, [cell.failed for cell in cells])
            return _datum(nats(mean(losses)), interval(low, high))

        return of

    unit = f"{grid.monitored.loss}, nats"
    losses = [(Heading(f"warm-up {w:,}", unit), loss(w)) for w in grid.warmups]
    caption = say("captions.loss_by_warmup", level=LEVEL, data=in_short(grid))
    return _of_scores("loss_by_warmup", shown, losses, caption, notes=())


def over_rates_table(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """What else differs over the rates, and how each variant compares with the baseline."""
    wanted = ("tuned", "mean_over_rates", "rate_shift", "tuned_steps_saved", AGAINST)
    shown = [score for score in scores if score.score.startswith(wanted)]
    several = {(s.group, s.variant) for s in shown if s.score == "tuned" and min(s.tried) > 1}
    shown = [score for score in shown if (score.group, score.variant) in several]

    def against(name: str) -> Callable[[Own], Datum]:
        def of(own: Own) -> Datum:
            score = own.get(name)
            if score is None or math.isnan(score.estimate):
                return Datum(DASH, title=score.note if score else "not in the grid")
            decides = interval(score.holm_low, score.holm_high)
            return _datum(nats(score.estimate), decides, f"p {p_value(score.p_holm)}")

        return of

    names = dict.fromkeys(score.score for score in shown if score.score.startswith(AGAINST))
    columns: Columns[Own] = [
        (Heading("T", grid.unit), _score("tuned")),
        (Heading("M", grid.unit), _score("mean_over_rates")),
        (Heading("shift of the best rate", "octaves"), _score("rate_shift")),
        (
            Heading("steps saved", "at the best rates"),
            lambda own: _number_of_steps(own["tuned_steps_saved"]),
        ),
        *(
            (Heading(f"loss against {grid.baseline}", f"warm-up {name[len(AGAINST) :]}"), of)
            for name, of in ((name, against(name)) for name in names)
        ),
    ]
    caption = say(
        "captions.over_rates", level=1 - grid.alpha, rates=", ".join(map(label, grid.rates))
    )
    return _of_scores("over_rates", shown, columns, caption)


def bleu_table(scores: Sequence[Score]) -> ReportTable:
    """The gain of BLEU by warm-up, if the test set was translated."""
    shown = [score for score in scores if score.score == "bleu"]
    columns: Columns[Own] = [
        (Heading("ΔBLEU", "0-100"), _score("bleu")),
        (Heading("seeds"), lambda own: str(own["bleu"].seeds)),
    ]
    return _of_scores("bleu", shown, columns, say("captions.bleu"))


def cost_table(grid: GridResults) -> ReportTable:
    """Time and memory of each variant, and their ratio to the baseline."""
    arms = grouped(grid.finished, lambda cell: (cell.group, cell.variant))

    def of(cells: Iterable[CellResult], key: str) -> list[float]:
        values = (as_number(cell.metrics.get(key, cell.record.get(key))) for cell in cells)
        return [value for value in values if math.isfinite(value)]

    def spent(key: str, scale: float = 1.0) -> Callable[[list[CellResult]], Datum]:
        def counted(cells: list[CellResult]) -> list[float]:
            # Runs that became non-finite ended early, whatever their cost.
            return of((c for c in cells if key != "seconds" or c.outcome != "non_finite"), key)

        def both(cells: list[CellResult]) -> Datum:
            against = arms.get((cells[0].group, cells[0].baseline or ""), [])
            ours, theirs = counted(cells), counted(against)
            if not ours:
                return Datum(DASH, title="not recorded")
            ratio = theirs and mean(theirs) and against is not cells
            below = (f"{mean(ours) / mean(theirs):.3f} ×",) if ratio else ()
            return Datum(f"{mean(ours) * scale:,.0f}", below)

        return both

    columns: Columns[list[CellResult]] = [
        (NAME, lambda cells: cells[0].variant),
        (Heading("parameters"), spent("parameters")),
        (Heading("tokens per second"), spent("train/tokens_per_second")),
        (Heading("peak memory", "MiB"), spent("peak_memory_bytes", 2.0**-20)),
        (Heading("seconds per run"), spent("seconds")),
        (Heading("all runs", "hours"), lambda c: f"{math.fsum(of(c, 'seconds')) / 3600:,.2f}"),
        (Heading("runs"), lambda cells: str(len(cells))),
    ]
    rows = (("" if group == "all" else group, cells) for (group, _), cells in arms.items())
    caption = say("captions.cost", baseline=f" {grid.baseline}" if grid.baseline else "")
    return laid_out("cost", columns, rows, caption=caption)


def metric_table(grid: GridResults) -> ReportTable:
    """Means by variant and warm-up of the values that the runs report, the best variant first."""
    first, *others = grid.measures
    judged = {cell.group: grid.measure(cell) for cell in grid.finished}

    def words(measure: QualityMetric) -> str:
        return f"{measure.title}, {direction(measure.mode)}"

    def heading(where: str, arms: Sequence[MetricMean]) -> str:
        return f"{where}: {words(judged[arms[0].group])}" if where and others else where

    def mean_at(warmup: int) -> Callable[[list[MetricMean]], Datum]:
        return lambda arms: _mean(next((a for a in arms if (a.warmup or 0) == warmup), None))

    if grid.scored and first.metric != grid.metric:
        what = f"The task's own score, {'named in each part' if others else words(first)}"
    else:
        what = f"The metric of the grid file, {grid.metric}: {direction(grid.mode)}"
    unit, why = "own score" if others else first.metric, why_apart(grid)
    warmups = sorted({cell.warmup or 0 for cell in grid.finished})
    return laid_out(
        "metric",
        [
            (NAME, lambda arms: arms[0].variant),
            *((Heading(f"warm-up {w:,}", unit), mean_at(w)) for w in warmups),
        ],
        (
            (heading(where, next(iter(variants.values()))), arms)
            for where, variants in slices(grid, by_metric(grid)).items()
            for arms in variants.values()
        ),
        title=f"{grid.name}: {titled(grid)}, mean over runs [{LEVEL:.0%}]",
        caption=say("captions.metric", what=what, level=LEVEL),
        notes=(f"Parts of the table cannot be compared with each other: {why}",) if why else (),
    )


def _mean(arm: MetricMean | None) -> Datum:
    if arm is None or not arm.runs:
        return Datum(DASH, title="no finished run with a finite value")
    ends = "" if math.isnan(arm.low) else f"[{measured(arm.low)}, {measured(arm.high)}] "
    lacking = f", {arm.lacking} without" if arm.lacking else ""
    return Datum(measured(arm.mean), (f"{ends}n = {arm.runs}{lacking}",))


_EFFECTS_ON = {
    "tuned": "T, nats that warm-up saves at the best of the rates",
    "mean_over_rates": "M, nats that warm-up saves in the mean over the rates",
    "rate_shift": "octaves by which warm-up raises the best rate",
    "tuned_steps_saved": "steps saved by warm-up at the best rates",
    "delta": "Δ, nats that warm-up saves",
    "steps_saved": "steps saved by warm-up",
}


def factor_table(grid: GridResults, effects: Sequence[Effect]) -> ReportTable:
    """Main effects and interactions on each measure."""
    # Where scores over all rates say more, those at single rates are only in effects.csv.
    all_rates = any(math.isnan(effect.lr) for effect in effects)
    shown = [effect for effect in effects if math.isnan(effect.lr) or not all_rates]
    levels = "; ".join(
        f"{name}: {' to '.join(value_name(axis, v, grid.labels) for v in grid.axes[axis])}"
        for name, axis in grid.factors.items()
    )

    def shown_estimate(effect: Effect) -> Datum:
        if math.isnan(effect.estimate):
            return Datum(DASH, title=effect.note)
        return _datum(nats(effect.estimate), interval(effect.low, effect.high), effect.note)

    columns: Columns[Effect] = [
        (Heading("effect", words=True), lambda effect: in_group(effect.factors, effect.group)),
        (Heading("estimate"), shown_estimate),
        (Heading("p"), lambda effect: p_value(effect.p)),
        (Heading("p", "Holm"), lambda effect: p_value(effect.p_holm)),
        (Heading("seeds"), lambda effect: str(effect.seeds)),
    ]
    rows = ((_EFFECTS_ON[m], effect) for m in MEASURES for effect in shown if effect.measure == m)
    if follow := followers(grid, grid.factors.values()):
        levels += f"; what follows: {follow}"
    caption = say("captions.factors", levels=levels, times=TIMES, level=1 - grid.alpha)
    return laid_out("factors", columns, rows, caption=caption)


def comparison_table(grid: GridResults, differences: Sequence[MetricDifference]) -> ReportTable:
    """One row per comparison, one body per axis and metric."""

    def heading(row: MetricDifference) -> str:
        text = f"{row.axis}, {row.metric} of each value less that of {row.baseline}"
        return f"{text} ({direction(row.mode)})"

    def difference(row: MetricDifference) -> Datum:
        text = DASH if math.isnan(row.estimate) else signed(row.estimate)
        return _datum(text, interval(row.low, row.high, signed), row.note)

    columns: Columns[MetricDifference] = [
        (Heading("value", words=True), lambda row: row.value),
        (
            Heading("at", words=True),
            lambda r: Datum("" if r.where == "all" else r.where, wrap=True),
        ),
        (Heading("reads", words=True), lambda row: Datum(row.reading or DASH, row.beside)),
        (Heading("difference"), difference),
        (Heading("p", "Holm"), lambda row: p_value(row.p_holm)),
        (Heading("seeds"), lambda row: str(row.seeds)),
    ]
    what = say("captions.own_scores") if grid.scored else "The metric of the grid file"
    follow = followers(grid, [row.axis for row in differences])
    equal = f"axis equal but those that follow: {follow}" if follow else "other axis equal"
    caption = say(
        "captions.comparisons", what=what, equal=equal, level=1 - grid.alpha, alpha=1 - LEVEL
    )
    rows = ((heading(row), row) for row in differences)
    return laid_out("comparisons", columns, rows, caption=caption)


def signed(value: float) -> str:
    return measured(value).replace("-", "−")


def cell_table(grid: GridResults, results: "pd.DataFrame", out: Path) -> ReportTable:
    """Every finished cell, with links from a page in the folder `out`."""
    axes = [key for key in grid.axes if key in results and not key.startswith(grid.wiring)]
    keys = ["variant", "warmup", "lr", "seed", *axes, "outcome"]
    keys += [key for key in results if "/" in key]
    if any(cell.state == "diverged" for cell in grid.finished):
        keys += ["diverged_step", "diverged_rule"]
    titles = {"warmup": "warm-up", "diverged_step": "at step", "diverged_rule": "rule"}
    records = {(r["id"], r["group"]): r for r in results.to_dict("records")}

    def column(key: str) -> tuple[Heading, Callable[[CellResult], Datum]]:
        def value(cell: CellResult) -> Datum:
            record = records[cell.id, cell.group]
            bad = key == "outcome" and record["status"] != "ok"
            return Datum(_plain(key, record[key]), bad=bad)

        words = key in ("variant", "outcome", "diverged_rule")
        return Heading(titles.get(key, key), words=words), value

    def links(cell: CellResult) -> Datum:
        folder = quote(Path(os.path.relpath(cell.folder, out)).as_posix())
        local = run_url("http://localhost:6006/", cell)
        served = run_url(tensorboard_path(cell.folder.parent.parent), cell)
        curves = f"curves of {cell.name} in TensorBoard"
        shown = [Link(text="folder", href=f"{folder}/", label=f"folder of {cell.name}")]
        if cell.run.folder.grid:  # TensorBoard finds a run only behind a link of its grid
            shown.append(Link(text="curves", href=local, label=curves, served=served))
        return Datum("", links=tuple(shown))

    shown = map(column, dict.fromkeys([*keys, "seconds"]))
    rows = (("", cell) for cell in grid.finished)
    columns: Columns[CellResult] = [*shown, (Heading("run", words=True), links)]
    return laid_out("cells", columns, rows, caption=say("captions.cells"))


def _plain(key: str, value: Any) -> str:
    import pandas as pd

    if value is None or value is pd.NA or value != value:
        return DASH
    if key == "outcome":
        return OUTCOMES[value]
    if key == "lr":
        return label(value)
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 or key == "seconds" else nats(value)
    return str(value)


_STATES = {
    "failed": "crashed",
    "unfinished": "running or interrupted",
    "waiting": "not started",
    OTHER_DATA: "trained on other data, left out",
    "damaged": "damaged result",
}


def missing_table(grid: GridResults) -> ReportTable:
    """Planned cells without a result."""
    columns: Columns[CellResult] = [
        (NAME, lambda cell: cell.variant),
        (Heading("run", words=True), lambda cell: cell.name),
        (Heading("state", words=True), lambda c: Datum(_STATES[c.state], bad=bool(c.error))),
        (Heading("last message", words=True), lambda cell: Datum(cell.error or DASH, wrap=True)),
    ]
    absent = (cell for cell in grid.cells if not cell.finished and cell.state != "pruned")
    rows = (("", cell) for cell in absent)
    return laid_out("missing", columns, rows, caption=say("captions.missing"))


def task_tables(grid: GridResults) -> list[ReportTable]:
    """The tables of a grid with published scores; none for other grids."""
    tables = (test_table(grid), arm_table(grid), score_table(grid))
    return [table for table in tables if table.bodies]


def test_table(grid: GridResults) -> ReportTable:
    """Failed runs by variant at the two values of an axis, over all other axes."""
    tests = failure_tests(grid)
    columns: Columns[FailureTest] = [
        (NAME, lambda test: test.variant),
        (Heading("failed"), lambda test: _task_share(test.failed, test.runs, test.low, test.high)),
        (
            Heading("failed at baseline"),
            lambda test: _task_share(
                test.baseline_failed, test.baseline_runs, test.baseline_low, test.baseline_high
            ),
        ),
        (Heading("difference"), lambda test: f"{test.difference:+.2f}".replace("-", "−")),
        (Heading("p"), lambda test: p_value(test.p)),
        (Heading("p (Holm)"), lambda test: p_value(test.p_holm)),
    ]
    return laid_out(
        "failure_tests",
        columns,
        ((f"{test.axis}: {test.value}, baseline {test.baseline}", test) for test in tests),
        title="Failed runs over all tasks: no better than a constant answer [95% Wilson]",
        caption=say("captions.failure_tests", failed=say("captions.failed"), level=LEVEL),
    )


def arm_table(grid: GridResults) -> ReportTable:
    """Failed runs of each arm by each definition, with the median and the mean."""
    arms = failed_runs(grid)
    rates = len({arm.lr for arm in arms}) > 1

    def heading(arm: FailedRuns) -> str:
        at = f", learning rate {label(arm.lr)}" if rates and arm.lr is not None else ""
        constant = "" if math.isnan(arm.constant) else f", constant answer {measured(arm.constant)}"
        return f"{'' if arm.group == 'all' else f'{arm.group}{at}: '}{arm.metric}{constant}"

    columns: Columns[FailedRuns] = [
        (NAME, lambda arm: arm.variant),
        (Heading("warm-up"), lambda arm: DASH if arm.warmup is None else f"{arm.warmup:,}"),
        (Heading("failed"), lambda arm: _task_share(arm.failed, arm.runs, arm.low, arm.high)),
        (Heading("one class"), lambda arm: str(arm.one_class)),
        (Heading("loss at the floor"), lambda arm: str(arm.loss_at_floor)),
        (Heading("non-finite"), lambda arm: str(arm.non_finite)),
        (Heading("median"), lambda arm: DASH if math.isnan(arm.median) else measured(arm.median)),
        (Heading("mean"), lambda a: _task_mean(a.mean, a.mean_low, a.mean_high, a.lacking)),
    ]
    by_loss = sum(arm.by_loss for arm in arms)
    return laid_out(
        "failed_runs",
        columns,
        ((heading(arm), arm) for arm in arms),
        title="Failed runs per arm [95% Wilson], median and mean over seeds",
        caption=say("captions.failed_runs", failed=say("captions.failed"), level=LEVEL),
        notes=(f"{by_loss} runs have no such score and were judged by their loss",) * bool(by_loss),
    )


def score_table(grid: GridResults) -> ReportTable:
    """Tasks by variant, in two summaries."""
    scores = task_scores(grid)

    def column(corpus: str, metric: str) -> tuple[Heading, Callable[[list[TaskScore]], Datum]]:
        def value(rows: list[TaskScore]) -> Datum:
            by_column = {(row.data, row.metric): row for row in rows}
            return _task_value(by_column.get((corpus, metric)))

        return Heading(f"{split_of(corpus, metric)[0]} {score_facts(corpus, metric).title}"), value

    def averages(rows: list[TaskScore]) -> Datum:
        first, *others = [*filter(None, map(_average, rows))] or [DASH]
        return Datum(first, tuple(others))

    shown: Columns[list[TaskScore]] = [
        (NAME, lambda rows: rows[0].variant),
        *(column(*each) for each in columns(scores)),
        *([(Heading("average"), averages)] if any(score.average for score in scores) else []),
    ]
    lacking = no_averages(grid) if scores else ""
    return laid_out(
        "task_scores",
        shown,
        ((heading, rows) for (heading, _), rows in _task_rows(scores).items()),
        title="Tasks by variant, dev set, in percent",
        caption=say("captions.task_scores", level=LEVEL),
        notes=tuple(filter(None, (lacking, *_task_notes(scores)))),
    )


def _task_rows(scores: Sequence[TaskScore]) -> dict[tuple[str, str], list[TaskScore]]:
    """The scores of each row, by its heading and its variant."""

    def heading(kind: str) -> str:
        rows = [row for row in scores if row.kind == kind]
        if kind == "mean":
            words = "; ".join(dict.fromkeys(row.setting for row in rows if row.setting))
            one = f"ours, mean over {_seeds(rows)} of one setting"
            return f"{one} ({words})" if words else one
        return (
            f"ours, OPTIMISTIC: median of the best of {max(row.settings for row in rows)} "
            "settings, chosen on the dev set for each task"
        )

    return grouped(scores, lambda score: (heading(score.kind), score.variant))


def _seeds(rows: Iterable[TaskScore]) -> str:
    counts = sorted({row.runs + row.lacking for row in rows if not row.average})
    if counts == [1]:
        return "1 seed"
    return f"{' to '.join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))} seeds"


def _task_notes(scores: Sequence[TaskScore]) -> list[str]:
    chosen: dict[str, list[str]] = {}
    for row in scores:
        if row.kind == "best_median" and row.setting and not row.average:
            split, _ = split_of(row.data, row.metric)
            chosen.setdefault(row.setting, []).append(f"{row.variant} on {split}")
    return [f"best setting {at}: {', '.join(dict.fromkeys(of))}" for at, of in chosen.items()]


def _task_value(row: TaskScore | None) -> Datum:
    if row is None or math.isnan(row.value):
        return Datum(DASH)
    scale = score_facts(row.data, row.metric).scale
    lacking = row.lacking if row.kind == "mean" else 0
    return _task_mean(row.value, row.low, row.high, lacking, scale, digits=2)


def _average(row: TaskScore) -> str:
    """An average with its name; empty for the score of one task."""
    if not row.average:
        return ""
    without = f", {row.lacking} without" if row.kind == "mean" and row.lacking else ""
    return f"{100 * row.value:.2f} ({row.average}{without})"


def _task_mean(
    value: float, low: float, high: float, lacking: int, scale: float = 1.0, digits: int = 3
) -> Datum:
    if math.isnan(value):
        return Datum(DASH)
    shown = [f"{scale * each:.{digits}f}".replace("-", "−") for each in (value, low, high)]
    text = f"{shown[0]}{f' ({lacking} without)' if lacking else ''}"
    return Datum(text) if math.isnan(low) else Datum(text, (f"[{shown[1]}, {shown[2]}]",))


def _task_share(failed: int, runs: int, low: float, high: float) -> Datum:
    return Datum(f"{failed} / {runs}", (f"[{low:.2f}, {high:.2f}]",))
