"""Relative positions: what holds of the scores beside their equation, and what is refused."""

from typing import Any

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attention_form
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.positions import Places, RelativeTerm, ScoreBiases
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")


def model(preset: str, positions: str = "relative", **block: Any) -> CausalLanguageModel:
    config = BlockConfig(preset=preset, **block)
    return tiny.randomise(tiny.causal_model(config, positions=positions)).eval()


def term(model: CausalLanguageModel) -> RelativeTerm:
    found = model.decoder.place
    assert isinstance(found, RelativeTerm)
    return found


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


@torch.no_grad()
@pytest.mark.parametrize("clamp", [1, 3, 9])
def test_an_encoder_clamps_the_distances_to_later_tokens_too(clamp: int) -> None:
    """A key at the distance -x is none at the distance 0."""
    made = tiny.randomise(tiny.masked_model("pre_ln", positions="relative", clamp_length=clamp))
    place: Any = made.eval().encoder.place
    here = place(Places.whole(7, torch.device("cpu")))
    query, key = torch.randn(2, 2, 7, 5), torch.randn(2, 2, 7, 5)
    features = here.queries(query)
    scores = features @ here.keys(key).transpose(-1, -2) / 5**0.5 + here.added(features)
    weight, biases = place.projections[0].weight.unflatten(0, (2, 5)), place.biases[0]
    rates = 10000.0 ** (-torch.arange(0, 10, 2) / 10)
    for h in range(2):
        u, v = biases.content[h, 0], biases.position[h, 0]
        for i in range(7):
            for j in range(7):
                angles = max(-clamp, min(clamp, i - j)) * rates
                distance = weight[h] @ torch.cat([angles.sin(), angles.cos()])
                cell = (query[:, h, i] + u) * key[:, h, j] + (query[:, h, i] + v) * distance
                torch.testing.assert_close(scores[:, h, i, j], cell.sum(dim=-1) / 5**0.5)


@torch.no_grad()
@pytest.mark.parametrize("clamp", [2, 30])
def test_each_beam_has_clamped_scores_of_its_own(clamp: int) -> None:
    """Cached decoding of several beams equals a pass over the prefix of each."""
    sizes: dict[str, Any] = {"positions": "relative", "clamp_length": clamp}
    made = tiny.randomise(tiny.translator("realformer", **sizes)).eval()
    source, prefixes = tiny.words(2, 6), tiny.words(2, 3, 7)
    expected = made(source.repeat_interleave(3, dim=0), prefixes.flatten(0, 1))
    state = made.start(source, beams=3)
    for place in range(7):
        logits, state = made.step(prefixes[:, :, place], state)
        torch.testing.assert_close(logits, expected[:, place])


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
    with pytest.raises(ValueError, match="model_dim 9:"):
        tiny.causal_model("pre_ln", positions="relative", model_dim=9, num_heads=3)
