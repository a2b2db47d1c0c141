"""The id of an experiment: of its config, its blocks and what its corpus holds."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_app.identity.relevant import Tree, leaves, pins, relevant

SCHEMA = 2
"""Of ids. Schema 1 hashed every leaf of the config and nothing else."""

_FORMERLY_IRRELEVANT = (
    *("trainer.accelerator", "trainer.strategy", "trainer.devices", "trainer.num_nodes"),
    *("trainer.logger", "trainer.callbacks", "trainer.log_every_n_steps"),
    *("trainer.enable_checkpointing", "trainer.enable_progress_bar"),
    *("trainer.enable_model_summary", "trainer.profiler", "trainer.barebones", "trainer.plugins"),
    *("trainer.enable_autolog_hparams", "trainer.default_root_dir", "trainer.model_registry"),
    *("model.compile", "data.root", "data.cache", "data.num_workers"),
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which experiment a config is.

    `id`: 16 hexadecimal digits of what can change the result. `former`: the same config's id of
    schema 1, empty where there was none. `corpus`: the digest of what the corpus holds, None
    where its files are not on this machine. `effect`: what a run reads of the config, by
    `experiment.effect_of`; None where it was not asked for.
    """

    id: str
    former: str = ""
    corpus: str | None = None
    effect: tuple[str, str] | None = None


def identify(config: Tree, *, blocks: Tree, corpus: str | None) -> Identity:
    """Return the identity of a resolved config.

    Args:
        config: The config of a run, every default in it.
        blocks: What `relevant_blocks` returns of the resolved stacks.
        corpus: The digest of what the corpus holds.
    """
    identity = experiment_id(relevant(config), blocks, corpus)
    return Identity(id=identity, former=former_id(config), corpus=corpus)


def experiment_id(config: Mapping[str, Any], blocks: Mapping[str, Any], corpus: str | None) -> str:
    """Return the id made of the parts that can change a result."""
    return _digest({"schema": SCHEMA, "config": config, "blocks": blocks, "corpus": corpus})


def former_id(config: Tree) -> str:
    """Return the id of schema 1, or nothing where the config says what that schema did not know.

    Its decoupled linear schedule was another one: the decay began at step 1.
    """
    schedule = config["model"]["schedule"]
    if (schedule["kind"], schedule["coupling"]) == ("linear", "decoupled"):
        return ""
    fields = dict(leaves(config))
    for key, default in pins()["added"].items():
        if fields.pop(key, default) != default:
            return ""
    return _digest({k: v for k, v in fields.items() if k not in _FORMERLY_IRRELEVANT})


def _digest(tree: Mapping[str, Any]) -> str:
    text = json.dumps(tree, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
