"""`ablate bench --explain`: the chosen form of attention, and why."""

import torch
from rich import box
from rich.table import Table

from lightning_app.blocks.kernels import choose
from lightning_app.blocks.linear import prefers_onednn

LENGTHS = (64, 128, 256, 512, 1024, 2048, 8192, 32768)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOKENS, HEADS = 4096, 4


def explained(devices: list[torch.device]) -> Table:
    """Return the choice of the policy for a few shapes, types and devices."""
    shown = Table(title="Residual attention (scores)", title_justify="left", box=box.SIMPLE)
    for column in ("device", "type", "maps: batch x heads x T x T", "form", "why"):
        shown.add_column(column)
    for device in devices:
        for dtype in DTYPES:
            # Scores have at least float32, for every type of queries and keys.
            itemsize = torch.promote_types(dtype, torch.float32).itemsize
            for length in LENGTHS:
                shape = (max(1, TOKENS // length), HEADS, length, length)
                form, reason = choose(shape, device, itemsize)
                name, size = str(dtype).removeprefix("torch."), " x ".join(map(str, shape))
                shown.add_row(device.type, name, size, form, reason)
    shown.caption_justify = "left"
    products = (
        "oneDNN, as MKL leaves AVX-512 of AMD unused" if prefers_onednn() else "PyTorch's own"
    )
    shown.caption = (
        "Everything else uses SDPA with its fastest kernel; a shaped map adds the mean of the "
        "values that a query sees; sums of Q and K are inputs of SDPA. Large products of "
        f"float32 on this CPU: {products}."
    )
    return shown
