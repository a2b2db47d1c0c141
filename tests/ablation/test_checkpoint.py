"""A checkpoint on disk is always a whole one, whatever ends its writer."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_app.ablation.checkpoint import (
    WholeCheckpoints,
    copy_whole,
    with_whole_checkpoints,
)

WRITER = """
import sys, torch
from lightning_app.ablation.checkpoint import WholeCheckpoints
number = 0
while True:
    number += 1
    weights = torch.full((3_000_000,), float(number))
    WholeCheckpoints().save_checkpoint({"number": number, "weights": weights}, sys.argv[1])
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for delay in (0.0, 0.01, 0.02, 0.03):
        command = [sys.executable, "-c", WRITER, str(path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "1\n"
        time.sleep(delay)  # wherever it then is
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        kept = torch.load(path, weights_only=True)
        assert (kept["weights"] == kept["number"]).all()


def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """As little as a process may write in a file stands for a full disk."""
    path = tmp_path / "last.ckpt"
    WholeCheckpoints().save_checkpoint({"number": 1}, path)
    code = WRITER.replace("while True", "for _ in range(1)")

    def little() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(
        command, preexec_fn=little, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 1
    assert "Error" in done.stderr
    assert torch.load(path, weights_only=True) == {"number": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_copy_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(os.urandom(1000))
    (tmp_path / "best.ckpt").write_bytes(b"old")
    copy_whole(tmp_path / "last.ckpt", tmp_path / "best.ckpt")
    assert (tmp_path / "best.ckpt").read_bytes() == (tmp_path / "last.ckpt").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("given", [None, []])
def test_a_trainer_writes_so_unless_told_otherwise(given: object) -> None:
    (plugin,) = with_whole_checkpoints(given)
    assert isinstance(plugin, WholeCheckpoints)
    own = TorchCheckpointIO()
    assert with_whole_checkpoints(own) == [own]
    assert with_whole_checkpoints([own]) == [own]
