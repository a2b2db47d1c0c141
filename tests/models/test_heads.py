"""The architecture's numbers, and what only one kind of model does."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_app.blocks.attention import Carry, CosineScale
from lightning_app.blocks.block import Carries
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import QueryKeySums
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.streams import Stream
from lightning_app.models.heads import EncoderDecoder
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.testing import check_cached_text, check_cached_translation
from tests import tiny


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_dim": 0}, "model_dim 0"),
        ({"ff_dim": 0}, "ff_dim 0"),
        ({"num_heads": 0}, "num_heads 0"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"dropout": -0.1}, "dropout -0.1"),
        ({"dropout": float("nan")}, "dropout nan"),
        ({"attention_dropout": 1.5}, "attention_dropout 1.5"),
        ({"model_dim": 15, "num_heads": 5}, "model_dim 15"),
        ({"max_positions": 0}, "max_positions 0"),
        ({"num_heads": 3}, "model_dim 10 .*num_heads 3"),
        ({"positions": "rope"}, "positions rope: model_dim / num_heads is 5"),
        *(
            ({"logit_cap": cap}, f"logit_cap {cap}: must be a number above 0")
            for cap in (0.0, -1.0, math.inf, math.nan)
        ),
    ],
)
def test_impossible_number_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.translator("pre_ln", **changes)


def test_only_sinusoids_need_an_even_width() -> None:
    model = tiny.translator("pre_ln", positions="learned", model_dim=15, num_heads=5)
    assert model(*tiny.sentences()).shape == (3, 11, tiny.VOCABULARY)


def test_stacks_know_each_other_and_a_decoder_needs_blocks() -> None:
    with pytest.raises(ValueError, match="decoder_depth 0"):
        tiny.architecture(decoder_depth=0).stacks(BlockConfig())
    stacks = tiny.architecture(kind="encoder", decoder_depth=0).stacks(BlockConfig())
    assert list(stacks) == ["encoder"]
    # RealFormer's mean needs two stacks; the decoder's depth of an encoder alone is not read.
    both = tiny.architecture().stacks(BlockConfig(preset="realformer"))
    assert [len(both[side].blocks) for side in ("encoder", "decoder")] == [3, 2]
    assert both["encoder"].blocks[2].self_attention.score_divisor == 3.0
    alone = tiny.architecture(kind="encoder").stacks(BlockConfig(preset="realformer"))
    assert alone["encoder"].blocks[2].self_attention.score_divisor == 1.0


@pytest.mark.parametrize(
    ("kind", "block", "message"),
    [
        ("encoder_decoder", BlockConfig(), "embedding_norm layer_norm:"),
        ("encoder", BlockConfig(preset="peri_ln"), "embedding_norm layer_norm:"),
        ("encoder", BlockConfig(preset="t_fixup"), "embedding_norm layer_norm: .* start smaller"),
    ],
)
def test_a_norm_of_the_embedding_is_refused_where_it_has_no_meaning(kind, block, message) -> None:
    tiny.architecture(kind=kind).stacks(block)
    with pytest.raises(ValueError, match=message):
        tiny.architecture(kind=kind, embedding_norm="layer_norm").stacks(block)


@pytest.mark.parametrize(
    "preset", sorted(PRESETS.keys() - {"peri_ln", "speedrun", "t_fixup", "ngpt"})
)
def test_other_presets_take_a_norm_of_the_embedding(preset: str) -> None:
    model = tiny.masked_model(preset, embedding_norm="layer_norm")
    assert isinstance(model.embedding.norm, nn.LayerNorm)
    bare = BlockConfig(preset="peri_ln", norm_placement="post")  # drops Peri-LN's own
    assert tiny.architecture(kind="encoder", embedding_norm="layer_norm").stacks(bare)


@pytest.mark.parametrize("preset", PRESETS)
def test_last_block_of_predicted_tokens_is_the_whole_block(float64: None, preset: str) -> None:
    """`states` and `forward` give the same logits and gradients of all parameters."""
    model = tiny.randomise(tiny.masked_model(preset))
    tokens, positions = tiny.words(3, 7), torch.tensor([2, 3, 13, 20])
    whole = model(tokens, positions)
    found = (
        model.embedding.logits(model.states_of_heads(tokens, positions).predicted)
        + model.output_bias
    )
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    upstream, parameters = torch.randn_like(whole), list(model.parameters())
    slopes = [torch.autograd.grad(x, parameters, upstream) for x in (found, whole)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)
    assert model.states_of_heads(tokens, positions[:0]).predicted.shape == (
        0,
        model.embedding.model_dim,
    )


def check_beams(model: EncoderDecoder, steps: int, leaving: Sequence[int] = ()) -> Any:
    """Compare each step of three beams, reordered after it, with full passes; return the state."""
    source, beams = tiny.sentences()[0], 3
    prefixes = tiny.words(len(source), beams, 1)
    state = model.start(source, beams)
    for step in range(steps):
        logits, state = model.step(prefixes[:, :, -1], state)
        whole = model(source.repeat_interleave(beams, 0), prefixes.flatten(0, 1))[:, -1]
        torch.testing.assert_close(logits, whole, rtol=1e-10, atol=1e-10)
        origin = torch.randint(beams, (len(source), beams))
        state = state.reorder(origin)
        prefixes = prefixes.gather(1, origin[:, :, None].expand_as(prefixes))
        prefixes = torch.cat([prefixes, tiny.words(len(source), beams, 1)], dim=2)
        if step in leaving:
            rows = torch.tensor([2, 0, 0])
            source, prefixes, state = source[rows], prefixes[rows], state.select(rows)
    return state


@pytest.mark.in_turn(24)
@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
@pytest.mark.parametrize(
    ("preset", "carry"),
    [
        *((preset, None) for preset in PRESETS),
        *(("sas", "sum"), ("pre_ln", "mean"), ("qk_norm", "qk_sum")),
    ],
)
@torch.no_grad()
def test_beams_that_share_a_cache_go_on_from_their_own_prefixes(
    float64: None, preset: str, carry: Any, positions: Any
) -> None:
    """At each of 30 steps beams end and others split; slots of a cache are used again."""
    block = BlockConfig(preset=preset, residual_attention=carry)
    model = tiny.randomise(tiny.translator(block, positions=positions, model_dim=12)).eval()
    state = check_beams(model, 30, leaving=(0, 11))
    for cache in state.caches:
        assert cache.filled < 0.7 * 3 * 30


@torch.no_grad()
def test_a_step_copies_no_cache_but_to_make_room() -> None:
    """60 greedy steps: each token has its slot once, and the caches move at few of the steps."""
    model = tiny.translator("pre_ln").eval()
    state = model.start(tiny.sentences()[0])
    moved, storage = 0, None
    for step in range(60):
        _, state = model.step(tiny.words(3, 1), state)
        keys = state.caches[0].keys
        assert keys is not None
        moved += keys.data_ptr() != storage
        storage = keys.data_ptr()
        assert state.caches[0].filled == step + 1
    assert moved <= 6


def test_a_state_may_lose_sentences_before_the_first_step(float64: None) -> None:
    model = tiny.randomise(tiny.translator("pre_ln")).eval()
    source, target = tiny.sentences()
    rows = torch.tensor([2, 0])
    logits, _ = model.step(target[rows, :1], model.start(source).select(rows))
    torch.testing.assert_close(logits, model(source, target)[rows, 0])


def carried_types(carry: Carry | None) -> list[torch.dtype]:
    if carry is None:
        return []
    return [part.dtype for part in (carry if isinstance(carry, QueryKeySums) else [carry.scores])]


@pytest.mark.in_turn(18)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(
    "block",
    [
        *(pytest.param(BlockConfig(preset=name), id=name) for name in PRESETS),
        pytest.param(BlockConfig(residual_attention="sum"), id="sum"),
        pytest.param(BlockConfig(residual_attention="qk_sum"), id="qk_sum"),
        pytest.param(BlockConfig(sink="zero"), id="zero sink"),
        pytest.param(BlockConfig(preset="realformer", sink="learned"), id="learned sink"),
        pytest.param(BlockConfig(score_cap=0.5), id="cap"),
        pytest.param(BlockConfig(scores="cosine", sink="learned"), id="cosine"),
    ],
)
def test_bfloat16_stays_near_and_carries_float32(block: BlockConfig, rotary: bool) -> None:
    model = tiny.translator(block, **{"positions": "rope", "model_dim": 12} if rotary else {})
    for part in model.modules():
        if isinstance(part, CosineScale):  # a factor of 10 multiplies what rounding changes
            nn.init.zeros_(part.log_scale)
    source, target = tiny.sentences()
    exact = model(source, target)
    carried: list[torch.dtype] = []

    def keep(_: nn.Module, __: object, output: tuple[Stream, Carries]) -> None:
        for chain in (output[1].self_attention, output[1].cross_attention):
            carried.extend(carried_types(chain))

    for stack in (model.encoder, model.decoder):
        for part in stack.blocks:
            part.register_forward_hook(keep)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = model(source, target)
    real = target != tiny.PAD
    torch.testing.assert_close(near.float()[real], exact[real], rtol=0.0, atol=0.1)
    # One chain in each of three encoder blocks, two in each of two decoder blocks.
    chains = 7 if block.preset == "realformer" or block.residual_attention is not None else 0
    assert carried == [torch.float32] * chains * (2 if block.residual_attention == "qk_sum" else 1)


@torch.no_grad()
def test_each_step_of_decoding_has_capped_logits(float64: None) -> None:
    """A whole pass has those of the reference."""
    pair = tiny.randomise(tiny.translator("pre_ln", logit_cap=1.5)).eval()
    check_cached_translation(pair, *tiny.sentences(), steps=9)
    alone = tiny.randomise(tiny.causal_model("pre_ln", logit_cap=1.5)).eval()
    check_cached_text(alone, tiny.words(3, 9))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["encoder_decoder", "encoder", "decoder"])
def test_a_table_of_the_output_changes_no_other_start(kind: str) -> None:
    """Its entries are N(0, 1/d) like the input's; one that shares the table computes the same."""
    builds = {"encoder_decoder": tiny.translator, "encoder": tiny.masked_model}
    build: Any = builds.get(kind, tiny.causal_model)
    models = []
    for tied in (None, True, False):
        torch.manual_seed(4)
        models.append(build("pre_ln", tie_embeddings=tied).eval())
    plain, tied, untied = (model.state_dict() for model in models)
    assert plain.keys() == tied.keys()
    assert untied.keys() - plain.keys() == {"embedding.output.weight"}
    assert all(torch.equal(untied[name], value) for name, value in plain.items())
    table = untied["embedding.output.weight"]
    assert not torch.equal(table, untied["embedding.tokens.weight"])
    assert float(table.std()) == pytest.approx(table.shape[1] ** -0.5, rel=0.2)
    table.copy_(untied["embedding.tokens.weight"])
    texts = [tiny.sentences()[0], tiny.words(3, 9)][kind != "encoder_decoder" :]
    if kind == "encoder":
        texts.append(torch.tensor([0, 5]))
    assert torch.equal(models[2](*texts), models[0](*texts))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({"z_loss": x}, f"z_loss {x}: must be a number") for x in (-0.1, math.inf, math.nan)),
        *(({"kind": k, "z_loss": 0.1}, "z_loss 0.1: only for kinds") for k in ("glue", "squad")),
    ],
)
def test_a_z_loss_has_a_weight_and_predicts_tokens(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ObjectiveConfig(**fields)
