"""`lightning_app.testing` accepts a sound block of a plug-in, and says what fails in another."""

import pytest

from lightning_app.core.errors import UserError
from lightning_app.testing import CHECKS, check_preset
from tests.plugins.conftest import PARTS, Write

pytestmark = pytest.mark.unchecked_shapes

BROKEN = """
import torch
from torch import nn

from lightning_app.blocks.norm import NORM_KINDS
from lightning_app.blocks.presets import preset
from lightning_app.blocks.residual import ResidualSpec
from lightning_app.blocks.stack import around, same_block


@NORM_KINDS.register("{name}")
class Broken(nn.Module):
    def __init__(self, dim):
        super().__init__()
        {built}

    def forward(self, x):
        return {result}


@preset(equation="", paper="", fixes="")
def {name}_block(stack):
    each = ResidualSpec(norm_input="{name}")
    return same_block(stack, around(each), final_norm="layer_norm")
"""


def failure(write: Write, name: str, built: str, result: str, kind: str) -> str:
    path = write(BROKEN.format(name=name, built=built, result=result), name=f"{name}_parts")
    with pytest.raises(AssertionError) as caught:
        check_preset(f"{name}_block", plugin=path, kinds=[kind])
    return str(caught.value)


def test_a_sound_block_passes(write: Write) -> None:
    check_preset("max_post", plugin=write(PARTS))


def test_a_norm_over_tokens_is_not_causal(write: Write) -> None:
    said = failure(write, "over_tokens", "pass", "x - x.mean(dim=1, keepdim=True)", "decoder")
    assert said.startswith(
        "preset 'over_tokens_block', decoder: a later token never changes an earlier prediction: "
        "token 1 changes an output before it"
    )


def test_a_norm_over_rows_mixes_rows(write: Write) -> None:
    said = failure(write, "over_rows", "pass", "x - x.mean(dim=0, keepdim=True)", "encoder")
    assert "other: row 0" in said


def test_a_parameter_without_an_initial_value(write: Write) -> None:
    """It would start where PyTorch leaves it, and take weight decay."""
    built = "self.gain = nn.Parameter(torch.ones(dim))"
    said = failure(write, "own_gain", built, "self.gain * x", "decoder")
    assert "value: `initialize`" in said
    assert "gain" in said


def test_a_parameter_that_no_gradient_reaches(write: Write) -> None:
    said = failure(write, "idle", "self.gain = nn.Linear(dim, 1)", "x / 2", "encoder")
    assert "no gradient reaches" in said


def test_an_unknown_preset_is_one_line() -> None:
    with pytest.raises(UserError, match=r"model\.block\.preset: expected one of"):
        check_preset("no_such_block")


def test_every_kind_has_its_checks() -> None:
    for kind, word in (("encoder", "row"), ("encoder_decoder", "cached"), ("decoder", "cached")):
        assert any(word in check.name for check in CHECKS if check.kind == kind)


@pytest.mark.parametrize("kinds", ["decoder", [], ["encoder-decoder"]])
def test_kinds_that_do_not_exist_are_a_mistake(kinds: list[str]) -> None:
    with pytest.raises(UserError, match="kinds: expected some of encoder"):
        check_preset("pre_ln", kinds=kinds)


def test_a_norm_over_rows_is_found_in_a_decoder_and_in_training(write: Write) -> None:
    said = failure(write, "over_rows", "pass", "x - 0.5 * x.mean(0)", "decoder")
    assert "texts do not depend on each other" in said
    built = "self.norm = nn.BatchNorm1d(dim, affine=False)"
    result = "self.norm(x.flatten(0, -2)).view_as(x)"
    assert "texts do not depend" in failure(write, "of_a_batch", built, result, "decoder")
    assert "rows do not depend" in failure(write, "of_rows", built, result, "encoder")
    assert "a row does not depend" in failure(write, "of_pairs", built, result, "encoder_decoder")


def test_a_norm_with_noise_in_training_passes(write: Write) -> None:
    result = "x * (1 + 0.1 * torch.randn_like(x)) if self.training else x * 1"
    path = write(BROKEN.format(name="noisy", built="pass", result=result), name="noisy_parts")
    check_preset("noisy_block", plugin=path, kinds=["decoder"])
