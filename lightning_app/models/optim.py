"""Optimizers, learning-rate schedules, and the parameters with weight decay."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from lightning_app.blocks.norm import LearnedScalars, after_step
from lightning_app.core.errors import UserError
from lightning_app.core.registry import Registry

Groups = list[dict[str, Any]]
"""The parameter groups that `parameter_groups` returns."""

OPTIMIZERS: Registry["BuildOptimizer"] = Registry("model.optimizer.kind")
"""The optimizers by name; `OPTIMIZERS.register` is the decorator that adds one."""

SCHEDULES: Registry["ScheduleShape"] = Registry("model.schedule.kind")
"""The schedules by name; `schedule` is the decorator that adds a function."""

UNCORRECTED = ("adam", "adamw")
"""The optimizers that can omit bias correction."""
LATE = 2.0**24
"""A number of steps after which ``1 - beta^t`` is 1; adding 1 to it changes nothing in float32."""
RATES = (1.0e-30, 1.0e30)
"""The smallest and the largest rate: beyond them, parameters in float32 do not move or are not
finite after a step, and no figure axis can show them."""
HIGHEST = 0.999999
"""The largest beta for which that holds: the remainder is then 5e-8."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its constants."""

    kind: str = "adam"
    """A name of `OPTIMIZERS`. adam and radam add the decay to the gradient; adamw decouples it, as
    fairseq's adam does."""
    lr: float = 5.0e-4
    """The peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the two moments (not for sgd)."""
    eps: float = 1.0e-9
    """Added to the root of the second moment (not for sgd)."""
    weight_decay: float = 0.0
    """Weight decay of matrices and embeddings; never of gains, norms and biases."""
    momentum: float = 0.0
    """The momentum of sgd."""
    bias_correction: bool = True
    """Whether adam and adamw divide their moments by 1 - beta^t. BERT's optimizer does not: its
    step t is larger by (1 - beta_1^t) / sqrt(1 - beta_2^t): 6.6 times at t = 12 for betas 0.9 and
    0.999."""

    def __post_init__(self) -> None:
        _ = OPTIMIZERS[self.kind]
        if not self.bias_correction and self.kind not in UNCORRECTED:
            raise ValueError(
                f"bias_correction false: only for kinds {' and '.join(UNCORRECTED)}; kind "
                f"{self.kind} takes true"
            )
        if not self.bias_correction and max(self.betas) > HIGHEST:
            raise ValueError(
                f"betas {self.betas} with bias_correction false: each must be at most {HIGHEST}"
            )
        low, high = RATES
        if not low <= self.lr <= high:
            raise ValueError(f"lr {self.lr}: must be a rate from {low:g} to {high:g}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas {self.betas}: each must be at least 0 and less than 1")
        if self.weight_decay < 0.0:
            raise ValueError(f"weight_decay {self.weight_decay}: must be at least 0")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a factor of its peak, over steps t = 1, 2, ... T.

    With T_w = warmup_steps, T_ref = reference_steps and d(s) = min(1, (T-t+1)/(T-s+1)), the line
    that is 1 up to step s and 0 after step T:

    ============  =========================================  ==================================
    kind          coupling decoupled                         coupling paper
    ============  =========================================  ==================================
    inverse_sqrt  min(1, t/T_w) * min(1, sqrt(T_ref/t))      min(t/T_w, sqrt(T_w/t))
    linear        min(1, t/T_w) * d(T_ref)                   min(1, t/T_w) * d(T_w)
    cosine        min(1, t/T_w) * c(d(T_ref))                min(1, t/T_w) * c(d(T_w))
    constant      min(1, t/T_w)                              the same
    bert          (t-1)/T_w if t <= T_w, else 1 - (t-1)/T    the same
    ============  =========================================  ==================================

    c(d) = floor + (1 - floor) (1 - cos(pi d)) / 2 (Loshchilov & Hutter 2017, 1608.03983, one period
    that ends at floor).

    bert is the schedule of BERT's code (Devlin et al. 2019, 1810.04805): its first step has rate 0
    if there is a warm-up, the rate falls by T_w/T of the peak at the end of the warm-up, and the
    peak is never reached.

    Decoupled, the warm-up changes only the first T_w steps, and the peak is
    reached wherever T_w <= T_ref. In the form of the papers (Vaswani et al. 2017; Xiong et al.
    2020, 2002.04745, section 3.2) T_w also rescales the whole run: "no warm-up" then also means
    almost no learning rate.
    """

    kind: str = "inverse_sqrt"
    """A name of `SCHEDULES`: inverse_sqrt, linear, cosine, constant or bert, the shape after the
    warm-up."""
    warmup_steps: int = 4000
    """T_w in optimizer steps; 0 is the full rate at step 1 (read as 1 if coupling is paper)."""
    coupling: Literal["decoupled", "paper"] = "decoupled"
    """Whether the warm-up also sets the decay (paper) or not (decoupled)."""
    reference_steps: int = 4000
    """T_ref, the step where a decoupled decay begins: the largest warm-up to compare."""
    floor: float = 0.0
    """The end of cosine, as a share of the peak."""

    def __post_init__(self) -> None:
        _ = SCHEDULES[self.kind]
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps {self.warmup_steps}: must be at least 0")
        if self.reference_steps < 1:
            raise ValueError(f"reference_steps {self.reference_steps}: must be at least 1")
        if not 0.0 <= self.floor < 1.0:
            raise ValueError(f"floor {self.floor}: must be at least 0 and less than 1")
        if self.floor and self.kind != "cosine":
            raise ValueError(
                f"floor {self.floor}: only kind cosine has one; kind {self.kind} takes 0"
            )

    @property
    def ends(self) -> bool:
        """Whether the schedule needs to know the last step of the run."""
        return SCHEDULES[self.kind].ends

    def check(self, total: int) -> None:
        """Refuse a warm-up or a decoupled decay that does not fit into a run of `total` steps.

        A run whose warm-up does not end never reaches its peak rate, so `lr` would be wrong.
        `total` is -1 for a run without a limit on steps.

        Raises:
            UserError: naming the field and what would be right.
        """
        if 0 < total <= self.warmup_steps:
            raise UserError(
                f"model.schedule.warmup_steps: {self.warmup_steps}, within which the rate rises to "
                f"its peak; expected fewer than the {total} steps of the run"
            )
        decays = self.kind in ("linear", "cosine") and self.coupling == "decoupled"
        if decays and not self.warmup_steps <= self.reference_steps < total:
            raise UserError(
                f"model.schedule.reference_steps: {self.reference_steps}, where the decoupled "
                f"{self.kind} decay begins; at least warmup_steps {self.warmup_steps} and below "
                f"the {total} steps of the run"
            )

    def factor(self, step: int, total: int) -> float:
        """Return the factor at `step` (from 1) of `total` steps."""
        return SCHEDULES[self.kind].factor(self, step, total)

    def ramp(self, step: int) -> float:
        """Return the completed share of the warm-up at `step`, at most 1."""
        return min(1.0, step / max(self.warmup_steps, 1))

    @property
    def start(self) -> int:
        """The step where the decay begins."""
        return max(self.warmup_steps, 1) if self.coupling == "paper" else self.reference_steps


Factor = Callable[[ScheduleConfig, int, int], float]


@dataclass(frozen=True)
class ScheduleShape:
    """A schedule: `factor` takes the config, the step (from 1) and the last step of the run.

    `ends`: whether it reads that last step, which the run must then know.
    """

    factor: Factor
    ends: bool = False


def schedule(name: str, *, ends: bool = False) -> Callable[[Factor], Factor]:
    """Return the decorator that makes a function the schedule `name`."""

    def add(factor: Factor) -> Factor:
        SCHEDULES.add(name, ScheduleShape(factor, ends))
        return factor

    return add


@schedule("inverse_sqrt")
def _inverse_sqrt(config: ScheduleConfig, step: int, total: int) -> float:
    return config.ramp(step) * min(1.0, math.sqrt(config.start / step))


@schedule("linear", ends=True)
def _linear(config: ScheduleConfig, step: int, total: int) -> float:
    return config.ramp(step) * _left(config.start, step, total)


@schedule("cosine", ends=True)
def _cosine(config: ScheduleConfig, step: int, total: int) -> float:
    wave = (1.0 - math.cos(math.pi * _left(config.start, step, total))) / 2.0
    return config.ramp(step) * (config.floor + (1.0 - config.floor) * wave)


@schedule("constant")
def _constant(config: ScheduleConfig, step: int, total: int) -> float:
    return config.ramp(step)


@schedule("bert", ends=True)
def _bert(config: ScheduleConfig, step: int, total: int) -> float:
    done = step - 1
    if done < config.warmup_steps:
        return done / config.warmup_steps
    return max(0.0, 1.0 - done / total)


def _left(start: int, step: int, total: int) -> float:
    """Return the remaining share of a decay from step `start` to step `total`."""
    return min(1.0, max(0.0, (total - step + 1) / max(total - start + 1, 1)))


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Split the parameters into those that decay and those that never do.

    Norms, biases and learned scalars take no decay, unless the class of a scalar sets it. Scalars
    with their own learning rate form one group per rate, without decay.
    """
    decaying, free = [], []
    by_rate: dict[float, list[nn.Parameter]] = {}
    for module in model.modules():
        gain = isinstance(module, nn.LayerNorm | nn.RMSNorm) or (
            isinstance(module, LearnedScalars) and not module.decays
        )
        if isinstance(module, LearnedScalars) and module.lr is not None:
            assert not module.decays
            by_rate.setdefault(module.lr, []).extend(module.parameters(recurse=False))
            continue
        for name, parameter in module.named_parameters(recurse=False):
            exempt = gain or name.endswith("bias")
            (free if exempt else decaying).append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}]
    if free:
        groups.append({"params": free, "weight_decay": 0.0})
    for rate, parameters in by_rate.items():
        groups.append({"params": parameters, "weight_decay": 0.0, "lr": rate})
    return groups


class BuildOptimizer(Protocol):
    """Builds an optimizer for the parameters in `groups`.

    `fused` selects the form that updates all parameters in one kernel, if the device has one.
    """

    def __call__(
        self, config: OptimizerConfig, groups: Groups, *, fused: bool
    ) -> torch.optim.Optimizer: ...


def _moments(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps}


def _corrected(optimizer: torch.optim.Adam, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer, without its bias correction if the config says so.

    Its moments start at zero as usual, but it counts its steps from a number at which the
    correction is 1, so that it keeps its fused form and its checkpoints.
    """
    if not config.bias_correction:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                place = parameter.device if group["fused"] else torch.device("cpu")
                optimizer.state[parameter] = {
                    "step": torch.tensor(LATE, dtype=torch.float32, device=place),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    return optimizer


@OPTIMIZERS.register("adam")
def adam(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Kingma & Ba 2015 (1412.6980); the weight decay is added to the gradient."""
    return _corrected(torch.optim.Adam(groups, fused=fused, **_moments(config)), config)


@OPTIMIZERS.register("adamw")
def adamw(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Loshchilov & Hutter 2019 (1711.05101); the weight decay is decoupled from the gradient."""
    return _corrected(torch.optim.AdamW(groups, fused=fused, **_moments(config)), config)


@OPTIMIZERS.register("sgd")
def sgd(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)


@OPTIMIZERS.register("radam")
def radam(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Liu et al. 2020 (1908.03265), which has no fused form."""
    return torch.optim.RAdam(groups, **_moments(config))


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, *, fused: bool
) -> torch.optim.Optimizer:
    """Return the optimizer for the parameters of `model`.

    After each of its steps it runs `after_step` of the parts of `model`.
    """
    groups = parameter_groups(model, config.weight_decay)
    optimizer = OPTIMIZERS[config.kind](config, groups, fused=fused)
    optimizer.register_step_post_hook(lambda *_: after_step(model))
    return optimizer


def build_schedule(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, total: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule over `total` steps. LambdaLR counts from 0, the formulas from 1.

    Raises:
        UserError: if the run is too short for the schedule.
    """
    config.check(total)
    factor: Callable[[int], float] = lambda done: config.factor(done + 1, total)  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
