"""Coordinate check: the sizes of activations, and of their change in training, by width.

Yang et al. 2022 (2203.03466), appendix D.1: with rules for width that transfer, neither grows nor
shrinks with the width.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    with _hooked(model, found):
        found["logits"] = objective.logits(model, batch)
    return found


@contextmanager
def _hooked(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    blocks = [(name, each) for name, each in model.named_modules() if isinstance(each, Block)]

    def keep(name: str) -> Any:
        return lambda module, given, out: found.__setitem__(name, out[0].x.detach().clone())

    handles = [each.register_forward_hook(keep(name)) for name, each in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def slopes(sizes: Mapping[int, Sizes]) -> dict[str, tuple[float, float]]:
    """Return the least-squares slope of log(size) by log(width) of each layer: size, change."""
    widths = np.log([float(width) for width in sizes])
    layers = next(iter(sizes.values()))
    values = {name: np.log([of[name] for of in sizes.values()]) for name in layers}
    return {name: tuple(np.polyfit(widths, of, 1)[0].tolist()) for name, of in values.items()}  # pyright: ignore[reportReturnType]


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
