import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.data import prepare
from lightning_app.data.prepare import equal_batches, global_batches, share

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=80)


@given(LENGTHS, st.integers(1, 300), st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_every_row_once_and_budget_kept(lengths, budget: int, shuffle):
    source, target = np.array(lengths).T
    batches = global_batches(source, target, budget, shuffle)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for rows in batches:
        longest = max(source[rows].max(), target[rows].max())
        assert len(rows) * longest <= budget or len(rows) == 1


@given(LENGTHS, st.integers(1, 300), st.sampled_from([1, 2, 3]))
def test_shares_of_all_ranks_are_the_global_batch(lengths, budget: int, world: int):
    source, target = np.array(lengths).T
    lists = [global_batches(source, target, budget, (1, 2)) for _ in range(world)]
    assert len({len(of) for of in lists}) == 1
    for batches in zip(*lists, strict=True):
        shares = [share(rows, rank, world) for rank, rows in enumerate(batches)]
        assert sorted(np.concatenate(shares).tolist()) == sorted(batches[0].tolist())
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(LENGTHS, st.integers(1, 300))
def test_number_of_batches_is_the_same_in_every_epoch(lengths, budget: int):
    source, target = np.array(lengths).T
    plain = len(global_batches(source, target, budget))
    assert {len(global_batches(source, target, budget, (5, e))) for e in range(4)} == {plain}


def test_order_depends_on_seed_and_epoch_only():
    source, target = np.random.default_rng(0).integers(3, 30, (2, 500))

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [rows.tolist() for rows in global_batches(source, target, 128, (seed, epoch))]

    np.random.seed(3)
    one = order(1, 0)
    np.random.seed(4)
    assert order(1, 0) == one
    assert order(1, 1) != one
    assert order(2, 0) != one
    assert {frozenset(rows) for rows in one} != {frozenset(rows) for rows in order(1, 1)}


def test_without_shuffle_batches_go_up_in_length_and_are_full_to_the_last_token():
    source, target = np.random.default_rng(1).integers(1, 50, (2, 300))
    batches = global_batches(source, target, 99)
    longest = [max(source[rows].max(), target[rows].max()) for rows in batches]
    assert longest == sorted(longest)
    lengths = np.array([4] * 6)
    assert [len(rows) for rows in global_batches(lengths, lengths, 12)] == [3, 3]
    assert [len(rows) for rows in global_batches(lengths, lengths, 11)] == [2, 2, 2]


@pytest.mark.parametrize("budget", [1024, 4096, 32768])
def test_less_padding_than_in_order_of_source_and_target(budget: int):
    """50,000 pairs with lengths like those of talks: log-normal, the sides correlated."""
    random = np.random.default_rng(2)
    source = np.clip(np.exp(random.normal(2.9, 0.65, 50_000)), 2, 175).astype(int)
    target = np.clip(source * np.exp(random.normal(0.03, 0.22, 50_000)), 2, 175).astype(int)

    def padding(batches: list[np.ndarray]) -> float:
        places = sum(len(rows) * (source[rows].max() + target[rows].max()) for rows in batches)
        return 1 - (source.sum() + target.sum()) / places

    order = np.lexsort((target, source))
    plain = prepare._cut(order, np.maximum(source, target)[order], budget)
    assert padding(global_batches(source, target, budget)) < 0.7 * padding(plain)


@given(st.integers(1, 50), st.integers(1, 12))
def test_equal_batches(rows: int, size: int):
    for shuffle in (None, (1, 1)):
        batches = equal_batches(rows, size, shuffle)
        assert sorted(np.concatenate(batches).tolist()) == list(range(rows))
        assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
