"""Compare contenders with the first one: ratios of time and memory, and calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_app.bench.measure import (
    Clock,
    Spread,
    Work,
    count_calls,
    peak_memory,
    ratios,
    rounds,
)
from lightning_app.bench.rates import product_flops
from lightning_app.bench.resident import resident


class Missing(Exception):
    """A package that a contender needs is missing; the message says how to install it."""


@dataclass(frozen=True)
class Contender:
    """A name, and a function that builds the work; it must be picklable for resident memory.

    A build may raise `Missing`: the contender is then skipped, and the table gives the reason.
    """

    name: str
    build: Callable[[], Work]


@dataclass(frozen=True, kw_only=True)
class How:
    """The extent of the measurement.

    `resident`: also the memory of a separate process. `rate` is the rate of products (FLOP/s)
    that shares refer to; without it no share is computed.
    """

    rounds: int = 5
    warm: int = 1
    device: str = "cpu"
    resident: bool = False
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measurements of one contender; `time` and `memory` are ratios to the first contender.

    `peak_bytes` is its peak memory beyond its model: see `measure.peak_memory`. `flops` counts the
    operations of its matrix products; they would take `share` of its time at the measured rate.
    """

    name: str
    seconds: Spread | None = None
    time: Spread | None = None
    peak_bytes: int | None = None
    memory: float | None = None
    resident_bytes: int | None = None
    calls: int | None = None
    parameters: int = 0
    flops: int | None = None
    share: float | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Contenders that did the same work; `clock` names the clock of the seconds."""

    title: str
    clock: str
    results: tuple[Result, ...]


def compare(title: str, contenders: Sequence[Contender], how: How) -> Comparison:
    """Measure each contender in rounds together with the first one, two models at a time."""
    device = torch.device(how.device)
    clock = Clock(device)
    first, *others = contenders
    base = first.build()
    alone = rounds([base.run], how.rounds, clock, how.warm)[0]
    results = [_result(first, base, alone, alone, how)]
    for contender in others:
        try:
            work = contender.build()
        except Missing as why:
            results.append(Result(name=contender.name, missing=str(why)))
            continue
        against, seconds = rounds([base.run, work.run], how.rounds, clock, how.warm)
        results.append(_result(contender, work, seconds, against, how))
        del work  # before the next is built
    peak = results[0].peak_bytes
    assert peak is not None
    results = [
        result if result.peak_bytes is None else replace(result, memory=result.peak_bytes / peak)
        for result in results
    ]
    return Comparison(title, clock.kind, tuple(results))


def _result(
    contender: Contender, work: Work, seconds: list[float], against: list[float], how: How
) -> Result:
    """Return all measurements except the ratio of memory."""
    alone = resident(contender.build, torch.get_num_threads()) if how.resident else None
    spread, flops = Spread.of(seconds), product_flops(work.run)
    return Result(
        name=contender.name,
        seconds=spread,
        flops=flops,
        share=None if how.rate is None else flops / spread.median / how.rate,
        time=ratios(seconds, against),
        peak_bytes=peak_memory(work.run, torch.device(how.device)),
        resident_bytes=alone,
        calls=count_calls(work.run).total,
        parameters=work.parameters,
    )
