"""Scores of tasks over seeds, BLEU among them, and failed runs.

A run *failed* if it is non-finite, or if its score is not above that of a constant answer (Mosbach
et al. 2021, 2006.04884): Matthews correlation 0, the accuracy of the most frequent class,
correlation 0. Where F1 is the own score, accuracy decides, since F1 rewards a constant answer.

Two narrower kinds are counted too. *One class*: the scores are exactly those of a
constant answer. *Loss at the floor*: the outcome `stalled`, where the loss ends within 0.05 nats of
the best constant output or above. The loss does not decide what failed, since it errs both ways: a
run that overfits has a high loss and right answers, and a score of 60 % on a task of two classes
can go with a loss within 0.05 nats of the floor.

Two summaries of our runs are side by side. The *mean* is over all seeds of one setting that no
score has chosen: the reference warm-up, and for every other axis the value of the base config, or
else its first one. The *best median* is what papers report (RoBERTa, RealFormer): for each task the
setting with the best median over seeds. It was chosen on the rows that it is scored on, so that it
is optimistic.

The cost of no warm-up in BLEU is over seeds and over test sentences, since one interval cannot
answer both questions. Over seeds: Student's t interval of the differences, seed by seed. Over
sentences, for each seed: sacreBLEU's paired approximate randomisation of the two stored
translations of the test set.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from lightning_app.config.rulers import EVALUATION
from lightning_app.config.tree import CORPUS, SEED, WARMUP, key_of, lookup, value_name
from lightning_app.report.pairs import Score
from lightning_app.report.results import ARM, CellResult, GridResults, as_number, grouped, unlike
from lightning_app.report.statistics import (
    FEW_SEEDS,
    bleu_difference,
    ended_alike,
    failures_p,
    holm_values,
    mean,
    of_seeds,
    seeds_interval,
    seeds_p,
    widened,
    widened_p,
    wilson_interval,
)
from lightning_app.scores.task_facts import (
    GLUE_AVERAGES,
    GLUE_CORPORA,
    GLUE_TASKS,
    TASKS,
    QualityMetric,
    glue_average,
    glue_task_of,
)

ACCURACY, MAJORITY = "val/accuracy", "val/majority_accuracy"
CONSTANT: Mapping[str, str | float] = {"val/matthews": 0.0, ACCURACY: MAJORITY, "val/pearson": 0.0}
"""The score of a constant answer, or the metric that holds it; the first score that a task has
decides whether a run failed."""

NEAR = 1e-6
"""How far numbers may be apart that are equal: results have scores in single precision."""


@dataclass(frozen=True, kw_only=True)
class FailedRuns:
    """One arm: `failed` of its `runs` with Wilson's interval, and its score over seeds.

    `non_finite`, `one_class` and `loss_at_floor` count runs by the descriptions above, `by_loss`
    those judged by the loss because their results lack the score. `constant` is
    the score of a constant answer. In the median a run without a finite score is the worst one; the
    mean and its t interval leave out such runs, of which there are `lacking`. The median is NaN
    if it falls on such a run. There is no interval if some runs failed and others did not.
    """

    grid: str
    group: str
    lr: float | None
    variant: str
    warmup: int | None
    runs: int
    failed: int
    low: float
    high: float
    non_finite: int
    one_class: int
    loss_at_floor: int
    by_loss: int
    metric: str
    mode: str
    constant: float
    median: float
    mean: float
    mean_low: float
    mean_high: float
    lacking: int


@dataclass(frozen=True, kw_only=True)
class FailureTest:
    """Failed runs of one variant at a `value` of an axis and at the `baseline` of the axis.

    Over all other axes, the `strata` that have runs at both: `difference` is that of the shares,
    and `p` permutes whole seeds that have a run in each of them (`statistics.failures_p`),
    corrected by Holm over all tests with a failed run.
    """

    grid: str
    axis: str
    value: str
    baseline: str
    variant: str
    failed: int
    runs: int
    low: float
    high: float
    baseline_failed: int
    baseline_runs: int
    baseline_low: float
    baseline_high: float
    difference: float
    p: float
    p_holm: float = math.nan
    strata: int = 0


def failed(cell: CellResult) -> bool:
    """Whether a finished run failed: by its score, or by its loss where there is no such score."""
    above = above_constant(cell)
    return cell.failed if above is None else not above


def above_constant(cell: CellResult) -> bool | None:
    """Whether the score of a run is above that of a constant answer.

    False for a non-finite run; None for a task without published scores, and where the result lacks
    the score.
    """
    if not cell.scores:
        return None
    if cell.outcome == "non_finite":
        return False
    own = {score.metric: score for score in cell.scores}
    decides = next((own[metric] for metric in CONSTANT if metric in own), None)
    if decides is None:
        return None
    score, constant = as_number(cell.metrics.get(decides.metric)), constant_score(cell, decides)
    if math.isnan(score) or math.isnan(constant):
        return None
    return score > constant and not math.isclose(score, constant, rel_tol=1e-9, abs_tol=1e-12)


def one_class(cell: CellResult) -> bool:
    """Whether the scores of a run are exactly those of a constant answer.

    Where accuracy is the only score of the task, other answers can match it by chance.
    """
    values = {name: cell.metrics.get(f"val/{name}") for name in ("matthews", "f1", "pearson")}
    task = GLUE_TASKS.get(glue_task_of(cell.corpus or "") or "")
    if task is None or not cell.scores:
        return False
    if task.classes is None:
        return values["pearson"] == 0.0
    accuracy, majority = cell.metrics.get(ACCURACY), cell.metrics.get(MAJORITY)
    if accuracy is None or majority is None:
        return False
    shares = (majority, 1.0 - majority) if task.classes == 2 else (majority,)
    if not any(math.isclose(accuracy, share, abs_tol=NEAR) for share in shares):
        return False
    if values["matthews"] is not None and values["matthews"] != 0.0:
        return False
    always = 2 * accuracy / (1 + accuracy)  # F1 if every answer is 1, which accuracy says how often
    f1 = values["f1"]
    return f1 is None or f1 == 0.0 or math.isclose(f1, always, abs_tol=NEAR)


def constant_score(cell: CellResult, measure: QualityMetric) -> float:
    """What a constant answer gets by the measure; NaN if it is not known, as for F1."""
    floor = CONSTANT.get(measure.metric)
    score = cell.metrics.get(floor) if isinstance(floor, str) else floor
    return math.nan if score is None or not cell.scores else float(score)


class OverSeeds(NamedTuple):
    """The mean of a metric over the `runs` that have a finite value, and its t interval.

    There is no interval if some of them failed and others did not; `lacking` runs have no value.
    """

    mean: float
    low: float
    high: float
    runs: int
    lacking: int


def over_seeds(cells: Sequence[CellResult], metric: str) -> OverSeeds:
    """A metric of some finished runs, as they report it.

    The mean is that of runs with a finite value; there is no interval where others failed.
    """
    finite = [cell for cell in cells if cell.metrics.get(metric) is not None]
    values = [float(cell.metrics[metric] or 0.0) for cell in finite]
    low, high, _ = seeds_interval(values, list(map(failed, cells)))
    centre = mean(values) if values else math.nan
    return OverSeeds(centre, low, high, len(finite), len(cells) - len(finite))


def failed_runs(grid: GridResults) -> list[FailedRuns]:
    """Every arm of a task with published scores, in the order of the plan."""
    return [_arm(grid, cells) for cells in grouped(grid.scored, ARM).values()]


def _arm(grid: GridResults, cells: Sequence[CellResult]) -> FailedRuns:
    first, measure = cells[0], grid.measure(cells[0])
    flags = list(map(failed, cells))
    summary = over_seeds(cells, measure.metric)
    low, high = wilson_interval(sum(flags), len(flags))
    return FailedRuns(
        grid=grid.name,
        group=first.group,
        lr=first.lr,
        variant=first.variant,
        warmup=first.warmup,
        runs=len(cells),
        failed=sum(flags),
        low=low,
        high=high,
        non_finite=sum(cell.outcome == "non_finite" for cell in cells),
        one_class=sum(map(one_class, cells)),
        loss_at_floor=sum(cell.outcome == "stalled" for cell in cells),
        by_loss=sum(above_constant(cell) is None for cell in cells),
        metric=measure.metric,
        mode=measure.mode,
        constant=constant_score(first, measure),
        median=median_score(cells, measure),
        mean=summary.mean,
        mean_low=summary.low,
        mean_high=summary.high,
        lacking=summary.lacking,
    )


def median_score(cells: Iterable[CellResult], measure: QualityMetric) -> float:
    """The median over runs, those without a finite score the worst; NaN if it is one of them."""
    worst = -math.inf if measure.mode == "max" else math.inf
    values = (cell.metrics.get(measure.metric) for cell in cells)
    middle = median(worst if value is None else float(value) for value in values)
    return middle if math.isfinite(middle) else math.nan


def failure_tests(grid: GridResults) -> list[FailureTest]:
    """Each value of the warm-up, and of the axes of `compare:`, against its baseline, by variant.

    Axes of the block are left out, since their values are the variants, and so are axes that change
    only the evaluation.
    """
    if not grid.scored or grid.pruner is not None:
        return []
    axes = {WARMUP: 0} if grid.varies(WARMUP) and 0 in grid.warmups else {}
    others = (axis for axis in grid.compare if not axis.startswith(grid.wiring))
    axes |= {axis: grid.compare[axis] for axis in others if axis not in EVALUATION}
    found = [row for axis, base in axes.items() for row in _tests(grid, axis, base)]
    tests = [replace(row, p=widened_p(row.p, grid.alpha)) for row in found]
    corrected = holm_values([row.p for row in tests]).tolist()
    return [replace(row, p_holm=p) for row, p in zip(tests, corrected, strict=True)]


def _tests(grid: GridResults, axis: str, base: Any) -> list[FailureTest]:
    runs: dict[tuple[Any, ...], dict[Any, list[CellResult]]] = {}
    for cell in grid.scored:
        others = ((k, key_of(v)) for k, v in grid.apart_from(axis, cell.axes).items())
        at = runs.setdefault((cell.variant, *others), {})
        at.setdefault(key_of(cell.axes[axis]), []).append(cell)
    variants = dict.fromkeys(cell.variant for cell in grid.scored)
    tests = []
    for value in grid.axes[axis]:
        if key_of(value) == key_of(base):
            continue
        for name in variants:
            pairs = [
                (at[key_of(value)], at[key_of(base)])
                for (variant, *_), at in runs.items()
                if variant == name and key_of(value) in at and key_of(base) in at
            ]
            if pairs:
                names = [value_name(axis, each, grid.labels) for each in (value, base)]
                tests.append(_test(grid, axis, names, name, pairs))
    return tests


def _failed_by_seed(strata: Sequence[Sequence[CellResult]]) -> list[int]:
    seeds = set.intersection(*({cell.seed for cell in cells} for cells in strata))
    every = [cell for cells in strata for cell in cells]
    return [sum(failed(cell) for cell in every if cell.seed == seed) for seed in seeds]


def _test(
    grid: GridResults,
    axis: str,
    names: Sequence[str],
    variant: str,
    pairs: Sequence[tuple[list[CellResult], list[CellResult]]],
) -> FailureTest:
    sides = [*zip(*pairs, strict=True)]
    (of, runs), (base_of, base_runs) = (
        (sum(map(failed, cells)), len(cells))
        for cells in ([cell for cells in side for cell in cells] for side in sides)
    )
    low, high = wilson_interval(of, runs)
    base_low, base_high = wilson_interval(base_of, base_runs)
    own, other = map(_failed_by_seed, sides)
    return FailureTest(
        grid=grid.name,
        axis=axis,
        value=names[0],
        baseline=names[1],
        variant=variant,
        failed=of,
        runs=runs,
        low=low,
        high=high,
        baseline_failed=base_of,
        baseline_runs=base_runs,
        baseline_low=base_low,
        baseline_high=base_high,
        difference=of / runs - base_of / base_runs,
        p=failures_p(own, other, len(pairs), len(grid.seeds)) if of + base_of else math.nan,
        strata=len(pairs),
    )


AVERAGE = "average/"
"""The beginning of the metric of an average over tasks, followed by its name."""

Kind = Literal["mean", "best_median"]
Setting = tuple[tuple[str, Any], ...]  # values of axes, by `key_of`


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """The score of one variant on one task: `mean` or `best_median`.

    `data` is the corpus, empty for an average over tasks. `value` is in the unit of the results,
    NaN without one. `low` and `high` are the t interval of
    a mean. `runs` are those with a finite score, `lacking` those without; in a median
    these are the worst ones. `setting` names the values of the axes;
    `settings` is the number of those that the best was chosen from.
    """

    grid: str
    kind: Kind
    variant: str
    data: str
    metric: str
    value: float
    low: float = math.nan
    high: float = math.nan
    runs: int = 0
    lacking: int = 0
    setting: str = ""
    settings: int = 1

    @property
    def average(self) -> str:
        """The name of the average, empty for the score of one task."""
        return self.metric.removeprefix(AVERAGE) if self.metric.startswith(AVERAGE) else ""


def task_scores(grid: GridResults) -> list[TaskScore]:
    """The scores by variant; empty for tasks without published scores."""
    if not grid.scored or grid.pruner is not None:
        return []
    scores: list[TaskScore] = []
    for kind in ("mean", "best_median"):
        for variant in grid.variants:
            own = (cell for cell in grid.scored if cell.variant == variant)
            tasks = grouped(own, lambda cell: cell.corpus).values()
            rows = [row for cells in tasks for row in _of(grid, kind, cells)]
            scores += [*rows, *_averages(grid, kind, variant, rows)]
    return scores


def _of(grid: GridResults, kind: Kind, cells: Sequence[CellResult]) -> list[TaskScore]:
    """The scores of one variant on one task; none where the fixed setting has no finished run."""
    by_setting = grouped(cells, lambda cell: _setting(grid, cell))
    chosen, among = _fixed(grid, cells), len(by_setting)
    if kind == "best_median":
        alike = _of_one_ruler(by_setting, chosen)
        most = max(map(len, alike.values()))
        whole = {setting: runs for setting, runs in alike.items() if len(runs) == most}
        chosen, among = _best(whole), len(whole)
    runs = by_setting.get(chosen, []) if chosen is not None else []
    return [_score(grid, kind, runs, score, among) for score in cells[0].scores if runs]


def _setting(grid: GridResults, cell: CellResult) -> Setting:
    return tuple((axis, key_of(cell.axes[axis])) for axis in _setting_axes(grid))


def _setting_axes(grid: GridResults) -> list[str]:
    others = (CORPUS, SEED)
    return [axis for axis in grid.axes if axis not in others and not axis.startswith(grid.wiring)]


def _fixed(grid: GridResults, cells: Sequence[CellResult]) -> Setting | None:
    """The reference warm-up, and the base config's value of each other axis, else the first.

    Of the values that all variants have for the task, since results may have chosen others, as a
    search does; None without such a value. One that follows from another axis is the variant's.
    """
    alike = (cell for cell in grid.cells if cell.corpus == cells[0].corpus)
    arms = grouped(alike, lambda cell: cell.variant)
    own = arms[cells[0].variant]
    chosen: list[tuple[str, Any]] = []
    for axis in _setting_axes(grid):
        compared = [own] if axis in grid.linked else arms.values()
        common = set.intersection(*({key_of(cell.axes[axis]) for cell in arm} for arm in compared))
        wanted = [grid.reference_warmup] if axis == WARMUP else []
        wanted += [lookup(grid.config, axis), *grid.axes[axis]]
        found = next((key_of(value) for value in wanted if key_of(value) in common), None)
        if found is None:
            return None
        chosen.append((axis, found))
    return tuple(chosen)


def _of_one_ruler(
    by_setting: Mapping[Setting, list[CellResult]], chosen: Setting | None
) -> dict[Setting, list[CellResult]]:
    """The settings whose own score counts what that of the `chosen` one does, or of the first."""
    usual = (None if chosen is None else by_setting.get(chosen)) or next(iter(by_setting.values()))
    metric = usual[0].scores[0].metric
    return {
        setting: cells
        for setting, cells in by_setting.items()
        if not unlike([usual[0], cells[0]], metric)
    }


def _best(by_setting: Mapping[Setting, Sequence[CellResult]]) -> Setting:
    """The setting with the best median."""

    def rank(setting: Setting) -> float:
        cells = by_setting[setting]
        measure = cells[0].scores[0]
        score = median_score(cells, measure)
        worth = score if measure.mode == "max" else -score
        return -math.inf if math.isnan(score) else worth

    return max(by_setting, key=rank)


def _score(
    grid: GridResults, kind: Kind, cells: Sequence[CellResult], score: QualityMetric, settings: int
) -> TaskScore:
    summary = over_seeds(cells, score.metric)
    if kind != "mean":
        summary = summary._replace(mean=median_score(cells, score), low=math.nan, high=math.nan)
    return TaskScore(
        grid=grid.name,
        kind=kind,
        variant=cells[0].variant,
        data=cells[0].corpus or "",
        metric=score.metric,
        value=summary.mean,
        low=summary.low,
        high=summary.high,
        runs=summary.runs,
        lacking=summary.lacking,
        setting=", ".join(
            f"{axis.rpartition('.')[2]} {value_name(axis, cells[0].axes[axis], grid.labels)}"
            for axis in _setting_axes(grid)
            if grid.varies(axis)
        ),
        settings=1 if kind == "mean" else settings,
    )


def _averages(
    grid: GridResults, kind: Kind, variant: str, rows: Sequence[TaskScore]
) -> list[TaskScore]:
    """Each average of GLUE whose scores are all there and finite.

    It lacks the runs that its scores lack. A grid may have tasks other than those of GLUE.
    """
    rows = [row for row in rows if glue_task_of(row.data)]
    by_split: dict[str, dict[str, float]] = {}
    for row in rows:
        if not math.isnan(row.value):
            split, name = split_of(row.data, row.metric)
            by_split.setdefault(split, {})[name] = row.value
    return [
        TaskScore(
            grid=grid.name,
            kind=kind,
            variant=variant,
            data="",
            metric=f"{AVERAGE}{name}",
            value=glue_average(name, by_split),
            runs=min(row.runs for row in rows),
            lacking=sum({row.data: row.lacking for row in rows}.values()),
        )
        for name in GLUE_AVERAGES
        if not _lacking(name, by_split)
    ]


def split_of(corpus: str, metric: str) -> tuple[str, str]:
    """The evaluation set of GLUE and the name of the score: `MNLI-mm`, `accuracy`.

    For a corpus of another kind its own name.
    """
    stage, _, name = metric.partition("/")
    task = GLUE_TASKS.get(glue_task_of(corpus) or "")
    if task is None:
        return corpus, name
    return task.splits[stage == "test" and len(task.splits) > 1], name


def _lacking(name: str, by_split: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The sets of an average without one of its scores."""
    parts = (part for item in GLUE_AVERAGES[name] for part in item)
    return list(dict.fromkeys(s for s, metric in parts if metric not in by_split.get(s, {})))


def no_averages(grid: GridResults) -> str:
    """Which tasks each average of GLUE lacks; empty if there is an average, or no task of GLUE.

    A mean over fewer tasks would be a different number.
    """
    rows = [row for row in task_scores(grid) if row.kind == "mean"]
    if not any(row.data in GLUE_CORPORA for row in rows) or any(row.average for row in rows):
        return ""
    by_split: dict[str, dict[str, float]] = {}
    for row in rows:
        split, name = split_of(row.data, row.metric)
        by_split.setdefault(split, {})[name] = row.value
    lacks = [
        f"{name} lacks {', '.join(_lacking(name, by_split)) or 'a variant'}"
        for name in GLUE_AVERAGES
    ]
    why = "since a mean over fewer tasks is a different number"
    return f"No average of ours, {why}: {'; '.join(lacks)}."


def score_facts(corpus: str, metric: str) -> QualityMetric:
    """Title, unit and scale of a score of a corpus."""
    for facts in TASKS.values():
        for score in facts.by_corpus.get(corpus, ()):
            if score.metric == metric:
                return score
    return QualityMetric(metric, metric, "")


def columns(rows: Iterable[TaskScore]) -> list[tuple[str, str]]:
    """The (corpus, metric) pairs of the rows, in the order of the tasks."""
    order = [
        (corpus, score.metric)
        for facts in TASKS.values()
        for corpus, scores in facts.by_corpus.items()
        for score in scores
    ]
    pairs = dict.fromkeys((row.data, row.metric) for row in rows if not row.average and row.data)
    return sorted(pairs, key=lambda each: order.index(each) if each in order else len(order))


BLEU = "test/bleu"
TRIALS = 1_000  # of one test: the smallest p value is 1 / 1,001
MOST_TESTS = 24  # of one report: each reads two test sets and takes a second or two


def bleu_scores(grid: GridResults) -> list[Score]:
    """`bleu`: `mean_s [BLEU(ref, s) - BLEU(0, s)]`, the gain of warm-up, on the 0-100 scale.

    A row for each group, rate and variant with seeds that have a test BLEU at both warm-ups. The
    t interval is over seeds; it is undefined for one seed, or if only some of the seeds failed. The
    note has the p values over sentences, for the first `MOST_TESTS` pairs of the grid whose
    translations are stored.
    """
    reference = grid.reference_warmup
    if not reference or grid.pruner is not None:
        return []
    arms: dict[tuple[str, float, str], dict[tuple[int, int], CellResult]] = {}
    for cell in grid.finished:
        if cell.metrics.get(BLEU) is not None:
            arm = arms.setdefault((cell.group, cell.lr or 0.0, cell.variant), {})
            arm[cell.warmup or 0, cell.seed or 0] = cell
    left, found = MOST_TESTS, []
    for (group, lr, variant), arm in arms.items():
        seeds = [seed for warmup, seed in arm if warmup == 0 and (reference, seed) in arm]
        pairs = [(arm[reference, seed], arm[0, seed]) for seed in sorted(seeds)]
        if pairs:
            tested = [_over_sentences(*pair) for pair in pairs[:left]]
            left -= len([p for p in tested if p is not None])
            where = {"group": group, "lr": lr, "variant": variant}
            row = Score(score="bleu", **where, **_bleu_over_seeds(pairs, tested))
            found.append(replace(widened(row, grid.alpha), values=()))
    return found


def _bleu_over_seeds(
    pairs: Sequence[tuple[CellResult, CellResult]], tested: Sequence[float | None]
) -> dict[str, Any]:
    changes = [as_number(one.metrics[BLEU]) - as_number(two.metrics[BLEU]) for one, two in pairs]
    failed = [[cell.failed for cell in arm] for arm in zip(*pairs, strict=True)]
    mixed = not all(ended_alike(arm) for arm in failed)
    seeds = [cells[0].seed or 0 for cells in pairs]
    found = of_seeds(dict(zip(seeds, changes, strict=True)), sure=not mixed, decides=False)
    each, few = found["values"], len(pairs) < FEW_SEEDS or mixed
    notes = ["stalls are mixed, so no interval over seeds"] if mixed else []
    shown = [
        f"{cells[0].seed}: {value:.3f}"
        for cells, value in zip(pairs, tested, strict=False)
        if value is not None
    ]
    if shown:
        notes.append(f"p over sentences, by seed {', '.join(shown)}")
    counts = {"cells": 2 * len(pairs), "diverged": sum(map(sum, failed))}
    p = math.nan if mixed else seeds_p(changes)
    return found | counts | {"p": p, "note": "; ".join(notes), "each": each if few else ()}


_TOKENIZERS = ("none", "13a", "zh", "char")
"""Those of `tasks.translation.bleu` that need no MeCab, whose signature is no name of one."""


def _over_sentences(first: CellResult, second: CellResult) -> float | None:
    """The p value of the paired test, None without the files or the tokenizer that it needs."""
    signatures = [_signature(cell) for cell in (first, second)]
    if signatures[0] != signatures[1] or signatures[0].get("tok") not in _TOKENIZERS:
        return None
    lines = [
        [_lines(cell.run.file(f"{name}.txt")) for name in ("hypotheses", "references")]
        for cell in (first, second)
    ]
    (ours, references), (theirs, others) = lines
    if not references or references != others or not len(ours) == len(theirs) == len(references):
        return None
    how = {"tokenize": signatures[0]["tok"], "lowercase": signatures[0].get("case") == "lc"}
    return bleu_difference(ours, theirs, references, trials=TRIALS, **how).p


def _signature(cell: CellResult) -> dict[str, str]:
    """`nrefs:1|case:lc|tok:none` as a mapping."""
    parts = str(cell.record.get("bleu_signature") or "").split("|")
    return dict(part.split(":", 1) for part in parts if ":" in part)


def _lines(path: Path | None) -> list[str]:
    return [] if path is None else path.read_text(encoding="utf-8").split("\n")[:-1]
