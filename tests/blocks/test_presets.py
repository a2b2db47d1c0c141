"""What each preset says, as a value."""

import json
import math
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml

from lightning_app.blocks import attention, block, norm, presets, residual, stack
from lightning_app.blocks.attention import AttentionSpec, ShapingSpec
from lightning_app.blocks.block import InitSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import ABSENT, PRESETS
from lightning_app.blocks.presets.published import deepnorm_gains
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec, around, carry_scores
from tests import tiny

STACKS = {
    "encoder of two": Stack(depth=3, peer_depth=2),
    "decoder of two": Stack(depth=2, peer_depth=3, causal=True, cross=True),
    "encoder alone": Stack(depth=3),
    "decoder alone": Stack(depth=3, causal=True),
}
every_spec = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(preset(stack), id=f"{name}-{where}")
        for name, preset in PRESETS.items()
        for where, stack in STACKS.items()
    ],
)
UNIT = Gain()
ALONE = STACKS["encoder alone"]


def parts(value: Any) -> list[Any]:
    """Return `value` and every specification inside it."""
    if isinstance(value, tuple):
        return [part for entry in value for part in parts(entry)]
    if not is_dataclass(value):
        return []
    return [value, *[part for f in fields(value) for part in parts(getattr(value, f.name))]]


def rebuild(kind: Any, tree: Any) -> Any:
    """Return the specification of type `kind` that `asdict` and JSON made `tree` from."""
    if get_origin(kind) is tuple:
        return tuple(rebuild(get_args(kind)[0], entry) for entry in tree)
    if isinstance(kind, UnionType):
        return None if tree is None else rebuild(get_args(kind)[0], tree)
    if not isinstance(kind, type) or not is_dataclass(kind):
        return tree
    hints = get_type_hints(kind)
    return kind(**{name: rebuild(hints[name], entry) for name, entry in tree.items()})


def test_specifications_are_frozen() -> None:
    specs = [preset(stack) for preset in PRESETS.values() for stack in STACKS.values()]
    kinds = {type(part): part for spec in specs for part in parts(spec)}
    assert StackSpec in kinds
    for part in kinds.values():
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)


@every_spec
def test_specification_prints_as_what_builds_it(spec: StackSpec) -> None:
    modules = (attention, block, norm, presets, residual, stack)
    names = {name: value for module in modules for name, value in vars(module).items()}
    assert eval(repr(spec), names) == spec


@every_spec
def test_specification_survives_asdict_and_json(spec: StackSpec) -> None:
    again = rebuild(StackSpec, json.loads(json.dumps(asdict(spec))))
    assert again == spec
    assert hash(again) == hash(spec)


@pytest.mark.parametrize("stack", STACKS.values(), ids=list(STACKS))
def test_specifications_compare_by_value(stack: Stack) -> None:
    """Equal when made twice, and no two presets the same."""
    specs = [preset(stack) for preset in PRESETS.values()]
    assert specs == [preset(stack) for preset in PRESETS.values()]
    assert len(set(specs)) == len(PRESETS)
    assert all(len(spec.blocks) == stack.depth for spec in specs)


def test_presets_are_named_and_described() -> None:
    assert list(PRESETS) == [
        *("post_ln", "pre_ln", "peri_ln", "sandwich_ln", "normformer", "deepnorm", "b2t", "admin"),
        *("dual_stream", "rezero", "skipinit", "layer_scale", "t_fixup", "mix_ln"),
        *("layer_norm_scaling", "keel", "hybrid_norm", "qk_norm", "realformer", "parallel"),
        *("v_skipinit", "sas", "sas_p", "sas_p_no_norm", "siamese_norm", "hyper_connections"),
        *("mhc", "attention_residuals", "denseformer", "gated_attention", "resformer"),
        *("reordered_norm", "laurel", "inverse_sqrt_depth", "inverse_depth", "sub_ln", "prores"),
        *("gpas", "zero_output", "speedrun", "swin_v2", "ngpt", "differential"),
        "sigma_reparam",
    ]
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert all([preset.equation, preset.paper, preset.fixes])


# What the authors of the simplified blocks train and we do not, in each layer and in the first, by
# bobby-he/simplified_transformers: `trainable_mlp_block_gains`, `trainable_value_gains`.
SKIP = "around_ff.skip.gain"
VALUES = ["self_attention.value.departure.gain", "self_attention.value.kept.gain"]
UNTRAINED = {
    "v_skipinit": ([SKIP], []),
    "sas": ([SKIP], VALUES),
    "sas_p": ([], VALUES),
    "sas_p_no_norm": ([], VALUES),
}


def test_differences_from_the_authors_are_listed() -> None:
    assert {name for name, preset in PRESETS.items() if preset.differs} == UNTRAINED.keys()
    assert {name for name, preset in PRESETS.items() if preset.difference} == UNTRAINED.keys()


@pytest.mark.parametrize("name", UNTRAINED)
@pytest.mark.parametrize("depth", [1, 3])
def test_the_axes_named_train_what_the_authors_train(name: str, depth: int) -> None:
    """The same parameters and values except for those gains, which start at 1 like the authors'."""
    axes = yaml.safe_load(PRESETS[name].difference.partition("here with ")[2])["model.block"]
    sizes = {"encoder_depth": depth, "decoder_depth": 2}
    ours = tiny.translator(name, **sizes).state_dict()
    theirs = tiny.translator(rebuild(BlockConfig, {"preset": name, **axes}), **sizes).state_dict()
    every, first = UNTRAINED[name]
    expected = {
        f"{side}.blocks.{layer}.{gain}"
        for side, layers in (("encoder", depth), ("decoder", 2))
        for layer in range(layers)
        for gain in (*every, *(first if layer == 0 else ()))
    }
    assert theirs.keys() - ours.keys() == expected
    assert ours.keys() <= theirs.keys()
    assert all(float(theirs[gain]) == 1.0 for gain in expected)


# Columns: norm before the branch, on its output, after the sum; skip; branch; final norm.
ONE = Gain()
TABLE: dict[str, tuple[str, Gain, Gain, bool]] = {
    # The table of mechanisms.md, section 1, on an encoder of three layers alone.
    "post_ln": ("sum", ONE, ONE, False),
    "pre_ln": ("input", ONE, ONE, True),
    "peri_ln": ("input branch", ONE, ONE, True),
    "sandwich_ln": ("input branch", ONE, ONE, True),
    "normformer": ("input branch", ONE, ONE, True),
    "deepnorm": ("sum", Gain(value=6**0.25), ONE, False),
    "b2t": ("sum", ONE, ONE, False),
    "admin": ("sum", Gain(learned=True, vector=True, profiled=True), ONE, False),
    "dual_stream": ("sum", ONE, ONE, True),
    "siamese_norm": ("input sum", ONE, ONE, True),
    "hyper_connections": ("input", ONE, ONE, True),
    "mhc": ("input", ONE, ONE, True),
    "gated_attention": ("input", ONE, ONE, True),
    "resformer": ("input", ONE, ONE, True),
    "attention_residuals": ("input", ONE, ONE, True),
    "reordered_norm": ("branch", ONE, ONE, True),
    "laurel": ("input", Gain(learned=True), Gain(learned=True), True),
    "inverse_sqrt_depth": ("input", ONE, Gain(value=3**-0.5), True),
    "inverse_depth": ("input", ONE, Gain(value=1 / 3), True),
    "sub_ln": ("input", ONE, ONE, True),
    "prores": ("input", ONE, Gain(ramp=100 / 3), True),
    "gpas": ("input", ONE, ONE, True),
    "zero_output": ("input", ONE, ONE, True),
    "speedrun": ("input", ONE, ONE, True),
    "swin_v2": ("branch", ONE, ONE, True),
    "ngpt": ("branch sum", ONE, ONE, False),
    "differential": ("input", ONE, ONE, True),
    "sigma_reparam": ("sum", ONE, ONE, False),
    "denseformer": ("input", ONE, ONE, True),
    "rezero": ("", ONE, Gain(value=0.0, learned=True), False),
    "skipinit": ("", ONE, Gain(value=0.0, learned=True), False),
    "layer_scale": ("input", ONE, Gain(value=0.1, learned=True, vector=True), True),
    "t_fixup": ("", ONE, ONE, False),
    "mix_ln": ("sum", ONE, ONE, True),
    "layer_norm_scaling": ("input", ONE, ONE, True),
    "keel": ("input sum", Gain(value=6.0), ONE, False),
    "hybrid_norm": ("sum", ONE, ONE, True),
    "qk_norm": ("input", ONE, ONE, True),
    "realformer": ("sum", ONE, ONE, False),
    "parallel": ("input", ABSENT, ONE, True),
    "v_skipinit": ("input", ABSENT, Gain(learned=True), True),
    "sas": ("input", ABSENT, Gain(learned=True), True),
    "sas_p": ("input", ABSENT, Gain(learned=True), True),
    "sas_p_no_norm": ("input", ABSENT, Gain(learned=True), True),
}


@pytest.mark.parametrize("name", PRESETS)
def test_first_self_attention_is_as_the_table_says(name: str) -> None:
    places, skip, branch, final_norm = TABLE[name]
    spec = PRESETS[name](ALONE)
    around_self = spec.blocks[0].around_self
    others = {"reordered_norm": "rms_norm", "speedrun": "rms_norm_plain", "ngpt": "l2"}
    kinds = others.get(name, "layer_norm")
    norms = {place: getattr(around_self, f"norm_{place}") for place in ("input", "branch", "sum")}
    assert " ".join(place for place, kind in norms.items() if kind == kinds) == places
    assert {kind for place, kind in norms.items() if place not in places.split()} <= {"none"}
    assert (around_self.skip, around_self.branch) == (skip, branch)
    assert spec.final_norm == (kinds if final_norm else "none")


@pytest.mark.parametrize("where", STACKS)
def test_sub_layers_are_treated_alike_where_the_paper_does(where: str) -> None:
    alike = {name for name in PRESETS if _one_rule(PRESETS[name](STACKS[where]))}
    unlike = {"normformer", "hybrid_norm", "parallel", *UNTRAINED}
    assert alike == set(PRESETS) - unlike


def _one_rule(spec: StackSpec) -> bool:
    return all(b.around_self == b.around_cross == b.around_ff for b in spec.blocks)


def test_which_presets_have_a_norm_before_the_first_layer() -> None:
    for where in STACKS.values():
        with_norm = {name for name in PRESETS if PRESETS[name](where).input_norm != "none"}
        assert with_norm == {"peri_ln", "speedrun", "ngpt"}
    assert replace(PRESETS["peri_ln"](ALONE), input_norm="none") == PRESETS["sandwich_ln"](ALONE)


@pytest.mark.parametrize(
    ("where", "alpha", "beta"),
    [
        # mechanisms.md 2.4, N = M = 6 and twelve layers alone, worked by hand.
        (Stack(depth=6, peer_depth=6), 1.418, 0.497),
        (Stack(depth=6, peer_depth=6, causal=True, cross=True), 2.060, 0.343),
        (Stack(depth=12), 2.213, 0.319),
        # 0.81 (12^4 6)^(1/16), 0.87 (12^4 6)^(-1/16); the peer's depth enters.
        (Stack(depth=12, peer_depth=6), 1.686, 0.418),
        (Stack(depth=18, peer_depth=6, causal=True, cross=True), 2.711, 0.261),
        (Stack(depth=18, peer_depth=18, causal=True, cross=True), 2.711, 0.261),
    ],
)
def test_deepnorm_has_the_constants_of_its_paper(where: Stack, alpha: float, beta: float) -> None:
    assert deepnorm_gains(where) == pytest.approx((alpha, beta), abs=6e-4)
    for b in PRESETS["deepnorm"](where).blocks:
        assert b.around_self == b.around_cross == b.around_ff
        assert b.around_ff.skip.value == pytest.approx(alpha, abs=6e-4)
        init = b.init
        assert init.distribution == "normal"
        assert (init.value, init.output, init.ff) == pytest.approx((beta,) * 3, abs=6e-4)
        assert init.query_key == 1.0


def test_deepnorm_is_not_torchscales() -> None:
    """Which has 1.15 / root in the encoder of two stacks, 1.32 times the paper's beta."""
    _, beta = deepnorm_gains(Stack(depth=6, peer_depth=6))
    assert beta * (6**4 * 6) ** (1 / 16) == pytest.approx(0.87)


@pytest.mark.parametrize("depth", [3, 12])
def test_b2t_scales_every_matrix_by_the_depth_of_its_stack(depth: int) -> None:
    plain = InitSpec()
    for b in PRESETS["b2t"](replace(ALONE, depth=depth)).blocks:
        assert b.bottom_to_top
        for part in ("query_key", "value", "output", "ff"):
            assert getattr(b.init, part) == pytest.approx(getattr(plain, part) * depth**-0.5)


@pytest.mark.parametrize(
    ("where", "scale", "embedding"),
    [
        ("encoder of two", 0.67 * 3**-0.25, 27**-0.25),
        ("decoder of two", 18**-0.25, 27**-0.25),
        ("encoder alone", 0.67 * 3**-0.25, 27**-0.25),
    ],
)
def test_t_fixup_scales_by_the_depth_of_its_own_stack_but_embeddings_by_the_encoders(
    where: str, scale: float, embedding: float
) -> None:
    spec = PRESETS["t_fixup"](STACKS[where])
    assert spec.embedding_gain == pytest.approx(embedding)
    for b in spec.blocks:
        assert (b.init.value, b.init.output, b.init.ff) == pytest.approx((scale,) * 3)
        assert b.init.query_key == 2**-0.5
        assert b.init.distribution == "uniform"


def test_initial_matrices_are_special_in_seven_presets_alone() -> None:
    """And the embedding in T-Fixup alone: both stacks of a model share it."""
    for where in STACKS.values():
        specs = {name: preset(where) for name, preset in PRESETS.items()}
        special = {n for n, s in specs.items() if {b.init for b in s.blocks} != {InitSpec()}}
        small = {"deepnorm", "b2t", "t_fixup", "zero_output", "speedrun", "swin_v2"}
        assert special == {*small, "sub_ln"}
        assert {n for n, s in specs.items() if s.embedding_gain != 1.0} == {"t_fixup"}


@pytest.mark.parametrize(
    ("depth", "start"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)]
)
def test_layer_scale_starts_smaller_in_deeper_stacks(depth: int, start: float) -> None:
    for b in PRESETS["layer_scale"](replace(ALONE, depth=depth)).blocks:
        assert b.around_ff.branch == Gain(value=start, learned=True, vector=True)


@pytest.mark.parametrize(
    ("depth", "first"),
    [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 2), (12, 3), (18, 4), (24, 6)],
)
def test_mix_ln_is_post_ln_in_the_first_quarter(depth: int, first: int) -> None:
    """Rounded down, as the authors have 3 of 12 and 6 of 24, and at least one layer."""
    post = PRESETS["post_ln"](ALONE).blocks[0]
    pre = PRESETS["pre_ln"](ALONE).blocks[0]
    for peer_depth in (0, 12):  # each stack goes by its own depth
        spec = PRESETS["mix_ln"](replace(ALONE, depth=depth, peer_depth=peer_depth))
        assert spec.blocks == (post,) * first + (pre,) * (depth - first)


def test_layer_norm_scaling_divides_by_the_root_of_the_layer() -> None:
    blocks = PRESETS["layer_norm_scaling"](replace(ALONE, depth=9)).blocks
    scales = [b.around_ff.input_scale for b in blocks]
    assert scales == pytest.approx([1 / math.sqrt(n) for n in range(1, 10)])


@pytest.mark.parametrize("where", ["encoder of two", "decoder of two"])
def test_keel_counts_the_sub_layers_of_its_stack(where: str) -> None:
    """Two a layer of three in the encoder, three a layer of two in the decoder."""
    for b in PRESETS["keel"](STACKS[where]).blocks:
        assert b.around_cross.skip == Gain(value=6.0)


def test_rezero_shares_the_gain_that_skipinit_has_once_a_sub_layer() -> None:
    for where in STACKS.values():
        for ours, theirs in zip(
            PRESETS["rezero"](where).blocks, PRESETS["skipinit"](where).blocks, strict=True
        ):
            assert ours.share_branch_gain
            assert replace(ours, share_branch_gain=False) == theirs


def test_hybrid_norm_has_one_norm_between_attention_and_feed_forward() -> None:
    """It is on the sum of the last attention, so that the feed-forward's skip comes after it."""
    for where in STACKS.values():
        last = "around_cross" if where.cross else "around_self"
        for b in PRESETS["hybrid_norm"](where).blocks:
            for name in ("around_self", "around_cross", "around_ff"):
                norm_sum = "layer_norm" if name == last else "none"
                assert getattr(b, name) == ResidualSpec(norm_sum=norm_sum)
            normed = AttentionSpec(qk_norm="layer_norm", value_norm="layer_norm")
            assert b.self_attention == b.cross_attention == normed


def test_attention_of_normformer_and_qk_norm() -> None:
    for where in STACKS.values():
        for b in PRESETS["normformer"](where).blocks:
            assert b.self_attention == b.cross_attention == AttentionSpec(head_gain=True)
            assert (b.ff_norm, b.around_ff.norm_branch) == ("layer_norm", "none")
        for b in PRESETS["qk_norm"](where).blocks:
            assert b.self_attention == b.cross_attention == AttentionSpec(qk_norm="layer_norm")


@pytest.mark.parametrize(
    ("where", "divisors"),
    [
        ("encoder of two", [1.0, 2.0, 3.0]),
        ("decoder of two", [1.0, 2.0]),
        ("encoder alone", [1.0, 1.0, 1.0]),
    ],
)
def test_realformer_is_a_mean_in_two_stacks_a_sum_in_one(where: str, divisors: list[float]) -> None:
    blocks = PRESETS["realformer"](STACKS[where]).blocks
    assert [b.self_attention.score_divisor for b in blocks] == divisors
    assert [b.cross_attention.score_divisor for b in blocks] == divisors
    assert {a.carry for b in blocks for a in (b.self_attention, b.cross_attention)} == {"scores"}


@pytest.mark.parametrize("name", UNTRAINED)
@pytest.mark.parametrize(("depth", "gain"), [(18, 0.1), (72, 0.05), (2, 0.3)])
def test_simplified_gains_are_the_authors_at_depth_18(name: str, depth: int, gain: float) -> None:
    for b in PRESETS[name](replace(ALONE, depth=depth)).blocks:
        assert b.around_ff.branch.value == pytest.approx(gain, rel=1e-14)
        assert b.around_ff.branch.learned
        assert b.around_self.branch == Gain(value=1.0, learned=True)
        assert b.around_self.skip.absent
        assert b.around_ff.skip.absent == (name in ("sas_p", "sas_p_no_norm"))


@pytest.mark.parametrize("name", ["sas", "sas_p", "sas_p_no_norm"])
def test_simplified_attention_has_values_in_the_first_layer_alone(name: str) -> None:
    first, *rest = (b.self_attention for b in PRESETS[name](ALONE).blocks)
    assert (first.value, first.output) == ("identity_plus", "identity")
    assert {(a.value, a.output) for a in rest} == {("identity", "identity")}
    assert {a.query_init for a in (first, *rest)} == {"zeros"}
    assert {a.shaping for a in (first, *rest)} == {ShapingSpec()}


def test_v_skipinit_has_free_orthogonal_matrices_and_no_centre() -> None:
    for b in PRESETS["v_skipinit"](ALONE).blocks:
        shaping = ShapingSpec(alpha=1.0, beta=0.0, gamma=None)
        free = AttentionSpec(shaping=shaping, value="orthogonal", output="orthogonal")
        assert b.self_attention == free


@pytest.mark.parametrize("name", UNTRAINED)
def test_simplified_presets_keep_ordinary_cross_attention(name: str) -> None:
    for b in PRESETS[name](STACKS["decoder of two"]).blocks:
        assert b.cross_attention == AttentionSpec()
        assert b.around_cross == ResidualSpec(norm_input="layer_norm")


def test_no_norm_keeps_the_norm_of_the_first_layer() -> None:
    first, *rest = PRESETS["sas_p_no_norm"](ALONE).blocks
    assert not first.around_self.unnormalized
    assert all(b.around_self.unnormalized and b.around_ff.unnormalized for b in rest)


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        ({"depth": 0, "causal": False}, "encoder_depth 0"),
        ({"depth": 0, "causal": True}, "decoder_depth 0"),
        ({"depth": 2, "causal": True, "cross": True}, "peer_depth 0"),
    ],
)
def test_a_stack_without_blocks_or_one_to_read_is_refused(stack: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Stack(**stack)


def bare(depth: int, skip: Gain = UNIT, branch: Gain = UNIT) -> StackSpec:
    return StackSpec(blocks=(around(ResidualSpec(skip=skip, branch=branch)),) * depth)


@pytest.mark.parametrize(
    "residual",
    [
        {},
        {"branch": Gain(value=0.51)},
        {"skip": Gain(value=0.9), "branch": Gain(value=0.5)},
        {"branch": Gain(value=-1.0)},
        {"skip": Gain(value=2.0), "branch": Gain(value=0.0)},
        {"skip": Gain(value=-1.2), "branch": Gain(value=0.0)},
    ],
)
def test_stream_that_explodes_without_norm_is_refused(residual: dict[str, Gain]) -> None:
    with pytest.raises(ValueError, match="norm_placement none"):
        bare(4, **residual)


@pytest.mark.parametrize(
    "residual",
    [
        {"branch": Gain(value=0.5)},  # SkipInit's 1 / sqrt(depth)
        {"branch": Gain(value=0.0, learned=True)},  # ReZero
        {"skip": Gain(value=1.1), "branch": Gain(value=0.1)},
        {"skip": Gain(value=0.5), "branch": Gain(value=0.25)},
    ],
)
def test_stream_that_stays_bounded_without_norm_is_allowed(residual: dict[str, Gain]) -> None:
    assert len(bare(4, **residual).blocks) == 4


def test_parallel_stream_counts_both_branches() -> None:
    """Both join one skip: a small feed-forward does not make up for a full attention."""
    quiet = ResidualSpec(branch=Gain(value=0.2))
    loud = ResidualSpec(skip=ABSENT)
    b = replace(around(quiet), around_self=loud, layout="parallel")
    with pytest.raises(ValueError, match="norm_placement none"):
        StackSpec(blocks=(b,) * 4)
    b = replace(b, around_self=replace(quiet, skip=ABSENT))
    assert len(StackSpec(blocks=(b,) * 4).blocks) == 4


@pytest.mark.parametrize("kind", ["sum", "mean", "qk_sum"])
def test_carrying_can_be_taken_away_again(kind: Any) -> None:
    plain = PRESETS["post_ln"](ALONE)
    assert carry_scores(plain, kind) != plain
    assert carry_scores(carry_scores(plain, kind), "none") == plain


def test_a_bottom_to_top_skip_without_a_norm_is_refused() -> None:
    """It doubles the stream in every layer."""
    quiet = replace(around(ResidualSpec(branch=Gain(value=0.1))), bottom_to_top=True)
    with pytest.raises(ValueError, match="norm_placement none"):
        StackSpec(blocks=(quiet,) * 4)


def test_two_streams_are_not_for_one_sum() -> None:
    b = PRESETS["parallel"](ALONE).blocks[0]
    with pytest.raises(ValueError, match=r"stream dual .*layout parallel"):
        StackSpec(blocks=(b,), dual_stream=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_causal_stack_alone_has_the_constants_of_an_encoder_alone(preset: str) -> None:
    """It has the same two sub-layers; DeepNet's table has one row for both."""
    assert PRESETS[preset](STACKS["decoder alone"]) == PRESETS[preset](ALONE)


def test_constants_of_a_causal_stack_alone() -> None:
    """By hand: what would be wrong if cross-attention were counted where there is none."""
    stack = Stack(depth=12, causal=True)
    assert deepnorm_gains(stack) == pytest.approx((24**0.25, 96**-0.25))
    assert PRESETS["keel"](stack).blocks[0].around_ff.skip.value == 24.0
    fixup = PRESETS["t_fixup"](stack)
    assert fixup.embedding_gain == pytest.approx(108**-0.25)
    assert fixup.blocks[0].init.ff == pytest.approx(0.67 * 12**-0.25)
    assert PRESETS["hybrid_norm"](stack).blocks[0].around_self.norm_sum == "layer_norm"
    assert PRESETS["realformer"](stack).blocks[5].self_attention.score_divisor == 1.0
    assert [b.around_ff.norm_sum for b in PRESETS["mix_ln"](stack).blocks].count("layer_norm") == 3
