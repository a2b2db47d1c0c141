"""Dynamic spans: soft masks that depend on the token, against the equations of the paper."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks import windows
from lightning_app.blocks.attention import Attention, ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attention_form, softmax_map
from lightning_app.blocks.spans import (
    AdaptiveSpan,
    Counted,
    DynamicSpanMask,
    SpanMask,
    auxiliary_terms,
)
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.models.optim import OptimizerConfig, build_optimizer
from lightning_app.models.stack import count_tokens_of, stacks
from lightning_app.probes.hooks import ActivationHooks, Place, scores
from lightning_app.probes.probe import dynamic_spans, learned_gains
from tests import tiny
from tests.reference import (
    REFERENCE,
    Reference,
    next_stack,
    predict_masked,
    predict_next,
    run_stack,
    translate,
)
from tests.slopes import check_slopes

pytestmark = [pytest.mark.usefixtures("float64")]

LONGEST, RAMP, PENALTY = 7, 3.0, 0.3
PRESETS = ("post_ln", "pre_ln", "realformer", "v_skipinit", "sas")
each_preset = pytest.mark.parametrize("preset", PRESETS)
NO_CENTRE = ShapingSpec(alpha=1.0, beta=1.0, gamma=None)


@pytest.fixture(autouse=True)
def _small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few tokens are folded."""
    monkeypatch.setattr(windows, "FEWEST", 1)


def block(preset: str, span: dict[str, Any] | None = None, **changes: Any) -> BlockConfig:
    numbers = {"longest": LONGEST, "ramp": RAMP, "dynamic_bias": -1.0, "penalty": PENALTY}
    if preset == "sas":  # its centre would have to move with the spans
        changes["shaped_attention"] = NO_CENTRE
    spec = AdaptiveSpan(**{**numbers, **(span or {})})
    return BlockConfig(preset=preset, adaptive_span=spec, **changes)


def spanned(preset: str, **changes: Any) -> Reference:
    shaped = {"shaped": "identity"} if preset == "sas" else {}
    span = {"adaptive_span": (LONGEST, RAMP), "dynamic_span": True}
    return replace(REFERENCE[preset], **span, **shaped, **changes)


@torch.no_grad()
def drawn(model: nn.Module) -> Any:
    """Draw parameters, and v and b so that spans of tokens differ by more than a token."""
    tiny.randomise(model)
    for part in model.modules():
        if isinstance(part, DynamicSpanMask):
            part.direction.normal_(std=0.5)
            part.bias.uniform_(-1.5, 0.0)
    return model


def same(ours: Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=1e-10, atol=1e-10)


def penalty(model: nn.Module, normalizer: float = 1.0) -> Tensor:
    return auxiliary_terms(model, torch.tensor(normalizer))["span"]


def count_all(model: nn.Module, tokens: Tensor) -> None:
    count_tokens_of(model, {"decoder": torch.ones_like(tokens, dtype=torch.bool)})


@pytest.mark.unchecked_shapes
@each_preset
@pytest.mark.parametrize("length", [5, 19])
def test_the_causal_model_is_the_reference(preset: str, length: int) -> None:
    """Logits and penalty; of texts shorter than a window, and of such that are folded."""
    model, tokens = drawn(tiny.causal_model(block(preset))), tiny.words(2, length)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder"))
    parameters = tiny.numpy_parameters(model)
    stack, x = next_stack(spanned(preset), parameters, sizes, tokens.numpy())
    expected = run_stack(stack, x) @ parameters["embedding.tokens.weight"].T
    count_all(model, tokens)
    same(model(tokens), expected)
    same(penalty(model), PENALTY * sum(spans.mean() for spans in stack.spans))
    assert max(spans.std() for spans in stack.spans) > 0.7


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
def test_masked_words_are_the_reference(preset: str) -> None:
    model = drawn(tiny.masked_model(block(preset)))
    tokens, positions = tiny.words(2, 23), torch.tensor([0, 3, 22, 23, 45])
    sizes = tiny.reference_sizes(tiny.architecture(kind="encoder"))
    parameters = tiny.numpy_parameters(model)
    reference = spanned(preset)
    expected = predict_masked(reference, parameters, sizes, tokens.numpy(), positions.numpy())
    same(model(tokens, positions), expected)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("preset", ["post_ln", "pre_ln", "realformer", "sas"])
def test_gradients_are_those_of_the_reference(preset: str) -> None:
    """Of the logits and of the penalty, by every parameter, v and b among them."""
    model = drawn(tiny.causal_model(block(preset), activation="gelu"))
    tokens, weight = tiny.words(1, 11), torch.randn(1, 11, tiny.VOCABULARY)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder", activation="gelu"))

    def reference_loss(parameters: Any) -> float:
        stack, x = next_stack(spanned(preset), parameters, sizes, tokens.numpy())
        logits = run_stack(stack, x) @ parameters["embedding.tokens.weight"].T
        cost = PENALTY * sum(spans.mean() for spans in stack.spans)
        return float((logits * weight.numpy()).sum() + cost)

    def loss() -> Tensor:
        count_all(model, tokens)
        return (model(tokens) * weight).sum() + penalty(model)

    check_slopes(model, loss(), reference_loss)
    # The logits alone move every entry of v and b.
    spans = [p for name, p in model.named_parameters() if ".span." in name]
    moved = torch.autograd.grad((model(tokens) * weight).sum(), spans)
    assert len(moved) == 4
    assert all(bool((gradient.abs() > 1e-9).all()) for gradient in moved)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("carry", ["sum", "mean", "qk_sum"])
def test_spans_never_enter_the_chain(carry: Any) -> None:
    model = drawn(tiny.causal_model(block("pre_ln", residual_attention=carry), decoder_depth=3))
    tokens = tiny.words(2, 13)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder", decoder_depth=3))
    parameters = tiny.numpy_parameters(model)
    expected = predict_next(spanned("pre_ln", carry=carry), parameters, sizes, tokens.numpy())
    for form in ("plain", "stored", "reversible", "blocked"):
        with attention_form(form):
            same(model(tokens), expected)
    same(model(tokens), expected)


@pytest.mark.unchecked_shapes
@each_preset
def test_without_a_direction_they_are_one_span_for_all_tokens(preset: str) -> None:
    """v = 0, as at the start: the static span of z' = sigmoid(b), and its loss and gradients."""
    bias = -0.8
    dynamic = tiny.causal_model(block(preset, {"dynamic_bias": bias}))
    start = 1.0 / (1.0 + math.exp(-bias))
    static = tiny.causal_model(block(preset, {"dynamic_bias": None, "start": start}))
    static.load_state_dict(dynamic.state_dict(), strict=False)
    tokens, weight = tiny.words(2, 13), torch.randn(2, 13, tiny.VOCABULARY)
    slopes = []
    for model in (dynamic, static):
        count_all(model, tokens)
        loss = (model(tokens) * weight).sum() + penalty(model)
        names = [n for n, _ in model.named_parameters() if not n.endswith("span.direction")]
        parts = [p for n, p in model.named_parameters() if n in names]
        gradients = torch.autograd.grad(loss, parts)
        slopes.append({"loss": loss, **dict(zip(names, gradients, strict=True))})
    ours, theirs = slopes
    for name, value in theirs.items():
        if name.endswith("span.fraction"):
            # dz'/db = sigmoid'(b)
            own = ours[name.replace("fraction", "bias")]
            same(own, value.flatten() * start * (1.0 - start))
        else:
            same(ours[name], value)


def test_the_start_is_that_of_the_paper() -> None:
    model = tiny.causal_model(block("pre_ln", {"longest": 1000, "dynamic_bias": -4.0}))
    spans = masks_of(model)[0](torch.randn(3, 5, tiny.SIZES["model_dim"]))
    assert spans.shape == (3, tiny.NUM_HEADS, 5, 1)
    same(spans, torch.full_like(spans, 1000 * 0.017986209962091555))


def test_spans_are_computed_in_full_precision() -> None:
    """bfloat16 has no numbers between 256 and 258: neither spans nor distances may be rounded."""
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


def masks_of(model: nn.Module) -> list[DynamicSpanMask]:
    return [part for part in model.modules() if isinstance(part, DynamicSpanMask)]


def test_padding_has_no_part_in_the_penalty() -> None:
    """The mean is over real tokens of each stack: a longer padding changes nothing."""
    model = drawn(tiny.translator(block("pre_ln")))
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
    model = drawn(tiny.translator(block("post_ln")))
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
    model, tokens = drawn(tiny.causal_model(block("pre_ln"))), tiny.words(2, 9)
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


def test_the_penalty_alone_shortens_spans() -> None:
    spec = AdaptiveSpan(longest=20, penalty=0.03, dynamic_bias=1.0)
    mask, u = DynamicSpanMask(spec, 4, 2), torch.randn(3, 5, 4)
    optimizer = build_optimizer(OptimizerConfig(kind="sgd", lr=30.0), mask, fused=False)
    means = []
    for _ in range(6):
        mask.count(Counted(torch.ones(3, 5, dtype=torch.bool), torch.tensor(15.0)))
        means.append(float(mask(u).detach().mean()))
        optimizer.zero_grad()
        penalty(mask).backward()
        optimizer.step()
    assert means == sorted(means, reverse=True)
    assert 0.0 < means[-1] < means[0] / 2


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_they_have_their_own_rate_and_no_decay(kind: str) -> None:
    model = tiny.causal_model(block("pre_ln", {"lr": 0.25}))
    config = OptimizerConfig(kind=kind, lr=0.5, weight_decay=0.1)
    optimizer = build_optimizer(config, model, fused=False)
    rates = {
        id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
    }
    own = {id(p) for mask in masks_of(model) for p in mask.parameters()}
    assert len(own) == 4
    assert {rates[p] for p in own} == {(0.25, 0.0)}
    assert {rate for p, (rate, _) in rates.items() if p not in own} == {0.5}
    assert rates.keys() == {id(p) for p in model.parameters()}


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("preset", ["post_ln", "pre_ln", "realformer", "sas"])
def test_cached_decoding_equals_full_decoding(preset: str) -> None:
    model = drawn(tiny.causal_model(block(preset))).eval()
    tokens = tiny.words(2, 33)
    full, state = model(tokens), model.start(2)
    for i in range(33):
        logits, state = model.step(tokens[:, i : i + 1], state)
        same(logits, full[:, i])
    assert state.caches[0].room <= max(2 * (LONGEST + 1), LONGEST + 10)


def test_a_token_moves_the_span_of_its_own_queries_alone() -> None:
    """In the first layer; in the second also those that have seen it, and none before."""
    model = drawn(tiny.causal_model(block("pre_ln"))).eval()
    tokens = tiny.words(1, 12)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] - 4) % 12 + 5
    found = []
    for each in (tokens, changed):
        seen: list[Tensor] = []
        handles = [
            mask.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out))
            for mask in masks_of(model)
        ]
        model(each)
        for handle in handles:
            handle.remove()
        found.append(seen)
    first, second = (a - b for a, b in zip(*found, strict=True))
    assert (first.abs() > 1e-9).any(dim=1).flatten().nonzero().flatten().tolist() == [5]
    assert (second.abs() > 1e-9).any(dim=1).flatten().nonzero().min() == 5


@pytest.mark.parametrize("carry", ["none", "mean"])
def test_probes_see_the_soft_mask_and_spans_in_tokens(carry: Any) -> None:
    """The maps of a probe times the values are the heads of the layer; also of folded texts."""
    model = drawn(tiny.causal_model(block("pre_ln", residual_attention=carry)))
    tokens = tiny.words(2, 19)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[1, 4:] = False
    checked: list[Tensor] = []

    def hook(module: Attention, args: Any, kwargs: Any, output: Any) -> None:
        mask, _, total = scores(module, args, kwargs, output[1])
        maps = softmax_map(total, mask, module.spec.score_divisor)
        same(module.output((maps @ args[2]).transpose(1, 2).flatten(2)), output[0])
        checked.append(kwargs["spans"].squeeze(-1).transpose(1, 2)[real])

    for _, layer in model.decoder.layers:
        layer.self_attention.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad(), ActivationHooks(model) as hooks:
        hooks.expect({"decoder": real})
        model(tokens)
    values = {row.place: row.value for row in hooks.rows(0) if row.quantity == "span"}
    assert len(values) == 2 * (1 + tiny.NUM_HEADS)
    for layer, spans in enumerate(checked, start=1):
        assert values[Place("span", "decoder", layer)] == pytest.approx(float(spans.mean()))
        for head, own in enumerate(spans.mean(dim=0).tolist()):
            assert values[Place("span", "decoder", layer, head)] == pytest.approx(own)
    assert "span" not in {place.quantity for place, _ in learned_gains(model)}


def test_a_shared_block_has_spans_of_each_step() -> None:
    """The penalty is that of the mean over steps: a static span of a shared block counts once."""
    model = drawn(tiny.causal_model(block("pre_ln", share="all"), decoder_depth=3))
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


def test_they_survive_a_checkpoint() -> None:
    model, other = (drawn(tiny.causal_model(block("pre_ln"))) for _ in range(2))
    other.load_state_dict(model.state_dict())
    tokens = tiny.words(2, 9)
    assert torch.equal(other(tokens), model(tokens))


def test_the_number_of_parameters() -> None:
    """H (d + 1) a layer."""
    with_spans, without = (
        sum(p.numel() for p in tiny.causal_model(config).parameters())
        for config in (block("pre_ln"), BlockConfig(preset="pre_ln"))
    )
    assert with_spans - without == 2 * tiny.NUM_HEADS * (tiny.SIZES["model_dim"] + 1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"dynamic_bias": math.inf}, "adaptive_span dynamic_bias inf:"),
        ({"start": 0.5}, "start 0.5 with dynamic_bias -1.0:.*0"),
        ({"trim": True}, "trim.*dynamic_bias -1.0:.*false"),
        ({"ramp": 0.0}, "adaptive_span ramp 0.0:.*0"),
    ],
)
def test_numbers_without_meaning_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block("pre_ln", numbers)


@pytest.mark.parametrize(
    ("preset", "axes", "message"),
    [
        ("sas", {"shaped_attention": ShapingSpec()}, "gamma 1.0:.*null"),
        ("pre_ln", {"localised_span": LocalisedSpan(query_block=2, memory=3)}, "localised_span"),
        ("pre_ln", {"share": "all", "halting": HaltingSpec()}, "halting with adaptive_span"),
    ],
)
def test_pairs_without_meaning_are_refused(preset: str, axes: dict[str, Any], message: str) -> None:
    span = AdaptiveSpan(longest=5, dynamic_bias=-4.0)
    config = BlockConfig(preset=preset, adaptive_span=span, **axes)
    with pytest.raises(ValueError, match=message):
        config.resolve(Stack(depth=2, causal=True))


def test_spans_of_the_reference_by_hand() -> None:
    model, tokens = drawn(tiny.causal_model(block("post_ln"))), tiny.words(1, 6)
    parameters = tiny.numpy_parameters(model)
    sizes = tiny.reference_sizes(tiny.architecture(kind="decoder"))
    stack, x = next_stack(spanned("post_ln"), parameters, sizes, tokens.numpy())
    run_stack(stack, x)
    v = parameters["decoder.blocks.0.self_attention.span.direction"][1]
    b = parameters["decoder.blocks.0.self_attention.span.bias"][1]
    assert stack.spans[0][0, 1, 4] == pytest.approx(LONGEST / (1 + np.exp(-(v @ x[0, 4] + b))))
