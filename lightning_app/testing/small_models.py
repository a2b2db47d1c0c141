"""The small models and batches of the conformance checks. Sizes are distinct primes if possible."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import Mask, causal_mask
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.models.heads import (
    ArchitectureConfig,
    CausalLanguageModel,
    EncoderDecoder,
    MaskedLanguageModel,
    build_model,
)
from lightning_app.models.initialization import initialize
from lightning_app.models.stack import BlockStack

Model = TypeVar("Model", bound=nn.Module)

PAD, BOS, EOS = 0, 2, 3
VOCABULARY = 17
SOURCE_LENGTHS = (7, 4, 1)
TARGET_LENGTHS = (11, 6, 3)
NUM_HEADS, HEAD_DIM = 2, 5
SIZES: dict[str, Any] = {
    "encoder_depth": 3,
    "decoder_depth": 2,
    "model_dim": NUM_HEADS * HEAD_DIM,
    "ff_dim": 13,
    "num_heads": NUM_HEADS,
    "dropout": 0.0,
}


def small_architecture(**changes: Any) -> ArchitectureConfig:
    return ArchitectureConfig(**{**SIZES, **changes})


def translator(block: BlockConfig | str, **changes: Any) -> EncoderDecoder:
    """Return an encoder-decoder with its initial values."""
    block = BlockConfig(preset=block) if isinstance(block, str) else block
    model = build_model(small_architecture(**changes), block, VOCABULARY, PAD)
    assert isinstance(model, EncoderDecoder)
    return model


def masked_model(block: BlockConfig | str, **changes: Any) -> MaskedLanguageModel:
    """Return an encoder with the head for masked tokens, with its initial values."""
    block = BlockConfig(preset=block) if isinstance(block, str) else block
    model = build_model(small_architecture(kind="encoder", **changes), block, VOCABULARY, PAD)
    assert isinstance(model, MaskedLanguageModel)
    return model


def causal_model(block: BlockConfig | str, **changes: Any) -> CausalLanguageModel:
    """Return a causal stack without an encoder, with its initial values."""
    block = BlockConfig(preset=block) if isinstance(block, str) else block
    model = build_model(small_architecture(kind="decoder", **changes), block, VOCABULARY, PAD)
    assert isinstance(model, CausalLanguageModel)
    return model


def specification(block: BlockConfig | StackSpec | str, stack: Stack) -> StackSpec:
    """Return the specification of `block` in `stack`."""
    if isinstance(block, StackSpec):
        return block
    return (BlockConfig(preset=block) if isinstance(block, str) else block).resolve(stack)


def encoder(
    block: BlockConfig | StackSpec | str, depth: int = 3, peer_depth: int = 2, **changes: Any
) -> BlockStack:
    """Return the encoder of two stacks, with its initial values, smooth between its matrices."""
    spec = specification(block, Stack(depth=depth, peer_depth=peer_depth))
    sizes = small_architecture(**{"activation": "gelu", **changes})
    module = BlockStack(spec, sizes.sizes(), sizes.order())
    initialize(module)
    return module


def decoder(block: BlockConfig | StackSpec | str, depth: int = 2, **changes: Any) -> BlockStack:
    """Return a decoder that reads an encoder of three layers."""
    spec = specification(block, Stack(depth=depth, peer_depth=3, causal=True, cross=True))
    sizes = small_architecture(**{"activation": "gelu", **changes})
    module = BlockStack(spec, sizes.sizes(), sizes.order(), cross=True)
    initialize(module)
    return module


def decode(module: BlockStack, x: Tensor, memory: Tensor, source_mask: Mask) -> Tensor:
    """Return the states of a whole target."""
    return module(x, causal_mask(x.shape[1], x.device), module.remember(memory, source_mask))


@torch.no_grad()
def randomise(model: Model) -> Model:
    """Add noise to every parameter: initial values of 0 or 1 hide errors of their factors."""
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def words(*shape: int) -> Tensor:
    """Return random tokens, none of them special."""
    return torch.randint(5, VOCABULARY, shape)


def sentences() -> tuple[Tensor, Tensor]:
    """Return a padded batch: sources end with EOS, targets are BOS ... EOS."""
    source = words(len(SOURCE_LENGTHS), max(SOURCE_LENGTHS))
    target = words(len(TARGET_LENGTHS), max(TARGET_LENGTHS))
    target[:, 0] = BOS
    for row, (n, m) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        source[row, n - 1], source[row, n:] = EOS, PAD
        target[row, m - 1], target[row, m:] = EOS, PAD
    return source, target
