"""A short form of `benchmarks/chaos.py`; the long form is run by hand."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
def test_two_hosts_and_a_journal_that_is_torn() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short name: hosts keep their sockets in it
        command = [sys.executable, str(CHAOS), "--short", "--folder", folder]
        command += ["--cells", "8", "--ddp-cells", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["problems"], found["faults_without_a_victim"]) == ([], {})
    assert found["wasted_attempts"] >= 1
    faults = found["faults"]
    assert faults.pop("journal torn") >= 1
    assert faults == {"worker killed": 1, "rank killed": 1, "supervisor killed": 2}
