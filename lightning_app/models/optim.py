"""Optimizers, learning-rate schedules, and the parameters with weight decay."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import nn

from lightning_app.blocks.block import Block
from lightning_app.blocks.norm import LearnedScalars, after_steps
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.registry import Registry
from lightning_app.core.schema import check_range
from lightning_app.models import optimizers
from lightning_app.models.optimizers import (
    OPTIMIZERS,
    ROLES,
    Groups,
    Library,
    Role,
    Rule,
    RuleOptimizer,
    momentum_of,
)
from lightning_app.models.positions import OutputTable, SegmentTable, Table
from lightning_app.models.stack import BlockStack

SCHEDULES: Registry["ScheduleShape"] = Registry("model.schedule.kind")
"""The schedules by name; `schedule` is the decorator that adds a function."""

UNCORRECTED = ("adam", "adamw")
"""The optimizers that can omit bias correction and start v elsewhere."""
FORMS = {
    "adam": optimizers.adam,
    "adamw": optimizers.adamw,
    "radam": optimizers.radam,
    "sgd": optimizers.sgd,
}
"""Our forms of torch's optimizers, for settings that torch's lack."""
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
    """A name of `OPTIMIZERS`. adam, radam and sgd add the decay to the gradient; the others
    decouple it, as fairseq's adam does."""
    lr: float = 5.0e-4
    """The peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the two moments (not for sgd and adafactor; signum has only the first; muon,
    normuon and muonh have them for what AdamW trains, and rows of normuon the second). lion
    interpolates gradient and moment by the first for its step, and the moment decays by the
    second."""
    eps: float = 1.0e-9
    """Added to the root of the second moment (not for sgd, lion, signum and adafactor)."""
    weight_decay: float = 0.0
    """Weight decay of matrices and embeddings; never of gains, norms and biases."""
    momentum: float = 0.0
    """The momentum of sgd, muon, normuon and muonh; 0.95 is usual in the latter three."""
    bias_correction: bool | Literal["second"] = True
    """Whether adam and adamw divide their moments by 1 - beta^t. BERT's optimizer does not: its
    step t is larger by (1 - beta_1^t) / sqrt(1 - beta_2^t): 6.6 times at t = 12 for betas 0.9 and
    0.999. second: only the second moment is divided (AdamD, 2110.10828), so that step t is smaller
    by 1 - beta_1^t."""
    second_moment_start: Literal["zero", "gradient"] = "zero"
    """Where the second moment of adam and adamw starts. gradient: at the square of the first
    gradient (GI-Adam, 2406.09405); with its correction, step t is smaller by sqrt(1 - beta_2^t)."""
    momentum_warmup_steps: int = 0
    """n: the decay of the first moment rises linearly from momentum_start at step 1, and is full
    from step n + 1 on; 0: full at once. It is momentum of the kinds that have one, the second beta
    of lion, otherwise the first. Corrections divide by 1 - the product of the decays so far."""
    momentum_start: float = 0.0
    """The decay of the first moment at step 1 of its warm-up; the speedruns of NanoGPT take 0.85
    of 0.95."""
    matrix_rate: Literal["rms", "spectral"] = "rms"
    """The factor of lr for the matrices of muon and normuon: rms: 0.2 sqrt(max(rows, columns)), so
    that steps are as large as AdamW's (Liu et al. 2025, 2502.16982), and one lr serves all
    parameters; spectral: sqrt(max(1, rows / columns))."""
    block_rate: float = 1.0
    """The factor of lr for the parameters of blocks, except scalars with a rate of their own; the
    others, such as embeddings, the last norm and those of a stream's start and end, keep lr.
    depth-muP has m^-1/2 at m times as many
    layers, with branches over the root of the depth (2310.02244)."""
    arguments: dict[str, Any] | None = None
    """Further arguments of the class of adafactor, soap, ademamix or schedule_free, which are of
    other packages (`Library`), or of kl_soap, such as {precondition_frequency: 10}; null for the
    defaults."""

    def __post_init__(self) -> None:
        _ = OPTIMIZERS[self.kind]
        for name, usual in (("bias_correction", True), ("second_moment_start", "zero")):
            if (value := getattr(self, name)) != usual and self.kind not in UNCORRECTED:
                raise ValueError(
                    f"{name} {_plain(value)}: only for kinds {' and '.join(UNCORRECTED)}; kind "
                    f"{self.kind} takes {_plain(usual)}"
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
        check_range(self, "above 0", "block_rate")
        check_range(self, "at least 0", "weight_decay", "momentum_warmup_steps")
        if self.matrix_rate != "rms" and "matrix_rate" not in self.form.reads:
            raise ValueError(
                f"matrix_rate {self.matrix_rate}: only for kinds muon and normuon; kind "
                f"{self.kind} takes rms"
            )
        self._check_momentum()
        kind = OPTIMIZERS[self.kind]
        if missing := [name for name in self.form.reads if not hasattr(self, name)]:
            raise ValueError(f"kind {self.kind}: its rule reads '{missing[0]}', which is no field")
        if self.arguments is not None and not isinstance(kind, Library):
            self._check_arguments(self.form.options)
        if self.arguments == {}:  # the same experiment as null
            object.__setattr__(self, "arguments", None)
        if isinstance(kind, Rule | Library):
            kind.check(self)

    def _check_arguments(self, known: Mapping[str, float]) -> None:
        if not known:
            raise ValueError(
                f"arguments {self.arguments}: only for kinds that have some; kind {self.kind} "
                "takes null"
            )
        for name, value in (self.arguments or {}).items():
            if name not in known:
                raise ValueError(
                    f"arguments: kind {self.kind} has no '{name}'{nearest(name, known)}"
                )
            whole = isinstance(known[name], int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                wanted = "a whole number" if whole else "a number"
                raise ValueError(
                    f"arguments: {name} {value!r} of kind {self.kind}: expected {wanted}"
                )

    def _check_momentum(self) -> None:
        if not self.momentum_warmup_steps:
            return
        warmed = self.form.momentum
        if not warmed:
            raise ValueError(
                f"momentum_warmup_steps {self.momentum_warmup_steps}: kind {self.kind} has no "
                "decay of a first moment to warm up; use 0"
            )
        full = momentum_of(self, warmed)
        if not 0.0 <= self.momentum_start < full:
            raise ValueError(
                f"momentum_start {self.momentum_start}: must be at least 0 and less than the full "
                f"{full} of kind {self.kind}"
            )

    @property
    def is_own(self) -> bool:
        """Whether the rule is one of this package, of a plug-in or another, and not torch's."""
        return isinstance(OPTIMIZERS[self.kind], Rule | Library) or needs_own(self)

    @property
    def traits(self) -> Iterator[tuple[str, str]]:
        """What it needs of weights or does to them, with the field that says so."""
        kind = f"model.optimizer.kind: {self.kind}"
        if self.is_own:
            yield "reads_whole", kind
        if self.averages:
            yield "averages", kind
        if self.weight_decay:
            yield "decays_weights", f"model.optimizer.weight_decay: {self.weight_decay}"
        if not self.form.from_zero:  # it restores the size of a matrix that was made smaller
            yield "other_logits", kind

    @property
    def averages(self) -> bool:
        """Whether the kind is known to evaluate other weights than it trains."""
        kind = OPTIMIZERS[self.kind]
        return isinstance(kind, Library) and kind.averages

    @property
    def form(self) -> Rule:
        """The rule of this package for the kind; one without a momentum for another optimizer."""
        found = FORMS.get(self.kind) or OPTIMIZERS[self.kind]
        return found if isinstance(found, Rule) else Rule(update=optimizers.adam.update)


def _plain(value: Any) -> str:
    return str(value).lower()


class OrAuto:
    """A number for which a config may say auto; it is replaced before this section is read."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler(core), {"const": "auto"}]}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a factor of its peak, over steps t = 1, 2, ... T.

    With T_w = warmup_steps, T_ref = reference_steps and d(s) = min(1, (T-t+1)/(T-s+1)), the line
    that is 1 up to step s and 0 after step T:

    ============  =========================================  ==================================
    kind          coupling decoupled                         coupling paper
    ============  =========================================  ==================================
    inverse_sqrt  min(1, t/T_w) * min(1, sqrt(T_ref/t))      min(t/T_w, sqrt(T_w/t))
    linear        min(1, t/T_w) * d(T_ref)^power             min(1, t/T_w) * d(T_w)^power
    cosine        min(1, t/T_w) * c(d(T_ref))                min(1, t/T_w) * c(d(T_w))
    sqrt          min(1, t/T_w) * r(d(T_ref))                min(1, t/T_w) * r(d(T_w))
    constant      min(1, t/T_w)                              the same
    bert          (t-1)/T_w if t <= T_w, else 1 - (t-1)/T    the same
    ============  =========================================  ==================================

    c(d) = floor + (1 - floor) (1 - cos(pi d)) / 2 (Loshchilov & Hutter 2017, 1608.03983, one period
    that ends at floor). r(d) = 1 - sqrt(1 - d) (Hägele et al. 2024,
    2405.18392).

    bert is the schedule of BERT's code (Devlin et al. 2019, 1810.04805): its first step has rate 0
    if there is a warm-up, the rate falls by T_w/T of the peak at the end of the warm-up, and the
    peak is never reached.

    Decoupled, the warm-up changes only the first T_w steps; T_w is at most T_ref, so that the peak
    is reached. In the form of the papers (Vaswani et al. 2017; Xiong et al.
    2020, 2002.04745, section 3.2) T_w also rescales the whole run: "no warm-up" then also means
    almost no learning rate.
    """

    kind: str = "inverse_sqrt"
    """A name of `SCHEDULES`: inverse_sqrt, linear, cosine, sqrt, constant or bert, the shape after
    the warm-up."""
    warmup_steps: Annotated[int, OrAuto()] = 4000
    """T_w in optimizer steps; 0 is the full rate at step 1 (read as 1 if coupling is paper). A
    config may say auto: 2 / (1 - beta_2) steps (Ma & Yarats 2021, 1910.04209), for kinds with
    Adam's second moment; it is stored as the number."""
    warmup_of: Literal["all", "embeddings", "matrices", "gains", "output"] = "all"
    """The parameters whose rate is warmed up; the others have the full rate of a decoupled schedule
    from step 1. embeddings: tables of tokens, positions and segments; matrices: those of blocks;
    gains: norms, biases and learned scalars; output: tables and heads after the blocks."""
    coupling: Literal["decoupled", "paper"] = "decoupled"
    """Whether the warm-up also sets the decay (paper) or not (decoupled)."""
    reference_steps: int = 4000
    """T_ref, the step where a decoupled decay begins: the largest warm-up to compare."""
    floor: float = 0.0
    """The end of cosine, as a share of the peak."""
    power: float = 1.0
    """The exponent of the decay of linear: 1 for a line; above 1, steep first."""
    batch_warmup_steps: int = 0
    """n: step t reads the share ``batch_start + (1 - batch_start) min(1, t / n)`` of the rows of
    its batch, at least one; 0: whole batches. The other rows wait for the next epoch."""
    batch_start: float = 0.0
    """The share where the warm-up of the batch starts."""

    def __post_init__(self) -> None:
        _ = SCHEDULES[self.kind]
        if self.warmup_of != "all" and self.coupling == "paper":
            raise ValueError(
                f"warmup_of {self.warmup_of} with coupling paper, where the decay depends on the "
                "warm-up; use coupling decoupled"
            )
        check_range(self, "at least 0", "warmup_steps", "batch_warmup_steps")
        check_range(self, "at least 1", "reference_steps")
        check_range(self, "at least 0 and less than 1", "floor", "batch_start")
        check_range(self, "above 0", "power")
        if self.floor and self.kind != "cosine":
            raise ValueError(
                f"floor {self.floor}: only kind cosine has one; kind {self.kind} takes 0"
            )
        if self.power != 1.0 and self.kind != "linear":
            raise ValueError(
                f"power {self.power}: only kind linear has one; kind {self.kind} takes 1"
            )
        if self.batch_start and not self.batch_warmup_steps:
            raise ValueError(
                f"batch_start {self.batch_start} with batch_warmup_steps 0, which has none; use 0"
            )

    @property
    def traits(self) -> Iterator[tuple[str, str]]:
        """What it does to the rate, with the field that says so."""
        if self.kind != "constant":
            yield "decays_rate", f"model.schedule.kind: {self.kind}"
        if self.warmup_of != "all":
            yield "reads_whole", f"model.schedule.warmup_of: {self.warmup_of}"

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
        if 0 < total <= self.batch_warmup_steps:
            raise UserError(
                f"model.schedule.batch_warmup_steps: {self.batch_warmup_steps}, within which the "
                f"batch grows to data.tokens_per_batch; expected fewer than the {total} steps of "
                "the run"
            )
        begins, ends = self.reference_steps, self.kind in ("linear", "cosine", "sqrt")
        decays = self.coupling == "decoupled" and (ends or self.kind == "inverse_sqrt")
        if decays and (begins < self.warmup_steps or (ends and begins >= total)):
            raise UserError(
                f"model.schedule.reference_steps: {begins}, where the decoupled {self.kind} decay "
                f"begins; at least warmup_steps {self.warmup_steps}, when the rate reaches lr"
                + f", and below the {total} steps of the run"
                * ends
            )

    def factor(self, step: int, total: int) -> float:
        """Return the factor at `step` (from 1) of `total` steps."""
        return SCHEDULES[self.kind].factor(self, step, total)

    def check_roles(self, roles: Collection[str]) -> None:
        """Refuse to warm up parameters that a model lacks; it has those of `roles`.

        Raises:
            UserError: naming the field and what the model has.
        """
        if self.warmup_of not in ("all", *roles):
            has = ", ".join(role for role in ROLES if role in roles)
            tied = ", whose output layer reads the table of tokens" * (self.warmup_of == "output")
            raise UserError(
                f"model.schedule.warmup_of: {self.warmup_of}, which the model lacks{tied}; it has "
                f"{has}"
            )

    def ramp(self, step: int) -> float:
        """Return the completed share of the warm-up at `step`, at most 1."""
        return min(1.0, step / max(self.warmup_steps, 1))

    def batch_share(self, step: int) -> float:
        """Return the share of its batch that is read at `step`, from 1."""
        done = min(1.0, step / max(self.batch_warmup_steps, 1))
        return self.batch_start + (1.0 - self.batch_start) * done

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
    return config.ramp(step) * _left(config.start, step, total) ** config.power


@schedule("cosine", ends=True)
def _cosine(config: ScheduleConfig, step: int, total: int) -> float:
    wave = (1.0 - math.cos(math.pi * _left(config.start, step, total))) / 2.0
    return config.ramp(step) * (config.floor + (1.0 - config.floor) * wave)


@schedule("sqrt", ends=True)
def _sqrt(config: ScheduleConfig, step: int, total: int) -> float:
    return config.ramp(step) * (1.0 - math.sqrt(1.0 - _left(config.start, step, total)))


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
    return min(1.0, max(0.0, (total - step + 1) / max(total - start + 1, 1)))


_TABLES = (nn.Embedding, Table, SegmentTable)


def _trained(model: nn.Module) -> Iterator[tuple[nn.Parameter, Role, bool, float | None, bool]]:
    """Yield each parameter, its role, whether it decays, its own rate, whether it is of a block.

    Norms, biases and learned scalars take no decay, unless the class of scalars sets it; a single
    number takes none.
    """
    inside = {
        part
        for stack in model.modules()
        if isinstance(stack, BlockStack)
        for part in stack.modules()
    }
    blocks = (part for part in model.modules() if isinstance(part, Block))
    of_blocks = {part for block in blocks for part in block.modules()}
    for module in model.modules():
        scalars = isinstance(module, LearnedScalars)
        norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        gain = norm or (scalars and not module.decays)
        rate = module.lr if scalars else None
        if rate is not None and not gain:
            raise UserError(
                f"{type(module).__name__}: scalars with a rate of their own take no weight decay; "
                "leave out lr, or set decays = False"
            )
        for name, parameter in module.named_parameters(recurse=False):
            exempt = gain or name.endswith("bias") or parameter.dim() == 0
            role: Role = "matrices"
            if exempt or scalars or parameter.dim() < 2:
                role = "gains"
            elif isinstance(module, _TABLES):
                role = "embeddings"
            elif isinstance(module, OutputTable) or (inside and module not in inside):
                role = "output"
            yield parameter, role, not exempt, rate, module in of_blocks


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    by_role: bool = False,
    rate_of: Callable[[Role, bool], float | None] = lambda role, in_block: None,
) -> Groups:
    """Split the parameters into those that decay and those that never do.

    Scalars with their own learning rate form one group per rate, without decay; `rate_of` is the
    rate of others by their role, in a block or not, None for the optimizer's. With `by_role` each
    group has parameters of one `Role`, which it names.
    """
    found: dict[tuple[float | None, bool, Role | None], list[nn.Parameter]] = {}
    if not by_role:
        found[None, True, None] = []
    for parameter, role, decays, own, in_block in _trained(model):
        rate = rate_of(role, in_block) if own is None else own
        key = (rate, decays and own is None, role if by_role else None)
        found.setdefault(key, []).append(parameter)
    groups: Groups = []
    for rate, decays, role in sorted(found, key=lambda key: (key[0] is not None, not key[1])):
        group = {"params": found[rate, decays, role], "weight_decay": weight_decay * decays}
        group |= {} if rate is None else {"lr": rate}
        groups.append(group | ({} if role is None else {"role": role}))
    return groups


def needs_own(config: OptimizerConfig) -> bool:
    """Whether settings of one of torch's kinds need our form of it."""
    return (
        config.bias_correction == "second"
        or config.second_moment_start != "zero"
        or config.momentum_warmup_steps > 0
    )


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
def torch_adam(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Kingma & Ba 2015 (1412.6980); the weight decay is added to the gradient."""
    return _corrected(torch.optim.Adam(groups, fused=fused, **_moments(config)), config)


@OPTIMIZERS.register("adamw")
def torch_adamw(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Loshchilov & Hutter 2019 (1711.05101); the weight decay is decoupled from the gradient."""
    return _corrected(torch.optim.AdamW(groups, fused=fused, **_moments(config)), config)


@OPTIMIZERS.register("sgd")
def torch_sgd(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)


@OPTIMIZERS.register("radam")
def torch_radam(config: OptimizerConfig, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """Liu et al. 2020 (1908.03265), which has no fused form."""
    return torch.optim.RAdam(groups, **_moments(config))


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    *,
    fused: bool,
    by_role: bool = False,
    width_factor: float = 1.0,
) -> torch.optim.Optimizer:
    """Return the optimizer for the parameters of `model`, with `by_role` in groups of one role.

    With the rates of muP for a `width_factor` other than 1, see `ArchitectureConfig`.

    After each of its steps it runs `after_step` of the parts of `model`. If it `averages`, the
    parameters are those that it trains.

    Raises:
        UserError: for a matrix of zeros, if the kind cannot move it.
    """
    kind = OPTIMIZERS[config.kind]
    if needs_own(config):
        kind = FORMS.get(config.kind, kind)
    apart = isinstance(kind, Rule) and bool(kind.on)
    if width_factor != 1.0:
        config = replace(config, eps=config.eps / width_factor)

    def rate_of(role: Role, in_block: bool) -> float | None:
        factor = config.block_rate if in_block else 1.0
        if in_block and role == "matrices":
            factor /= width_factor
        return None if factor == 1.0 else config.lr * factor

    groups = parameter_groups(model, config.weight_decay, by_role=by_role or apart, rate_of=rate_of)
    if isinstance(kind, Rule) and not kind.from_zero:
        _check_zeros(config.kind, kind, groups, model)
    optimizer: Any = kind(config, groups, fused=fused)
    if optimizers.averages(optimizer):
        optimizer.train()
    constrain = after_steps(model)
    optimizer.register_step_post_hook(lambda *_: constrain())
    return optimizer


def _check_zeros(name: str, kind: Rule, groups: Groups, model: nn.Module) -> None:
    moved = {each for group in groups if group["role"] in kind.on for each in group["params"]}
    for path, parameter in model.named_parameters():
        if parameter in moved and not parameter.is_meta and not parameter.any():
            raise UserError(
                f"model.optimizer.kind: {name} keeps the norms of matrices, and {path} starts at "
                "zero; use another kind, or a block whose matrices start elsewhere"
            )


def training_of(
    optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, model: nn.Module
) -> list[dict[str, Any]]:
    """Return by role which parameters are trained by what, and at which peak rates.

    `rate` has the smallest and the largest one, which differ where they follow from shapes.
    """
    roles = {parameter: role for parameter, role, *_ in _trained(model)}
    rows: list[dict[str, Any]] = []
    for role in ROLES:
        for group in optimizer.param_groups:
            mine = [each for each in group["params"] if roles[each] == role]
            if not mine:
                continue
            peak = group.get("initial_lr", group["lr"])
            rates = [peak]
            if isinstance(optimizer, RuleOptimizer):
                factor = optimizer.rules[group["rule"]].factor
                rates = [peak * factor(each, group) for each in mine]
            warmed = schedule.warmup_of in ("all", role)
            row = {"role": role, "parameters": sum(each.numel() for each in mine)}
            row |= {"by": group.get("rule", type(optimizer).__name__.lower())}
            row |= {"library": group["library"]} if "library" in group else {}
            row |= {"rate": [min(rates), max(rates)], "weight_decay": group["weight_decay"]}
            rows.append({**row, "warmup_steps": schedule.warmup_steps * warmed})
    return rows


def build_schedule(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, total: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule over `total` steps. LambdaLR counts from 0, the formulas from 1.

    Raises:
        UserError: if the run is too short for the schedule, or no parameter is warmed up.
    """
    config.check(total)
    factor: Callable[[int], float] = lambda done: config.factor(done + 1, total)  # noqa: E731
    if config.warmup_of == "all":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    roles = [group["role"] for group in optimizer.param_groups]
    config.check_roles(roles)
    others = replace(config, warmup_steps=0, warmup_of="all")
    full: Callable[[int], float] = lambda done: others.factor(done + 1, total)  # noqa: E731
    factors = [factor if role == config.warmup_of else full for role in roles]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


def set_rates(schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Give the next step the rates of `schedule`.

    A checkpoint restores those that the schedule of its own run had.
    """
    groups = schedule.optimizer.param_groups
    for group, rate, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * factor(schedule.last_epoch)
