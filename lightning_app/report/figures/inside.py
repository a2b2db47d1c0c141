"""Figures of learned gains, and of a run that stalled beside its twin that did not."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_app.report.figures.sheet import (
    INK,
    STACKS,
    Links,
    Part,
    Sketch,
    at_best_rate,
    by_step,
    dash,
    frozen,
    has_probes,
    identity,
    key,
    layer_legend,
    layer_look,
    log_steps,
    naming_the_rest,
    panels,
    read_gains,
    read_probes,
    runs_and_mean,
    sketch,
    warmup_of,
    where,
    which,
)
from lightning_app.report.messages import say
from lightning_app.report.results import CellResult
from lightning_app.runs.records import Curve, Place

if TYPE_CHECKING:
    pass


POINTS = 60, 150  # of the curve of a run, and of a mean, at most


def gain_figures(part: Part) -> list[Sketch]:
    """Every learned gain by layer over the steps, one figure for each variant."""
    logged = {}
    for variant in part.variants(part.cells):
        runs = at_best_rate([cell for cell in part.cells if cell.variant == variant])
        found = [(cell, curves) for cell in runs if (curves := read_gains(cell))]
        if found:
            logged[variant] = found
    names = list(logged)
    sketches = [_gains(logged[name], part.colours[name]) for name in names[: part.figures]]
    return naming_the_rest(sketches, names[part.figures :])


def _gains(found: Sequence[tuple[CellResult, Mapping[Place, Curve]]], colour: str) -> Sketch:
    """A panel for each quantity and stack; markers show layers, line styles show warm-ups."""
    cells = [cell for cell, _ in found]
    warmups = sorted({warmup_of(cell) for cell in cells})
    warmups = list(dict.fromkeys((warmups[0], warmups[-1])))
    columns = sorted(
        {(p.quantity, p.stack) for _, curves in found for p in curves},
        key=lambda column: (column[0], STACKS.index(column[1])),
    )
    layers = sorted({p.layer for _, curves in found for p in curves if p.layer is not None})
    steps = [step for _, curves in found for curve in curves.values() for step in curve]
    links = Links(sum(len(curves) for _, curves in found))
    figure, axes_of = panels(len(columns), width=2.6, height=2.1, shared=False)
    figure.set_layout_engine("constrained")
    rows: list[dict[str, Any]] = []
    for axes, (quantity, stack) in zip(axes_of, columns, strict=True):
        for warmup in warmups:
            for layer in layers:
                place = Place(quantity, stack, layer, None)
                own = [
                    (cell, by_step(curves[place]))
                    for cell, curves in found
                    if warmup_of(cell) == warmup and place in curves
                ]
                look = {"color": colour, "linestyle": dash(warmup, warmups), "linewidth": 1.6}
                look |= {"markersize": 4, **layer_look(layer, layers)}
                rows += runs_and_mean(
                    axes,
                    own,
                    links,
                    f"layer {layer}, {{:.4f}} at the end",
                    POINTS,
                    {"color": colour, "alpha": 0.3, "linewidth": 0.7},
                    lambda count, look=look: look | {"markevery": max(1, count // 5)},
                    who=where(place),
                )
        axes.set_title(f"{quantity.replace('_', ' ')}, {stack}", fontsize=9.5)
        log_steps(axes, min(steps), max(steps))
    figure.supxlabel("optimizer step (log scale)", fontsize=9.5)
    figure.supylabel("value of the gain, mean over its heads", fontsize=9.5)
    lines = [
        key(f"warm-up {w:,}", color=INK, linestyle=dash(w, warmups), linewidth=1.6) for w in warmups
    ]
    layer_legend(figure, layers, colour, lines)
    frozen(figure)
    drawn = [cell for cell in cells if warmup_of(cell) in warmups]
    words = {"variant": cells[0].variant, "which": which(drawn), "meanings": _gain_words(columns)}
    return sketch("gains", figure, rows, links, drawn, **words)


def _gain_words(columns: Iterable[tuple[str, str]]) -> str:
    names = {quantity for quantity, _ in columns}
    shown = {
        "shaped": names & {"alpha", "beta", "gamma"},
        "skip": any(name.endswith(("_skip", "_branch")) for name in names),
        "head_gain": any(name.endswith("head_gain") for name in names),
        "change": any(name.endswith("_change") for name in names),
    }
    return " ".join(say(f"figures.gains.{name}") for name, there in shown.items() if there)


SIGNALS = {
    "token_cosine": "cosine of two tokens",
    "w2_gradient": "gradient of $W_2$ (norm)",
    "output_information": "output information (nats)",
}
"""Quantities inside the model that show a stall: each with the label of its axis."""


def twins(part: Part) -> list[Sketch]:
    """A run that stalled beside its twin that did not, one pair for each variant."""
    pairs = [pair for name in part.variants(part.cells) if (pair := _pair(part, name))]
    drawn, rest = pairs[: part.figures], pairs[part.figures :]
    found = [_twins(pair, part.colours[pair[0].variant]) for pair in drawn]
    sketches = [each for each in found if each is not None]
    return naming_the_rest(sketches, [stalled.variant for stalled, _ in rest])


def _pair(part: Part, variant: str) -> tuple[CellResult, CellResult] | None:
    """The first stalled run, by rate and seed, that has a twin; the longest warm-up is its twin."""
    runs = [cell for cell in part.cells if cell.variant == variant and has_probes(cell)]
    runs.sort(key=lambda cell: (cell.lr or 0.0, cell.seed or 0, warmup_of(cell)))
    for stalled in (cell for cell in runs if cell.state == "diverged"):
        others = [
            c for c in runs if c.state == "ok" and (c.lr, c.seed) == (stalled.lr, stalled.seed)
        ]
        if others:
            return stalled, others[-1]
    return None


def _twins(pair: tuple[CellResult, CellResult], colour: str) -> Sketch | None:
    """Two rows of panels, the stalled run above; one column for each quantity and stack."""
    from matplotlib.figure import Figure

    found = [read_probes(cell, SIGNALS) for cell in pair]
    columns = [
        (quantity, stack)
        for quantity in SIGNALS
        for stack in STACKS
        if any((p.quantity, p.stack) == (quantity, stack) for places in found for p in places)
    ]
    if not columns:
        return None
    layers = sorted({p.layer for places in found for p in places if p.layer is not None})
    steps = [step for places in found for curve in places.values() for step in curve]
    links = Links(sum(map(len, found)))
    figure = Figure(figsize=(2.35 * len(columns) + 0.5, 4.6), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="col", squeeze=False)
    rows: list[dict[str, Any]] = []
    for cell, places, row in zip(pair, found, grid, strict=True):
        for (quantity, stack), axes in zip(columns, row, strict=True):
            for place, curve in sorted(_of(places, quantity, stack), key=lambda i: i[0].layer or 0):
                look = (
                    layer_look(place.layer, layers) if place.layer is not None else {"marker": "o"}
                )
                words = f"{quantity.replace('_', ' ')}, {_named(place)}"
                axes.plot(
                    list(curve),
                    list(curve.values()),
                    color=colour,
                    markersize=4,
                    linewidth=1.4,
                    url=links.to(cell, words),
                    **look,
                )
                rows += [
                    {"mark": "run", **identity(cell), **where(place), "step": step, "value": value}
                    for step, value in curve.items()
                ]
            axes.grid(axis="y")
            axes.tick_params(length=3)
            log_steps(axes, min(steps), max(steps))
        row[0].set_ylabel(_ending(cell), color=INK)
    for (quantity, stack), axes in zip(columns, grid[0], strict=True):
        axes.set_title(SIGNALS[quantity] + ("" if stack == "model" else f"\n{stack}"), fontsize=9.5)
        values = [
            v for places in found for _, c in _of(places, quantity, stack) for v in c.values()
        ]
        if quantity == "w2_gradient" and min(values) > 0:
            axes.set_yscale("log")
    figure.supxlabel("optimizer step (log scale)", fontsize=9.5)
    layer_legend(figure, layers, colour)
    frozen(figure)
    stalled, other = pair
    end = (stalled.record.get("diverged") or {}).get("step")
    when = "" if end is None else f" (found at step {end:,})"
    quantities = dict.fromkeys(name for name, _ in columns)
    words = {"variant": stalled.variant, "word": stalled.word, "when": when, "seed": stalled.seed}
    words |= {"warmup": warmup_of(stalled), "other": warmup_of(other)}
    words["meanings"] = " ".join(say(f"figures.probes.{name}") for name in quantities)
    return sketch("probes", figure, rows, links, pair, **words)


def _ending(cell: CellResult) -> str:
    state = cell.word if cell.state == "diverged" else "did not stall"
    return f"warm-up {warmup_of(cell):,}\n{state}"


def _named(place: Place) -> str:
    return place.stack if place.layer is None else f"{place.stack}, layer {place.layer}"


def _of(places: Mapping[Place, Curve], quantity: str, stack: str) -> list[tuple[Place, Curve]]:
    return [(p, c) for p, c in places.items() if (p.quantity, p.stack) == (quantity, stack)]
