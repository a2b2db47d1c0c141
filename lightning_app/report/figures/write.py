"""Write every figure that the finished runs of a grid allow."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from lightning_app.core.files import write_whole
from lightning_app.report.figures import inside, need, stable, training
from lightning_app.report.figures.sheet import (
    FigureFiles,
    Part,
    Question,
    Sketch,
    colours,
    drawn_slices,
    pdf,
    read_log,
    styled,
    svg,
)
from lightning_app.report.results import CellResult, GridResults, scales

if TYPE_CHECKING:
    from matplotlib.figure import Figure


POINTS = 300  # points of one curve, at most
ALL_POINTS, FEWEST_POINTS = 60_000, 20  # of all single curves of one loss, and at least of each
FIGURES = 3  # figures of a kind with one for each variant; each takes a second
TOGETHER = 12  # panels of the figure that puts groups with common rates side by side, at most


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure: the name of its files, its question, and the function that draws it."""

    name: str
    question: Question
    draw: Callable[[Part], list[Sketch]]


OF_A_RATE = (
    FigureKind("warmup_effect", "need", need.warmup_effect),
    FigureKind("loss_by_warmup", "need", need.final_loss),
    FigureKind("quality_by_warmup", "need", need.final_quality),
    FigureKind("training", "need", training.during_training),
)
OF_TASKS = FigureKind("scores_by_task", "need", need.scores_by_task)
OF_RATES = FigureKind("loss_by_rate", "need", need.loss_by_rate)
OF_A_GROUP = (
    FigureKind("rate_by_warmup", "need", stable.rate_by_warmup),
    FigureKind("resources", "cost", training.resources),
    FigureKind("frontier", "stable", stable.frontier),
    FigureKind("probes", "inside", inside.twins),
)
FIRST = ("scores_by_task", "loss_by_rate", "rate_by_warmup")
"""What a report opens with: scores of tasks, else the loss if there are several rates."""
FORMER = (
    *("loss_by_seconds", "spans", "halting", "gains", "attention_entropy", "attention_distance"),
)
"""Kinds that reports no longer have; their files are removed."""
QUESTIONS: tuple[Question, ...] = get_args(Question)
KINDS = sorted(
    (OF_TASKS, OF_RATES, *OF_A_GROUP, *OF_A_RATE),
    key=lambda kind: (QUESTIONS.index(kind.question), kind.name not in FIRST),
)


def write_figures(grid: GridResults, folder: Path) -> list[FigureFiles]:
    """Write SVG, PDF and CSV of each figure, a set for each group and rate.

    With many groups and rates, only the first slices, as chosen by `drawn_slices`, are drawn. The
    order is by question, kind and slice. Files of figures that only earlier reports had are
    removed.
    """
    drawings: dict[str, list[FigureFiles]] = {kind.name: [] for kind in KINDS}
    slices = drawn_slices(grid)
    groups = list(dict.fromkeys(group for group, _ in slices))
    with styled():
        if grid.scored:
            drawings[OF_TASKS.name] += _draw(OF_TASKS, _of_all(grid), folder, "")
        for (group, lr), suffix in zip(slices, _numbers(len(slices)), strict=True):
            part = _part(grid, group, lr, slices[group, lr])
            for kind in OF_A_RATE:
                drawings[kind.name] += _draw(kind, part, folder, suffix)
        alike = _of_common_rates(grid, groups)
        for together, suffix in zip(alike, _numbers(len(alike)), strict=True):
            part = _over_rates(grid, together, 1)
            drawings[OF_RATES.name] += _draw(OF_RATES, part, folder, suffix)
        for group, suffix in zip(groups, _numbers(len(groups)), strict=True):
            part = _over_rates(grid, [group], _most(grid, len(groups)))
            for kind in OF_A_GROUP:
                drawings[kind.name] += _draw(kind, part, folder, suffix)
    drawn = [drawing for kind in KINDS for drawing in drawings[kind.name]]
    _remove_others(folder, {drawing.path.stem for drawing in drawn})
    return drawn


def _most(grid: GridResults, groups: int) -> int:
    """Figures of a kind with one for each variant: few, one where there are maps of rates too."""
    return max(1, FIGURES // groups) if len(grid.rates) < 2 else 1


def first_figure(grid: GridResults) -> "Figure | None":
    """The figure that a report opens with, to be drawn again in another look."""
    drawn = drawn_slices(grid)
    for sketch in need.scores_by_task(_of_all(grid)):
        return sketch.figure
    for together in _of_common_rates(grid, list(dict.fromkeys(group for group, _ in drawn))):
        for sketch in need.loss_by_rate(_over_rates(grid, together, 1), headed=True):
            return sketch.figure
    for (group, lr), cells in drawn.items():
        for sketch in need.warmup_effect(_part(grid, group, lr, cells)):
            return sketch.figure
    return None


def _of_common_rates(grid: GridResults, groups: Sequence[str]) -> list[list[str]]:
    """The groups, those with common rates together if that is no more than `TOGETHER` panels.

    Groups whose losses count other things share no figure.
    """
    rulers = scales(grid.finished, grid.monitored.loss)
    counted = {cell.group: name for cell, name in zip(grid.finished, rulers, strict=True)}
    shared: list[tuple[set[float | None], list[str]]] = []
    panels: dict[str, int] = {}
    for group in groups:
        cells = [cell for cell in grid.finished if cell.group == group]
        panels[group] = len({cell.variant for cell in cells})
        own, alike = {cell.lr for cell in cells}, [group]
        same = [each for each in shared if counted[each[1][0]] == counted[group]]
        for there in [each for each in same if each[0] & own]:
            own, alike = own | there[0], there[1] + alike
            shared.remove(there)
        shared.append((own, alike))
    parts: list[list[str]] = []
    for _, alike in shared:
        few = sum(panels[group] for group in alike) <= TOGETHER
        parts += [alike] if few else [[group] for group in alike]
    return parts


def _over_rates(grid: GridResults, groups: Sequence[str], figures: int) -> Part:
    """The runs of some groups at all rates; their curves are not read."""
    cells = [cell for cell in grid.finished if cell.group in groups]
    need = {cell.lr for cell in cells}
    return Part(
        grid=grid,
        group=groups[0] if len(groups) == 1 else "all",
        lr=need.pop() if len(need) == 1 else None,
        cells=cells,
        colours=colours(grid.variants),
        logs={},
        points=POINTS,
        figures=figures,
    )


def _of_all(grid: GridResults) -> Part:
    """All runs at all rates."""
    return _over_rates(grid, list(dict.fromkeys(cell.group for cell in grid.finished)), 1)


def _part(grid: GridResults, group: str, lr: float | None, cells: Sequence[CellResult]) -> Part:
    most = min(POINTS, max(FEWEST_POINTS, ALL_POINTS // max(1, len(grid.finished))))
    return Part(
        grid=grid,
        group=group,
        lr=lr,
        cells=cells,
        colours=colours(grid.variants),
        logs={cell.id: read_log(cell) for cell in cells},
        points=most,
        figures=FIGURES,
    )


def _draw(kind: FigureKind, part: Part, folder: Path, suffix: str) -> list[FigureFiles]:
    sketches = kind.draw(part)
    return [
        _write(folder / f"{kind.name}{suffix}{inner}.svg", kind.question, part, sketch)
        for sketch, inner in zip(sketches, _numbers(len(sketches)), strict=True)
    ]


def _numbers(count: int) -> list[str]:
    return [f"-{number}" for number in range(1, count + 1)] if count > 1 else [""] * count


def _write(path: Path, question: Question, part: Part, sketch: Sketch) -> FigureFiles:
    need = {cell.lr for cell in sketch.cells}
    write_whole(path, svg(sketch.figure, sketch.links, path.parent))
    write_whole(path.with_suffix(".pdf"), pdf(sketch.figure))
    write_whole(path.with_suffix(".csv"), sketch.table.to_csv(index=False))
    return FigureFiles(
        path=path,
        question=question,
        title=sketch.title,
        text=sketch.text,
        limits=sketch.limits,
        group=part.group,
        lr=need.pop() if len(need) == 1 else None,
        cells=tuple(sketch.cells),
    )


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove the files of figures that only an earlier report had."""
    names = "|".join([*(kind.name for kind in KINDS), *FORMER])
    ours = re.compile(rf"(?:{names})(?:-\d+)*\.(?:svg|pdf|csv)")
    for path in folder.glob("*"):
        if ours.fullmatch(path.name) and path.stem not in kept:
            path.unlink()
