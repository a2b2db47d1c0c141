"""The first tables of the report for a paper: LaTeX (booktabs) and Markdown."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_app.analysis.formatting import (
    DASH,
    bounded,
    interval,
    nats,
    share_interval,
    share_of,
)
from lightning_app.analysis.grid_results import CellResult, GridResults, failures
from lightning_app.analysis.headline import (
    STALLS,
    by_slice,
    own_reading,
    relation,
    score_notes,
    stall_words,
    with_p,
)
from lightning_app.analysis.pairing import mean_loss
from lightning_app.analysis.run_summary import in_short
from lightning_app.analysis.score import Score
from lightning_app.analysis.statistics import LEVEL
from lightning_app.atomic_write import write_whole

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
