"""What a process does with the memory of freed tensors."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from lightning_app.hardware import keep_freed_blocks

if {keep}:
    keep_freed_blocks()
torch.set_num_threads(1)


def work():
    kept = [torch.ones(2**21) for _ in range(8)]  # 8 MB each


for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_blocks_are_taken_again_without_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)

    def faults(keep: bool) -> int:
        code = PROGRAM.format(keep=keep)
        call = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        return int(call.stdout)

    assert 20 * faults(keep=True) < faults(keep=False)
