"""Ablations of Transformer blocks, and how sensitive each one is to learning-rate warm-up.

From Python::

    from lightning_app import Block, Encoder, Decoder, fit, run_grid, results, compare, load_run

A name is imported on first use, so that `import lightning_app` takes no time. `Block`,
`Encoder` and `Decoder` are plain torch; `fit` and `load_run` import Lightning. A mistake in a call
raises `UserError`, whose message is one line.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_app.version import __version__

if TYPE_CHECKING:
    from lightning_app.api.blocks import Block, BlockState, Decoder, Encoder
    from lightning_app.api.runs import RunResult, compare, fit, results, run_grid
    from lightning_app.api.trained import TextScore, TrainedRun, load_run
    from lightning_app.core.errors import UserError

__all__ = [
    "Block",
    "BlockState",
    "Decoder",
    "Encoder",
    "RunResult",
    "TextScore",
    "TrainedRun",
    "UserError",
    "__version__",
    "compare",
    "fit",
    "load_run",
    "results",
    "run_grid",
]

_MODULES = {
    "Block": "api.blocks",
    "BlockState": "api.blocks",
    "Decoder": "api.blocks",
    "Encoder": "api.blocks",
    "RunResult": "api.runs",
    "TextScore": "api.trained",
    "TrainedRun": "api.trained",
    "UserError": "core.errors",
    "compare": "api.runs",
    "fit": "api.runs",
    "load_run": "api.trained",
    "results": "api.runs",
    "run_grid": "api.runs",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


MOVED = {
    "api.block": "api.blocks",
    "api.fit": "api.runs",
    "api.grids": "api.runs",
    "api.stacks": "api.blocks",
    "blocks.block_config": "blocks.config",
    "callbacks": "training.callbacks",
    "datamodule": "training.datamodule",
    "errors": "core.errors",
    "module": "training.module",
    "objectives": "models",
    "objectives.base": "models.loss",
    "optim": "models.optim",
    "registry": "core.registry",
    "testing.conformance": "testing",
    "trained": "api",
    "trained.run": "api.trained",
    "training.callbacks.divergence": "training.callbacks.safety",
}
"""Import paths named in documents of earlier versions, and where their modules are now, without the
name of the package."""


class _FormerNames(MetaPathFinder):
    """Finds a module by its earlier name."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __name__:
            return None
        head, _, rest = name.rpartition(".")
        now = MOVED.get(name)
        if now is None and head in MOVED:
            now = f"{MOVED[head]}.{rest}"
        return None if now is None else spec_from_loader(fullname, _Present(f"{package}.{now}"))


class _Present(Loader):
    """Loads the module under its current name, so that both names share the same classes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        warnings.warn(f"{spec.name} is {self._name} now", DeprecationWarning, stacklevel=2)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has replaced it


sys.meta_path.insert(0, _FormerNames())
