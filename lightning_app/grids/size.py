"""How many parameters a cell trains."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.config.config import model_config
from lightning_app.data.corpus import resolved_data
from lightning_app.data.prepare import prepare
from lightning_app.models.auxiliary_heads import add_heads
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.initialization import count_parameters
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.tasks.base import build_task


def parameters(config: dict[str, Any]) -> int:
    """Return the number of trained parameters of a complete config, without allocating them."""
    said = model_config(config["model"])
    vocab_size = config["data"]["vocab_size"]
    if vocab_size is None:  # every word of the corpus is a token
        vocab_size = _words(json.dumps(config["data"]))
    # Dropout has no parameters, and may be an axis of many values.
    architecture = replace(said.architecture, dropout=0.0, attention_dropout=0.0)
    return _count(architecture, said.block, said.objective, vocab_size)


@cache
def _count(
    architecture: ArchitectureConfig,
    block: BlockConfig,
    objective: ObjectiveConfig,
    vocab_size: int,
) -> int:
    def build() -> nn.Module:
        model = build_task(objective).build_model(architecture, block, vocab_size)
        add_heads(model, objective.auxiliary())
        return model

    return count_parameters(build)


@cache
def _words(data: str) -> int:
    """The words of a corpus, whose config is given as JSON."""
    return prepare(resolved_data(json.loads(data))).meta["vocab_size"]
