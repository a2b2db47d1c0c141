from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.core.errors import UserError
from lightning_app.grids import slots
from lightning_app.grids.slots import Slot, Slots, default_workers, slots_of
from lightning_app.grids.workers import most_threads


def taken(slots: Slots) -> list[Slot]:
    found = []
    while (slot := slots.take()) is not None:
        found.append(slot)
    return found


@pytest.mark.parametrize(
    ("cores", "workers", "devices", "expected", "threads"),
    [
        (8, None, 1, 8, 1),
        (8, 2, 1, 2, 4),
        (8, None, 2, 4, 1),
        (8, 3, 2, 3, 1),
        (2, None, 4, 1, 1),
        (8, 20, 1, 20, 1),
    ],
)
def test_a_cpu_is_shared_out_by_cores(cores, workers, devices, expected: int, threads: int) -> None:
    slots = slots_of(cores=cores, visible=(), workers=workers, devices=devices, cells=99)
    found = taken(slots)
    assert len(slots) == len(found) == expected
    given = {(slot.devices, slot.threads, slot.visible) for slot in found}
    assert given == {(devices, threads, None)}
    assert found[0].record()["devices"] == ["cpu"] * devices


@pytest.mark.parametrize(
    ("written", "most"), [("1", 1), ("3,2", 3), (" 2 ", 2), ("", None), ("0", None), ("x", None)]
)
def test_a_user_limits_the_threads(written: str, most: int | None) -> None:
    """Other work on the host: threads of one step that wait for each other would stand still."""
    found = most_threads({"OMP_NUM_THREADS": written})
    assert found == most
    for visible in ((), ("0", "1")):
        alone = slots_of(cores=8, visible=visible, workers=2, cells=9, most_threads=found)
        assert alone.threads == (4 if most is None else most)
    assert slots_of(cores=2, visible=(), cells=9, most_threads=found).threads == 1
    assert most_threads({}) is None


V1 = "5:cpuset:/\n4:cpu,cpuacct:{}\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4.0),  # a container sees its group as the top
        ("0::/\n", {"cpu.max": "max 100000\n"}, inf),
        ("0::/\n", {}, inf),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "200000 100000"}, 2.0),
        ("0::/../../b\n", {"cpu.max": "100000 50000"}, 2.0),  # above the visible top
        (V1.format("/pod/1"), {"cpu/cpu.cfs_quota_us": "50000"}, 0.5),
        (V1.format("/job"), {"cpu/job/cpu.cfs_quota_us": "700000"}, 7.0),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1"}, inf),
        (V1.format("/"), {"cpuset/cpu.cfs_quota_us": "100000"}, inf),
        (None, {"cpu.max": "400000 100000"}, inf),  # no control groups
    ],
)
def test_the_limit_of_a_container_is_read(tmp_path, groups, files, expected: float) -> None:
    mounted = tmp_path / "cgroup"
    for name, text in files.items():
        file = mounted / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if file.name == "cpu.cfs_quota_us":
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    if groups is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "cgroup").write_text(groups)
    assert slots.cpu_quota(tmp_path, mounted) == expected


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.9, 1), (2.0, 2), (inf, 64)])
def test_a_container_gets_the_workers_of_its_limit(monkeypatch, quota, expected: int) -> None:
    monkeypatch.setattr(slots, "cpu_quota", lambda: quota)
    monkeypatch.setattr(slots.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert default_workers() == expected


def test_each_gpu_gets_a_cell_before_any_gets_two_and_cells_of_several_share_none() -> None:
    assert len(slots_of(cores=8, visible=(), cells=3)) == 3
    assert len(slots_of(cores=8, visible=("0", "1"), cells=1)) == 1
    slots = slots_of(cores=8, visible=("0", "1"), sharing=2, cells=99)
    order = [slot.visible for slot in taken(slots)]
    assert order[:2] == [("0",), ("1",)]
    assert set(order[2:]) == {("0",), ("1",)}
    few = taken(slots_of(cores=8, visible=("0", "1"), sharing=2, workers=3, cells=99))
    assert sorted((slot.group, slot.sharing) for slot in few) == [(0, 2), (0, 2), (1, 1)]
    pairs = taken(slots_of(cores=8, visible=("2", "3", "5", "7", "9"), devices=2, cells=99))
    assert [slot.visible for slot in pairs] == [("2", "3"), ("5", "7")]
    assert [slot.threads for slot in pairs] == [2, 2]


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"visible": (), "sharing": 2}, "--slots-per-device: .* no accelerator"),
        ({"visible": ("0",), "devices": 2}, "--devices-per-cell: expected at most 1"),
        ({"visible": ("0",), "workers": 2}, "--workers: expected at most 1.*--slots-per-device"),
    ],
)
def test_what_a_host_cannot_offer_is_refused(given_: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        slots_of(cores=8, cells=99, **given_)


def test_a_cell_that_ran_out_of_memory_has_its_device_for_itself() -> None:
    slots = slots_of(cores=8, visible=("0", "1"), sharing=2, cells=99)
    first, second = slots.take(), slots.take()
    assert first
    assert second
    assert slots.take(alone=True) is None  # both devices have cells
    assert not slots.are_full
    slots.give_back(second)
    alone: Any = slots.take(alone=True)
    assert alone.group == second.group
    assert [slot.group for slot in taken(slots)] == [first.group]  # none beside it
    assert slots.are_full
    slots.give_back(alone)
    assert {slot.group for slot in taken(slots)} == {second.group}


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_slots_are_neither_lost_nor_doubled(moves: list[bool], gpus: int, sharing: int) -> None:
    visible = tuple(map(str, range(gpus)))
    slots = slots_of(cores=4, visible=visible, sharing=sharing, cells=99)
    held: list[Slot] = []
    for alone in moves:
        slot = slots.take(alone)
        if slot is not None:
            held.append(slot)
            assert not alone or sum(each.group == slot.group for each in held) == 1
        elif held:
            slots.give_back(held.pop(0))
    for slot in held:
        slots.give_back(slot)
    assert len(taken(slots)) == gpus * sharing


def test_devices_are_named_as_in_the_setting_of_cuda() -> None:
    assert slots.visible_devices(2, {"CUDA_VISIBLE_DEVICES": "4,6"}) == ("4", "6")
    assert slots.visible_devices(2, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == ("GPU-a", "GPU-b")
    assert slots.visible_devices(3, {}) == ("0", "1", "2")
    assert slots.visible_devices(0, {"CUDA_VISIBLE_DEVICES": ""}) == ()
