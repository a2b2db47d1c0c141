"""Every preset keeps the promises of `lightning_app.testing`; parameters of each."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_app.blocks.attention import ProjectionGains, ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain
from lightning_app.testing import check_cached_text, check_preset
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

every_preset = pytest.mark.parametrize("preset", PRESETS)


@pytest.mark.all_presets
@every_preset
def test_every_preset_keeps_every_promise(preset: str) -> None:
    check_preset(preset)


def linear(n: int, m: int) -> int:
    return n * m + m


D, FF, H = (tiny.SIZES[name] for name in ("model_dim", "ff_dim", "num_heads"))
NORM, MATRIX = 2 * D, linear(D, D)


@dataclass(frozen=True)
class Count:
    """Parameters that a preset has besides four matrices an attention and two a feed-forward:
    around each sub-layer, in each layer, attention, the first layer, around a cross-attention, at
    the ends of a stack and of the table of words; with `averages`, layer l has l + 1 more."""

    sub_layer: int = 0
    layer: int = 0
    attention: int = 0
    first: int = 0
    cross: int = 0
    stack: int = 0
    tokens: int = 0
    averages: bool = False

    def of(self, side: str) -> int:
        """Return the parameters of a stack."""
        depth, attentions = tiny.SIZES[f"{side}_depth"], 2 if side == "decoder" else 1
        layer = attentions * (4 * MATRIX + self.attention) + linear(D, FF) + linear(FF, D)
        layer += (attentions + 1) * self.sub_layer + (attentions - 1) * self.cross + self.layer
        averages = depth * (depth + 3) // 2 if self.averages else 0
        return self.stack + self.first + depth * layer + averages


# alpha, beta and gamma a head, the gains of both branches, neither values nor outputs.
SHAPED = 3 * H + 2 - 2 * MATRIX
COUNTS = {
    "post_ln": Count(sub_layer=NORM),
    "pre_ln": Count(sub_layer=NORM, stack=NORM),
    "peri_ln": Count(sub_layer=2 * NORM, stack=2 * NORM),
    "sandwich_ln": Count(sub_layer=2 * NORM, stack=NORM),
    "normformer": Count(sub_layer=NORM, attention=H + NORM, layer=2 * FF, stack=NORM),
    "deepnorm": Count(sub_layer=NORM),
    "b2t": Count(sub_layer=NORM),
    "admin": Count(sub_layer=NORM + D),
    "dual_stream": Count(sub_layer=NORM, stack=NORM),
    "siamese_norm": Count(sub_layer=3 * NORM, stack=3 * NORM),
    # Four states: the static weights, and the dynamic ones with their norm and two scales.
    "hyper_connections": Count(sub_layer=NORM + 24 + (6 * D + NORM + 2), stack=NORM),
    # phi, b and s of 4 + 4 + 16 weights of a sub-layer, and of 4 at the end.
    "mhc": Count(sub_layer=NORM + 24 * (4 * D + 1) + 3, stack=NORM + 4 * (4 * D + 1) + 1),
    "attention_residuals": Count(sub_layer=NORM + 2 * D, stack=NORM + 2 * D),
    "denseformer": Count(sub_layer=NORM, stack=NORM, averages=True),
    "gated_attention": Count(sub_layer=NORM, attention=D * D, stack=NORM),
    "resformer": Count(sub_layer=NORM, stack=NORM),
    "reordered_norm": Count(sub_layer=D, attention=2 * D // H, stack=D),
    "laurel": Count(sub_layer=NORM + 2, stack=NORM),
    "inverse_sqrt_depth": Count(sub_layer=NORM, stack=NORM),
    "inverse_depth": Count(sub_layer=NORM, stack=NORM),
    "sub_ln": Count(sub_layer=NORM, layer=NORM + 2 * FF, stack=NORM),
    "prores": Count(sub_layer=NORM, stack=NORM),
    "gpas": Count(sub_layer=NORM, layer=1, stack=NORM),
    "zero_output": Count(sub_layer=NORM, stack=NORM),
    "speedrun": Count(layer=2),
    "swin_v2": Count(sub_layer=NORM, attention=H, stack=NORM),
    "ngpt": Count(sub_layer=D, attention=D, layer=FF, tokens=tiny.VOCABULARY),
    # Four vectors and a gain for each attention; a scalar for each matrix.
    "differential": Count(sub_layer=NORM, attention=6 * D // H, stack=NORM),
    "sigma_reparam": Count(sub_layer=NORM, attention=4, layer=2),
    "rezero": Count(layer=1),
    "skipinit": Count(sub_layer=1),
    "layer_scale": Count(sub_layer=NORM + D, stack=NORM),
    "t_fixup": Count(),
    "mix_ln": Count(sub_layer=NORM, stack=NORM),
    "layer_norm_scaling": Count(sub_layer=NORM, stack=NORM),
    "keel": Count(sub_layer=2 * NORM),
    "hybrid_norm": Count(attention=6 * D // H, layer=NORM, stack=NORM),
    "qk_norm": Count(sub_layer=NORM, attention=4 * D // H, stack=NORM),
    "realformer": Count(sub_layer=NORM),
    "parallel": Count(sub_layer=NORM, layer=-NORM, stack=NORM),
    "v_skipinit": Count(sub_layer=NORM, layer=2 * H + 2, stack=NORM),
    "sas": Count(sub_layer=NORM, layer=SHAPED, first=D * D, stack=NORM),
    "sas_p": Count(sub_layer=NORM, layer=SHAPED - NORM, first=D * D, stack=NORM),
    "sas_p_no_norm": Count(cross=NORM, layer=SHAPED, first=D * D + NORM, stack=NORM),
}


@every_preset
def test_parameter_count_is_the_closed_form_and_a_causal_stack_an_encoders(preset: str) -> None:
    count = COUNTS[preset]
    table = tiny.VOCABULARY * D + count.tokens
    expected = {
        tiny.translator: table + count.of("encoder") + count.of("decoder"),
        tiny.masked_model: table + count.of("encoder") + MATRIX + NORM + tiny.VOCABULARY,
    }
    for build, number in expected.items():
        assert sum(p.numel() for p in build(preset).parameters()) == number

    def shapes(model: nn.Module, stack: str) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in model.get_submodule(stack).named_parameters()}

    model = tiny.causal_model(preset, decoder_depth=3)
    assert shapes(model, "decoder") == shapes(tiny.masked_model(preset), "encoder")


@pytest.mark.parametrize(("norm", "more"), [("none", 0), ("layer_norm", 2 * D), ("rms_norm", D)])
def test_a_norm_of_the_embedding_has_its_gain_and_bias(norm: str, more: int) -> None:
    plain = tiny.masked_model("post_ln").state_dict()
    model = tiny.masked_model("post_ln", embedding_norm=norm)
    added = model.state_dict().keys() - plain.keys()
    assert sum(model.state_dict()[name].numel() for name in added) == more
    assert all(name.startswith("embedding.norm.") for name in added)


def test_axes_add_the_parameters_that_they_name() -> None:
    """Over Pre-LN, or SAS where the axis is a simplified block's, encoder and decoder together."""

    def count(preset: str = "pre_ln", architecture: Any = None, **axes: Any) -> int:
        model = tiny.translator(BlockConfig(preset=preset, **axes), **(architecture or {}))
        return sum(p.numel() for p in model.parameters())

    layers, learned = 3 + 2, Gain(learned=True)
    gains = ProjectionGains(kept=learned, change=learned)
    anchored = {"value_projection": "orthogonal_plus", "output_projection": "orthogonal_plus"}
    both = count("sas", **anchored)
    plain = count()
    assert count(shaped_attention=ShapingSpec(per_head=False)) == plain + 3 * layers
    assert count(shaped_attention=ShapingSpec(learned=False)) == plain
    assert count(residual_attention="qk_sum", residual_temperature=2.0) == plain
    assert count(ff_skip=Gain(learned=True, vector=True)) == plain + D * layers
    assert count(architecture={"activation": "geglu"}) == plain + linear(D, FF) * layers
    table = {"positions": "learned", "max_positions": 19}
    assert count(architecture=table) == plain + 19 * D
    assert count(architecture={"positions": "rope", "num_heads": 5}) == plain
    # One change a projection; a first value already has one, in each of two stacks.
    assert both == count("sas") + (2 * layers - 2) * D * D
    assert count("sas", **anchored, value_gains=gains) == both + 2 * layers
    assert count("sas", **anchored, output_gains=ProjectionGains(kept=learned)) == both + layers
    assert count("sas", first_value_projection="identity") + 2 * D * D == count("sas")
    assert count("sas", last_output_projection="full") == count("sas") + 2 * MATRIX
    assert count("rezero", share_branch_gain=False) == count("skipinit")


@pytest.mark.parametrize(
    "positions",
    ["sinusoidal", "learned", "rope", "relative", "relative_untied"],
)
@every_preset
def test_cached_decoding_of_one_stack_equals_full_decoding(preset: str, positions: str) -> None:
    model = tiny.causal_model(preset, positions=positions, model_dim=12)
    check_cached_text(tiny.randomise(model).eval(), tiny.words(3, 7))
