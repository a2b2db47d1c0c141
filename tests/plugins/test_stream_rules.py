"""The stream rule of docs/own-block.md as a plug-in, and broken ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_app import Encoder, plugins
from lightning_app import testing as small_models
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.linear import SpectralLinear
from lightning_app.blocks.masks import padding_mask
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.streams import STREAM_RULES, StreamPlace
from lightning_app.catalogue.parts import stack_drawing
from lightning_app.catalogue.svg import text_lines
from lightning_app.models.initialization import initialize
from lightning_app.models.stack import BlockStack
from lightning_app.probes.probe import learned_gains
from lightning_app.testing import check_preset, small_architecture
from tests.pages import fenced
from tests.plugins.conftest import Write

pytestmark = pytest.mark.unchecked_shapes

RULE, GATE, VALUES = (
    next(
        block.text
        for block in fenced("python")
        if block.page == "docs/own-block.md" and f"{registry}.register" in block.text
    )
    for registry in ("STREAM_RULES", "OUTPUT_GATES", "VALUE_CARRIES")
)
INSIDE = """

from dataclasses import replace

from lightning_app.blocks.presets import PRESETS, preset


@preset(equation="", paper="ours", fixes="nothing")
def gated_thirds(stack):
    spec = PRESETS["pre_ln"](stack)
    gated = replace(spec.blocks[0].self_attention, output_gate="relu_gate")
    first = replace(spec.blocks[0], self_attention=gated, cross_attention=gated)
    other = replace(first, self_attention=replace(gated, value_carry="third"))
    return replace(spec, blocks=(first, *(other,) * (stack.depth - 1)))
"""
PRESET = """

from dataclasses import replace

from lightning_app.blocks.presets import PRESETS, preset


@preset(equation="x' = x + f(N(x + a r))", paper="ours", fixes="nothing")
def two_streams(stack):
    return replace(PRESETS["pre_ln"](stack), stream="two")
"""


@pytest.fixture
def rule(write: Write) -> Path:
    path = write(RULE + PRESET, name="own_streams")
    plugins.load(str(path))
    return path


@pytest.mark.parametrize(
    ("preset", "text"),
    [("two_streams", RULE + PRESET), ("gated_thirds", GATE + VALUES + INSIDE)],
    ids=["stream", "gate and values"],
)
def test_the_page_keeps_its_promise(preset: str, text: str, write: Write) -> None:
    check_preset(preset, plugin=write(text, name="own_parts"))


def test_it_computes_what_it_says(rule: Path) -> None:
    """``u = x + a r``, ``x' = x + f(u)``, ``r' = a r + f(u)``, with an a of its own everywhere."""
    spec = BlockConfig(preset="two_streams").resolve(Stack(depth=2))
    stack = BlockStack(spec, small_architecture().sizes()).double()
    initialize(stack)
    shares = [part for name, part in stack.named_parameters() if name.endswith("learned.share")]
    assert len(shares) == 5  # two sub-layers in two layers, and the end
    with torch.no_grad():
        for number, share in enumerate(shares):
            share.fill_(0.1 * number)
    x = torch.randn(3, 7, 10, dtype=torch.float64)
    branches: list[torch.Tensor] = []
    for _, block in stack.layers:
        for around in (block.around_self, block.around_ff):
            around.branch.register_forward_hook(lambda *call: branches.append(call[2]))
    mask = padding_mask(torch.ones(3, 7, dtype=torch.bool))
    found = stack(x, mask)
    state, other = x, torch.zeros_like(x)
    for share, f in zip((0.0, 0.1, 0.2, 0.3), branches, strict=True):
        state, other = state + f, share * other + f
    expected = stack.final_norm(state + 0.4 * other)
    torch.testing.assert_close(found, expected)


def test_it_is_drawn_and_its_scalars_are_named(rule: Path) -> None:
    spec = BlockConfig(preset="pre_ln", stream="two").resolve(Stack(depth=3))
    assert "stream two" in "\n".join(text_lines([stack_drawing(spec, "encoder")]))
    model = small_models.causal_model(BlockConfig(preset="pre_ln", stream="two"))
    places = [place for place, _ in learned_gains(model)]
    assert len(places) == len(set(places)) >= 4


def test_matrices_of_a_rule_are_drawn_after_those_of_the_blocks(write: Write) -> None:
    first = "self.learned = Share()"
    text = RULE.replace(first, f"{first}\n        self.m = torch.nn.Linear(1, 1)")
    plugins.load(str(write(text, name="own_streams")))
    plugins.load(str(write(GATE, name="own_attention")))
    drawn = []
    axes: dict[str, Any]
    for axes in ({}, {"stream": "two"}, {"output_gate": "relu_gate"}):
        torch.manual_seed(3)
        drawn.append(small_models.causal_model(BlockConfig(**axes)).state_dict())
    for other in drawn[1:]:
        assert len(other) > len(drawn[0])
        assert all(torch.equal(other[name], value) for name, value in drawn[0].items())


def test_a_table_of_a_layer_is_added_as_the_embedding_is(write: Write) -> None:
    """By default as `start` does it: r of this rule starts at zero, whatever the embedding is."""
    plugins.load(str(write(RULE)))
    rule = STREAM_RULES["two"](StreamPlace(model_dim=8))
    x, added = torch.randn(2, 3, 8), torch.randn(3, 8)
    late, early = rule.add(rule.start(x), added), rule.start(x + added)
    torch.testing.assert_close(late.x, early.x)
    torch.testing.assert_close(late.parts[0], early.parts[0])


def test_sigma_reparam_reaches_the_matrices_of_a_gate(write: Write) -> None:
    plugins.load(str(write(GATE)))
    axes = {"sigma_reparam": True, "output_gate": "relu_gate"}
    encoder = Encoder("pre_ln", depth=1, dim=16, heads=2, **axes)
    ((_, block),) = encoder.stack.layers
    gate: Any = block.self_attention.output_gate
    assert isinstance(gate.matrix, SpectralLinear)
