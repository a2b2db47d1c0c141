"""Normalization over the model dimension."""

from collections.abc import Callable

from torch import nn

from lightning_app.registry import Registry

Norm = str
"""A name of `NORM_KINDS`, or ``none``."""

EPSILON = 1e-5
NORMS = (nn.LayerNorm, nn.RMSNorm)

NORM_KINDS: Registry[Callable[[int], nn.Module]] = Registry(
    "model.block.norm",
    slots=(
        *("norm", "qk_norm", "value_norm", "ff_norm", "embedding_norm"),
        *("norm_input", "norm_branch", "norm_sum", "final_norm", "input_norm"),
    ),
)
"""The norms by name; `NORM_KINDS.register` is the decorator that adds a class.

A class is called with the size of the last dimension. Its own parameters belong in a
`LearnedScalars`, which sets their start and their decay.
"""


@NORM_KINDS.register("none")
def no_norm(dim: int) -> nn.Module:
    """``x``"""
    return nn.Identity()


@NORM_KINDS.register("layer_norm")
def layer_norm(dim: int) -> nn.Module:
    """``g * (x - mean(x)) / sqrt(var(x) + eps) + b`` (Ba et al. 2016, 1607.06450)"""
    return nn.LayerNorm(dim, eps=EPSILON)


@NORM_KINDS.register("rms_norm")
def rms_norm(dim: int) -> nn.Module:
    """``g * x / sqrt(mean(x^2) + eps)`` (Zhang & Sennrich 2019, 1910.07467)"""
    return nn.RMSNorm(dim, eps=EPSILON)


def build_norm(kind: Norm, dim: int) -> nn.Module:
    """Return the normalization `kind` over the last dimension, of size `dim`.

    Those of this package have ``g = 1``, ``b = 0`` at the start and ``eps = 1e-5``.
    """
    return NORM_KINDS[kind](dim)
