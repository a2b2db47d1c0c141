"""Backward passes that cannot be differentiated themselves say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let `backward` of an autograd function refuse to be part of a graph.

    PyTorch's `once_differentiable` refuses only where the incoming gradient asks for a derivative,
    and leaves terms out in silence where what was saved does.

    Raises:
        RuntimeError: in a backward pass with `create_graph=True`.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{backward.__qualname__} has no second derivative; compute it with "
                'attention_form("plain") and a loss of logits'
            )
        return backward(ctx, *grads)

    return refusing
