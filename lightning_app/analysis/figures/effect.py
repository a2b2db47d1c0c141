"""What warm-up gives each variant: Delta with its interval, and Delta during training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Part, Sketch
from lightning_app.analysis.figures.layout import dots, wrapped
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.logs import VALID, Curve
from lightning_app.analysis.figures.style import GRID, INK, MUTED, REFERENCE
from lightning_app.analysis.pairing import Paired, arms
from lightning_app.analysis.score import Score
from lightning_app.analysis.sensitivity import delta
from lightning_app.analysis.statistics import LEVEL, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 9.6  # inches
ROW = 0.34  # inches of a variant
HEIGHT = 2.4  # inches of the panels, at least
NAMED = 6  # curves with a name at their end; more would overlap


@dataclass(frozen=True, kw_only=True)
class VariantEffect:
    """One variant: its Delta, the runs that it compares, and Delta by step."""

    variant: str
    score: Score
    pairs: Paired
    by_step: Mapping[int, float]


def warmup_effect(part: Part) -> list[Sketch]:
    """Delta of each variant with its interval, and the mean of Delta against the step."""
    import pandas as pd
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = _rows(part)
    if not rows:
        return []
    lines = [wrapped(row.variant).count("\n") + 1 for row in rows]
    height = max(HEIGHT, ROW * sum(lines)) + 1.0
    figure = Figure(figsize=(WIDTH, height))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
    links = Links(sum(len(row.pairs.seeds) for row in rows))
    table = _forest(left, rows, part, links)
    table += _curves(right, rows, part)
    dot: dict[str, Any] = {"color": MUTED, "linestyle": "none"}
    bounded = any(row.score.bound for row in rows)
    certain = any(math.isfinite(row.score.low) for row in rows)
    named = f"mean, {LEVEL:.0%} interval" if certain else "mean"
    handles = [
        Line2D([], [], marker="o", markersize=4.5, alpha=0.6, label="one seed", **dot),
        Line2D([], [], marker="D", markersize=5.5, label=named, **dot),
        Line2D([], [], color=MUTED, linestyle=REFERENCE, label="end of the warm-up"),
    ]
    figure.legend(handles=handles, loc="upper center", ncols=3)
    _place(left, right, height)
    cells = [cell for row in rows for cell in row.pairs.runs.values()]
    return [
        Sketch(
            figure=figure,
            table=pd.DataFrame(table),
            title="What warm-up gives each variant",
            text="Left: Δ, the final loss without warm-up minus that with it; the t interval is "
            "left out with one seed, or if seeds ended differently."
            f"{' ≥: no run without warm-up trained.' * bounded} Right: its mean over seeds at each "
            "validation.",
            limits="Δ belongs to this budget and this rate.",
            links=links,
            cells=cells,
        )
    ]


def _place(left: "Axes", right: "Axes", height: float) -> None:
    """Set the margins by the widths of the names and numbers beside the axes, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = left.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()

    def beside(axes: "Axes") -> float:
        found = axes.yaxis.get_tightbbox(renderer)
        return 0.0 if found is None else math.ceil(10 * found.width / figure.dpi) / 10

    names, numbers = beside(left) + 0.25, beside(right) + 0.1
    room = WIDTH - names - numbers - 0.4
    bottom, top = 0.55, 0.4
    for axes, start, width in (
        (left, names, 0.53 * room),
        (right, names + 0.53 * room + numbers, 0.47 * room + 0.2),
    ):
        place = (start / WIDTH, bottom / height, width / WIDTH, (height - bottom - top) / height)
        x, y, wide, high = (round(part, 4) for part in place)
        axes.set_position((x, y, wide, high))


def _rows(part: Part) -> list[VariantEffect]:
    """The variants with a defined Delta, the largest first."""
    reference = part.grid.reference_warmup
    if part.lr is None or not reference or part.grid.pruner is not None:
        return []
    found = []
    for arm in arms(part.grid):
        if arm.group != part.group or part.lr not in arm.rates:
            continue
        score = delta(arm, part.lr, part.grid, (math.nan, 0))
        if not math.isnan(score.estimate):
            pairs = arm.at([(0, part.lr), (reference, part.lr)])
            row = VariantEffect(
                variant=arm.variant, score=score, pairs=pairs, by_step=_by_step(pairs, part)
            )
            found.append(row)
    return sorted(found, key=lambda row: -row.score.estimate)


def _by_step(pairs: Paired, part: Part) -> dict[int, float]:
    """The mean of Delta at each step at which every run has a validation."""
    bare, ref = pairs.points
    curves: list[tuple[Curve, Curve, float]] = []
    for seed in pairs.seeds:
        runs = pairs.runs[bare, seed], pairs.runs[ref, seed]
        logs = [part.logs[run.id][VALID] if run.id in part.logs else {} for run in runs]
        curves.append((logs[0], logs[1], runs[0].entropy))
    steps = set.intersection(*({*first} & {*second} for first, second, _ in curves))
    return {
        step: mean([min(b[step], top) - min(r[step], top) for b, r, top in curves])
        for step in sorted(steps)
        if all(math.isfinite(b[step] + r[step]) for b, r, _ in curves)
    }


def _forest(
    axes: "Axes", rows: Sequence[VariantEffect], part: Part, links: Links
) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    axes.axvline(0.0, color=MUTED, linewidth=1.0, zorder=1)
    for place, row in enumerate(rows):
        colour, bare = part.colours[row.variant], row.pairs.points[0]
        identity = {"variant": row.variant, "lr": part.lr}
        values = list(zip(row.pairs.seeds, _differences(row.pairs), strict=True))
        points = [(value, place - 0.16) for _, value in values]
        urls = [
            links.to(row.pairs.runs[bare, seed], f"Δ {value:.4f} of this seed")
            for seed, value in values
        ]
        dots(axes, points, urls, color=colour, s=20, alpha=0.6, zorder=3)
        table += [{"mark": "seed", **identity, "seed": s, "value": v} for s, v in values]
        centre = row.score.estimate
        if math.isfinite(row.score.low):
            ends = (row.score.low, row.score.high)
            axes.plot(ends, (place + 0.16,) * 2, color=INK, linewidth=1.3, zorder=4)
        diamond: dict[str, Any] = {"color": colour, "edgecolors": INK, "marker": "D", "s": 34}
        dots(axes, [(centre, place + 0.16)], [None], zorder=5, **diamond)
        if row.score.bound:
            place_of = {"xy": (centre, place + 0.16), "xytext": (-8, 0)}
            axes.annotate("≥", **place_of, textcoords="offset points", ha="right", va="center")
        mark = {"mark": "mean", **identity, "n": len(values), "value": centre}
        table.append({**mark, "low": row.score.low, "high": row.score.high})
    axes.set_yticks(range(len(rows)), [wrapped(row.variant) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.05 * (high - low)), max(high, 0.05 * (high - low)))
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("← warm-up costs     Δ (nats per token)     warm-up helps →")
    return table


def _differences(pairs: Paired) -> list[float]:
    bare, ref = pairs.points
    return [b - r for b, r in zip(pairs.losses(bare), pairs.losses(ref), strict=True)]


def _curves(axes: "Axes", rows: Sequence[VariantEffect], part: Part) -> list[dict[str, Any]]:
    drawn = [row for row in rows if len(row.by_step) > 1]
    axes.axhline(0.0, color=MUTED, linewidth=1.0, zorder=1)
    if not drawn:
        axes.text(0.5, 0.6, "no validation curves", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return []
    axes.axvline(float(part.grid.reference_warmup or 0), color=MUTED, linestyle=REFERENCE)
    table: list[dict[str, Any]] = []
    for row in drawn:
        steps, values = list(row.by_step), list(row.by_step.values())
        axes.plot(steps, values, color=part.colours[row.variant], linewidth=1.8, marker=".")
        identity = {"mark": "curve", "variant": row.variant, "lr": part.lr}
        table += [{**identity, "step": s, "value": v} for s, v in row.by_step.items()]
    last = max(max(row.by_step) for row in drawn)
    axes.set_xlim(0.0, last * (1.3 if len(drawn) <= NAMED else 1.03))
    if len(drawn) <= NAMED:
        places = _apart([[*row.by_step.values()][-1] for row in drawn], axes)
        for row, y in zip(drawn, places, strict=True):
            name = wrapped(row.variant)
            axes.text(last * 1.02, y, name, color=INK, fontsize=8.5, va="center")
    axes.grid(axis="y", color=GRID)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("Δ (nats per token)")
    return table


def _apart(places: Sequence[float], axes: "Axes") -> list[float]:
    """Places of the names, from the top down, moved so that no two overlap."""
    low, high = axes.get_ylim()
    least = 0.075 * (high - low)
    moved: list[float] = []
    order = sorted(range(len(places)), key=lambda place: -places[place])
    found = [0.0] * len(places)
    for place in order:
        y = places[place] if not moved else min(places[place], moved[-1] - least)
        moved.append(y)
        found[place] = y
    return found
