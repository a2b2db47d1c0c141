"""Who needs warm-up: the final loss of every run against its warm-up."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Part, Sketch, identity, warmup_of
from lightning_app.analysis.figures.layout import (
    arrange,
    dots,
    entropy_line,
    panels,
    thin_lines,
    title,
)
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.style import INK, MUTED, REFERENCE
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.statistics import LEVEL, ended_alike, mean, seeds_interval
from lightning_app.task_facts import QualityMetric, task_facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[CellResult], float]


def final_loss(part: Part) -> list[Sketch]:
    """Final loss against warm-up, one panel for each variant; for a grid of one rate.

    With several rates `loss_by_rate` shows the same runs.
    """
    if len({cell.lr for cell in part.grid.finished if cell.group == part.group}) > 1:
        return []
    text = (
        "Crosses are runs that stalled or were non-finite, at the unigram entropy H (dashed), as "
        "in the scores; the loss of a run that has not yet learned is capped there, too."
    )
    return _by_warmup(
        part,
        lambda cell: cell.loss,
        "Final validation loss against warm-up",
        "final validation loss (nats per token)",
        text,
        entropy=True,
    )


def final_quality(part: Part) -> list[Sketch]:
    """The score of the task, such as BLEU, against warm-up.

    `scores_by_task` shows the same runs of a task with published scores.
    """
    score = None if part.grid.scored else _quality(part)
    if score is None:
        return []
    metric, name = score.metric, score.title
    text = (
        f"Crosses are runs that stalled or were non-finite, at the value they ended with. "
        f"{name} is {metric} in results.csv."
    )
    return _by_warmup(
        part,
        lambda cell: _number(cell.metrics.get(metric)),
        f"{name} against warm-up",
        score.unit,
        text,
        entropy=False,
    )


def _quality(part: Part) -> QualityMetric | None:
    """The metric to draw: the first score of the task that a run has."""
    for score in task_facts(part.grid.setting("model.objective.kind")).scores:
        if any(math.isfinite(_number(cell.metrics.get(score.metric))) for cell in part.cells):
            return score
    return None


def _by_warmup(
    part: Part, value: Value, name: str, label: str, text: str, *, entropy: bool
) -> list[Sketch]:
    """Every seed as a line, and the mean with its t interval if all seeds ended alike."""
    import pandas as pd
    from matplotlib.lines import Line2D

    cells = [cell for cell in part.cells if math.isfinite(value(cell))]
    if not cells:
        return []
    warmups = sorted({warmup_of(cell) for cell in cells})
    variants = part.variants(cells)
    links = Links(len(cells))
    figure, axes_of = panels(len(variants), width=1.5 + 0.4 * len(warmups), height=2.8)
    place = {warmup: x for x, warmup in enumerate(warmups)}
    rows: list[dict[str, Any]] = []
    for axes, variant in zip(axes_of, variants, strict=True):
        runs = [cell for cell in cells if cell.variant == variant]
        if entropy:
            entropy_line(axes, mean([cell.entropy for cell in cells]))
        _seeds(axes, runs, value, place, part.colours[variant], links)
        means = _means(runs, value, warmups)
        _draw_means(axes, means, place, part.colours[variant])
        rows += [{"mark": "run", **identity(c), "n": 1, "value": value(c)} for c in runs]
        rows += [{"mark": "mean", "variant": variant, "lr": part.lr, **each} for each in means]
        title(axes, variant)
        axes.set_xticks(range(len(warmups)), [f"{warmup:,}" for warmup in warmups])
        axes.set_xlim(-0.45, len(warmups) - 0.4)
    bars = any(math.isfinite(row.get("low", math.nan)) for row in rows)
    dot: dict[str, Any] = {"color": MUTED, "linestyle": "none"}
    averaged = f"mean, {LEVEL:.0%} t interval" if bars else "mean"
    handles = [
        Line2D([], [], marker="o", markersize=4.5, alpha=0.6, label="one run", **dot),
        Line2D([], [], marker="X", markersize=7, label="stalled or non-finite", **dot),
        Line2D([], [], marker="D", markersize=5.5, label=averaged, **dot),
    ]
    if entropy:
        handles.append(Line2D([], [], color=MUTED, linestyle=REFERENCE, label="unigram entropy"))
    arrange(figure, axes_of, "warm-up (updates)", label, handles)
    return [
        Sketch(
            figure=figure,
            table=pd.DataFrame(rows),
            title=name,
            text=f"Dots are runs; thin lines join those of one seed. {text} {_of_means(rows)} "
            f"Warm-ups are evenly spaced, not to scale.{_absent(len(part.cells) - len(cells))}",
            limits=_LIMITS,
            links=links,
            cells=cells,
        )
    ]


_LIMITS = (
    "Overlapping intervals do not show that two arms are equal: the scores compare runs in pairs, "
    "seed by seed. The figure shows one budget; with more steps the order may change."
)


def _absent(count: int) -> str:
    """A sentence about finished runs without a finite value."""
    if not count:
        return ""
    return f" Not drawn: {count} run{'s' * (count != 1)} that finished without a finite value."


def _of_means(rows: Sequence[Mapping[str, Any]]) -> str:
    means = [row for row in rows if row["mark"] == "mean"]
    bars = sum(math.isfinite(row["low"]) for row in means)
    text = "Diamonds are means over seeds"
    if bars:
        text += f", with their {LEVEL:.0%} t interval"
    text += "."
    if any(row["n"] > 1 and row["status"] == "mixed" for row in means):
        text += " If some seeds failed and others did not, a t interval is not valid and not drawn."
    if any(row["n"] == 1 for row in means):
        text += " A single seed has no interval."
    return text


def _seeds(
    axes: "Axes",
    runs: Sequence[CellResult],
    value: Value,
    place: Mapping[int, int],
    colour: str,
    links: Links,
) -> None:
    """The runs of a seed joined by a thin line; a small shift keeps equal values apart."""
    seeds = sorted({cell.seed or 0 for cell in runs})
    shift = {s: -0.22 + 0.22 * (i / max(1, len(seeds) - 1)) for i, s in enumerate(seeds)}
    own: dict[int, list[tuple[float, float]]] = {seed: [] for seed in seeds}
    marks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    urls: dict[bool, list[str | None]] = {False: [], True: []}
    for cell in sorted(runs, key=warmup_of):
        seed, failed = cell.seed or 0, cell.state == "diverged"
        point = (place[warmup_of(cell)] + shift[seed], value(cell))
        own[seed].append(point)
        marks[failed].append(point)
        urls[failed].append(links.to(cell, f"{value(cell):.4f}"))
    thin_lines(axes, list(own.values()), color=colour, alpha=0.45, linewidth=0.9)
    for failed, marker, size, alpha in ((False, "o", 20, 0.6), (True, "X", 49, 0.95)):
        look: dict[str, Any] = {"marker": marker, "s": size, "alpha": alpha}
        dots(axes, marks[failed], urls[failed], color=colour, zorder=3, **look)


def _means(
    runs: Sequence[CellResult], value: Value, warmups: Sequence[int]
) -> list[dict[str, Any]]:
    """Mean and t interval of each warm-up; no interval if some seeds failed and others did not."""
    found = []
    for warmup in warmups:
        arm = [cell for cell in runs if warmup_of(cell) == warmup]
        if not arm:
            continue
        values, failed = [value(cell) for cell in arm], [cell.failed for cell in arm]
        low, high, _ = seeds_interval(values, failed)
        status = arm[0].state if ended_alike(failed) else "mixed"
        mark = {"warmup": warmup, "status": status, "n": len(arm), "value": mean(values)}
        found.append({**mark, "low": low, "high": high})
    return found


def _draw_means(
    axes: "Axes", means: Sequence[Mapping[str, Any]], place: Mapping[int, int], colour: str
) -> None:
    for each in means:
        x, centre = place[each["warmup"]] + 0.18, each["value"]
        if math.isfinite(each["low"]):
            ends = [[centre - each["low"]], [each["high"] - centre]]
            axes.errorbar(x, centre, yerr=ends, color=INK, capsize=3, linewidth=1.2, zorder=4)
        axes.plot(
            x,
            centre,
            marker="D",
            markersize=5.5,
            color=colour,
            markeredgecolor=INK,
            markeredgewidth=0.8,
            zorder=5,
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
