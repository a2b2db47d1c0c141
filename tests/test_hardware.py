"""What a process does with the memory of freed tensors."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, torch
from lightning_app.hardware import keep_freed_blocks


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
