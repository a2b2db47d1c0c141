"""The error of backward passes that have no second derivative.

PyTorch's `once_differentiable` raises an error only if the incoming gradient requires a gradient.
If only a saved tensor requires one, it omits terms without an error. So our backward passes check
`torch.is_grad_enabled()`, which is true only in a backward pass with `create_graph=True`.
"""


def no_second_derivative(what: str) -> RuntimeError:
    """Return the error that a backward pass raises under `create_graph=True`."""
    return RuntimeError(
        f'{what} has no second derivative; take `attention_form("plain")` and `token_sums` of all '
        "logits"
    )
