"""The parts of a grid file that make cells while the grid runs: `search` and `refine`."""

import math
from dataclasses import dataclass
from typing import Literal

from lightning_app.config.tree import RATE


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
    """A search by Optuna, on its own in every arm: every combination of axes but the seed.

    With `per: seed` each seed of an arm is a study of its own, so that the best of its trials is
    one independent value (Dodge et al. 2019).
    """

    fields: dict[str, Range]
    """The dotted config keys that are searched, each with its range."""
    per: Literal["arm", "seed"] = "arm"
    """Whether a study is of an arm, whose trials run with every seed, or of one seed of it."""
    budget: int | None = None
    """Per arm: its runs, trials times the seeds of the arm that has most of them."""
    trials: int | None = None
    """Per seed: the trials of each seed of an arm."""
    sampler: Literal["tpe", "gp", "cmaes", "random", "grid", "qmc", "stratified"] | None = None
    """The sampler of Optuna, or per seed stratified; null: tpe, per seed stratified."""
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
        wanted, other = ("trials", "budget") if self.per == "seed" else ("budget", "trials")
        count = getattr(self, wanted)
        if count is None or count < 1:
            raise ValueError(f"{wanted}: expected at least 1 with per: {self.per}, found {count}")
        if getattr(self, other) is not None:
            raise ValueError(f"{other}: has no meaning with per: {self.per}; give {wanted}")
        if self.per == "seed" and [*self.fields] != [RATE]:
            raise ValueError(
                f"fields: expected {RATE} alone with per: seed, whose verdicts are on it"
            )
        if self.per == "seed" and self.kind != "grid" and self.fields[RATE].step is not None:
            raise ValueError(
                f"fields: {RATE}: step: a rate that repeats is one trial less; remove step"
            )
        if self.kind == "stratified" and self.per == "arm":
            raise ValueError("sampler: stratified needs per: seed")

    @property
    def kind(self) -> str:
        """The sampler."""
        return self.sampler or ("stratified" if self.per == "seed" else "tpe")

    @property
    def first(self) -> int:
        """The trials of the first round."""
        if self.trials is None:
            return self.together
        return self.trials if self.kind == "stratified" else min(self.together, self.trials)


@dataclass(frozen=True, kw_only=True)
class Until:
    """Further seeds, one at a time in all arms, until the intervals are narrow enough."""

    half_width: float
    """The half width of the 97 % interval of T, in the unit of the metric, that no arm exceeds."""
    most_seeds: int = 20
    """The largest number of seeds."""

    def __post_init__(self) -> None:
        if not 0 < self.half_width < math.inf:
            raise ValueError(f"half_width: expected a number above 0, found {self.half_width}")


ALPHA = 0.05  # the two-sided error of intervals and labels
LOOKED_AT = 0.03
"""The two-sided error of the intervals of a grid with `until`: looked at after each seed and kept
once they are narrow, 97 % ones cover about 95 % (`benchmarks/coverage.py`)."""


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
                value = getattr(self, name)
                raise ValueError(f"{name}: expected a number above 0, found {value}")
