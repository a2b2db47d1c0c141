"""Comparisons of speed, and their tables.

Contenders are compared with the first one: ratios of time and memory, and numbers of calls.
Comparisons are printed as tables and written as JSON.
"""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from lightning_app.core.files import write_whole
from lightning_app.lab.bench.measure import (
    Clock,
    Rates,
    Spread,
    Work,
    count_calls,
    peak_memory,
    product_flops,
    ratios,
    resident,
    rounds,
)


class Missing(Exception):
    """A package that a contender needs is missing; the message says how to install it."""


@dataclass(frozen=True)
class Contender:
    """A name and a function that builds the work; it must be picklable for resident memory.

    A build may raise `Missing`: the contender is then skipped, and the table gives the reason.
    """

    name: str
    build: Callable[[], Work]


@dataclass(frozen=True, kw_only=True)
class How:
    """The extent of the measurement.

    `resident`: whether to also measure the memory of a separate process. `rate` is the rate of
    products (FLOP/s) to which shares refer; without it no share is computed.
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
    """Measure everything except the ratio of memory."""
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


PACKAGES = ("torch", "x-transformers", "transformers")
MEGA, GIGA = 1e6, 1e9


def table(comparison: Comparison) -> Table:
    """Return one comparison, without its title; ratios are to its first row."""
    shown = Table(box=box.SIMPLE)
    shown.add_column("")
    columns = ["ms", "time", "quartiles", "MB", "memory", "calls", "parameters"]
    if any(result.share is not None for result in comparison.results):
        columns.append("share")
    resident = any(result.resident_bytes is not None for result in comparison.results)
    if resident:
        columns.insert(5, "resident MB")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for result in comparison.results:
        if result.missing is None:
            shown.add_row(result.name, *_cells(result, resident=resident))
    absent = [f"{r.name}: {r.missing}" for r in comparison.results if r.missing is not None]
    shown.caption, shown.caption_justify = "\n".join(absent).replace("[", r"\["), "left"
    return shown


def _cells(result: Result, *, resident: bool) -> list[str]:
    assert result.seconds is not None
    assert result.time is not None
    assert result.peak_bytes is not None
    cells = [
        f"{1e3 * result.seconds.median:.4g}",
        f"{result.time.median:.3f}",
        f"{result.time.low:.3f} to {result.time.high:.3f}",
        _megabytes(result.peak_bytes),
        f"{result.memory:.3f}",
        f"{result.calls:,}",
        f"{result.parameters:,}" if result.parameters else "",
    ]
    if result.share is not None:
        cells.append(f"{result.share:.2f}")
    if resident:
        size = result.resident_bytes
        cells.insert(5, "" if size is None else _megabytes(size))
    return cells


def _megabytes(size: int) -> str:
    return f"{size / MEGA:,.1f}" if size >= 10 * MEGA else f"{size / MEGA:.3f}"


def machine(device: str) -> dict[str, Any]:
    """Return the machine and libraries that the numbers depend on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions,
    }


def rates_line(rates: Rates) -> str:
    """Return the measured rates of products as text."""
    shown = ", ".join(f"{name} {rate / GIGA:,.0f}" for name, rate in rates.items())
    return f"products on this device, GFLOP/s: {shown}"


def _processor() -> str:
    """Return the processor's name on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def write_json(
    path: Path, settings: dict[str, Any], rates: Rates, comparisons: Sequence[Comparison]
) -> None:
    """Write all measurements, with unrounded seconds and bytes."""
    content = {
        "machine": machine(settings["device"]),
        "rates": rates,
        "settings": settings,
        "comparisons": as_mappings(comparisons),
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def as_mappings(value: Any) -> Any:
    """Return results as mappings, lists and numbers; JSON would make lists of named tuples."""
    if isinstance(value, Spread):
        return value._asdict()
    if isinstance(value, Comparison | Result):
        return as_mappings({field.name: getattr(value, field.name) for field in fields(value)})
    if isinstance(value, dict):
        return {key: as_mappings(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_mappings(part) for part in value]
    return value
