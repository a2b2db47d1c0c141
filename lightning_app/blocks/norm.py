"""The norms over the model dimension, and learned scalars: trained factors besides the matrices."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import Tensor, nn

from lightning_app.core.registry import Registry


class LearnedScalars(nn.Module):
    """The base of every module whose parameters are gains, weights of a map, spans and the like.

    Initialisation, weight decay, the optimizer step, `ablate probe` and the log of a run's
    gains find them by this class, so a new subclass needs no registration. A probe calls a
    parameter ``gain`` by its module's name, and any other by its own name (see `probes.gains`).
    """

    decays: ClassVar[bool] = False
    """Whether the parameters take weight decay; a single number never does. It would pull a block's
    wiring towards zero (He & Hofmann 2023, 2311.01906, appendix D)."""

    lr: float | None = None
    """The peak learning rate of the parameters; None for that of the optimizer."""

    def measured(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values that a probe and the log of a run show."""
        yield from self.named_parameters(recurse=False)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None:
            self.__dict__.setdefault("_starts", {})[name] = param.detach().clone()

    def reset(self) -> None:
        """Set the parameters to their initial values: those with which they were built."""
        for name, start in self.__dict__.get("_starts", {}).items():
            self.get_parameter(name).copy_(start)

    def after_step(self) -> None:
        """Clamp the parameters to their range after an optimizer step."""


class Scale(LearnedScalars):
    """``x s start / stored``, s trained from `stored`: under Adam the factor has ``start / stored``
    times the rate (nGPT, 2410.01131, code)."""

    def __init__(self, *shape: int, start: float = 1.0, stored: float = 1.0) -> None:
        super().__init__()
        self.start, self.stored = start, stored
        self.scale = nn.Parameter(torch.full(shape, stored))

    @property
    def factor(self) -> Tensor:
        return self.scale * (self.start / self.stored)

    def measured(self) -> Iterator[tuple[str, Tensor]]:
        yield "scale", self.factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.to(x.dtype)


class FollowsSteps:
    """A module that changes with the step of training. Derive from it together with `nn.Module`."""

    def at_step(self, done: int, total: int) -> None:
        """Called before each training step with the steps `done` out of the run's `total`.

        `total` is fixed when the run starts, also for runs that continue from its checkpoints; it
        is below 1 if it is unknown.
        """


def at_step(model: nn.Module, done: int, total: int) -> None:
    """Run `at_step` of all modules of `model` that follow the steps."""
    for module in model.modules():
        if isinstance(module, FollowsSteps):
            module.at_step(done, total)


Built = TypeVar("Built")


def built_aside(build: Callable[[], Built]) -> Built:
    """Return the result of `build`, whose random draws do not change later ones.

    torch's own layers draw initial values when they are built. For parts that are drawn last.
    """
    with torch.random.fork_rng(devices=[]):
        return build()


def acts_after_steps(part: object) -> bool:
    """Whether a module has an `after_step` of its own."""
    does_nothing = LearnedScalars.after_step
    return getattr(type(part), "after_step", does_nothing) is not does_nothing


def after_steps(model: nn.Module) -> Callable[[], None]:
    """Return a function that runs `after_step` of the parts of `model` that have one.

    They are found now: at each step, that would take a hundredth of a small model's time.
    """
    parts: list[Any] = [part for part in model.modules() if acts_after_steps(part)]

    @torch.no_grad()
    def run() -> None:
        for part in parts:
            part.after_step()

    return run


def unit_rows(weight: Tensor, dim: int = 1) -> None:
    """Divide the rows of `weight`, or its columns with `dim` 0, by their lengths."""
    kept = torch.promote_types(weight.dtype, torch.float32)
    weight.copy_(nn.functional.normalize(weight.to(kept), dim=dim))


Norm = str
"""A name of `NORM_KINDS`, or ``none``."""

EPSILON = 1e-5
NORMS = (nn.LayerNorm, nn.RMSNorm)

NORM_KINDS: Registry[Callable[[int], nn.Module]] = Registry(
    "model.block.norm",
    slots=(
        *("norm", "qk_norm", "value_norm", "output_norm", "ff_norm", "embedding_norm"),
        *("norm_input", "norm_branch", "norm_sum", "final_norm", "input_norm"),
    ),
)
"""The norms by name; `NORM_KINDS.register` is the decorator that adds a class.

A class is called with the size of the last dimension. Put additional parameters in a
`LearnedScalars`, which sets their initial values and weight decay.
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


@NORM_KINDS.register("rms_norm_plain")
@final
class PlainRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps)``, without a gain (nanochat)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shape, self.eps = (dim,), EPSILON

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.shape, eps=self.eps)


@NORM_KINDS.register("l2")
@final
class Directions(nn.Module):
    """``x / |x|``, computed in float32 at least."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.normalize(x.to(kept), dim=-1).to(x.dtype)


GAINED = ("layer_norm", "rms_norm")
"""Kinds with a gain over normalized entries."""

BOUNDS = ("dyt", "derf")
"""Kinds that bound each entry on its own instead of normalizing a token."""


class _Bounded(LearnedScalars):
    """The gain, the bias and the slope of a bound of single entries."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))


@NORM_KINDS.register("dyt")
@final
class DynamicTanh(_Bounded):
    """``g * tanh(a x) + b``, a a scalar that starts at 0.5 (Zhu et al. 2025, DyT, 2503.10622).

    The authors tune a by place for language models; here it starts equal everywhere.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.slope * x) + self.bias


@NORM_KINDS.register("derf")
@final
class DynamicErf(_Bounded):
    """``g * erf(a x + s) + b``, a from 0.5 and s from 0, both scalars (Derf, 2512.10938)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.erf(self.slope * x + self.shift) + self.bias


def build_norm(kind: Norm, dim: int) -> nn.Module:
    """Return the normalization `kind` over the last dimension, of size `dim`.

    The norms of this package start at ``g = 1``, ``b = 0`` and use ``eps = 1e-5``.
    """
    return NORM_KINDS[kind](dim)
