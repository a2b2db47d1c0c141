"""Which experiment a run's config is, with its blocks resolved and its corpus read."""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_app.blocks.axes import BlockConfig
from lightning_app.data.corpus import corpus_of
from lightning_app.identity.ids import Identity, identify
from lightning_app.models.heads import ArchitectureConfig

Tree = Mapping[str, Any]


def identity_of(config: Tree, fetch: bool = True) -> Identity:
    """Return the identity of a resolved config.

    Args:
        config: The config of a run, every default in it.
        fetch: Whether to download a corpus that is not on this machine. Without it the identity
            has no corpus then, and its id is that of no run.

    Raises:
        UserError: where the files of the corpus are missing.
    """
    return identify(config, stacks=stacks_of(config), corpus=corpus_of(config["data"], fetch))


def cell_id(config: Tree) -> str:
    """Return the id of a resolved config: 16 hexadecimal digits of what can change its result."""
    return identity_of(config).id


def stacks_of(config: Tree) -> dict[str, Any]:
    """Return the resolved specification of each stack, as plain values."""
    model = config["model"]
    parts = (json.dumps(model[name], sort_keys=True) for name in ("architecture", "block"))
    return _stacks(*parts)


@lru_cache(maxsize=1024)
def _stacks(architecture: str, block: str) -> dict[str, Any]:
    sizes = build(ArchitectureConfig, json.loads(architecture))
    stacks = sizes.stacks(build(BlockConfig, json.loads(block)))
    return {side: asdict(spec) for side, spec in stacks.items()}


def build(kind: type[Any], section: Tree) -> Any:
    """Return the dataclass that a checked section of a config says."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in section.items()})


def _value(hint: Any, value: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    part = next((kind for kind in kinds if is_dataclass(kind)), None)
    if isinstance(part, type) and value is not None:
        return build(part, value)
    return tuple(value) if isinstance(value, list) else value
