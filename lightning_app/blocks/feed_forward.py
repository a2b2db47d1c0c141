"""The position-wise feed-forward sub-layer."""

from typing import Literal, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["relu", "gelu"]

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


@final
class FeedForward(nn.Module):
    """``W2 act(W1 x + b1) + b2`` (Vaswani et al. 2017, 1706.03762, equation 2)."""

    def __init__(self, model_dim: int, ff_dim: int, activation: Activation) -> None:
        super().__init__()
        self.inner = nn.Linear(model_dim, ff_dim)
        self.outer = nn.Linear(ff_dim, model_dim)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Float[Tensor, "batch token model"]) -> Float[Tensor, "batch token model"]:
        return self.outer(self.activation(self.inner(x)))
