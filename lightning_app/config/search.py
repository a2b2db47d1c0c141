"""The parts of a grid file that make cells while the grid runs: `search` and `refine`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_app.config.tree import RATE, SEED, lookup
from lightning_app.core.errors import UserError


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
    """The distance between values; null: any value, or whole numbers between whole numbers."""

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
    """Runs per arm: trials times seeds."""
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


def check_search(
    search: Search | None,
    refine: Refine | None,
    axes: Mapping[str, list[Any]],
    linked: Mapping[str, tuple[str, Any]],
    exclude: Sequence[Mapping[str, Any]],
    base: Mapping[str, Any],
    pruner: str | None,
) -> None:
    """Refuse a search of a field that is fixed, and a budget that does not suffice for a round.

    Raises:
        UserError: naming the field, also for an exclusion or an axis that follows what is chosen.
    """
    seeds = len(axes.get(SEED, [None]))
    if search is not None and refine is not None:
        raise UserError("refine: cannot be combined with 'search'; a search chooses its own rates")
    if search is not None:
        for field in search.fields:
            clash = next((a for a in axes if f"{a}.".startswith(f"{field}.")), None)
            clash = clash or next((a for a in axes if field.startswith(f"{a}.")), None)
            if clash or field == SEED:
                raise UserError(f"search.fields: {field}: is also on the axis {clash or SEED}")
            if isinstance(lookup(base, field), bool | str | list | dict):
                raise UserError(
                    f"search.fields: {field}: expected a field that is a number, found "
                    f"{lookup(base, field)!r} in the base"
                )
        _check_budget("search", search.budget, search.together, seeds, "trials")
    if refine is not None:
        if pruner is not None:
            raise UserError("pruner: cannot be combined with 'refine', which needs final losses")
        rates = axes.get(RATE, [])
        if len(rates) < 2 or RATE in linked:
            raise UserError(
                f"refine: expected an axis {RATE} of at least two rates, found {len(rates)}"
            )
        for axis, (other, _) in linked.items():
            if other == RATE:
                raise UserError(
                    f"axes: {axis}: follows {RATE}, whose further values refine chooses; give it "
                    "values of its own"
                )
        if any(RATE in entry for entry in exclude):
            raise UserError(
                f"exclude: names {RATE}, which refine chooses by results; exclude by other axes"
            )
        _check_budget("refine", refine.budget, len(rates), seeds, "rates")


def _check_budget(field: str, budget: int, together: int, seeds: int, what: str) -> None:
    if budget < together * seeds:
        raise UserError(
            f"{field}.budget: expected at least {together * seeds} runs per arm, for the first "
            f"{together} {what} with {seeds} seeds, found {budget}"
        )
