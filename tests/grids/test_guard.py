import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lightning_app.core.errors import UserError
from lightning_app.grids.workers import MARK, end_marked, end_tree
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import Interrupted, if_free, supervisor_lock, turn

HOLD = """\
import sys, time
from pathlib import Path
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import supervisor_lock
with supervisor_lock(GridFolder(Path(sys.argv[1])), sys.argv[2] == "several") as alone:
    print(alone, flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path, kind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that holds the folder, and whether it found itself alone."""
    command = [sys.executable, "-c", HOLD, str(folder), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def refused(folder: Path, said: str, several: bool = False) -> None:
    with pytest.raises(UserError, match=said), supervisor_lock(GridFolder(folder), several):
        pass


def test_one_supervisor_has_the_folder_for_itself_or_several_share_it(tmp_path: Path) -> None:
    with holder(tmp_path, "one") as (process, alone):
        assert alone == "True"
        for several in (False, True):
            refused(tmp_path, f"process {process.pid} on", several)
        os.kill(process.pid, signal.SIGSTOP)  # a stopped holder still holds
        refused(tmp_path, "is already running")
    with supervisor_lock(GridFolder(tmp_path)) as alone:
        assert alone
    with holder(tmp_path, "several") as (process, alone):
        assert alone == "True"
        with supervisor_lock(GridFolder(tmp_path), several=True) as alone:
            assert not alone
        refused(tmp_path, "is already running")
        with holder(tmp_path, "several") as (_, second):
            assert second == "False"
            process.kill()
            process.wait()
            with supervisor_lock(GridFolder(tmp_path), several=True) as alone:
                assert not alone  # the second is still there
    with supervisor_lock(GridFolder(tmp_path)) as alone:
        assert alone


def test_a_turn_is_waited_for_and_can_be_given_up(tmp_path: Path, capfd) -> None:
    lock = tmp_path / ".lock"
    with turn(lock, lambda: False, "why"):
        with if_free(lock) as free:
            assert not free
        began = time.monotonic()
        with pytest.raises(Interrupted), turn(lock, lambda: time.monotonic() - began > 4, "why"):
            pass
    assert capfd.readouterr().out == "why\n"
    with if_free(lock) as free:
        assert free


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
