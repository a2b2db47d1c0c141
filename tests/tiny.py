"""The small models and batches of the tests, and their values for the reference in NumPy."""

import math

import numpy as np
from numpy.typing import NDArray
from torch import nn

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

__all__ = [
    "BOS",
    "EOS",
    "HEAD_DIM",
    "NUM_HEADS",
    "PAD",
    "SIZES",
    "SOURCE_LENGTHS",
    "TARGET_LENGTHS",
    "VOCABULARY",
    "BlockConfig",
    "Model",
    "architecture",
    "causal_mask",
    "causal_model",
    "decode",
    "decoder",
    "encoder",
    "masked_model",
    "numpy_parameters",
    "randomise",
    "reference_sizes",
    "sentences",
    "specification",
    "translator",
    "words",
]


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
