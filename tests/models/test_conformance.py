"""The promises that every preset keeps: nothing here knows how a preset works."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_app.blocks.attention import ProjectionGains, ShapingSpec
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain
from lightning_app.models.heads import CausalLanguageModel, EncoderDecoder
from tests import tiny

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.unchecked_shapes,  # other tests of these models check them
]

every_preset = pytest.mark.parametrize("preset", PRESETS)
every_kind = pytest.mark.parametrize("build", [tiny.translator, tiny.masked_model])


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def inputs_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    if isinstance(model, EncoderDecoder):
        return tiny.sentences()
    return tiny.words(3, 7), torch.arange(5)


@pytest.fixture
def model(preset: str) -> EncoderDecoder:
    return tiny.randomise(tiny.translator(preset)).eval()


@every_preset
def test_later_target_token_never_changes_an_earlier_output(model: EncoderDecoder) -> None:
    source, target = tiny.sentences()[0], tiny.words(3, 11)
    logits = model(source, target)
    for i in range(1, 11):
        other = target.clone()
        other[:, i:] = 5 + (other[:, i:] - 4) % 12  # another word at every later place
        changed = model(source, other)
        same(changed[:, :i], logits[:, :i])
        assert bool(((changed[:, i] - logits[:, i]).abs().amax(-1) > 1e-6).all())


@every_preset
def test_every_source_token_counts(model: EncoderDecoder) -> None:
    """What makes the tests of padding worth something: real tokens do change the output."""
    source, target = tiny.words(3, 7), tiny.words(3, 11)
    logits = model(source, target)
    for j in range(7):
        other = source.clone()
        other[:, j] = 5 + (other[:, j] - 4) % 12
        assert bool(((model(other, target) - logits).abs().amax((1, 2)) > 1e-6).all())


@every_preset
def test_more_padding_changes_nothing(model: EncoderDecoder) -> None:
    source, target = tiny.sentences()
    real = target != tiny.PAD
    wider = model(pad(source, (0, 5)), pad(target, (0, 3)))
    same(wider[:, : target.shape[1]][real], model(source, target)[real])


@every_preset
def test_a_row_does_not_depend_on_the_others(model: EncoderDecoder) -> None:
    """One row alone, cut to its length, is what it is in a batch; a source of one token too."""
    source, target = tiny.sentences()
    logits = model(source, target)
    for row, (n, m) in enumerate(zip(tiny.SOURCE_LENGTHS, tiny.TARGET_LENGTHS, strict=True)):
        alone = model(source[row : row + 1, :n], target[row : row + 1, :m])
        same(alone[0], logits[row, :m])


@every_preset
def test_order_of_rows_changes_nothing(model: EncoderDecoder) -> None:
    source, target = tiny.sentences()
    order = torch.tensor([2, 0, 1])
    same(model(source[order], target[order]), model(source, target)[order])


@every_preset
def test_blank_row_is_finite_and_harmless(model: EncoderDecoder) -> None:
    """A device without a sentence gets a source of EOS alone and a target of padding."""
    source, target = tiny.sentences()
    blank_source, blank_target = torch.zeros_like(source[:1]), torch.zeros_like(target[:1])
    blank_source[0, 0] = tiny.EOS
    logits = model(torch.cat([source, blank_source]), torch.cat([target, blank_target]))
    same(logits[:3], model(source, target))
    logits.sum().backward()
    assert bool(logits.isfinite().all())
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@every_preset
def test_masked_rows_do_not_depend_on_each_other(preset: str) -> None:
    model = tiny.randomise(tiny.masked_model(preset)).eval()
    tokens = tiny.words(3, 7)
    logits = model(tokens, torch.arange(21)).unflatten(0, (3, 7))
    for row in range(3):
        same(model(tokens[row : row + 1], torch.arange(7)), logits[row])
    order = torch.tensor([2, 0, 1])
    same(model(tokens[order], torch.arange(21)).unflatten(0, (3, 7)), logits[order])
    one = model(tokens[:, :1], torch.arange(3))
    assert one.shape == (3, tiny.VOCABULARY)
    assert bool(one.isfinite().all())


@every_preset
def test_cached_decoding_equals_full_decoding(model: EncoderDecoder) -> None:
    source, target = tiny.sentences()
    full = model(source, target)
    state = model.start(source)
    for i in range(target.shape[1]):
        logits, state = model.step(target[:, i : i + 1], state)
        real = target[:, i] != tiny.PAD
        same(logits[real], full[real, i])


@pytest.mark.parametrize("carry", ["none", "mean", "qk_sum"])
@every_preset
def test_cached_decoding_keeps_rotations_and_carries(preset: str, carry: Any) -> None:
    """The newest query and every kept key stand at the angles and in the sums of a full pass."""
    block = BlockConfig(preset=preset, residual_attention=carry)
    model = tiny.randomise(tiny.translator(block, positions="rope", model_dim=12)).eval()
    source, target = tiny.sentences()
    full = model(source, target)
    state = model.start(source)
    for i in range(5):
        logits, state = model.step(target[:, i : i + 1], state)
        real = target[:, i] != tiny.PAD
        same(logits[real], full[real, i])


@every_preset
def test_hypotheses_may_be_reordered_and_repeated(model: EncoderDecoder) -> None:
    """A beam keeps rows 2, 0, 0 after the third token; each continues as in its own sentence."""
    source, target = tiny.sentences()[0], tiny.words(3, 7)
    rows = torch.tensor([2, 0, 0])
    state = model.start(source)
    for i in range(3):
        _, state = model.step(target[:, i : i + 1], state)
    state = state.select(rows)
    mixed = torch.cat([target[rows, :3], target[:, 3:]], dim=1)
    full = model(source[rows], mixed)
    for i in range(3, 7):
        logits, state = model.step(mixed[:, i : i + 1], state)
        same(logits, full[:, i])


def linear(n: int, m: int) -> int:
    return n * m + m


D, FF, H = (tiny.SIZES[name] for name in ("model_dim", "ff_dim", "num_heads"))
NORM, MATRIX = 2 * D, linear(D, D)


@dataclass(frozen=True)
class Count:
    """Parameters that a preset has besides four matrices an attention and two a feed-forward."""

    sub_layer: int = 0
    """Around each sub-layer."""
    layer: int = 0
    """More in each layer."""
    attention: int = 0
    """More in each attention, self and cross."""
    first: int = 0
    """More in the first layer."""
    cross: int = 0
    """More around a cross-attention."""
    stack: int = 0
    """Before the first layer and after the last."""

    def of(self, side: str) -> int:
        """Return the parameters of a stack."""
        depth, attentions = tiny.SIZES[f"{side}_depth"], 2 if side == "decoder" else 1
        layer = attentions * (4 * MATRIX + self.attention) + linear(D, FF) + linear(FF, D)
        layer += (attentions + 1) * self.sub_layer + (attentions - 1) * self.cross + self.layer
        return self.stack + self.first + depth * layer


# alpha, beta and gamma a head, the gains of both branches, neither values nor outputs.
SHAPED = 3 * H + 2 - 2 * MATRIX
COUNTS = {
    "post_ln": Count(sub_layer=NORM),
    "pre_ln": Count(sub_layer=NORM, stack=NORM),
    "peri_ln": Count(sub_layer=2 * NORM, stack=2 * NORM),
    "sandwich_ln": Count(sub_layer=2 * NORM, stack=NORM),
    "normformer": Count(sub_layer=NORM, attention=H + NORM, layer=2 * FF, stack=NORM),
    "deepnorm": Count(sub_layer=NORM),
    "b2t": Count(sub_layer=NORM),
    "admin": Count(sub_layer=NORM + D),
    "dual_stream": Count(sub_layer=NORM, stack=NORM),
    "rezero": Count(layer=1),
    "skipinit": Count(sub_layer=1),
    "layer_scale": Count(sub_layer=NORM + D, stack=NORM),
    "t_fixup": Count(),
    "mix_ln": Count(sub_layer=NORM, stack=NORM),
    "layer_norm_scaling": Count(sub_layer=NORM, stack=NORM),
    "keel": Count(sub_layer=2 * NORM),
    "hybrid_norm": Count(attention=6 * D // H, layer=NORM, stack=NORM),
    "qk_norm": Count(sub_layer=NORM, attention=4 * D // H, stack=NORM),
    "realformer": Count(sub_layer=NORM),
    "parallel": Count(sub_layer=NORM, layer=-NORM, stack=NORM),
    "v_skipinit": Count(sub_layer=NORM, layer=2 * H + 2, stack=NORM),
    "sas": Count(sub_layer=NORM, layer=SHAPED, first=D * D, stack=NORM),
    "sas_p": Count(sub_layer=NORM, layer=SHAPED - NORM, first=D * D, stack=NORM),
    "sas_p_no_norm": Count(cross=NORM, layer=SHAPED, first=D * D + NORM, stack=NORM),
}


@every_preset
def test_parameter_count_is_the_closed_form(preset: str) -> None:
    table, count = tiny.VOCABULARY * D, COUNTS[preset]
    expected = {
        tiny.translator: table + count.of("encoder") + count.of("decoder"),
        tiny.masked_model: table + count.of("encoder") + MATRIX + NORM + tiny.VOCABULARY,
    }
    for build, number in expected.items():
        assert sum(p.numel() for p in build(preset).parameters()) == number


@pytest.mark.parametrize(("norm", "more"), [("none", 0), ("layer_norm", 2 * D), ("rms_norm", D)])
def test_a_norm_of_the_embedding_has_its_gain_and_bias(norm: str, more: int) -> None:
    plain = tiny.masked_model("post_ln").state_dict()
    model = tiny.masked_model("post_ln", embedding_norm=norm)
    added = model.state_dict().keys() - plain.keys()
    assert sum(model.state_dict()[name].numel() for name in added) == more
    assert all(name.startswith("embedding.norm.") for name in added)


def test_axes_add_the_parameters_that_they_name() -> None:
    """Over Pre-LN, or SAS where the axis is a simplified block's, encoder and decoder together."""

    def count(preset: str = "pre_ln", architecture: Any = None, **axes: Any) -> int:
        model = tiny.translator(BlockConfig(preset=preset, **axes), **(architecture or {}))
        return sum(p.numel() for p in model.parameters())

    layers, learned = 3 + 2, Gain(learned=True)
    gains = ProjectionGains(kept=learned, change=learned)
    anchored = {"value_projection": "orthogonal_plus", "output_projection": "orthogonal_plus"}
    both = count("sas", **anchored)
    plain = count()
    assert count(shaped_attention=ShapingSpec(per_head=False)) == plain + 3 * layers
    assert count(shaped_attention=ShapingSpec(learned=False)) == plain
    assert count(residual_attention="qk_sum", residual_temperature=2.0) == plain
    assert count(ff_skip=Gain(learned=True, vector=True)) == plain + D * layers
    assert count(architecture={"activation": "geglu"}) == plain + linear(D, FF) * layers
    table = {"positions": "learned", "max_positions": 19}
    assert count(architecture=table) == plain + 19 * D
    table["positions"] = "learned_per_layer"
    assert count(architecture=table) == plain + 19 * D * layers
    assert count(architecture={"positions": "rope", "num_heads": 5}) == plain
    # One change a projection; a first value already has one, in each of two stacks.
    assert both == count("sas") + (2 * layers - 2) * D * D
    assert count("sas", **anchored, value_gains=gains) == both + 2 * layers
    assert count("sas", **anchored, output_gains=ProjectionGains(kept=learned)) == both + layers
    rows = count("sas", first_value_projection="identity") + 2 * D * D
    assert rows == count("sas")
    assert count("sas", last_output_projection="full") == count("sas") + 2 * MATRIX
    assert count("rezero", share_branch_gain=False) == count("skipinit")


@every_preset
@every_kind
def test_every_parameter_takes_part(preset: str, build: Callable[[str], nn.Module]) -> None:
    """Distributed training stops at a parameter that no loss reaches."""
    model = tiny.randomise(build(preset))
    inputs = inputs_of(model)
    (model(*inputs) * torch.randn(tiny.VOCABULARY)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@every_preset
@every_kind
def test_state_survives_a_checkpoint(preset: str, build: Callable[[str], nn.Module]) -> None:
    model, other = tiny.randomise(build(preset)), tiny.randomise(build(preset))
    inputs = inputs_of(model)
    expected = model(*inputs)
    assert not torch.equal(other(*inputs), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(*inputs), expected)


@every_preset
@every_kind
def test_evaluation_is_deterministic(preset: str, build: Callable[..., nn.Module]) -> None:
    model = build(preset, dropout=0.3, attention_dropout=0.3)
    inputs = inputs_of(model)
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


def causal(preset: str, **changes: Any) -> CausalLanguageModel:
    return tiny.randomise(tiny.causal_model(preset, **changes)).eval()


@every_preset
def test_a_later_token_never_changes_an_earlier_prediction(preset: str) -> None:
    model, tokens = causal(preset), tiny.words(3, 11)
    logits = model(tokens)
    for i in range(1, 11):
        other = tokens.clone()
        other[:, i:] = 5 + (other[:, i:] - 4) % 12  # another word at every later place
        changed = model(other)
        same(changed[:, :i], logits[:, :i])
        assert bool(((changed[:, i] - logits[:, i]).abs().amax(-1) > 1e-6).all())


@pytest.mark.parametrize(
    "positions",
    ["sinusoidal", "learned", "learned_per_layer", "rope", "relative", "relative_untied"],
)
@every_preset
def test_cached_decoding_of_one_stack_equals_full_decoding(preset: str, positions: str) -> None:
    model, tokens = causal(preset, positions=positions, model_dim=12), tiny.words(3, 7)
    full, state = model(tokens), model.start(3)
    for i in range(7):
        logits, state = model.step(tokens[:, i : i + 1], state)
        same(logits, full[:, i])


@every_preset
def test_a_causal_stack_alone_has_the_parameters_of_an_encoder_alone(preset: str) -> None:
    def shapes(model: nn.Module, stack: str) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in model.get_submodule(stack).named_parameters()}

    model = tiny.causal_model(preset, decoder_depth=3)
    assert shapes(model, "decoder") == shapes(tiny.masked_model(preset), "encoder")
