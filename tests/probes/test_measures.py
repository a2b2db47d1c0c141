"""Every measure against a closed form, and against a loop in float64 that shares no code."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_app.probes import measures

pytestmark = pytest.mark.usefixtures("float64")

LENGTHS = (7, 2, 1, 5)
REAL = torch.tensor([[i < n for i in range(max(LENGTHS))] for n in LENGTHS])


def maps(rows: int = 13, heads: int = 3, keys: int = 5) -> Tensor:
    return (2 * torch.randn(rows, heads, keys)).softmax(dim=-1)


def entropy(p: np.ndarray) -> float:
    return -sum(value * math.log(value) for value in p if value > 0)


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Jensen-Shannon by its definition: the mean of two Kullback-Leibler divergences, in bits."""
    total = 0.0
    for mine, other in zip(p, q, strict=True):
        middle = (mine + other) / 2
        for value in (mine, other):
            if value > 0:
                total += value * math.log2(value / middle) / 2
    return total


@pytest.mark.parametrize("dim", [3, 11, 23])
def test_squared_norms_cosines_and_ranks_of_the_tokens_of_a_text(dim: int) -> None:
    """Cosines are means over pairs, ranks come from the singular values; one token has neither."""
    x = torch.randn(len(LENGTHS), max(LENGTHS), dim)
    norms, cosines, ranks = [], [], []
    for row, length in enumerate(LENGTHS):
        tokens = x[row, :length].numpy()
        norms += [sum(value**2 for value in token.tolist()) / dim for token in tokens]
        if length > 1:
            pairs = [
                a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
                for a, b in itertools.combinations(tokens, 2)
            ]
            cosines.append(np.mean(pairs))
            s = np.linalg.svd(tokens, compute_uv=False)
            ranks.append(math.exp(entropy(s / s.sum())))
    assert measures.squared_norms(x, REAL).tolist() == pytest.approx(norms)
    assert measures.token_cosines(x, REAL).tolist() == pytest.approx(cosines)
    assert measures.token_ranks(x, REAL).tolist() == pytest.approx(ranks, rel=1e-5)
    # A state that is not finite has no rank.
    x[0, 0, 0] = torch.nan
    x[3, 4, 1] = torch.inf
    assert measures.token_ranks(x, REAL).isnan().tolist() == [True, False, True]


def test_entropies_and_distances_in_each_row_and_of_every_head_to_every_head_below() -> None:
    p, q = maps(), maps()
    expected = [
        [divergence(a, b) for a, b in zip(*rows, strict=True)]
        for rows in zip(p.numpy(), q.numpy(), strict=True)
    ]
    np.testing.assert_allclose(measures.map_distances(p, q).numpy(), expected, atol=1e-12)
    table = measures.head_distances(p, q).numpy()
    for i, j in itertools.product(range(3), range(3)):
        expected = np.mean([divergence(p[r, i].numpy(), q[r, j].numpy()) for r in range(len(p))])
        assert table[i, j] == pytest.approx(expected)
    p = maps()
    p[0, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    expected = [[entropy(head) for head in row] for row in p.numpy()]
    np.testing.assert_allclose(measures.entropies(p).numpy(), expected, atol=1e-12)
    assert float(measures.entropies(torch.full((4,), 0.25))) == pytest.approx(math.log(4))


def test_matching_is_the_best_of_all_permutations() -> None:
    table = torch.rand(5, 5)
    best = min(
        sum(float(table[i, j]) for i, j in enumerate(order)) / 5
        for order in itertools.permutations(range(5))
    )
    assert measures.matched_distance(table) == pytest.approx(best)
    assert math.isnan(measures.matched_distance(torch.full((2, 2), torch.nan)))


def test_score_ratio_and_peaked_rows() -> None:
    new, total = torch.randn(17), torch.randn(17)
    expected = math.sqrt(sum(x**2 for x in new.tolist()) / sum(x**2 for x in total.tolist()))
    assert float(measures.score_ratio(new, total)) == pytest.approx(expected)
    assert float(measures.score_ratio(new, new)) == pytest.approx(1.0)
    assert math.isnan(float(measures.score_ratio(new * 0, new * 0)))
    p = torch.tensor([[0.995, 0.005], [0.98, 0.02], [0.0, 1.0]])
    assert measures.peaked_rows(p).tolist() == [1.0, 0.0, 1.0]


def test_output_information_is_the_mean_divergence_from_the_average(monkeypatch) -> None:
    monkeypatch.setattr(measures, "CHUNK", 4)
    logits = 3 * torch.randn(11, 6)
    p = np.exp(logits.numpy())
    p /= p.sum(axis=1, keepdims=True)
    mean = p.mean(axis=0)
    expected = np.mean([sum(a * math.log(a / b) for a, b in zip(q, mean, strict=True)) for q in p])
    # Two batches of unequal size are one.
    sums = [measures.distribution_sums(part) for part in (logits[:8], logits[8:])]
    found = measures.output_information(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], 11)
    assert float(found) == pytest.approx(expected)
    total, entropies = measures.distribution_sums(torch.randn(1, 6).expand(9, 6))
    assert float(measures.output_information(total, entropies, 9)) == pytest.approx(0.0, abs=1e-12)
    total, entropies = measures.distribution_sums(1e4 * torch.eye(6))
    assert float(measures.output_information(total, entropies, 6)) == pytest.approx(math.log(6))
