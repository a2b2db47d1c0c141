"""Correlations against SciPy, hand-computed cases and constant predictions."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from lightning_app.blocks.config import BlockConfig
from lightning_app.models.encoder_heads import TextClassifier
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import Evaluated, ObjectiveConfig
from lightning_app.tasks.glue import Glue, pearson, rounding_of, spearman

BFLOAT16 = torch.bfloat16
BOTH = pytest.mark.parametrize("score", [pearson, spearman])


def test_pearson_by_hand() -> None:
    """x - mean: -1, 0, 1; y - mean: -1, -1, 2; r = 3 / sqrt(2 * 6)."""
    assert pearson([1, 2, 3], [1, 1, 4]) == pytest.approx(3 / math.sqrt(12))


def test_spearman_by_hand() -> None:
    """Ranks 1, 2, 3 against 1.5, 1.5, 3: a tie has its mean rank."""
    assert spearman([1, 2, 30], [1, 1, 400]) == pytest.approx(1.5 / math.sqrt(2 * 1.5))


@BOTH
@pytest.mark.parametrize("constant", [0.0, 2.5, 0.1, -1e300, 1e-300])
def test_a_constant_side_gives_0(score, constant: float) -> None:
    varied, same = [0.0, 1.0, 5.0, 2.0], [constant] * 4
    assert score(varied, same) == 0
    assert score(same, varied) == 0
    assert score(same, same) == 0


@BOTH
def test_one_pair_gives_0(score) -> None:
    assert score([3.0], [2.0]) == 0


def test_a_constant_up_to_rounding_gives_0() -> None:
    assert pearson([1.0, 2.0, 3.0], [2.5, 2.5, np.nextafter(2.5, 3)]) == 0


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 256])
def test_a_model_that_ignores_inputs_has_no_correlation(precision: torch.dtype, width: int) -> None:
    """One output, from batches of other sizes: products add up in another order."""
    task = Glue(ObjectiveConfig(kind="glue", glue="STS-B"))
    arch = ArchitectureConfig(
        **{"kind": "encoder", "encoder_depth": 1, "model_dim": width, "ff_dim": 32, "num_heads": 2}
    )
    torch.manual_seed(width)
    model = task.build_model(arch, BlockConfig(preset="post_ln"), 100).eval()
    assert isinstance(model, TextClassifier)
    torch.nn.init.zeros_(model.pooler.weight)
    torch.nn.init.normal_(model.pooler.bias)
    task.start_decoding()
    first = 0
    with torch.inference_mode(), torch.autocast("cpu", precision, enabled=precision is BFLOAT16):
        for rows in (1, 3, 17, 64, 8):
            batch = task.random_batch(rows, 12, 100)
            batch = batch._replace(index=torch.arange(first, first + rows))
            task.sums(model, batch)
            task.decode(model, batch, "val")
            first += rows
    assert len(task.scored) == first
    scores = task.scores("val", None, Evaluated(nll=1.0, tokens=first))
    assert (scores["val/pearson"], scores["val/spearman"]) == (0.0, 0.0)


@BOTH
def test_a_small_spread_above_the_rounding_counts(score) -> None:
    near = 2.5 + np.array([1e-4, 2e-4, 3e-4])
    assert score([1.0, 2.0, 3.0], near, rounding_of(torch.float32)) == pytest.approx(1)
    assert score([1.0, 2.0, 3.0], near, rounding_of(torch.bfloat16)) == 0


@BOTH
def test_no_overflow_and_no_underflow(score) -> None:
    assert score([1e200, 2e200, 3e200], [1.0, 2.0, 3.0]) == pytest.approx(1)
    assert score([1e-200, 2e-200, 3e-200], [3.0, 2.0, 1.0]) == pytest.approx(-1)


VALUES = st.lists(st.tuples(st.integers(0, 20), st.integers(-9, 9)), min_size=2, max_size=40)


@given(VALUES)
def test_equal_to_scipy_where_it_is_defined(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(side) / 4 for side in zip(*pairs, strict=True))
    assume(np.ptp(x) > 0 and np.ptp(y) > 0)
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y)[0], abs=1e-12)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-12)


@BOTH
def test_scipy_is_not_asked_where_it_gives_nan(score) -> None:
    """SciPy warns and gives NaN; a NaN would be dropped or propagate in an average."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score([1.0, 2.0], [1.0, 1.0]) == 0
    with pytest.warns(stats.ConstantInputWarning):
        assert np.isnan(np.array(stats.pearsonr([1.0, 2.0], [1.0, 1.0]))).all()
