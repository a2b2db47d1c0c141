"""Addresses that open TensorBoard where a reader wants to be."""

import re
from urllib.parse import quote

from lightning_app.analysis.grid_results import CellResult


def run_url(base: str, cell: CellResult) -> str:
    """The address that opens TensorBoard with this run alone.

    `base` is the server's own address, ``http://127.0.0.1:6006``. Time series goes by `runFilter`,
    the other tabs by `regexInput`, which they keep between them. Above 500 runs TensorBoard selects
    none by itself, and the one that Time series lists must be ticked.
    """
    name = re.sub(r"[^\w-]", r"\\\g<0>", cell.name)
    pattern = quote(f"runs/{name}$", safe="")
    return f"{base.rstrip('/')}/?runFilter={pattern}#timeseries&regexInput={pattern}"
