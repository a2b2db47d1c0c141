"""Addresses that open TensorBoard with one run."""

import re
from urllib.parse import quote

from lightning_app.analysis.grid_results import CellResult


def run_url(base: str, cell: CellResult) -> str:
    """The address that opens TensorBoard with this run alone.

    `base` is the address of the server, ``http://127.0.0.1:6006``. The tab Time series uses
    `runFilter`; the other tabs use `regexInput`, which they share. With more than 500 runs
    TensorBoard selects no run by itself, and the user must tick the one that Time series lists.
    """
    name = re.sub(r"[^\w-]", r"\\\g<0>", cell.name)
    pattern = quote(f"runs/{name}$", safe="")
    return f"{base.rstrip('/')}/?runFilter={pattern}#timeseries&regexInput={pattern}"
