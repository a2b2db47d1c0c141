"""The hardware of a run: its name, since results depend on it, and the memory of a CPU."""

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lightning_app.blocks.linear import float32_library
from lightning_app.provenance import cpu_model

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 2**30


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


def keep_freed_blocks() -> None:
    """Let this process keep the memory of freed tensors for the next ones.

    By default glibc returns a large block to the system at once, which must clear its pages before
    the next tensor gets them: a tenth to a sixth of a small training step on a CPU. Without glibc,
    and where the environment sets its allocator, nothing is done.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(threshold, KEPT_BYTES)


def default_device(accelerator: str = "auto") -> torch.device:
    """The kind of device that a trainer with this `accelerator` computes on here."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator == "cpu" or found is None else found
