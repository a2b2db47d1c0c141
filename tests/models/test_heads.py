"""The architecture's numbers, and what only one kind of model does."""

import pytest
import torch
from torch import nn

from lightning_app.blocks.attention import Carry
from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.block import Carries
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Stream
from lightning_app.models.heads import ArchitectureConfig
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
    ],
)
def test_impossible_number_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.architecture(**changes)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model_dim 10 .*num_heads 3"):
        tiny.translator("pre_ln", num_heads=3)


def test_rotary_positions_need_pairs() -> None:
    with pytest.raises(ValueError, match=r"positions rope: model_dim / num_heads is 5"):
        tiny.translator("pre_ln", positions="rope")


def test_only_sinusoids_need_an_even_width() -> None:
    model = tiny.translator("pre_ln", positions="learned", model_dim=15, num_heads=5)
    assert model(*tiny.sentences()).shape == (3, 11, tiny.VOCABULARY)


@pytest.mark.parametrize("kind", ["encoder_decoder", "encoder"])
def test_encoder_without_blocks_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="encoder_depth 0"):
        tiny.architecture(kind=kind, encoder_depth=0).stacks(BlockConfig())


def test_decoder_without_blocks_is_refused_where_there_is_a_decoder() -> None:
    with pytest.raises(ValueError, match="decoder_depth 0"):
        tiny.architecture(decoder_depth=0).stacks(BlockConfig())
    stacks = tiny.architecture(kind="encoder", decoder_depth=0).stacks(BlockConfig())
    assert list(stacks) == ["encoder"]


def test_stacks_know_each_other() -> None:
    """RealFormer's mean needs two stacks; the decoder's depth of an encoder alone is not read."""
    both = tiny.architecture().stacks(BlockConfig(preset="realformer"))
    assert [len(both[side].blocks) for side in ("encoder", "decoder")] == [3, 2]
    assert both["encoder"].blocks[2].self_attention.score_divisor == 3.0
    alone = tiny.architecture(kind="encoder").stacks(BlockConfig(preset="realformer"))
    assert alone["encoder"].blocks[2].self_attention.score_divisor == 1.0


def test_default_architecture_is_the_papers() -> None:
    config = ArchitectureConfig()
    numbers = (config.encoder_depth, config.decoder_depth, config.model_dim, config.ff_dim)
    assert (*numbers, config.num_heads) == (6, 6, 512, 1024, 4)


@pytest.mark.parametrize("preset", PRESETS)
def test_masked_model_predicts_only_where_asked(float64: None, preset: str) -> None:
    """Rows of logits follow `positions`, flat over batch and token, in their order."""
    model = tiny.randomise(tiny.masked_model(preset))
    tokens = tiny.words(3, 7)
    everywhere = model(tokens, torch.arange(21))
    positions = torch.tensor([20, 0, 13, 0])
    torch.testing.assert_close(model(tokens, positions), everywhere[positions])
    assert model(tokens, positions[:0]).shape == (0, tiny.VOCABULARY)


def carried_types(carry: Carry | None) -> list[torch.dtype]:
    parts = carry if isinstance(carry, tuple) else (carry,)
    return [part.dtype for part in parts if part is not None]


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(
    "block",
    [
        *(pytest.param(BlockConfig(preset=name), id=name) for name in PRESETS),
        pytest.param(BlockConfig(residual_attention="sum"), id="sum"),
        pytest.param(BlockConfig(residual_attention="qk_sum"), id="qk_sum"),
    ],
)
def test_bfloat16_stays_near_and_carries_float32(block: BlockConfig, rotary: bool) -> None:
    positions = {"positions": "rope", "model_dim": 12} if rotary else {}
    model = tiny.translator(block, **positions)
    source, target = tiny.sentences()
    exact = model(source, target)
    carried: list[torch.dtype] = []

    def keep(_: nn.Module, __: object, output: tuple[Stream, Carry | Carries | None]) -> None:
        chains = output[1] if isinstance(output[1], Carries) else [output[1]]
        for chain in chains:
            carried.extend(carried_types(chain))

    for stack in (model.encoder, model.decoder):
        for part in stack.blocks:
            part.register_forward_hook(keep)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = model(source, target)
    real = target != tiny.PAD
    torch.testing.assert_close(near.float()[real], exact[real], rtol=0.0, atol=0.1)
    # One chain in each of three encoder blocks, two in each of two decoder blocks.
    carries = block.preset == "realformer" or block.residual_attention is not None
    chains = 7 if carries else 0
    assert carried == [torch.float32] * chains * (2 if block.residual_attention == "qk_sum" else 1)
