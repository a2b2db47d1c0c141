import numpy as np
import pytest
import torch

from lightning_app.blocks.feed_forward import Activation, FeedForward
from tests import reference, tiny


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_is_the_equation(activation: Activation) -> None:
    module = tiny.randomise(FeedForward(5, 13, activation))
    x = torch.randn(3, 7, 5)
    p = tiny.numpy_parameters(module)
    inner = x.numpy() @ p["inner.weight"].T + p["inner.bias"]
    inner = reference.gelu(inner) if activation == "gelu" else np.maximum(inner, 0.0)
    expected = inner @ p["outer.weight"].T + p["outer.bias"]
    torch.testing.assert_close(module(x), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
