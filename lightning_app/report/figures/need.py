"""Figures of the need for warm-up: the verdicts, losses against warm-up and rate, task scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_app.report.comparisons import comparisons
from lightning_app.report.facts import direction, in_group, say
from lightning_app.report.figures.sheet import (
    COLOURS,
    GRID,
    INK,
    MUTED,
    PAPER,
    REFERENCE,
    VALID,
    Curve,
    Links,
    Part,
    Sketch,
    arrange,
    dots,
    entropy_line,
    frozen,
    identity,
    key,
    panels,
    sketch,
    thin_lines,
    title,
    two_kinds,
    warmup_colours,
    warmup_of,
    wrapped,
)
from lightning_app.report.pairs import Arm, Paired, Score, arms, counted_runs
from lightning_app.report.results import CellResult, GridResults, as_number
from lightning_app.report.statistics import LEVEL, Estimate, ended_alike, mean, seeds_interval
from lightning_app.report.tasks import constant_score, failed, median_score
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import delta, sensitivity_scores
from lightning_app.scores.task_facts import QualityMetric, task_facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH, NARROW = 9.6, 4.4  # inches of a figure, and of one for a small screen
ROW = 0.36  # inches of a row
BLUE = COLOURS[0]
NAMED = 6  # curves with a name at their end; more would overlap


class ForestRow(NamedTuple):
    """A row of a forest plot: an estimate, what it is of, and its verdict in words."""

    name: str
    words: str
    found: Estimate


def forest(part: Part, *, narrow: bool = False) -> list[Sketch]:
    """What decides: every seed, the uncorrected interval (thick), and that of Holm's step (thin).

    Of the comparisons by the metric where warm-up is not what a grid asks about.
    """
    from matplotlib.figure import Figure

    grid = part.grid
    rows, matters, axis = _forest_rows(grid)
    if not rows:
        return []
    names = [_named(row, narrow=narrow) for row in rows]
    lines = sum(name.count("\n") + 1 for name in names)
    size = (NARROW, 0.17 * lines + 0.24 * len(rows) + 1.2) if narrow else (WIDTH, ROW * lines + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.0, color=MUTED, linewidth=1.0, zorder=1)
    if matters:
        axes.axvspan(-matters, matters, color=MUTED, alpha=0.16, linewidth=0, zorder=0)
    links = Links(sum(len(row.found.values) for row in rows))
    table: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        found = row.found
        points = [(value, place - 0.17) for _, value in found.values]
        urls = [links.about(f"{row.name}, seed {s}: {value:.4f}") for s, value in found.values]
        dots(axes, points, urls, color=BLUE, s=16, alpha=0.9, zorder=3)
        intervals = ((found.holm_low, found.holm_high), 1.0), ((found.low, found.high), 3.0)
        for ends, width in intervals:
            if math.isfinite(ends[0]):
                axes.plot(ends, (place + 0.14,) * 2, color=INK, linewidth=width, zorder=4)
        diamond = {"color": BLUE, "edgecolors": INK, "marker": "D", "s": 30, "zorder": 5}
        dots(axes, [(found.estimate, place + 0.14)], [None], **diamond)
        who = {"variant": row.name, "verdict": row.words}
        table += [{"mark": "seed", **who, "seed": s, "value": v} for s, v in found.values]
        table.append(
            {"mark": "mean", **who, "value": found.estimate, "low": found.low, "high": found.high}
            | {"holm_low": found.holm_low, "holm_high": found.holm_high, "n": found.seeds}
        )
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.06)
    if not narrow:
        words = axes.secondary_yaxis("right")
        words.set_yticks(range(len(rows)), [wrapped(row.words) for row in rows])
        words.tick_params(axis="y", length=0)
        words.spines["right"].set_visible(False)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(axis if not narrow else axis.replace("     ", "\n"))
    handles = [
        key("one seed", marker="o", markersize=4, color=BLUE, alpha=0.9),
        key("mean", marker="D", markersize=5, color=BLUE),
        key(f"{1 - grid.alpha:.0%} interval", color=INK, linestyle="-", linewidth=3.0),
        key("interval that decides", color=INK, linestyle="-", linewidth=1.0),
    ]
    if matters:
        handles.append(key("does not matter", marker="s", color=MUTED, alpha=0.3, markersize=9))
    frozen(figure, handles, 2 if narrow else 5)
    return [sketch("forest", figure, table, links, part.cells)]


def _named(row: ForestRow, *, narrow: bool) -> str:
    name = wrapped(row.name)
    return f"{name}\n{wrapped(row.words)}" if narrow else name


def _forest_rows(grid: GridResults) -> tuple[list[ForestRow], float, str]:
    """The rows, the width of the band of what does not matter, and the words of the axis."""
    if not grid.asks_warmup:
        rows = comparisons(grid)
        shown = [row for row in rows if row.axis == rows[0].axis and row.values]
        metrics = {row.metric: row for row in shown}
        if len(metrics) != 1:
            return [], 0.0, ""
        (first,) = metrics.values()
        axis = f"{first.metric} less that of {first.baseline} ({direction(first.mode)})"
        named = [
            ForestRow(in_group(row.value, row.where), row.reading or "too few seeds", row)
            for row in shown
        ]
        return named, first.matters, axis
    found = [
        verdict for verdict in verdicts(grid, sensitivity_scores(grid)) if verdict.score.values
    ]
    arms_of = [verdict for verdict in found if verdict.kind == "arm"]
    over = [verdict for verdict in found if verdict.kind != "arm"]
    groups = [*dict.fromkeys(verdict.group for verdict in arms_of)]
    arms_of.sort(key=lambda verdict: (groups.index(verdict.group), -verdict.estimate))
    rows_of = [
        ForestRow(in_group(each.variant, each.group), each.word, each.score)
        for each in [*over, *arms_of]
    ]
    return rows_of, grid.matters, f"← warm-up costs     {grid.unit}     warm-up saves →"


class VariantEffect(NamedTuple):
    """One variant and its mean of Delta by step."""

    variant: str
    score: Score
    pairs: Paired
    by_step: Mapping[int, float]


def warmup_effect(part: Part) -> list[Sketch]:
    """The mean over seeds of Delta against the step, a line for each variant."""
    from matplotlib.figure import Figure

    rows = _rows(part)
    if not any(len(row.by_step) > 1 for row in rows):
        return []
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    table = _curves(figure.subplots(), rows, part)
    frozen(figure, [key("end of the warm-up", linestyle=REFERENCE)], 1)
    cells = [cell for row in rows for cell in row.pairs.runs.values()]
    return [sketch("warmup_effect", figure, table, Links(0), cells)]


def _rows(part: Part) -> list[VariantEffect]:
    """The variants with a defined Delta, the largest first."""
    reference = part.grid.reference_warmup
    if part.lr is None or not reference or part.grid.pruner is not None:
        return []
    rows = []
    for arm in arms(part.grid):
        if arm.group != part.group or part.lr not in arm.rates:
            continue
        score = delta(arm, part.lr, part.grid)
        if not math.isnan(score.estimate):
            pairs = arm.at([(0, part.lr), (reference, part.lr)])
            rows.append(VariantEffect(arm.variant, score, pairs, _by_step(pairs, part)))
    return sorted(rows, key=lambda row: -row.score.estimate)


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


def _curves(axes: "Axes", rows: Sequence[VariantEffect], part: Part) -> list[dict[str, Any]]:
    drawn = [row for row in rows if len(row.by_step) > 1]
    axes.axhline(0.0, color=MUTED, linewidth=1.0, zorder=1)
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
    axes.set_ylabel(f"Δ ({part.grid.unit})")
    return table


def _apart(places: Sequence[float], axes: "Axes") -> list[float]:
    """Places of the names, from the top down, moved so that no two overlap."""
    low, high = axes.get_ylim()
    moved, y = [0.0] * len(places), math.inf
    for place in sorted(range(len(places)), key=lambda place: -places[place]):
        moved[place] = y = min(places[place], y - 0.075 * (high - low))
    return moved


TICKS = 4  # rates with a number at the axis, at most
LINKED = 400  # runs of one figure with a mark of their own; more are too small to point at


def loss_by_rate(part: Part, *, columns: int = 4) -> list[Sketch]:
    """Final loss against the learning rate, one panel for each variant and group.

    With the dots of the compared arms, a ring at the best mean of each and an arrow between the
    two; thin lines of other warm-ups. Where each seed has rates of its own, its best run has a
    larger dot, and the ring is at the mean of these. `columns`: the most panels in a row.
    """
    groups = dict.fromkeys(cell.group for cell in part.cells)
    every = [arm for arm in arms(part.grid) if arm.cells]
    arms_drawn = [arm for group in groups for arm in every if arm.group == group]
    rates = sorted({lr for arm in arms_drawn for _, lr, _ in arm.cells})
    if len(rates) < 2:
        return []
    cells = [cell for arm in arms_drawn for cell in arm.cells.values()]
    warmups = sorted({warmup_of(cell) for cell in cells})
    colours = warmup_colours(warmups)
    links = Links(len(cells), LINKED)
    figure, axes_of = panels(len(arms_drawn), width=2.7, height=2.5, columns=columns)
    rows: list[dict[str, Any]] = []
    compared = [warmup for warmup in (0, part.grid.reference_warmup) if warmup in warmups]
    bold = compared if len(compared) == 2 else warmups
    ringed = False
    for axes, arm in zip(axes_of, arms_drawn, strict=True):
        entropy_line(axes, mean([cell.entropy for cell in arm.cells.values()]))
        ends = []
        pairs = arm.at([(w, lr) for w in compared for lr in arm.rates_at(w)])
        for warmup in warmups:
            seeds = pairs.seeds if len(compared) == 2 and warmup in compared else []
            thin, tuned = warmup not in bold, part.grid.trials > 0
            drawn = _line(axes, arm, warmup, colours[warmup], links, seeds, thin=thin, tuned=tuned)
            rows += drawn
            means = [row for row in drawn if row["mark"] == "mean"]
            if tuned and len(compared) == 2 and warmup in compared:
                of_seeds = counted_runs(arm, compared[1])[compared.index(warmup)]
                ends += (point := _tuned(axes, [*of_seeds.values()], colours[warmup], links))
                who = {"mark": "tuned", "group": arm.group, "variant": arm.variant}
                who |= {"warmup": warmup, "n": len(of_seeds)}
                rows += [{**who, "lr": lr, "value": loss} for lr, loss in point]
            elif means and seeds:
                best = min(means, key=lambda row: row["value"])
                if not all(pairs.failed((warmup, best["lr"]))):  # else every rate ties
                    ends.append((best["lr"], best["value"]))
        if len(ends) == 2 and part.grid.pruner is None:
            ringed = True
            axes.scatter(
                *zip(*ends, strict=True), s=90, facecolors="none", edgecolors=INK, zorder=5
            )
            arrow = {"arrowstyle": "->", "color": INK, "shrinkA": 5, "shrinkB": 5}
            if ends[0][0] != ends[1][0]:
                axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow, zorder=6)
        title(axes, arm.variant if len(groups) == 1 else f"{arm.variant}\n{arm.group}")
    axes = axes_of[0]
    axes.set_xscale("log", base=2)
    shown = rates[:: math.ceil(len(rates) / TICKS)]
    axes.set_xticks(shown, [f"{lr:.2g}" for lr in shown])
    small = [] if part.grid.trials else rates
    axes.set_xticks(small, [""] * len(small), minor=True)  # else matplotlib labels some
    axes.set_xlim(rates[0] / 1.25, rates[-1] * 1.25)
    ring = "mean of the best trials" if part.grid.trials else "best rate"
    line = "none" if part.grid.trials else "-"
    dot: dict[str, Any] = {"marker": "o", "markersize": 4}
    looks = {w: {"linestyle": line} | (dot if w in bold else {"linewidth": 0.9}) for w in warmups}
    handles = [
        *(key(f"warm-up {w:,}", color=colours[w], **looks[w]) for w in warmups),
        *([key(ring, marker="o", markersize=8, markerfacecolor="none")] if ringed else []),
        key("stalled or non-finite", marker="X", markersize=6),
        key("unigram entropy", linestyle=REFERENCE),
    ]
    arrange(figure, axes_of, "learning rate", f"final loss ({part.grid.unit})", handles)
    what = say(f"figures.loss_by_rate.{'tuned' if part.grid.trials else 'means'}")
    return [sketch("loss_by_rate", figure, rows, links, cells, what=what)]


def _line(
    axes: "Axes",
    arm: Arm,
    warmup: int,
    colour: str,
    links: Links,
    seeds: Sequence[int],
    *,
    thin: bool,
    tuned: bool,
) -> list[dict[str, Any]]:
    """The runs at one warm-up and the line of their means; their rows of the table.

    Means are over `seeds`, or over all seeds if it is empty.
    """
    runs: dict[float, list[CellResult]] = {}
    for place in sorted(arm.cells, key=lambda each: each[1:]):
        if place[0] == warmup:
            runs.setdefault(place[1], []).append(arm.cells[place])
    marks = [
        (cell.failed, (lr, cell.loss), links.to(cell, f"{cell.loss:.4f}"))
        for kind in (False, True)
        for lr, of in runs.items()
        for cell in of
        if cell.failed == kind
    ]
    look: dict[str, Any] = {"color": colour, "alpha": 0.3 if tuned else 0.55, "zorder": 3}
    if not thin:
        two_kinds(axes, marks, look | {"marker": "o", "s": 12}, look | {"marker": "X", "s": 34})
    counted = {
        lr: [c for c in of if not seeds or (c.seed or 0) in seeds] for lr, of in runs.items()
    }
    means = {lr: mean([cell.loss for cell in of]) for lr, of in counted.items()}
    line: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.7} if thin else {"linewidth": 1.8}
    if not tuned:
        axes.plot(list(means), list(means.values()), color=colour, zorder=4, **line)
    rows = [
        {"mark": "run", "group": arm.group, **identity(cell), "n": 1, "value": cell.loss}
        for of in runs.values()
        for cell in of
    ]
    if tuned:
        return rows
    who = {"mark": "mean", "group": arm.group, "variant": arm.variant, "warmup": warmup}
    return rows + [{**who, "lr": lr, "n": len(counted[lr]), "value": y} for lr, y in means.items()]


def _tuned(
    axes: "Axes", seeds: Sequence[Sequence[CellResult]], colour: str, links: Links
) -> list[tuple[float, float]]:
    """The best run of each seed, and the means of their rates and losses if one learned."""
    best = [min(runs, key=lambda cell: cell.loss) for runs in seeds]
    points = [(cell.lr or 0.0, cell.loss) for cell in best]
    urls = [links.to(cell, f"best trial of seed {cell.seed}: {cell.loss:.4f}") for cell in best]
    dots(axes, points, urls, color=colour, s=26, edgecolors=INK, linewidths=0.5, zorder=4)
    if all(cell.failed for cell in best):
        return []
    rate = 2.0 ** mean([math.log2(rate) for rate, _ in points])
    return [(rate, mean([cell.loss for cell in best]))]


COLUMNS, MOST = 4, 12  # panels in a row, and of the figure
TASK_HEIGHT, TASK_WIDTH = 2.4, 11.5  # inches of a row of panels, and of the figure


def scores_by_task(part: Part) -> list[Sketch]:
    """One panel per task and value of the other axes; none without published scores."""
    from matplotlib.figure import Figure

    cells = [cell for cell in part.cells if cell.scores and math.isfinite(_score(part, cell))]
    groups = list(dict.fromkeys(cell.group for cell in cells))[:MOST]
    if not groups or part.grid.pruner is not None:
        return []
    drawn = [cell for cell in cells if cell.group in groups]
    warmups = sorted({warmup_of(cell) for cell in drawn})
    columns = min(COLUMNS, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(TASK_WIDTH, TASK_HEIGHT * rows + 0.6), layout="constrained")
    every = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    for unused in every[len(groups) :]:
        unused.remove()
    links = Links(len(drawn))
    variants = part.variants(drawn)
    table: list[dict[str, Any]] = []
    for axes, group in zip(every, groups, strict=False):
        runs = [cell for cell in drawn if cell.group == group]
        table += _panel(axes, runs, part, variants, warmups, links)
    for place, axes in enumerate(every[: len(groups)]):
        axes.tick_params(labelbottom=place + columns >= len(groups))
        names = [wrapped(name) for name in variants]
        axes.set_xticks(range(len(variants)), names, rotation=35, ha="right")
    hollow = {warmups[0]: {"markerfacecolor": "none"}}
    handles = [
        *(key(f"warm-up {w:,}", marker="o", markersize=5, **hollow.get(w, {})) for w in warmups),
        key("failed", marker="X", markersize=7),
        key("median", color=INK, linewidth=1.6),
        key("a constant answer", linestyle=REFERENCE),
    ]
    frozen(figure, handles, 6)
    count = len({cell.group for cell in cells})
    absent = len([cell for cell in part.cells if cell.scores]) - len(cells)
    words = {
        "absent": say("figures.scores_by_task.absent", runs=absent) if absent else "",
        "left": say("figures.scores_by_task.left", drawn=len(groups), panels=count)
        if count > len(groups)
        else "",
    }
    return [sketch("scores_by_task", figure, table, links, drawn, **words)]


def _panel(
    axes: "Axes",
    runs: Sequence[CellResult],
    part: Part,
    variants: Sequence[str],
    warmups: Sequence[int],
    links: Links,
) -> list[dict[str, Any]]:
    measure = part.grid.measure(runs[0])
    constant = constant_score(runs[0], measure)
    if math.isfinite(constant):
        entropy_line(axes, constant)
    table: list[dict[str, Any]] = []
    step = 0.7 / len(warmups)
    for x, variant in enumerate(variants):
        for place, warmup in enumerate(warmups):
            arm = [c for c in runs if (c.variant, warmup_of(c)) == (variant, warmup)]
            if not arm:
                continue
            centre = x + (place - (len(warmups) - 1) / 2) * step
            _marks(axes, arm, part, centre, 0.5 * step, place, links)
            middle = median_score(arm, measure)
            ends = (centre - 0.4 * step, centre + 0.4 * step)
            axes.plot(ends, (middle, middle), color=INK, linewidth=1.6, zorder=4)
            table += [
                {"mark": "run", "group": c.group, **identity(c), "failed": failed(c)}
                | {"metric": measure.metric, "value": _score(part, c)}
                for c in arm
            ]
            table.append(
                {"mark": "median", "group": arm[0].group, "variant": variant, "warmup": warmup}
                | {"metric": measure.metric, "value": middle}
            )
    axes.grid(axis="y")
    axes.set_xlim(-0.5, len(variants) - 0.5)
    axes.set_ylabel(measure.title)
    title(axes, runs[0].group if runs[0].group != "all" else measure.title)
    return table


def _marks(
    axes: "Axes",
    arm: Sequence[CellResult],
    part: Part,
    centre: float,
    width: float,
    place: int,
    links: Links,
) -> None:
    """The runs of an arm side by side, by seed."""
    colour = part.colours[arm[0].variant]
    marks: list[tuple[bool, tuple[float, float], str | None]] = []
    for number, cell in enumerate(sorted(arm, key=lambda cell: cell.seed or 0)):
        shift = width * (number / max(1, len(arm) - 1) - 0.5)
        value = _score(part, cell)
        marks.append((failed(cell), (centre + shift, value), links.to(cell, f"{value:.4f}")))
    hollow = {"facecolors": PAPER, "edgecolors": colour, "linewidths": 1.2}
    look: Mapping[str, Any] = hollow if place == 0 else {"color": colour}
    cross = {"s": 46, "zorder": 3, "marker": "X", "color": colour}
    two_kinds(axes, marks, {"s": 24, "zorder": 3, **look}, cross)


def _score(part: Part, cell: CellResult) -> float:
    return as_number(cell.metrics.get(part.grid.measure(cell).metric))


Value = Callable[[CellResult], float]


def final_loss(part: Part) -> list[Sketch]:
    """Final loss against warm-up, one panel for each variant; for a grid of one rate.

    With several rates `loss_by_rate` shows the same runs.
    """
    if len({cell.lr for cell in part.grid.finished if cell.group == part.group}) > 1:
        return []
    return _by_warmup(
        part,
        lambda cell: cell.loss,
        "Final validation loss against warm-up",
        f"final validation loss ({part.grid.unit})",
        say("figures.by_warmup.loss"),
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
    return _by_warmup(
        part,
        lambda cell: as_number(cell.metrics.get(metric)),
        f"{name} against warm-up",
        score.unit,
        say("figures.by_warmup.quality", name=name, metric=metric),
        entropy=False,
    )


def _quality(part: Part) -> QualityMetric | None:
    for score in task_facts(part.grid.setting("model.objective.kind")).scores:
        if any(math.isfinite(as_number(cell.metrics.get(score.metric))) for cell in part.cells):
            return score
    return None


def _by_warmup(
    part: Part, value: Value, name: str, label: str, text: str, *, entropy: bool
) -> list[Sketch]:
    """Every seed as a line, and the mean with its t interval if all seeds ended alike."""
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
    handles = [
        key("one run", marker="o", markersize=4.5, alpha=0.6),
        key("stalled or non-finite", marker="X", markersize=7),
        key(f"mean, {LEVEL:.0%} t interval" if bars else "mean", marker="D", markersize=5.5),
    ]
    if entropy:
        handles.append(key("unigram entropy", linestyle=REFERENCE))
    arrange(figure, axes_of, "warm-up (updates)", label, handles)
    left = len(part.cells) - len(cells)
    runs = f"{left} run{'s' * (left != 1)}"
    absent = say("figures.by_warmup.absent", runs=runs) if left else ""
    words = {"name": name, "what": text, "means": _of_means(rows), "absent": absent}
    return [sketch("by_warmup", figure, rows, links, cells, **words)]


def _of_means(rows: Sequence[Mapping[str, Any]]) -> str:
    means = [row for row in rows if row["mark"] == "mean"]
    shown = {
        "bars": any(math.isfinite(row["low"]) for row in means),
        "mixed": any(row["n"] > 1 and row["status"] == "mixed" for row in means),
        "single": any(row["n"] == 1 for row in means),
    }
    texts = {k: say(f"figures.by_warmup.{k}", level=LEVEL) if on else "" for k, on in shown.items()}
    return say("figures.by_warmup.means", **texts)


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
    marks: list[tuple[bool, tuple[float, float], str | None]] = []
    for cell in sorted(runs, key=warmup_of):
        seed = cell.seed or 0
        point = (place[warmup_of(cell)] + shift[seed], value(cell))
        own[seed].append(point)
        marks.append((cell.failed, point, links.to(cell, f"{value(cell):.4f}")))
    thin_lines(axes, list(own.values()), color=colour, alpha=0.45, linewidth=0.9)
    look: dict[str, Any] = {"color": colour, "zorder": 3}
    cross = look | {"marker": "X", "s": 49, "alpha": 0.95}
    two_kinds(axes, marks, look | {"marker": "o", "s": 20, "alpha": 0.6}, cross)


def _means(
    runs: Sequence[CellResult], value: Value, warmups: Sequence[int]
) -> list[dict[str, Any]]:
    """Mean and t interval of each warm-up; no interval if some seeds failed and others did not."""
    points = []
    for warmup in warmups:
        arm = [cell for cell in runs if warmup_of(cell) == warmup]
        if not arm:
            continue
        values, failed = [value(cell) for cell in arm], [cell.failed for cell in arm]
        low, high, _ = seeds_interval(values, failed)
        status = arm[0].state if ended_alike(failed) else "mixed"
        mark = {"warmup": warmup, "status": status, "n": len(arm), "value": mean(values)}
        points.append({**mark, "low": low, "high": high})
    return points


def _draw_means(
    axes: "Axes", means: Sequence[Mapping[str, Any]], place: Mapping[int, int], colour: str
) -> None:
    for each in means:
        x, centre = place[each["warmup"]] + 0.18, each["value"]
        if math.isfinite(each["low"]):
            ends = [[centre - each["low"]], [each["high"] - centre]]
            axes.errorbar(x, centre, yerr=ends, color=INK, capsize=3, linewidth=1.2, zorder=4)
        look: dict[str, Any] = {"marker": "D", "markersize": 5.5, "markeredgecolor": INK}
        axes.plot(x, centre, color=colour, markeredgewidth=0.8, zorder=5, **look)
