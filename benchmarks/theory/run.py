"""Measure statements of papers about fresh models on our blocks.

    python benchmarks/theory/run.py --out theory

These are lemmas 1-3 and theorem 1 of Xiong et al. 2020 (2002.04745) in their setting, the collapse
of tokens without a skip around attention, and their figure 3 with our models, next to the numbers
of another implementation with the same initial values, and with lone decoders. It takes about two
minutes on one core.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from benchmarks.theory.lemmas import (
    NAMES,
    POST,
    PRE,
    SAS,
    SKIPLESS,
    Draws,
    Fit,
    Skipless,
    TheorySetting,
    collapse,
    draw_all,
    extension,
    fitted_line,
    lemma_1,
    lemma_2,
    lemma_3,
    of_draws,
    post_ln_gradient,
    power_law,
    pre_ln_gradient,
    pre_ln_growth,
    rank_collapse,
    statements_table,
    statements_to_csv,
    theorem_1,
    theorem_1_by_width,
)
from benchmarks.theory.models import (
    ALONE,
    DEPTHS,
    FINGERPRINTS,
    NOTE,
    RECORDS,
    STACKS,
    Prints,
    ZipfCorpus,
    by_layer,
    decoder_alone,
    figure_3,
    gather_prints,
    prints_table,
    prints_to_csv,
    recorded_final,
    without_mask,
)
from lightning_app.core.files import write_whole
from lightning_app.probes.figures import looks, panel_grid
from lightning_app.report.figures.sheet import COLOURS, INK, MUTED, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOUR = {preset: look["color"] for preset, look in looks((POST, PRE)).items()}
BROKEN: Any = (0, (4, 2))
DOTTED: Any = (0, (1, 1.4))
CROSS: dict[str, Any] = {"linestyle": "none", "marker": "x"}  # of numbers recorded elsewhere
WITHOUT_CROSS: dict[str, Any] = {"linestyle": BROKEN, "marker": "s", "markersize": 3.5}
COLLAPSE: dict[str, dict[str, Any]] = dict(
    zip(
        (*SKIPLESS, SAS),
        (
            {"color": COLOURS[5], "linewidth": 4.0, "marker": "o", "markersize": 8.0},
            {"color": INK, "linestyle": BROKEN, "marker": "o", "markersize": 3.5},
            {"color": COLOURS[2], "marker": "o", "markersize": 3.5},
            {**looks(("sas",))["sas"], "marker": "o", "markersize": 3.5},
        ),
        strict=True,
    )
)
"""The styles of attention without a skip: two curves coincide, so one is thin and the other
broad."""


def write_theory_figures(
    folder: Path,
    draws: Draws,
    cosines: Mapping[str, Sequence[Sequence[float]]],
    prints: Prints,
    alone: Prints,
) -> list[Path]:
    """Write every figure into `folder` and return their paths; `alone` holds lone decoders."""
    with styled():
        return [
            draw_theorem_1(folder, draws),
            draw_lemma_2(folder, draws),
            draw_extension(folder, draws),
            draw_rank_collapse(folder, cosines),
            draw_figure_3(folder, prints, alone),
            figure_3_depth(folder, prints),
            fingerprints(folder, prints),
        ]


def draw_points(
    axes: "Axes", x: Sequence[float], draws: Sequence[Sequence[float]], **style: Any
) -> Any:
    """Draw the mean of each group of draws at its x, with the interval of the mean."""
    means = [of_draws(values) for values in draws]
    centres = [centre for centre, _ in means]
    below = [0.0 if math.isnan(low) else centre - low for centre, (low, _) in means]
    above = [0.0 if math.isnan(high) else high - centre for centre, (_, high) in means]
    style = {
        "marker": "o",
        "markersize": 4.5,
        "linestyle": "none",
        "capsize": 2.5,
        **style,
    }
    return axes.errorbar(x, centres, yerr=[below, above], elinewidth=1.0, **style)


def one_panel(height: float) -> tuple["Figure", "Axes"]:
    figure, ((axes,),) = panel_grid(1, 1)
    figure.set_size_inches(5.6, height)
    return figure, axes


def above(figure: "Figure", handles: Sequence[Any], columns: int) -> None:
    """Add one legend above all panels."""
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=2.4)


def exponent(fit: Fit) -> str:
    """Return the fitted exponent with its interval."""
    return f"exponent {fit.slope:.2f} ({fit.low:.2f} to {fit.high:.2f})".replace("-", "−")


def depth_axis(axes: "Axes", depths: Sequence[int], label: str) -> None:
    """Make both axes logarithmic, with ticks at the measured depths."""
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(depths)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)


def draw_theorem_1(folder: Path, draws: Draws) -> Path:
    """Last W2 gradient against depth for the loss of one position."""
    figure, axes = one_panel(4.0)
    depths = draws.setting.depths
    bars: list[Any] = []
    dashes: list[Any] = []
    every = range(depths[0], depths[-1] + 1)
    predicted = {
        POST: ("$\\sqrt{d/3}$", [post_ln_gradient(draws.setting)] * len(every)),
        PRE: ("$\\sqrt{d/(2 q_L)}$", [pre_ln_gradient(draws.setting, L) for L in every]),
    }
    for preset in (POST, PRE):
        gradients = draws.gradients(preset)
        name = f"{NAMES[preset]}: {exponent(power_law(gradients))}"
        groups = list(gradients.values())
        bars.append(draw_points(axes, depths, groups, color=COLOUR[preset], label=name))
        formula, values = predicted[preset]
        style: dict[str, Any] = {"color": COLOUR[preset], "linestyle": BROKEN, "linewidth": 1.2}
        dashes += axes.plot(every, values, label=f"predicted: {formula}", **style)
    depth_axis(axes, depths, "layers L")
    axes.set_yticks([2, 4, 8, 16])
    axes.set_ylabel("$W_2$ gradient of the last layer, one position")
    above(figure, [*bars, *dashes], 2)
    return save(figure, folder / "theory_theorem_1.svg")


def draw_lemma_2(folder: Path, draws: Draws) -> Path:
    """Squared norms by layer: Post-LN before its last norm, Pre-LN within its bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    depth = draws.setting.depths[-1]
    layers = range(depth + 1)
    for axes, preset in ((left, PRE), (right, POST)):
        drawn = draws.last[preset][depth]
        groups = zip(*[[sum(q) / len(q) for q in one.squared] for one in drawn], strict=True)
        x = layers if preset == PRE else range(1, depth + 1)
        style: dict[str, Any] = {"color": COLOUR[preset], "markersize": 3.0, "capsize": 0.0}
        draw_points(axes, x, list(groups), label=f"{NAMES[preset]}, {len(drawn)} draws", **style)
        axes.grid(axis="y")
        axes.set_title(NAMES[preset])
        axes.set_xlabel("layer l")
    fit = fitted_line(layers, draws.squared(PRE))
    left.fill_between(
        layers,
        [1 + layer / 2 for layer in layers],
        [1 + 3 * layer / 2 for layer in layers],
        color=MUTED,
        alpha=0.15,
        linewidth=0,
        label="lemma 2: 1 + l/2 to 1 + 3l/2",
    )
    left.plot(
        layers,
        [fit.intercept + fit.slope * layer for layer in layers],
        color=INK,
        linewidth=1.0,
        label=f"line, $R^2$ = {fit.r_squared:.4f}",
    )
    left.plot(
        layers,
        pre_ln_growth(depth, draws.setting.tokens),
        color=COLOUR[PRE],
        linestyle=BROKEN,
        label="recursion for large d",
    )
    left.set_ylabel("$\\|x_l\\|^2 / d$")
    left.legend(loc="upper left")
    right.axhline(1.5, color=COLOUR[POST], linestyle=BROKEN, label="lemma 2: 3/2")
    right.set_ylim(0.0, 2.0)
    right.set_ylabel("$\\|x_l\\|^2 / d$ before the last norm")
    right.legend(loc="lower left")
    return save(figure, folder / "theory_lemma_2.svg")


def draw_extension(folder: Path, draws: Draws) -> Path:
    """W2 gradient of every layer for the loss of one position."""
    figure, axes = one_panel(4.2)
    handles: list[Any] = []
    setting, depth = draws.setting, len(draws.every[POST][0].gradients)
    layers = range(1, depth + 1)
    for preset in (POST, PRE):
        groups = list(zip(*[one.gradients for one in draws.every[preset]], strict=True))
        handles.append(
            draw_points(
                axes, layers, groups, color=COLOUR[preset], label=f"{NAMES[preset]}, L = {depth}"
            )
        )
    top = post_ln_gradient(setting)
    predicted: list[tuple[str, str, Any, list[float]]] = [
        (
            "$\\sqrt{d/3}\\,(2/3)^{(L-l)/2}$, last norms alone",
            COLOUR[POST],
            DOTTED,
            [top * (2 / 3) ** ((depth - layer) / 2) for layer in layers],
        ),
        ("$\\sqrt{d/3}$, with the skips", COLOUR[POST], BROKEN, [top] * depth),
        (
            "$\\sqrt{d/(2 q_l)}$",
            COLOUR[PRE],
            BROKEN,
            [pre_ln_gradient(setting, layer) for layer in layers],
        ),
    ]
    for name, colour, dash, values in predicted:
        handles += axes.plot(layers, values, color=colour, linestyle=dash, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("layer l")
    axes.set_ylabel("$W_2$ gradient, one position")
    above(figure, handles, 2)
    return save(figure, folder / "theory_layers.svg")


def draw_rank_collapse(folder: Path, cosines: Mapping[str, Sequence[Sequence[float]]]) -> Path:
    """Token cosine by layer without a skip."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = one_panel(3.8)
    handles: list[Any] = []
    for name, draws in cosines.items():
        layers = range(len(draws[0]))
        for one in draws:
            axes.plot(layers, one, alpha=0.2, linewidth=0.8, color=COLLAPSE[name]["color"])
        means = [sum(values) / len(values) for values in zip(*draws, strict=True)]
        handles += axes.plot(layers, means, label=name, **COLLAPSE[name])
    for bound in (0.95, 0.05):
        axes.axhline(bound, color=MUTED, linestyle=BROKEN, linewidth=1.0, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("sub-layers or blocks applied")
    axes.set_ylabel("mean cosine of two tokens")
    axes.set_ylim(-0.05, 1.05)
    above(figure, handles, 2)
    return save(figure, folder / "theory_rank_collapse.svg")


def draw_figure_3(folder: Path, prints: Prints, alone: Prints) -> Path:
    """W1 and W2 expected gradients by layer of the 6-6 model and of a lone decoder."""
    from matplotlib.lines import Line2D

    figure, grid = panel_grid(2, 2)
    for row, matrix in zip(grid, ("W1", "W2"), strict=True):
        for axes, stack in zip(row, STACKS, strict=True):
            for preset in (POST, PRE):
                groups = by_layer(prints.whole[preset], stack, matrix)
                layers = range(1, len(groups) + 1)
                draw_points(axes, layers, groups, color=COLOUR[preset], linestyle="solid")
                if stack == "decoder":
                    groups = by_layer(alone.whole[preset], stack, matrix)
                    draw_points(axes, layers, groups, color=COLOUR[preset], **WITHOUT_CROSS)
                if matrix == "W2":
                    recorded: Sequence[float] = getattr(RECORDS[preset], stack)
                    axes.plot(layers, recorded, markersize=6, color=COLOUR[preset], **CROSS)
            axes.set_title(f"{stack}, $W_{matrix[1]}$")
            if (matrix, stack) == ("W2", "decoder"):
                last = of_draws(by_layer(prints.whole[POST], stack, matrix)[-1])[0]
                depth = DEPTHS[0]
                falling = [last * (2 / 3) ** ((depth - n) / 2) for n in range(1, depth + 1)]
                axes.plot(range(1, depth + 1), falling, color=COLOUR[POST], linestyle=DOTTED)
        row[0].set_ylim(bottom=0.0)
    figure.supxlabel("layer", fontsize=9.5)
    figure.supylabel("norm of the expected gradient", fontsize=9.5)
    handles = [
        *(Line2D([], [], color=COLOUR[p], marker="o", label=NAMES[p]) for p in (POST, PRE)),
        Line2D([], [], color=MUTED, label="recorded elsewhere", **CROSS),
        Line2D([], [], color=COLOUR[POST], linestyle=DOTTED, label="$(2/3)^{(L-l)/2}$"),
        Line2D([], [], color=MUTED, label=ALONE, **WITHOUT_CROSS),
    ]
    above(figure, handles, 5)
    return save(figure, folder / "theory_figure_3.svg")


def figure_3_depth(folder: Path, prints: Prints) -> Path:
    """W2 expected gradient of the final layer against the depth of both stacks."""
    figure, axes = one_panel(4.0)
    handles: list[Any] = []
    for preset in (POST, PRE):
        gradients = prints.final[preset]
        depths, fit = list(gradients), power_law(gradients)
        name = f"{NAMES[preset]}: {exponent(fit)}"
        handles.append(
            draw_points(axes, depths, list(gradients.values()), color=COLOUR[preset], label=name)
        )
        fitted = [math.exp(fit.intercept) * depth**fit.slope for depth in depths]
        axes.plot(depths, fitted, color=COLOUR[preset], linewidth=1.0)
        recorded = recorded_final(preset)
        values = list(recorded.values())
        axes.plot(list(recorded), values, markersize=7, color=COLOUR[preset], **CROSS)
    start = of_draws(prints.final[PRE][DEPTHS[0]])[0]
    falling = [start * (depth / DEPTHS[0]) ** -0.5 for depth in DEPTHS]
    style = {"color": COLOUR[PRE], "linestyle": BROKEN, "label": "predicted: $L^{-1/2}$"}
    handles += axes.plot(DEPTHS, falling, **style)
    style = {"color": COLOUR[POST], "linestyle": BROKEN, "label": "Xiong et al., Post-LN: 1.6"}
    handles += axes.plot(DEPTHS, [1.6] * len(DEPTHS), **style)
    handles += axes.plot([], [], color=MUTED, label="recorded", **CROSS)
    depth_axis(axes, DEPTHS, "layers in each stack")
    axes.set_yticks([0.4, 0.6, 1.0, 1.6])
    axes.set_ylabel("$W_2$ gradient of the final layer, expected")
    above(figure, handles, 2)
    return save(figure, folder / "theory_figure_3_depth.svg")


def fingerprints(folder: Path, prints: Prints) -> Path:
    """W2 expected gradients by layer of every variant, with those of another implementation."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure, ((left, right),) = panel_grid(1, 2)
    figure.set_size_inches(8.0, 4.6)
    styles = looks(prints.whole)
    for axes, stack in zip((left, right), STACKS, strict=True):
        for preset, runs in prints.whole.items():
            groups = by_layer(runs, stack, "W2")
            layers = range(1, len(groups) + 1)
            draw_points(axes, layers, groups, markersize=3.5, **styles[preset])
            recorded: Sequence[float] = getattr(RECORDS[preset], stack)
            axes.plot(layers, recorded, markersize=6, **{**styles[preset], **CROSS})
        axes.set_title(stack)
        axes.set_xlabel("layer")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    left.set_ylabel("$W_2$, norm of the expected gradient")
    handles = [
        Line2D([], [], marker="o", markersize=3.5, label=preset, **style)
        for preset, style in styles.items()
    ]
    handles.append(Line2D([], [], color=MUTED, label="recorded elsewhere", **CROSS))
    above(figure, handles, 5)
    return save(figure, folder / "theory_fingerprints.svg")


def main() -> int:
    """Measure every statement, write tables and figures, and print the results.

    Writes `theory.csv`, `fingerprints.csv` and `theory_*.svg`. Returns 1 if a required statement
    does not hold, else 0.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("theory"), metavar="DIR")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # sums do not depend on the number of cores
    console = Console(highlight=False)
    setting, corpus = TheorySetting(), ZipfCorpus()
    console.print("lemmas and theorem 1 ...")
    draws = draw_all(setting)
    statements = [*lemma_1(setting), *lemma_2(draws), *lemma_3(draws), *theorem_1(draws)]
    statements += [*theorem_1_by_width(setting), *extension(draws)]
    console.print("attention without a skip ...")
    cosines = collapse(Skipless())
    statements += rank_collapse(cosines)
    console.print("gradients of fresh models, 6-6 to 14-14 ...")
    prints = gather_prints(corpus, 3, FINGERPRINTS)
    statements += figure_3(prints)
    console.print("gradients of fresh decoder-only models, 6 to 14 layers ...")
    alone = gather_prints(corpus, 3, (POST, PRE), "decoder")
    statements += decoder_alone(prints, alone, without_mask(corpus, 3))

    write_whole(out / "theory.csv", statements_to_csv(statements))
    write_whole(out / "fingerprints.csv", prints_to_csv(prints, alone))
    figures = write_theory_figures(out, draws, cosines, prints, alone)
    console.print(statements_table(statements))
    console.print("expected gradient of W2 by layer at initialisation, 6-6, d = 512")
    console.print(prints_table(prints))
    console.print(NOTE)
    for path in (out / "theory.csv", out / "fingerprints.csv", *figures):
        console.print(str(path), soft_wrap=True)
    broken = [one.claim for one in statements if one.promised and not one.holds]
    for claim in broken:
        console.print(f"does not hold: {claim}", style="red", soft_wrap=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
