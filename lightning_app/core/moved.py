"""Import paths named in documents of earlier versions, and where their modules are now."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]
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
    "trained": "api",
    "trained.run": "api.trained",
    "training.callbacks.divergence": "training.callbacks.safety",
}
"""Earlier and current modules, without the name of the package."""


class _FormerNames(MetaPathFinder):
    """Finds a module by its earlier name."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _PACKAGE:
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


def install() -> None:
    """Make imports of earlier names find the current modules."""
    sys.meta_path.insert(0, _FormerNames())
