"""Rules for width (muP): values, rates and factors by role, and coordinates that stay flat."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.streams import Stream
from lightning_app.core.errors import UserError
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.models.optim import OptimizerConfig, build_optimizer
from lightning_app.probes.coordinates import Sizes, coordinates, slopes
from lightning_app.tasks.base import build_task
from lightning_app.tasks.causal_lm import CausalBatch

VOCABULARY, WIDTHS = 50, (32, 64, 128, 256)
MUP = ArchitectureConfig(
    kind="decoder",
    decoder_depth=2,
    model_dim=64,
    ff_dim=256,
    dropout=0.0,
    embedding_scale="none",
    initial="normal",
    parametrization="mup",
    base_width=16,
)
STANDARD = replace(MUP, parametrization="standard", base_width=None)
TASK = build_task(ObjectiveConfig(kind="causal_lm", label_smoothing=0.0))


def built(config: ArchitectureConfig, preset: str = "pre_ln") -> torch.nn.Module:
    torch.manual_seed(1)
    return TASK.built(config, BlockConfig(preset=preset), VOCABULARY)


def batch(seed: int = 0) -> CausalBatch:
    tokens = torch.randint(5, VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(seed))
    index = torch.arange(4)
    return CausalBatch(tokens[:, :-1], tokens[:, 1:], index, torch.tensor(64))


@pytest.mark.parametrize("preset", ["pre_ln", "gated_attention"])
def test_values_and_rates_follow_the_role(preset: str) -> None:
    model, plain = built(MUP, preset), built(STANDARD, preset)
    own = OptimizerConfig(kind="adamw", lr=0.01, eps=1e-6, weight_decay=0.1)
    optimizer = build_optimizer(own, model, fused=False, width_factor=MUP.width_factor)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {group["eps"] for group in optimizer.param_groups} == {2.5e-7}
    for name, parameter in model.named_parameters():
        hidden = "decoder.blocks" in name and parameter.dim() == 2
        assert rates[parameter] == (0.0025 if hidden else 0.01)
        factor = 0.5 if hidden else 1.0
        torch.testing.assert_close(parameter, factor * plain.get_parameter(name))


def test_scores_and_logits_have_their_factors(float64: None) -> None:
    """A standard model with smaller queries, whose logits are divided afterwards, is the same."""
    model, plain = built(MUP).double(), built(STANDARD).double()
    plain.load_state_dict(model.state_dict())
    for name, parameter in plain.named_parameters():
        if ".query." in name:
            parameter.data /= 4.0  # the root of 16 features of a head
    expected = TASK.logits(plain, batch()) / 4.0
    torch.testing.assert_close(TASK.logits(model, batch()), expected, rtol=1e-12, atol=1e-12)


def test_scores_of_cosines_and_own_tables_have_theirs() -> None:
    """Cosines do not grow with the width of a head; an own table is one of the output."""
    model, plain = built(MUP, "swin_v2"), built(STANDARD, "swin_v2")
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(TASK.logits(model, batch()), TASK.logits(plain, batch()) / 4.0)
    ahead = build_task(
        ObjectiveConfig(kind="causal_lm", label_smoothing=0.0, second_target_weight=1.0)
    )
    heads: Any = ahead.built(MUP, BlockConfig(preset="attention_residuals"), VOCABULARY).auxiliary
    assert [name for name, _ in heads.named_parameters()] == ["second_tables.0.weight"]  # all used
    seen: list[torch.Tensor] = []
    labels = torch.zeros(1, 4, dtype=torch.long)

    def loss(states: torch.Tensor, table: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        seen.append(table)
        return table.sum()

    last, table = torch.zeros(1, 4, 64), torch.zeros(VOCABULARY, 64)
    heads.score(loss, table, [Stream(last)] * 2, last, labels, labels == 0)
    torch.testing.assert_close(seen, [heads.second_tables[0].weight / 4.0])


def sizes(config: ArchitectureConfig, preset: str) -> dict[int, Sizes]:
    found = {}
    for width in WIDTHS:
        wide = replace(config, model_dim=width, ff_dim=4 * width)
        model = built(wide, preset)
        own = OptimizerConfig(lr=0.01)
        optimizer = build_optimizer(own, model, fused=False, width_factor=wide.width_factor)
        found[width] = coordinates(model, TASK, optimizer, [batch(seed) for seed in range(5)])
    return found


@pytest.mark.parametrize("preset", ["pre_ln", "post_ln"])
def test_coordinates_are_flat_with_mup(preset: str) -> None:
    for size, change in slopes(sizes(MUP, preset)).values():
        assert abs(size) < 0.1
        assert abs(change) < 0.1


def test_coordinates_of_pre_ln_grow_without_and_a_slope_is_the_exponent_of_the_width() -> None:
    growth = slopes(sizes(STANDARD, "pre_ln"))
    assert min(change for name, (_, change) in growth.items() if name != "logits") > 0.5
    powers = {width: {"layer": (width**0.5, 3.0 * width**-2)} for width in WIDTHS}
    assert slopes(powers)["layer"] == pytest.approx((0.5, -2.0))
    powers[WIDTHS[-1]] = {"layer": (0.0, math.inf)}  # the widest diverged
    assert all(map(math.isnan, slopes(powers)["layer"]))


@pytest.mark.parametrize("preset", ["ngpt", "hyper_connections"])
def test_scalars_without_a_rule_are_named(preset: str) -> None:
    with pytest.raises(UserError, match="parametrization: mup"):
        built(MUP, preset)


@pytest.mark.parametrize("fields", [{"base_width": None}, {"base_width": 0}, {"initial": "xavier"}])
def test_mup_without_its_rules_is_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"mup|base_width"):
        replace(MUP, **fields)
