"""Short forms of `benchmarks/chaos.py`; the long form is run by hand."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def chaos(folder: Path, cells: int, ddp_cells: int) -> dict[str, int]:
    """Run it, have all its checks hold, and return the faults by kind."""
    command = [sys.executable, str(CHAOS), "--short", "--folder", str(folder)]
    command += ["--cells", str(cells), "--ddp-cells", str(ddp_cells)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert found["faults_without_a_victim"] == {}
    assert found["wasted_attempts"] >= 1
    return found["faults"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a short name: its hosts keep their sockets in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
def test_two_hosts_and_a_journal_that_is_torn(folder: Path) -> None:
    faults = chaos(folder, 8, 4)
    assert faults.pop("journal torn") >= 1
    assert faults == {"worker killed": 1, "rank killed": 1, "supervisor killed": 2}
