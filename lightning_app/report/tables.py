"""The tables for a paper, each laid out once for the page, LaTeX (booktabs) and Markdown."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_app.config.tree import label
from lightning_app.core.files import write_whole
from lightning_app.report.facts import (
    DASH,
    bounded,
    in_short,
    interval,
    measured,
    nats,
    p_value,
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
from lightning_app.report.pairs import Score, mean_loss
from lightning_app.report.results import CellResult, GridResults, failures
from lightning_app.report.statistics import LEVEL
from lightning_app.report.tasks import (
    FailedRuns,
    FailureTest,
    TaskScore,
    columns,
    failed_runs,
    failure_tests,
    no_averages,
    score_facts,
    setting_words,
    split_of,
    task_scores,
)

Own = Mapping[str, Score]
SAVED = ("steps_saved", "lost_steps")  # which the reading of a cost needs


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of plain texts; `bodies` has the rows of each slice of the grid, "" for the only one.

    The first `words` columns are text, the others numbers. A cell of several lines has line breaks.
    `notes` explain why scores are not defined, or other things to know.
    """

    name: str
    caption: str
    header: tuple[str, ...]
    words: int
    bodies: Mapping[str, Sequence[tuple[str, ...]]]
    notes: tuple[str, ...]


def write_tables(grid: GridResults, scores: Sequence[Score], folder: Path) -> None:
    """Write `headline` and `loss_by_warmup` as `.tex` and `.md`; nothing if there are no scores."""
    if not scores or not grid.finished:
        return
    for table in (headline_table(grid, scores), loss_by_warmup(grid, scores)):
        write_table(table, folder)


def write_table(table: PaperTable, folder: Path) -> None:
    """Write one table as `.tex` and `.md`."""
    write_whole(folder / f"{table.name}.tex", latex(table))
    write_whole(folder / f"{table.name}.md", markdown_table(table))


def headline_table(grid: GridResults, scores: Sequence[Score]) -> PaperTable:
    """The loss of each variant without warm-up, as in the report's first table."""
    wanted = ("delta", "relative_delta", "interaction")
    shown = [score for score in scores if score.score.startswith((*wanted, *SAVED, STALLS))]

    reference = grid.reference_warmup

    def row(variant: str, own: Own) -> tuple[str, ...]:
        rates = (_share(own.get(f"stalls w={warmup}")) for warmup in grid.warmups)
        versus = own["interaction"]
        numbers = (*(_estimate(own[name]) for name in wanted), *rates)
        reading = with_p(own_reading(own), own["delta"])
        words = "; ".join(filter(None, (reading, stall_words(own, reference))))
        compared = with_p(relation(own), versus)
        return variant, words, compared, *numbers, str(own["delta"].seeds)

    baseline = f" of {grid.baseline}" if grid.baseline else " of the baseline"
    caption = (
        "The effect of no warm-up: Δ is the loss without warm-up minus that with the "
        f"reference{_reference(grid)}, in nats per token, seed by seed; relative Δ is its share of "
        f"what is learned; interaction Δ minus that{baseline}. In brackets: {LEVEL:.0%} intervals "
        "(t over seeds, Fieller for the ratio, Wilson for shares of runs); p of a label by Holm. "
        f"{in_short(grid)}"
    )
    stalls = (
        f"{failures(grid.finished) or 'stalled'}, warm-up {warmup:,}" for warmup in grid.warmups
    )
    versus = f"against {grid.baseline}" if grid.baseline else "against the baseline"
    scored = ("Δ", "relative Δ", "interaction")
    header = ("variant", "warm-up", versus, *scored, *stalls, "seeds")
    return PaperTable(
        name="headline",
        caption=caption,
        header=header,
        words=3,
        bodies=_bodies(shown, row),
        notes=tuple(score_notes(shown)),
    )


def loss_by_warmup(grid: GridResults, scores: Sequence[Score]) -> PaperTable:
    """The mean final loss of each arm, and how flat it is over the warm-ups."""
    shown = [score for score in scores if score.score == "R_w"]
    arms: dict[tuple[str, str, float, int | None], list[CellResult]] = {}
    for cell in grid.finished:
        key = (cell.variant, cell.group, cell.lr or 0.0, cell.warmup)
        arms.setdefault(key, []).append(cell)

    def row(variant: str, own: Own) -> tuple[str, ...]:
        key = (variant, own["R_w"].group, own["R_w"].lr)
        means = (_mean(arms.get((*key, warmup), [])) for warmup in grid.warmups)
        return variant, *means, _estimate(own["R_w"])

    caption = (
        "Final validation loss by warm-up, in nats per token: mean over the finished seeds, "
        f"failures counted as the unigram entropy, with its {LEVEL:.0%} t interval where all seeds "
        "of an arm end alike. R_w: how flat the loss is over the warm-ups (0 is flat). "
        f"{in_short(grid)}"
    )
    warmups = (f"warm-up {warmup:,}" for warmup in grid.warmups)
    return PaperTable(
        name="loss_by_warmup",
        caption=caption,
        header=("variant", *warmups, "R_w"),
        words=1,
        bodies=_bodies(shown, row),
        notes=tuple(score_notes(shown)),
    )


def markdown_table(table: PaperTable) -> str:
    """A pipe table; slices are rows in bold."""
    width = len(table.header)
    sides = [":--"] * table.words + ["--:"] * (width - table.words)
    lines = [_pipe(map(_escaped, table.header)), _pipe(sides)]
    for where, rows in table.bodies.items():
        if where:
            lines.append(_pipe([f"**{_escaped(where)}**", *[""] * (width - 1)]))
        lines += [_pipe(map(_escaped, row)) for row in rows]
    notes = "".join(f"- {_escaped(note)}\n" for note in table.notes)
    listed = f"\nA dash is a score that is not defined.\n\n{notes}" if notes else ""
    return "\n".join([*lines, "", _escaped(table.caption), listed])


def latex(table: PaperTable) -> str:
    r"""A `table*` of booktabs; a cell of several lines becomes as many rows of the table."""
    width = len(table.header)
    body = []
    for number, (where, rows) in enumerate(table.bodies.items()):
        body += [r"\midrule"] * (number > 0)
        if where:
            body.append(rf"\multicolumn{{{width}}}{{l}}{{\emph{{{tex(where)}}}}} \\")
        body += [line for row in rows for line in _tex_rows(row)]
    notes = [rf"\par\smallskip\raggedright\footnotesize {tex(note)}." for note in table.notes]
    return "\n".join(
        [
            r"% \usepackage{booktabs,graphicx}",
            r"\begin{table*}",
            r"\centering",
            rf"\caption{{{tex(table.caption)}}}",
            rf"\label{{tab:{table.name.replace('_', '-')}}}",
            r"\medskip",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{'l' * table.words}{'r' * (width - table.words)}}}",
            r"\toprule",
            rf"{' & '.join(map(tex, table.header))} \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            *notes,
            r"\end{table*}",
            "",
        ]
    )


def tex(text: str) -> str:
    """Text for LaTeX: special characters escaped, symbols of the report as formulas."""
    escaped = "".join(_LETTERS.get(letter, letter) for letter in text)
    return re.sub(r"(?<![A-Za-z_\\])([A-Z]|\$\\eta\$)\\_(\w+)", _subscript, escaped)


def _subscript(found: re.Match[str]) -> str:
    return rf"${found[1].strip('$')}_{{\mathrm{{{found[2]}}}}}$"


_LETTERS = {letter: rf"\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "<": "$<$",
    ">": "$>$",
    "·": r"$\cdot$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "Δ": r"$\Delta$",
    "η": r"$\eta$",
    DASH: "--",
    "“": "``",
    "”": "''",
}


def _tex_rows(row: Sequence[str]) -> list[str]:
    lines = [cell.split("\n") for cell in row]
    height = max(map(len, lines))
    filled = [[*map(tex, cell), *[""] * (height - len(cell))] for cell in lines]
    return [" & ".join(cells).rstrip() + r" \\" for cells in zip(*filled, strict=True)]


def _pipe(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text for a cell of a pipe table."""
    return re.sub(r"([\\`*_|<>])", r"\\\1", text).replace("\n", "<br>")


def _bodies(
    scores: Sequence[Score], row: Callable[[str, Own], tuple[str, ...]]
) -> dict[str, list[tuple[str, ...]]]:
    slices = by_slice(scores).items()
    return {where: [row(*each) for each in variants.items()] for where, variants in slices}


def _reference(grid: GridResults) -> str:
    return "" if grid.reference_warmup is None else f" of {grid.reference_warmup:,} updates"


def _estimate(score: Score) -> str:
    if math.isnan(score.estimate):
        return DASH
    if math.isnan(score.low):
        return bounded(score)
    return f"{bounded(score)}\n{interval(score.low, score.high)}"


def _share(score: Score | None) -> str:
    if score is None or math.isnan(score.estimate):
        return DASH
    return f"{share_of(score.diverged, score.cells)}\n{share_interval(score.low, score.high)}"


def _mean(cells: Sequence[CellResult]) -> str:
    if not cells:
        return DASH
    centre, low, high = mean_loss(cells)
    return nats(centre) if math.isnan(low) else f"{nats(centre)}\n{interval(low, high)}"


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
            _task_share(test.failed, test.runs, test.low, test.high),
            _task_share(
                test.baseline_failed, test.baseline_runs, test.baseline_low, test.baseline_high
            ),
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
            _task_share(arm.failed, arm.runs, arm.low, arm.high),
            str(arm.one_class),
            str(arm.loss_at_floor),
            str(arm.non_finite),
            DASH if math.isnan(arm.median) else measured(arm.median),
            _task_mean(arm.mean, arm.mean_low, arm.mean_high, arm.lacking, 1.0),
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
    return _task_mean(row.value, row.low, row.high, lacking, scale, digits=2)


def _average(row: TaskScore) -> str:
    without = f", {row.lacking} without" if row.kind == "mean" and row.lacking else ""
    return f"{100 * row.value:.2f} ({row.average}{without})"


def _task_mean(
    value: float, low: float, high: float, lacking: int, scale: float, digits: int = 3
) -> str:
    if math.isnan(value):
        return DASH
    shown = [f"{scale * each:.{digits}f}".replace("-", "−") for each in (value, low, high)]
    ends = "" if math.isnan(low) else f"\n[{shown[1]}, {shown[2]}]"
    return f"{shown[0]}{f' ({lacking} without)' if lacking else ''}{ends}"


def _task_share(failed: int, runs: int, low: float, high: float) -> str:
    return f"{share_of(failed, runs)}\n{share_interval(low, high)}"
