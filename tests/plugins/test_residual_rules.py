"""A rule of one's own in place of the residual sum: what it computes, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_app import Block, plugins
from lightning_app import testing as small_models
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.residual import Gain, PlainSum, Residual, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block
from lightning_app.blocks.streams import Stream
from lightning_app.catalogue.parts import description, stack_drawing
from lightning_app.catalogue.svg import picture, specification_lines, text_lines
from lightning_app.cli import main
from lightning_app.config.config import resolve
from lightning_app.core.errors import UserError
from lightning_app.models.initialization import initialize
from lightning_app.probes.probe import learned_gains
from lightning_app.testing import check_preset
from tests.plugins.conftest import Write
from tests.told import told

RULES = """
import torch
from torch import nn

from lightning_app.blocks.norm import LearnedScalars
from lightning_app.blocks.presets import preset
from lightning_app.blocks.residual import RESIDUAL_RULES, ResidualSpec
from lightning_app.blocks.stack import around, same_block


class Openness(LearnedScalars):
    def __init__(self, dim):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    def reset(self):
        self.bias.fill_(-2.0)

    def forward(self, x):
        return torch.sigmoid(x + self.bias)


@RESIDUAL_RULES.register("highway")
class Highway(nn.Module):
    '''s + g (b - s), g = sigmoid(W s + c)'''

    def __init__(self, dim):
        super().__init__()
        self.matrix = nn.Linear(dim, dim, bias=False)
        self.openness = Openness(dim)

    def forward(self, skip, branch):
        return skip + self.openness(self.matrix(skip)) * (branch - skip)


@RESIDUAL_RULES.register("scaled")
class Scaled(LearnedScalars):
    '''s + a b, a = 0 at the start'''

    def __init__(self, dim):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(()))

    def reset(self):
        self.a.fill_(0.0)

    def forward(self, skip, branch):
        return skip + self.a * branch


@preset(equation="x' = N(highway(x, f(x)))", paper="a test", fixes="nothing")
def highway_post(stack):
    '''Post-LN with a gate in place of the sum.'''
    return same_block(stack, around(ResidualSpec(norm_sum="layer_norm", rule="highway")), "none")
"""

ENCODER = Stack(depth=3)


@pytest.fixture
def rules(write: Write) -> Path:
    path = write(RULES, name="own_rules")
    plugins.load(str(path))
    return path


def resolved(preset: str, stack: Stack = ENCODER, **axes: Any) -> StackSpec:
    return BlockConfig(preset=preset, **axes).resolve(stack)


def test_a_rule_takes_the_place_of_the_sum(rules: Path) -> None:
    """Norms, gains and dropout stay where they are: of the formula, the plus alone is another.

    Also of two types: a float32 stream and a bfloat16 branch, as autocast gives them.
    """
    norms: Any = {"norm_sum": "rms_norm", "norm_branch": "layer_norm"}
    gains: Any = {"skip": Gain(value=0.5), "branch": Gain(value=2.0)}
    spec = ResidualSpec(**norms, **gains, rule="highway")
    residual = Residual(spec, 8, dropout=0.0)
    initialize(residual)
    x, f = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    skip, branch = 0.5 * x, 2.0 * torch.nn.functional.layer_norm(f, (8,))
    matrix = residual.get_parameter("rule.matrix.weight")
    gate = torch.sigmoid(skip @ matrix.T - 2.0)
    y = (1.0 - gate) * skip + gate * branch
    expected = y / (y.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(residual(Stream(x), f).x, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = residual(Stream(x), f.bfloat16()).x
    torch.testing.assert_close(mixed.float(), expected, rtol=0.0, atol=0.05)


def test_the_axis_sets_the_rule_of_every_sub_layer_and_without_it_no_other(rules: Path) -> None:
    decoder = Stack(depth=2, peer_depth=2, causal=True, cross=True)
    for preset in ("pre_ln", "post_ln", "highway_post"):
        for block in resolved(preset, decoder, residual_rule="scaled").blocks:
            found = {block.around_self.rule, block.around_cross.rule, block.around_ff.rule}
            assert found == {"scaled"}
    (block, *_) = resolved("highway_post", residual_rule="sum").blocks
    assert block == resolved("post_ln").blocks[0]
    for preset in ("pre_ln", "post_ln", "parallel", "sas", "admin"):
        assert resolved(preset, residual_rule="sum") == resolved(preset)
    residual = Residual(ResidualSpec(), 8, dropout=0.0)
    assert isinstance(residual.rule, PlainSum)
    assert dict(residual.named_parameters()) == {}
    assert residual.state_dict() == {}


REFUSED: list[tuple[str, Mapping[str, Any], str]] = [
    ("parallel", {}, "a skip"),
    ("pre_ln", {"layout": "parallel"}, "a skip"),
    ("v_skipinit", {}, "a skip"),
    ("pre_ln", {"ff_skip": Gain(value=0.0)}, "a skip"),
    ("b2t", {}, "preset b2t"),
    ("dual_stream", {}, "preset dual_stream"),
    ("admin", {}, "preset admin"),
]


def test_what_has_no_meaning_and_an_unknown_rule_are_refused(rules: Path) -> None:
    for preset, axes, what in REFUSED:
        message = f"^residual_rule scaled .*{what}.* residual_rule sum"
        with pytest.raises(ValueError, match=message):
            resolved(preset, residual_rule="scaled", **axes)
    (block, *_) = resolved("parallel").blocks
    ruled = ResidualSpec(rule="scaled")
    with pytest.raises(ValueError, match="residual_rule"):
        type(block)(**{**vars(block), "around_ff": ruled})
    # Without norms a sum explodes; a rule that starts as the identity does not.
    with pytest.raises(ValueError, match="explodes"):
        resolved("pre_ln", norm_placement="none", residual_rule="sum")
    resolved("pre_ln", norm_placement="none", residual_rule="scaled")
    for call in (
        lambda: ResidualSpec(rule="higway"),
        lambda: resolve({"model": {"block": {"residual_rule": "higway"}}}, "a test"),
    ):
        with pytest.raises(UserError, match=r"'higway';.*'highway'"):
            call()


def test_the_conformance_suite_runs_on_it(write: Write) -> None:
    check_preset("highway_post", plugin=write(RULES, name="own_rules"))


def test_a_drawing_names_the_rule_in_place_of_the_plus(rules: Path) -> None:
    drawing = stack_drawing(resolved("highway_post"), "encoder")
    lines = text_lines([drawing])
    start = lines.index("  layers 1-3:") + 1
    assert [line[4:] for line in lines[start : start + 2]] == [
        "x --+-- SA --(highway)-- LN --+-- FF --(highway)-- LN --> x'",
        "    '---------'               '---------'",
    ]
    assert told("highway( … )").search(description([drawing]))
    svg = picture("highway_post", [drawing])
    assert svg.count(">highway</text>") == 2
    assert 'r="8"' not in svg  # the circle of a plus
    specification = str(specification_lines({"encoder": resolved("highway_post")}))
    assert specification.count("rule highway") == 2
    # Layers of two rules are drawn apart.
    plain, ruled = (
        same_block(ENCODER, around(ResidualSpec(norm_sum="layer_norm", rule=rule)), "none")
        for rule in ("sum", "highway")
    )
    mixed = StackSpec(blocks=(*plain.blocks[:1], *ruled.blocks[:2]))
    runs = stack_drawing(mixed, "encoder").runs
    found = [(run.label, run.sums[0].rule) for run in runs]
    assert found == [("layer 1", "sum"), ("layers 2-3", "highway")]


def test_ablate_blocks_lists_and_draws_it(rules: Path, capsys, tmp_path: Path) -> None:
    assert main(["blocks"]) == 0
    assert "highway_post" in capsys.readouterr().out
    assert main(["blocks", "highway_post"]) == 0
    shown = capsys.readouterr().out
    assert "(highway)" in shown
    assert "(+)" not in shown
    config = tmp_path / "config.yaml"
    config.write_text("model: {block: {preset: pre_ln, residual_rule: scaled}}\n")
    assert main(["blocks", "--config", str(config), "--json"]) == 0
    block = json.loads(capsys.readouterr().out)["encoder"]["blocks"][0]
    assert block["around_self"]["rule"] == block["around_ff"]["rule"] == "scaled"


def test_every_learned_scalar_of_a_rule_has_a_name_of_its_own(rules: Path) -> None:
    """Two of one name would be one curve of a probe and of a log."""
    for rule, names in (
        ("highway", {"attention_rule_openness_bias", "ff_rule_openness_bias"}),
        ("scaled", {"attention_rule_a", "ff_rule_a"}),
    ):
        model = small_models.causal_model(
            BlockConfig(preset="pre_ln", residual_rule=rule, ff_branch=Gain(learned=True))
        )
        places = [place for place, _ in learned_gains(model)]
        assert len(places) == len(set(places))
        assert {place.quantity for place in places} == {*names, "ff_branch"}


def test_a_block_of_the_python_interface_takes_it(rules: Path) -> None:
    block = Block("pre_ln", dim=8, heads=2, residual_rule="scaled")
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(block(x), x)  # a = 0: each sub-layer starts as the identity
