"""The promises that every preset keeps: nothing here knows how a preset works."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_app.blocks.presets import PRESETS
from lightning_app.models.heads import EncoderDecoder
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

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


@every_preset
def test_hypotheses_may_be_reordered_and_repeated(model: EncoderDecoder) -> None:
    """A beam keeps rows 2, 0, 0 after the third token; each goes on as in its own sentence."""
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


def parameters_of_layer(preset: str, first: bool, side: str) -> int:
    d, f, h = (tiny.SIZES[name] for name in ("model_dim", "ff_dim", "num_heads"))
    attention, norm = 4 * linear(d, d), 2 * d
    feed_forward = linear(d, f) + linear(f, d)
    # Queries and keys; alpha, beta, gamma a head; the gains of both branches; W of the first layer.
    shaped = 2 * linear(d, d) + 3 * h + 2 + (d * d if first else 0)
    own = {
        "post_ln": attention + 2 * norm,
        "pre_ln": attention + 2 * norm,
        "realformer": attention + 2 * norm,
        "parallel": attention + norm,
        "sas": shaped + 2 * norm,
        "sas_p": shaped + norm,
        "sas_p_no_norm": shaped + (norm if first else 0),
    }[preset]
    return own + feed_forward + (attention + norm if side == "decoder" else 0)


def parameters_of_stack(preset: str, side: str) -> int:
    final = 0 if preset in ("post_ln", "realformer") else 2 * tiny.SIZES["model_dim"]
    depth = tiny.SIZES[f"{side}_depth"]
    return final + sum(parameters_of_layer(preset, n == 0, side) for n in range(depth))


@every_preset
def test_parameter_count_is_the_closed_form(preset: str) -> None:
    d, v = tiny.SIZES["model_dim"], tiny.VOCABULARY
    encoder = v * d + parameters_of_stack(preset, "encoder")
    expected = {
        tiny.translator: encoder + parameters_of_stack(preset, "decoder"),
        tiny.masked_model: encoder + linear(d, d) + 2 * d + v,
    }
    for build, count in expected.items():
        assert sum(p.numel() for p in build(preset).parameters()) == count


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
