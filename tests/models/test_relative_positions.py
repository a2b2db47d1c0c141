"""Relative positions: what holds of the scores beside their equation, and what is refused."""

from typing import Any

import pytest
import torch

from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.kernels import attention_form
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.positions import Places
from lightning_app.models.positions.relative import RelativeTerm, ScoreBiases
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

RELATIVE = ("relative", "relative_untied")


def model(preset: str, positions: str = "relative", **block: Any) -> CausalLanguageModel:
    config = BlockConfig(preset=preset, **block)
    return tiny.randomise(tiny.causal_model(config, positions=positions)).eval()


def term(model: CausalLanguageModel) -> RelativeTerm:
    found = model.decoder.place
    assert isinstance(found, RelativeTerm)
    return found


@pytest.mark.parametrize("positions", RELATIVE)
@pytest.mark.parametrize("preset", ["post_ln", "realformer", "sas"])
def test_only_distances_count(preset: str, positions: str) -> None:
    made, x = model(preset, positions), torch.randn(2, 6, 10)
    mask = tiny.causal_mask(6, x.device)
    here = made.decoder(x, mask)
    for shift in (1, 50, 3000):
        newest = torch.arange(6) + shift
        moved = made.decoder(x, mask, places=Places(newest, newest[None], shift))
        torch.testing.assert_close(moved, here, rtol=1e-9, atol=1e-9)


def test_order_counts() -> None:
    made, tokens = model("pre_ln"), tiny.words(1, 7)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6]]
    last = [made(text)[0, -1] for text in (tokens, swapped)]
    assert (last[0] - last[1]).abs().max() > 1e-3


@torch.no_grad()
def test_without_biases_and_projections_there_are_no_positions() -> None:
    """One layer: in a deeper causal stack the order of the tokens before also counts."""
    made = tiny.randomise(tiny.causal_model("pre_ln", positions="relative", decoder_depth=1)).eval()
    tokens = tiny.words(2, 7)
    for parameter in term(made).parameters():
        parameter.zero_()
    order = [3, 1, 0, 2, 4, 5]
    last = [made(text)[:, -1] for text in (tokens, tokens[:, [*order, 6]])]
    torch.testing.assert_close(last[0], last[1])


@pytest.mark.parametrize("form", ["plain", "reversible", "blocked", "stored"])
def test_every_form_of_residual_attention_takes_the_features(form: Any) -> None:
    made, tokens = model("realformer"), tiny.words(3, 9)
    with attention_form("plain"):
        expected = made(tokens)
        gradients = torch.autograd.grad(expected.pow(2).sum(), list(made.parameters()))
    with attention_form(form):
        found = made(tokens)
        torch.testing.assert_close(found, expected)
        again = torch.autograd.grad(found.pow(2).sum(), list(made.parameters()))
    for ours, theirs in zip(again, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("positions", "pairs"), [("relative", 1), ("relative_untied", 2)])
def test_layers_share_the_biases_or_have_their_own(positions: str, pairs: int) -> None:
    made = term(model("pre_ln", positions))
    assert (len(made.projections), len(made.biases)) == (2, pairs)


def test_the_map_is_uniform_at_the_start_where_it_has_a_centre() -> None:
    """A = C at the start of shaped attention: u and v are zero there, and random elsewhere."""
    for preset, zero in (("sas", True), ("v_skipinit", False), ("pre_ln", False)):
        made = tiny.causal_model(preset, positions="relative")
        for biases in term(made).biases:
            assert isinstance(biases, ScoreBiases)
            assert all(bool((p == 0).all()) == zero for p in biases.parameters())
            assert not biases.decays


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="positions relative with residual_attention qk_sum"):
        tiny.causal_model(BlockConfig(residual_attention="qk_sum"), positions="relative")
    with pytest.raises(ValueError, match="model_dim 9: relative positions need an even width"):
        tiny.causal_model("pre_ln", positions="relative", model_dim=9, num_heads=3)
