"""`lightning_app.testing` accepts a sound block of a plug-in, and says what fails in another."""

import pytest

from lightning_app.core.errors import UserError
from lightning_app.testing import CHECKS, check_preset
from tests.plugins.conftest import PARTS, Write
from tests.told import told

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


def test_a_sound_block_passes_also_with_noise_in_training(write: Write) -> None:
    check_preset("max_post", plugin=write(PARTS))
    result = "x * (1 + 0.1 * torch.randn_like(x)) if self.training else x * 1"
    path = write(BROKEN.format(name="noisy", built="pass", result=result), name="noisy_parts")
    check_preset("noisy_block", plugin=path, kinds=["decoder"])


ROWS = "texts do not depend on each other"
NORM = "self.norm = nn.BatchNorm1d(dim, affine=False)"
NORMED = "self.norm(x.flatten(0, -2)).view_as(x)"
GAIN = "self.gain = nn.Parameter(torch.ones(dim))"


@pytest.mark.parametrize(
    ("name", "built", "result", "kind", "said"),
    [
        (
            *("over_tokens", "pass", "x - x.mean(dim=1, keepdim=True)", "decoder"),
            "preset 'over_tokens_block', decoder: a later token never changes an earlier "
            "prediction: token 1 changes an output before it",
        ),
        ("over_rows", "pass", "x - x.mean(dim=0, keepdim=True)", "encoder", "other: row 0"),
        ("over_rows", "pass", "x - 0.5 * x.mean(0)", "decoder", ROWS),
        # It would start where PyTorch leaves it, and take weight decay.
        ("own_gain", GAIN, "self.gain * x", "decoder", "value: `initialize` … gain"),
        ("idle", "self.gain = nn.Linear(dim, 1)", "x / 2", "encoder", "no gradient reaches"),
        ("of_a_batch", NORM, NORMED, "decoder", "texts do not depend"),  # in training
        ("of_rows", NORM, NORMED, "encoder", "rows do not depend"),
        ("of_pairs", NORM, NORMED, "encoder_decoder", "a row does not depend"),
    ],
)
def test_a_broken_norm_is_found(write, name, built: str, result: str, kind: str, said: str) -> None:
    path = write(BROKEN.format(name=name, built=built, result=result), name=f"{name}_parts")
    with pytest.raises(AssertionError, match=told(said)):
        check_preset(f"{name}_block", plugin=path, kinds=[kind])


def test_presets_and_kinds_that_do_not_exist_are_a_mistake() -> None:
    with pytest.raises(UserError, match=r"model\.block\.preset: .*expected one of"):
        check_preset("no_such_block")
    for kinds in ("decoder", [], ["encoder-decoder"]):
        with pytest.raises(UserError, match="kinds: expected some of encoder"):
            check_preset("pre_ln", kinds=kinds)
    for kind, word in (("encoder", "row"), ("encoder_decoder", "cached"), ("decoder", "cached")):
        assert any(word in check.name for check in CHECKS if check.kind == kind)
