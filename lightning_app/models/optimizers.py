"""The frame of our own optimizers, and their rules: each is one function of one parameter.

`Library` has those of other packages.
"""

import importlib.metadata
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor

from lightning_app.core.errors import nearest
from lightning_app.core.registry import Registry

Groups = list[dict[str, Any]]
"""The parameter groups that `parameter_groups` returns."""

Role = Literal["embeddings", "matrices", "gains", "output"]
"""What a parameter is: a row per token or position, a matrix of a block, a norm, a bias or a
learned scalar, or a matrix after the stacks: an output table of its own, or a head."""

ROLES: tuple[Role, ...] = get_args(Role)

State = dict[str, Any]
Group = Mapping[str, Any]

Update = Callable[[Tensor, Tensor, State, Group], Tensor]
"""Returns the new value of a parameter from its value, its gradient, its state and its group.

Value and gradient are in float32 at least, and belong to the caller: a rule changes neither. The
state is the rule's own, apart from ``step``, which counts from 1; it holds tensors and numbers. The
group has ``lr``, ``weight_decay`` and the constants of the optimizer at this step.
"""


class BuildOptimizer(Protocol):
    """Builds an optimizer for the parameters in `groups`.

    `fused` selects the form that updates all parameters in one kernel, if the device has one.
    """

    def __call__(self, config: Any, groups: Groups, *, fused: bool) -> torch.optim.Optimizer: ...


_ADAM = ("betas", "eps", "bias_correction", "second_moment_start")

OPTIMIZERS: Registry[BuildOptimizer] = Registry("model.optimizer.kind")
"""The optimizers by name; `OPTIMIZERS.register` is the decorator that adds one."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An optimizer that is one function per parameter, and what it needs; `rule` makes one.

    It builds a `RuleOptimizer`, so that it can be registered as an optimizer.
    """

    update: Update
    reads: tuple[str, ...] = ()
    """The fields of the config that the function finds in the group."""
    momentum: Literal["beta1", "beta2", "momentum", ""] = ""
    """The decay of its first moment, which a warm-up of the momentum changes."""
    on: tuple[Role, ...] = ()
    """The roles that it trains; AdamW trains the others. Empty: all of them, as one group."""
    check: Callable[[Any], None] = field(default=lambda config: None)
    """Raises `ValueError` for a config that it cannot serve."""
    from_zero: bool = True
    """Whether it moves a matrix whose initial value is zero."""
    factor: Callable[[Tensor, Group], float] = field(default=lambda parameter, group: 1.0)
    """The factor of the rate of a parameter, from its shape and its group."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Constants of its own, which the function finds in the group too, with their usual values;
    `model.optimizer.arguments` replaces them."""

    def __post_init__(self) -> None:
        taken = {"params", "lr", "weight_decay", "role", "rule", "momentum_warmup", *self.reads}
        taken |= {*_ADAM} if self.on else set()  # AdamW, which trains the others, reads these
        if clash := taken & self.options.keys():
            raise ValueError(
                f"options {sorted(clash)}: a group has these already; take other names"
            )
        # What another plug-in put into it would be part of no id.
        object.__setattr__(self, "options", MappingProxyType({**self.options}))
        if unknown := {*self.on} - {*ROLES}:
            raise ValueError(f"on {sorted(unknown)}: expected some of {', '.join(ROLES)}")
        if self.on and self.update.__name__ == "adamw":
            raise ValueError("adamw: trains the other parameters; take another name for the rule")
        read = {"": None, "momentum": "momentum", "beta1": "betas", "beta2": "betas"}
        if self.momentum not in read:
            raise ValueError(f"momentum '{self.momentum}': expected momentum, beta1 or beta2")
        if read[self.momentum] not in (None, *self.reads):
            raise ValueError(f"momentum {self.momentum}: add {read[self.momentum]} to reads")

    def __call__(self, config: Any, groups: Groups, *, fused: bool) -> "RuleOptimizer":
        constants = {name: getattr(config, name) for name in self.reads}
        constants |= {**self.options, **(config.arguments or {})}
        if config.momentum_warmup_steps:
            start = (config.momentum_warmup_steps, config.momentum_start)
            constants["momentum_warmup"] = (self.momentum, *start)
        rules = {each.update.__name__: each for each in (adamw, self)}
        for group in groups:
            trained = self if not self.on or group["role"] in self.on else adamw
            group["rule"] = trained.update.__name__
            if trained is adamw:
                constants |= {name: getattr(config, name) for name in adamw.reads}
        return RuleOptimizer(groups, rules, lr=config.lr, **constants)


@dataclass(frozen=True, kw_only=True)
class Library:
    """An optimizer class of an installed package, imported when a config names it.

    It receives groups with `lr` and `weight_decay`, what `reads` takes from the config, and
    `model.optimizer.arguments`. These may extend a value of the config, as a third beta does, but
    not contradict it.

        path = "torch.optim.NAdam"
        OPTIMIZERS.add("nadam", Library(package="torch", path=path, reads=moments_of))
    """

    package: str
    """The name under which pip knows it."""
    path: str
    reads: Callable[[Any], dict[str, Any]]

    @property
    def version(self) -> str:
        """Package and version, as in ``pytorch-optimizer 4.1.0``."""
        return f"{self.package} {importlib.metadata.version(self.package)}"

    def __call__(self, config: Any, groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
        given = {"lr": config.lr, **self.reads(config), **(config.arguments or {})}
        for group in groups:
            group["library"] = self.version
        return self._class()(groups, **given)

    @property
    def averages(self) -> bool:
        """Whether it evaluates other weights than it trains; see `averages`."""
        return averages(self._class())

    def _class(self) -> Any:
        module, _, name = self.path.rpartition(".")
        return getattr(import_module(module), name)

    def check(self, config: Any) -> None:
        """Refuse a config with which the class cannot take a step, by one on a small matrix.

        Raises:
            ValueError: naming the field.
        """
        try:
            known = inspect.signature(self._class()).parameters
        except ImportError as error:
            raise ValueError(
                f"kind {config.kind}: {self.package} is not installed; run "
                "pip install 'transformer-ablations[optimizers]'"
            ) from error
        given = config.arguments or {}
        for argument in given:
            if argument in ("lr", "weight_decay"):
                raise ValueError(f"arguments: {argument} belongs to model.optimizer.{argument}")
            if argument == "warmup_steps":
                raise ValueError("arguments: warmup_steps belongs to model.schedule.warmup_steps")
            if argument in ("params", "kwargs") or argument not in known:
                raise ValueError(
                    f"arguments: {self.path} has no '{argument}'{nearest(argument, known)}"
                )
            usual = getattr(config, argument, self.reads(config).get(argument))
            value, field = _listed(given[argument]), _listed(usual)
            if argument in self.reads(config) and value[: len(field)] != field:
                raise ValueError(
                    f"arguments: {argument} {given[argument]} contradicts model.optimizer."
                    f"{argument} {usual}"
                )
        matrix = torch.nn.Parameter(torch.eye(2))
        matrix.grad = torch.ones(2, 2)
        group = {"params": [matrix], "weight_decay": config.weight_decay}
        try:
            with torch.random.fork_rng(devices=[]):  # a caller may train afterwards
                optimizer: Any = self(config, [group], fused=False)
                if averages(optimizer):
                    optimizer.train()
                optimizer.step()
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise ValueError(
                f"arguments {given}: {self.path}: {type(error).__name__}: {said}"
            ) from error


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def averages(optimizer: Any) -> bool:
    """Whether an optimizer evaluates other weights than it trains, as schedule-free ones do: it has
    `train` and `eval`, which replace the one by the other in its parameters."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


class Averaged:
    """The trained and the evaluated weights of an optimizer that `averages`.

    `eval` computes the one from the other, so that its inverse rounds; the trained weights are kept
    meanwhile, and validations change no bit of a training.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._trained: list[Tensor] | None = None

    @property
    def evaluates(self) -> bool:
        """Whether the parameters hold the evaluated weights."""
        return self._trained is not None

    def _parameters(self) -> list[Tensor]:
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    @torch.no_grad()
    def evaluate(self) -> None:
        """Put the evaluated weights into the parameters."""
        if self._trained is None:
            self._trained = [each.clone() for each in self._parameters()]
            self.optimizer.eval()

    @torch.no_grad()
    def train(self) -> None:
        """Put the trained weights back."""
        if self._trained is not None:
            self.optimizer.train()
            for parameter, value in zip(self._parameters(), self._trained, strict=True):
                parameter.copy_(value)
            self._trained = None


def rule(**needs: Any) -> Callable[[Update], Rule]:
    """Return the decorator that makes a function an optimizer: the arguments of `Rule`.

    An example:

        @OPTIMIZERS.register("signum")
        @rule(reads=("betas",), momentum="beta1")
        def signum(parameter, gradient, state, group): ...
    """
    return lambda update: Rule(update=update, **needs)


class RuleOptimizer(torch.optim.Optimizer):
    """Applies to each parameter the rule that its group names.

    All ranks compute the same from the same gradients. The state is kept in float32 at least, also
    over a checkpoint.

    Args:
        groups: The parameter groups, each with the name of its `rule`.
        rules: The rules by name.
        constants: `lr` and what the rules read.
    """

    def __init__(self, groups: Groups, rules: Mapping[str, Rule], **constants: Any) -> None:
        super().__init__(groups, constants)
        self.rules = rules

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self.rules[group["rule"]].update
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = cast(dict[str, Any], self.state[parameter])
                state["step"] = state.get("step", 0) + 1
                now = with_momentum(group, state["step"])
                new = update(_wide(parameter), _wide(parameter.grad), state, now)
                if getattr(new, "shape", None) != parameter.shape:  # a copy would repeat it
                    raise ValueError(
                        f"{group['rule']}: expected a tensor of shape {[*parameter.shape]}, the "
                        f"parameter's, and found {new if new is None else [*new.shape]}"
                    )
                parameter.copy_(new)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch would convert moments to the type of their parameters."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def with_momentum(group: Group, step: int) -> Group:
    """Return a group whose momentum is the one of `step`, from 1.

    With a warm-up of n steps it is ``start + (full - start) min(1, (step - 1) / n)``, as in the
    speedruns of NanoGPT.
    """
    if "momentum_warmup" not in group:
        return group
    name, steps, start = group["momentum_warmup"]
    share = min(1.0, (step - 1) / steps)

    def warmed(full: float) -> float:
        return start + (full - start) * share

    if name == "momentum":
        return {**group, "momentum": warmed(group["momentum"])}
    beta1, beta2 = group["betas"]
    betas = (warmed(beta1), beta2) if name == "beta1" else (beta1, warmed(beta2))
    return {**group, "betas": betas}


def momentum_of(config: Any, name: str) -> float:
    """Return the full momentum of a config, by the name that a `Rule` has for it."""
    return config.momentum if name == "momentum" else config.betas[name == "beta2"]


def moment(
    name: str, value: Tensor, decay: float, state: State, start: Tensor | None = None
) -> Tensor:
    """Return the moving average of `value`, from `start` or zero; it is the state `name`."""
    if name not in state:
        state[name] = torch.zeros_like(value) if start is None else start.clone()
    return state[name].mul_(decay).add_(value, alpha=1.0 - decay)


def moments(gradient: Tensor, state: State, group: Group) -> tuple[Tensor, Tensor]:
    """Return Adam's two moments, corrected as the group says.

    m is divided by ``1 - beta1_1 ... beta1_t``, also where beta1 changes, v by ``1 - beta2^t``.
    """
    beta1, beta2 = group["betas"]
    squared = gradient * gradient
    start = squared if group.get("second_moment_start") == "gradient" else None
    m = moment("exp_avg", gradient, beta1, state)
    v = moment("exp_avg_sq", squared, beta2, state, start)
    corrected = group.get("bias_correction", True)
    if "momentum_warmup" in group:
        state["left"] = state.get("left", 1.0) * beta1
    left = state.get("left", beta1 ** state["step"])
    m = m / (1.0 - left) if corrected is True else m
    return m, v / (1.0 - beta2 ** state["step"]) if corrected else v


def moved(parameter: Tensor, direction: Tensor, group: Group) -> Tensor:
    """Return ``(1 - lr wd) p - lr u``: a step along u, with decoupled weight decay."""
    lr = group["lr"]
    return (parameter * (1.0 - lr * group["weight_decay"])).add_(direction, alpha=-lr)


def with_decay(parameter: Tensor, gradient: Tensor, group: Group) -> Tensor:
    """Return the gradient plus the weight decay, as adam, radam and sgd have it."""
    decay = group["weight_decay"]
    return gradient.add(parameter, alpha=decay) if decay else gradient


# Forms of torch's optimizers with settings that torch's lack.


@rule(reads=_ADAM, momentum="beta1")
def adamw(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """``u = m / (sqrt(v) + eps)``; the weight decay is decoupled."""
    m, v = moments(gradient, state, group)
    return moved(parameter, m / (v.sqrt() + group["eps"]), group)


@rule(reads=_ADAM, momentum="beta1")
def adam(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """The same; the weight decay is part of the gradient."""
    gradient = with_decay(parameter, gradient, group)
    return adamw.update(parameter, gradient, state, {**group, "weight_decay": 0.0})


@rule(reads=("betas", "eps"), momentum="beta1")
def radam(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Like `torch.optim.RAdam`, whose m is alone up to ``rho_t = 5``."""
    m, v = moments(with_decay(parameter, gradient, group), state, group)
    beta2, step = group["betas"][1], state["step"]
    most = 2.0 / (1.0 - beta2) - 1.0
    rho = most - 2.0 * step * beta2**step / (1.0 - beta2**step)
    if rho > 5.0:
        over = (rho - 4.0) * (rho - 2.0) * most
        root = math.sqrt(1.0 - beta2**step)
        under = (most - 4.0) * (most - 2.0) * rho
        m = m * math.sqrt(over / under) / (v.sqrt() + group["eps"] / root)
    return parameter - group["lr"] * m


@rule(reads=("momentum",), momentum="momentum")
def sgd(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """``b = mu b + g``, ``u = b``; the weight decay is part of the gradient."""
    gradient = with_decay(parameter, gradient, group)
    buffer = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
    return parameter - group["lr"] * buffer.mul_(group["momentum"]).add_(gradient)


# Signs.


@OPTIMIZERS.register("lion")
@rule(reads=("betas",), momentum="beta2")
def lion(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Chen et al. 2023 (2302.06675): ``u = sign(beta1 m + (1 - beta1) g)``; m decays by beta2."""
    beta1, beta2 = group["betas"]
    m = state.setdefault("exp_avg", torch.zeros_like(gradient))
    direction = (beta1 * m).add_(gradient, alpha=1.0 - beta1).sign_()
    moment("exp_avg", gradient, beta2, state)
    return moved(parameter, direction, group)


@OPTIMIZERS.register("signum")
@rule(reads=("betas",), momentum="beta1")
def signum(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Bernstein et al. 2018 (1802.04434): ``u = sign(m)``; the weight decay is decoupled."""
    return moved(parameter, moment("exp_avg", gradient, group["betas"][0], state).sign(), group)


# Adam with the size of its steps under control.

_DECAYING: tuple[Role, ...] = ("embeddings", "matrices", "output")


@OPTIMIZERS.register("stable_adamw")
@rule(reads=("betas", "eps"), momentum="beta1")
def stable_adamw(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Wortsman et al. 2023 (2304.13013): AdamW with the rate ``lr / max(1, RMS)`` per parameter.

    RMS is the root of the mean of ``g^2 / max(v, eps^2)``, v with the present gradient in it and
    corrected, like the authors' beta2 that depends on the step.
    """
    m, v = moments(gradient, state, group)
    rms = (gradient * gradient / v.clamp(min=group["eps"] ** 2)).mean().sqrt()
    lr = group["lr"] / rms.clamp(min=1.0)
    direction = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * parameter
    return parameter - lr * direction


@OPTIMIZERS.register("lamb")
@rule(reads=("betas", "eps"), momentum="beta1", on=_DECAYING)
def lamb(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """You et al. 2020 (1904.00962), algorithm 2: Adam's u plus the decay, times ``|p| / |u|``.

    Both moments are corrected; norms are not clipped, and neither is the gradient. Gains, norms and
    biases have the ratio 1, as in the authors' code, and so has a parameter or u of length 0.
    """
    m, v = moments(gradient, state, group)
    direction = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * parameter
    lengths = torch.stack([parameter.norm(), direction.norm()])
    ratio = torch.where((lengths > 0.0).all(), lengths[0] / lengths[1], 1.0)
    return parameter - group["lr"] * ratio * direction


def _check_rotation(config: Any) -> None:
    if not config.weight_decay > 0.0:
        raise ValueError(
            f"weight_decay {config.weight_decay}: kind rotational_adamw turns by an angle of "
            "sqrt(2 lr weight_decay), so it must be above 0"
        )


@OPTIMIZERS.register("rotational_adamw")
@rule(
    reads=("betas", "eps"), momentum="beta1", on=_DECAYING, check=_check_rotation, from_zero=False
)
def rotational_adamw(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Kosson et al. 2024 (2305.17212): each row turns by AdamW's angle in equilibrium.

    The angle is ``sqrt(2 lr wd (1 - beta1) / (1 + beta1))`` on average over the last steps. The
    first step centres rows; they keep mean 0 and the length that they then have, as in the authors'
    wrapper. Their RotationalAdamW gives centred rows their first length. One of length 0 stays.
    """
    beta1, decay = group["betas"][0], 0.9
    m, v = moments(gradient, state, group)
    if "length" not in state:
        parameter = parameter - parameter.mean(dim=1, keepdim=True)
        state["length"] = parameter.norm(dim=1, keepdim=True)
    smallest = torch.finfo(parameter.dtype).tiny
    length = state["length"]
    unit = parameter / length.clamp(min=smallest)
    direction = m / (v.sqrt() + group["eps"])
    direction = direction - unit * (direction * unit).sum(dim=1, keepdim=True)
    direction = direction - direction.mean(dim=1, keepdim=True)
    size = moment("size", direction.square().sum(dim=1, keepdim=True), decay, state)
    size = (size / (1.0 - decay ** state["step"])).sqrt()
    angle = math.sqrt(2.0 * group["lr"] * group["weight_decay"] * (1.0 - beta1) / (1.0 + beta1))
    new = parameter - angle * length * direction / (size + 1e-8)
    return new * length / new.norm(dim=1, keepdim=True).clamp(min=smallest)


# Matrices as a whole.


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U V^T of the singular values of a matrix, nearly: five steps of Newton and Schulz.

    Nonzero singular values become about 0.7 to 1.2. As in Jordan et al. 2024 and
    `torch.optim.Muon` the steps are in bfloat16. Of a stack of matrices, each is treated alone.
    """
    if matrix.dim() > 2:
        return torch.stack([orthogonalized(each) for each in matrix])
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def nesterov(gradient: Tensor, state: State, group: Group) -> Tensor:
    """Return ``mu b + (1 - mu) g`` with the moving average b of the gradients."""
    buffer = moment("momentum_buffer", gradient, group["momentum"], state)
    return gradient.lerp(buffer, group["momentum"])


def matrix_factor(parameter: Tensor, group: Group) -> float:
    """Return the factor of a matrix's rate that `matrix_rate` names."""
    rows, columns = parameter.shape[-2:]
    if group["matrix_rate"] == "spectral":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _check_muon(config: Any) -> None:
    if not 0.0 < config.momentum < 1.0:
        raise ValueError(
            f"momentum {config.momentum}: kind {config.kind} takes one between 0 and 1, such as "
            "0.95"
        )


_MUON: dict[str, Any] = {"momentum": "momentum", "on": ("matrices",), "check": _check_muon}


@OPTIMIZERS.register("muon")
@rule(reads=("momentum", "matrix_rate"), factor=matrix_factor, **_MUON)
def muon(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Jordan et al. 2024, as `torch.optim.Muon`: u is the orthogonalized Nesterov momentum."""
    direction = orthogonalized(nesterov(gradient, state, group))
    return moved(parameter, direction * matrix_factor(parameter, group), group)


@OPTIMIZERS.register("normuon")
@rule(reads=("momentum", "matrix_rate", "betas"), factor=matrix_factor, **_MUON)
def normuon(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Li et al. 2025 (2510.05491): Muon's u, each row over the root of its mean square.

    The mean square is a moving average with beta2, uncorrected; the norm of u stays.
    """
    direction = orthogonalized(nesterov(gradient, state, group))
    square = direction.square().mean(dim=-1, keepdim=True)
    square = moment("row_square", square, group["betas"][1], state)
    scaled = direction / (square.sqrt() + 1e-10)
    sizes = [each.norm(dim=(-2, -1), keepdim=True) for each in (direction, scaled)]
    scaled = scaled * (sizes[0] / sizes[1].clamp(min=1e-10))
    return moved(parameter, scaled * matrix_factor(parameter, group), group)


def on_sphere(parameter: Tensor, direction: Tensor, state: State, group: Group) -> Tensor:
    """Return ``R norm(p - lr R norm(u))``, R the Frobenius norm of the first p."""
    if "radius" not in state:
        state["radius"] = parameter.norm()
    radius = state["radius"]
    new = parameter - group["lr"] * radius * direction / direction.norm().clamp(min=1e-10)
    return new * (radius / new.norm().clamp(min=1e-10))


@OPTIMIZERS.register("muonh")
@rule(reads=("momentum",), from_zero=False, **_MUON)
def muonh(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Hyperball (2606.16899) with Muon's u: matrices keep their norms, and take no decay."""
    direction = orthogonalized(nesterov(gradient, state, group))
    return on_sphere(parameter, direction, state, group)


@OPTIMIZERS.register("adamh")
@rule(reads=("betas", "eps"), momentum="beta1", on=("matrices",), from_zero=False)
def adamh(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Hyperball (2606.16899) with Adam's u: matrices keep their norms, and take no decay."""
    m, v = moments(gradient, state, group)
    return on_sphere(parameter, m / (v.sqrt() + group["eps"]), state, group)


def _check_kl_soap(config: Any) -> None:
    for name, value in (config.arguments or {}).items():
        if not value > 0:
            raise ValueError(f"arguments: {name} {value} of kind kl_soap must be above 0")


@OPTIMIZERS.register("kl_soap")
@rule(
    reads=("betas", "eps"),
    momentum="beta1",
    on=("matrices",),
    check=_check_kl_soap,
    options={"precondition_frequency": 10, "init_factor": 0.1},
)
def kl_soap(parameter: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Lin et al. 2025 (2509.03378): Adam, without corrections, in the bases Q_1, Q_2 of S_1, S_2.

    These are moving averages with beta2 of ``g S_2^-1 g^T / columns`` and ``g^T S_1^-1 g / rows``,
    whose inverses are taken in the bases, with eigenvalues that start at `init_factor`. Every
    `precondition_frequency` steps Q becomes the orthogonal factor of S Q. As in the authors' code
    step 1 only finds the bases, and eigenvalues of n are at least ``1 / max(10, min(n, 4000))^2``.
    """
    beta1, beta2 = group["betas"]
    rows, columns = gradient.shape[-2:]
    if state["step"] == 1:
        factors = {"1": gradient @ gradient.mT / columns, "2": gradient.mT @ gradient / rows}
        for name, factor in factors.items():
            start = moment(f"factor_{name}", factor, beta2, state)
            # eigh refuses what is not finite, of which the next loss will tell.
            state[f"basis_{name}"] = torch.linalg.eigh(start.nan_to_num()).eigenvectors.flip(-1)
            state[f"values_{name}"] = torch.full_like(start[..., 0], group["init_factor"])
        return parameter
    first, second = state["basis_1"], state["basis_2"]
    turned = first.mT @ gradient @ second
    m = moment("exp_avg", turned, beta1, state)
    v = moment("exp_avg_sq", turned.square(), beta2, state)
    direction = first @ (m / (v.sqrt() + group["eps"])) @ second.mT
    roots = [state["values_1"].rsqrt(), state["values_2"].rsqrt()]
    halves = {
        "1": ((gradient @ second) * roots[1][..., None, :], columns),
        "2": ((gradient.mT @ first) * roots[0][..., None, :], rows),
    }
    values = {
        "1": (turned * roots[1][..., None, :]).square().mean(-1),
        "2": (turned * roots[0][..., :, None]).square().mean(-2),
    }
    for name, (half, count) in halves.items():
        moment(f"factor_{name}", half @ half.mT / count, beta2, state)
        most = max(10, min(half.shape[-2], 4000))
        moment(f"values_{name}", values[name], beta2, state).clamp_(min=most**-2)
    if (state["step"] - 1) % group["precondition_frequency"] == 0:
        bases = [torch.linalg.qr(state[f"factor_{n}"] @ state[f"basis_{n}"]).Q for n in "12"]
        state["exp_avg"] = bases[0].mT @ first @ m @ second.mT @ bases[1]
        state["basis_1"], state["basis_2"] = bases
    return (parameter - group["lr"] * direction) * (1.0 - group["lr"] * group["weight_decay"])


# Of other packages.


def moments_of(config: Any) -> dict[str, Any]:
    """Return the constants of Adam's two moments."""
    return {"betas": config.betas, "eps": config.eps}


def _three_moments(config: Any) -> dict[str, Any]:
    # The decay of the slow moment is the authors' (2409.03137).
    return {"betas": (*config.betas, 0.9999), "eps": config.eps, "weight_decouple": True}


_TORCH, _PO = {"package": "torch"}, {"package": "pytorch-optimizer"}
OPTIMIZERS.add("adafactor", Library(**_TORCH, path="torch.optim.Adafactor", reads=lambda _: {}))
OPTIMIZERS.add("soap", Library(**_PO, path="pytorch_optimizer.SOAP", reads=moments_of))
# The authors': pytorch-optimizer's form adds 1e-15 to v, more than a small eps does.
_FREE = {"package": "schedulefree", "path": "schedulefree.AdamWScheduleFree"}
OPTIMIZERS.add("schedule_free", Library(**_FREE, reads=moments_of))
OPTIMIZERS.add("ademamix", Library(**_PO, path="pytorch_optimizer.AdEMAMix", reads=_three_moments))
