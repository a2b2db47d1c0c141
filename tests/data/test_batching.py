import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.core.errors import UserError
from lightning_app.data import batching
from lightning_app.data.batching import EpochSampler, ResumableLoader, padded, warmed_up
from lightning_app.data.prepare import equal_batches
from lightning_app.tasks.translation import TranslationBatch


@given(st.lists(st.lists(st.integers(5, 99), min_size=1), min_size=1), st.data())
def test_gather_equals_a_loop(rows: list[list[int]], data: st.DataObject):
    offsets = np.cumsum([0, *map(len, rows)])
    ids = np.array([i for row in rows for i in row], dtype=np.int32)
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    bos = data.draw(st.sampled_from([None, 2]))
    lead = [] if bos is None else [bos]
    out = padded(ids, offsets, np.array(wanted), fill=0, bos=bos)
    width = max(len(rows[w]) for w in wanted) + len(lead)
    expected = [[*lead, *rows[w]] for w in wanted]
    assert out.tolist() == [row + [0] * (width - len(row)) for row in expected]
    assert out.dtype == torch.int64


class Numbers:
    """Gives what it is asked for, so that a test sees the order."""

    def __getitem__(self, item):
        epoch, rows = item
        return [epoch, rows.tolist()]


def loader(num_workers: int = 0) -> ResumableLoader:
    sampler = EpochSampler(lambda epoch: equal_batches(11, 2, (1, epoch)))
    return ResumableLoader(Numbers(), sampler, num_workers)  # pyright: ignore[reportArgumentType]


@pytest.mark.in_turn(4)
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


def test_a_batch_grows_over_the_steps_of_all_epochs() -> None:
    """Of batches of ten rows: a tenth of them at step 1, one more at each of nine further steps."""
    whole = EpochSampler(lambda epoch: [np.arange(10) + 100 * epoch + 10 * n for n in range(5)])
    sampler = warmed_up(whole, lambda step: min(1.0, step / 10), 4)  # the fifth is never read
    for epoch, sizes in ((0, [1, 2, 3, 4]), (1, [5, 6, 7, 8]), (2, [9, 10, 10, 10])):
        sampler.set_epoch(epoch)
        taken = [rows for _, rows in sampler][:4]
        assert [len(rows) for rows in taken] == sizes
        for n, rows in enumerate(taken):
            first = 100 * epoch + 10 * n
            expected = [first + k * 10 // len(rows) for k in range(len(rows))]
            assert rows.tolist() == expected
    # No batch is empty or reordered, and those that continue the one before do not grow.
    sampler = warmed_up(EpochSampler(lambda _: [np.array([5, 3, 9])]), lambda step: step / 100, 1)
    for epoch, rows in ((0, [5]), (98, [5, 3, 9]), (65, [5, 3])):
        sampler.set_epoch(epoch)
        assert [each.tolist() for _, each in sampler] == [rows]
    sampler = EpochSampler(lambda _: [np.array([0, 1])], in_order=True)
    with pytest.raises(UserError, match=r"batch_warmup_steps: each batch .* use 0"):
        warmed_up(sampler, lambda _: 0.5, 1)


def test_state_of_another_epoch_skips_nothing_and_the_global_generator_stays():
    state = torch.get_rng_state()
    resumed = loader()
    resumed.load_state_dict({"epoch": 3, "consumed": 6})
    resumed.sampler.set_epoch(4)
    assert len(list(resumed)) == 6
    list(loader())
    assert torch.equal(torch.get_rng_state(), state)


class Sentences:
    """Batches of tensors; notes which were made, and fails at one of them."""

    def __init__(self, wrong: int | None = None) -> None:
        self.made: list[int] = []
        self.wrong = wrong

    def __getitem__(self, item) -> TranslationBatch:
        number = int(item[1][0])
        if number == self.wrong:
            raise ValueError(number)
        self.made.append(number)
        return TranslationBatch(*(torch.full((2,), number) for _ in TranslationBatch._fields))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Stand in for a GPU: what was pinned, each a copy."""
    seen: list[torch.Tensor] = []

    def pin(part: torch.Tensor) -> torch.Tensor:
        seen.append(part.clone())
        return seen[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return seen


def for_gpu(rows: Sentences) -> ResumableLoader:
    sampler = EpochSampler(lambda epoch: equal_batches(9, 1, (1, epoch)))
    return ResumableLoader(rows, sampler, 0, torch.device("cuda", 1))


def test_batches_for_a_gpu_are_pinned_and_few_ahead_and_errors_raised(pinned: list[torch.Tensor]):
    rows = Sentences()
    gpu, plain = for_gpu(rows), ResumableLoader(Sentences(), for_gpu(rows).sampler, 0)
    handed = iter(gpu)
    first = next(handed)
    assert len(rows.made) <= 1 + batching.AHEAD
    ours, theirs = [first, *handed], list(plain)
    assert all(any(part is copy for copy in pinned) for batch in ours for part in batch)
    assert len(ours) == len(theirs) == 9
    for batch, other in zip(ours, theirs, strict=True):
        for a, b in zip(batch, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match="4"):
        list(for_gpu(Sentences(wrong=4)))


@pytest.mark.parametrize("consumed", [0, 1, 5, 9])
def test_what_a_gpu_has_not_seen_comes_after_a_break(pinned: list[torch.Tensor], consumed: int):
    whole = [int(batch.index[0]) for batch in for_gpu(Sentences())]
    first, second = for_gpu(Sentences()), for_gpu(Sentences())
    handed = iter(first)
    begun = [int(next(handed).index[0]) for _ in range(consumed)]
    second.load_state_dict(first.state_dict())
    assert begun + [int(batch.index[0]) for batch in second] == whole
    del handed  # ends its thread


def test_an_epoch_is_cut_once():
    cut: list[int] = []

    def batches(epoch: int) -> list[np.ndarray]:
        cut.append(epoch)
        return equal_batches(11, 2, (1, epoch))

    sampler = EpochSampler(batches)
    for epoch in (0, 0, 1, 1):
        sampler.set_epoch(epoch)
        expected = [rows.tolist() for rows in equal_batches(11, 2, (1, epoch))]
        assert [rows.tolist() for _, rows in sampler] == expected
    assert cut == [0, 1]
