"""Coordinate check: the sizes of activations, and of their change in training, by width.

Yang et al. 2022 (2203.03466), appendix D.1: with rules for width that transfer, neither grows nor
shrinks with the width.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_app.blocks.block import Block
from lightning_app.report.figures.sheet import COLOURS, save, styled

Sizes = dict[str, tuple[float, float]]
"""The root mean square of each activation, and that of its change in training."""


def coordinates(
    model: nn.Module, objective: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any]
) -> Sizes:
    """Take a step on each of `batches`; return the sizes, by layer, on the first of them.

    The layers are the streams after each block and the logits; dropout is off.
    """
    model.eval()
    before = _activations(model, objective, batches[0])
    for batch in batches:
        with torch.enable_grad():
            sums = objective.sums(model, batch)
            (sums.loss / batch.predicted_tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    after = _activations(model, objective, batches[0])
    return {name: (_rms(after[name]), _rms(after[name] - x)) for name, x in before.items()}


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@torch.no_grad()
def _activations(model: nn.Module, objective: Any, batch: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, given: Any, out: Any) -> None:
        found[name] = out[0].x.detach().clone()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Block):
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        found["logits"] = objective.logits(model, batch)
    return found


def slopes(sizes: Mapping[int, Sizes]) -> dict[str, tuple[float, float]]:
    """Return the least-squares slope of log(size) by log(width) of each layer: size, change.

    NaN for a layer that is zero or not finite at some width.
    """
    widths = np.log([float(width) for width in sizes])
    layers = next(iter(sizes.values()))

    def slope(layer: str, place: int) -> float:
        of = np.array([each[layer][place] for each in sizes.values()])
        drawn = np.isfinite(of).all() and of.all()
        return float(np.polyfit(widths, np.log(of), 1)[0]) if drawn else math.nan

    return {layer: (slope(layer, 0), slope(layer, 1)) for layer in layers}


def write_figure(sizes: Mapping[int, Sizes], title: str, path: Path) -> Path:
    """Draw both sizes of each layer by width."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        panes = figure.subplots(1, 2)
        for place, (axes, what) in enumerate(zip(panes, ("size", "change"), strict=True)):
            for number, layer in enumerate(next(iter(sizes.values()))):
                curve = [of[layer][place] for of in sizes.values()]
                colour = COLOURS[number % len(COLOURS)]
                axes.plot([*sizes], curve, marker="o", color=colour, label=layer)
            axes.set(xscale="log", yscale="log", xlabel="width", title=f"{what} of activations")
            axes.set_xticks([*sizes], [str(width) for width in sizes])
            axes.minorticks_off()
        panes[1].legend(fontsize="x-small")
        figure.suptitle(title)
        return save(figure, path)
