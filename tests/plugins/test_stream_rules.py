"""Parts of docs/own-block.md as plug-ins: stream rules, gates, values, attention; broken ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_app import Encoder, fit, plugins
from lightning_app import testing as small_models
from lightning_app.blocks.attention import ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.linear import SpectralLinear
from lightning_app.blocks.masks import Mask, padding_mask
from lightning_app.blocks.memory import MemorySpec
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.catalogue.parts import stack_drawing
from lightning_app.catalogue.svg import text_lines
from lightning_app.core.errors import UserError
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.initialization import initialize
from lightning_app.models.stack import BlockStack
from lightning_app.probes.hooks import from_csv
from lightning_app.probes.probe import learned_gains
from lightning_app.testing import check_preset, small_architecture
from lightning_app.training.callbacks.probes import SignalProbe
from tests.pages import fenced
from tests.plugins.conftest import Write

RULE, GATE, VALUES, ATTENTION = (
    next(
        block.text
        for block in fenced("python")
        if block.page == "docs/own-block.md" and f"{registry}.register" in block.text
    )
    for registry in ("STREAM_RULES", "OUTPUT_GATES", "VALUE_CARRIES", "ATTENTIONS")
)
INSIDE = """

from dataclasses import replace

from lightning_app.blocks.presets import PRESETS, preset


@preset(equation="", paper="ours", fixes="nothing")
def gated_words(stack):
    spec = PRESETS["pre_ln"](stack)
    gated = replace(spec.blocks[0].self_attention, output_gate="relu_gate")
    both = replace(spec.blocks[0], self_attention=gated, cross_attention=gated)
    words = replace(both, self_attention=replace(gated, value_carry="embedded"))
    return replace(spec, blocks=(words, *(both,) * (stack.depth - 2), words)[: stack.depth])


@preset(equation="", paper="ours", fixes="nothing")
def of_two_layers(stack):
    spec = PRESETS["pre_ln"](stack)
    own = replace(spec.blocks[0].self_attention, attention="two_layers")
    return replace(spec, blocks=(replace(spec.blocks[0], self_attention=own),) * stack.depth)


@preset(equation="", paper="ours", fixes="nothing")
def partly_of_two_layers(stack):
    spec = of_two_layers(stack)
    return replace(spec, blocks=(*spec.blocks[:-1], *PRESETS["pre_ln"](stack).blocks[-1:]))
"""
PLAIN = """
import torch

from lightning_app.blocks.attention import ATTENTIONS


@ATTENTIONS.register("plain")
class Plain(torch.nn.Module):
    def __init__(self, model_dim, num_heads):
        super().__init__()

    def forward(self, query, keys, values, mask, below, rate):
        scores = mask.logits(query @ keys.mT / query.shape[-1] ** 0.5)
        return scores.softmax(dim=-1) @ values, None
"""
PRESET = """

from dataclasses import replace

from lightning_app.blocks.presets import PRESETS, preset


@preset(equation="x' = x + f(N(x + a r))", paper="ours", fixes="nothing")
def two_streams(stack):
    return replace(PRESETS["pre_ln"](stack), stream="two")
"""


SPAN = LocalisedSpan(query_block=1, memory=2)


@pytest.fixture
def rule(write: Write) -> Path:
    path = write(RULE + PRESET, name="own_streams")
    plugins.load(str(path))
    return path


@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("two_streams", RULE + PRESET),
        ("gated_words", GATE + VALUES + INSIDE),
        ("of_two_layers", ATTENTION + INSIDE),
    ],
    ids=["stream", "gate and values", "attention"],
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


def test_sigma_reparam_reaches_the_matrices_of_a_gate(write: Write) -> None:
    plugins.load(str(write(GATE)))
    axes = {"sigma_reparam": True, "output_gate": "relu_gate"}
    encoder = Encoder("pre_ln", depth=1, dim=16, heads=2, **axes)
    ((_, block),) = encoder.stack.layers
    gate: Any = block.self_attention.output_gate
    assert isinstance(gate.matrix, SpectralLinear)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
def test_an_attention_of_ones_own_has_masks_biases_and_cached_keys(write, positions: str) -> None:
    """The formula of softmax attention equals the built-in one: padding, documents, decoding."""
    plugins.load(str(write(PLAIN)))
    own = BlockConfig(preset="post_ln", attention="plain")
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 3)
    for build, inputs in (
        (small_models.translator, small_models.sentences()),
        (small_models.causal_model, (small_models.words(3, 7), documents)),
    ):
        one, other = (build(block, positions=positions, model_dim=12) for block in (own, "post_ln"))
        other.load_state_dict(small_models.randomise(one).state_dict())
        torch.testing.assert_close(one.eval()(*inputs), other.eval()(*inputs))
        if isinstance(one, CausalLanguageModel):
            small_models.check_cached_text(one, inputs[0])


@pytest.mark.usefixtures("float64")
def test_an_attention_over_two_layers_is_a_softmax_over_both(write: Write) -> None:
    plugins.load(str(write(ATTENTION)))
    config = BlockConfig(preset="pre_ln", attention="two_layers")
    model = small_models.randomise(small_models.causal_model(config)).eval()
    calls: list[tuple[Any, Any]] = []
    for _, block in model.decoder.layers:
        own: Any = block.self_attention.own
        own.register_forward_hook(lambda _, given, result: calls.append((given, result)))
    model(small_models.words(1, 4))
    ((_, keys, values, *_), _), ((query, *above, _, below, _), (heads, _)) = calls
    assert below[0] is keys
    assert below[1] is values
    for head, place in np.ndindex(2, 4):
        every = torch.cat([part[0, head, : place + 1] for part in (keys, above[0])])
        weights = (every @ query[0, head, place] / 5**0.5 / (2 + head)).exp()
        wanted = torch.cat([part[0, head, : place + 1] for part in (values, above[1])])
        expected = (weights / weights.sum()) @ wanted
        torch.testing.assert_close(heads[0, head, place], expected)


@pytest.mark.parametrize("preset", ["of_two_layers", "partly_of_two_layers"])
def test_a_run_without_maps_is_probed_and_logged(write, tmp_path, cache, preset: str) -> None:
    plugins.load(str(write(ATTENTION + INSIDE)))
    probe = f"{SignalProbe.__module__}.SignalProbe"
    sizes = {"decoder_depth": 2, "model_dim": 16, "ff_dim": 16, "num_heads": 2}
    over = {f"model.architecture.{name}": size for name, size in sizes.items()}
    over |= {"trainer.max_steps": 2, "trainer.val_check_interval": 2, "data.cache": cache}
    over |= {"trainer.callbacks": [{"class_path": probe}], "model.block.preset": preset}
    over |= {"trainer.default_root_dir": str(tmp_path / "run"), "trainer.limit_val_batches": 1}
    schedule = {"kind": "constant", "warmup_steps": 0, "reference_steps": 1}
    over |= {f"model.schedule.{name}": value for name, value in schedule.items()}
    assert fit("ablations/base/synthetic_lm.yaml", over).record["steps"] == 2
    found = {row.quantity for row in from_csv(tmp_path / "run" / "probes.csv")}
    assert "hidden_norm" in found
    assert not {name for name in found if "attention" in name or "logit" in name}


@pytest.mark.usefixtures("float64")
def test_scores_get_every_bias_and_hidden_keys_none() -> None:
    scores, bias, weights = (torch.randn(1, 2, 3, 3) for _ in range(3))
    seen = torch.tensor([[[[True, True, False]]]])
    mask = Mask(3, scores.device, seen=seen, causal=True, score_bias=bias, log_weights=weights)
    maps = mask.logits(scores).softmax(dim=-1)
    for head, row in np.ndindex(2, 3):
        few = min(row + 1, 2)
        exact = (scores + bias + weights)[0, head, row, :few].exp()
        assert float(maps[0, head, row, few:].sum()) == 0.0
        torch.testing.assert_close(maps[0, head, row, :few], exact / exact.sum())


@pytest.mark.usefixtures("float64")
def test_values_of_tokens_are_added_in_the_layers_that_name_them(write: Write) -> None:
    plugins.load(str(write(VALUES)))
    model = small_models.causal_model(BlockConfig(preset="pre_ln", value_carry="embedded")).eval()
    carries: list[Any] = [block.self_attention.value_carry for _, block in model.decoder.layers]
    first, second = (carry.table.weight.detach() for carry in carries)
    assert first.shape == (small_models.VOCABULARY, small_models.SIZES["model_dim"])
    assert not torch.equal(first, second)
    assert 0.01 < float(first.std()) < 0.03
    tokens = small_models.words(2, 6)
    values, u = torch.randn(2, 2, 6, 5), torch.randn(2, 6, 10)
    expected = values.clone()
    for row, head, place in np.ndindex(2, 2, 6):
        gate = 3 / (1 + torch.exp(-(carries[0].gate.weight[head] @ u[row, place])))
        added = first[tokens[row, place]][5 * head : 5 * head + 5]
        expected[row, head, place] += gate * added
    torch.testing.assert_close(carries[0](values, u, tokens), expected)
    logits = model(tokens)
    second[tokens[0, 2]] += 1.0
    changed = (model(tokens) - logits).abs().amax(dim=-1) > 1e-9
    seen = (tokens == tokens[0, 2]).cumsum(dim=1) > 0
    assert torch.equal(changed, seen)


@pytest.mark.parametrize(
    ("axes", "field"),
    [
        ({"attention": "plain", "residual_attention": "sum"}, "residual_attention"),
        ({"attention": "plain", "shaped_attention": ShapingSpec()}, "shaped_attention"),
        ({"attention": "plain", "differential": True}, "differential"),
        ({"attention": "plain", "score_cap": 5.0}, "score_cap"),
        ({"attention": "plain", "sink": "zero"}, "sink"),
        ({"attention": "plain", "localised_span": SPAN}, "localised_span"),
        ({"attention": "plane"}, "plane"),
        ({"value_carry": "embedded", "memory": MemorySpec(length=4)}, "memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_belongs_to_the_softmax_is_refused_beside_ones_own(write, axes, field: str) -> None:
    plugins.load(str(write(PLAIN + VALUES)))
    with pytest.raises((ValueError, UserError), match=field):
        BlockConfig(**axes).resolve(Stack(depth=2, causal=True))


def test_a_stack_without_a_vocabulary_has_no_ids(write: Write) -> None:
    plugins.load(str(write(VALUES)))
    with pytest.raises(UserError, match="value_carry embedded"):
        Encoder("pre_ln", depth=2, dim=16, heads=2, value_carry="embedded")
