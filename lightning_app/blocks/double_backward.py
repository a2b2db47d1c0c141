"""Backward passes that cannot be differentiated themselves say so.

PyTorch's `once_differentiable` refuses only where the incoming gradient asks for a derivative, and
leaves terms out in silence where what was saved does. So ours ask `torch.is_grad_enabled()`, which
holds in a backward pass with `create_graph=True` alone.
"""


def no_second_derivative(what: str) -> RuntimeError:
    """Return what the backward pass of an autograd function raises where it is to have a graph."""
    return RuntimeError(
        f'{what} has no second derivative; take `attention_form("plain")` and `token_sums` of all '
        "logits"
    )
