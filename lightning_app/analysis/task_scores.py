"""Scores of tasks by variant, as papers print them: of one setting, of the best one, and theirs.

Two summaries of our runs are side by side. The *mean* is over all seeds of one setting that no
score has chosen: the reference warm-up, and for every other axis the value of the base config, or
else its first one. The *best median* is what papers report (RoBERTa, RealFormer): for each task the
setting with the best median over seeds. It was chosen on the rows that it is scored on, so that it
is optimistic.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning_app.analysis.exports.bibliography import bibliography
from lightning_app.analysis.failed_runs import failed, median_score
from lightning_app.analysis.grid_results import CellResult, GridResults, unlike
from lightning_app.analysis.statistics import mean, seeds_interval
from lightning_app.grid_axes import (
    BLOCK,
    CORPUS,
    SEED,
    WARMUP,
    key_of,
    lookup,
    value_name,
)
from lightning_app.scores.glue import GLUE_AVERAGES, GLUE_TASKS, glue_average
from lightning_app.task_facts import GLUE_CORPORA, TASKS, QualityMetric, glue_task_of

if TYPE_CHECKING:
    import pandas as pd

AVERAGE = "average/"
"""The beginning of the metric of an average over tasks, followed by its name."""

Kind = Literal["mean", "best_median", "published"]
Setting = tuple[tuple[str, Any], ...]  # values of axes, by `key_of`


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """The score of one variant on one task: ours (`mean`, `best_median`) or `published`.

    `data` is the corpus, empty for an average over tasks. `value` is in the unit of the results,
    NaN without one, as for a published run that `diverged`. `low` and `high` are the t interval of
    a mean. `runs` are those with a finite score, `lacking` those without; in a median
    these are the worst ones. `setting` names the values of the axes, or the setting of a paper;
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
    diverged: bool = False
    note: str = ""

    @property
    def average(self) -> str:
        """The name of the average, empty for the score of one task."""
        return self.metric.removeprefix(AVERAGE) if self.metric.startswith(AVERAGE) else ""


def task_scores(grid: GridResults) -> list[TaskScore]:
    """Ours by variant, then the published ones; nothing for a task without published scores."""
    found: list[TaskScore] = []
    for part in grid.parts or (grid,):
        if not part.scored or part.pruner is not None:
            continue
        for kind in ("mean", "best_median"):
            for variant in part.variants:
                rows = [row for cells in _tasks(part, variant) for row in _of(part, kind, cells)]
                found += [*rows, *_averages(part, kind, variant, rows)]
        found += [_published(part, figure) for figure in part.published]
    return found


def _tasks(grid: GridResults, variant: str) -> list[list[CellResult]]:
    """The finished runs of a variant, by corpus."""
    found: dict[str, list[CellResult]] = {}
    for cell in grid.scored:
        if cell.variant == variant:
            found.setdefault(cell.corpus or "", []).append(cell)
    return list(found.values())


def _of(grid: GridResults, kind: Kind, cells: Sequence[CellResult]) -> list[TaskScore]:
    """The scores of one variant on one task; none where the fixed setting has no finished run."""
    by_setting: dict[Setting, list[CellResult]] = {}
    for cell in cells:
        by_setting.setdefault(_setting(grid, cell), []).append(cell)
    chosen = _fixed(grid, cells)
    if kind == "best_median":
        chosen = _best(_of_one_ruler(by_setting, chosen))
    runs = by_setting.get(chosen, [])
    return [_score(grid, kind, runs, score, len(by_setting)) for score in cells[0].scores if runs]


def _setting(grid: GridResults, cell: CellResult) -> Setting:
    return tuple((axis, key_of(cell.axes[axis])) for axis in _setting_axes(grid))


def _setting_axes(grid: GridResults) -> list[str]:
    others = (CORPUS, SEED)
    return [axis for axis in grid.axes if axis not in others and not axis.startswith(BLOCK)]


def _fixed(grid: GridResults, cells: Sequence[CellResult]) -> Setting:
    """The reference warm-up, and the base config's value of each other axis, else the first."""
    planned = [cell for cell in grid.cells if _same_arm(cell, cells[0])]
    chosen: list[tuple[str, Any]] = []
    for axis in _setting_axes(grid):
        known = {key_of(cell.axes[axis]) for cell in planned}
        wanted = [grid.reference_warmup] if axis == WARMUP else []
        wanted += [lookup(grid.config, axis), *grid.axes[axis]]
        chosen.append((axis, next(key_of(value) for value in wanted if key_of(value) in known)))
    return tuple(chosen)


def _same_arm(cell: CellResult, other: CellResult) -> bool:
    return (cell.variant, cell.corpus) == (other.variant, other.corpus)


def _of_one_ruler(
    by_setting: Mapping[Setting, list[CellResult]], chosen: Setting
) -> dict[Setting, list[CellResult]]:
    """The settings whose own score counts what that of the `chosen` one does, or of the first."""
    usual = by_setting.get(chosen) or next(iter(by_setting.values()))
    metric = usual[0].scores[0].metric
    return {
        setting: cells
        for setting, cells in by_setting.items()
        if not unlike([usual[0], cells[0]], metric)
    }


def _best(by_setting: Mapping[Setting, Sequence[CellResult]]) -> Setting:
    """The setting with the best median, of those with the most finished runs."""
    most = max(map(len, by_setting.values()))

    def rank(setting: Setting) -> float:
        cells = by_setting[setting]
        measure = cells[0].scores[0]
        found = median_score(cells, measure)
        worth = found if measure.mode == "max" else -found
        return -math.inf if math.isnan(found) or len(cells) < most else worth

    return max(by_setting, key=rank)


def _score(
    grid: GridResults, kind: Kind, cells: Sequence[CellResult], score: QualityMetric, settings: int
) -> TaskScore:
    known = [cell for cell in cells if cell.metrics.get(score.metric) is not None]
    values = [float(cell.metrics[score.metric] or 0.0) for cell in known]
    low, high, value = math.nan, math.nan, median_score(cells, score)
    if kind == "mean":
        low, high, _ = seeds_interval(values, list(map(failed, known)))
        value = mean(values) if values else math.nan
    return TaskScore(
        grid=grid.name,
        kind=kind,
        variant=cells[0].variant,
        data=cells[0].corpus or "",
        metric=score.metric,
        value=value,
        low=low,
        high=high,
        runs=len(known),
        lacking=len(cells) - len(known),
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
    """Each average of GLUE of which every score is there and finite.

    It lacks the runs that its scores lack. A grid may have other tasks beside those of GLUE.
    """
    rows = [row for row in rows if glue_task_of(row.data)]
    known: dict[str, dict[str, float]] = {}
    for row in rows:
        if not math.isnan(row.value):
            split, name = split_of(row.data, row.metric)
            known.setdefault(split, {})[name] = row.value
    return [
        TaskScore(
            grid=grid.name,
            kind=kind,
            variant=variant,
            data="",
            metric=f"{AVERAGE}{name}",
            value=glue_average(name, known),
            runs=min(row.runs for row in rows),
            lacking=sum({row.data: row.lacking for row in rows}.values()),
        )
        for name in GLUE_AVERAGES
        if not _lacking(name, known)
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


def _lacking(name: str, known: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The sets of an average without one of its scores."""
    parts = (part for item in GLUE_AVERAGES[name] for part in item)
    return list(dict.fromkeys(s for s, metric in parts if metric not in known.get(s, {})))


def no_averages(grid: GridResults) -> str:
    """Which tasks every average of GLUE lacks here; empty where there is one, or no task of GLUE.

    A mean over fewer tasks would be another number.
    """
    rows = [row for row in task_scores(grid) if row.kind == "mean"]
    if not any(row.data in GLUE_CORPORA for row in rows) or any(row.average for row in rows):
        return ""
    known: dict[str, dict[str, float]] = {}
    for row in rows:
        split, name = split_of(row.data, row.metric)
        known.setdefault(split, {})[name] = row.value
    lacks = [
        f"{name} lacks {', '.join(_lacking(name, known)) or 'a variant'}" for name in GLUE_AVERAGES
    ]
    return (
        f"No average of ours, since a mean over fewer tasks is another number: {'; '.join(lacks)}."
    )


def _published(grid: GridResults, figure: Mapping[str, Any]) -> TaskScore:
    entry = bibliography().get(figure["paper"])
    value = figure["value"]
    paper = figure["paper"] if entry is None else entry.short
    return TaskScore(
        grid=grid.name,
        kind="published",
        variant=figure["variant"],
        data=figure.get("data") or _only_corpus(grid, figure),
        metric=figure["metric"],
        value=math.nan if value == "diverged" else float(value),
        setting=f"{paper}: {figure['setting']}",
        diverged=value == "diverged",
        note=figure.get("note") or "",
    )


def _only_corpus(grid: GridResults, figure: Mapping[str, Any]) -> str:
    """The corpus of a figure that names none: that of a grid with one; an average has none."""
    known = {cell.corpus for cell in grid.cells}
    if figure["metric"].startswith(AVERAGE) or len(known) != 1:
        return ""
    return str(*known)


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
    known = dict.fromkeys((row.data, row.metric) for row in rows if not row.average and row.data)
    return sorted(known, key=lambda each: order.index(each) if each in order else len(order))


def scores_table(rows: Sequence[TaskScore]) -> "pd.DataFrame":
    """The scores as a table."""
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in rows])


def setting_words(rows: Sequence[TaskScore]) -> str:
    """The settings of some rows, each once."""
    return "; ".join(dict.fromkeys(row.setting for row in rows if row.setting))
