"""What a process does with the memory of freed tensors."""

import os
import subprocess
import sys

import pytest
import torch

from lightning_app.training.hardware import arithmetic

PROGRAM = """
import ctypes, torch
from lightning_app.training.hardware import keep_freed_blocks


class MallocInfo(ctypes.Structure):
    _fields_ = [(f"field_{{i}}", ctypes.c_int) for i in range(10)]


mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = MallocInfo
if {keep}:
    keep_freed_blocks()
torch.set_num_threads(1)


before = mallinfo().field_0  # the bytes of the heap
kept = [torch.ones(2**21) for _ in range(8)]  # 8 MB each
del kept
print(mallinfo().field_0 - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_blocks_stay_in_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)

    def growth(keep: bool) -> int:
        code = PROGRAM.format(keep=keep)
        call = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        return int(call.stdout)

    # A count of page faults would say more, but some kernels do not keep it.
    assert growth(keep=True) > 6 * 2**23  # the heap may have had some room
    assert growth(keep=False) < 2**23


CHANGING = {
    **{"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "DNNL_DEFAULT_FPMATH_MODE": "ANY"},
    **{"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    **{"NVIDIA_TF32_OVERRIDE": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
    **{"ATEN_CPU_CAPABILITY": "avx2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}


def test_what_changes_arithmetic_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic()
    for name, value in (("ONEDNN_VERBOSE", "1"), ("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")):
        monkeypatch.setenv(name, value)
        assert arithmetic() == before
    for name, value in CHANGING.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert arithmetic() == {**before, name: value}
    assert "float32_matmul_precision" not in arithmetic()
    switch = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert arithmetic()["float32_matmul_precision"] == "medium"
    finally:
        torch.set_float32_matmul_precision(switch)
    torch.use_deterministic_algorithms(True)
    try:
        assert arithmetic() == {**before, "deterministic_algorithms": "True"}
    finally:
        torch.use_deterministic_algorithms(False)
