"""Adaptive spans, of a head or of each token: soft masks against the equations of the papers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks import spans as masks
from lightning_app.blocks import windows
from lightning_app.blocks.attention import Attention, ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attention_form, softmax_map
from lightning_app.blocks.spans import (
    AdaptiveSpan,
    DynamicSpanMask,
    SoftMask,
    SpanMask,
    auxiliary_terms,
)
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.windows import LocalisedSpan, LocalMask
from lightning_app.models.optim import (
    OptimizerConfig,
    build_optimizer,
)
from lightning_app.models.stack import count_tokens_of, stacks
from lightning_app.probes.hooks import ActivationHooks, Place, scores
from lightning_app.probes.probe import dynamic_spans, learned_gains
from tests import tiny
from tests.reference import REFERENCE, Reference, next_stack, run_stack
from tests.slopes import check_slopes

pytestmark = [pytest.mark.usefixtures("float64")]

LONGEST, RAMP, PENALTY = 7, 3.0, 0.3
PRESETS = ("post_ln", "pre_ln", "realformer", "v_skipinit", "sas")
each_preset = pytest.mark.parametrize("preset", PRESETS)
NO_CENTRE = ShapingSpec(alpha=1.0, beta=1.0, gamma=None)


@pytest.fixture(autouse=True)
def _small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few tokens are folded, and windows trimmed to the token."""
    monkeypatch.setattr(windows, "FEWEST", 1)
    monkeypatch.setattr(masks, "TRIM", 1)


def static(preset: str, span: dict[str, Any] | None = None, **changes: Any) -> BlockConfig:
    if preset == "sas":  # its centre would have to move with the spans
        changes["shaped_attention"] = NO_CENTRE
    numbers = {"longest": LONGEST, "ramp": RAMP, "penalty": PENALTY, **(span or {})}
    return BlockConfig(preset=preset, adaptive_span=AdaptiveSpan(**numbers), **changes)


def dynamic(preset: str, span: dict[str, Any] | None = None, **changes: Any) -> BlockConfig:
    return static(preset, {"dynamic_bias": -1.0, **(span or {})}, **changes)


each_form = pytest.mark.parametrize("block", [static, dynamic])


def spanned(preset: str, block: Any, **changes: Any) -> Reference:
    shaped = {"shaped": "identity"} if preset == "sas" else {}
    span = {"adaptive_span": (LONGEST, RAMP), "dynamic_span": block is dynamic}
    return replace(REFERENCE[preset], **span, **shaped, **changes)


@torch.no_grad()
def drawn(model: nn.Module, low: float = 0.05, high: float = 0.6) -> Any:
    """Draw parameters: spans between `low` and `high` of S, off the kinks of the mask, or v and b
    so that spans of tokens differ by more than a token."""
    tiny.randomise(model)
    for part in model.modules():
        if isinstance(part, SpanMask):
            part.fraction.uniform_(low, high)
        if isinstance(part, DynamicSpanMask):
            part.direction.normal_(std=0.5)
            part.bias.uniform_(-1.5, 0.0)
    return model


def same(ours: Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=1e-10, atol=1e-10)


def masks_of(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, SoftMask)]


def penalty(model: nn.Module, normalizer: float = 1.0) -> Tensor:
    return auxiliary_terms(model, torch.tensor(normalizer))["span"]


def count_all(model: nn.Module, tokens: Tensor) -> None:
    count_tokens_of(model, {"decoder": torch.ones_like(tokens, dtype=torch.bool)})


@each_form
@each_preset
@pytest.mark.parametrize("length", [5, 19])
def test_the_causal_model_is_the_reference(block: Any, preset: str, length: int) -> None:
    """Logits and penalty; of texts shorter than a window, and of such that are folded."""
    model, tokens = drawn(tiny.causal_model(block(preset))), tiny.words(2, length)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder"))
    parameters = tiny.numpy_parameters(model)
    stack, x = next_stack(spanned(preset, block), parameters, sizes, tokens.numpy())
    expected = run_stack(stack, x) @ parameters["embedding.tokens.weight"].T
    count_all(model, tokens)
    same(model(tokens), expected)
    same(penalty(model), PENALTY * sum(spans.mean() for spans in stack.spans))
    if block is dynamic:
        assert max(spans.std() for spans in stack.spans) > 0.7


@each_form
@each_preset
@pytest.mark.parametrize("width", [0, 12])
def test_translation_is_the_reference(block: Any, preset: str, width: int) -> None:
    """An encoder looks at both sides; its padded queries may see nothing near them."""
    model = drawn(tiny.translator(block(preset)))
    source, target = tiny.sentences()
    source = torch.nn.functional.pad(source, (0, width))
    expected = tiny.predicted(spanned(preset, block), model, source, target)
    real = target != tiny.PAD
    logits = model(source, target)
    same(logits[real], expected.logits[real.numpy()])
    logits[real].sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("preset", ["post_ln", "v_skipinit"])
@pytest.mark.parametrize(
    ("block", "span"), [(static, {"trim": False}), (static, {"trim": True}), (dynamic, {})]
)
def test_masked_words_are_the_reference(block: Any, preset: str, span: dict[str, Any]) -> None:
    model = drawn(tiny.masked_model(block(preset, span)), high=0.2)
    tokens, positions = tiny.words(2, 23), torch.tensor([0, 3, 22, 23, 45])
    expected = tiny.predicted(spanned(preset, block), model, tokens, positions)
    same(model(tokens, positions), expected)


@each_form
@pytest.mark.parametrize("preset", ["post_ln", "pre_ln", "realformer", "sas"])
def test_gradients_are_those_of_the_reference(block: Any, preset: str) -> None:
    """Of the logits and of the penalty, by every parameter, those of the spans among them."""
    model = drawn(tiny.causal_model(block(preset), activation="gelu"))
    tokens, weight = tiny.words(1, 11), torch.randn(1, 11, tiny.VOCABULARY)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder", activation="gelu"))

    def reference_loss(parameters: Any) -> float:
        stack, x = next_stack(spanned(preset, block), parameters, sizes, tokens.numpy())
        logits = run_stack(stack, x) @ parameters["embedding.tokens.weight"].T
        cost = PENALTY * sum(spans.mean() for spans in stack.spans)
        return float((logits * weight.numpy()).sum() + cost)

    def loss() -> Tensor:
        count_all(model, tokens)
        return (model(tokens) * weight).sum() + penalty(model)

    check_slopes(model, loss(), reference_loss)
    # The logits alone move every entry of them.
    spans = [p for name, p in model.named_parameters() if ".span." in name]
    moved = torch.autograd.grad((model(tokens) * weight).sum(), spans)
    assert len(moved) == (4 if block is dynamic else 2)
    assert all(bool((gradient.abs() > 1e-9).all()) for gradient in moved)


@each_form
@pytest.mark.parametrize("carry", ["sum", "mean", "qk_sum"])
def test_spans_never_enter_the_chain(block: Any, carry: Any) -> None:
    """Every layer has spans of its own, and carried scores are those before the soft mask."""
    model = drawn(tiny.causal_model(block("pre_ln", residual_attention=carry), decoder_depth=3))
    tokens = tiny.words(2, 13)
    expected = tiny.predicted(spanned("pre_ln", block, carry=carry), model, tokens, decoder_depth=3)
    for form in ("plain", "stored", "reversible", "blocked"):
        with attention_form(form):
            same(model(tokens), expected)
    same(model(tokens), expected)


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("span", [0.0, 1.0, 2.5, 6.0])
def test_the_gradient_at_both_ends_of_the_ramp_is_that_of_clamp(span: float, trim: bool) -> None:
    """The authors' code weights exp(s) with `clamp(.., 0, 1)`, whose ends had a gradient of 1
    before torch 2.15."""
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
    ramp = (4.0 + z - torch.arange(9)) / 4.0
    weights = torch.where((ramp < 0) | (ramp > 1), ramp.detach().clamp(0, 1), ramp)
    weights = weights * scores.softmax(dim=-1)
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
    spans = static("pre_ln", {"start": 0.5, "penalty": 0.5}, share="all")
    model = tiny.causal_model(spans, decoder_depth=3)
    assert float(auxiliary_terms(model, torch.tensor(9.0))["span"].detach()) == 0.25 * LONGEST


@pytest.mark.parametrize("preset", ["pre_ln", "v_skipinit"])
@pytest.mark.parametrize("build", [tiny.causal_model, tiny.masked_model])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.13, 1.0])
def test_trimming_changes_no_output(preset: str, build: Any, fraction: float) -> None:
    """Forward and backward; a window that is a token too narrow would."""
    longest = {"longest": 30}
    whole, trimmed = (build(static(preset, {**longest, "trim": t})) for t in (False, True))
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

    next(p for p in trimmed.modules() if isinstance(p, Attention)).register_forward_pre_hook(widths)
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


@each_form
@pytest.mark.parametrize(
    ("preset", "trim"), [("post_ln", False), ("pre_ln", True), ("realformer", False), ("sas", True)]
)
def test_cached_decoding_equals_full_decoding(block: Any, preset: str, trim: bool) -> None:
    model = drawn(tiny.causal_model(block(preset, {"trim": trim and block is static}))).eval()
    tokens = tiny.words(2, 33)
    full, state = model(tokens), model.start(2)
    for i in range(33):
        logits, state = model.step(tokens[:, i : i + 1], state)
        same(logits, full[:, i])
    assert state.caches[0].room <= max(2 * (LONGEST + 1), LONGEST + 10)


def watched(model: Any) -> list[Tensor]:
    """The spans of each layer; the maps of a probe times the values are its heads."""
    seen: list[Tensor] = []

    def hook(module: Attention, args: Any, kwargs: Any, output: Any) -> None:
        mask, _, total = scores(module, args, kwargs, output[1])
        maps = softmax_map(total, mask, module.spec.score_divisor)
        same(module.output((maps @ args[2]).transpose(1, 2).flatten(2)), output[0])
        seen.append(kwargs.get("spans"))

    for _, layer in model.decoder.layers:
        layer.self_attention.register_forward_hook(hook, with_kwargs=True)
    return seen


@pytest.mark.parametrize("carry", ["none", "mean"])
def test_probes_see_the_soft_mask_and_the_spans_of_tokens(carry: Any) -> None:
    """Also of folded texts, without those of padding."""
    model = drawn(tiny.causal_model(dynamic("pre_ln", residual_attention=carry)))
    seen, tokens = watched(model), tiny.words(2, 19)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[1, 4:] = False
    with torch.no_grad(), ActivationHooks(model) as hooks:
        hooks.expect({"decoder": real})
        model(tokens)
    values = {row.place: row.value for row in hooks.rows(0) if row.quantity == "span"}
    assert len(values) == 2 * (1 + tiny.NUM_HEADS)
    for layer, spans in enumerate(seen, start=1):
        found = spans.squeeze(-1).transpose(1, 2)[real]
        assert values[Place("span", "decoder", layer)] == pytest.approx(float(found.mean()))
        for head, own in enumerate(found.mean(dim=0).tolist()):
            assert values[Place("span", "decoder", layer, head)] == pytest.approx(own)
    assert "span" not in {place.quantity for place, _ in learned_gains(model)}
    model = drawn(tiny.causal_model(static("pre_ln", residual_attention=carry)))
    seen = watched(model)
    model(tiny.words(2, 19))
    static_spans = [value for place, value in learned_gains(model) if place.quantity == "span"]
    assert len(seen) == len(static_spans) == 2
    for (_, layer), value in zip(model.decoder.layers, static_spans, strict=True):
        same(value, LONGEST * layer.self_attention.span.fraction)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"longest": 0}, "adaptive_span longest 0: must be at least 1"),
        ({"ramp": 0.0}, "adaptive_span ramp 0.0:.*0"),
        ({"start": 1.5}, "adaptive_span start 1.5: must be from 0 to 1"),
        ({"penalty": -1.0}, "adaptive_span penalty -1.0"),
        ({"lr": 0.0}, "adaptive_span lr 0.0:.*0"),
        ({"dynamic_bias": math.inf}, "adaptive_span dynamic_bias inf:"),
        ({"dynamic_bias": -1.0, "start": 0.5}, "start 0.5 with dynamic_bias -1.0:.*0"),
        ({"dynamic_bias": -1.0, "trim": True}, "trim.*dynamic_bias -1.0:.*false"),
    ],
)
def test_numbers_without_meaning_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveSpan(**{"longest": 5, **numbers})


LOCALISED = {"localised_span": LocalisedSpan(query_block=2, memory=3)}


@pytest.mark.parametrize(
    ("preset", "span", "axes", "message"),
    [
        ("pre_ln", {}, {"shaped_attention": ShapingSpec(gamma=0.0)}, "gamma 0.0:.*null"),
        ("pre_ln", {}, LOCALISED, "adaptive_span with localised_span"),
        ("realformer", {"trim": True}, {}, "trim.*residual_attention.*false"),
        ("pre_ln", {"trim": True}, {"residual_attention": "qk_sum"}, "trim true with residual_att"),
    ],
)
def test_pairs_without_meaning_are_refused(preset: str, span: Any, axes: Any, message: str) -> None:
    config = BlockConfig(preset=preset, adaptive_span=AdaptiveSpan(longest=5, **span), **axes)
    with pytest.raises(ValueError, match=message):
        config.resolve(Stack(depth=2, causal=True))


def test_one_span_serves_a_chain_and_none_a_cross_attention() -> None:
    spec = static("realformer").resolve(Stack(depth=2, causal=True))
    first, last = spec.blocks
    plain = replace(last, self_attention=replace(last.self_attention, adaptive_span=None))
    with pytest.raises(ValueError, match="adaptive_span differs between layers"):
        replace(spec, blocks=(first, plain))
    with pytest.raises(ValueError, match="adaptive_span on cross-attention"):
        replace(first, cross_attention=first.self_attention)


def test_the_start_is_that_of_the_paper_and_spans_are_in_full_precision() -> None:
    """bfloat16 has no numbers between 256 and 258: neither spans nor distances may be rounded."""
    model = tiny.causal_model(dynamic("pre_ln", {"longest": 1000, "dynamic_bias": -4.0}))
    started = masks_of(model)[0](torch.randn(3, 5, tiny.SIZES["model_dim"]))
    assert started.shape == (3, tiny.NUM_HEADS, 5, 1)
    same(started, torch.full_like(started, 1000 * 0.017986209962091555))
    u = torch.randn(2, 3, 10, dtype=torch.bfloat16)
    for numbers in ({"dynamic_bias": 0.3}, {"dynamic_bias": None, "start": 0.5}):
        spec = AdaptiveSpan(**{"longest": 1001, "ramp": 32.0, **numbers})
        mask = SpanMask(spec, 2) if spec.dynamic_bias is None else DynamicSpanMask(spec, 10, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            spans = mask.bfloat16()(u)
        assert spans.dtype == torch.float32
        span = float(spans.detach().flatten()[0])
        distance = torch.arange(round(span) + 1, round(span) + 31)
        weights = mask.log_weights(spans[:1, :, :1], distance[None, None, None])[0, 0, 0]
        expected = ((32.0 + span - distance.double()) / 32.0).log()
        torch.testing.assert_close(weights.detach().double(), expected, rtol=1e-3, atol=1e-4)


def test_padding_has_no_part_in_the_penalty() -> None:
    """The mean is over real tokens of each stack: a longer padding changes nothing."""
    model = drawn(tiny.translator(dynamic("pre_ln")))
    source, target = tiny.sentences()
    found = []
    for width in (0, 5):
        wide = [torch.nn.functional.pad(text, (0, width)) for text in (source, target)]
        count_tokens_of(model, model.present(*wide))
        model(*wide)
        found.append(penalty(model))
    same(found[0], found[1])
    # By hand: the first layer of the encoder.
    first = masks_of(model.encoder)[0]
    u = model.encoder.blocks[0].around_self.enter(model.embedding(source))
    real = source != tiny.PAD
    by_hand = first(u).squeeze(-1).transpose(1, 2)[real].mean(dim=0)
    place, spans = next(iter(dynamic_spans(model, lambda sums: sums)))
    assert place == Place("span", "encoder", 1)
    same(spans.flatten(), by_hand)


def test_shares_of_ranks_have_the_penalty_of_the_whole() -> None:
    """Gradients of ranks are averaged, so each divides its sum by tokens / ranks."""
    model = drawn(tiny.translator(dynamic("post_ln")))
    source, target = tiny.sentences()
    parameters = [p for span in masks_of(model) for p in span.parameters()]

    def cost(rows: list[int], ranks: int) -> tuple[list[Tensor], Tensor]:
        texts = source[rows], target[rows]
        numbers = iter([(source != tiny.PAD).sum(), (target != tiny.PAD).sum()])
        count_tokens_of(model, model.present(*texts), lambda _: next(numbers) / ranks)
        model(*texts)
        term = penalty(model, normalizer=977.0)  # a penalty is not divided by tokens again
        return [term.detach(), *torch.autograd.grad(term, parameters)], term

    whole, _ = cost([0, 1, 2], 1)
    parts = [cost(rows, 2)[0] for rows in ([0, 2], [1])]
    for one, *others in zip(whole, *parts, strict=True):
        same(sum(others) / 2, one)  # pyright: ignore[reportArgumentType]


def test_the_penalty_is_there_once_for_each_pass() -> None:
    model, tokens = drawn(tiny.causal_model(dynamic("pre_ln"))), tiny.words(2, 9)
    with pytest.raises(AssertionError, match="set before the"):
        penalty(model)
    count_all(model, tokens)
    with pytest.raises(AssertionError, match="its penalty once"):
        penalty(model)
    model(tokens)
    model.eval()
    model(tokens[:, :4])  # an evaluation in between
    model.train()
    first = penalty(model)
    with pytest.raises(AssertionError, match="set before the"):
        penalty(model)
    model(tokens)  # nobody asks for the penalty of this pass
    count_all(model, tokens)
    model(tokens)
    same(penalty(model), first)


def test_a_shared_block_has_spans_of_each_step() -> None:
    """The penalty is that of the mean over steps: a static span of a shared block counts once."""
    model = drawn(tiny.causal_model(dynamic("pre_ln", share="all"), decoder_depth=3))
    tokens = tiny.words(2, 9)
    (mask,) = masks_of(model)
    assert stacks(model)["decoder"].dynamic_spans == [mask]
    seen: list[Tensor] = []
    mask.register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
    count_all(model, tokens)
    model(tokens)
    term = penalty(model).detach()
    logged = dict(dynamic_spans(model, lambda sums: sums))
    assert len(seen) == len(logged) == 3
    for layer, spans in enumerate(seen, start=1):
        same(logged[Place("span", "decoder", layer)].flatten(), spans.mean(dim=(0, 2, 3)))
    same(term, PENALTY * torch.stack(seen).mean())
    assert len({float(spans.mean()) for spans in seen}) == 3
