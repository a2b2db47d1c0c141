"""Out of memory is recognized by the errors that torch and the system really raise."""

import errno
import os

import pytest
import torch

from lightning_app.core.errors import is_out_of_memory


def caught(action) -> BaseException:
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("did not fail")


def test_what_torch_and_python_raise_and_no_other_error() -> None:
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = caught(lambda: torch.empty(1 << 60, dtype=torch.uint8))
    for error in (
        *(wrapped, wrapped.__cause__, caught(lambda: bytearray(1 << 60))),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ):
        assert is_out_of_memory(error), error
    assert not is_out_of_memory(ValueError("the model forgot: out of memory of its past"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


@pytest.mark.gpu
def test_a_tensor_that_no_gpu_holds() -> None:
    assert is_out_of_memory(caught(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda")))
