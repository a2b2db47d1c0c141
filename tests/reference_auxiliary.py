"""The training loss of Al-Rfou et al. 2019 (1808.04444): NumPy, float64, one token at a time.

Nothing here is shared with the package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tests.reference import (
    Array,
    Flags,
    Sizes,
    Stack,
    Tokens,
    end,
    output_table,
    over_vocabulary,
    run_layers,
)


@dataclass(frozen=True, kw_only=True)
class Auxiliary:
    """Which losses are added to that of the last layer, and when."""

    intermediate: float
    second_target: float
    own_tables: bool
    progress: Fraction
    smoothing: float = 0.0

    def layers(self, depth: int) -> list[int]:
        """The layers below the last that predict: layer l of n until l / (2 n) of training."""
        if not self.intermediate:
            return []
        return [n for n in range(1, depth) if self.progress < Fraction(n, 2 * depth)]


def token_loss(logits: Array, label: int, smoothing: float) -> float:
    """``(1 - e) (-log p[label]) + e mean(-log p)``."""
    log_p = logits - logits.max()
    log_p = log_p - np.log(np.exp(log_p).sum())
    return float((1 - smoothing) * -log_p[label] + smoothing * -log_p.mean())


def summed(
    sizes: Sizes,
    states: Array,
    table: Array,
    bias: Array | float,
    labels: Tokens,
    counted: Flags,
    e: float,
):
    """The loss over the places that count; labels have the shape of the states' places."""
    total = 0.0
    for place in np.ndindex(labels.shape):
        if counted[place]:
            logits = over_vocabulary(sizes, states[place], table, bias)
            total += token_loss(logits, int(labels[place]), e)
    return total


def losses(
    auxiliary: Auxiliary,
    stack: Stack,
    x: Array,
    labels: Tokens,
    counted: Flags,
    finish: Callable[[Array], Array] = lambda states: states,
) -> tuple[float, float, float]:
    """The sums over tokens of the last layer, of the layers below it, and of its second target.

    The last two come with the weights of the paper's sum. `finish` is what follows a stack in the
    output layer.
    """
    parameters, e = stack.parameters, auxiliary.smoothing
    tied, bias = output_table(parameters), parameters.get("output_bias", 0.0)
    second_labels, second_counted = np.zeros_like(labels), np.zeros_like(counted)
    if auxiliary.second_target:
        batch, length = labels.shape
        for b in range(batch):
            for i in range(length - 1):
                second_labels[b, i] = labels[b, i + 1]
                second_counted[b, i] = counted[b, i] and counted[b, i + 1]

    def second(states: Array, layer: int) -> float:
        if not auxiliary.second_target:
            return 0.0
        own = layer - 1 if auxiliary.own_tables else 0
        table = parameters[f"auxiliary.second_tables.{own}.weight"]
        loss = summed(stack.sizes, states, table, bias, second_labels, second_counted, e)
        return auxiliary.second_target * loss

    last, below, ahead = 0.0, 0.0, 0.0
    for layer, (stream, total) in enumerate(run_layers(stack, x), start=1):
        if layer == stack.depth:
            states = finish(end(stack, stream, total, f"{stack.side}.final_norm"))
            last = summed(stack.sizes, states, tied, bias, labels, counted, e)
            ahead = second(states, layer)
        elif layer in auxiliary.layers(stack.depth):
            states = finish(end(stack, stream, total, f"auxiliary.norms.{layer - 1}"))
            table = tied
            if auxiliary.own_tables:
                table = parameters[f"auxiliary.tables.{layer - 1}.weight"]
            below += summed(stack.sizes, states, table, bias, labels, counted, e) + second(
                states, layer
            )
    return last, auxiliary.intermediate * below, ahead
