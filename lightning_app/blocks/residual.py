"""The residual formula that has every placement of the norm as a special case."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.norm import BOUNDS, FollowsSteps, LearnedScalars, Norm, Scale, build_norm
from lightning_app.blocks.streams import States, Stream, StreamPlace, StreamRule
from lightning_app.core.registry import Registry

Rule = str
"""A name of `RESIDUAL_RULES`."""

SUM: Rule = "sum"
GPAS: Rule = "gpas"
LERP: Rule = "lerp"

RESIDUAL_RULES: Registry[Callable[[int], nn.Module]] = Registry(
    "model.block.residual_rule", slots=("rule",)
)
"""The rules that join a skip and a branch, by name; `RESIDUAL_RULES.register` is the decorator that
adds a class.

A class is called with the width of the stream. Its module is called with the skip and the branch
after their gains are applied, and returns the stream before `norm_sum`: three tensors of one shape,
(batch, token, model), where no token may depend on another. Put additional parameters in a
`LearnedScalars`, which sets their initial values and weight decay, and matrices in an `nn.Linear`.
"""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A factor on a skip or a branch. If learned, it starts at `value` and takes no decay."""

    value: float = 1.0
    learned: bool = False
    vector: bool = False
    """One factor per dimension of the stream instead of a single one; only if learned."""
    profiled: bool = False
    """One pass over a batch before training sets the initial value (Admin); only if learned."""
    ramp: float = 0.0
    """The training steps over which a fixed factor rises linearly to `value`, from
    ``value / ramp`` in the first one (ProRes); 0: none."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"gain value: {self.value} is not a finite number")
        for name in ("vector", "profiled"):
            if getattr(self, name) and not self.learned:
                raise ValueError(f"gain {name}: true needs learned: true")
        if not 0.0 <= self.ramp < math.inf:
            raise ValueError(f"gain ramp {self.ramp}: must be a number of steps, at least 0")
        if self.ramp and self.learned:
            raise ValueError(
                "branch_ramp (gain ramp, as in preset prores) on a learned gain (attention_branch "
                "or ff_branch): a rising factor is not trained; use learned: false"
            )

    @property
    def absent(self) -> bool:
        """True if the factor removes its term from the sum."""
        return self.value == 0.0 and not self.learned


@dataclass(frozen=True, kw_only=True)
class ResidualSpec:
    """``y = norm_sum(skip * x + branch * norm_branch(f(input_scale * norm_input(x))))``.

    `rule` is the sum, or another of `RESIDUAL_RULES`, which then joins skip and branch.
    Post-LN fills `norm_sum`, Pre-LN `norm_input` (Xiong et al. 2020, 2002.04745, table 1).
    """

    norm_input: Norm = "none"
    input_scale: float = 1.0
    norm_branch: Norm = "none"
    norm_sum: Norm = "none"
    skip: Gain = Gain()
    branch: Gain = Gain()
    rule: Rule = SUM
    drop: float = 0.0
    """The chance in training that a row of the batch skips the branch, which is otherwise divided
    by ``1 - drop`` (stochastic depth, Huang et al. 2016, 1603.09382)."""

    def __post_init__(self) -> None:
        self._check_drop()
        if not 0.0 < self.input_scale < math.inf:
            raise ValueError(f"input_scale {self.input_scale}: must be a number above 0")
        if self.input_scale != 1.0 and self.norm_input in BOUNDS:
            raise ValueError(
                f"norm {self.norm_input} with a scale after it (preset layer_norm_scaling): it "
                "bounds entries and has no variance to scale; use layer_norm or rms_norm"
            )
        if self.skip.ramp:
            raise ValueError("skip ramp: only a branch can start small; use it for a branch")
        if self.branch.ramp and self.skip.profiled:
            raise ValueError(
                "branch_ramp with profiled skips (preset admin): their start is that of whole "
                "branches; use another preset"
            )
        _ = RESIDUAL_RULES[self.rule]
        if self.rule == SUM:
            return
        if self.rule == GPAS and self.norm_sum != "none":
            raise ValueError(
                "residual_rule gpas with norm_placement post: the norm of the sum undoes what it "
                "shrinks; use norm_placement pre or peri"
            )
        if self.skip.absent:
            raise ValueError(
                f"residual_rule {self.rule} without a skip: a rule joins a skip with one branch; "
                "with attention_skip 0, ff_skip 0 or layout parallel use residual_rule sum"
            )
        if self.rule == LERP:
            self._check_lerp()
        if self.skip.profiled:
            raise ValueError(
                f"residual_rule {self.rule} with profiled skips (preset admin): their start is "
                "that of a sum; use residual_rule sum or another preset"
            )

    @property
    def is_peri(self) -> bool:
        """Whether it has norms before and after the branch, as in Peri-LN."""
        return self.norm_input != "none" and self.norm_branch != "none"

    def _check_drop(self) -> None:
        if not 0.0 <= self.drop < 1.0:
            raise ValueError(f"stochastic_depth {self.drop}: must be at least 0 and below 1")
        if self.drop and self.rule not in (SUM, GPAS):
            raise ValueError(
                f"stochastic_depth with residual_rule {self.rule}: a branch of zeros would not "
                "leave the skip as it is; use residual_rule sum"
            )

    def _check_lerp(self) -> None:
        if {"none", *BOUNDS} & {self.norm_branch, self.norm_sum}:
            raise ValueError(
                f"residual_rule lerp with norm_branch {self.norm_branch}, norm_sum {self.norm_sum} "
                "(norm_placement or norm): it joins vectors of one length; use preset ngpt as it is"
            )
        if (self.skip, self.branch) != (Gain(), Gain()):
            raise ValueError(
                "residual_rule lerp with attention_skip, ff_skip, attention_branch, ff_branch or "
                "branch_ramp: its only gain is its own; use residual_rule sum"
            )

    @property
    def unnormalized(self) -> bool:
        """True if there is no norm before or after the branch or on the sum."""
        return {self.norm_input, self.norm_branch, self.norm_sum} == {"none"}


@final
class LearnedGain(LearnedScalars):
    """``gain * x``, trained: a scalar or a vector. It is a module so that hooks can find it."""

    def __init__(self, gain: Gain, model_dim: int) -> None:
        super().__init__()
        self.profiled = gain.profiled
        self.gain = nn.Parameter(torch.full((model_dim,) if gain.vector else (), float(gain.value)))

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


@final
class RisingGain(FollowsSteps, nn.Module):
    """``value * min(1, t / ramp) * x`` in training step t, from 1 (ProRes, 2603.05369).

    Outside training the factor is that of the last step, which checkpoints hold; a new model has
    that of the first. A run that begins from the weights of a parent keeps the parent's factor:
    `rises` is then false.
    """

    factor: Tensor
    rises: bool = True

    def __init__(self, gain: Gain) -> None:
        super().__init__()
        self.gain = gain
        self.register_buffer("factor", torch.tensor(gain.value * min(1.0, 1.0 / gain.ramp)))

    def at_step(self, done: int, total: int) -> None:
        if self.rises:
            self.factor.fill_(self.gain.value * min(1.0, (done + 1) / self.gain.ramp))

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.factor * x


@RESIDUAL_RULES.register(SUM)
@final
class PlainSum(nn.Module):
    """``skip + branch``"""

    def __init__(self, model_dim: int) -> None:
        super().__init__()

    def forward(
        self, skip: Float[Tensor, "*shape"], branch: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        return skip + branch


@RESIDUAL_RULES.register(GPAS)
@final
class Shrink(LearnedScalars):
    """``y - silu(g) stop(y)``, y = skip + branch: the gradient of y is that of the plain sum.

    g starts at zero, and the sums of a block share one (GPAS, 2506.22049, code). `stop` has no
    gradient, so the gradient of the loss is not its derivative.
    """

    one_per_block = True

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(
        self, skip: Float[Tensor, "*shape"], branch: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        total = skip + branch
        return total - nn.functional.silu(self.gate) * total.detach()


@RESIDUAL_RULES.register(LERP)
@final
class Lerp(Scale):
    """``skip + |a| (branch - skip)``, a vector from 0.05 (Loshchilov et al. 2024, 2410.01131)."""

    def __init__(self, model_dim: int) -> None:
        super().__init__(model_dim, start=0.05, stored=model_dim**-0.5)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, skip: Float[Tensor, "*shape"], branch: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        return skip + self.factor.abs().to(skip.dtype) * (branch - skip)


def build_gain(gain: Gain, model_dim: int) -> nn.Module:
    """Return the module that multiplies by `gain`."""
    if gain.ramp:
        return RisingGain(gain)
    return LearnedGain(gain, model_dim) if gain.learned else FixedGain(gain.value)


@final
class Residual(nn.Module):
    """The residual connection of one sub-layer, which runs between its two halves.

    ``enter`` returns the branch's input; a call joins the branch's output f with the skip:

    ``y = norm_sum(skip * x + branch * norm_branch(f))``, or a `rule` in place of the sum.

    A `stream` rule other than that of one state decides what x is and where y goes: see
    `lightning_app.blocks.streams`.
    """

    def __init__(
        self, spec: ResidualSpec, model_dim: int, dropout: float, stream: StreamRule | None = None
    ) -> None:
        super().__init__()
        self.norm_input = build_norm(spec.norm_input, model_dim)
        self.input_scale = FixedGain(spec.input_scale)
        self.norm_branch = build_norm(spec.norm_branch, model_dim)
        self.norm_sum = build_norm(spec.norm_sum, model_dim)
        self.skip = None if spec.skip.absent else build_gain(spec.skip, model_dim)
        self.branch = build_gain(spec.branch, model_dim)
        self.rule = RESIDUAL_RULES[spec.rule](model_dim)
        self.dropout = nn.Dropout(dropout)
        self.drop = spec.drop
        self.stream = stream or StreamRule(StreamPlace(model_dim=model_dim))

    def enter(self, x: States) -> States:
        return self.input_scale(self.norm_input(x))

    def forward(self, stream: Stream, branch: States) -> Stream:
        added = self.branch(self.dropout(self.norm_branch(branch)))
        if self.drop and self.training:
            kept = added.new_empty(added.shape[0], 1, 1).bernoulli_(1.0 - self.drop)
            added = added * (kept / (1.0 - self.drop))
        return self.stream.write(stream, added, self.join)

    def join(self, x: States, added: States) -> States:
        """Return ``norm_sum(skip * x + added)``."""
        return self.norm_sum(added if self.skip is None else self.rule(self.skip(x), added))
