"""The devices of a run, their process group, and the provenance that this machine records."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lightning_app.blocks.linear import float32_library
from lightning_app.core.errors import UserError
from lightning_app.data.prepare import find
from lightning_app.data.sources import resolved_data
from lightning_app.runs.provenance import cpu_model, software

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
KEPT_BYTES = 2**30


_LIBRARIES = ("ONEDNN_", "DNNL_", "MKL_", "CUBLAS", "CUDNN_", "NVIDIA_TF32", "ATEN_", "OPENBLAS_")
_LIBRARIES += ("TORCH_ALLOW_", "TORCH_CUDNN", "HIPBLAS", "ROCBLAS_", "MIOPEN_", "PYTORCH_MPS_")
"""The prefixes of environment variables that change what libraries compute."""

_NO_NUMBERS = ("VERBOSE", "THREADS", "DYNAMIC", "LOG", "LOGDEST", "LOGINFO", "PROFILE", "CACHE")
"""The suffixes of those that do not: they only print, or are recorded elsewhere."""

_GPU = torch.backends.cuda.matmul
_SWITCHES: Mapping[str, tuple[Callable[[], Any], Any]] = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, "highest"),
    "fp32_precision": (lambda: getattr(torch.backends, "fp32_precision", "none"), "none"),
    "cuda.matmul.allow_tf32": (lambda: _GPU.allow_tf32, False),
    "cudnn.allow_tf32": (lambda: torch.backends.cudnn.allow_tf32, True),
    "fp16_reduced_precision_reduction": (lambda: _GPU.allow_fp16_reduced_precision_reduction, True),
    "bf16_reduced_precision_reduction": (lambda: _GPU.allow_bf16_reduced_precision_reduction, True),
    "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, False),
    "cudnn.deterministic": (lambda: torch.backends.cudnn.deterministic, False),
    "cudnn.benchmark": (lambda: torch.backends.cudnn.benchmark, False),
    "mkldnn": (torch.backends.mkldnn.is_available, True),
    "flush_denormal": (lambda: not torch.tensor([1e-40]).mul(1).any(), False),
    "default_dtype": (lambda: str(torch.get_default_dtype()), "torch.float32"),
}
"""The switches of torch that change arithmetic, each with its default."""


def arithmetic() -> dict[str, str]:
    """Settings outside the config that change arithmetic: variables and switches by name.

    Defaults are left out, so that runs of earlier versions, which did not record this,
    count as runs with the defaults.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_LIBRARIES) and not name.endswith(_NO_NUMBERS) and value
    }
    if found.get("ONEDNN_DEFAULT_FPMATH_MODE", "").upper() == "STRICT":  # the default
        del found["ONEDNN_DEFAULT_FPMATH_MODE"]
    for name, (read, default) in _SWITCHES.items():
        try:
            value = read()
        except RuntimeError:  # torch's older and newer switches for float32 were both used
            value = "ambiguous"
        if value != default:
            found[name] = str(value)
    return dict(sorted(found.items()))


def hardware(device: torch.device, ids: Sequence[int] = (0,)) -> dict[str, Any]:
    """Describe the hardware and libraries of `device`: `cpu`, `gpus`, `matmul` and `threads`.

    `gpus` has one name per entry of `ids`; it is empty on a CPU. `matmul` is the library that
    multiplies float32 matrices, and its mode, since rounding differs. `arithmetic` has all other
    settings that affect it.
    """
    if device.type == "cpu":
        gpus = []
        matmul = f"{float32_library()} ({torch.backends.cpu.get_cpu_capability()})"
    else:
        is_cuda = device.type == "cuda"
        gpus = [torch.cuda.get_device_name(k) if is_cuda else device.type for k in ids]
        library = ("cuBLAS" if torch.version.hip is None else "hipBLAS") if is_cuda else device.type
        matmul = f"{library} (float32 {torch.get_float32_matmul_precision()})"
    threads = torch.get_num_threads()
    found = {"cpu": cpu_model(), "gpus": gpus, "matmul": matmul, "threads": threads}
    return {**found, "arithmetic": arithmetic()}


def keep_freed_blocks() -> None:
    """Make this process keep the memory of freed tensors for new ones.

    By default glibc returns a large block to the system at once, which must clear its pages before
    the next tensor gets them: a tenth to a sixth of a small training step on a CPU. Without glibc,
    or if the environment configures the allocator, nothing is done.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(threshold, KEPT_BYTES)


_TIMEOUT = timedelta(hours=24)  # the supervisor kills a hanging rank much earlier


def join_process_group(rank: int, size: int, meeting: Path, accelerator: str) -> None:
    """Make this process rank `rank` of `size`; return when all processes have joined.

    They meet through a file and communicate on the loopback interface, so no port is open to other
    hosts, and no two cells compete for a port. Lightning uses the existing group.
    """
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size)}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting.resolve()}",
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
    )


def here(sections: Iterable[Mapping[str, Any]], accelerator: str = "auto") -> dict[str, Any]:
    """The current `provenance` of a run on this machine, and the `corpora` of `data` sections.

    The corpora are None if one is not prepared on this machine: nothing is downloaded.
    """
    corpora = [_corpus(section) for section in sections]
    found = torch.accelerator.current_accelerator(check_available=True)  # as a Trainer would
    device = torch.device("cpu") if accelerator == "cpu" or found is None else found
    made = {**software(), **hardware(device)}
    return {"provenance": made, "corpora": None if None in corpora else corpora}


def _corpus(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        found = find(resolved_data(section))
    except UserError:  # its files are missing, so its digest is unknown here
        return None
    return None if found is None else {"digest": found.digest}
