"""The small models and batches of the tests, and their values for the reference in NumPy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import causal_mask
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.testing import (
    BOS,
    EOS,
    HEAD_DIM,
    NUM_HEADS,
    PAD,
    SIZES,
    SOURCE_LENGTHS,
    TARGET_LENGTHS,
    VOCABULARY,
    Model,
    causal_model,
    decode,
    decoder,
    encoder,
    masked_model,
    randomise,
    sentences,
    specification,
    translator,
    words,
)
from lightning_app.testing import small_architecture as architecture
from tests import reference

__all__ = ["BOS", "EOS", "HEAD_DIM", "NUM_HEADS", "PAD", "SIZES", "SOURCE_LENGTHS"]
__all__ += ["TARGET_LENGTHS", "VOCABULARY", "BlockConfig", "Model", "architecture", "causal_mask"]
__all__ += ["causal_model", "decode", "decoder", "encoder", "masked_model", "numpy_parameters"]
__all__ += ["predicted", "randomise", "reference_sizes", "rows_of_pairs", "sentences"]
__all__ += ["specification", "translator", "words"]


def reference_sizes(config: ArchitectureConfig) -> reference.Sizes:
    alone = config.decoder_depth if config.kind == "decoder" else config.encoder_depth
    return reference.Sizes(
        encoder_depth=alone,
        decoder_depth=config.decoder_depth if config.kind == "encoder_decoder" else 0,
        num_heads=config.num_heads,
        kv_heads=config.kv_heads,
        logit_cap=config.logit_cap or math.inf,
        activation=config.activation,
        slope=config.activation_slope,
        positions=config.positions,
        pad=PAD,
    )


def numpy_parameters(model: nn.Module) -> dict[str, NDArray[np.float64]]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def predicted(block: reference.Reference, model: nn.Module, *inputs: Tensor, **changes: Any) -> Any:
    """What the reference computes from the inputs of a model of `changes`, by its parameters."""
    kind, predict = {
        "CausalLanguageModel": ("decoder", reference.predict_next),
        "MaskedLanguageModel": ("encoder", reference.predict_masked),
        "EncoderDecoder": ("encoder_decoder", reference.translate),
    }[type(model).__name__]
    sizes = reference_sizes(architecture(**{"kind": kind, **changes}))
    return predict(block, numpy_parameters(model), sizes, *(x.numpy() for x in inputs))


def rows_of_pairs(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens and segments of rows with padding; BOS first, EOS after each text."""
    tokens = torch.full((len(lengths), 11), PAD)
    segments = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        tokens[row, :length] = words(length)
        tokens[row, 0] = BOS
        tokens[row, length - 1] = tokens[row, 3] = EOS
        segments[row, 4:length] = 1
    return tokens, segments
