"""Comparisons as tables on the terminal and as JSON."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from lightning_app.atomic_write import write_whole
from lightning_app.bench.compare import Comparison, Result
from lightning_app.bench.measure import Spread
from lightning_app.bench.rates import Rates

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
    """Return the machine and libraries, on which the numbers depend."""
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
