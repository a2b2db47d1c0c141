"""The parts of a grid file that make cells while the grid runs: `search` and `refine`."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values of a searched field."""

    low: int | float
    """The smallest value."""
    high: int | float
    """The largest value."""
    log: bool = False
    """Whether the logarithm of the value is searched."""
    step: int | float | None = None
    """The distance between values; null: any value of the field's type."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low >= self.high:
            raise ValueError(f"high: expected a number above low ({self.low:g}), found {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low: expected a number above 0 with log, found {self.low:g}")
        if self.step is not None and (self.log or not 0 < self.step <= self.high - self.low):
            raise ValueError(
                f"step: expected a number from 0 to {self.high - self.low:g}, without log, "
                f"found {self.step}"
            )

    @property
    def last(self) -> int | float:
        """The largest value that can be tried: below `high` if the step does not divide it."""
        if self.step is None:
            return self.high
        steps = math.floor((self.high - self.low) / self.step + 1e-9)
        return min(self.low + steps * self.step, self.high)


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search by Optuna, on its own in every arm: every combination of axes but the seed."""

    fields: dict[str, Range]
    """The dotted config keys that are searched, each with its range."""
    budget: int
    """Runs per arm: trials times the seeds of the arm that has most of them."""
    sampler: Literal["tpe", "gp", "cmaes", "random", "grid", "qmc"] = "tpe"
    """The sampler of Optuna."""
    together: int = 4
    """Trials per round; the next round is asked once all of them have ended."""
    seed: int = 0
    """The seed of the sampler."""

    def __post_init__(self) -> None:
        if not self.fields:
            raise ValueError("fields: expected at least one dotted key of a config")
        if self.together < 1:
            raise ValueError(f"together: expected at least 1, found {self.together}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, found {self.seed}")


@dataclass(frozen=True, kw_only=True)
class Refine:
    """Further learning rates around the best one of every arm, until it is known well enough."""

    budget: int
    """Runs per arm, those at the rates of the axis included: rates times seeds."""
    until: float = 0.03
    """The largest gain, in the unit of the metric, that a rate beside the best one of an arm may
    still bring, by curves through the means around it."""
    finest: float = 0.25
    """The smallest distance between rates, in octaves."""

    def __post_init__(self) -> None:
        for name in ("until", "finest"):
            if not 0 < getattr(self, name) < math.inf:
                found = getattr(self, name)
                raise ValueError(f"{name}: expected a number above 0, found {found}")
