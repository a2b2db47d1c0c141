"""Count the trained parameters of a model without memory or random numbers for them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_)


class _NoValues(TorchFunctionMode):
    """Skip initial values: on the meta device torch imports its compiler for some of them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _DRAWS or getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Return the number of trained parameters of the module that `build` returns."""
    with torch.device("meta"), _NoValues():
        module = build()
    return sum(parameter.numel() for parameter in module.parameters())
