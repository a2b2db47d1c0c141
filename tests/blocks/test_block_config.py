"""A preset and the axes on top of it: what resolves runs, what does not is refused by name."""

from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from lightning_app.blocks.attention import (
    ATTENTIONS,
    OUTPUT_GATES,
    VALUE_CARRIES,
    ProjectionGains,
    ShapingSpec,
)
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import padding_mask
from lightning_app.blocks.memory import MemorySpec
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.blocks.stack import BranchRamp, Stack, StackSpec
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.blocks.streams import STREAM_RULES
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.models.heads import EncoderDecoder
from lightning_app.models.initialization import initialize
from lightning_app.models.positions import EmbeddingSpec
from lightning_app.models.stack import BlockStack
from tests import tiny
from tests.noted import noted

pytestmark = pytest.mark.xdist_group("axes")  # what they share is made once

GAINS = {
    "1": Gain(),
    "0": Gain(value=0.0),
    "learned from 0": Gain(value=0.0, learned=True),
    "learned from 0.5": Gain(value=0.5, learned=True),
    "a vector": Gain(value=0.5, learned=True, vector=True),
}
PROJECTIONS = {n: n for n in ("full", "identity", "identity_plus", "orthogonal", "orthogonal_plus")}
PROJECTION_GAINS = {
    "fixed": ProjectionGains(kept=Gain(value=0.9), change=Gain(value=0.2)),
    "learned": ProjectionGains(change=Gain(value=0.2, learned=True)),
}
FLAG = {"yes": True, "no": False}
AXES: dict[str, dict[str, Any]] = {
    "norm_placement": {name: name for name in ("post", "pre", "peri", "none")},
    "norm": {n: n for n in ("layer_norm", "rms_norm", "rms_norm_plain", "dyt", "derf", "l2")},
    "residual_attention": {name: name for name in ("none", "sum", "mean", "qk_sum")},
    "residual_rule": {name: name for name in ("sum", "gpas", "lerp")},
    "residual_temperature": {"2.5": 2.5},
    "query_key_noise": {"0.5": 0.5},
    "qk_norm": {name: name for name in ("none", "layer_norm", "rms_norm", "l2")},
    "shaped_attention": {
        "default": ShapingSpec(),
        "fixed": ShapingSpec(alpha=0.5, beta=2.0, gamma=0.3, learned=False, per_head=False),
        "centre of 0": ShapingSpec(gamma=0.0),
        "no centre": ShapingSpec(gamma=None),
        "no identity": ShapingSpec(alpha=0.0),
    },
    "value_projection": PROJECTIONS,
    "output_projection": PROJECTIONS,
    "first_value_projection": PROJECTIONS,
    "last_output_projection": PROJECTIONS,
    "value_gains": PROJECTION_GAINS,
    "output_gains": PROJECTION_GAINS,
    "tied_projections": FLAG,
    "layout": {name: name for name in ("sequential", "parallel")},
    "attention_skip": GAINS,
    "ff_skip": GAINS,
    "attention_branch": GAINS,
    "ff_branch": GAINS,
    "branch_ramp": {"to 3": BranchRamp(steps=3)},
    "localised_span": {"2 + 3": LocalisedSpan(query_block=2, memory=3)},
    "adaptive_span": {
        "to 5": AdaptiveSpan(longest=5, ramp=2.0, start=0.3),
        "dynamic": AdaptiveSpan(longest=5, ramp=2.0, dynamic_bias=-1.0),
    },
    "zero_output": FLAG,
    "unit_matrices": FLAG,
    "sigma_reparam": FLAG,
    "stochastic_depth": {"0.3": 0.3},
    "differential": FLAG,
    "share_branch_gain": FLAG,
    "share": {name: name for name in ("none", "all")},
    "step_signal": {name: name for name in ("none", "sinusoidal", "learned")},
    "halting": {"default": HaltingSpec()},
    "output_gate": {name: name for name in OUTPUT_GATES},
    "value_carry": {name: name for name in VALUE_CARRIES},
    "attention": {name: name for name in ATTENTIONS},
    "scores": {name: name for name in ("dot", "cosine", "cosine_features")},
    "score_cap": {"0.5": 0.5},
    "sink": {name: name for name in ("none", "zero", "learned")},
    "stream": {name: name for name in STREAM_RULES},
    "streams": {"2": 2},
    "memory": {"of 3": MemorySpec(length=3), "none": MemorySpec()},
}
STREAMS = {"siamese_norm", "hyper_connections", "mhc", "attention_residuals", "denseformer"}
STREAMS |= {"speedrun"}
# Their stream replaces the sum, and so takes neither a gain of the skip nor a norm of the sum.
NO_SUM = {"hyper_connections", "mhc", "attention_residuals"}
SIMPLIFIED = {"sas", "sas_p", "sas_p_no_norm"}
SKIPLESS = {*SIMPLIFIED, "v_skipinit"}
PARALLEL = {"parallel", "sas_p", "sas_p_no_norm"}
# A norm after the sum, or a lower skip: neither has a place where two branches join one sum.
SUMS_IN_TURN = {
    *("post_ln", "realformer", "deepnorm", "admin", "dual_stream", "mix_ln", "keel", "b2t"),
    *("hybrid_norm", "sigma_reparam"),
    *STREAMS,
}
# Presets with a norm of the sum around each sub-layer, and those with gains of skips.
NORMED_SUMS = {"post_ln", "realformer", "deepnorm", "admin", "dual_stream", "keel", "b2t"}
NORMED_SUMS |= {"siamese_norm", "sigma_reparam"}
OWN_SKIPS = {"deepnorm", "keel", "admin", *SKIPLESS, *PARALLEL}
# Scores of cosines, and presets whose skips and branches have no other gains.
COSINE = {"swin_v2", "ngpt"}
LERP = {"ngpt"}
PAIRED, SPECTRAL = {"differential"}, {"sigma_reparam"}
# Without their norms, these have neither small branches nor small matrices, nor lack a skip; or
# they have small matrices and a skip over 1.
QK_NORMED = {"qk_norm", "hybrid_norm", "reordered_norm", "speedrun"}
UNSHAPED = QK_NORMED | COSINE | PAIRED | SPECTRAL
ZERO = {"zero_output", "speedrun"}
ZERO_BRANCHES = {*ZERO, "swin_v2"}
# A second zero, or keys that are norms of branches.
NO_ZERO = {*ZERO_BRANCHES, "attention_residuals"}
EXPLODE = {
    *("post_ln", "pre_ln", "peri_ln", "sandwich_ln", "normformer", "b2t", "admin", "dual_stream"),
    *("mix_ln", "layer_norm_scaling", "keel", "deepnorm", "qk_norm", "realformer", "parallel"),
    *("hybrid_norm", "gated_attention", "resformer", "reordered_norm", "laurel", "sub_ln"),
    *("prores", "gpas", "swin_v2", "ngpt", "differential", "sigma_reparam"),
    *STREAMS,
}
TRAINED = ("learned from 0", "learned from 0.5", "a vector")
REFUSED: dict[tuple[str, str], set[str]] = {
    ("norm_placement", "post"): PARALLEL | NO_SUM | {"gpas"} | LERP,
    ("residual_rule", "lerp"): set(PRESETS) - LERP,
    # A rule joins one skip with one branch, and a norm of the sum undoes what this one shrinks.
    ("residual_rule", "gpas"): NORMED_SUMS
    | LERP
    | {*PARALLEL, *SKIPLESS, *NO_SUM, "mix_ln", "hybrid_norm"},
    # A skip over 1 asks for a norm of the sum; the second stream is there beside a Post-LN one.
    ("norm_placement", "pre"): {"deepnorm", "b2t", "keel", "dual_stream", "siamese_norm", *LERP},
    ("norm_placement", "peri"): {"deepnorm", "b2t", "keel", "dual_stream", "siamese_norm"}
    | ZERO
    | LERP,
    ("norm_placement", "none"): EXPLODE - ZERO,
    ("residual_temperature", "2.5"): set(PRESETS) - {"realformer"},
    **{("qk_norm", kind): SIMPLIFIED | COSINE for kind in ("layer_norm", "rms_norm")},
    ("qk_norm", "l2"): set(PRESETS),
    # The norm of queries that start at zero has no direction.
    **{("shaped_attention", kind): UNSHAPED for kind in ("default", "fixed")},
    ("shaped_attention", "no identity"): SKIPLESS | UNSHAPED,
    # Rows of length 1.
    **{("shaped_attention", name): LERP | PAIRED for name in ("centre of 0", "no centre")},
    ("unit_matrices", "yes"): {*SKIPLESS, *ZERO, "deepnorm", "b2t", "t_fixup", "sub_ln", *SPECTRAL},
    # A matrix that starts at zero, or rows of length 1.
    ("sigma_reparam", "yes"): SIMPLIFIED | ZERO | LERP,
    ("stochastic_depth", "0.3"): SKIPLESS | LERP | {"attention_residuals"},
    # A head is the difference of two plain maps.
    ("differential", "yes"): SKIPLESS | {"realformer"},
    **{("residual_attention", kind): PAIRED for kind in ("sum", "mean", "qk_sum")},
    # Their centre would have to move with the spans.
    **{("adaptive_span", kind): SIMPLIFIED for kind in ("to 5", "dynamic")},
    ("tied_projections", "yes"): set(PRESETS) - {"v_skipinit"},
    **{("value_gains", kind): set(PRESETS) - SIMPLIFIED for kind in PROJECTION_GAINS},
    **{("output_gains", kind): set(PRESETS) for kind in PROJECTION_GAINS},
    ("layout", "parallel"): SUMS_IN_TURN | {"gpas"} | LERP,
    ("attention_skip", "0"): set(PRESETS) - SKIPLESS - {"parallel"},
    ("attention_skip", "1"): PARALLEL,
    **{("attention_skip", gain): PARALLEL | NO_SUM | LERP for gain in TRAINED},
    ("ff_skip", "0"): {"parallel", "b2t", "prores", "gpas", *ZERO_BRANCHES} | NO_SUM | LERP,
    # Only a fixed factor rises, and only beside a skip.
    ("branch_ramp", "to 3"): {*SKIPLESS, "rezero", "skipinit", "layer_scale", "laurel", "admin"}
    | LERP,
    # Without norms the identity part of the map doubles a stream that also has a skip.
    ("ff_skip", "1"): {"sas_p_no_norm"},
    ("ff_skip", "learned from 0"): NO_SUM | LERP,
    **{("ff_skip", gain): {"sas_p_no_norm"} | NO_SUM | LERP for gain in TRAINED[1:]},
    # One gain of all branches cannot start at two values. A factor that rises is not trained.
    **{
        (f"{part}_branch", gain): {"rezero"} | LERP | (NO_ZERO if gain == "0" else {"prores"})
        for part in ("attention", "ff")
        for gain in ("0", *TRAINED[1:])
    },
    **{
        (f"{part}_branch", "learned from 0"): NO_ZERO | LERP | {"prores"}
        for part in ("attention", "ff")
    },
    **{(f"{part}_branch", "1"): {"rezero", "skipinit"} for part in ("attention", "ff")},
    ("share_branch_gain", "yes"): set(PRESETS) - {"rezero", "skipinit", "layer_scale", "laurel"},
    # Layers that differ, and skips with a start for each layer.
    ("share", "all"): {*SIMPLIFIED, "resformer", "mix_ln", "layer_norm_scaling", "admin", *STREAMS}
    | {"prores", *PAIRED},
    # Both are of the steps of a shared block.
    **{("step_signal", kind): set(PRESETS) for kind in ("sinusoidal", "learned")},
    ("halting", "default"): set(PRESETS),
    # These stacks read no text segment by segment.
    ("memory", "of 3"): set(PRESETS),
    # They bound entries: no unit length of queries, no variance to divide.
    **{("norm", kind): {*QK_NORMED, "layer_norm_scaling", *COSINE} for kind in ("dyt", "derf")},
    # A norm or a second zero of the branch; outputs that are no matrix; norms of branches as keys.
    ("zero_output", "yes"): {
        *("peri_ln", "sandwich_ln", "normformer", "rezero", "skipinit", "v_skipinit"),
        *(*SIMPLIFIED, "attention_residuals", "reordered_norm", *COSINE, *SPECTRAL),
    },
    # Values that are the input itself.
    ("value_projection", "identity"): {"resformer", *LERP, *PAIRED},
    ("first_value_projection", "identity"): PAIRED | LERP,
    **{
        (f"{first}value_projection", kind): LERP
        | PAIRED
        | (SPECTRAL if kind.endswith("_plus") else set())
        for first in ("", "first_")
        for kind in PROJECTIONS
        if kind not in ("full", "identity")
    },
    # Its gain starts at zero.
    ("norm", "rms_norm_plain"): {"swin_v2"},
    # Directions of queries and keys have no size.
    ("norm", "l2"): {"swin_v2", *QK_NORMED},
    # A matrix follows the norm of the joined heads.
    **{
        (f"{last}output_projection", kind): ZERO
        | LERP
        | ({"sub_ln", *PAIRED} if kind == "identity" else set())
        | (SPECTRAL if kind.endswith("_plus") else set())
        for last in ("", "last_")
        for kind in PROJECTIONS
        if kind != "full"
    },
    **{("value_carry", kind): SIMPLIFIED for kind in ("half", "learned")},
    ("value_carry", "shared"): SKIPLESS,
    # Queries that start at zero, or have another norm.
    **{("scores", kind): QK_NORMED | SIMPLIFIED for kind in ("cosine", "cosine_features")},
    # A centre of another softmax, and carried scores.
    ("score_cap", "0.5"): {"realformer"} | SKIPLESS,
    **{("sink", kind): SKIPLESS for kind in ("zero", "learned")},
    ("stream", "dual"): set(PRESETS) - NORMED_SUMS,
    ("stream", "siamese"): set(PRESETS) - NORMED_SUMS | {"b2t", "admin"},
    ("stream", "average"): PARALLEL | {"b2t", "admin"} | LERP,
    ("stream", "embedding"): PARALLEL | {"b2t", "admin"} | LERP,
    **{
        ("stream", kind): NORMED_SUMS
        | OWN_SKIPS
        | {"mix_ln", "hybrid_norm", "laurel", "gpas", *LERP}
        | ({*ZERO_BRANCHES, "rezero", "skipinit"} if kind == "attention" else set())
        for kind in ("hyper_static", "hyper_dynamic", "hyper_manifold", "attention")
    },
    ("streams", "2"): set(PRESETS) - {"hyper_connections", "mhc"},
}
STACKS = [
    Stack(depth=3, peer_depth=2),
    Stack(depth=2, peer_depth=3, causal=True, cross=True),
    Stack(depth=3),
]


def test_every_axis_is_tried() -> None:
    assert {"preset", *AXES} == {field.name for field in fields(BlockConfig)}


@cache
def run(encoder: StackSpec, decoder: StackSpec) -> None:
    """Forward and backward through a model with dropout; equal specifications run once."""
    architecture = tiny.architecture(dropout=0.1, attention_dropout=0.1)
    table = EmbeddingSpec(vocab_size=tiny.VOCABULARY, pad=tiny.PAD, positions=architecture.order())
    model = EncoderDecoder(encoder, decoder, architecture.sizes(), table)
    source, target = tiny.sentences()
    logits = model(source, target)[target != tiny.PAD]
    torch.nn.functional.cross_entropy(logits, tiny.words(len(logits))).backward()
    assert bool(logits.isfinite().all())
    for parameter in model.parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all())


VALUES = [(axis, value) for axis, values in AXES.items() for value in values]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_axes_on_preset_run_or_are_refused(preset: str, every: int) -> None:
    """Every value is resolved or refused on every preset, and run on every sixth one in turn."""
    for number, (axis, value) in enumerate(VALUES, start=list(PRESETS).index(preset)):
        with noted(axis, value):
            check_axis(preset, axis, value, runs=number % every == 0)


def check_axis(preset: str, axis: str, value: str, *, runs: bool) -> None:
    """In two stacks; an encoder alone resolves or is refused alike. A model of one layer runs."""
    block = BlockConfig(preset=preset, **{axis: AXES[axis][value]})
    refused = preset in REFUSED.get((axis, value), set())
    for kind in ("encoder_decoder", "encoder"):
        expected = pytest.raises(ValueError, match=axis) if refused else nullcontext()
        with expected:
            tiny.architecture(kind=kind).stacks(block)
    if runs and not refused:
        stacks = tiny.architecture(encoder_depth=1, decoder_depth=1).stacks(block)
        run(stacks["encoder"], stacks["decoder"])


def test_branches_whose_norms_start_at_zero_need_their_skips() -> None:
    rows = [row for row, presets in REFUSED.items() if "swin_v2" in presets]
    assert rows
    for axis, value in rows:
        check_axis("swin_v2", axis, value, runs=False)


@pytest.mark.parametrize("placement", [None, "post", "pre", "peri", "none"])
@pytest.mark.parametrize("preset", PRESETS)
def test_stream_of_what_is_not_refused_stays_bounded(preset: str, placement: Any) -> None:
    """Twelve layers: a sum of ordinary branches grows to some tens, an explosion by powers."""
    block = BlockConfig(preset=preset, norm_placement=placement)
    architecture = tiny.architecture(kind="encoder", encoder_depth=12)
    if preset in REFUSED.get(("norm_placement", str(placement)), set()):
        return
    encoder = BlockStack(architecture.stacks(block)["encoder"], architecture.sizes())
    initialize(encoder)
    norms = []
    for layer in encoder.blocks:
        layer.register_forward_hook(lambda *call: norms.append(call[2][0].x.square().mean()))
    with torch.no_grad():
        encoder(torch.randn(3, 7, 10), padding_mask(torch.ones(3, 7, dtype=torch.bool)))
    assert len(norms) == 12
    # Sub-LN's matrices start 1.8 times as large.
    assert max(norms) < (300.0 if preset == "sub_ln" else 100.0)


POST_LN: list[dict[str, Any]] = [
    *({"preset": preset} for preset in ("post_ln", "realformer", "deepnorm", "keel")),
    *({"preset": preset, "norm_placement": "post"} for preset in ("pre_ln", "dual_stream")),
]
ENDS: list[tuple[dict[str, Any], str]] = [
    # A second state is normed at the end whatever the placement.
    *((axes | {"stream": rule}, "layer_norm") for axes in POST_LN for rule in ("dual", "siamese")),
    # Four times the logits would be another start, in presets that have no norm otherwise.
    *(
        ({"preset": preset, "stream": f"hyper_{rule}"}, "layer_norm")
        for preset in ("t_fixup", "rezero")
        for rule in ("static", "dynamic", "manifold")
    ),
    # Post-LN has no final norm with an average over depth.
    *(
        ({"preset": preset, "norm_placement": "post", "stream": "average"}, "none")
        for preset in ("pre_ln", "post_ln")
    ),
    *(({"preset": "siamese_norm", "stream": rule}, "none") for rule in ("average", "plain")),
]


@pytest.mark.parametrize(("axes", "norm"), ENDS)
def test_the_norm_at_the_end_follows_the_stream(axes: dict[str, Any], norm: str) -> None:
    for stack in STACKS:
        spec = resolve(stack, **axes)
        assert (spec.rule, spec.final_norm) == (axes["stream"], norm)
        assert spec.streams == 4 or not spec.rule.startswith("hyper")


@pytest.mark.parametrize(
    ("preset", "kind"), [("reordered_norm", "rms_norm"), ("speedrun", "rms_norm_plain")]
)
def test_a_placement_keeps_the_type_of_the_norms(preset: str, kind: str) -> None:
    for placement, names in {"pre": ["norm_input"], "post": ["norm_sum"]}.items():
        spec = resolve(STACKS[1], preset, norm_placement=placement)
        assert spec.final_norm == (kind if placement == "pre" else "none")
        for around in ("around_self", "around_cross", "around_ff"):
            found = getattr(spec.blocks[0], around)
            assert {getattr(found, name) for name in names} == {kind}
    assert resolve(STACKS[1], "speedrun", norm_placement="post").input_norm == "rms_norm_plain"


def test_a_branch_of_another_size_rises_like_the_others_and_a_shared_gain_is_of_all() -> None:
    half = Gain(value=0.5)
    spec = resolve(STACKS[1], "prores", attention_branch=half, ff_branch=half)
    for block, theirs in zip(spec.blocks, resolve(STACKS[1], "prores").blocks, strict=True):
        ramp = theirs.around_ff.branch.ramp
        assert ramp > 0.0
        assert block.around_self.branch == block.around_ff.branch == replace(half, ramp=ramp)
    gain = Gain(value=0.1, learned=True)
    axes = {"attention_branch": gain, "ff_branch": gain, "share_branch_gain": True}
    for stack in STACKS:
        for block in resolve(stack, "pre_ln", **axes).blocks:
            assert block.around_self.branch == block.around_cross.branch == gain


def resolve(stack: Stack, preset: str, **axes: Any):
    return BlockConfig(preset=preset, **axes).resolve(stack)


def test_no_axis_is_the_preset_and_rms_norm_stands_wherever_layer_norm_stood() -> None:
    for name, preset in PRESETS.items():
        for stack in STACKS:
            with noted(name, stack):
                assert resolve(stack, name) == preset(stack)
                spec = repr(preset(stack)).replace("rms_norm_plain", "rms_norm")
                spec = spec.replace("='l2'", "='rms_norm'").replace("layer_norm", "rms_norm")
                assert repr(resolve(stack, name, norm="rms_norm")) == spec


PROJECTED = ("value_projection", "first_value_projection", "output_projection")


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
        ({"preset": "pre_ln", "norm_placement": "peri"}, "sandwich_ln"),
        ({"preset": "sandwich_ln", "norm_placement": "pre"}, "pre_ln"),
        # A placement takes along what belongs to the old one.
        *(({"preset": "peri_ln", "norm_placement": p}, f"{p}_ln") for p in ("post", "pre")),
        ({"preset": "layer_norm_scaling", "norm_placement": "post"}, "post_ln"),
        ({"preset": "pre_ln", "qk_norm": "layer_norm"}, "qk_norm"),
        ({"preset": "qk_norm", "qk_norm": "none"}, "pre_ln"),
        ({"preset": "dual_stream", "stream": "plain"}, "post_ln"),
        (
            {"preset": "post_ln", "norm_placement": "pre", "stream": "attention"},
            "attention_residuals",
        ),
        ({"preset": "post_ln", "norm_placement": "pre", "stream": "average"}, "denseformer"),
        ({"preset": "post_ln", "norm_placement": "pre", "stream": "hyper_manifold"}, "mhc"),
        ({"preset": "mhc", "stream": "plain"}, "pre_ln"),
        ({"preset": "speedrun", "norm_placement": "pre"}, "speedrun"),
        ({"preset": "skipinit", "share_branch_gain": True}, "rezero"),
        ({"preset": "rezero", "share_branch_gain": False}, "skipinit"),
        (
            {"preset": "sas", "shaped_attention": ShapingSpec(beta=0.0, gamma=None)}
            | dict.fromkeys(PROJECTED, "orthogonal"),
            "v_skipinit",
        ),
        (
            {"preset": "v_skipinit", "shaped_attention": ShapingSpec()}
            | dict.fromkeys(("value_projection", "output_projection"), "identity")
            | {"first_value_projection": "identity_plus"},
            "sas",
        ),
    ],
)
def test_axes_lead_from_preset_to_preset(ours: dict[str, Any], theirs: str) -> None:
    for stack in STACKS:
        assert resolve(stack, **ours) == PRESETS[theirs](stack), stack


def test_realformer_is_a_running_mean_in_two_stacks_and_a_sum_in_one() -> None:
    for stack, kind in zip(STACKS, ("mean", "mean", "sum"), strict=True):
        assert resolve(stack, "post_ln", residual_attention=kind) == PRESETS["realformer"](stack)


@pytest.mark.parametrize(("gamma", "query_init"), [(1.0, "zeros"), (0.0, "xavier")])
def test_queries_start_at_zero_where_a_centre_is_taken_off(gamma: float, query_init: str) -> None:
    spec = resolve(STACKS[0], "pre_ln", shaped_attention=ShapingSpec(gamma=gamma))
    assert {b.self_attention.query_init for b in spec.blocks} == {query_init}
    assert {b.cross_attention.query_init for b in spec.blocks} == {"xavier"}


def test_axes_of_self_attention_leave_cross_attention_alone() -> None:
    stack, axes = STACKS[1], {"attention_branch": Gain(value=0.5), "share_branch_gain": False}
    axes |= {"shaped_attention": ShapingSpec(gamma=None)}
    for preset in sorted(PRESETS.keys() - LERP - PAIRED):
        value = "orthogonal" if preset == "resformer" else "identity"
        output = "full" if preset in (*ZERO, *SPECTRAL) else "identity_plus"
        spec = resolve(stack, preset, value_projection=value, output_projection=output, **axes)
        for ours, before in zip(spec.blocks, PRESETS[preset](stack).blocks, strict=True):
            assert ours.cross_attention == before.cross_attention, preset
            assert ours.around_cross == before.around_cross, preset
    # Noise and norm of queries and keys go to both attentions.
    spec = resolve(STACKS[1], "pre_ln", query_key_noise=0.5, qk_norm="rms_norm")
    for block in spec.blocks:
        for attention in (block.self_attention, block.cross_attention):
            assert (attention.query_key_noise, attention.qk_norm) == (0.5, "rms_norm")


@pytest.mark.parametrize(("axis", "part"), [("attention", "around_self"), ("ff", "around_ff")])
def test_gains_go_where_they_are_named(axis: str, part: str) -> None:
    gains = {f"{axis}_skip": Gain(value=0.25), f"{axis}_branch": Gain(value=0.75, learned=True)}
    stack = STACKS[1]
    specs = resolve(stack, "pre_ln", **gains), PRESETS["pre_ln"](stack)
    for ours, before in zip(*(spec.blocks for spec in specs), strict=True):
        for name in ("around_self", "around_cross", "around_ff"):
            residual = getattr(ours, name)
            if name == part:
                assert [residual.skip, residual.branch] == list(gains.values())
            else:
                assert residual == getattr(before, name)


@pytest.mark.parametrize(
    ("preset", "carry", "each"),
    [
        *(("post_ln", "sum", [2.5, 2.5, 2.5]), ("post_ln", "mean", [2.5, 5.0, 7.5])),
        *(("post_ln", "qk_sum", [2.5, 2.5, 2.5]), ("realformer", None, [2.5, 5.0, 7.5])),
    ],
)
def test_temperature_divides_all_but_the_mean(preset: str, carry: Any, each: list[float]) -> None:
    axes = {"residual_attention": carry, "residual_temperature": 2.5}
    for block, divisor in zip(resolve(STACKS[0], preset, **axes).blocks, each, strict=True):
        for attention in (block.self_attention, block.cross_attention):
            assert attention.score_divisor == divisor
            assert attention.carry == ("qk_sum" if carry == "qk_sum" else "scores")


FIXED, LEARNED = PROJECTION_GAINS.values()
ENDS_DIFFER = {
    **{"value_projection": "orthogonal_plus", "first_value_projection": "full"},
    **{"output_projection": "identity", "last_output_projection": "identity_plus"},
}


@pytest.mark.parametrize(
    ("axes", "layers"),
    [
        (ENDS_DIFFER, {"value": ["full", "orthogonal_plus", "orthogonal_plus"]}),
        (ENDS_DIFFER, {"output": ["identity", "identity", "identity_plus"]}),
        ({"value_projection": "identity"}, {"value": ["identity"] * 3}),  # also in the first
        (
            dict.fromkeys(("value_projection", "output_projection"), "identity_plus")
            | {"value_gains": FIXED, "output_gains": LEARNED},
            {"value_gains": [FIXED] * 3, "output_gains": [LEARNED] * 3},
        ),
        (
            {"preset": "qk_norm", "norm": "rms_norm", "qk_norm": "layer_norm"},
            {"qk_norm": ["layer_norm"] * 3},
        ),
    ],
)
def test_axes_of_self_attention_go_where_they_are_named(axes: Any, layers: Any) -> None:
    spec = resolve(STACKS[0], **{"preset": "sas", **axes})
    for name, values in layers.items():
        assert [getattr(block.self_attention, name) for block in spec.blocks] == values


def test_skipinit_and_rezero_need_no_norm() -> None:
    stack = STACKS[1]
    for way in (Gain(value=stack.depth**-0.5), Gain(value=0.0, learned=True)):
        spec = resolve(stack, "pre_ln", norm_placement="none", attention_branch=way, ff_branch=way)
        assert all(b.around_self.unnormalized and b.around_ff.unnormalized for b in spec.blocks)
        assert spec.final_norm == "none"


@pytest.mark.parametrize("cross", [False, True])
def test_small_feed_forward_does_not_make_a_bare_parallel_stream_safe(cross: bool) -> None:
    stack = Stack(depth=4, peer_depth=4, causal=cross, cross=cross)
    small = Gain(value=stack.depth**-0.5)
    axes: dict[str, Any] = {"norm_placement": "none", "ff_branch": small}
    with pytest.raises(ValueError, match="norm_placement none"):
        resolve(stack, "parallel", **axes)
    resolve(stack, "parallel", **axes, attention_branch=small)


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
    assert config.resolve(Stack(depth=3)).blocks[-1].keeps_skip_of_identity == worse
