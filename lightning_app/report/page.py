"""The page of a report: one HTML file that needs no network."""

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_app.config.tree import label
from lightning_app.report.comparisons import Effect, MetricDifference, comparisons, effects
from lightning_app.report.facts import direction, facts, preset_words, setting_of, state_counts
from lightning_app.report.figures.sheet import FigureFiles, drawn_slices, slices_of
from lightning_app.report.frames import results_frame
from lightning_app.report.headline import answer
from lightning_app.report.limits import SHOWN, limits
from lightning_app.report.pairs import Score
from lightning_app.report.results import GridResults, grouped
from lightning_app.report.table import ReportTable
from lightning_app.report.tables import (
    bleu_table,
    cell_table,
    comparison_table,
    cost_table,
    delta_table,
    factor_table,
    loss_by_warmup,
    metric_table,
    missing_table,
    over_rates_table,
    task_tables,
    verdict_table,
)
from lightning_app.runs.folder import PROBES
from lightning_app.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    from jinja2 import Environment
    from markupsafe import Markup

RECOMPUTE = "recompute_study.py"


class Shown(NamedTuple):
    """A figure on the page: its number, its SVG with the page's colours, and its setting.

    `narrow` is the SVG for a small screen, or empty.
    """

    number: int
    drawing: FigureFiles
    svg: "Markup"
    setting: str
    narrow: "Markup | str"


@dataclass(frozen=True)
class Report:
    """A grid, its scores, and the folder `out` of the report; derived values are computed once."""

    grid: GridResults
    scores: Sequence[Score]
    out: Path

    @cached_property
    def results(self) -> "pd.DataFrame":
        """A row for each planned cell."""
        return results_frame(self.grid)

    @cached_property
    def effects(self) -> list[Effect]:
        return effects(self.grid, self.scores)

    @cached_property
    def comparisons(self) -> list[MetricDifference]:
        return comparisons(self.grid)


def page(report: Report, drawings: Sequence[FigureFiles], made_from: str = "") -> str:
    """The whole document, to be written after every other file of the report.

    `made_from` is the digest of all inputs.
    """
    grid = report.grid
    warmup = grid.asks_warmup
    claim = answer(grid, report.scores)
    if not claim:  # the first sentence of the question, or the name
        sentence = re.match(r".*?[.?!](?=\s|$)", " ".join(grid.question.split()))
        claim = grid.name if sentence is None else sentence[0]
    figures = [_shown(grid, drawing, n) for n, drawing in enumerate(drawings, start=1)]
    first = figures[0] if figures and figures[0].drawing.question == "need" else None
    return render(
        "page.html",
        grid=grid,
        kind="warm-up sensitivity" if warmup else "ablation",
        warmup=warmup,
        made_from=made_from,
        css=(resources.files("lightning_app.report") / "page.css").read_text(encoding="utf-8"),
        next_number=itertools.count(1).__next__,
        claim=claim,
        summary=_summary(grid),
        presets=preset_words(grid),
        limits=limits(grid),
        shown_limits=SHOWN,
        question=[
            " ".join(text.split()) for text in re.split(r"\n\s*\n", grid.question) if text.strip()
        ],
        sections=_sections(grid),
        tables=_tables(report, warmup=warmup),
        first=first,
        drawn={
            question: _by_group(
                [each for each in figures if each.drawing.question == question and each != first]
            )
            for question in ("need", "cost", "inside")
        },
        left_out=_left_out(grid),
        probed=any(cell.run.file(PROBES) for cell in grid.finished),
        facts=facts(grid),
        waiting=len(grid.without_parent),
        pruned=any(cell.state == "pruned" for cell in grid.cells),
        again=_again(grid, report.out),
        files=[path.name for path in report.out.iterdir()],
        version=__version__,
        last=max((str(cell.record.get("finished") or "") for cell in grid.finished), default=""),
    )


def render(template: str, **values: Any) -> str:
    """A page from its template; every value is escaped."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("lightning_app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _sections(grid: GridResults) -> list[str]:
    if not grid.finished:
        return ["need", "run"]
    if grid.pruner is not None:
        return ["figures", "run"]
    return ["need", "cost", "inside", "run", "appendix"]


def _tables(report: Report, *, warmup: bool) -> dict[str, list[ReportTable]]:
    """The tables of each part of the page, without empty ones."""
    grid, scores = report.grid, report.scores
    metrics = [metric_table(grid)] if grid.finished else []
    by_part: dict[str, list[ReportTable]] = {"answer": [], "need": [], "by_rate": [], "cost": []}
    by_part |= {"score": metrics, "run": [], "missing": [missing_table(grid)]}
    if grid.finished:
        by_part["run"] = [cell_table(grid, report.results, report.out)]
    if grid.finished and grid.pruner is None:
        compared, tasks = [comparison_table(grid, report.comparisons)], task_tables(grid)
        by_part["score"] = [*tasks, *compared] if warmup else [*compared, *tasks]
        by_part["score"] += metrics
        by_part["cost"] = [bleu_table(scores), cost_table(grid)]
        if warmup:
            by_part["answer"] = [verdict_table(grid, scores)]
            by_part["need"] = [over_rates_table(grid, scores), factor_table(grid, report.effects)]
            if not grid.trials:
                by_part["by_rate"] = [delta_table(grid, scores), loss_by_warmup(grid, scores)]
        if not any(table.bodies for table in by_part["answer"]):
            by_part["answer"], by_part["score"] = by_part["score"][:1], by_part["score"][1:]
    return {part: [table for table in tables if table.bodies] for part, tables in by_part.items()}


def _summary(grid: GridResults) -> str:
    """How runs ended, the setting they share, and how they are judged."""
    texts = [state_counts(grid), setting_of(grid)]
    if grid.scored:
        judged = dict.fromkeys(f"{each.title}, {direction(each.mode)}" for each in grid.measures)
        texts.append(
            f"Runs are judged by {'; '.join(judged)}. “Stalled” means that the loss ended at its "
            "floor; whether a run failed is judged by its score. Losses are in nats per row, "
            "lower is better."
        )
    elif grid.finished:
        texts.append(
            "Losses are in nats per token: lower is better, and 0.1 less is about 10 % less "
            "perplexity."
        )
    if grid.finished and len(grid.warmups) > 1 and 0 in grid.warmups:
        of = grid.setting("model.schedule.warmup_of")
        only = f" of the {of} alone" if of not in (None, "all") else ""
        texts.append(
            f"Warm-up {grid.warmups[-1]:,}: the learning rate{only} rises linearly over the first "
            f"{grid.warmups[-1]:,} steps; warm-up 0: the full rate from step 1."
        )
    return " ".join(texts)


def _again(grid: GridResults, out: Path) -> str:
    folder = os.path.relpath(grid.folder, out)
    words = ["python", RECOMPUTE, ".", *([folder] if folder != "." else ())]
    return shlex.join(Path(word).as_posix() for word in words)


# Ink, paper and rules of a figure follow the page, which may be dark.
THEME = {"#222222": "var(--ink)", "#707070": "var(--muted)", "#e6e6e6": "var(--hair)"}


def _shown(grid: GridResults, drawing: FigureFiles, number: int) -> Shown:
    wide = _inline(drawing, drawing.path, f"f{number}")
    narrow = _inline(drawing, drawing.narrow, f"n{number}") if drawing.narrow else ""
    return Shown(number, drawing, wide, _setting(grid, drawing), narrow)


def _inline(drawing: FigureFiles, path: Path, name: str) -> "Markup":
    """The SVG without its prolog, with unique ids and with the page's links and colours."""
    from markupsafe import Markup, escape

    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1{name}-", text)
    text = text.replace('xlink:href="../', 'xlink:href="')
    for colour, variable in THEME.items():
        text = text.replace(colour, variable)
    text = text.replace("fill: #ffffff", "fill: none")
    named = f'role="group"><title>Figure {name[1:]}. {escape(drawing.title)}</title>'
    return Markup(re.sub(r"<svg([^>]*)>", lambda found: f"<svg{found[1]} {named}", text, count=1))


def _setting(grid: GridResults, drawing: FigureFiles) -> str:
    seeds = len({cell.seed for cell in drawing.cells})
    parts = [f"n = {seeds} seed{'s' * (seeds != 1)}, {len(drawing.cells)} finished runs"]
    groups = list(dict.fromkeys(cell.group for cell in drawing.cells))
    parts += [] if groups == ["all"] else [" and ".join(groups)]
    several = len({cell.lr for cell in grid.finished if cell.group in groups}) > 1
    if drawing.lr is not None:
        best = any((group, drawing.lr) in drawn_slices(grid) for group in groups)
        slices = [cells for (group, _), cells in slices_of(grid).items() if group in groups]
        uneven = len({len({(c.variant, c.warmup) for c in cells}) for cells in slices}) > 1
        why = ", where the runs learn best" if several and best else ""
        why += ", of the rates that most arms have" if why and uneven else ""
        parts.append(f"learning rate {label(drawing.lr)}{why}")
    return f"{'; '.join(parts)}."


def _by_group(figures: Sequence[Shown]) -> dict[str, list[Shown]]:
    """The figures of all runs and of the first group at "", then those of the other groups."""
    groups = [group for group in dict.fromkeys(f.drawing.group for f in figures) if group != "all"]
    first = ("all", *groups[:1])
    ordered = sorted(figures, key=lambda each: each.drawing.group != "all")
    return grouped(ordered, lambda f: "" if f.drawing.group in first else f.drawing.group)


def _left_out(grid: GridResults) -> str:
    drawn = {group for group, _ in drawn_slices(grid)}
    there = {group for group, _ in slices_of(grid)}
    if len(drawn) == len(there):
        return ""
    return (
        f"Only the first {len(drawn)} of {len(there)} combinations of the other axes are drawn; "
        "the tables and results.csv have all."
    )
