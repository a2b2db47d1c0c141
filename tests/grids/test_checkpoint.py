"""A checkpoint on disk is always complete, however its writer ends."""

import hashlib
import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_app.core.errors import UserError
from lightning_app.core.files import Damaged, check_archive
from lightning_app.runs.parent import OtherRun, read_checkpoint
from lightning_app.training.checkpoint import WholeCheckpoints, with_whole_checkpoints
from tests import warm
from tests.bits import flip

CONTENTS = {
    "hyper_parameters": {"block": {}, "architecture": {}},
    "global_step": 7,
    "vocab_size": 5,
    "finite": True,
    "state_dict": {"a": torch.arange(300.0), "b": torch.ones(3, 5)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(7.0)}}}],
}

WRITER = """
import sys, torch
from lightning_app.training.checkpoint import WholeCheckpoints
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
        writer = warm.start(["-c", WRITER, str(path)])
        while "1\n" not in writer.printed():
            assert writer.poll() is None, writer.communicate()
            time.sleep(0.001)
        time.sleep(delay)  # wherever it then is
        writer.kill()
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
        kept = torch.load(path, weights_only=True)
        assert (kept["weights"] == kept["number"]).all()


def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    WholeCheckpoints().save_checkpoint({"number": 1}, path)
    code = WRITER.replace("while True", "for _ in range(1)")

    little = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""
    done = warm.run(["-c", little + code, str(path)])
    assert done.returncode == 1
    assert "Error" in done.stderr
    assert torch.load(path, weights_only=True)["number"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("given", [None, []])
def test_a_trainer_writes_so_by_default(given: object) -> None:
    (plugin,) = with_whole_checkpoints(given)
    assert isinstance(plugin, WholeCheckpoints)
    own = TorchCheckpointIO()
    assert with_whole_checkpoints(own) == [own]
    assert with_whole_checkpoints([own]) == [own]


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    WholeCheckpoints().save_checkpoint(CONTENTS, path)
    return path


def test_one_flipped_bit_anywhere_in_a_checkpoint_is_found(sealed: Path) -> None:
    """200 of them: in weights, headers, padding, the directory of the archive, its seal.

    And every bit of its end, where one bit decides whether an archive has a seal.
    """
    whole, chance = sealed.read_bytes(), random.Random(13)
    for _ in range(200):
        flip(sealed, chance)
        with pytest.raises(UserError, match=r"last\.ckpt: .*damaged: "):
            read_checkpoint(sealed)
        sealed.write_bytes(whole)
        assert read_checkpoint(sealed)["global_step"] == 7
    for place in range(8 * (len(whole) - 100), 8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        sealed.write_bytes(data)
        with pytest.raises(Damaged):
            check_archive(sealed)


def test_a_checkpoint_edited_and_saved_again_is_found_and_an_unsealed_has_sums(sealed, tmp_path):
    """`torch.save` writes sound sums, so only the lost seal tells it from what a run wrote."""
    edited = torch.load(sealed, weights_only=True)
    edited["state_dict"]["a"].zero_()
    torch.save(edited, sealed)
    with pytest.raises(UserError, match=r"last\.ckpt: damaged:"):
        read_checkpoint(sealed)
    path = tmp_path / "last.ckpt"
    torch.save(CONTENTS, path)
    read_checkpoint(path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(300.0).numpy().tobytes()) + 600] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"the sum of"):
        read_checkpoint(path)


@pytest.mark.parametrize("cut", [0, 1, 3, 70, 93, 94, 500])
def test_a_checkpoint_that_is_cut_short_is_found(sealed: Path, cut: int) -> None:
    whole = sealed.read_bytes()
    sealed.write_bytes(whole[:cut])
    with pytest.raises(UserError, match=r"torn or damaged"):
        read_checkpoint(sealed)
    if cut:
        sealed.write_bytes(whole[:-cut])
        with pytest.raises(UserError, match=r"torn or damaged"):
            read_checkpoint(sealed)


@pytest.mark.parametrize("finite", [True, False])
def test_weights_are_finite_where_the_run_was(tmp_path, finite: bool) -> None:
    path = tmp_path / "last.ckpt"
    contents = {**CONTENTS, "finite": finite}
    contents["state_dict"] = {"a": torch.tensor([1.0, float("nan")])}
    WholeCheckpoints().save_checkpoint(contents, path)
    if finite:
        with pytest.raises(UserError, match="weights that are"):
            read_checkpoint(path)
    else:
        assert read_checkpoint(path)["global_step"] == 7


def in_run(folder: Path, identity: dict, named: dict | None) -> Path:
    """A checkpoint that says `named` of its run, in the folder of a run."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "identity.json").write_text(json.dumps(identity))
    path = folder / "checkpoints" / "last.ckpt"
    WholeCheckpoints().save_checkpoint({**CONTENTS, **({"run": named} if named else {})}, path)
    return path


def test_a_checkpoint_is_read_in_its_run_alone_or_where_an_identity_lists_it(tmp_path) -> None:
    """Another seed has the same shapes, so nothing else would notice."""
    mine = {"id": "a" * 16, "seed": 1, "parent": None}
    path = in_run(tmp_path / "mine", {"id": "a" * 16}, mine)
    assert read_checkpoint(path)["run"] == mine
    other = in_run(tmp_path / "other", {"id": "b" * 16}, mine)
    with pytest.raises(OtherRun, match=r"last\.ckpt:.*seed 1"):
        read_checkpoint(other)
    with pytest.raises(OtherRun):
        read_checkpoint(path, tmp_path / "other")
    old = in_run(tmp_path / "old", {"id": "b" * 16}, None)
    assert read_checkpoint(old)["global_step"] == 7
    digest = hashlib.sha256(other.read_bytes()).hexdigest()[:16]
    identity = {"id": "b" * 16, "config": {"continued_from": ["0" * 16, digest]}}
    (tmp_path / "other" / "identity.json").write_text(json.dumps(identity))
    assert read_checkpoint(other)["global_step"] == 7
