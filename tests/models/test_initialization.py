"""Each rule of the table of initial values, on models wide enough to see a distribution."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import (
    AnchoredProjection,
    Attention,
    HeadGain,
    Shaping,
    ShapingSpec,
)
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain, LearnedGain
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.models.heads import ArchitectureConfig, EncoderDecoder, build_model
from lightning_app.models.initialization import count_parameters, initial_values, initialize
from lightning_app.runs.records import read_yaml
from tests import reference
from tests.noted import noted

DIM, FF, HEADS, VOCABULARY, PAD = 64, 96, 4, 997, 3
ENCODER, DECODER = 3, 2
SIZES: dict[str, Any] = {"encoder_depth": ENCODER, "decoder_depth": DECODER}
SIZES |= {"model_dim": DIM, "ff_dim": FF, "num_heads": HEADS}
SIMPLIFIED = ["sas", "sas_p", "sas_p_no_norm"]
ZERO = ["zero_output", "speedrun"]
PLAIN_ONLY = {"t_fixup", "ngpt", "differential", "sigma_reparam", *ZERO}
Kind = Literal["encoder_decoder", "encoder"]
every_kind = pytest.mark.parametrize("kind", ["encoder_decoder", "encoder"])
ANCHORED = {"value_projection": "orthogonal_plus", "output_projection": "orthogonal_plus"}


def build(kind: Kind, preset: str, architecture: Any = None, **axes: Any) -> nn.Module:
    config = ArchitectureConfig(kind=kind, **(SIZES | (architecture or {})))
    return build_model(config, BlockConfig(preset=preset, **axes), VOCABULARY, PAD)


def attentions(model: nn.Module) -> Iterator[tuple[str, Attention]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield name, module


def bound(weight: Tensor) -> float:
    """Return Xavier's bound at gain one."""
    fan_out, fan_in = weight.shape
    return math.sqrt(6 / (fan_in + fan_out))


def assert_uniform(weight: Tensor, gain: float) -> None:
    """Fills the whole of U(-bound, bound)."""
    limit = gain * bound(weight)
    assert weight.abs().max() <= limit * (1 + 1e-6)
    assert weight.abs().max() > 0.95 * limit
    assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.05)
    assert weight.mean().abs() < 0.1 * limit


def assert_normal(weight: Tensor, std: float) -> None:
    """Has the spread and the tails of N(0, std^2)."""
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert weight.mean().abs() < 0.1 * std
    beyond = (weight.abs() > 2 * std).float().mean().item()
    assert beyond == pytest.approx(0.0455, rel=0.35)  # two sigmas of a normal distribution


def assert_orthogonal(matrix: Tensor) -> None:
    """A rotation of its own, not the identity."""
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(DIM), rtol=0.0, atol=1e-5)
    assert (matrix - torch.eye(DIM)).abs().max() > 0.1


# Gains over Xavier in a model of three encoder and two decoder layers, or of three alone.
FAIRSEQ = {"query": 0.5**0.5, "key": 0.5**0.5, "value": 0.5**0.5, "output": 1.0, "ff": 1.0}


def scaled(query: float, value: float, output: float, ff: float) -> dict[str, float]:
    return {"query": query, "key": query, "value": value, "output": output, "ff": ff}


def expected_gains(preset: str, side: str, alone: bool) -> dict[str, float]:
    """The papers' constants once more, by hand (mechanisms 2.4, 2.7, 2.10)."""
    depth = ENCODER if side == "encoder" else DECODER
    if preset == "deepnorm":
        if alone:
            beta = (8 * ENCODER) ** -0.25
        elif side == "encoder":
            beta = 0.87 * (ENCODER**4 * DECODER) ** (-1 / 16)
        else:
            beta = (12 * DECODER) ** -0.25
        return scaled(1.0, beta, beta, beta)
    if preset == "b2t":
        return {name: gain * depth**-0.5 for name, gain in FAIRSEQ.items()}
    if preset == "t_fixup":
        small = 0.67 * ENCODER**-0.25 if side == "encoder" else (9 * DECODER) ** -0.25
        return scaled(0.5**0.5, small, small, small)
    if preset == "sub_ln":
        gain = math.log(3 * DECODER) if side == "decoder" else math.log(2 * ENCODER)
        if side == "encoder" and not alone:
            gain *= math.log(3 * DECODER) / 3
        return scaled(0.5**0.5, (gain / 2) ** 0.5, gain**0.5, gain**0.5)
    return FAIRSEQ


@every_kind
def test_matrices_and_the_embedding_have_the_gains_of_their_paper(kind: Kind) -> None:
    """The embedding is small in T-Fixup alone, by (9N)^(-1/4), N the depth of the encoder."""
    for preset in PRESETS:
        with noted(preset):
            model = build(kind, preset)
            check_matrices(model, kind, preset)
            check_norms(model, preset)
            weight = model.get_parameter("embedding.tokens.weight")
            gain = (9 * ENCODER) ** -0.25 if preset == "t_fixup" else 1.0
            assert weight.std().item() == pytest.approx(gain * DIM**-0.5, rel=0.02)


def check_matrices(model: nn.Module, kind: Kind, preset: str) -> None:
    seen: set[str] = set()
    for name, module in model.named_modules():
        side, _, inside = name.partition(".blocks.")
        if not isinstance(module, nn.Linear) or not inside:
            continue
        part = "ff" if "feed_forward" in inside else inside.rpartition(".")[2]
        if "output_gate" in inside:
            assert_uniform(module.weight, 1.0)
            continue
        own = "self_attention" in inside
        zero = preset in SIMPLIFIED and own and part == "query"
        zero |= preset in ZERO and inside.endswith(("output", "outer"))
        orthogonal = preset == "v_skipinit" and own and part in ("value", "output")
        if zero or part == "change":
            assert module.weight.count_nonzero() == 0
        elif orthogonal:
            assert_orthogonal(module.weight)
        elif preset == "ngpt":
            rows = module.weight.norm(dim=0 if inside.endswith((".output", ".outer")) else 1)
            torch.testing.assert_close(rows, torch.ones_like(rows))
        elif preset == "deepnorm":
            gain = expected_gains(preset, side, alone=kind == "encoder")[part]
            assert_normal(module.weight, gain * bound(module.weight) / math.sqrt(3))
        else:
            gains = expected_gains(preset, side, kind == "encoder")
            # Sub-LN's gain is not that of cross-attention.
            gains = FAIRSEQ if preset == "sub_ln" and "cross_attention" in inside else gains
            assert_uniform(module.weight, gains[part])
        seen.add(part)
    assert seen >= {"query", "key", "ff"}
    if preset not in SIMPLIFIED:
        assert seen == {"query", "key", "value", "output", "ff"}


def test_geglu_starts_its_third_matrix_like_the_others_and_the_head_is_xavier_uniform() -> None:
    for preset in ("pre_ln", "t_fixup"):
        model = build("encoder", preset, {"activation": "geglu"})
        gain = expected_gains(preset, "encoder", alone=True)["ff"]
        for n in range(ENCODER):
            for part in ("inner", "gate", "outer"):
                weight = model.get_parameter(f"encoder.blocks.{n}.feed_forward.{part}.weight")
                assert_uniform(weight, gain)
    # The gains of a preset are its blocks'.
    for preset in ("pre_ln", "deepnorm", "t_fixup"):
        assert_uniform(build("encoder", preset).get_parameter("transform.weight"), 1.0)


ZEROED = ["pre_ln", "parallel", "hyper_connections", "gated_attention", "resformer", "realformer"]
ZEROED += ["sub_ln"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("preset", ZEROED)
def test_zero_outputs_leave_the_embedding_and_move_first(preset: str) -> None:
    """Logits are those of normed embeddings, and nothing before a zero matrix has a gradient."""
    torch.manual_seed(0)
    model = build("encoder_decoder", preset, {"dropout": 0.0}, zero_output=True)
    assert isinstance(model, EncoderDecoder)
    source, target = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 4, 6]])
    logits = model(source, target)
    embedding = model.embedding.tokens.weight.detach().numpy()
    x = embedding[target[0].numpy()] * math.sqrt(DIM) + reference.sinusoids(3, DIM)
    # Each sum of a Post-LN stack has a norm, and a Pre-LN one only its end.
    for _ in range(3 * DECODER if preset == "realformer" else 1):
        x = reference.layer_norm(x, np.ones(DIM), np.zeros(DIM))
    expected = torch.from_numpy(x @ embedding.T)
    # The final norm cancels the number of equal streams, up to its epsilon.
    close = 2e-4 if preset == "hyper_connections" else 1e-12
    torch.testing.assert_close(logits[0], expected, rtol=0.0, atol=close)
    torch.nn.functional.cross_entropy(logits[0], torch.tensor([4, 6, 2])).backward()
    for name, parameter in model.named_parameters():
        _, _, inside = name.partition(".blocks.")
        if not inside or "around" in inside or "norm" in inside or parameter.grad is None:
            continue
        last = ".output." in name or ".outer." in name
        moves = last and "encoder" not in name.partition(".")[0]
        assert bool(parameter.grad.count_nonzero()) == moves, name


def test_zero_outputs_leave_the_other_starts_alone() -> None:
    models = []
    for axes in ({}, {"zero_output": True}, {"zero_output": False}):
        torch.manual_seed(0)
        models.append(build("encoder_decoder", "pre_ln", **axes).state_dict())
    for name, value in models[0].items():
        zero = name.endswith((".output.weight", "feed_forward.outer.weight"))
        assert torch.equal(models[1][name], torch.zeros_like(value) if zero else value), name
        assert torch.equal(models[2][name], value), name


def test_nothing_undoes_what_is_special() -> None:
    """Neither a second run of the initialisation nor its run on a part of the model."""
    model = build("encoder_decoder", "sas", **ANCHORED)
    initialize(model)
    for part in model.children():
        initialize(part)
    for name, attention in attentions(model):
        if name.endswith("self_attention"):
            assert attention.query.weight.count_nonzero() == 0
            assert attention.query.bias.count_nonzero() == 0
            for part in (attention.value, attention.output):
                assert isinstance(part, AnchoredProjection)
                assert part.change.weight.count_nonzero() == 0
                assert part.initial is not None
                assert_orthogonal(part.initial)


@every_kind
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - PLAIN_ONLY))
def test_identity_plus_starts_as_the_identity(kind: Kind, preset: str) -> None:
    # An identity is no small matrix, which T-Fixup's stream without norms needs, and no zero. In
    # nGPT dW would start with rows of length 1, and zeros have no singular vector.
    model = build(kind, preset, value_projection="identity_plus", output_projection="identity_plus")
    parts = [m for m in model.modules() if isinstance(m, AnchoredProjection)]
    assert len(parts) == 2 * (3 if kind == "encoder" else 5)
    u = torch.randn(2, 3, DIM)
    for part in parts:
        assert part.initial is None
        assert part.change.weight.count_nonzero() == 0
        assert torch.equal(part(u), u)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["orthogonal", "orthogonal_plus"])
def test_orthogonal_projections_start_so_and_tied_ones_cancel(kind: str, tied: bool) -> None:
    """Tied, values and output undo each other at the start; each layer draws its own matrix."""
    projections = ("value_projection", "output_projection", "first_value_projection")
    axes = dict.fromkeys(projections, kind)
    model = build("encoder_decoder", "sas", **axes, tied_projections=tied)
    u = torch.randn(2, 3, DIM)
    values = []
    for name, attention in attentions(model):
        if not name.endswith("self_attention"):
            continue
        value, output = attention.value(u), attention.output(u)
        torch.testing.assert_close(value.norm(dim=-1), u.norm(dim=-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.norm(dim=-1), u.norm(dim=-1), rtol=1e-5, atol=1e-5)
        assert bool(((attention.output(value) - u).abs().max() < 1e-4) == tied)
        values.append(value)
    assert len(values) == ENCODER + DECODER
    for n, value in enumerate(values):
        assert all((value - other).abs().max() > 0.1 for other in values[:n])


def check_norms(model: nn.Module, preset: str) -> None:
    """Biases are zero and norms one."""
    for name, module in model.named_modules():
        gain = 0.0 if preset == "swin_v2" and name.endswith("norm_branch") else 1.0
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            assert bool((module.weight == gain).all()), name
        bias = getattr(module, "bias", None)
        if isinstance(module, nn.LayerNorm | nn.Linear) and bias is not None:
            assert bias.count_nonzero() == 0, name


@every_kind
def test_embedding_is_normal_with_a_row_of_zeros_for_padding(kind: Kind) -> None:
    weight = build(kind, "pre_ln").get_parameter("embedding.tokens.weight")
    assert weight[PAD].count_nonzero() == 0
    others = torch.cat([weight[:PAD], weight[PAD + 1 :]])
    assert others.std().item() == pytest.approx(DIM**-0.5, rel=0.02)
    assert others.mean().abs() < 0.01 * DIM**-0.5
    assert (others.abs() > 2 * DIM**-0.5).float().mean().item() == pytest.approx(0.0455, rel=0.1)
    # Learned positions start small.
    positions = {"positions": "learned", "max_positions": 101}
    model = build("encoder", "pre_ln", positions)
    assert_normal(model.get_parameter("embedding.position_table.weight"), 0.02)


@pytest.mark.parametrize("learned", [True, False])
def test_gains_start_at_their_specification(learned: bool) -> None:
    axes = {
        "shaped_attention": ShapingSpec(alpha=0.5, beta=2.0, gamma=0.25, learned=learned),
        "attention_skip": Gain(value=0.75, learned=True, vector=True),
        "ff_branch": Gain(value=-0.125, learned=True),
    }
    model = build("encoder_decoder", "pre_ln", **axes)
    gains = {
        name.rpartition("around_")[2]: (module.gain.unique().tolist(), tuple(module.gain.shape))
        for name, module in model.named_modules()
        if isinstance(module, LearnedGain)
    }
    assert gains == {"self.skip": ([0.75], (DIM,)), "ff.branch": ([-0.125], ())}
    shapings = [m.state_dict() for m in model.modules() if isinstance(m, Shaping)]
    assert len(shapings) == 5
    for state in shapings:
        values = {name: value.unique().tolist() for name, value in state.items()}
        assert values == {"alpha": [0.5], "beta": [2.0], "gamma": [0.25]}


@pytest.mark.parametrize(
    ("preset", "starts"),
    [
        ("rezero", {"self.branch": 0.0, "cross.branch": 0.0, "ff.branch": 0.0}),
        ("skipinit", {"self.branch": 0.0, "cross.branch": 0.0, "ff.branch": 0.0}),
        ("layer_scale", {"self.branch": 0.1, "cross.branch": 0.1, "ff.branch": 0.1}),
        ("admin", {"self.skip": 1.0, "cross.skip": 1.0, "ff.skip": 1.0}),
    ],
)
def test_gains_of_a_preset_start_where_its_paper_has_them(preset: str, starts: Any) -> None:
    model = build("encoder_decoder", preset)
    for n in range(DECODER):
        block = model.get_submodule(f"decoder.blocks.{n}")
        for name, value in starts.items():
            gain = block.get_parameter(f"around_{name}.gain")
            assert gain.shape == ((DIM,) if preset in ("layer_scale", "admin") else ())
            assert gain.unique().tolist() == pytest.approx([value])


def test_head_gains_of_normformer_start_at_one() -> None:
    model = build("encoder_decoder", "normformer")
    gains = [m.gain for m in model.modules() if isinstance(m, HeadGain)]
    assert len(gains) == ENCODER + 2 * DECODER
    assert all(gain.shape == (HEADS, 1, 1) and bool((gain == 1.0).all()) for gain in gains)


@pytest.mark.parametrize("preset", [*SIMPLIFIED, "v_skipinit"])
def test_simplified_gains_follow_the_depth_of_their_own_stack(preset: str) -> None:
    model = build("encoder_decoder", preset)
    for side, depth in (("encoder", 3), ("decoder", 2)):
        for n in range(depth):
            block = f"{side}.blocks.{n}"
            gain = model.get_parameter(f"{block}.around_ff.branch.gain").item()
            assert gain == pytest.approx(0.1 * math.sqrt(18 / depth), rel=1e-6)
            assert model.get_parameter(f"{block}.around_self.branch.gain").item() == 1.0
            for name in ("alpha", "beta", "gamma") if preset in SIMPLIFIED else ("alpha", "beta"):
                weight = model.get_parameter(f"{block}.self_attention.shaping.{name}")
                assert weight.shape == (HEADS, 1, 1)


@pytest.mark.parametrize("kind", ["encoder", "encoder_decoder"])
def test_drawn_by_name_equal_parts_start_equal_whatever_else_a_variant_has(kind: Kind) -> None:
    """Up to the gain of their preset, and no later number depends on the draws."""
    torch.manual_seed(5)
    drawn, after = {}, []
    for preset in ("pre_ln", "sas", "deepnorm", "mhc", "t_fixup", "gated_attention", "v_skipinit"):
        with initial_values("xavier", by_name=True):
            drawn[preset] = dict(build(kind, preset).named_parameters())
        after.append((torch.initial_seed(), torch.rand(1).item()))
        torch.manual_seed(5)
    assert len(set(after)) == 1
    assert after[0][0] == 5
    matrices = [n for n, p in drawn["pre_ln"].items() if p.ndim == 2 and "blocks" in n]
    assert len({drawn["pre_ln"][name][0, 0].item() for name in matrices}) == len(matrices)
    del drawn["deepnorm"]  # whose matrices are normal
    for preset, others in drawn.items():
        for name in [n for n in matrices if n in others]:
            ours, theirs = drawn["pre_ln"][name], others[name]
            own = preset == "sas" and name.endswith("self_attention.query.weight")
            own |= preset == "v_skipinit" and name.endswith(
                ("self_attention.value.weight", "self_attention.output.weight")
            )
            if not own:
                torch.testing.assert_close(theirs / theirs.norm(), ours / ours.norm())
    torch.manual_seed(6)
    with initial_values("xavier", by_name=True):
        other = dict(build(kind, "pre_ln").named_parameters())
    assert not any(torch.equal(other[name], drawn["pre_ln"][name]) for name in matrices)


def built(preset: str = "pre_ln", kind: Any = "decoder", **sizes: Any) -> nn.Module:
    config = ArchitectureConfig(kind=kind, **(SIZES | sizes))
    return config.built(lambda: build_model(config, BlockConfig(preset=preset), VOCABULARY, PAD))


@pytest.mark.parametrize(
    ("kind", "branches"), [("decoder", 2 * DECODER), ("encoder_decoder", 3 * DECODER)]
)
def test_gpt2_draws_outputs_smaller_by_branches_of_their_stack(kind: str, branches: int) -> None:
    """As nanoGPT's `_init_weights` and the loop over `c_proj.weight` after it."""
    model = built(kind=kind, initial="gpt2", initial_std=0.03, positions="learned")
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            out = name.endswith(("attention.output.weight", "outer.weight"))
            paths = 2 * ENCODER if "encoder" in name else branches
            drawn = weight[PAD + 1 :] if "tokens" in name else weight
            assert_normal(drawn, 0.03 / math.sqrt(paths) if out else 0.03)


def test_a_preset_scales_what_a_rule_draws_as_it_scales_that_of_pre_ln() -> None:
    """beta and 1 of DeepNet stand over 1/sqrt(2) and 1; zeros and rotations stay."""
    beta = (8 * DECODER) ** -0.25
    block = built("deepnorm", initial="normal").get_submodule("decoder.blocks.1")
    for name, factor in (("query", 2**0.5), ("value", 2**0.5 * beta), ("output", beta)):
        assert_normal(block.get_parameter(f"self_attention.{name}.weight"), 0.02 * factor)
    assert_normal(block.get_parameter("feed_forward.outer.weight"), 0.02 * beta)
    block = built("zero_output", initial="gpt2").get_submodule("decoder.blocks.0")
    assert not block.get_parameter("self_attention.output.weight").any()
    block = built("v_skipinit", initial="normal").get_submodule("decoder.blocks.0")
    assert_orthogonal(block.get_parameter("self_attention.value.weight"))


def test_fairseq_draws_feed_forwards_and_biases_as_torch_does() -> None:
    """Its `TransformerModel` leaves them to `nn.Linear`; its attention draws matrices by Xavier."""
    model = built("post_ln", kind="encoder_decoder", initial="fairseq", positions="learned")
    fans = {name: weight.shape for name, weight in model.named_parameters() if weight.ndim == 2}
    for name, value in model.named_parameters():
        if "norm" in name or "embedding" in name:
            continue
        rows, columns = fans[name.replace("bias", "weight")]
        bound = columns**-0.5
        if name.endswith("output.bias"):
            bound = 0.0
        elif "attention" in name and name.endswith("weight"):
            bound = math.sqrt(6 / (rows + columns) / (1 if "output" in name else 2))
        largest = float(value.detach().abs().max())
        assert 0.9 * bound <= largest <= bound * (1 + 1e-6), name
    with pytest.raises(ValueError, match=r"initial_std 0\.03 with initial fairseq"):
        ArchitectureConfig(initial="fairseq", initial_std=0.03)


def test_xavier_is_the_default_and_takes_no_std() -> None:
    torch.manual_seed(3)
    config = ArchitectureConfig(kind="decoder", decoder_depth=1, model_dim=8, num_heads=2)
    plain = build_model(config, BlockConfig(), VOCABULARY, PAD)
    torch.manual_seed(3)
    same = built(decoder_depth=1, model_dim=8, num_heads=2, ff_dim=1024, initial="xavier")
    for name, weight in plain.named_parameters():
        assert torch.equal(same.get_parameter(name), weight)
    with pytest.raises(ValueError, match=r"initial_std 0\.03 with initial xavier"):
        ArchitectureConfig(initial_std=0.03)
    for field in ("initial_std", "norm_eps"):
        with pytest.raises(ValueError, match=f"{field} 0.0: must be a number above 0"):
            replace(ArchitectureConfig(initial="normal"), **{field: 0.0})


@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "sas", "peri_ln"])
def test_without_biases_a_model_is_the_one_whose_biases_are_zero(preset: str) -> None:
    tokens = torch.randint(5, VOCABULARY, (2, 7))
    torch.manual_seed(4)
    plain = built(preset).eval()
    torch.manual_seed(4)
    without = built(preset, bias=False).eval()
    left = {name for name, _ in without.named_parameters()}
    gone = {name for name, _ in plain.named_parameters()} - left
    assert gone
    assert all(name.endswith("bias") for name in gone)
    assert not any(name.endswith("bias") for name in left)
    torch.testing.assert_close(without(tokens), plain(tokens))


def test_the_bias_of_a_halting_unit_stays() -> None:
    config = ArchitectureConfig(kind="decoder", decoder_depth=2, model_dim=8, num_heads=2)
    config = replace(config, bias=False)
    block = BlockConfig(share="all", halting=HaltingSpec(bias=0.7))
    model = config.built(lambda: build_model(config, block, VOCABULARY, PAD))
    assert model.get_parameter("decoder.halting.unit.bias").item() == pytest.approx(0.7)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "rms_norm_plain"])
def test_norm_eps_is_that_of_every_norm(norm: str, float64: None) -> None:
    """A row of 1 and -1 times a small number tells eps."""
    config = ArchitectureConfig(kind="decoder", decoder_depth=1, model_dim=8, num_heads=2)
    config = replace(config, norm_eps=1e-12)
    block = BlockConfig(norm=norm)
    model = config.built(lambda: build_model(config, block, VOCABULARY, PAD))
    small = 1e-3 * torch.tensor([1.0, -1.0] * 4)
    for name in ("blocks.0.around_self.norm_input", "blocks.0.around_ff.norm_input", "final_norm"):
        found = model.get_submodule(f"decoder.{name}")(small)
        torch.testing.assert_close(found, small / math.sqrt(1e-6 + 1e-12), rtol=1e-9, atol=0.0)


def test_an_embedding_without_its_factor_is_the_row_of_its_token() -> None:
    model = built(embedding_scale="none", dropout=0.0).eval()
    tokens = torch.randint(5, VOCABULARY, (2, 7))
    embedding = model.get_submodule("embedding")
    rows = model.get_parameter("embedding.tokens.weight")[tokens]
    table = torch.from_numpy(reference.sinusoids(7, DIM)).float()
    torch.testing.assert_close(embedding(tokens), rows + table)


def test_the_models_of_recipes_have_their_numbers_of_parameters() -> None:
    """10.65 M of nanoGPT (3adf61e) are without positions; transformers 5.24 has two segments.

    fairseq (3d262bb2) has this number with dictionaries of 8,848 and 6,632 entries.
    """

    def count(recipe: str, vocabulary: int, source: int | None = None, **sizes: Any) -> int:
        tree = read_yaml(Path(f"ablations/base/{recipe}.yaml"))["model"]
        config = ArchitectureConfig(**(tree["architecture"] | sizes))
        build = partial(build_model, config, BlockConfig(**tree["block"]), vocabulary, 0, source)
        return count_parameters(lambda: config.built(build))

    baby = {"decoder_depth": 6, "model_dim": 384, "ff_dim": 1536, "num_heads": 6}
    assert count("nanogpt_shakespeare", 65, **baby) - 64 * 384 == 10_646_784
    assert count("hf_mlm", 30_522) + 2 * 768 == 109_514_298
    assert count("fairseq_iwslt14", 6_632, 8_848) == 39_469_056
