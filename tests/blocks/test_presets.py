"""What each preset says, as a value."""

import json
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml

from lightning_app.blocks import attention, block, norm, presets, residual, stack
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.presets.published import deepnorm_gains
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec, around
from tests import tiny
from tests.noted import noted

STACKS = {
    "encoder of two": Stack(depth=3, peer_depth=2),
    "decoder of two": Stack(depth=2, peer_depth=3, causal=True, cross=True),
    "encoder alone": Stack(depth=3),
    "decoder alone": Stack(depth=3, causal=True),
}
UNIT = Gain()
ALONE = STACKS["encoder alone"]


def parts(value: Any) -> list[Any]:
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


def test_specifications_survive_print_and_json() -> None:
    """What a specification prints as builds it, and so does what `asdict` and JSON made of it."""
    modules = (attention, block, norm, presets, residual, stack)
    names = {name: value for module in modules for name, value in vars(module).items()}
    for name, preset in PRESETS.items():
        for where, place in STACKS.items():
            with noted(name, where):
                spec = preset(place)
                assert eval(repr(spec), names) == spec
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


def test_presets_are_named_and_described_and_differences_from_the_authors_listed() -> None:
    """Their order is that of the golden losses."""
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert all([preset.equation, preset.paper, preset.fixes])
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


@pytest.mark.parametrize("where", ["encoder of two", "decoder of two"])
def test_keel_counts_the_sub_layers_of_its_stack(where: str) -> None:
    """Two a layer of three in the encoder, three a layer of two in the decoder."""
    for b in PRESETS["keel"](STACKS[where]).blocks:
        assert b.around_cross.skip == Gain(value=6.0)


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


@pytest.mark.parametrize(
    ("skip", "branch", "bounded"),
    [
        *((UNIT, UNIT, False), (UNIT, Gain(value=0.51), False), (UNIT, Gain(value=-1.0), False)),
        (Gain(value=0.9), Gain(value=0.5), False),
        *((Gain(value=skip), Gain(value=0.0), False) for skip in (2.0, -1.2)),
        (UNIT, Gain(value=0.5), True),  # SkipInit's 1 / sqrt(depth)
        (UNIT, Gain(value=0.0, learned=True), True),  # ReZero
        *((Gain(value=1.1), Gain(value=0.1), True), (Gain(value=0.5), Gain(value=0.25), True)),
    ],
)
def test_a_stream_without_norm_that_explodes_is_refused(skip, branch, bounded: bool) -> None:
    blocks = (around(ResidualSpec(skip=skip, branch=branch)),) * 4
    with nullcontext() if bounded else pytest.raises(ValueError, match="norm_placement none"):
        StackSpec(blocks=blocks)


def test_a_bottom_to_top_skip_without_a_norm_is_refused() -> None:
    """It doubles the stream in every layer."""
    quiet = replace(around(ResidualSpec(branch=Gain(value=0.1))), bottom_to_top=True)
    with pytest.raises(ValueError, match="norm_placement none"):
        StackSpec(blocks=(quiet,) * 4)


def test_a_causal_stack_alone_has_the_constants_of_an_encoder_alone() -> None:
    """It has the same two sub-layers; DeepNet's table has one row for both."""
    for name, preset in PRESETS.items():
        assert preset(STACKS["decoder alone"]) == preset(ALONE), name
    # By hand: what would be wrong if cross-attention were counted where there is none.
    stack = Stack(depth=12, causal=True)
    assert deepnorm_gains(stack) == pytest.approx((24**0.25, 96**-0.25))
    assert PRESETS["keel"](stack).blocks[0].around_ff.skip.value == 24.0
    fixup = PRESETS["t_fixup"](stack)
    assert fixup.embedding_gain == pytest.approx(108**-0.25)
    assert fixup.blocks[0].init.ff == pytest.approx(0.67 * 12**-0.25)
    assert PRESETS["hybrid_norm"](stack).blocks[0].around_self.norm_sum == "layer_norm"
    assert PRESETS["realformer"](stack).blocks[5].self_attention.score_divisor == 1.0
    assert [b.around_ff.norm_sum for b in PRESETS["mix_ln"](stack).blocks].count("layer_norm") == 3
