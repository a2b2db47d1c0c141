"""The position-wise feed-forward sub-layer."""

from typing import Literal, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.linear import Linear
from lightning_app.blocks.norm import Norm, build_norm

Activation = Literal["relu", "gelu", "leaky_relu", "geglu"]


@final
class FeedForward(nn.Module):
    """``W2 N(act(W1 x + b1)) + b2`` (Vaswani et al. 2017, 1706.03762, equation 2).

    N is NormFormer's norm of the inner states (Shleifer et al. 2021, 2110.09456), else nothing.
    ``geglu`` is ``gelu(W1 x + b1) * (W3 x + b3)``, a third matrix of the same size (Shazeer 2020,
    2002.05202). `slope` is the slope of ``leaky_relu`` below zero.
    """

    def __init__(
        self,
        model_dim: int,
        ff_dim: int,
        activation: Activation,
        norm: Norm = "none",
        slope: float = 0.01,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.slope = slope
        self.inner = Linear(model_dim, ff_dim)
        self.gate = Linear(model_dim, ff_dim) if activation == "geglu" else None
        self.norm_inner = build_norm(norm, ff_dim)
        self.outer = Linear(ff_dim, model_dim)

    def forward(self, x: Float[Tensor, "batch token model"]) -> Float[Tensor, "batch token model"]:
        inner = self.inner(x)
        match self.activation:
            case "relu":
                inner = F.relu(inner)
            case "gelu":
                inner = F.gelu(inner)
            case "leaky_relu":
                inner = F.leaky_relu(inner, self.slope)
            case "geglu":
                assert self.gate is not None
                inner = F.gelu(inner) * self.gate(x)
        return self.outer(self.norm_inner(inner))
