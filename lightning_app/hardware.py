"""The name of the processor of a run, since results depend on it."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_app.blocks.linear import float32_library
from lightning_app.provenance import cpu_model


def hardware(device: torch.device, ids: Sequence[int] = (0,)) -> dict[str, Any]:
    """Describe the hardware and libraries of `device`: `cpu`, `gpus`, `matmul` and `threads`.

    `gpus` has a name for each of `ids`; it is empty on a CPU. `matmul` is the library that
    multiplies float32 matrices, and how: rounding differs between them.
    """
    if device.type == "cpu":
        gpus = []
        how = torch.backends.cpu.get_cpu_capability()
        matmul = f"{float32_library()} ({how})"
    else:
        is_cuda = device.type == "cuda"
        gpus = [torch.cuda.get_device_name(k) if is_cuda else device.type for k in ids]
        library = ("cuBLAS" if torch.version.hip is None else "hipBLAS") if is_cuda else device.type
        matmul = f"{library} (float32 {torch.get_float32_matmul_precision()})"
    threads = torch.get_num_threads()
    return {"cpu": cpu_model(), "gpus": gpus, "matmul": matmul, "threads": threads}


def default_device(accelerator: str = "auto") -> torch.device:
    """The kind of device that a trainer with this `accelerator` computes on here."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator == "cpu" or found is None else found
