"""A module, its data and a trainer, small enough for a test."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl

from lightning_app.blocks.config import BlockConfig
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.models.optim import OptimizerConfig, ScheduleConfig
from lightning_app.scores.task_facts import task_facts
from lightning_app.training.datamodule import TextDataModule
from lightning_app.training.module import TransformerModule


def module(
    kind: str = "translation",
    *,
    dropout: float = 0.0,
    decoder_depth: int = 1,
    objective: Mapping[str, Any] = MappingProxyType({}),
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3),
    schedule: ScheduleConfig = ScheduleConfig(warmup_steps=0, reference_steps=5),
    **block: Any,
) -> TransformerModule:
    return TransformerModule(
        block=BlockConfig(**block),
        architecture=ArchitectureConfig(
            kind=task_facts(kind).architecture,  # pyright: ignore[reportArgumentType]
            encoder_depth=2,
            decoder_depth=decoder_depth,
            model_dim=12,
            ff_dim=14,
            num_heads=2 if block.get("preset") == "differential" else 3,
            dropout=dropout,
        ),
        objective=ObjectiveConfig(kind=kind, beam=1, **objective),  # pyright: ignore[reportArgumentType]
        optimizer=optimizer,
        schedule=schedule,
    )


def data(cache: str, kind: str = "translation") -> TextDataModule:
    return TextDataModule(
        name="synthetic",
        cache=cache,
        task=kind,  # pyright: ignore[reportArgumentType]
        tokenizer="word",
        vocab_size=None,
        tokens_per_batch=512,
        window=16,
    )


def trainer(folder: Path, **settings: Any) -> pl.Trainer:
    common: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**common, **settings})
