"""Localised spans: blocks of queries in the batch against the equation with a map of all cells."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks import windows
from lightning_app.blocks.attention import Attention
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attention_form, softmax_map
from lightning_app.blocks.masks import Mask, causal_mask, full_mask, padding_mask
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.windows import LocalisedSpan, LocalMask, Window, WindowMasks
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.positions import EmbeddingSpec
from lightning_app.probes.hooks import ActivationHooks, scores
from lightning_app.testing import check_cached_text
from tests import tiny
from tests.models.test_adaptive_span import same

pytestmark = [pytest.mark.usefixtures("float64")]

PRESETS = ("post_ln", "pre_ln", "realformer", "sas", "v_skipinit")
each_preset = pytest.mark.parametrize("preset", PRESETS)


@pytest.fixture(autouse=True)
def _small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "FEWEST", 1)


def block(preset: str, span: tuple[int, int], **axes: Any) -> BlockConfig:
    limits = LocalisedSpan(query_block=span[0], memory=span[1])
    return BlockConfig(preset=preset, localised_span=limits, **axes)


def folded(model: nn.Module, call: Any) -> int:
    """Return how many attentions of a call computed with folded texts."""
    found = []

    def hook(_: Any, args: Any) -> None:
        if isinstance(args[3], LocalMask):
            found.append(args[3].mask.keys < args[0].shape[2])

    parts = [part for name, part in model.named_modules() if name.endswith("self_attention")]
    handles = [part.register_forward_pre_hook(hook) for part in parts]
    call()
    for handle in handles:
        handle.remove()
    return sum(found)


@each_preset
@pytest.mark.parametrize("span", [(1, 3), (3, 4)], ids=str)
def test_masked_words_are_folded(monkeypatch, preset: str, span: tuple[int, int]) -> None:
    model, tokens = tiny.randomise(tiny.masked_model(block(preset, span))), tiny.words(2, 13)
    positions = torch.tensor([0, 3, 12, 13, 25])
    found = (
        model.embedding.logits(model.states_of_heads(tokens, positions).predicted)
        + model.output_bias
    )
    monkeypatch.setattr(windows, "FEWEST", 99)  # one map of all cells
    same(found, model(tokens, positions))


@pytest.mark.parametrize("carry", ["sum", "mean", "qk_sum"])
@pytest.mark.parametrize("form", ["plain", "stored", "reversible", "blocked"])
@pytest.mark.parametrize("preset", ["pre_ln", "sas"])
def test_a_chain_folds_in_every_form(preset: str, form: Any, carry: Any) -> None:
    """The fold against one map of all cells, forward and backward."""
    config = block(preset, (2, 3), residual_attention=carry)
    model = tiny.randomise(tiny.causal_model(config, decoder_depth=3))
    tokens = tiny.words(2, 13)

    def run() -> list[Tensor]:
        logits = model(tokens)
        weight = torch.linspace(-1.0, 1.0, logits.numel()).view_as(logits)
        return [logits, *torch.autograd.grad((logits * weight).sum(), list(model.parameters()))]

    with attention_form(form):
        assert folded(model, lambda: model(tokens)) == 3
        ours = run()
    with pytest.MonkeyPatch.context() as patch, attention_form("plain"):
        patch.setattr(windows, "FEWEST", 99)
        assert folded(model, lambda: model(tokens)) == 0
        whole = run()
    for one, other in zip(ours, whole, strict=True):
        same(one, other)


@pytest.mark.parametrize("preset", ["post_ln", "pre_ln", "realformer", "sas"])
@pytest.mark.parametrize(
    ("span", "positions"), [((1, 3), "sinusoidal"), ((3, 4), "rope"), ((4, 1), "learned")]
)
def test_cached_decoding_equals_full_decoding(preset, span, positions: str) -> None:
    sizes = {"positions": positions, "model_dim": 12}
    model = tiny.randomise(tiny.causal_model(block(preset, span), **sizes)).eval()
    tokens = tiny.words(2, 29)
    full, state = model(tokens), model.start(2)
    for i in range(29):
        logits, state = model.step(tokens[:, i : i + 1], state)
        same(logits, full[:, i])
    # Keys that no later query sees are dropped whenever the caches are full.
    assert state.caches[0].room <= max(2 * sum(span), sum(span) + 9)


def test_beams_keep_their_windows() -> None:
    """Beams that are reordered write slots in another order than that of their positions."""
    model = tiny.randomise(tiny.causal_model(block("pre_ln", (2, 3)))).eval()
    tokens = tiny.words(1, 2, 24)
    state, prefixes = model.start(1, beams=2), torch.empty(2, 0, dtype=torch.long)
    for i in range(24):
        order = torch.tensor([[1, 0]] if i % 3 else [[0, 0]])
        state, prefixes = state.reorder(order), prefixes[order[0]]
        prefixes = torch.cat([prefixes, tokens[0, :, i : i + 1]], dim=1)
        logits, state = model.step(tokens[:, :, i], state)
        same(logits, model(prefixes)[:, -1])


@pytest.mark.parametrize("kind", ["causal", "full", "padding", "causal and padding", "any"])
@pytest.mark.parametrize("window", [(1, 3, 0), (2, 3, 0), (1, 2, 4), (3, 0, 5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_folded_mask_is_whole(kind: str, window: tuple[int, int, int], biased: bool) -> None:
    """Any mask: its cells in the fold are those of the whole map, and no cell is lost."""
    present = torch.arange(14) < torch.tensor([[14], [5], [9]])
    mask = {
        "causal": causal_mask(14, present.device),
        "full": full_mask(14, present.device),
        "padding": padding_mask(present),
        "causal and padding": Mask(14, present.device, seen=present[:, None, None], causal=True),
        "any": Mask(14, present.device, seen=torch.rand(3, 1, 14, 14) < 0.5),
    }[kind]
    if biased:
        mask = mask.with_score_bias(torch.randn(1, 2, 14, 14))
    length, before, after = window
    seen = Window(block=length, before=before, after=after)
    local = WindowMasks(mask, 3, None).within(seen)
    assert isinstance(local, LocalMask)
    assert local.mask.keys < 14
    ones = torch.ones(local.mask.allowed.shape)
    cells = local.whole_map(ones.masked_fill(~local.mask.allowed, 0.0))
    same(cells, (local.whole.allowed * 1.0).expand(cells.shape))
    for i in range(14):
        start = i // length * length
        for j in range(14):
            near = start - before <= j < start + length + after
            expected = near & mask.allowed.expand(3, 1, 14, 14)[:, 0, i, j]
            assert torch.equal(local.whole.allowed[:, 0, i, j].expand(3), expected.expand(3))
    if biased:
        assert local.mask.score_bias is not None
        bias = local.mask.score_bias.masked_fill(~local.mask.allowed, 0.0)
        whole = mask.score_bias.expand(3, 2, 14, 14).masked_fill(~local.whole.allowed, 0.0)  # pyright: ignore[reportOptionalMemberAccess]
        same(local.whole_map(bias), whole)


@pytest.mark.parametrize(
    "axes",
    [
        *({"residual_attention": carry} for carry in ("none", "mean", "qk_sum")),
        *({"residual_attention": carry, "sink": "learned"} for carry in ("mean", "qk_sum")),
        {"score_cap": 0.6, "sink": "zero"},
    ],
)
def test_probes_see_whole_maps(axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measured quantity and every map, in the fold and without it."""
    model = tiny.randomise(tiny.causal_model(block("pre_ln", (2, 3), **axes)))
    tokens = tiny.words(2, 13)
    maps: list[list[Tensor]] = []
    tables = []
    for fewest in (1, 99):
        monkeypatch.setattr(windows, "FEWEST", fewest)
        seen: list[Tensor] = []

        def hook(
            module: Attention, args: Any, kwargs: Any, output: Any, seen: list[Tensor] = seen
        ) -> None:
            mask, _, total = scores(module, args, kwargs, output[1])
            seen.append(softmax_map(total, mask, module.spec.score_divisor))

        handles = [
            b.self_attention.register_forward_hook(hook, with_kwargs=True)
            for _, b in model.decoder.layers
        ]
        with torch.no_grad(), ActivationHooks(model) as hooks:
            hooks.expect(model.present(tokens))
            model(tokens)
        for handle in handles:
            handle.remove()
        maps.append(seen)
        tables.append(hooks.rows(0))
    for folded_map, whole in zip(*maps, strict=True):
        same(folded_map, whole)
    for ours, theirs in zip(*tables, strict=True):
        assert ours[:-1] == theirs[:-1]
        assert ours.value == pytest.approx(theirs.value, abs=1e-9)


def test_one_window_serves_a_chain_and_none_a_cross_attention() -> None:
    spec = tiny.specification(block("realformer", (2, 3)), Stack(depth=2, causal=True))
    first, last = spec.blocks
    for span in (LocalisedSpan(query_block=2, memory=4), None):
        other = replace(last, self_attention=replace(last.self_attention, localised_span=span))
        with pytest.raises(ValueError, match="localised_span differs between layers"):
            replace(spec, blocks=(first, other))
    with pytest.raises(ValueError, match="localised_span on cross-attention"):
        replace(first, cross_attention=first.self_attention)


def test_layers_may_have_windows_of_their_own() -> None:
    """Each has the mask of its window; cached decoding keeps what the widest one sees."""
    plain = tiny.causal_model(block("pre_ln", (2, 3)))
    last = plain.decoder.spec.blocks[1]
    for limits in (LocalisedSpan(query_block=1, memory=9), None):
        wide = replace(last, self_attention=replace(last.self_attention, localised_span=limits))
        spec = replace(plain.decoder.spec, blocks=(plain.decoder.spec.blocks[0], wide))
        architecture = tiny.architecture(kind="decoder")
        embedding = EmbeddingSpec(
            vocab_size=tiny.VOCABULARY, pad=tiny.PAD, positions=architecture.order()
        )
        model = CausalLanguageModel(spec, architecture.sizes(), embedding)
        tiny.randomise(model).eval()
        check_cached_text(model, tiny.words(1, 31))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"query_block": 0, "memory": 3}, "localised_span query_block 0: must be at least 1"),
        ({"query_block": 2, "memory": -1}, "localised_span memory -1: must be at least 0"),
    ],
)
def test_a_window_has_numbers_that_make_sense(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalisedSpan(**numbers)
