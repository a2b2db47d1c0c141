"""Two roads to one number: special cases in which two specifications are the same function."""

import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, AttentionSpec, ProjectionGains, ShapingSpec
from lightning_app.blocks.block import Block, BlockSpec, Call, Carries
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import PlainScores, QueryKeySums
from lightning_app.blocks.masks import Mask, causal_mask, full_mask, mask_of, padding_mask
from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.placed import rotation
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain, LearnedGain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.blocks.streams import Stream
from lightning_app.models.initialization import profile
from lightning_app.models.stack import BlockStack
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

BATCH, SOURCE, TARGET, MODEL, HEADS, DIM = 2, 3, 5, 10, 2, 5
SIMPLIFIED = ["sas", "sas_p", "sas_p_no_norm"]
AROUND = ("around_self", "around_cross", "around_ff")


def source_mask() -> Mask:
    return padding_mask(torch.arange(SOURCE) < torch.tensor([3, 2])[:, None])


def spec_of(preset: str, depth: int = 3) -> StackSpec:
    return PRESETS[preset](Stack(depth=depth, peer_depth=2))


def everywhere(spec: StackSpec, change: Callable[[ResidualSpec], ResidualSpec]) -> StackSpec:
    """Return `spec` with `change` made around every sub-layer."""

    def changed(block: BlockSpec) -> BlockSpec:
        return replace(block, **{name: change(getattr(block, name)) for name in AROUND})

    return replace(spec, blocks=tuple(changed(block) for block in spec.blocks))


def encode(module: BlockStack, x: Tensor) -> Tensor:
    return module(x, source_mask())


def share(theirs: nn.Module, ours: nn.Module, *, missing: set[str] | None = None) -> None:
    """Give `theirs` the values of `ours`; only what ends in `missing` may lie in one of them."""
    kept, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    ends = tuple(missing or {"nothing"})
    assert [name for name in (*kept, *unexpected) if not name.endswith(ends)] == []


@torch.no_grad()
def set_all(module: nn.Module, ending: str, value: float) -> None:
    """Set every parameter whose name ends in `ending`."""
    found = [p for name, p in module.named_parameters() if name.endswith(ending)]
    assert found
    for parameter in found:
        parameter.fill_(value)


def same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def check_same_stacks(
    ours: StackSpec, theirs: StackSpec, prepare: Callable[[nn.Module], None], *missing: str
) -> None:
    """Compare encoders and decoders with the same random values, `prepare`d in ours."""
    depth, x = len(ours.blocks), torch.randn(BATCH, SOURCE, MODEL)
    a, b = tiny.randomise(tiny.encoder(ours, depth)), tiny.encoder(theirs, depth)
    prepare(a)
    share(b, a, missing=set(missing))
    same(encode(a, x), encode(b, x))
    c, d = tiny.randomise(tiny.decoder(ours, depth)), tiny.decoder(theirs, depth)
    prepare(c)
    share(d, c, missing=set(missing))
    y, memory = torch.randn(BATCH, TARGET, MODEL), torch.randn(BATCH, SOURCE, MODEL)
    same(tiny.decode(c, y, memory, source_mask()), tiny.decode(d, y, memory, source_mask()))


# --- Placements -----------------------------------------------------------------------------------


def test_deepnorm_of_alpha_and_beta_one_is_post_ln() -> None:
    one = everywhere(spec_of("deepnorm"), lambda around: replace(around, skip=Gain()))
    check_same_stacks(one, spec_of("post_ln"), lambda module: None)


def test_deepnorm_is_post_ln_with_smaller_branches() -> None:
    """``N(alpha x + f(x)) = N(x + f(x) / alpha)``, except for the norm's epsilon."""
    ours, theirs = tiny.randomise(tiny.encoder("deepnorm")), tiny.encoder("post_ln")
    share(theirs, ours)
    alpha = spec_of("deepnorm").blocks[0].around_self.skip.value
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".output." in name or ".outer." in name:
                parameter.div_(alpha)
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(ours, x), encode(theirs, x), 1e-4)
    assert (encode(ours, x) - encode(tiny.encoder("post_ln"), x)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("ours", "theirs", "gains", "value", "missing"),
    [
        ("admin", "post_ln", "skip.gain", 1.0, ["skip.gain"]),
        ("layer_scale", "pre_ln", "branch.gain", 1.0, ["branch.gain"]),
        ("skipinit", "rezero", "branch.gain", -0.3, []),
        ("skipinit", "t_fixup", "branch.gain", 1.0, ["branch.gain"]),
    ],
)
def test_equal_gains_are_another_preset(ours, theirs, gains, value, missing: list[str]) -> None:
    one, other = spec_of(ours), spec_of(theirs)
    check_same_stacks(one, other, lambda module: set_all(module, gains, value), *missing)


@pytest.mark.parametrize("preset", ["rezero", "skipinit"])
def test_gains_of_zero_start_as_the_identity(preset: str) -> None:
    x, memory = torch.randn(BATCH, SOURCE, MODEL), torch.randn(BATCH, SOURCE, MODEL)
    assert torch.equal(encode(tiny.encoder(preset), x), x)
    assert torch.equal(tiny.decode(tiny.decoder(preset), x, memory, source_mask()), x)


def test_mix_ln_of_one_layer_is_post_ln_and_a_final_norm() -> None:
    bare = replace(spec_of("mix_ln", depth=1), final_norm="none")
    check_same_stacks(bare, spec_of("post_ln", depth=1), lambda module: None)
    ours = tiny.randomise(tiny.encoder("mix_ln", depth=1))
    theirs = tiny.encoder("post_ln", depth=1)
    share(theirs, ours, missing={"final_norm.weight", "final_norm.bias"})
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(ours, x), ours.final_norm(encode(theirs, x)))


@pytest.mark.parametrize(
    ("ours", "theirs"), [("layer_norm_scaling", "pre_ln"), ("sas_p_no_norm", "sas_p")]
)
def test_one_layer_is_another_preset(ours: str, theirs: str) -> None:
    check_same_stacks(spec_of(ours, depth=1), spec_of(theirs, depth=1), lambda module: None)


def test_layer_norm_scaling_is_pre_ln_with_smaller_norms() -> None:
    """The root of the layer folds into gain and bias of the norms inside it."""
    ours, theirs = tiny.randomise(tiny.encoder("layer_norm_scaling")), tiny.encoder("pre_ln")
    share(theirs, ours)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm_input" in name:
                parameter.div_((int(name.split(".")[1]) + 1) ** 0.5)
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(ours, x), encode(theirs, x))


def test_peri_ln_is_sandwich_ln_of_the_normed_embedding() -> None:
    ours, theirs = tiny.randomise(tiny.encoder("peri_ln")), tiny.encoder("sandwich_ln")
    share(theirs, ours, missing={"input_norm.weight", "input_norm.bias"})
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(ours, x), encode(theirs, ours.input_norm(x)))


def test_sandwich_ln_of_silent_outer_norms_is_its_final_norm() -> None:
    """``x + 0 N(f(N(x))) = x``."""
    module = tiny.randomise(tiny.encoder("sandwich_ln"))
    set_all(module, "norm_branch.weight", 0.0)
    set_all(module, "norm_branch.bias", 0.0)
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(module, x), module.final_norm(x))


def test_keel_of_skip_one_starts_as_post_ln_of_a_normed_stream() -> None:
    """``f(N(x)) = f(x)`` if x is the output of a norm of gain one, except for its epsilon."""
    one = everywhere(spec_of("keel"), lambda around: replace(around, skip=Gain()))
    ours, theirs = tiny.encoder(one), tiny.encoder("post_ln")
    share(theirs, ours, missing={"norm_input.weight", "norm_input.bias"})
    x = build_norm("layer_norm", MODEL)(torch.randn(BATCH, SOURCE, MODEL))
    same(encode(ours, x), encode(theirs, x), 1e-4)
    assert (encode(ours, 3 * x) - encode(theirs, 3 * x)).abs().max() > 0.01


@pytest.mark.parametrize("preset", ["post_ln", "keel", "deepnorm"])
def test_silent_branches_leave_norms_alone(preset: str) -> None:
    """Without branches a stack of norms after the sum starts as one norm, for any skip."""
    module = tiny.encoder(preset)
    for part in ("output.weight", "output.bias", "outer.weight", "outer.bias"):
        set_all(module, part, 0.0)
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(module, x), build_norm("layer_norm", MODEL)(x), 1e-4)


def test_b2t_of_a_silent_feed_forward_is_the_norm_of_attention_and_input() -> None:
    """``x' = N(y + x)``, ``y = N(x + SA(x))``."""
    ours, theirs = tiny.encoder("b2t", depth=1), tiny.encoder("post_ln", depth=1)
    tiny.randomise(ours)
    for part in ("outer.weight", "outer.bias"):
        set_all(ours, part, 0.0)
    share(theirs, ours)
    x = torch.randn(BATCH, SOURCE, MODEL)
    heard: list[Tensor] = []
    block = theirs.blocks[0]
    assert isinstance(block, Block)
    block.around_self.register_forward_hook(lambda *call: heard.append(call[2].x))
    encode(theirs, x)
    same(encode(ours, x), block.around_ff.norm_sum(heard[0] + x))


def test_b2t_without_its_skip_is_post_ln() -> None:
    spec = spec_of("b2t")
    bare = replace(spec, blocks=tuple(replace(b, bottom_to_top=False) for b in spec.blocks))
    check_same_stacks(bare, spec_of("post_ln"), lambda module: None)


def test_x_of_the_dual_stream_is_post_ln_and_its_total_the_sum_of_branches() -> None:
    ours, theirs = tiny.randomise(tiny.encoder("dual_stream")), tiny.encoder("post_ln")
    share(theirs, ours, missing={"final_norm.weight", "final_norm.bias"})
    x = torch.randn(BATCH, SOURCE, MODEL)
    branches: list[Tensor] = []
    for block in theirs.blocks:
        for name in ("around_self", "around_ff"):
            part = block.get_submodule(name)
            part.register_forward_hook(lambda _, args, out: branches.append(args[1]))
    post = encode(theirs, x)
    assert len(branches) == 6
    total = x + torch.stack(branches).sum(dim=0)
    same(encode(ours, x), post + ours.final_norm(total))


def test_normformer_of_open_gains_folds_into_pre_ln() -> None:
    """Without the norms of its branches, and with head gains of one, it is Pre-LN."""
    bare = everywhere(spec_of("normformer"), lambda around: replace(around, norm_branch="none"))
    bare = replace(bare, blocks=tuple(replace(b, ff_norm="none") for b in bare.blocks))
    gain = "head_gain.gain"
    check_same_stacks(bare, spec_of("pre_ln"), lambda module: set_all(module, gain, 1.0), gain)


@pytest.mark.parametrize("silent", ["feed_forward.outer", "self_attention.output"])
def test_parallel_of_one_silent_branch_is_pre_ln(silent: str) -> None:
    """One sum or two is the same where one of its branches says nothing."""
    ours, theirs = tiny.randomise(tiny.encoder("parallel")), tiny.encoder("pre_ln")
    for part in ("weight", "bias"):
        set_all(ours, f"{silent}.{part}", 0.0)
    share(theirs, ours, missing={"around_ff.norm_input.weight", "around_ff.norm_input.bias"})
    with torch.no_grad():
        for block in theirs.blocks:
            inner = block.get_submodule("around_ff.norm_input")
            inner.load_state_dict(block.get_submodule("around_self.norm_input").state_dict())
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(ours, x), encode(theirs, x))


# --- Residual attention ---------------------------------------------------------------------------


class Chain:
    """What the self-attentions of an encoder saw and handed on, layer by layer."""

    def __init__(self, module: BlockStack, x: Tensor) -> None:
        self.query: list[Tensor] = []
        self.key: list[Tensor] = []
        self.carry: list[Any] = []
        for block in module.blocks:
            attention = block.get_submodule("self_attention")
            assert isinstance(attention, Attention)
            attention.register_forward_hook(self._keep)
        encode(module, x)

    def _keep(self, attention: nn.Module, args: tuple[Any, ...], out: tuple[Any, ...]) -> None:
        assert isinstance(attention, Attention)
        self.query.append(args[0])
        self.key.append(args[1])
        self.carry.append(out[1])


def seen(carry: Any, mask: Mask | None = None) -> Tensor:
    """Return the scores of `carry`, and zeros where nothing is seen: they have no meaning there."""
    return carry.scores.masked_fill(~(mask or source_mask()).allowed, 0.0)


def test_running_sum_is_one_product_of_concatenated_queries_and_keys() -> None:
    """``[Q_1 .. Q_n] [K_1 .. K_n]^T = sum_i Q_i K_i^T``, in every layer of a stack."""
    module = tiny.randomise(tiny.encoder(BlockConfig(preset="post_ln", residual_attention="sum")))
    chain = Chain(module, torch.randn(BATCH, SOURCE, MODEL))
    for n in (1, 2, 3):
        queries, keys = torch.cat(chain.query[:n], dim=-1), torch.cat(chain.key[:n], dim=-1)
        same(seen(chain.carry[n - 1]), queries @ keys.mT / DIM**0.5 * source_mask().allowed)


def test_product_of_sums_is_qk_sum_and_no_running_sum() -> None:
    """``(sum Q)(sum K)^T`` also has the terms of different layers."""
    summed = BlockConfig(preset="post_ln", residual_attention="qk_sum")
    chain = Chain(tiny.randomise(tiny.encoder(summed)), torch.randn(BATCH, SOURCE, MODEL))
    for n in (1, 2, 3):
        carry = chain.carry[n - 1]
        assert isinstance(carry, QueryKeySums)
        product = carry.query @ carry.key.mT
        same(product, torch.stack(chain.query[:n]).sum(0) @ torch.stack(chain.key[:n]).sum(0).mT)
        layers = range(n)
        like = sum((chain.query[i] @ chain.key[i].mT for i in layers), torch.zeros(()))
        pairs = itertools.permutations(layers, 2)
        unlike = sum((chain.query[i] @ chain.key[j].mT for i, j in pairs), torch.zeros(()))
        same(product, like + unlike)
        assert bool((product - like).abs().max() > 0.5) == (n > 1)


@pytest.mark.parametrize("kind", ["sum", "mean", "qk_sum"])
def test_residual_attention_of_one_layer_is_none(kind: Any) -> None:
    ours = BlockConfig(preset="post_ln", residual_attention=kind)
    stack = Stack(depth=1, peer_depth=2)
    check_same_stacks(ours.resolve(stack), spec_of("post_ln", depth=1), lambda module: None)


@pytest.mark.parametrize("kind", ["sum", "mean", "qk_sum"])
def test_residual_attention_of_two_layers_is_another_function(kind: Any) -> None:
    config = BlockConfig(preset="post_ln", residual_attention=kind)
    ours, theirs = tiny.randomise(tiny.encoder(config, depth=2)), tiny.encoder("post_ln", depth=2)
    share(theirs, ours)
    x = torch.randn(BATCH, SOURCE, MODEL)
    assert (encode(ours, x) - encode(theirs, x)).abs().max() > 1e-3


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_mean_in_layer_n_is_the_sum_at_temperature_n(layer: int) -> None:
    """The same scores from below, the same map."""
    stack = Stack(depth=3, peer_depth=2)
    mean = BlockConfig(preset="post_ln", residual_attention="mean")
    cooled = replace(mean, residual_attention="sum", residual_temperature=float(layer))
    specs = [config.resolve(stack).blocks[layer - 1].self_attention for config in (mean, cooled)]
    ours, theirs = (Attention(spec, MODEL, HEADS, 0.0) for spec in specs)
    share(theirs, tiny.randomise(ours))
    u, below = torch.randn(BATCH, SOURCE, MODEL), torch.randn(BATCH, HEADS, SOURCE, SOURCE)
    below = below.masked_fill(~source_mask().allowed, -1e300)
    parts = ours.queries_keys_values(u, None)
    (a, carried), (b, also) = (
        module(*parts, source_mask(), PlainScores(below)) for module in (ours, theirs)
    )
    same(a, b)
    same(carried.scores, also.scores)


@pytest.mark.parametrize("carry", ["scores", "qk_sum"])
def test_layer_without_queries_repeats_the_map_below(carry: str) -> None:
    """Scores of zero add nothing to the sum: what attention reads is the layer below's map.

    Of sums, only the keys grow then.
    """
    attention = tiny.randomise(Attention(AttentionSpec(carry=carry), MODEL, HEADS, 0.0))  # pyright: ignore[reportArgumentType]
    u = torch.randn(BATCH, SOURCE, MODEL)
    first, below = attention(*attention.queries_keys_values(u, None), source_mask(), None)
    nn.init.zeros_(attention.query.weight)
    nn.init.zeros_(attention.query.bias)
    again, above = attention(*attention.queries_keys_values(u, None), source_mask(), below)
    if carry == "scores":
        assert torch.equal(below.scores, above.scores)
        same(first, again)
    else:
        assert torch.equal(below.query, above.query)
        same(above.key, 2 * below.key)


@pytest.mark.parametrize("carry", ["scores", "qk_sum"])
def test_mask_does_not_change_what_is_carried(carry: str) -> None:
    attention = tiny.randomise(Attention(AttentionSpec(carry=carry), MODEL, HEADS, 0.0))  # pyright: ignore[reportArgumentType]
    parts = attention.queries_keys_values(torch.randn(BATCH, SOURCE, MODEL), None)
    device = torch.device("cpu")
    nothing = mask_of(torch.zeros(1, 1, 1, SOURCE, dtype=torch.bool))
    masks = (full_mask(SOURCE, device), source_mask(), causal_mask(SOURCE, device), nothing)
    outputs, carried = [], []
    for mask in masks:
        _, below = attention(*parts, mask, None)
        heads, above = attention(*parts, mask, below)
        outputs.append(heads)
        carried.append(above)
    for mask, other in zip(masks, carried, strict=True):
        shown = (seen(c, mask) if carry == "scores" else c for c in (other, carried[0]))
        torch.testing.assert_close(*shown, rtol=0.0, atol=0.0)
    assert all(not torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("residual_attention", ["sum", "mean", "qk_sum"])
def test_residual_scores_vanish_where_queries_start_at_zero(residual_attention: Any) -> None:
    """With W_Q = 0 in every layer all scores are zero: carrying them changes nothing."""
    plain = tiny.encoder("sas")
    carried = tiny.encoder(BlockConfig(preset="sas", residual_attention=residual_attention))
    share(carried, plain)
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(plain, x), encode(carried, x))


def test_noise_changes_training_alone() -> None:
    quiet = tiny.encoder("realformer")
    noisy = tiny.encoder(BlockConfig(preset="realformer", query_key_noise=0.5))
    share(noisy, quiet)
    x = torch.randn(BATCH, SOURCE, MODEL)
    assert not torch.equal(encode(noisy, x), encode(noisy, x))
    assert torch.equal(encode(quiet, x), encode(quiet, x))
    noisy.eval()
    assert torch.equal(encode(noisy, x), encode(quiet, x))


# --- Rotary positions -----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "sas", "qk_norm"])
def test_rotary_block_does_not_see_where_a_text_starts(preset: str) -> None:
    """Scores depend on i - j alone: all positions may move together, not one by one."""
    module = tiny.randomise(tiny.encoder(preset, positions="rope", model_dim=12))
    x = torch.randn(BATCH, SOURCE, 12)

    def run(*angles: Any) -> Tensor:
        stream, carries = Stream(x), Carries()
        for layer, block in module.layers:
            stream, carries = block(stream, carries, Call(layer, source_mask(), *angles))
        return stream.x

    here = run(rotation(torch.arange(SOURCE), 6))
    same(here, run(rotation(17 + torch.arange(SOURCE), 6)))
    same(module.final_norm(here), encode(module, x))
    assert (here - run(None)).abs().max() > 1e-3


def test_a_text_of_one_token_has_no_distance() -> None:
    ours = tiny.randomise(tiny.encoder("pre_ln", positions="rope", model_dim=12))
    theirs = tiny.encoder("pre_ln", model_dim=12)
    share(theirs, ours)
    x, mask = torch.randn(BATCH, 1, 12), full_mask(1, torch.device("cpu"))
    same(ours(x, mask), theirs(x, mask))


# --- Simplified blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["padding", "causal"])
@pytest.mark.parametrize("preset", SIMPLIFIED)
def test_simplified_self_attention_starts_as_the_norm(preset: str, mask: str) -> None:
    """Every self-attention gives what it reads, to the last digits, under either mask."""
    module = tiny.encoder(preset)
    read: list[Any] = []
    given: list[Any] = []
    for block in module.blocks:
        norm = block.get_submodule("around_self.norm_input")
        norm.register_forward_hook(lambda _, args, out: read.append(out))
        attention = block.get_submodule("self_attention")
        attention.register_forward_hook(lambda _, args, out: given.append(out[0]))
    x = 3.0 * torch.randn(BATCH, SOURCE, MODEL)
    module(x, source_mask() if mask == "padding" else causal_mask(SOURCE, x.device))
    assert len(read) == len(given) == len(module.blocks)
    for u, attended in zip(read, given, strict=True):
        same(attended, u, 1e-13)
    first = module.blocks[0].get_submodule("around_self.norm_input")
    same(given[0], first(x), 1e-13)


def test_sas_and_sas_p_start_as_one_function() -> None:
    """Both are ``N(x) + b FF(N(x))`` a layer, up to ``N(N(x)) = N(x)``, which epsilon blurs."""
    ours, theirs = tiny.encoder("sas"), tiny.encoder("sas_p")
    share(theirs, ours, missing={"around_ff.norm_input.weight", "around_ff.norm_input.bias"})
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(ours, x), encode(theirs, x), 1e-3)


@pytest.mark.parametrize("kind", ["orthogonal", "orthogonal_plus"])
def test_tied_orthogonal_projections_start_as_none(kind: Any) -> None:
    """V P = I: simplified blocks with the two matrices, tied, start as those without."""
    matrices = ("value_projection", "first_value_projection", "output_projection")
    axes: dict[str, Any] = dict.fromkeys(matrices, kind)
    ours = tiny.encoder(BlockConfig(preset="sas", tied_projections=True, **axes))
    theirs = tiny.encoder("sas")
    ends = ("weight", "bias", "initial", "change.weight")
    share(theirs, ours, missing={f"{part}.{end}" for part in ("value", "output") for end in ends})
    x = torch.randn(BATCH, SOURCE, MODEL)
    same(encode(ours, x), encode(theirs, x))


def test_v_skipinit_that_is_tied_starts_as_sas() -> None:
    """Either map is the identity at the start: ``I + 0 A`` and ``I + A - C``."""
    ours = tiny.encoder(BlockConfig(preset="v_skipinit", tied_projections=True))
    theirs = tiny.encoder("sas")
    x = torch.randn(BATCH, SOURCE, MODEL)
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        feed_forward = a.get_submodule("feed_forward").state_dict()
        b.get_submodule("feed_forward").load_state_dict(feed_forward)
        assert (a.get_submodule("self_attention.value")(x) - x).abs().max() > 0.1
    same(encode(ours, x), encode(theirs, x))


def test_identity_plus_of_the_difference_is_a_full_matrix() -> None:
    """``u (a I + b dW) = u W`` with ``dW = (W - a I) / b``."""
    a, b = 0.9, 0.3
    gains = ProjectionGains(kept=Gain(value=a), change=Gain(value=b))
    spec = AttentionSpec(value="identity_plus", value_gains=gains)
    ours = tiny.randomise(Attention(spec, MODEL, HEADS, 0.0))
    theirs = tiny.randomise(Attention(AttentionSpec(), MODEL, HEADS, 0.0))
    share(ours, theirs, missing={"value.weight", "value.bias", "value.change.weight"})
    assert isinstance(theirs.value, nn.Linear)
    with torch.no_grad():
        theirs.value.bias.zero_()
        change = (theirs.value.weight - a * torch.eye(MODEL)) / b
        ours.value.get_parameter("change.weight").copy_(change)
    u = torch.randn(BATCH, SOURCE, MODEL)
    x, y = (m(*m.queries_keys_values(u, None), source_mask(), None)[0] for m in (ours, theirs))
    same(x, y)


def test_shaping_without_identity_and_centre_is_none() -> None:
    """``0 I + 1 A`` is A."""
    plain = ShapingSpec(alpha=0.0, beta=1.0, gamma=None, learned=False)
    stack = Stack(depth=3, peer_depth=2)
    ours = BlockConfig(preset="pre_ln", shaped_attention=plain).resolve(stack)
    names = ("shaping.alpha", "shaping.beta")
    check_same_stacks(ours, spec_of("pre_ln"), lambda module: None, *names)


@pytest.mark.parametrize(
    ("preset", "parts"), [("qk_norm", ("query", "key")), ("hybrid_norm", ("query", "key", "value"))]
)
def test_norms_in_the_heads_do_not_see_lengths(preset: str, parts: tuple[str, ...]) -> None:
    """``N(c q) = N(q)`` except for epsilon: logits cannot grow with the matrices."""
    module, x = tiny.encoder(preset), torch.randn(BATCH, SOURCE, MODEL)
    before = encode(module, x)
    bare = tiny.encoder(without_norms_in_heads(spec_of(preset)))
    bare_before = encode(bare, x)
    with torch.no_grad():
        for stack in (module, bare):
            for name, parameter in stack.named_parameters():
                if any(f".{part}." in name for part in parts):
                    parameter.mul_(7.0)
    same(encode(module, x), before, 1e-3)
    assert (encode(bare, x) - bare_before).abs().max() > 0.01


def without_norms_in_heads(spec: StackSpec) -> StackSpec:
    blocks = (replace(block, self_attention=AttentionSpec()) for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


# --- What a checkpoint keeps ----------------------------------------------------------------------


def through_a_file(module: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_one_gain_serves_all_branches_of_a_rezero_layer() -> None:
    """It is one parameter, with the gradient of all its uses, before and after a checkpoint."""
    module = tiny.randomise(tiny.decoder("rezero"))
    other = tiny.decoder("rezero")
    other.load_state_dict(through_a_file(module))
    for stack in (module, other):
        assert sum("gain" in name for name, _ in stack.named_parameters()) == len(stack.blocks)
        for _, block in stack.layers:
            assert len({id(getattr(block, name).branch.gain) for name in AROUND}) == 1
    y, memory = torch.randn(BATCH, TARGET, MODEL), torch.randn(BATCH, SOURCE, MODEL)
    assert torch.equal(*[tiny.decode(stack, y, memory, source_mask()) for stack in (module, other)])

    apart = tiny.decoder("skipinit")
    share(apart, module)
    gradients = []
    for stack in (module, apart):
        tiny.decode(stack, y, memory, source_mask()).square().sum().backward()
        block = stack.blocks[0]
        parts = {id(p): p for name in AROUND for p in [block.get_parameter(f"{name}.branch.gain")]}
        gradients.append([p.grad for p in parts.values() if p.grad is not None])
    assert [len(each) for each in gradients] == [1, 3]
    same(gradients[0][0], torch.stack(gradients[1]).sum())


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"value_gains": ProjectionGains(change=Gain(learned=True))}, id="learned"),
        pytest.param({"tied_projections": True}, id="tied"),
        pytest.param({"shaped_attention": ShapingSpec(gamma=0.3, learned=False)}, id="fixed"),
    ],
)
def test_orthogonal_anchors_and_gains_survive_a_checkpoint(axes: dict[str, Any]) -> None:
    """W_0 is no parameter, and a model that loads it had drawn another."""
    plus = dict.fromkeys(("value_projection", "output_projection"), "orthogonal_plus")
    block = BlockConfig(preset="sas", **plus, **axes)
    module, other = tiny.randomise(tiny.encoder(block)), tiny.encoder(block)
    anchors = [dict(m.named_buffers()) for m in (module, other)]
    names = [name for name in anchors[0] if name.endswith("initial")]
    assert len(names) == 2 * 3
    assert not any(torch.equal(anchors[0][name], anchors[1][name]) for name in names)
    x = torch.randn(BATCH, SOURCE, MODEL)
    assert not torch.equal(encode(module, x), encode(other, x))
    other.load_state_dict(through_a_file(module))
    assert torch.equal(encode(module, x), encode(other, x))


def test_profiled_skips_of_admin_survive_a_checkpoint() -> None:
    model, other = tiny.translator("admin"), tiny.translator("admin")
    source, target = tiny.sentences()
    profile(model, lambda: model(source, target))
    gains = [m.gain for m in model.modules() if isinstance(m, LearnedGain)]
    assert len(gains) == 2 * 3 + 3 * 2
    assert sum(bool((gain == 1.0).all()) for gain in gains) == 2  # the first of each stack
    other.load_state_dict(through_a_file(model))
    assert torch.equal(model(source, target), other(source, target))


# --- Precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "qk_sum"])
def test_carry_stays_float32_under_autocast(kind: Any) -> None:
    torch.set_default_dtype(torch.float32)
    module = tiny.encoder(BlockConfig(preset="pre_ln", residual_attention=kind))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = Chain(module, torch.randn(BATCH, SOURCE, MODEL))
    assert {part.dtype for carry in chain.carry for part in carry} == {torch.float32}
    assert {query.dtype for query in chain.query} == {torch.bfloat16}
