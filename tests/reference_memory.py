"""Segment recurrence as Dai et al. 2019 write it (1901.02860, section 3.2), in NumPy.

Each layer runs on ``[m ; h]`` as on a text of its own, and the rows of m are thrown away.
"""

from collections.abc import Sequence

import numpy as np

from tests.reference import Array, Layer, Parameters, Reference, Sizes, Stack, Tokens, embed, end


def predict_segment(
    reference: Reference,
    parameters: Parameters,
    sizes: Sizes,
    tokens: Tokens,
    memory: Sequence[Array],
    most: int,
    same_length: bool = False,
) -> tuple[Array, list[Array]]:
    """Return the states of a segment, and the last `most` inputs of each layer after it.

    Args:
        reference: A preset without parts before its first layer.
        parameters: Those of a causal model.
        sizes: Its sizes.
        tokens: (batch, token), the segment.
        memory: The last inputs of each layer before it, (batch, memory, model) each.
        most: M.
        same_length: Token i sees the last `most` keys of those before it and its own.
    """
    assert reference.first == "nothing"
    batch, length = tokens.shape
    before = memory[0].shape[1]
    allowed = np.zeros((batch, before + length, before + length), dtype=np.bool_)
    for i in range(before + length):
        first = max(0, i - most + 1) if same_length else 0
        allowed[:, i, first : i + 1] = True
    stack = Stack(reference, parameters, "decoder", sizes.encoder_depth, sizes, allowed)
    x = embed(parameters, tokens, sizes.positions)
    total, after = x, []
    for n in range(1, stack.depth + 1):
        joined = np.concatenate([memory[n - 1], x], axis=1)
        after.append(joined[:, max(0, joined.shape[1] - most) :])
        stack.total = np.concatenate([np.zeros_like(memory[n - 1]), total], axis=1)
        x = reference.layer(Layer(stack, n), joined)[:, before:]
        total = np.asarray(stack.total)[:, before:]
    return end(stack, x, total, "decoder.final_norm"), after
