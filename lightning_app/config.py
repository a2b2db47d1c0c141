"""The config of one run: parsed, completed and checked by LightningCLI's own parser."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonargparse
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.data.datamodule import TextDataModule
from lightning_app.errors import UserError, nearest
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.module import TransformerModule

TRAINER_DEFAULTS = {
    "max_steps": 20000,
    "log_every_n_steps": 50,
    "val_check_interval": 1000,
    "check_val_every_n_epoch": None,  # count validations in steps, across epochs
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # our samplers share batches out themselves
}

# What cannot change a result: where, on what and how verbosely a run is executed. The precision
# and the number of steps do change it, so does the clipping of gradients.
IRRELEVANT = (
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.logger",
    "trainer.callbacks",
    "trainer.log_every_n_steps",
    "trainer.enable_checkpointing",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.profiler",
    "trainer.barebones",
    "trainer.plugins",
    "trainer.enable_autolog_hparams",
    "trainer.default_root_dir",
    "trainer.model_registry",
    "data.root",
    "data.cache",
    "data.num_workers",
)


class ConfigParser(LightningArgumentParser):
    """A parser whose every complaint is a `UserError` of one line."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        raise UserError(message) from ex


class RunCLI(LightningCLI):
    """LightningCLI over our one module and one data module, with the defaults above.

    Built without arguments and without running, it serves as the parser of configs.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(
            TransformerModule,
            TextDataModule,
            args=args,
            save_config_callback=None,
            seed_everything_default=1,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_class=ConfigParser,
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.objective.kind", "data.task")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf; an empty mapping is a leaf."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def cell_id(config: dict[str, Any]) -> str:
    """Return the identity of a resolved config: 16 hexadecimal digits of what can change a result.

    Two configs with the same id are the same experiment, whatever the devices, folders or logs.
    """
    relevant = {key: value for key, value in leaves(config) if key not in IRRELEVANT}
    text = json.dumps(relevant, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
