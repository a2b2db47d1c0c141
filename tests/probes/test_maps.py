"""Attention maps: what a layer says with them is what it says without."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention
from lightning_app.probes.probe import attention_maps
from tests.probes.test_probe import objective, pairs, windows
from tests.tiny import NUM_HEADS, masked_model, randomise, translator

ATTENTIONS = {
    "encoder": "encoder.blocks.{}.self_attention",
    "decoder": "decoder.blocks.{}.self_attention",
    "cross": "decoder.blocks.{}.cross_attention",
}


class Heard:
    """What each attention of a model was given, and what it answered."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Tensor] = {}
        self.answers: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                module.register_forward_hook(self.hook(name), with_kwargs=True)

    def hook(self, name: str) -> Any:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            values = args[2] if len(args) > 2 else kwargs["values"]
            self.values[name], self.answers[name] = values.detach(), output[0].detach()

        return keep


@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "qk_norm"])
def test_the_maps_are_those_that_the_layers_use(preset: str) -> None:
    torch.manual_seed(0)
    model = randomise(translator(preset))
    sentence = objective().longest(pairs())
    heard = Heard(model)
    maps = attention_maps(model, objective(), sentence)
    assert maps["encoder"].shape == (3, NUM_HEADS, 7, 7)
    assert maps["decoder"].shape == (2, NUM_HEADS, 10, 10)
    assert maps["cross"].shape == (2, NUM_HEADS, 10, 7)
    for name, path in ATTENTIONS.items():
        for layer, weights in enumerate(maps[name]):
            place = path.format(layer)
            module = model.get_submodule(place)
            heads = weights.nan_to_num() @ heard.values[place][0].float()
            answer = heard.answers[place]
            said = module.get_submodule("output")(heads.transpose(0, 1).flatten(1).to(answer.dtype))
            torch.testing.assert_close(said, answer[0], rtol=1e-4, atol=1e-4)
    hidden = maps["decoder"].isnan()
    assert torch.equal(hidden, torch.ones(10, 10).triu(1).bool().expand_as(hidden))


def test_the_model_is_left_as_it_was() -> None:
    model = translator("sas", dropout=0.5).train()
    sentence = objective().longest(pairs())
    state = torch.get_rng_state()
    attention_maps(model, objective(), sentence)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_encoder_alone_has_its_own_maps_alone() -> None:
    task = objective("masked_lm")
    maps = attention_maps(masked_model("pre_ln"), task, task.longest(windows()))
    assert {name: each.shape for name, each in maps.items()} == {"encoder": (3, NUM_HEADS, 7, 7)}
    torch.testing.assert_close(maps["encoder"].sum(dim=-1), torch.ones(3, NUM_HEADS, 7))


def test_the_longest_pair_stands_alone_without_padding() -> None:
    whole = pairs()
    found = objective().longest(whole)
    assert torch.equal(found[0], whole.source[:1])
    assert torch.equal(found[1], whole.target[:1])
    turned = whole._replace(source=whole.source.flip(0), target=whole.target.flip(0))
    assert torch.equal(objective().longest(turned)[1], whole.target[:1])
    short = whole._replace(source=whole.source[1:], target=whole.target[1:])
    assert [text.shape[1] for text in objective().longest(short)[:2]] == [4, 6]
