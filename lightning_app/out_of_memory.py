"""The memory of a process: its peak, and whether it ran out."""

import resource
import sys

_SAID = (
    "out of memory",  # CUDA and cuBLAS: "CUDA out of memory", "CUDA error: out of memory"
    "can't allocate memory",  # torch on a CPU: "DefaultCPUAllocator: can't allocate memory"
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",  # the system itself, as in fork
)


def peak_resident_bytes() -> int:
    """The peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a lack of memory, on the host or on a device, caused `error`.

    It is recognized by class and message, so that torch need not be imported.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError":
            return True
        if isinstance(link, RuntimeError | OSError) and any(word in str(link) for word in _SAID):
            return True
        link = link.__cause__ or link.__context__
    return False
