"""Where each variant is stable: rates and warm-ups at which its runs did not stall, and a stalled
run next to a twin that did not."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_app.config.tree import label
from lightning_app.report.facts import say
from lightning_app.report.figures.sheet import (
    DASHES,
    INK,
    MUTED,
    PAPER,
    Links,
    Part,
    Sketch,
    arrange,
    frozen,
    identity,
    key,
    log_steps,
    panels,
    sketch,
    title,
    warmup_colours,
    warmup_of,
)
from lightning_app.report.pairs import Arm, arms
from lightning_app.report.results import CellResult
from lightning_app.report.statistics import mean
from lightning_app.runs.folder import PROBES
from lightning_app.runs.records import Curve, Place, probed_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable


COLOUR_MAP = "cividis"  # perceptually uniform, also in grey and for colour-blind readers
BAR = 0.75  # inches for the colour bar
ON_DARK, ON_LIGHT = "#fafafa", "#181818"  # colours of numbers in a map, the same on a dark page


def rate_by_warmup(part: Part) -> list[Sketch]:
    """Mean loss by rate and warm-up, one map for each variant, with the numbers of stalled runs.

    None where each seed has rates of its own.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    drawn = [arm for arm in arms(part.grid) if arm.group == part.group]
    losses = {
        (arm.variant, warmup, lr): [cell.loss for cell in _runs(arm, warmup, lr)]
        for arm in drawn
        for warmup, lr in sorted({point[:2] for point in arm.planned})
    }
    means = {place: mean(values) for place, values in losses.items() if values}
    # With one rate there is nothing to show. A pruner ends bad runs, so none would stall.
    if not means or len(part.grid.rates) < 2 or part.grid.pruner or part.grid.trials:
        return []
    warmups = sorted({warmup for _, warmup, _ in losses})
    rates = sorted({lr for *_, lr in losses})
    cells = [cell for arm in drawn for cell in arm.cells.values()]
    top = max(cell.entropy for cell in cells)
    low = min(means.values())
    mappable = ScalarMappable(Normalize(low if low < top else top - 1.0, top), COLOUR_MAP)
    links = Links(len(losses))
    width, height = 0.2 + 0.62 * len(warmups), 0.4 + 0.42 * len(rates)
    figure, axes_of = panels(len(drawn), width=width, height=height)
    rows: list[dict[str, Any]] = []
    for axes, arm in zip(axes_of, drawn, strict=True):
        rows += _map(axes, arm, warmups, rates, mappable, links)
        title(axes, arm.variant)
    axes_of[0].set_xticks(range(len(warmups)), [f"{warmup:,}" for warmup in warmups])
    axes_of[0].set_yticks(range(len(rates)), [label(lr) for lr in rates])
    axes_of[0].set_xlim(-0.5, len(warmups) - 0.5)
    axes_of[0].set_ylim(-0.5, len(rates) - 0.5)
    cross = key("k/n: k of n runs stalled or non-finite", color=INK, marker="x")
    arrange(figure, axes_of, "warm-up (updates)", "learning rate", [cross], below=BAR)
    wide, high = map(float, figure.get_size_inches())
    length = min(4.0, 0.7 * wide)
    place = ((wide - length) / 2 / wide, 0.5 / high, length / wide, 0.14 / high)
    bar = figure.colorbar(mappable, cax=figure.add_axes(place), orientation="horizontal")
    bar.set_label(f"mean final loss ({part.grid.unit})")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return [sketch("rate_by_warmup", figure, rows, links, cells)]


def _map(
    axes: "Axes",
    arm: Arm,
    warmups: Sequence[int],
    rates: Sequence[float],
    mappable: "ScalarMappable",
    links: Links,
) -> list[dict[str, Any]]:
    """The map of one variant; its rows of the table."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches: list[Any] = []
    colours: list[Any] = []
    urls: list[str | None] = []
    rows: list[dict[str, Any]] = []
    for x, warmup in enumerate(warmups):
        for y, lr in enumerate(rates):
            runs = _runs(arm, warmup, lr)
            place = {"variant": arm.variant, "warmup": warmup, "lr": lr, "n": len(runs)}
            if not runs:
                axes.text(x, y, "–", ha="center", va="center", color=MUTED, in_layout=False)
                rows.append({**place, "stalled": 0, "loss": math.nan})
                continue
            loss = mean([cell.loss for cell in runs])
            stalled = sum(cell.state == "diverged" for cell in runs)
            colour = mappable.to_rgba(np.array([loss]))[0].tolist()
            patches.append(Rectangle((x - 0.5, y - 0.5), 1.0, 1.0))
            colours.append(colour)
            urls.append(links.about(_words(arm, warmup, lr, runs)))
            text = f"{loss:.2f}" + (f"\n× {stalled}/{len(runs)}" if stalled else "")
            # Approximate relative luminance in sRGB, to choose dark or light ink.
            red, green, blue = (part**2.2 for part in colour[:3])
            ink = ON_DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.2 else ON_LIGHT
            look: dict[str, Any] = {"ha": "center", "va": "center", "in_layout": False}
            axes.text(x, y, text, color=ink, fontsize=8.0, linespacing=1.05, **look)
            rows.append({**place, "stalled": stalled, "loss": loss})
    drawn = PatchCollection(patches, facecolors=colours, edgecolors=PAPER, linewidths=1.2)
    if urls and urls[0] is not None:
        drawn.set_urls(urls)
    axes.add_collection(drawn, autolim=False)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return rows


def _runs(arm: Arm, warmup: int, lr: float) -> list[CellResult]:
    return [arm.cells[key] for key in sorted(arm.cells) if key[:2] == (warmup, lr)]


def _words(arm: Arm, warmup: int, lr: float, runs: Sequence[CellResult]) -> str:
    each = "; ".join(
        f"seed {cell.seed}: {cell.loss:.3f}{'' if cell.word == 'ok' else f' {cell.word}'}"
        for cell in runs
    )
    where = f"{arm.variant}, warm-up {warmup:,}, lr {label(lr)}"
    return f"{where}, mean {mean([cell.loss for cell in runs]):.3f}; {each}"


Runs = Sequence[CellResult]  # of one figure
STACKS = ("encoder", "decoder", "model")
MARKERS = ("o", "s", "^", "D", "v", "P")  # of layers, repeated
PANELS = 4  # in one row of `explanations`
SIGNALS = {
    "token_cosine": "cosine of two tokens",
    "w2_gradient": "gradient of $W_2$ (norm)",
    "output_information": "output information (nats)",
}
"""Quantities inside the model that show a stall: each with the label of its axis."""


def twins(part: Part) -> list[Sketch]:
    """A stalled run and a twin that did not stall, one pair per variant."""
    return _of_variants(part, _pair, lambda pair: _twins(pair, part.colours[pair[0].variant]))


def _of_variants(
    part: Part,
    choose: Callable[[Part, str], Runs | None],
    draw: Callable[[Runs], Sketch | None],
) -> list[Sketch]:
    """A figure of the chosen runs of each of the first variants; the last one names the others."""
    chosen = [runs for name in part.variants(part.cells) if (runs := choose(part, name))]
    sketches = [each for runs in chosen[: part.figures] if (each := draw(runs)) is not None]
    names = ", ".join(runs[0].variant for runs in chosen[part.figures :])
    if names and sketches:
        text = sketches[-1].text + say("figures.probes.not_drawn", names=names)
        sketches[-1] = replace(sketches[-1], text=text)
    return sketches


def _pair(part: Part, variant: str) -> tuple[CellResult, CellResult] | None:
    """The first stalled run, by rate and seed, that has a twin; the longest warm-up is its twin."""
    runs = [cell for cell in part.cells if cell.variant == variant and cell.run.file(PROBES)]
    runs.sort(key=lambda cell: (cell.lr or 0.0, cell.seed or 0, warmup_of(cell)))
    for stalled in (cell for cell in runs if cell.state == "diverged"):
        others = [
            c for c in runs if c.state == "ok" and (c.lr, c.seed) == (stalled.lr, stalled.seed)
        ]
        if others:
            return stalled, others[-1]
    return None


def _twins(pair: Runs, colour: str) -> Sketch | None:
    """Two rows of panels, the stalled run above; one column for each quantity and stack."""
    from matplotlib.figure import Figure

    curves = [read_probes(cell) for cell in pair]
    columns = [
        (quantity, stack)
        for quantity in SIGNALS
        for stack in STACKS
        if any((p.quantity, p.stack) == (quantity, stack) for places in curves for p in places)
    ]
    if not columns:
        return None
    layers = sorted({p.layer for places in curves for p in places if p.layer is not None})
    steps = [step for places in curves for curve in places.values() for step in curve]
    links = Links(sum(map(len, curves)))
    figure = Figure(figsize=(2.35 * len(columns) + 0.5, 4.6), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="col", squeeze=False)
    rows: list[dict[str, Any]] = []
    for cell, places, row in zip(pair, curves, grid, strict=True):
        for (quantity, stack), axes in zip(columns, row, strict=True):
            for place, curve in sorted(_of(places, quantity, stack), key=lambda i: i[0].layer or 0):
                look: Any = {"color": colour, "markersize": 4, "linewidth": 1.4}
                look |= {"marker": "o"} if place.layer is None else _layer_look(place.layer, layers)
                named = f"{quantity.replace('_', ' ')}, {place.stack}"
                named += "" if place.layer is None else f", layer {place.layer}"
                axes.plot([*curve], [*curve.values()], url=links.to(cell, named), **look)
                mark = {"mark": "run", **identity(cell), **place._asdict()}
                rows += [{**mark, "step": step, "value": value} for step, value in curve.items()]
            axes.grid(axis="y")
            axes.tick_params(length=3)
            log_steps(axes, min(steps), max(steps))
        state = cell.word if cell.state == "diverged" else "did not stall"
        row[0].set_ylabel(f"warm-up {warmup_of(cell):,}\n{state}", color=INK)
    for (quantity, stack), axes in zip(columns, grid[0], strict=True):
        axes.set_title(SIGNALS[quantity] + ("" if stack == "model" else f"\n{stack}"), fontsize=9.5)
        values = [
            v for places in curves for _, c in _of(places, quantity, stack) for v in c.values()
        ]
        if quantity == "w2_gradient" and min(values) > 0:
            axes.set_yscale("log")
    figure.supxlabel("optimizer step (log scale)", fontsize=9.5)
    handles = [
        key(f"layer {n}", color=colour, markersize=4, linestyle="-", **_layer_look(n, layers))
        for n in layers
    ]
    frozen(figure, handles, int(figure.get_figwidth() // 1.3))
    stalled, other = pair
    end = (stalled.record.get("diverged") or {}).get("step")
    when = "" if end is None else f" (found at step {end:,})"
    quantities = dict.fromkeys(name for name, _ in columns)
    words = {"variant": stalled.variant, "word": stalled.word, "when": when, "seed": stalled.seed}
    words |= {"warmup": warmup_of(stalled), "other": warmup_of(other)}
    words["meanings"] = " ".join(say(f"figures.probes.{name}") for name in quantities)
    return sketch("probes", figure, rows, links, pair, **words)


def _of(places: Mapping[Place, Curve], quantity: str, stack: str) -> list[tuple[Place, Curve]]:
    return [(p, c) for p, c in places.items() if (p.quantity, p.stack) == (quantity, stack)]


def _layer_look(layer: int, layers: Sequence[int]) -> dict[str, Any]:
    """Marker and opacity of a layer, readable without colour; deeper layers are more opaque."""
    turn = layers.index(layer)
    depth = turn / max(1, len(layers) - 1)
    return {"marker": MARKERS[turn % len(MARKERS)], "alpha": 0.4 + 0.6 * depth}


def read_probes(cell: CellResult, quantities: Container[str] = SIGNALS) -> dict[Place, Curve]:
    """The finite values of `quantities` by place and step; the last value of a step counts."""
    path = cell.run.file(PROBES)
    curves: dict[Place, Curve] = {}
    for step, place, value in [] if path is None else probed_values(path):
        if place.quantity in quantities and math.isfinite(value):
            curves.setdefault(place, {})[step] = value
    return curves


def _imbalance(by_layer: Mapping[int, float]) -> float:
    first = by_layer[min(by_layer)]
    return by_layer[max(by_layer)] / first if first and len(by_layer) > 1 else math.nan


@dataclass(frozen=True)
class Explained:
    """A panel of `explanations`: a quantity that speaks to one explanation of warm-up.

    `of` makes one number of those of the layers, for a quantity that a stack as a whole lacks.
    `line` is what theory expects: a number, or a quantity of the model.
    """

    explanation: str
    quantity: str
    label: str
    line: float | str | None = None
    of: Callable[[Mapping[int, float]], float] | None = None
    log: bool = False


EXPLAINED = (
    Explained("E1", "inverse_root_spread", "spread of $1/\\sqrt{v}$"),
    Explained("E1", "below_eps", "share below $\\epsilon$"),
    Explained("E2", "update_rms", "RMS(update) / $\\eta$", "update_rms_noise"),
    Explained("E2", "momentum_cosine", "cos(m, g)", 0.0),
    Explained("E2", "gradient_cosine", "cos($g_t$, $g_{t-1}$)", 0.0),
    Explained("E3", "row_angle", "angle of rows (rad)", "row_equilibrium", log=True),
    Explained("E4", "representation_change", "change of output, relative", log=True),
    Explained("E4", "relative_change", "||x dW|| / ||x W||", log=True),
    Explained("E5", "sharpness_over_threshold", "$\\eta\\lambda_1$ / threshold", 1.0, log=True),
    Explained("E5", "rate_over_critical", "$\\eta$ / critical rate", 1.0, log=True),
    Explained("E5", "local_smoothness", "||dg|| / ||dW||", log=True),
    Explained("E6", "w2_gradient", "$W_2$ gradient, last / first", 1.0, _imbalance, log=True),
    Explained("E7", "output_change", "||dF||$^2$ / d", log=True),
    Explained("E8", "largest_logit", "largest logit", of=lambda values: max(values.values())),
    Explained(
        "E8", "qk_singular_value", "$\\sigma_1(W_Q W_K^T)$", of=lambda values: max(values.values())
    ),
    Explained(
        "E9", "token_cosine", "cosine of two tokens", 1.0, lambda values: values[max(values)]
    ),
    Explained("E9", "output_information", "output information", 0.0),
)
"""What separates the explanations of warm-up, drawn where runs have it; docs/looking-inside.md
names each one."""
OF_UPDATES = {"update_rms", "output_change", "rate_over_critical"}
"""Quantities of the three groups of `UpdateProbe`; without any of them, `twins` shows the rest."""


def explanations(part: Part) -> list[Sketch]:
    """The shortest and the longest warm-up of each variant, a panel for each of `EXPLAINED`."""
    return _of_variants(part, _ends, _explained)


def _ends(part: Part, variant: str) -> list[CellResult]:
    """The runs of the shortest and the longest warm-up, otherwise equal; one if there is one.

    Of several rates and seeds: where the shortest stalled and the longest did not, else the
    largest rate and the smallest seed.
    """
    alike: dict[tuple[float, int], dict[int, CellResult]] = {}
    for cell in part.cells:
        if cell.variant == variant and cell.run.file(PROBES):
            same = alike.setdefault((cell.lr or 0.0, cell.seed or 0), {})
            same.setdefault(warmup_of(cell), cell)

    def rank(place: tuple[float, int]) -> tuple[bool, bool, float, int]:
        runs = alike[place]
        stalled = runs[min(runs)].state == "diverged" != runs[max(runs)].state
        return stalled, len(runs) > 1, place[0], -place[1]

    if not alike:
        return []
    runs = alike[max(alike, key=rank)]
    return [runs[warmup] for warmup in sorted({min(runs), max(runs)})]


def _explained(runs: Runs) -> Sketch | None:
    from matplotlib.figure import Figure

    lines = {each.line for each in EXPLAINED if isinstance(each.line, str)}
    names = {each.quantity for each in EXPLAINED} | lines
    curves = [read_probes(cell, names) for cell in runs]
    # SignalProbe has a quantity of layers called output_change; that of updates is of stacks.
    made = (place for places in curves for place in places if place.layer is None)
    if not any(place.quantity in OF_UPDATES for place in made):
        return None
    panes = [e for e in EXPLAINED if any(_drawn_curves(places, e) for places in curves)]
    steps = [step for places in curves for curve in places.values() for step in curve]
    links = Links(sum(map(len, curves)))
    columns = min(len(panes), PANELS)
    height = math.ceil(len(panes) / columns)
    figure = Figure(figsize=(2.6 * columns + 0.4, 2.1 * height + 0.8), layout="constrained")
    grid = [*figure.subplots(height, columns, sharex=True, squeeze=False).flat]
    for unused in grid[len(panes) :]:
        unused.remove()
    colours = warmup_colours([warmup_of(cell) for cell in runs])
    rows: list[dict[str, Any]] = []
    for each, axes in zip(panes, grid, strict=False):
        for cell, places in zip(runs, curves, strict=True):
            colour = colours[warmup_of(cell)]
            for stack, curve in _drawn_curves(places, each).items():
                words = f"{each.explanation}, {each.quantity.replace('_', ' ')}, {stack}"
                look: Any = {"marker": MARKERS[STACKS.index(stack)], "markersize": 4}
                url = links.to(cell, words)
                axes.plot(list(curve), list(curve.values()), color=colour, url=url, **look)
                mark = {"mark": "run", "explanation": each.explanation, **identity(cell)}
                mark |= {"quantity": each.quantity, "stack": stack}
                rows += [{**mark, "step": step, "value": value} for step, value in curve.items()]
            if isinstance(each.line, str) and (line := places.get(Place(each.line, "model"))):
                look = {"color": MUTED, "linestyle": DASHES[0], "linewidth": 1.1, "zorder": 1}
                axes.plot(list(line), list(line.values()), **look)
                mark = {"mark": "theory", "explanation": each.explanation, **identity(cell)}
                mark |= {"quantity": each.line, "stack": "model"}
                rows += [{**mark, "step": step, "value": value} for step, value in line.items()]
        if isinstance(each.line, float):
            axes.axhline(each.line, color=MUTED, linewidth=1.1, linestyle=DASHES[0], zorder=1)
        values = [
            v for places in curves for c in _drawn_curves(places, each).values() for v in c.values()
        ]
        if each.log and min(values) > 0.0:
            axes.set_yscale("log")
        axes.grid(axis="y")
        axes.tick_params(length=3, labelbottom=True)
        axes.set_title(f"{each.explanation}  {each.label}", fontsize=9.5)
        log_steps(axes, min(steps), max(steps))
    figure.supxlabel("optimizer step (log scale)", fontsize=9.5)
    handles = [
        key(f"warm-up {warmup:,}", color=colour, linestyle="-")
        for warmup, colour in colours.items()
    ]
    drawn = dict.fromkeys(row["stack"] for row in rows)
    handles += [key(name, marker=MARKERS[STACKS.index(name)]) for name in STACKS if name in drawn]
    handles += [key("theory", linestyle=DASHES[0])]
    frozen(figure, handles, len(handles))
    first = runs[0]
    words = {"variant": first.variant, "seed": first.seed, "lr": label(first.lr)}
    words["warmups"] = " and ".join(f"{warmup:,}" for warmup in colours)
    return sketch("explanations", figure, rows, links, runs, **words)


def _drawn_curves(places: Mapping[Place, Curve], each: Explained) -> dict[str, Curve]:
    """The curve of each stack, or that of the model, for one panel."""
    found: dict[str, Curve] = {}
    for stack in STACKS:
        own = {p: c for p, c in _of(places, each.quantity, stack) if p.head is None}
        if each.of is None:
            whole = own.get(Place(each.quantity, stack))
            found |= {} if whole is None else {stack: whole}
            continue
        by_step: dict[int, dict[int, float]] = {}
        for place, curve in own.items():
            for step, value in curve.items():
                if place.layer:
                    by_step.setdefault(step, {})[place.layer] = value
        numbers = {step: each.of(layers) for step, layers in sorted(by_step.items())}
        kept = {step: value for step, value in numbers.items() if math.isfinite(value)}
        found |= {stack: kept} if kept else {}
    return found
