"""The tables of a report, one function each: every output has them from here."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lightning_app.config.tree import BLOCK, label, value_name
from lightning_app.report.comparisons import (
    MEASURES,
    TIMES,
    Effect,
    MetricDifference,
    MetricMean,
    by_metric,
    judged_by,
    slices,
    titled,
    why_apart,
)
from lightning_app.report.facts import (
    DASH,
    bounded,
    direction,
    in_short,
    interval,
    measured,
    nats,
    p_value,
    rate,
    share_interval,
    share_of,
)
from lightning_app.report.headline import (
    STALLS,
    by_slice,
    own_reading,
    relation,
    score_notes,
    stall_words,
    with_p,
)
from lightning_app.report.messages import say
from lightning_app.report.pairs import Score, mean_loss
from lightning_app.report.published import comparison, our_settings
from lightning_app.report.results import OTHER_DATA, CellResult, GridResults, failures
from lightning_app.report.statistics import LEVEL, mean
from lightning_app.report.table import (
    Bodies,
    Datum,
    Heading,
    Link,
    Output,
    ReportTable,
    Row,
)
from lightning_app.report.tasks import (
    FailedRuns,
    FailureTest,
    TaskScore,
    columns,
    no_averages,
    score_facts,
    setting_words,
    split_of,
)
from lightning_app.report.tensorboard import run_url, tensorboard_path
from lightning_app.runs.records import OUTCOMES
from lightning_app.scores.task_facts import QualityMetric

if TYPE_CHECKING:
    import pandas as pd

Own = Mapping[str, Score]  # the scores of a variant, by name
NAME = Heading("variant", words=True)
PAGE: tuple[Output, ...] = ("page",)
PRINTED: tuple[Output, ...] = ("page", "paper")
UNDEFINED = "A dash is an undefined score. Notes:"


def _row(*cells: Datum | str) -> Row:
    return tuple(Datum(cell) if isinstance(cell, str) else cell for cell in cells)


def _grouped(rows: Iterable[tuple[str, Row]]) -> Bodies:
    found: dict[str, list[Row]] = {}
    for where, row in rows:
        found.setdefault(where, []).append(row)
    return found


def _by_variant(scores: Sequence[Score], row: Callable[[str, Own], Row]) -> Bodies:
    """A row for each variant of each slice."""
    return {
        where: [row(*each) for each in variants.items()]
        for where, variants in by_slice(scores).items()
    }


def _value(text: str, low: float, high: float, form: Callable[[float, float], str]) -> Datum:
    return Datum(text) if math.isnan(low) else Datum(text, (form(low, high),))


def estimate(score: Score) -> Datum:
    """An estimate, its interval, and the values of the seeds if they are few."""
    if math.isnan(score.estimate):
        return Datum(DASH, title=score.note)
    below = () if math.isnan(score.low) else (interval(score.low, score.high),)
    each = [DASH if math.isnan(value) else nats(value) for _, value in score.each]
    return Datum(bounded(score), below, aside=" · ".join(each) if len(each) > 1 else "")


def stalled_share(score: Score | None) -> Datum:
    """The number of stalled runs, with Wilson's interval."""
    if score is None or math.isnan(score.estimate):
        return Datum(DASH, title=score.note if score else "not in the grid")
    ends = share_interval(score.low, score.high)
    return Datum(share_of(score.diverged, score.cells), (ends,), bad=score.diverged > 0)


def mean_of(cells: Sequence[CellResult]) -> Datum:
    """The mean loss of runs, with the t interval if it is defined."""
    if not cells:
        return Datum(DASH)
    centre, low, high = mean_loss(cells)
    return _value(nats(centre), low, high, interval)


def headline_table(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """What warm-up does to the loss of each variant, at each rate."""
    wanted, saved = ("delta", "relative_delta", "interaction"), ("steps_saved", "lost_steps")
    shown = [score for score in scores if score.score.startswith((*wanted, *saved, STALLS))]
    reference, baseline = grid.reference_warmup, grid.baseline or "the baseline"
    stalled = failures(grid.finished) or "stalled"

    def row(variant: str, own: Own) -> Row:
        reads = with_p(own_reading(own), own["delta"])
        stalls = stall_words(own, reference)
        return _row(
            variant,
            Datum(reads, (stalls,) if stalls else ()),
            with_p(relation(own), own["interaction"]),
            *(estimate(own[name]) for name in wanted),
            _steps(own),
            *(stalled_share(own.get(f"{STALLS}{warmup}")) for warmup in grid.warmups),
            str(own["delta"].seeds),
        )

    of = "" if reference is None else f" of {reference:,} updates"
    return ReportTable(
        name="headline",
        title=f"The effect of no warm-up [{LEVEL:.0%}]",
        caption=say(
            "captions.headline", of=of, baseline=baseline, level=LEVEL, data=in_short(grid)
        ),
        page_caption="Below them: the values of the seeds. " * any(len(s.each) > 1 for s in shown)
        + "Bootstrap-t intervals are in sensitivity.csv." * any(s.bootstrap for s in shown),
        columns=(
            NAME,
            Heading("warm-up", words=True, between="; ", brief=True),
            Heading(f"against {baseline}", words=True),
            Heading("Δ", "nats per token"),
            Heading("relative Δ", "of what is learned", outputs=PRINTED),
            Heading("interaction", f"Δ − Δ of {baseline}"),
            Heading("steps saved", "by warm-up", outputs=PAGE),
            *(Heading(f"{stalled}, warm-up {warmup:,}", brief=True) for warmup in grid.warmups),
            Heading("seeds", outputs=PRINTED),
        ),
        bodies=_by_variant(shown, row),
        notes=tuple(score_notes(shown)),
        heading=UNDEFINED,
    )


def _steps(own: Own) -> Datum:
    """Steps saved with the interval, and the steps that warm-up loses by its small rates."""
    saved, lost = own.get("steps_saved"), own.get("lost_steps")
    if saved is None or math.isnan(saved.estimate):
        return Datum(DASH, title=saved.note if saved else "not in the grid")
    sign = {">=": "≥ ", "<=": "≤ "}.get(saved.bound, "")
    below = [] if math.isnan(saved.low) else [f"[{saved.low:,.0f}, {saved.high:,.0f}]"]
    if lost is not None and not math.isnan(lost.estimate):
        below.append(f"loses {lost.estimate:,.0f}")
    texts = (text.replace("-", "−") for text in (f"{sign}{saved.estimate:,.0f}", *below))
    return Datum(next(texts), tuple(texts))


def loss_by_warmup(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """The mean final loss of each arm, and how flat it is over the warm-ups."""
    shown = [score for score in scores if score.score == "R_w"]
    arms: dict[tuple[str, str, float, int | None], list[CellResult]] = {}
    for cell in grid.finished:
        key = (cell.variant, cell.group, cell.lr or 0.0, cell.warmup)
        arms.setdefault(key, []).append(cell)

    def row(variant: str, own: Own) -> Row:
        key = (variant, own["R_w"].group, own["R_w"].lr)
        means = (mean_of(arms.get((*key, warmup), [])) for warmup in grid.warmups)
        return _row(variant, *means, estimate(own["R_w"]))

    return ReportTable(
        name="loss_by_warmup",
        caption=say("captions.loss_by_warmup", level=LEVEL, data=in_short(grid)),
        columns=(
            NAME,
            *(Heading(f"warm-up {w:,}", f"{grid.monitored.loss}, nats") for w in grid.warmups),
            Heading("R_w"),
        ),
        bodies=_by_variant(shown, row),
        notes=tuple(score_notes(shown)),
    )


def over_rates(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """What warm-up does to the variants that have several rates, each at its best ones."""
    wanted = ("need", "octaves", "rate_sensitivity", "stall_difference")
    found = [score for score in scores if score.score in wanted and math.isnan(score.lr)]
    # A variant with one rate has its difference of stalls at that rate, and no other of these.
    several = {(s.group, s.variant) for s in found if s.score == "stall_difference"}
    several &= {(s.group, s.variant) for s in found if s.score == "need"}
    shown = [score for score in found if (score.group, score.variant) in several]

    def row(variant: str, own: Own) -> Row:
        stalls = own["stall_difference"]
        return _row(
            variant,
            own_reading(own, "need"),
            estimate(own["need"]),
            p_value(own["need"].p_holm),
            estimate(own["octaves"]),
            estimate(own["rate_sensitivity"]),
            DASH if math.isnan(stalls.estimate) else f"{stalls.estimate:.0%}",
            p_value(stalls.p_holm),
        )

    return ReportTable(
        name="over_rates",
        caption=say("captions.over_rates", rates=", ".join(map(label, grid.rates))),
        columns=(
            NAME,
            Heading("warm-up", "at the best rates", words=True),
            Heading("N", "nats per token"),
            Heading("p", "Holm"),
            Heading("O", "octaves of rate"),
            Heading("S(0) − S(ref)", "nats per token"),
            Heading("runs that stall", "without − with"),
            Heading("p", "exact, Holm"),
        ),
        bodies=_by_variant(shown, row),
        notes=tuple(score_notes(shown)),
    )


def largest_rates(grid: GridResults, scores: Sequence[Score]) -> ReportTable:
    """The largest rate at which each variant is stable, by warm-up."""
    shown = [score for score in scores if score.score.startswith("eta_max")]

    def row(variant: str, own: Own) -> Row:
        found = (own.get(f"eta_max w={warmup}") for warmup in grid.warmups)
        return _row(variant, *(DASH if s is None else rate(s.estimate) for s in found))

    return ReportTable(
        name="largest_rates",
        caption=say("captions.largest_rates", rates=", ".join(map(label, grid.rates))),
        columns=(NAME, *(Heading("η_max", f"warm-up {warmup:,}") for warmup in grid.warmups)),
        bodies=_by_variant(shown, row),
        notes=tuple(score_notes(shown)),
    )


def bleu_table(scores: Sequence[Score]) -> ReportTable:
    """The gain of BLEU by warm-up, if the test set was translated."""
    shown = [score for score in scores if score.score == "bleu"]
    return ReportTable(
        name="bleu",
        caption=say("captions.bleu"),
        columns=(NAME, Heading("ΔBLEU", "0-100"), Heading("seeds")),
        bodies=_by_variant(
            shown,
            lambda variant, own: _row(variant, estimate(own["bleu"]), str(own["bleu"].seeds)),
        ),
        notes=tuple(score_notes(shown)),
    )


_SPEED = "train/tokens_per_second"


def cost_table(grid: GridResults) -> ReportTable:
    """Time and memory of each variant, and their ratio to the baseline."""
    arms: dict[tuple[str, str], list[CellResult]] = {}
    for cell in grid.finished:
        arms.setdefault((cell.group, cell.variant), []).append(cell)

    def of(cells: Iterable[CellResult], key: str) -> list[float]:
        values = (c.metrics.get(key) if key == _SPEED else c.record.get(key) for c in cells)
        numbers = (math.nan if value is None else float(value) for value in values)
        return [number for number in numbers if math.isfinite(number)]

    def spent(
        cells: Sequence[CellResult], against: Sequence[CellResult], key: str, scale: float = 1.0
    ) -> Datum:
        ours, theirs = of(cells, key), of(against, key)
        if not ours:
            return Datum(DASH, title="not recorded")
        ratio = theirs and mean(theirs) and against is not cells
        below = (f"{mean(ours) / mean(theirs):.3f} ×",) if ratio else ()
        return Datum(f"{mean(ours) * scale:,.0f}", below)

    def row(group: str, variant: str, cells: Sequence[CellResult]) -> Row:
        against = arms.get((group, cells[0].baseline or ""), [])
        return _row(
            variant,
            spent(cells, against, "parameters"),
            spent(cells, against, _SPEED),
            spent(cells, against, "peak_memory_bytes", 2.0**-20),
            spent(cells, against, "seconds"),
            f"{math.fsum(of(cells, 'seconds')) / 3600:,.2f}",
            str(len(cells)),
        )

    return ReportTable(
        name="cost",
        caption=say("captions.cost", baseline=f" {grid.baseline}" if grid.baseline else ""),
        columns=(
            NAME,
            *(Heading("parameters"), Heading("tokens per second"), Heading("peak memory", "MiB")),
            *(Heading("seconds a run"), Heading("all runs", "hours"), Heading("runs")),
        ),
        bodies=_grouped(
            ("" if group == "all" else group, row(group, variant, cells))
            for (group, variant), cells in arms.items()
        ),
    )


def metric_table(grid: GridResults, *, named: bool) -> ReportTable:
    """Means by variant and warm-up of the values that the runs report, the best variant first.

    Args:
        grid: One grid.
        named: Whether the caption has its name, as beside others.
    """
    first, *others = grid.measures
    warmups = sorted({cell.warmup or 0 for cell in grid.finished})
    judged = judged_by(grid)

    def words(measure: QualityMetric) -> str:
        return f"{measure.title}, {direction(measure.mode)}"

    def heading(where: str, variants: Mapping[str, Sequence[MetricMean]]) -> str:
        arm = next(iter(variants.values()))[0]
        return f"{where}: {words(judged[arm.group])}" if where and others else where

    def row(variant: str, arms: Sequence[MetricMean]) -> Row:
        known = {arm.warmup or 0: arm for arm in arms}
        return _row(variant, *(_mean(known.get(warmup)) for warmup in warmups))

    of = f" of {grid.name}" if named else ""
    if grid.scored and first.metric != grid.metric:
        what = f"The task's own score{of}, {'named in each part' if others else words(first)}"
    else:
        what = f"The metric of the grid file{of}, {grid.metric}: {direction(grid.mode)}"
    why = why_apart(grid)
    return ReportTable(
        name="metric",
        title=f"{grid.name}: {titled(grid)}, mean over runs [{LEVEL:.0%}]",
        caption=say("captions.metric", what=what, level=LEVEL),
        columns=(
            NAME,
            *(Heading(f"warm-up {w:,}", "own score" if others else first.metric) for w in warmups),
        ),
        bodies={
            heading(where, variants): [row(*each) for each in variants.items()]
            for where, variants in slices(grid, by_metric(grid)).items()
        },
        notes=(f"Parts of the table cannot be compared with each other: {why}",) if why else (),
    )


def _mean(arm: MetricMean | None) -> Datum:
    if arm is None or not arm.runs:
        return Datum(DASH, title="no finished run with a finite value")
    ends = "" if math.isnan(arm.low) else f"[{measured(arm.low)}, {measured(arm.high)}] "
    lacking = f", {arm.lacking} without" if arm.lacking else ""
    return Datum(measured(arm.mean), (f"{ends}n = {arm.runs}{lacking}",))


_EFFECTS_ON = {
    "octaves": "O, octaves of rate that warm-up buys",
    "need": "N, nats that warm-up saves at the best rates",
    "delta": "Δ, nats that warm-up saves",
    "rate_sensitivity": "S(0) − S(reference), nats",
    "steps_saved": "steps saved by warm-up",
}


def factor_table(grid: GridResults, found: Sequence[Effect]) -> ReportTable:
    """Main effects and interactions on each measure."""
    # Scores at single rates are in effects.csv where those over all rates say more.
    all_rates = any(math.isnan(effect.lr) for effect in found)
    shown = [effect for effect in found if math.isnan(effect.lr) or not all_rates]
    levels = "; ".join(
        f"{name}: {' to '.join(value_name(axis, value, grid.labels) for value in grid.axes[axis])}"
        for name, axis in grid.factors.items()
    )
    return ReportTable(
        name="factors",
        caption=say("captions.factors", levels=levels, times=TIMES, level=LEVEL),
        columns=(
            Heading("effect", words=True),
            *(Heading("estimate"), Heading("p"), Heading("p", "Holm"), Heading("seeds")),
        ),
        bodies=_grouped(
            (_EFFECTS_ON[measure], _effect(effect))
            for measure in MEASURES
            for effect in shown
            if effect.measure == measure
        ),
    )


def _effect(effect: Effect) -> Row:
    rest = "" if effect.group == "all" else f", {effect.group}"
    shown = Datum(DASH, title=effect.note)
    if not math.isnan(effect.estimate):
        ends = "" if math.isnan(effect.low) else interval(effect.low, effect.high)
        shown = Datum(nats(effect.estimate), tuple(filter(None, (ends, effect.note))))
    ps = (p_value(effect.p), p_value(effect.p_holm))
    return _row(f"{effect.factors}{rest}", shown, *ps, str(effect.seeds))


def comparison_table(grid: GridResults, found: Sequence[MetricDifference]) -> ReportTable:
    """A row for each comparison, a body for each axis and metric."""
    what = say("captions.own_scores") if grid.scored else "The metric of the grid file"
    return ReportTable(
        name="comparisons",
        caption=say("captions.comparisons", what=what, level=LEVEL, alpha=1 - LEVEL),
        columns=(
            *(Heading(title, words=True) for title in ("value", "at", "reads")),
            *(Heading("difference"), Heading("p", "Holm"), Heading("seeds")),
        ),
        bodies=_grouped(
            (
                f"{f'{row.grid}: ' if grid.parts else ''}{row.axis}, {row.metric} of each value "
                f"less that of {row.baseline} ({direction(row.mode)})",
                _difference(row),
            )
            for row in found
        ),
    )


def _difference(row: MetricDifference) -> Row:
    ends = "" if math.isnan(row.low) else f"[{signed(row.low)}, {signed(row.high)}]"
    estimate = DASH if math.isnan(row.estimate) else signed(row.estimate)
    return _row(
        row.value,
        Datum("" if row.where == "all" else row.where, wrap=True),
        Datum(row.reading or DASH, (row.budget,) if row.budget and row.comparable else ()),
        Datum(estimate, tuple(filter(None, (ends, row.note)))),
        p_value(row.p_holm),
        str(row.seeds),
    )


def signed(value: float) -> str:
    return measured(value).replace("-", "−")


def published_table(grid: GridResults) -> ReportTable:
    """Figures of papers beside ours, with the differences between the two."""
    frame = comparison(grid)
    wide = ("paper", "setting", "differences", "note")
    names = [str(name) for name in frame.columns]
    return ReportTable(
        name="published",
        caption=say("captions.published", settings=" ".join(our_settings(grid))),
        columns=tuple(Heading(name.replace("_", " "), words=name in wide) for name in names),
        bodies=_grouped(
            ("", tuple(Datum(_plain(name, record[name]), wrap=name in wide) for name in names))
            for record in frame.to_dict("records")
        ),
    )


def cell_table(grid: GridResults, results: "pd.DataFrame", out: Path) -> ReportTable:
    """Every finished cell, with links from a page in the folder `out`."""
    words = ("variant", "outcome", "diverged_rule")
    axes = [key for key in grid.axes if key in results and not key.startswith(BLOCK)]
    keys = ["variant", "warmup", "lr", "seed", *axes, "outcome"]
    keys += [key for key in results if "/" in key]
    if any(cell.state == "diverged" for cell in grid.finished):
        keys += ["diverged_step", "diverged_rule"]
    keys = list(dict.fromkeys([*keys, "seconds"]))
    titles = {"warmup": "warm-up", "diverged_step": "at step", "diverged_rule": "rule"}
    records = {(r["id"], r["group"]): r for r in results.to_dict("records")}

    def row(cell: CellResult) -> Row:
        record = records[cell.id, cell.group]
        values = (
            Datum(_plain(key, record[key]), bad=key == "outcome" and record["status"] != "ok")
            for key in keys
        )
        folder = quote(Path(os.path.relpath(cell.folder, out)).as_posix())
        served = run_url(tensorboard_path(cell.folder.parent.parent), cell)
        links = (
            Link(text="folder", href=f"{folder}/", label=f"folder of {cell.name}"),
            Link(
                text="curves",
                href=run_url("http://localhost:6006/", cell),
                label=f"curves of {cell.name} in TensorBoard",
                served=served,
            ),
        )
        return *values, Datum("", links=links)

    return ReportTable(
        name="cells",
        caption=say("captions.cells"),
        columns=(
            *(Heading(titles.get(key, key), words=key in words) for key in keys),
            Heading("run", words=True),
        ),
        bodies=_grouped(("", row(cell)) for cell in grid.finished),
    )


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
    """The planned cells without a result."""
    return ReportTable(
        name="missing",
        caption=say("captions.missing"),
        columns=(
            NAME,
            *(Heading(title, words=True) for title in ("run", "state", "last message")),
        ),
        bodies=_grouped(
            (
                "",
                _row(
                    cell.variant,
                    cell.name,
                    Datum(_STATES[cell.state], bad=bool(cell.error)),
                    Datum(cell.error or DASH, wrap=True),
                ),
            )
            for cell in grid.cells
            if not cell.finished and cell.state != "pruned"
        ),
    )


def task_tables(
    grid: GridResults,
    tests: Sequence[FailureTest],
    arms: Sequence[FailedRuns],
    scores: Sequence[TaskScore],
) -> list[ReportTable]:
    """The tables of a grid with published scores; none of another grid."""
    found = [test_table(tests), arm_table(arms), score_table(grid, scores)]
    return [table for table in found if table.bodies]


def test_table(tests: Sequence[FailureTest]) -> ReportTable:
    """Failed runs by variant at the two values of an axis, over all other axes."""
    several = len({test.grid for test in tests}) > 1

    def row(test: FailureTest) -> Row:
        own = (test.failed, test.runs, test.low, test.high)
        base = (test.baseline_failed, test.baseline_runs, test.baseline_low, test.baseline_high)
        difference = f"{test.difference:+.2f}".replace("-", "−")
        ps = (p_value(test.p), p_value(test.p_holm))
        return _row(test.variant, _task_share(*own), _task_share(*base), difference, *ps)

    return ReportTable(
        name="failure_tests",
        title="Failed runs over all tasks: no better than a constant answer [95% Wilson]",
        caption=say("captions.failure_tests", failed=say("captions.failed"), level=LEVEL),
        columns=(
            NAME,
            *(Heading("failed"), Heading("failed at baseline"), Heading("difference")),
            *(Heading("p"), Heading("p (Holm)")),
        ),
        bodies=_grouped(
            (
                f"{f'{test.grid}: ' if several else ''}{test.axis}: {test.value}, baseline "
                f"{test.baseline}",
                row(test),
            )
            for test in tests
        ),
    )


def arm_table(arms: Sequence[FailedRuns]) -> ReportTable:
    """Failed runs of each arm, by each definition, beside the median and the mean."""
    rates = len({arm.lr for arm in arms}) > 1

    def heading(arm: FailedRuns) -> str:
        at = f", learning rate {label(arm.lr)}" if rates and arm.lr is not None else ""
        constant = "" if math.isnan(arm.constant) else f", constant answer {measured(arm.constant)}"
        return f"{'' if arm.group == 'all' else f'{arm.group}{at}: '}{arm.metric}{constant}"

    def row(arm: FailedRuns) -> Row:
        return _row(
            arm.variant,
            DASH if arm.warmup is None else f"{arm.warmup:,}",
            _task_share(arm.failed, arm.runs, arm.low, arm.high),
            *(str(arm.one_class), str(arm.loss_at_floor), str(arm.non_finite)),
            DASH if math.isnan(arm.median) else measured(arm.median),
            _task_mean(arm.mean, arm.mean_low, arm.mean_high, arm.lacking, 1.0),
        )

    by_loss = sum(arm.by_loss for arm in arms)
    titles = ("warm-up", "failed", "one class", "loss at the floor", "non-finite", "median", "mean")
    return ReportTable(
        name="failed_runs",
        title="Failed runs of each arm [95% Wilson], median and mean over seeds",
        caption=say("captions.failed_runs", failed=say("captions.failed"), level=LEVEL),
        columns=(NAME, *map(Heading, titles)),
        bodies=_grouped((heading(arm), row(arm)) for arm in arms),
        notes=(f"{by_loss} runs without such a score were judged by their loss",) * bool(by_loss),
    )


def score_table(grid: GridResults, scores: Sequence[TaskScore]) -> ReportTable:
    """Tasks by variant: ours twice, then the published rows."""
    shown = columns(scores)
    averages = any(score.average for score in scores)

    def row(variant: str, rows: Sequence[TaskScore]) -> Row:
        known = {(row.data, row.metric): row for row in rows}
        found, *others = [*filter(None, map(_average, rows)), DASH]
        mean = (Datum(found, tuple(others[:-1])),) if averages else ()
        return _row(variant, *(_task_value(known.get(column)) for column in shown), *mean)

    notes = no_averages(grid) if scores else ""
    return ReportTable(
        name="task_scores",
        title="Tasks by variant, dev set, in percent",
        caption=say("captions.task_scores", level=LEVEL),
        columns=(
            NAME,
            *(Heading(f"{split_of(*column)[0]} {score_facts(*column).title}") for column in shown),
            *([Heading("average")] * averages),
        ),
        bodies=_grouped(
            (heading, row(variant, rows))
            for (heading, variant), rows in _task_rows(grid, scores).items()
        ),
        notes=tuple(filter(None, (notes, *_task_notes(scores)))),
    )


def _task_rows(
    grid: GridResults, scores: Sequence[TaskScore]
) -> dict[tuple[str, str], list[TaskScore]]:
    """The scores of each row, by its heading and its variant."""
    of_kind: dict[tuple[str, str], list[TaskScore]] = {}
    for score in scores:
        of_kind.setdefault((score.grid, score.kind), []).append(score)
    found: dict[tuple[str, str], list[TaskScore]] = {}
    for score in scores:
        rows = of_kind[score.grid, score.kind]
        heading = f"{score.grid}: " if len(grid.parts) > 1 else ""
        if score.kind == "mean":
            words = setting_words(rows)
            heading += f"ours, mean over {_seeds(rows)} of one setting"
            heading += f" ({words})" if words else ""
        elif score.kind == "best_median":
            heading += (
                f"ours, OPTIMISTIC: median of the best of {max(row.settings for row in rows)} "
                "settings, chosen on the dev set for each task"
            )
        else:
            heading = f"published, {score.setting}"
        found.setdefault((heading, score.variant), []).append(score)
    return found


def _seeds(rows: Iterable[TaskScore]) -> str:
    counts = sorted({row.runs + row.lacking for row in rows if not row.average})
    if counts == [1]:
        return "1 seed"
    return f"{' to '.join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))} seeds"


def _task_notes(scores: Sequence[TaskScore]) -> list[str]:
    """The notes of published rows, and the settings that were the best ones."""
    found: dict[str, list[str]] = {}
    chosen: dict[str, list[str]] = {}
    for row in scores:
        if row.note:
            found.setdefault(f"{row.setting}: {row.note}", []).append(row.variant)
        if row.kind == "best_median" and row.setting and not row.average:
            split, _ = split_of(row.data, row.metric)
            chosen.setdefault(row.setting, []).append(f"{row.variant} on {split}")
    best = [f"best setting {at}: {', '.join(dict.fromkeys(of))}" for at, of in chosen.items()]
    return [*best, *(f"{', '.join(dict.fromkeys(of))}, {note}" for note, of in found.items())]


def _task_value(row: TaskScore | None) -> Datum:
    if row is None or math.isnan(row.value):
        return Datum("diverged" if row and row.diverged else DASH)
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
    value: float, low: float, high: float, lacking: int, scale: float, digits: int = 3
) -> Datum:
    if math.isnan(value):
        return Datum(DASH)
    shown = [f"{scale * each:.{digits}f}".replace("-", "−") for each in (value, low, high)]
    text = f"{shown[0]}{f' ({lacking} without)' if lacking else ''}"
    return Datum(text) if math.isnan(low) else Datum(text, (f"[{shown[1]}, {shown[2]}]",))


def _task_share(failed: int, runs: int, low: float, high: float) -> Datum:
    return Datum(share_of(failed, runs), (share_interval(low, high),))
