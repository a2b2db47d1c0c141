"""Adaptive spans: soft masks that the heads learn, against the equations of the paper."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks import spans, windows
from lightning_app.blocks.attention import Attention, ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attention_form, softmax_map
from lightning_app.blocks.spans import AdaptiveSpan, SpanMask, auxiliary_terms
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.windows import LocalisedSpan, LocalMask
from lightning_app.models.optim import (
    OPTIMIZERS,
    OptimizerConfig,
    build_optimizer,
    parameter_groups,
)
from lightning_app.probes.hooks import scores
from lightning_app.probes.probe import learned_gains
from tests import tiny
from tests.reference import REFERENCE, Reference, predict_masked, predict_next, translate
from tests.slopes import check_slopes

pytestmark = [pytest.mark.usefixtures("float64")]

LONGEST, RAMP = 7, 3.0
PRESETS = ("post_ln", "pre_ln", "realformer", "v_skipinit", "sas")
each_preset = pytest.mark.parametrize("preset", PRESETS)
NO_CENTRE = ShapingSpec(alpha=1.0, beta=1.0, gamma=None)


@pytest.fixture(autouse=True)
def _small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few tokens are folded, and windows trimmed to the token."""
    monkeypatch.setattr(windows, "FEWEST", 1)
    monkeypatch.setattr(spans, "TRIM", 1)


def block(preset: str, **changes: Any) -> BlockConfig:
    span = AdaptiveSpan(**{"longest": LONGEST, "ramp": RAMP, **changes.pop("span", {})})
    if preset == "sas":  # its centre would have to move with the spans
        changes["shaped_attention"] = NO_CENTRE
    return BlockConfig(preset=preset, adaptive_span=span, **changes)


def spanned(preset: str, **changes: Any) -> Reference:
    shaped = {"shaped": "identity"} if preset == "sas" else {}
    return replace(REFERENCE[preset], adaptive_span=(LONGEST, RAMP), **shaped, **changes)


@torch.no_grad()
def drawn(model: nn.Module, low: float = 0.05, high: float = 0.6) -> Any:
    """Draw parameters, and spans between `low` and `high` of S, off the kinks of the mask."""
    tiny.randomise(model)
    for part in model.modules():
        if isinstance(part, SpanMask):
            part.fraction.uniform_(low, high)
    return model


def same(ours: Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=1e-10, atol=1e-10)


@pytest.mark.unchecked_shapes
@each_preset
@pytest.mark.parametrize("length", [5, 19])
def test_the_causal_model_is_the_reference(preset: str, length: int) -> None:
    """Texts shorter than a window, and such that are folded."""
    model, tokens = drawn(tiny.causal_model(block(preset))), tiny.words(2, length)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder"))
    expected = predict_next(spanned(preset), tiny.numpy_parameters(model), sizes, tokens.numpy())
    same(model(tokens), expected)


@pytest.mark.unchecked_shapes
@each_preset
@pytest.mark.parametrize("width", [0, 12])
def test_translation_is_the_reference(preset: str, width: int) -> None:
    """An encoder looks at both sides; its padded queries may see nothing near them."""
    model = drawn(tiny.translator(block(preset)))
    source, target = tiny.sentences()
    source = torch.nn.functional.pad(source, (0, width))
    sizes = tiny.reference_sizes(tiny.architecture())
    parameters = tiny.numpy_parameters(model)
    expected = translate(spanned(preset), parameters, sizes, source.numpy(), target.numpy())
    real = target != tiny.PAD
    logits = model(source, target)
    same(logits[real], expected.logits[real.numpy()])
    logits[real].sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("preset", ["post_ln", "v_skipinit"])
@pytest.mark.parametrize("trim", [False, True])
def test_masked_words_are_the_reference(preset: str, trim: bool) -> None:
    model = drawn(tiny.masked_model(block(preset, span={"trim": trim})), high=0.2)
    tokens, positions = tiny.words(2, 23), torch.tensor([0, 3, 22, 23, 45])
    sizes = tiny.reference_sizes(tiny.architecture(kind="encoder"))
    parameters = tiny.numpy_parameters(model)
    reference = spanned(preset)
    expected = predict_masked(reference, parameters, sizes, tokens.numpy(), positions.numpy())
    same(model(tokens, positions), expected)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("preset", ["post_ln", "pre_ln", "realformer", "sas"])
def test_gradients_are_those_of_the_reference(preset: str) -> None:
    """Of every parameter, spans among them, off the kinks of the soft mask."""
    model = drawn(tiny.causal_model(block(preset), activation="gelu"))
    tokens, weight = tiny.words(1, 11), torch.randn(1, 11, tiny.VOCABULARY)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder", activation="gelu"))

    def reference_loss(parameters: Any) -> float:
        logits = predict_next(spanned(preset), parameters, sizes, tokens.numpy())
        return float((logits * weight.numpy()).sum())

    check_slopes(model, (model(tokens) * weight).sum(), reference_loss)
    spans = [p for name, p in model.named_parameters() if name.endswith("span.fraction")]
    moved = torch.autograd.grad((model(tokens) * weight).sum(), spans)
    assert all(bool((gradient.abs() > 1e-9).all()) for gradient in moved)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("carry", ["sum", "mean", "qk_sum"])
def test_spans_never_enter_the_chain(carry: Any) -> None:
    """Every layer has spans of its own, and carried scores are those before the soft mask."""
    model = drawn(tiny.causal_model(block("pre_ln", residual_attention=carry), decoder_depth=3))
    tokens = tiny.words(2, 13)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder", decoder_depth=3))
    parameters = tiny.numpy_parameters(model)
    expected = predict_next(spanned("pre_ln", carry=carry), parameters, sizes, tokens.numpy())
    for form in ("plain", "stored", "reversible", "blocked"):
        with attention_form(form):
            same(model(tokens), expected)
    same(model(tokens), expected)


def test_the_whole_span_is_plain_attention() -> None:
    plain = tiny.randomise(tiny.causal_model("pre_ln"))
    model = tiny.causal_model(block("pre_ln", span={"longest": 13, "start": 1.0}))
    model.load_state_dict(plain.state_dict(), strict=False)
    tokens = tiny.words(2, 13)
    same(model(tokens), plain(tokens))
    shorter = tiny.causal_model(block("pre_ln", span={"longest": 11, "start": 1.0}))
    shorter.load_state_dict(plain.state_dict(), strict=False)
    assert float((shorter(tokens) - plain(tokens)).detach().abs().max()) > 1e-6


def test_the_soft_mask_by_hand() -> None:
    mask = SpanMask(AdaptiveSpan(longest=10, ramp=4.0), 2)
    with torch.no_grad():
        mask.fraction.copy_(torch.tensor([0.0, 0.3])[:, None, None])
    spans = mask(torch.zeros(1, 1, 3))
    found = mask.log_weights(spans, torch.arange(9)[None, None, None]).exp()[0, :, 0]
    same(found[0], [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0])
    same(found[1], [1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    some = mask.log_weights(spans, torch.tensor([[[[0, 5]]]]))
    (gradient,) = torch.autograd.grad(some.sum(), mask.fraction)
    # The slope is S / (R m) up to the ends of the ramp: m is 1 at distance 0 with span 0.
    same(gradient.flatten(), [10.0 / 4.0, 10.0 / (4.0 * 0.5)])


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("span", [0.0, 1.0, 2.5, 6.0])
def test_the_gradient_at_both_ends_of_the_ramp_is_that_of_clamp(span: float, trim: bool) -> None:
    """The authors' code weights exp(s) with `clamp(.., 0, 1)`, whose ends have a gradient."""
    spec = AdaptiveSpan(longest=8, ramp=4.0, trim=trim)
    mask = SpanMask(spec, 1)
    with torch.no_grad():
        mask.fraction.fill_(span / 8)
    scores, values = torch.randn(9), torch.randn(9)
    distance = torch.arange(9)[None, None, None]
    assert mask.window.before >= min(math.floor(span + spec.ramp), spec.longest)
    logits = scores + mask.log_weights(mask(torch.zeros(1, 1, 3)), distance)[0, 0, 0]
    ours = logits.softmax(dim=-1) @ values
    z = mask.fraction.flatten() * 8
    weights = ((4.0 + z - torch.arange(9)) / 4.0).clamp(0, 1) * scores.softmax(dim=-1)
    theirs = weights / weights.sum() @ values
    same(ours, theirs)
    (own,) = torch.autograd.grad(ours, mask.fraction)
    (other,) = torch.autograd.grad(theirs, mask.fraction)
    same(own, other)


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_the_penalty_alone(start: float) -> None:
    """dL/dz' = lambda S / H, undivided by tokens; it drives z' to 0 and not below."""
    mask = SpanMask(AdaptiveSpan(longest=20, penalty=0.03, start=start), 4)
    for normalizer in (1.0, 1000.0):
        term = auxiliary_terms(mask, torch.tensor(normalizer))["span"]
        assert float(term.detach()) == pytest.approx(0.03 * 20 * start)
        (gradient,) = torch.autograd.grad(term, mask.fraction)
        same(gradient.flatten(), [0.03 * 20 / 4] * 4)
    optimizer = build_optimizer(OptimizerConfig(kind="sgd", lr=0.9), mask, fused=False)
    for _ in range(5):
        optimizer.zero_grad()
        auxiliary_terms(mask, torch.tensor(7.0))["span"].backward()
        optimizer.step()
        assert 0.0 <= float(mask.fraction.detach().min()) <= start
    assert float(mask.fraction.detach().max()) == 0.0


def test_spans_that_all_layers_share_are_penalised_once() -> None:
    spans = block("pre_ln", span={"start": 0.5, "penalty": 0.5}, share="all")
    model = tiny.causal_model(spans, decoder_depth=3)
    assert float(auxiliary_terms(model, torch.tensor(9.0))["span"].detach()) == 0.25 * LONGEST


def test_layers_add_their_penalties_and_spans_stay_below_the_longest() -> None:
    model = tiny.causal_model(block("pre_ln", span={"start": 1.0, "penalty": 0.5}))
    assert float(auxiliary_terms(model, torch.tensor(9.0))["span"].detach()) == 2 * 0.5 * LONGEST
    spans = [p for p in model.modules() if isinstance(p, SpanMask)]
    optimizer = build_optimizer(OptimizerConfig(lr=1.0), model, fused=False)
    for span in spans:
        span.fraction.grad = -torch.ones_like(span.fraction)
    optimizer.step()
    assert all(float(span.fraction.detach().max()) == 1.0 for span in spans)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_spans_have_their_own_rate_and_no_decay(kind: str) -> None:
    model = tiny.causal_model(block("pre_ln", span={"lr": 0.25}))
    config = OptimizerConfig(kind=kind, lr=0.5, weight_decay=0.1, momentum=0.9)
    optimizer = build_optimizer(config, model, fused=False)
    spans = {id(p.fraction) for p in model.modules() if isinstance(p, SpanMask)}
    rates = {
        id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
    }
    assert {rates[p] for p in spans} == {(0.25, 0.0)}
    assert {rate for p, (rate, _) in rates.items() if p not in spans} == {0.5}
    assert rates.keys() == {id(p) for p in model.parameters()}
    # Without a rate of their own they are beside the gains.
    plain = parameter_groups(tiny.causal_model(block("pre_ln")), 0.1)
    assert [group["weight_decay"] for group in plain] == [0.1, 0.0]
    assert all("lr" not in group for group in plain)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("preset", ["pre_ln", "v_skipinit"])
@pytest.mark.parametrize("build", [tiny.causal_model, tiny.masked_model])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.13, 1.0])
def test_trimming_changes_no_output(preset: str, build: Any, fraction: float) -> None:
    """Forward and backward; a window that is a token too narrow would."""
    longest = {"longest": 30}
    whole, trimmed = (build(block(preset, span={**longest, "trim": t})) for t in (False, True))
    drawn(whole, 0.0, max(fraction, 1e-3))
    for part in whole.modules():
        if isinstance(part, SpanMask):
            part.fraction.data[0] = fraction
    trimmed.load_state_dict(whole.state_dict())
    tokens = tiny.words(2, 41)
    inputs = (tokens,) if build is tiny.causal_model else (tokens, torch.arange(82))
    windows = []

    def widths(_: Any, args: Any) -> None:
        assert isinstance(args[3], LocalMask)
        windows.append(args[3].mask.keys)

    first = next(p for p in trimmed.modules() if isinstance(p, Attention))
    first.register_forward_pre_hook(widths)
    found = []
    for model in (whole, trimmed):
        logits = model(*inputs)
        weight = torch.linspace(-1.0, 1.0, logits.numel()).view_as(logits)
        found.append([logits, *torch.autograd.grad((logits * weight).sum(), model.parameters())])
    for one, other in zip(*found, strict=True):
        same(one, other)
    assert (windows[0] < 41) == (fraction < 0.5)


def test_a_diverged_span_is_not_trimmed() -> None:
    mask = SpanMask(AdaptiveSpan(longest=10, trim=True), 2)
    with torch.no_grad():
        mask.fraction.fill_(torch.nan)
    assert mask.window.before == 10


def test_attention_depends_on_distance_alone() -> None:
    """What lies before the reach of every head and layer may change, and the text may move."""
    model = drawn(tiny.causal_model(block("pre_ln"), positions="rope", model_dim=12), high=0.2)
    words = tiny.words(1, 12)
    # ceil(1.4 + 3) - 1 = 4 tokens a layer, of two layers.
    short = model(torch.cat([tiny.words(1, 2), words], dim=1))[:, 2 + 8 :]
    same(short, model(torch.cat([tiny.words(1, 9), words], dim=1))[:, 9 + 8 :])


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("preset", "trim"), [("post_ln", False), ("pre_ln", True), ("realformer", False), ("sas", True)]
)
def test_cached_decoding_equals_full_decoding(preset: str, trim: bool) -> None:
    model = drawn(tiny.causal_model(block(preset, span={"trim": trim}))).eval()
    tokens = tiny.words(2, 33)
    full, state = model(tokens), model.start(2)
    for i in range(33):
        logits, state = model.step(tokens[:, i : i + 1], state)
        same(logits, full[:, i])
    assert state.caches[0].room <= max(2 * (LONGEST + 1), LONGEST + 10)


@pytest.mark.parametrize("carry", ["none", "mean"])
def test_probes_see_the_soft_mask_and_spans_in_tokens(carry: Any) -> None:
    """The maps of a probe times the values are the heads of the layer."""
    model = drawn(tiny.causal_model(block("pre_ln", residual_attention=carry)))
    checked = []

    def hook(module: Attention, args: Any, kwargs: Any, output: Any) -> None:
        mask, _, total = scores(module, args, kwargs, output[1])
        maps = softmax_map(total, mask, module.spec.score_divisor)
        same(module.output((maps @ args[2]).transpose(1, 2).flatten(2)), output[0])
        checked.append(maps)

    for _, layer in model.decoder.layers:
        layer.self_attention.register_forward_hook(hook, with_kwargs=True)
    model(tiny.words(2, 19))
    assert len(checked) == 2
    spans = {place: value for place, value in learned_gains(model) if place.quantity == "span"}
    assert len(spans) == 2
    for (_, layer), value in zip(model.decoder.layers, spans.values(), strict=True):
        same(value, LONGEST * layer.self_attention.span.fraction)


def test_spans_survive_a_checkpoint() -> None:
    model, other = (drawn(tiny.causal_model(block("pre_ln"))) for _ in range(2))
    other.load_state_dict(model.state_dict())
    tokens = tiny.words(2, 9)
    assert torch.equal(other(tokens), model(tokens))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"longest": 0}, "adaptive_span longest 0: must be at least 1"),
        ({"ramp": 0.0}, "adaptive_span ramp 0.0:.*0"),
        ({"start": 1.5}, "adaptive_span start 1.5: must be from 0 to 1"),
        ({"penalty": -1.0}, "adaptive_span penalty -1.0"),
        ({"lr": 0.0}, "adaptive_span lr 0.0:.*0"),
    ],
)
def test_numbers_without_meaning_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveSpan(**{"longest": 5, **numbers})


@pytest.mark.parametrize(
    ("preset", "axes", "message"),
    [
        ("sas", {}, "adaptive_span with shaped_attention gamma 1.0:.*null"),
        ("pre_ln", {"shaped_attention": ShapingSpec(gamma=0.0)}, "gamma 0.0:.*null"),
        (
            "pre_ln",
            {"localised_span": LocalisedSpan(query_block=2, memory=3)},
            "adaptive_span with localised_span",
        ),
        ("realformer", {"trim": True}, "trim.*residual_attention.*false"),
        (
            "pre_ln",
            {"trim": True, "residual_attention": "qk_sum"},
            "trim true with residual_attention",
        ),
    ],
)
def test_pairs_without_meaning_are_refused(preset: str, axes: dict[str, Any], message: str) -> None:
    span = AdaptiveSpan(longest=5, trim=axes.pop("trim", False))
    config = BlockConfig(preset=preset, adaptive_span=span, **axes)
    with pytest.raises(ValueError, match=message):
        config.resolve(Stack(depth=2, causal=True))


def test_one_span_serves_a_chain_and_none_a_cross_attention() -> None:
    spec = block("realformer").resolve(Stack(depth=2, causal=True))
    first, last = spec.blocks
    plain = replace(last, self_attention=replace(last.self_attention, adaptive_span=None))
    with pytest.raises(ValueError, match="adaptive_span differs between layers"):
        replace(spec, blocks=(first, plain))
    with pytest.raises(ValueError, match="adaptive_span on cross-attention"):
        replace(first, cross_attention=first.self_attention)
