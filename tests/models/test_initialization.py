"""Each rule of the table of initial values, on models wide enough to see a distribution."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, IdentityPlus, Shaping, ShapingSpec
from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain, LearnedGain
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.models.initialization import initialize

DIM, FF, HEADS, VOCABULARY, PAD = 64, 96, 4, 997, 3
SIMPLIFIED = ["sas", "sas_p", "sas_p_no_norm"]
every_preset = pytest.mark.parametrize("preset", PRESETS)
every_kind = pytest.mark.parametrize("kind", ["encoder_decoder", "encoder"])


def build(kind: str, preset: str, **axes) -> nn.Module:
    architecture = ArchitectureConfig(
        kind="encoder" if kind == "encoder" else "encoder_decoder",
        encoder_depth=3,
        decoder_depth=2,
        model_dim=DIM,
        ff_dim=FF,
        num_heads=HEADS,
    )
    return build_model(architecture, BlockConfig(preset=preset, **axes), VOCABULARY, PAD)


def attentions(model: nn.Module) -> Iterator[tuple[str, Attention]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield name, module


def assert_uniform(weight: Tensor, bound: float) -> None:
    """Fills the whole of U(-bound, bound)."""
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.95 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert weight.mean().abs() < 0.1 * bound


@every_kind
@every_preset
def test_matrices_are_xavier_uniform(kind: str, preset: str) -> None:
    model = build(kind, preset)
    special: set[int] = set()
    for name, attention in attentions(model):
        zero = preset in SIMPLIFIED and name.endswith("self_attention")
        for part in (attention.query, attention.key, attention.value):
            if not isinstance(part, nn.Linear):
                continue
            special.add(id(part))
            if not (zero and part is attention.query):
                assert_uniform(part.weight, math.sqrt(0.5) * math.sqrt(6 / (2 * DIM)))
        if isinstance(attention.value, IdentityPlus):
            special.add(id(attention.value.change))
    rest = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in special]
    assert len(rest) >= 6
    for module in rest:
        fan_out, fan_in = module.weight.shape
        assert_uniform(module.weight, math.sqrt(6 / (fan_in + fan_out)))


@every_kind
@every_preset
def test_queries_of_shaped_attention_alone_start_at_zero(kind: str, preset: str) -> None:
    shaped = 0
    for name, attention in attentions(build(kind, preset)):
        zero = preset in SIMPLIFIED and name.endswith("self_attention")
        assert bool((attention.query.weight == 0.0).all()) == zero
        shaped += zero
    assert shaped == (0 if preset not in SIMPLIFIED else 3 if kind == "encoder" else 5)


def test_nothing_undoes_the_zero_queries() -> None:
    """Neither a second run of the initialisation nor its run on a part of the model."""
    model = build("encoder_decoder", "sas")
    initialize(model)
    for part in model.children():
        initialize(part)
    for name, attention in attentions(model):
        if name.endswith("self_attention"):
            assert attention.query.weight.count_nonzero() == 0
            assert attention.query.bias.count_nonzero() == 0


@every_kind
@every_preset
def test_identity_plus_starts_as_the_identity(kind: str, preset: str) -> None:
    model = build(kind, preset, value_projection="identity_plus", output_projection="identity_plus")
    changes = [m.change.weight for m in model.modules() if isinstance(m, IdentityPlus)]
    assert len(changes) == 2 * (3 if kind == "encoder" else 5)
    assert all(weight.count_nonzero() == 0 for weight in changes)


@every_kind
@every_preset
def test_biases_are_zero_and_norms_one(kind: str, preset: str) -> None:
    for norm in (None, "rms_norm"):
        for module in build(kind, preset, norm=norm).modules():
            match module:
                case nn.LayerNorm():
                    assert bool((module.weight == 1.0).all())
                    assert module.bias.count_nonzero() == 0
                case nn.RMSNorm():
                    assert bool((module.weight == 1.0).all())
                case nn.Linear() if module.bias is not None:
                    assert module.bias.count_nonzero() == 0


@every_kind
def test_embedding_is_normal_with_a_row_of_zeros_for_padding(kind: str) -> None:
    weight = build(kind, "pre_ln").get_parameter("embedding.tokens.weight")
    assert weight[PAD].count_nonzero() == 0
    others = torch.cat([weight[:PAD], weight[PAD + 1 :]])
    assert others.std().item() == pytest.approx(DIM**-0.5, rel=0.02)
    assert others.mean().abs() < 0.01 * DIM**-0.5
    beyond = (others.abs() > 2 * DIM**-0.5).float().mean().item()
    assert beyond == pytest.approx(0.0455, rel=0.1)  # two sigmas of a normal distribution


def test_output_bias_of_the_masked_model_is_zero() -> None:
    assert build("encoder", "pre_ln").get_parameter("output_bias").count_nonzero() == 0


@pytest.mark.parametrize("learned", [True, False])
def test_gains_start_at_their_specification(learned: bool) -> None:
    axes = {
        "shaped_attention": ShapingSpec(alpha=0.5, beta=2.0, gamma=0.25, learned=learned),
        "attention_skip": Gain(value=0.75, learned=True),
        "ff_branch": Gain(value=-0.125, learned=True),
    }
    model = build("encoder_decoder", "pre_ln", **axes)
    gains = {
        name.rpartition("around_")[2]: module.gain.item()
        for name, module in model.named_modules()
        if isinstance(module, LearnedGain)
    }
    assert gains == {"self.skip": 0.75, "ff.branch": -0.125}
    shapings = [m.state_dict() for m in model.modules() if isinstance(m, Shaping)]
    assert len(shapings) == 5
    for state in shapings:
        values = {name: value.unique().tolist() for name, value in state.items()}
        assert values == {"alpha": [0.5], "beta": [2.0], "gamma": [0.25]}


@pytest.mark.parametrize("preset", SIMPLIFIED)
def test_simplified_gains_follow_the_depth_of_their_own_stack(preset: str) -> None:
    model = build("encoder_decoder", preset)
    for side, depth in (("encoder", 3), ("decoder", 2)):
        for n in range(depth):
            block = f"{side}.blocks.{n}"
            gain = model.get_parameter(f"{block}.around_ff.branch.gain").item()
            assert gain == pytest.approx(0.1 * math.sqrt(18 / depth), rel=1e-6)
            assert model.get_parameter(f"{block}.around_self.branch.gain").item() == 1.0
            for name in ("alpha", "beta", "gamma"):
                weight = model.get_parameter(f"{block}.self_attention.shaping.{name}")
                assert weight.shape == (HEADS, 1, 1)
                assert bool((weight == 1.0).all())


@every_kind
@every_preset
def test_every_parameter_has_a_rule(kind: str, preset: str) -> None:
    """Whatever stood in a parameter before, one run of the initialisation replaces it."""
    # `output_bias` is the model's own and not a module's; it is zero where it is made.
    model = build(kind, preset, attention_branch=Gain(value=0.5, learned=True))
    parameters = {name: p for name, p in model.named_parameters() if name != "output_bias"}
    for parameter in parameters.values():
        nn.init.constant_(parameter, math.nan)
    initialize(model)
    assert [name for name, p in parameters.items() if p.isnan().any()] == []


def test_same_seed_gives_the_same_model() -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build("encoder_decoder", "sas").state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
