import subprocess
import sys
import time
from pathlib import Path

import psutil

from lightning_app.grids.workers import MARK, end_marked, end_tree

CHAIN = """\
import subprocess, sys, time
inner = "import time; time.sleep(600)"
# In a session of its own, as torchrun starts its workers.
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600 if sys.argv[1] == "stay" else 0)
"""


def chain(how: str, record: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process, and its child in a session of its own; the parent may leave it an orphan."""
    parent = subprocess.Popen(
        [sys.executable, "-c", CHAIN, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={MARK: str(record.resolve())},
    )
    assert parent.stdout is not None
    with parent.stdout as said:
        return parent, psutil.Process(int(said.readline()))


def is_gone(process: psutil.Process) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_descendants_in_other_sessions_end_with_their_ancestor(tmp_path: Path) -> None:
    parent, child = chain("stay", tmp_path)
    end_tree([parent.pid])
    assert is_gone(child)
    parent.wait()


def test_orphans_are_known_by_their_mark_and_others_left_alone(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "1", tmp_path / "2"
    parents = [chain("leave", record) for record in (ours, theirs)]
    for parent, _ in parents:
        parent.wait()
    (_, orphan), (_, other) = parents
    try:
        assert orphan.is_running()
        end_marked([ours])
        assert is_gone(orphan)
        assert other.is_running()
    finally:
        end_marked([theirs])
    assert is_gone(other)
