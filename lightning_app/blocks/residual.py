"""The one residual formula that every placement of the norm is a filling of."""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.norm import Norm, build_norm


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A factor on a skip or a branch. A learned one starts at `value`; it takes no weight decay."""

    value: float = 1.0
    learned: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"gain value: {self.value} is not a finite number")

    @property
    def absent(self) -> bool:
        """True when what it multiplies never enters the sum."""
        return self.value == 0.0 and not self.learned


@dataclass(frozen=True, kw_only=True)
class ResidualSpec:
    """``y = norm_sum(skip * x + branch * norm_branch(f(norm_input(x))))``.

    Post-LN fills `norm_sum`, Pre-LN `norm_input` (Xiong et al. 2020, 2002.04745, table 1).
    """

    norm_input: Norm = "none"
    norm_branch: Norm = "none"
    norm_sum: Norm = "none"
    skip: Gain = Gain()
    branch: Gain = Gain()

    @property
    def unnormalized(self) -> bool:
        """True when no norm stands anywhere around the branch."""
        return {self.norm_input, self.norm_branch, self.norm_sum} == {"none"}


@final
class LearnedGain(nn.Module):
    """``gain * x`` with a trained scalar. A module of its own so that hooks and decay find it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.start = value
        self.gain = nn.Parameter(torch.tensor(value))

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.gain * x


@final
class FixedGain(nn.Module):
    """``value * x``; nothing is multiplied when the value is 1."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return x if self.value == 1.0 else self.value * x


def build_gain(gain: Gain) -> nn.Module:
    """Return the module that multiplies by `gain`."""
    return LearnedGain(gain.value) if gain.learned else FixedGain(gain.value)


@final
class Residual(nn.Module):
    """What stands around one sub-layer; the sub-layer itself is called between the two halves.

    ``enter`` gives the branch its input, ``leave`` joins the branch's output with the skip:

    ``y = norm_sum(skip * x + branch * norm_branch(f(norm_input(x))))``.
    """

    def __init__(self, spec: ResidualSpec, model_dim: int, dropout: float) -> None:
        super().__init__()
        self.norm_input = build_norm(spec.norm_input, model_dim)
        self.norm_branch = build_norm(spec.norm_branch, model_dim)
        self.norm_sum = build_norm(spec.norm_sum, model_dim)
        self.skip = None if spec.skip.absent else build_gain(spec.skip)
        self.branch = build_gain(spec.branch)
        self.dropout = nn.Dropout(dropout)

    def enter(self, x: Float[Tensor, "batch token model"]) -> Float[Tensor, "batch token model"]:
        return self.norm_input(x)

    def leave(
        self,
        x: Float[Tensor, "batch token model"],
        branch: Float[Tensor, "batch token model"],
    ) -> Float[Tensor, "batch token model"]:
        y = self.branch(self.dropout(self.norm_branch(branch)))
        if self.skip is not None:
            y = self.skip(x) + y
        return self.norm_sum(y)
