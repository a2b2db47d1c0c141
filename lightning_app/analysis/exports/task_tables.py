"""Tables of tasks with published scores: failed runs, and scores by variant in the form of papers.

Each is laid out once, for the page, LaTeX and Markdown.
"""

import math
from collections.abc import Iterable, Sequence

from lightning_app.analysis.exports.tables import PaperTable
from lightning_app.analysis.failed_runs import (
    FailedRuns,
    FailureTest,
    failed_runs,
    failure_tests,
)
from lightning_app.analysis.formatting import DASH, measured, p_value, share_interval, share_of
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.statistics import LEVEL
from lightning_app.analysis.task_scores import (
    TaskScore,
    columns,
    no_averages,
    score_facts,
    setting_words,
    split_of,
    task_scores,
)
from lightning_app.grid_axes import label

FAILED = (
    "A run failed if it is non-finite, or if its score is not above that of a constant answer: "
    "Matthews and other correlations 0, else the accuracy of the most frequent class (for MRPC and "
    "QQP too, since their F1 rewards a constant answer)."
)


def task_tables(grid: GridResults, *, theirs: bool = True) -> list[PaperTable]:
    """The tables of a grid with published scores; none of another grid.

    Args:
        grid: The grid.
        theirs: Whether the scores of papers are beside ours.
    """
    arms, tests = failed_runs(grid), failure_tests(grid)
    scores = [score for score in task_scores(grid) if theirs or score.kind != "published"]
    found = []
    if tests:
        found.append(test_table(tests))
    if arms:
        found.append(arm_table(grid, arms))
    if scores:
        found.append(score_table(grid, scores))
    return found


def test_table(tests: Sequence[FailureTest]) -> PaperTable:
    """Failed runs by variant at the two values of an axis, over all other axes."""
    bodies: dict[str, list[tuple[str, ...]]] = {}
    several = len({test.grid for test in tests}) > 1
    for test in tests:
        where = f"{test.grid}: " if several else ""
        heading = f"{where}{test.axis}: {test.value}, baseline {test.baseline}"
        row = (
            test.variant,
            _share(test.failed, test.runs, test.low, test.high),
            _share(test.baseline_failed, test.baseline_runs, test.baseline_low, test.baseline_high),
            f"{test.difference:+.2f}".replace("-", "−"),
            p_value(test.p),
            p_value(test.p_holm),
        )
        bodies.setdefault(heading, []).append(row)
    return PaperTable(
        name="failure_tests",
        caption=f"Failed runs over all tasks and settings. {FAILED} In brackets: {LEVEL:.0%} "
        "Wilson intervals, as if all runs had one chance to fail; the difference weighs each task "
        "and setting, and p is exact within them (Holm: over all rows).",
        header=("variant", "failed", "failed at baseline", "difference", "p", "p (Holm)"),
        words=1,
        bodies=bodies,
        notes=(),
    )


def arm_table(grid: GridResults, arms: Sequence[FailedRuns]) -> PaperTable:
    """Failed runs of each arm, by each definition, beside the median and the mean."""
    rates = len({arm.lr for arm in arms}) > 1
    bodies: dict[str, list[tuple[str, ...]]] = {}
    for arm in arms:
        rate = f", learning rate {label(arm.lr)}" if rates and arm.lr is not None else ""
        constant = "" if math.isnan(arm.constant) else f", constant answer {measured(arm.constant)}"
        heading = f"{'' if arm.group == 'all' else f'{arm.group}{rate}: '}{arm.metric}{constant}"
        row = (
            arm.variant,
            DASH if arm.warmup is None else f"{arm.warmup:,}",
            _share(arm.failed, arm.runs, arm.low, arm.high),
            str(arm.one_class),
            str(arm.loss_at_floor),
            str(arm.non_finite),
            DASH if math.isnan(arm.median) else measured(arm.median),
            _mean(arm.mean, arm.mean_low, arm.mean_high, arm.lacking, 1.0),
        )
        bodies.setdefault(heading, []).append(row)
    by_loss = sum(arm.by_loss for arm in arms)
    notes = [f"{by_loss} runs without such a score were judged by their loss"] if by_loss else []
    return PaperTable(
        name="failed_runs",
        caption=f"Failed runs of each arm, with {LEVEL:.0%} Wilson intervals. {FAILED} Of the "
        "runs, one class: the scores are exactly those of a constant answer; loss at the floor: "
        "the loss ended within 0.05 nats of the best constant output or above (elsewhere "
        "“stalled”), which a run with right answers can do too; non-finite. Median over seeds, "
        "where a run without a finite score is the worst; mean with its t interval, none where "
        "only some runs failed.",
        header=(
            *("variant", "warm-up", "failed", "one class", "loss at the floor", "non-finite"),
            *("median", "mean"),
        ),
        words=1,
        bodies=bodies,
        notes=tuple(notes),
    )


def score_table(grid: GridResults, scores: Sequence[TaskScore]) -> PaperTable:
    """Tasks by variant: ours twice, then the published rows."""
    shown = columns(scores)
    averages = any(score.average for score in scores)
    bodies: dict[str, list[tuple[str, ...]]] = {}
    for (heading, variant), rows in _rows(grid, scores).items():
        known = {(row.data, row.metric): row for row in rows}
        cells = [_value(known.get(column)) for column in shown]
        mean = "\n".join(_average(row) for row in rows if row.average) or DASH
        bodies.setdefault(heading, []).append((variant, *cells, *([mean] if averages else [])))
    notes = [note for note in (no_averages(grid), *_notes(scores)) if note]
    return PaperTable(
        name="task_scores",
        caption="Tasks by variant, in the form of the published tables: scores of the dev set, "
        "shares in percent. The best setting was chosen on the rows that it is scored on, so its "
        "median is OPTIMISTIC; the mean over all seeds of a setting that no score has chosen is "
        f"not. In brackets: {LEVEL:.0%} t intervals over seeds, none where only some runs failed. "
        "An average has the name of its rule; averages of two names are not comparable.",
        header=("variant", *(_title(*column) for column in shown), *(["average"] * averages)),
        words=1,
        bodies=bodies,
        notes=tuple(notes),
    )


def _rows(grid: GridResults, scores: Sequence[TaskScore]) -> dict[tuple[str, str], list[TaskScore]]:
    """The scores of each row, by its heading and its variant."""
    of_kind: dict[tuple[str, str], list[TaskScore]] = {}
    for score in scores:
        of_kind.setdefault((score.grid, score.kind), []).append(score)
    found: dict[tuple[str, str], list[TaskScore]] = {}
    for score in scores:
        name = f"{score.grid}: " if len(grid.parts) > 1 else ""
        words = {
            "mean": f"{name}ours, mean over {_seeds(of_kind[score.grid, 'mean'])} of one setting"
            f"{_said(of_kind[score.grid, 'mean'])}"
            if score.kind == "mean"
            else "",
            "best_median": f"{name}ours, OPTIMISTIC: median of the best of "
            f"{max(row.settings for row in of_kind[score.grid, score.kind])} settings, chosen on "
            "the dev set for each task",
            "published": f"published, {score.setting}",
        }
        found.setdefault((words[score.kind], score.variant), []).append(score)
    return found


def _seeds(rows: Iterable[TaskScore]) -> str:
    counts = sorted({row.runs + row.lacking for row in rows if not row.average})
    if counts == [1]:
        return "1 seed"
    return f"{' to '.join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))} seeds"


def _said(rows: Sequence[TaskScore]) -> str:
    words = setting_words(rows)
    return f" ({words})" if words else ""


def _notes(scores: Sequence[TaskScore]) -> list[str]:
    """The notes of published rows, and the settings that were the best ones."""
    found: dict[str, list[str]] = {}
    for row in scores:
        if row.note:
            found.setdefault(f"{row.setting}: {row.note}", []).append(row.variant)
    chosen: dict[str, list[str]] = {}
    for row in scores:
        if row.kind == "best_median" and row.setting and not row.average:
            split, _ = split_of(row.data, row.metric)
            chosen.setdefault(row.setting, []).append(f"{row.variant} on {split}")
    best = [f"best setting {at}: {', '.join(dict.fromkeys(of))}" for at, of in chosen.items()]
    return [*best, *(f"{', '.join(dict.fromkeys(of))}, {note}" for note, of in found.items())]


def _title(corpus: str, metric: str) -> str:
    split, _ = split_of(corpus, metric)
    return f"{split} {score_facts(corpus, metric).title}"


def _value(row: TaskScore | None) -> str:
    if row is None or math.isnan(row.value):
        return "diverged" if row and row.diverged else DASH
    scale = score_facts(row.data, row.metric).scale
    lacking = row.lacking if row.kind == "mean" else 0
    return _mean(row.value, row.low, row.high, lacking, scale, digits=2)


def _average(row: TaskScore) -> str:
    without = f", {row.lacking} without" if row.kind == "mean" and row.lacking else ""
    return f"{100 * row.value:.2f} ({row.average}{without})"


def _mean(
    value: float, low: float, high: float, lacking: int, scale: float, digits: int = 3
) -> str:
    if math.isnan(value):
        return DASH
    shown = [f"{scale * each:.{digits}f}".replace("-", "−") for each in (value, low, high)]
    ends = "" if math.isnan(low) else f"\n[{shown[1]}, {shown[2]}]"
    return f"{shown[0]}{f' ({lacking} without)' if lacking else ''}{ends}"


def _share(failed: int, runs: int, low: float, high: float) -> str:
    return f"{share_of(failed, runs)}\n{share_interval(low, high)}"
