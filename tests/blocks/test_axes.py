"""A preset and the axes on top of it: what resolves runs, what does not is refused by name."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from lightning_app.blocks.attention import ShapingSpec
from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.presets import PRESETS, Stack
from lightning_app.blocks.residual import Gain
from tests import tiny

GAINS = {
    "1": Gain(),
    "0": Gain(value=0.0),
    "learned from 0": Gain(value=0.0, learned=True),
    "learned from 0.5": Gain(value=0.5, learned=True),
}
PROJECTIONS = {name: name for name in ("full", "identity_plus", "identity")}
AXES: dict[str, dict[str, Any]] = {
    "norm_placement": {name: name for name in ("post", "pre", "none")},
    "norm": {name: name for name in ("layer_norm", "rms_norm")},
    "residual_attention": {name: name for name in ("none", "sum", "mean")},
    "shaped_attention": {
        "default": ShapingSpec(),
        "fixed": ShapingSpec(alpha=0.5, beta=2.0, gamma=0.3, learned=False, per_head=False),
        "no centre": ShapingSpec(gamma=0.0),
        "no identity": ShapingSpec(alpha=0.0),
    },
    "value_projection": PROJECTIONS,
    "output_projection": PROJECTIONS,
    "layout": {name: name for name in ("sequential", "parallel")},
    "attention_skip": GAINS,
    "ff_skip": GAINS,
    "attention_branch": GAINS,
    "ff_branch": GAINS,
}
SIMPLIFIED = {"sas", "sas_p", "sas_p_no_norm"}
PARALLEL = {"parallel", "sas_p", "sas_p_no_norm"}
REFUSED: dict[tuple[str, str], set[str]] = {
    ("norm_placement", "post"): PARALLEL,
    ("norm_placement", "none"): {"post_ln", "pre_ln", "realformer", "parallel"},
    ("shaped_attention", "no identity"): SIMPLIFIED,
    ("layout", "parallel"): {"post_ln", "realformer"},
    ("attention_skip", "0"): {"post_ln", "pre_ln", "realformer"},
    ("attention_skip", "1"): PARALLEL,
    ("attention_skip", "learned from 0"): PARALLEL,
    ("attention_skip", "learned from 0.5"): PARALLEL,
    ("ff_skip", "0"): {"parallel"},
    # Without norms the identity part of the map doubles a stream that also has a skip.
    ("ff_skip", "1"): {"sas_p_no_norm"},
    ("ff_skip", "learned from 0.5"): {"sas_p_no_norm"},
}
CASES = [
    pytest.param(preset, axis, value, id=f"{preset}-{axis}-{value}")
    for preset in PRESETS
    for axis, values in AXES.items()
    for value in values
]
STACKS = [
    Stack(side="encoder", depth=3, peer_depth=2),
    Stack(side="decoder", depth=2, peer_depth=3),
    Stack(side="encoder", depth=3),
]
two_stacks = pytest.mark.parametrize("stack", STACKS[:2], ids=lambda stack: stack.side)
every_stack = pytest.mark.parametrize("stack", STACKS, ids=["encoder", "decoder", "alone"])


def test_every_axis_is_tried() -> None:
    assert {"preset", *AXES} == {field.name for field in fields(BlockConfig)}


@pytest.mark.parametrize("kind", ["encoder_decoder", "encoder"])
@pytest.mark.parametrize(("preset", "axis", "value"), CASES)
def test_axis_on_preset_runs_or_is_refused(preset: str, axis: str, value: str, kind: str) -> None:
    block = BlockConfig(preset=preset, **{axis: AXES[axis][value]})
    architecture = tiny.architecture(kind=kind, dropout=0.1, attention_dropout=0.1)
    if preset in REFUSED.get((axis, value), set()):
        with pytest.raises(ValueError, match=axis):
            architecture.stacks(block)
        return
    if kind == "encoder":
        model = tiny.masked_model(block, dropout=0.1, attention_dropout=0.1)
        logits = model(tiny.words(3, 7), torch.tensor([0, 5, 20]))
    else:
        model = tiny.translator(block, dropout=0.1, attention_dropout=0.1)
        source, target = tiny.sentences()
        logits = model(source, target)[target != tiny.PAD]
    torch.nn.functional.cross_entropy(logits, tiny.words(len(logits))).backward()
    assert bool(logits.isfinite().all())
    for parameter in model.parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all())


def resolve(stack: Stack, preset: str, **axes: Any):
    return BlockConfig(preset=preset, **axes).resolve(stack)


@every_stack
@pytest.mark.parametrize("preset", PRESETS)
def test_no_axis_is_the_preset(stack: Stack, preset: str) -> None:
    assert resolve(stack, preset) == PRESETS[preset](stack)


@every_stack
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"preset": "post_ln", "norm_placement": "pre"}, "pre_ln"),
        ({"preset": "pre_ln", "norm_placement": "post"}, "post_ln"),
        ({"preset": "realformer", "residual_attention": "none"}, "post_ln"),
        ({"preset": "pre_ln", "layout": "parallel"}, "parallel"),
        ({"preset": "parallel", "layout": "sequential"}, "pre_ln"),
        ({"preset": "sas", "layout": "parallel", "ff_skip": Gain(value=0.0)}, "sas_p"),
        ({"preset": "sas_p", "layout": "sequential", "ff_skip": Gain()}, "sas"),
        ({"preset": "sas_p_no_norm", "norm_placement": "pre"}, "sas_p"),
    ],
)
def test_axes_lead_from_one_preset_to_another(
    stack: Stack, ours: dict[str, Any], theirs: str
) -> None:
    assert resolve(stack, **ours) == PRESETS[theirs](stack)


@two_stacks
def test_running_mean_on_post_ln_is_realformer_in_two_stacks(stack: Stack) -> None:
    assert resolve(stack, "post_ln", residual_attention="mean") == PRESETS["realformer"](stack)


def test_running_sum_on_post_ln_is_realformer_in_an_encoder_alone() -> None:
    alone = STACKS[2]
    assert resolve(alone, "post_ln", residual_attention="sum") == PRESETS["realformer"](alone)


@every_stack
@pytest.mark.parametrize("preset", ["post_ln", "pre_ln"])
def test_rms_norm_stands_wherever_layer_norm_stood(stack: Stack, preset: str) -> None:
    ours = resolve(stack, preset, norm="rms_norm")
    assert repr(ours) == repr(PRESETS[preset](stack)).replace("layer_norm", "rms_norm")


def test_norm_and_placement_go_together() -> None:
    stack = STACKS[1]
    both = resolve(stack, "post_ln", norm="rms_norm", norm_placement="pre")
    assert both == resolve(stack, "pre_ln", norm="rms_norm")
    assert both.final_norm == "rms_norm"


@pytest.mark.parametrize(("gamma", "query_init"), [(1.0, "zeros"), (0.0, "xavier")])
def test_queries_start_at_zero_where_a_centre_is_taken_off(gamma: float, query_init: str) -> None:
    spec = resolve(STACKS[0], "pre_ln", shaped_attention=ShapingSpec(gamma=gamma))
    assert {b.self_attention.query_init for b in spec.blocks} == {query_init}
    assert {b.cross_attention.query_init for b in spec.blocks} == {"xavier"}


@pytest.mark.parametrize("preset", PRESETS)
def test_axes_of_self_attention_leave_cross_attention_alone(preset: str) -> None:
    stack = STACKS[1]
    spec = resolve(
        stack,
        preset,
        shaped_attention=ShapingSpec(),
        value_projection="identity",
        output_projection="identity_plus",
        attention_branch=Gain(value=0.5),
    )
    for ours, before in zip(spec.blocks, PRESETS[preset](stack).blocks, strict=True):
        assert ours.cross_attention == before.cross_attention
        assert ours.around_cross == before.around_cross


@pytest.mark.parametrize(("axis", "part"), [("attention", "around_self"), ("ff", "around_ff")])
def test_gains_go_where_they_are_named(axis: str, part: str) -> None:
    gains = {f"{axis}_skip": Gain(value=0.25), f"{axis}_branch": Gain(value=0.75, learned=True)}
    stack = STACKS[1]
    for ours, before in zip(
        resolve(stack, "pre_ln", **gains).blocks, PRESETS["pre_ln"](stack).blocks, strict=True
    ):
        for name in ("around_self", "around_cross", "around_ff"):
            residual = getattr(ours, name)
            if name == part:
                assert [residual.skip, residual.branch] == list(gains.values())
            else:
                assert residual == getattr(before, name)


def test_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="preset 'post_nl' is not one of post_ln, pre_ln"):
        BlockConfig(preset="post_nl").resolve(STACKS[0])


@every_stack
def test_skipinit_and_rezero_need_no_norm(stack: Stack) -> None:
    for gain in (Gain(value=stack.depth**-0.5), Gain(value=0.0, learned=True)):
        spec = resolve(
            stack, "pre_ln", norm_placement="none", attention_branch=gain, ff_branch=gain
        )
        assert all(b.around_self.unnormalized and b.around_ff.unnormalized for b in spec.blocks)
        assert spec.final_norm == "none"


@every_stack
def test_small_feed_forward_does_not_make_a_bare_parallel_stream_safe(stack: Stack) -> None:
    small = Gain(value=stack.depth**-0.5)
    with pytest.raises(ValueError, match="norm_placement none"):
        resolve(stack, "parallel", norm_placement="none", ff_branch=small)


@pytest.mark.parametrize(
    ("config", "worse"),
    [
        (BlockConfig(preset="pre_ln", value_projection="identity"), True),
        (BlockConfig(preset="parallel", output_projection="identity"), True),
        (BlockConfig(preset="sas", attention_skip=Gain()), True),
        (BlockConfig(preset="sas"), False),
        (BlockConfig(preset="sas_p"), False),
        (BlockConfig(preset="pre_ln"), False),
    ],
)
def test_identity_projections_beside_a_skip_are_known(config: BlockConfig, worse: bool) -> None:
    blocks = config.resolve(Stack(side="encoder", depth=3)).blocks
    assert blocks[-1].keeps_skip_of_identity == worse
