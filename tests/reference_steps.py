"""Shared layers and adaptive computation time as their papers write them, one token at a time.

Dehghani et al. 2019, Universal Transformer (1807.03819), section 2; Graves 2016 (1603.08983),
section 2. Nothing here is shared with the package; see `reference`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.reference import Array, Layer, Stack, sinusoids


@dataclass
class Step(Layer):
    """Layer `number` with the parameters of the only block."""

    def name(self, part: str) -> str:
        return f"{self.stack.side}.blocks.0.{part}"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One block for all layers; `ponder` collects N + R of every token, by stack."""

    signal: Literal["none", "sinusoidal", "learned"] = "none"
    positions: str = "sinusoidal"
    """Those that are added before each step, where there is a signal."""
    epsilon: float | None = None
    """None: as many steps as the stack is deep, for every token."""
    ponder: dict[str, Array] = field(default_factory=dict)
    steps: dict[str, Array] = field(default_factory=dict)

    def __call__(self, stack: Stack, x: Array) -> Array:
        if self.epsilon is not None:
            return self.averaged(stack, x, self.epsilon)
        for n in range(1, stack.depth + 1):
            x = self.after(stack, x, n)
        return x

    def after(self, stack: Stack, x: Array, n: int) -> Array:
        """Return the states after step n."""
        return stack.reference.layer(Step(stack, n), x + self.signals(stack, x, n))

    def signals(self, stack: Stack, x: Array, n: int) -> Array:
        """Position i and step n, from 1: ``PE(i) + PE(n)``, or learned vectors in place of them."""
        length, dim = x.shape[1:]
        tables = f"{stack.side}.signals"
        added = np.zeros((length, dim))
        if self.signal == "none":
            return added
        for i in range(length):
            if self.positions == "sinusoidal":
                added[i] += sinusoids(length, dim)[i]
            elif self.positions == "learned":
                added[i] += stack.parameters[f"{tables}.position_table.weight"][i]
            if self.signal == "sinusoidal":
                added[i] += sinusoids(n + 1, dim)[n]
            else:
                added[i] += stack.parameters[f"{tables}.step_table.weight"][n - 1]
        return added

    def averaged(self, stack: Stack, x: Array, epsilon: float) -> Array:
        """Graves 2016, equations 5-14: N, p_n and ``sum_n p_n s_n`` of each token."""
        weight = stack.parameters[f"{stack.side}.halting.unit.weight"][0]
        bias = stack.parameters[f"{stack.side}.halting.unit.bias"][0]
        places = list(np.ndindex(x.shape[:2]))
        given: dict[tuple[int, ...], list[float]] = {place: [] for place in places}
        average = np.zeros_like(x)
        ponder, steps = np.zeros(x.shape[:2]), np.zeros(x.shape[:2])
        for n in range(1, stack.depth + 1):
            moved = self.after(stack, x, n)
            x = x.copy()
            for place in places:
                if steps[place]:
                    continue
                x[place] = moved[place]
                h = 1.0 / (1.0 + math.exp(-(x[place] @ weight + bias)))
                before = sum(given[place])
                given[place].append(h)
                if n == stack.depth or before + h >= 1.0 - epsilon:
                    average[place] += (1.0 - before) * x[place]
                    steps[place], ponder[place] = n, n + 1.0 - before
                else:
                    average[place] += h * x[place]
        self.ponder[stack.side], self.steps[stack.side] = ponder, steps
        return average
