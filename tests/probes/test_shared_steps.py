"""Probes of a shared block: each step is a layer, and halted tokens do not count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.models.stack import stacks
from lightning_app.probes.hooks import Place, Row
from lightning_app.probes.probe import (
    attention_maps,
    layers_by_rank,
    probe,
    snapshot,
    update_ratios,
)
from tests.models.test_shared_steps import layer_by_layer
from tests.probes.test_probe import objective, pairs
from tests.tiny import randomise, translator

pytestmark = pytest.mark.usefixtures("float64")
SHARED = {
    "mean": BlockConfig(preset="realformer", share="all"),
    "pre_ln": BlockConfig(preset="pre_ln", share="all", shaped_attention=ShapingSpec()),
    "rezero": BlockConfig(preset="rezero", share="all"),
}
HALTING = BlockConfig(preset="pre_ln", share="all", halting=HaltingSpec(bias=-0.8))


def values(rows: list[Row]) -> dict[Place, float]:
    return {row.place: row.value for row in rows}


def with_copied_blocks(model: nn.Module, block: BlockConfig) -> nn.Module:
    """Return a model whose layers are copies of the one block of `model`."""
    untied = translator(replace(block, share="none"), decoder_depth=3)
    untied.load_state_dict(layer_by_layer(model, {"encoder_depth": 3, "decoder_depth": 3}))
    return untied


@pytest.mark.parametrize("block", SHARED.values(), ids=list(SHARED))
def test_each_step_is_measured_as_a_layer_with_copied_weights(block: BlockConfig) -> None:
    """States, maps, gradients of one layer alone, gains, updates: every row is the same."""
    model = randomise(translator(block, decoder_depth=3))
    names = [name for name, _ in model.named_parameters()]
    untied, batches = with_copied_blocks(model, block), [pairs()]
    ours = values(probe(model, objective(), batches, positions=1))
    # The shared parameter is still registered under its name.
    assert [name for name, _ in model.named_parameters()] == names
    assert all("weight" not in vars(part) for part in model.modules())
    theirs = values(probe(untied, objective(), batches, positions=1))
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert len({ours[Place("w2_gradient", "decoder", layer, None)] for layer in (1, 2, 3)}) == 3

    updates = []
    for each in (model, untied):
        before = snapshot(each)
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(1.5)
        updates.append(values(update_ratios(each, before, 1)))
    assert updates[0] == pytest.approx(updates[1])
    assert layers_by_rank(model) == layers_by_rank(untied)


def seen(model: nn.Module, batch: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return (state after the step, tokens that ran it) of every step."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    handles = []
    for name, stack in stacks(model).items():

        def keep(block: nn.Module, args: Any, output: Any, name: str = name) -> None:
            found.setdefault(name, []).append((output[0].x.detach(), args[2].running))

        handles.append(stack.blocks[0].register_forward_hook(keep))
    objective().predictions(model, batch)
    for handle in handles:
        handle.remove()
    return found


def test_halted_tokens_do_not_count_and_are_in_no_map() -> None:
    model, batch = randomise(translator(HALTING, encoder_depth=4, decoder_depth=5)).eval(), pairs()
    rows = values(probe(model, objective(), [batch], positions=1))
    stopped = 0
    for name, steps in seen(model, batch).items():
        real = objective().real_tokens(batch)[name]
        for layer, (x, running) in enumerate(steps, start=1):
            counted = real & running
            stopped += int((real & ~running).sum())
            share = Place("running_tokens", name, layer, None)
            assert rows[share] == pytest.approx(float(counted.sum() / real.sum()))
            place = Place("hidden_norm", name, layer, None)
            if not bool(counted.any()):
                assert place not in rows
                continue
            expected = float(x[counted].square().mean())
            assert rows[place] == pytest.approx(expected)
    assert stopped > 0
    assert ("attention_distance", "decoder", 2) in {row[:3] for row in rows}
    batch = objective().longest(batch)
    maps = attention_maps(model, objective(), batch)
    assert maps["encoder"].shape[0] == 4
    assert maps["decoder"].shape[0] == maps["cross"].shape[0] == 5
    steps = seen(model, batch)
    for key, name in (("encoder", "encoder"), ("decoder", "decoder"), ("cross", "decoder")):
        for drawn, (_, running) in zip(maps[key], steps[name], strict=True):
            assert torch.equal(drawn.isnan().all(dim=-1)[0], ~running[0])

    # A layer that no token reaches is not measured.
    block = replace(HALTING, halting=HaltingSpec(bias=40.0))
    rows = values(probe(translator(block), objective(), [pairs()], positions=1))
    assert {place.layer for place in rows if place.quantity == "attention_entropy"} == {1}
    assert rows[Place("running_tokens", "encoder", 2, None)] == 0.0
