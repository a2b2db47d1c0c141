"""The defaults of Lightning's Trainer, for fields that an older Lightning did not have."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any


@cache
def trainer_defaults() -> Mapping[str, Any]:
    """Return every argument of the Trainer with its default. Imports Lightning, which is heavy."""
    import lightning.pytorch as pl

    return {name: each.default for name, each in inspect.signature(pl.Trainer).parameters.items()}
