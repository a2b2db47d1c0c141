import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.data.batching import EpochSampler, ResumableLoader, gather
from lightning_app.data.cutting import equal_batches


@given(st.lists(st.lists(st.integers(5, 99), min_size=1), min_size=1), st.data())
def test_gather_equals_a_loop(rows: list[list[int]], data: st.DataObject):
    offsets = np.cumsum([0, *map(len, rows)])
    ids = np.array([i for row in rows for i in row], dtype=np.int32)
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    bos = data.draw(st.sampled_from([None, 2]))
    lead = [] if bos is None else [bos]
    out = gather(ids, offsets, np.array(wanted), fill=0, bos=bos)
    width = max(len(rows[w]) for w in wanted) + len(lead)
    expected = [[*lead, *rows[w]] for w in wanted]
    assert out.tolist() == [row + [0] * (width - len(row)) for row in expected]
    assert out.dtype == torch.int64


class Numbers:
    """Gives what it is asked for, so that a test sees the order."""

    def __getitem__(self, item):
        epoch, rows = item
        return epoch, rows.tolist()


def loader(num_workers: int = 0) -> ResumableLoader:
    sampler = EpochSampler(lambda epoch: equal_batches(11, 2, (1, epoch)))
    return ResumableLoader(Numbers(), sampler, num_workers)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("consumed", range(7))
def test_resume_continues_after_the_consumed_batch(num_workers: int, consumed: int):
    whole = loader()
    whole.sampler.set_epoch(3)
    expected = list(whole)
    assert len(expected) == len(whole) == 6
    first = loader(num_workers)
    first.sampler.set_epoch(3)
    iterator = iter(first)
    begun = [next(iterator) for _ in range(consumed)]
    state = first.state_dict()
    second = loader(num_workers)
    second.load_state_dict(state if consumed else {"epoch": 3, "consumed": 0})
    second.sampler.set_epoch(3)
    assert begun + list(second) == expected
    second.sampler.set_epoch(4)
    assert len(list(second)) == 6


def test_state_of_another_epoch_skips_nothing():
    resumed = loader()
    resumed.load_state_dict({"epoch": 3, "consumed": 6})
    resumed.sampler.set_epoch(4)
    assert len(list(resumed)) == 6


def test_loader_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    list(loader())
    assert torch.equal(torch.get_rng_state(), state)
