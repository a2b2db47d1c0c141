"""Positions that no part of the package knows: a bias of each head's scores, as in ALiBi."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import own_scores, softmax_map
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.placed import Placed
from lightning_app.blocks.stack import StackSpec
from lightning_app.core.errors import UserError
from lightning_app.models.heads import CausalLanguageModel, build_model
from lightning_app.models.positions import POSITIONS, Place, Places, Positions, Registry
from lightning_app.testing import check_cached_text
from tests import tiny
from tests.models.test_adaptive_span import same, watched

pytestmark = pytest.mark.usefixtures("float64")

BLOCKS = {
    "post_ln": BlockConfig(preset="post_ln"),
    "realformer": BlockConfig(preset="realformer"),
    "mean": BlockConfig(residual_attention="mean"),
    "qk_sum": BlockConfig(residual_attention="qk_sum"),
    "sas": BlockConfig(preset="sas"),
    "parallel": BlockConfig(preset="parallel"),
}


class Slopes(Positions):
    """``-2^(-8 h / H) |i - j|`` for head h = 1 .. H (Press et al. 2022, ALiBi, 2108.12409)."""

    def placing(self, spec: StackSpec) -> Place:
        heads = torch.arange(1, self.num_heads + 1)
        slopes = 2.0 ** (-8.0 * heads / self.num_heads)

        def place(places: Places) -> Placed:
            placed = Placed()
            distance = (places.newest[:, None] - places.keys[:, None, :]).abs()
            placed.bias = -slopes[:, None, None] * distance[:, None]
            return placed

        return place


@pytest.fixture(autouse=True)
def slopes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(POSITIONS, "_parts", {**POSITIONS, "slopes": Slopes})
        yield


def causal_model(block: BlockConfig, positions: str = "slopes") -> CausalLanguageModel:
    architecture = tiny.architecture(kind="decoder", positions=positions)
    model = build_model(architecture, block, tiny.VOCABULARY, tiny.PAD)
    assert isinstance(model, CausalLanguageModel)
    return tiny.randomise(model).eval()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
def test_biased_scores_decode_from_a_cache_as_in_one_pass(block: BlockConfig) -> None:
    model = causal_model(block)
    tokens = tiny.words(3, 9)
    check_cached_text(model, tokens)
    plain = causal_model(block, "sinusoidal")
    plain.load_state_dict(model.state_dict())
    assert (plain(tokens) - model(tokens)).abs().max() > 1e-3


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("positions", ["slopes", "learned"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
def test_beams_that_share_a_cache_know_their_places(block: BlockConfig, positions: str) -> None:
    """Two beams of one text, written into one cache in turns, reordered on the way."""
    model = causal_model(block, positions)
    tokens = tiny.words(2, 9)
    state = model.start(1, beams=2)
    for i in range(9):
        if i == 4:  # both continue from the second
            state = state.reorder(torch.tensor([[1, 1]]))
            tokens = torch.cat([tokens[[1, 1], :4], tokens[:, 4:]], dim=1)
        logits, state = model.step(tokens[:, i][None], state)
        same(logits, model(tokens[:, : i + 1])[:, -1])


def test_an_encoder_sees_distances_to_both_sides_and_none_of_the_padding() -> None:
    model = tiny.randomise(tiny.translator("sas", positions="slopes")).eval()
    source, target = tiny.sentences()
    logits = model(source, target)
    for row, (n, m) in enumerate(zip(tiny.SOURCE_LENGTHS, tiny.TARGET_LENGTHS, strict=True)):
        same(model(source[row : row + 1, :n], target[row : row + 1, :m])[0], logits[row, :m])
    state = model.start(source)
    for i in range(5):
        step, state = model.step(target[:, i : i + 1], state)
        real = target[:, i] != tiny.PAD
        same(step[real], logits[real, i])


@pytest.mark.parametrize("carry", ["none", "sum", "qk_sum"])
def test_probes_see_the_map_that_attention_takes(carry: Any) -> None:
    model = causal_model(BlockConfig(preset="post_ln", residual_attention=carry))
    seen = watched(model)  # whose maps times the values are the heads
    model(tiny.words(1, 5))
    assert len(seen) == 2


def test_the_centre_of_a_biased_map_is_its_softmax_at_zero_scores() -> None:
    bias = torch.randn(1, 3, 4, 4)
    mask = Mask(4, bias.device, causal=True).with_score_bias(bias)
    zero = torch.zeros(1, 3, 4, 2)
    same(mask.centre, softmax_map(own_scores(zero, zero, mask), mask))


def test_unknown_positions_name_the_nearest() -> None:
    with pytest.raises(UserError, match=r"model.architecture.positions: .*'rop'.*rope"):
        tiny.architecture(positions="rop")
    with pytest.raises(ValueError, match="already registered"):
        POSITIONS.register("rope")(Slopes)
    assert isinstance(POSITIONS, Registry)
