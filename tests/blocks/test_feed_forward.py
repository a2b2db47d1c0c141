import numpy as np
import pytest
import torch

from lightning_app.blocks.feed_forward import Activation, FeedForward
from lightning_app.blocks.norm import Norm
from tests import reference, tiny

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("norm", ["none", "layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    "activation", ["relu", "gelu", "leaky_relu", "geglu", "swiglu", "relu_squared"]
)
def test_feed_forward_is_the_equation(activation: Activation, norm: Norm) -> None:
    """``W2 N(act(W1 x + b1)) + b2``."""
    module = tiny.randomise(FeedForward(5, 13, activation, norm, slope=0.3))
    x = torch.randn(3, 7, 5)
    p = tiny.numpy_parameters(module)
    inner = x.numpy() @ p["inner.weight"].T + p["inner.bias"]
    match activation:
        case "relu":
            inner = np.where(inner > 0.0, inner, 0.0)
        case "leaky_relu":
            inner = np.where(inner > 0.0, inner, 0.3 * inner)
        case "gelu":
            inner = reference.gelu(inner)
        case "relu_squared":
            inner = np.where(inner > 0.0, inner**2, 0.0)
        case "swiglu":
            inner = inner / (1 + np.exp(-inner)) * (x.numpy() @ p["gate.weight"].T + p["gate.bias"])
        case "geglu":
            inner = reference.gelu(inner) * (x.numpy() @ p["gate.weight"].T + p["gate.bias"])
    if norm == "layer_norm":
        gain, bias = p["norm_inner.weight"], p["norm_inner.bias"]
        inner = reference.layer_norm(inner, gain, bias)
    elif norm == "rms_norm":
        inner = reference.rms_norm(inner, p["norm_inner.weight"])
    expected = inner @ p["outer.weight"].T + p["outer.bias"]
    torch.testing.assert_close(module(x), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
