"""Normalization over the model dimension."""

from typing import Literal

from torch import nn

Norm = Literal["none", "layer_norm", "rms_norm"]

EPSILON = 1e-5
NORMS = (nn.LayerNorm, nn.RMSNorm)


def build_norm(kind: Norm, dim: int) -> nn.Module:
    """Return the normalization `kind` over the last dimension, of size `dim`.

    - ``layer_norm``: ``g * (x - mean(x)) / sqrt(var(x) + eps) + b`` (Ba et al. 2016, 1607.06450)
    - ``rms_norm``: ``g * x / sqrt(mean(x^2) + eps)`` (Zhang & Sennrich 2019, 1910.07467)
    - ``none``: ``x``

    with ``g = 1``, ``b = 0`` at the start and ``eps = 1e-5``.
    """
    match kind:
        case "layer_norm":
            return nn.LayerNorm(dim, eps=EPSILON)
        case "rms_norm":
            return nn.RMSNorm(dim, eps=EPSILON)
        case "none":
            return nn.Identity()
