"""What one optimizer step does to a model: its update, its passes over a batch, its curvature."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import AnchoredProjection, Attention, spread_heads
from lightning_app.blocks.block import Block, Call
from lightning_app.blocks.linear import Linear
from lightning_app.models.optim import LATE
from lightning_app.models.stack import stacks
from lightning_app.probes import measures
from lightning_app.probes.hooks import MODEL, Place, Row, RunningStats, layers_of, ordered
from lightning_app.probes.probe import preconditioned_sharpness, untouched
from lightning_app.tasks.base import Task


class TrainedPart(NamedTuple):
    """Trained parameters that are measured together: those of a block or, without layers, others.

    Matrices come first, those of one width side by side, so that their rows are one view.
    """

    layers: list[tuple[str, int]]
    parameters: list[nn.Parameter]
    groups: list[dict[str, Any]]
    """The optimizer's group of each parameter."""

    def rows(self, vector: Tensor) -> Iterator[Tensor]:
        """Yield the rows of all matrices of each width in a vector of all parameters."""
        start = 0
        matrices = (p for p in self.parameters if p.ndim == 2)
        for width, alike in groupby(matrices, lambda p: p.shape[1]):
            end = start + sum(p.numel() for p in alike)
            yield vector[start:end].view(-1, width)
            start = end


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of the tensors as one vector, in float32 at least."""
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors]).detach()
    return whole.to(torch.promote_types(whole.dtype, torch.float32))


def trained_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[TrainedPart]:
    """Return the parts of `model`: a block that serves several layers is one."""
    layers: dict[Block, list[tuple[str, int]]] = {}
    for stack, layer, block in layers_of(model):
        layers.setdefault(block, []).append((stack, layer))
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    trained = {p for p in groups if p.requires_grad}
    parts: list[TrainedPart] = []
    for module, places in [*layers.items(), (model, [])]:
        own = [p for p in module.parameters() if p in trained]
        own.sort(key=lambda p: (p.ndim != 2, p.shape[-1] if p.ndim else 0))
        trained.difference_update(own)
        if own:
            parts.append(TrainedPart(places, own, [groups[p] for p in own]))
    return parts


@torch.no_grad()
def gradients_of(parts: Iterable[TrainedPart]) -> list[Tensor]:
    """Return a copy of the gradients of each part; a parameter without one has zeros."""
    return [
        flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in part.parameters)
        for part in parts
    ]


Sums = Sequence[Tensor | float]

STATES = {
    *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "mu_product"),
    *("left", "length", "size", "radius", "row_square"),
}
"""What an optimizer may keep for a parameter so that its moments mean what their names say. SOAP,
for example, keeps them in another basis, beside that basis; quantities of them are left out."""


class Step:
    """One step of any optimizer of PyTorch, measured by layer and over all trained parameters.

    Make it with the gradients of the step, after their all-reduce and before they are clipped; call
    `finish` when the step is done. All sums are in float32 at least. With g the gradient, m the
    first moment (of sgd: its momentum) before the step, v_hat the second moment after it divided
    by 1 - beta2^t where the optimizer does so, W and W' the weights before and after, eta the rate
    of a parameter:

    ====================  ======================================================================
    quantity              meaning
    ====================  ======================================================================
    momentum_cosine       ``cos(m, g)``
    gradient_cosine       ``cos(g_t, g_(t-1))``, with `earlier`, the gradients of the step before
    update_rms            ``RMS((W' - W) / eta)``, weight decay included
    update_rms_noise      of Adam and AdamW, what it is if gradients are pure noise: in step t
                          ``sqrt((1 - beta1) / (1 + beta1) * (1 + beta1^t) / (1 - beta1^t))``
    row_angle             radians between a row of a matrix before and after, mean over rows
    row_equilibrium       of AdamW with decay: `measures.equilibrium_angle`
    inverse_root_spread   standard deviation over mean of ``1 / sqrt(v_hat)``, over the coordinates
                          with ``sqrt(v_hat) >= eps``
    below_eps             share of coordinates with ``sqrt(v_hat) < eps``
    ====================  ======================================================================

    A quantity without its state, or that divides by zero, has no row. The layers that share a block
    have its values.
    """

    @torch.no_grad()
    def __init__(
        self,
        parts: Sequence[TrainedPart],
        optimizer: torch.optim.Optimizer,
        gradients: Sequence[Tensor],
        earlier: Sequence[Tensor] | None,
    ) -> None:
        self.parts, self.optimizer = parts, optimizer
        self.gradients, self.earlier = gradients, earlier
        # A number for each group, since the schedule changes it after the step.
        rates = {id(group): float(group["lr"]) for group in optimizer.param_groups}
        self.rate = rates[id(optimizer.param_groups[0])]
        self.rates = [[rates[id(group)] for group in part.groups] for part in parts]
        self.old = [flat(part.parameters) for part in parts]
        self.change: list[Tensor] = []
        self.states = self._states()
        self._sums: dict[str, list[Sums | None]] = {}
        self._add(name for name in QUANTITIES if name in BEFORE)

    @torch.no_grad()
    def finish(self) -> None:
        """Note the change of the weights by the step."""
        self.states = self._states()  # a first step has made them
        self.change = [
            flat(part.parameters).sub_(old) for part, old in zip(self.parts, self.old, strict=True)
        ]

    @property
    def length(self) -> float:
        """``||W' - W||``."""
        return float(torch.stack([change.norm() for change in self.change]).norm())

    @torch.no_grad()
    def rows(self, step: int) -> list[Row]:
        """Return all quantities of the finished step."""
        self._add(name for name in QUANTITIES if name not in BEFORE)
        every = [sums for of_parts in self._sums.values() for sums in of_parts if sums is not None]
        tensors = [number for sums in every for number in sums if isinstance(number, Tensor)]
        if tensors and tensors[0].device.type != "cpu":  # one transfer
            tensors = torch.stack([tensor.float() for tensor in tensors]).cpu()
        read = map(float, tensors)
        rows = [*self._lines(step)]
        for name, of_parts in self._sums.items():
            whole: list[float] = []
            for sums, part in zip(of_parts, self.parts, strict=True):
                if sums is None:
                    continue
                numbers = [next(read) if isinstance(n, Tensor) else float(n) for n in sums]
                whole = [a + b for a, b in zip(whole or [0.0] * len(numbers), numbers, strict=True)]
                for stack, layer in part.layers:
                    rows += self._row(step, stack, layer, name, numbers)
            rows += self._row(step, MODEL, None, name, whole) if whole else []
        return ordered(rows)

    @staticmethod
    def _row(
        step: int, stack: str, layer: int | None, name: str, sums: Sequence[float]
    ) -> list[Row]:
        try:
            return [Row(step, stack, layer, name, None, QUANTITIES[name].value(*sums))]
        except ZeroDivisionError:
            return []

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            self._sums[name] = [QUANTITIES[name].sums(self, n) for n in range(len(self.parts))]

    def sums(self, name: str, number: int) -> Sums | None:
        """Return the sums of a quantity listed before another in `QUANTITIES`."""
        return self._sums[name][number]

    def _lines(self, step: int) -> Iterator[Row]:
        """Yield what theory expects of the optimizer, where all parameters have one value."""
        kind = type(self.optimizer)
        if kind not in (torch.optim.Adam, torch.optim.AdamW):
            return
        betas = {float(group["betas"][0]) for part in self.parts for group in part.groups}
        counts = {float(s["step"]) for of in self.states for s in of if "step" in s}
        # Without its correction the first steps are larger, by both betas.
        noise = {
            math.sqrt((1.0 - beta) / (1.0 + beta) * (1.0 + beta**count) / (1.0 - beta**count))
            for beta in betas
            for count in counts
            if 0.0 < count < LATE
        }
        angles = {
            measures.equilibrium_angle(rate, group["weight_decay"], group["betas"][0])
            for part, rates in zip(self.parts, self.rates, strict=True)
            for p, group, rate in zip(part.parameters, part.groups, rates, strict=True)
            if group["weight_decay"] > 0.0 and p.ndim == 2 and kind is torch.optim.AdamW
        }
        for name, values in (("update_rms_noise", noise), ("row_equilibrium", angles)):
            if len(values) == 1:
                yield Row(step, MODEL, None, name, None, values.pop())

    def _states(self) -> list[list[Mapping[str, Any]]]:
        found = [[self.optimizer.state.get(p, {}) for p in part.parameters] for part in self.parts]
        return [[each if each.keys() <= STATES else {} for each in states] for states in found]

    @cached_property
    def angles(self) -> list[tuple[Tensor, Tensor]]:
        """The angles by which the rows of each part turned, and which rows are not zero."""
        found = [(torch.zeros(0, device=self.old[0].device),) * 3]
        counts = []
        for part, old, change in zip(self.parts, self.old, self.change, strict=True):
            pairs = [*zip(part.rows(old), part.rows(change), strict=True)]
            found += [(w.norm(dim=1), (w * d).sum(dim=1), d.norm(dim=1)) for w, d in pairs]
            counts.append(sum(len(w) for w, _ in pairs))
        # All rows at once: operations on few numbers cost as much time as on many.
        lengths, *others = map(torch.cat, zip(*found, strict=True))
        angles = measures.row_angles(lengths, *others)
        return [*zip(angles.split(counts), (lengths != 0.0).split(counts), strict=True)]

    @cached_property
    def corrections(self) -> list[list[float | None]]:
        """Return ``1 - beta2^t`` of each parameter of each part; None without second moment."""
        steps = [
            torch.as_tensor(state["step"])
            for part, states in zip(self.parts, self.states, strict=True)
            for group, state in zip(part.groups, states, strict=True)
            if has_second_moment(group, state)
        ]
        counts = iter(torch.stack(steps).tolist() if steps else [])  # one transfer
        return [
            [
                _correction(group, next(counts)) if has_second_moment(group, state) else None
                for group, state in zip(part.groups, states, strict=True)
            ]
            for part, states in zip(self.parts, self.states, strict=True)
        ]


def _correction(group: Mapping[str, Any], count: float) -> float:
    """Return ``1 - beta2^t``, or 1 for an optimizer that does not divide v by it."""
    uncorrected = group.get("bias_correction", True) is False
    return 1.0 if uncorrected else 1.0 - float(group["betas"][1]) ** count


def has_second_moment(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether v_hat is known: the optimizer keeps a second moment, its beta and its steps."""
    return "betas" in group and "exp_avg_sq" in state and "step" in state


@dataclass(frozen=True)
class Quantity:
    """A quantity of a step: sums over the coordinates of a part, by number, and their value."""

    sums: Callable[[Step, int], Sums | None]
    value: Callable[..., float]


def _with_momentum(step: Step, number: int) -> Sums | None:
    states, parameters = step.states[number], step.parts[number].parameters
    found = [state.get("exp_avg", state.get("momentum_buffer")) for state in states]
    kept = [m for m in found if m is not None]
    if not kept:
        return None
    g = step.gradients[number]
    if len(kept) < len(found):
        parts = g.split([p.numel() for p in parameters])
        g = flat(own for own, m in zip(parts, found, strict=True) if m is not None)
    m = flat(kept)
    return torch.dot(g, m), torch.dot(g, g), torch.dot(m, m)


def _with_earlier(step: Step, number: int) -> Sums | None:
    if step.earlier is None:
        return None
    now, before = step.gradients[number], step.earlier[number]
    return torch.dot(now, before), torch.dot(now, now), torch.dot(before, before)


def _update(step: Step, number: int) -> Sums | None:
    parameters, change = step.parts[number].parameters, step.change[number]
    rates = step.rates[number]
    moving = sum(p.numel() for p, rate in zip(parameters, rates, strict=True) if rate)
    if not moving:
        return None
    if len(set(rates)) == 1:
        return torch.dot(change, change) / rates[0] ** 2, moving
    pieces = zip(change.split([p.numel() for p in parameters]), rates, strict=True)
    return sum(torch.dot(own, own) / rate**2 for own, rate in pieces if rate), moving


def _angles(step: Step, number: int) -> Sums | None:
    angles, counted = step.angles[number]
    return (angles.sum(), counted.sum()) if len(angles) else None


def _inverse_roots(step: Step, number: int) -> Sums | None:
    """Return the numbers of coordinates below eps and of all, and for others sums of 1 / root."""
    alike: dict[tuple[float, float], list[Tensor]] = {}
    known = step.corrections[number]
    for group, state, correction in zip(
        step.parts[number].groups, step.states[number], known, strict=True
    ):
        if correction is not None:
            eps = float(group.get("eps", 0.0))
            alike.setdefault((correction, eps), []).append(state["exp_avg_sq"])
    sums: list[Sums] = []
    for (correction, eps), moments in alike.items():
        inverse = flat(moments).rsqrt_().mul_(correction**0.5)
        largest = min(1.0 / eps if eps else math.inf, torch.finfo(inverse.dtype).max)
        # Vectorised on a CPU, unlike masks: minus 1 / root, and zero below eps.
        inverse = torch.threshold_(inverse.neg_(), -largest, 0.0)
        others = -inverse.sign().sum()
        sums.append(
            (inverse.numel() - others, inverse.numel(), -inverse.sum(), torch.dot(inverse, inverse))
        )
    return sums[0] if len(sums) == 1 else [sum(c) for c in zip(*sums, strict=True)] or None


def _below_eps(step: Step, number: int) -> Sums | None:
    sums = step.sums("inverse_root_spread", number)
    return None if sums is None else sums[:2]


QUANTITIES = {
    "momentum_cosine": Quantity(_with_momentum, lambda both, g, m: both / math.sqrt(g * m)),
    "gradient_cosine": Quantity(_with_earlier, lambda both, g, h: both / math.sqrt(g * h)),
    "update_rms": Quantity(_update, lambda total, count: math.sqrt(total / count)),
    "row_angle": Quantity(_angles, lambda total, count: total / count),
    "inverse_root_spread": Quantity(
        _inverse_roots,
        lambda below, n, total, squares: math.sqrt(
            max((n - below) * squares / total**2 - 1.0, 0.0)
        ),
    ),
    "below_eps": Quantity(_below_eps, lambda below, n: below / n),
}
"""The quantities of a step by name. Add one here, and to `EXPLAINED` of
`report.figures.stable` to draw it."""
BEFORE = {"momentum_cosine", "gradient_cosine"}
"""Those of gradients, which are clipped afterwards, and of moments, which the step changes."""


@dataclass
class Passage:
    """One pass over a batch in evaluation mode, with its gradient."""

    outputs: dict[str, Tensor]
    """The counted tokens of each stack's output, (token, model)."""
    inputs: list[tuple[str, int, nn.Module, Tensor]]
    """Stack, layer, linear map of the blocks, and the counted tokens that it reads."""
    matrices: dict[nn.Module, Tensor]
    """The matrix of each map, (inner, outer)."""
    gradient: Tensor


def passage(model: nn.Module, task: Task, batch: Any) -> Passage:
    """Pass `batch` through `model` and back; the model stays as it was."""
    real = task.real_tokens(batch)
    taps = _Taps(model, real)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with untouched(model), torch.enable_grad():
        with taps:
            predictions = task.predictions(model, batch)
        found = torch.autograd.grad(task.mean_loss(predictions), parameters, allow_unused=True)
        matrices = {each: _matrix(each) for each in dict.fromkeys(m for *_, m, _ in taps.inputs)}
    kept = [
        g if g is not None else torch.zeros_like(p) for g, p in zip(found, parameters, strict=True)
    ]
    return Passage(taps.outputs, taps.inputs, matrices, flat(kept))


@torch.no_grad()
def _matrix(linear: nn.Module) -> Tensor:
    """Return W of ``x W`` in evaluation mode: of a projection ``a W_0 + b dW``, the sum."""
    if isinstance(linear, nn.Linear):
        matrix = linear.matrix if isinstance(linear, Linear) else linear.weight
        return matrix.detach().mT.clone()
    assert isinstance(linear, AnchoredProjection)
    weight = linear.change.weight
    return linear(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))


PROJECTING = {
    "queries": ("query",),
    "keys_values": ("key", "value"),
    "queries_keys_values": ("query", "key", "value"),
}
"""The methods of attention that project, with the maps of each: several are one product, so that
forward hooks do not see them."""


class _Taps:
    """Record the outputs of stacks and the inputs of the linear maps of blocks in this context."""

    def __init__(self, model: nn.Module, real: Mapping[str, Tensor]) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.inputs: list[tuple[str, int, nn.Module, Tensor]] = []
        self._stacks = stacks(model)
        self._real = real
        self._hooks = ExitStack()
        self._layer: tuple[Block, int] | None = None

    def __enter__(self) -> None:
        for name, stack in self._stacks.items():
            self._hooks.enter_context(stack.register_forward_hook(partial(self._output, name)))
            layers: dict[Block, list[int]] = {}
            for layer, block in stack.layers:
                layers.setdefault(block, []).append(layer)
            for block, served in layers.items():
                self._tap(name, block, served)

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _tap(self, name: str, block: Block, served: list[int]) -> None:
        self._hooks.enter_context(block.register_forward_pre_hook(self._entry))
        tokens = name, block, served
        fused: set[nn.Module] = set()
        for attention in (block.self_attention, block.cross_attention):
            if attention is None:
                continue
            read = name if attention is block.self_attention else "encoder"
            for method, maps in PROJECTING.items():
                projections = [getattr(attention, each) for each in maps]
                fused.update(part for each in projections for part in each.modules())
                of = name if maps == ("query",) else read
                recorded = partial(self._recorded, attention, method, projections, of, tokens)
                # An instance attribute, which takes precedence over the method.
                object.__setattr__(attention, method, recorded)
                self._hooks.callback(object.__delattr__, attention, method)
        maps = [m for m in block.modules() if isinstance(m, nn.Linear | AnchoredProjection)]
        inside = {
            p for m in maps if isinstance(m, AnchoredProjection) for p in m.modules() if p is not m
        }
        for linear in maps:
            if linear not in fused | inside:
                hook = linear.register_forward_hook(partial(self._input, tokens))
                self._hooks.enter_context(hook)

    def _entry(self, block: nn.Module, args: tuple[Any, Any, Call]) -> None:
        assert isinstance(block, Block)
        self._layer = block, args[2].layer

    def _record(
        self, tokens: tuple[str, Block, list[int]], linear: nn.Module, of: str, x: Tensor
    ) -> None:
        name, block, served = tokens
        if len(served) == 1:
            layer = served[0]
        elif self._layer is not None and self._layer[0] is block:
            layer = self._layer[1]
        else:  # keys of cross-attention, which are projected before the first layer, in order
            layer = served[sum(each is linear for *_, each, _ in self.inputs) % len(served)]
        self.inputs.append((name, layer, linear, self._counted(of, x)))

    def _counted(self, stack: str, x: Tensor) -> Tensor:
        """Return the counted tokens of `x`; where a layer kept some tokens, those are it."""
        real = self._real[stack]
        return x.detach()[real] if x.shape[:2] == real.shape else x.detach().flatten(0, 1)

    def _output(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self._layer = None
        self.outputs[name] = self._counted(name, output)

    def _input(self, tokens: Any, module: nn.Module, args: Any, output: Tensor) -> None:
        self._record(tokens, module, tokens[0], args[0])

    def _recorded(
        self,
        attention: Attention,
        method: str,
        projections: Sequence[nn.Module],
        of: str,
        tokens: tuple[str, Block, list[int]],
        x: Tensor,
        *rest: Any,
    ) -> Any:
        for each in projections:
            if isinstance(each, nn.Linear | AnchoredProjection):
                self._record(tokens, each, of, x)
        return getattr(type(attention), method)(attention, x, *rest)


@torch.no_grad()
def pass_rows(
    model: nn.Module, before: Passage, after: Passage, moved: float, step: int
) -> list[Row]:
    """Compare the passes of one batch before and after a step of length `moved`:

    =====================  ===================================================================
    quantity               meaning
    =====================  ===================================================================
    representation_change  ``||F' - F|| / ||F||``, F the output of a stack, mean over tokens
    output_change          ``||F' - F||^2 / d``, mean over tokens
    relative_change        ``||x dW|| / ||x W||`` of the linear maps of a layer, x the input before
                           the step, mean over maps and tokens
    local_smoothness       ``||g' - g|| / ||W' - W||``, g the gradient of the mean loss
    qk_singular_value      the largest ``sigma_1(W_Q W_K^T)`` of the heads, after the step; also per
                           head; of cross-attention with the prefix ``cross_``
    =====================  ===================================================================

    A map with ``x W = 0``, such as one that starts at zero, has no relative change there.
    """
    tally = RunningStats()
    for name, old in before.outputs.items():
        new = after.outputs[name]
        tally.mean(Place("representation_change", name), measures.relative_changes(old, new))
        change = measures.precise(new - old).square().mean(dim=-1)
        tally.mean(Place("output_change", name), change)
    for stack, layer, linear, x in before.inputs:
        old = before.matrices[linear]
        ratios = measures.relative_changes(x @ old, x @ after.matrices[linear])
        for place in (Place("relative_change", stack, layer), Place("relative_change", MODEL)):
            tally.mean(place, ratios)
    if moved:
        change = measures.precise(after.gradient - before.gradient).norm()
        tally.mean(Place("local_smoothness", MODEL), change / moved)
    with untouched(model):
        for place, values in _singular_values(model):
            tally.largest(place, values)
            for head, value in enumerate(values):
                tally.mean(place._replace(head=head), value)
    return tally.rows(step)


def _singular_values(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Yield ``sigma_1(W_Q W_K^T)`` of each head of every attention."""
    for stack, layer, block in layers_of(model):
        for prefix, part in (("", block.self_attention), ("cross_", block.cross_attention)):
            if part is None:
                continue
            queries, keys = (
                spread_heads(_matrix(each).mT.unflatten(0, (heads, -1))[None], part.num_heads)
                for each, heads in ((part.query, part.num_heads), (part.key, part.kv_heads))
            )
            place = Place(f"{prefix}qk_singular_value", stack, layer)
            yield place, measures.largest_singular_values(queries[0], keys[0])


def threshold(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the largest stable ``eta lambda_1``, or None for an optimizer without a known one.

    Adam and AdamW, whose momentum is an average: ``(2 + 2 beta1) / (1 - beta1)``, 38 at 0.9 (Cohen
    et al. 2022, 2207.14484); sgd, whose momentum is a sum (heavy ball): ``2 + 2 mu``.
    """
    group = optimizer.param_groups[0]
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]:
        beta1 = float(group["betas"][0])
        return (2.0 + 2.0 * beta1) / (1.0 - beta1)
    if type(optimizer) is torch.optim.SGD and not (group["nesterov"] or group["dampening"]):
        return 2.0 + 2.0 * group["momentum"]
    return None


def curvature_rows(model: nn.Module, task: Task, batch: Any, made: Step, step: int) -> list[Row]:
    """Return the quantities of the curvature on `batch`, that of the step `made`:

    =========================  ===============================================================
    quantity                   meaning
    =========================  ===============================================================
    sharpness_over_threshold   ``eta lambda_1`` of `preconditioned_sharpness` after the step, over
                               `threshold`: from 1 on, a quadratic diverges; NaN if the
                               iteration did not converge
    critical_rate              the rate above which the step would have raised the loss
    rate_over_critical         the rate of the step over it
    =========================  ===============================================================

    The critical rate is that of Kalra & Barkeshli 2024 (2406.09405): along the update of the step,
    a factor is doubled or halved until the loss rises, and bisected to 5 %; about 10 passes. No
    row if the loss still falls at 4096 times the rate, or rises at 1/4096 of it. The rate is that
    of the optimizer's first group; a factor applies to the rates of all.
    """
    rows = []
    limit = threshold(made.optimizer)
    if limit is not None:
        group = made.optimizer.param_groups[0]
        adaptive = "betas" in group
        moments, rates = {}, {}
        for part, *columns in zip(
            made.parts, made.states, made.corrections, made.rates, strict=True
        ):
            for p, state, correction, rate in zip(part.parameters, *columns, strict=True):
                rates[p] = rate
                if correction is not None:
                    moments[p] = state["exp_avg_sq"] / correction
                else:
                    moments[p] = torch.zeros_like(p) if adaptive else torch.ones_like(p)
        parameters = [p for p in model.parameters() if p.requires_grad]
        given = [moments[p] for p in parameters], [rates[p] for p in parameters]
        eps = float(group["eps"]) if adaptive else 0.0
        top = preconditioned_sharpness(model, task, batch, eps, *given)
        value = top.value / limit if top.converged else math.nan
        rows.append(Row(step, MODEL, None, "sharpness_over_threshold", None, value))
    factor = critical_factor(model, task, batch, made)
    rate = made.rate
    if factor is not None and rate:
        rows.append(Row(step, MODEL, None, "critical_rate", None, factor * rate))
        rows.append(Row(step, MODEL, None, "rate_over_critical", None, 1.0 / factor))
    return ordered(rows)


DOUBLINGS, BISECTIONS = 12, 4


@torch.no_grad()
def critical_factor(model: nn.Module, task: Task, batch: Any, made: Step) -> float | None:
    """Return s where the loss at ``W + s (W' - W)`` begins to exceed that at W, or None."""
    with untouched(model), _moved(made) as move:

        def loss(factor: float) -> float:
            move(factor)
            return float(task.mean_loss(task.predictions(model, batch)))

        start = loss(0.0)

        def rises(factor: float) -> bool:
            return not loss(factor) <= start

        low, high = 0.0, math.inf
        factor = 1.0
        for _ in range(DOUBLINGS + 1):
            if rises(factor):
                high, factor = factor, factor / 2.0
            else:
                low, factor = factor, factor * 2.0
            if low and high < math.inf:
                break
        else:
            return None
        for _ in range(BISECTIONS):
            factor = math.sqrt(low * high)
            low, high = (low, factor) if rises(factor) else (factor, high)
    return math.sqrt(low * high)


@contextmanager
def _moved(made: Step) -> Iterator[Callable[[float], None]]:
    """Yield a function that sets the weights to W + s (W' - W); restore W' bit for bit."""
    kept = [(p, p.detach().clone()) for part in made.parts for p in part.parameters]

    def move(factor: float) -> None:
        for part, old, change in zip(made.parts, made.old, made.change, strict=True):
            whole = old + factor * change
            sizes = [p.numel() for p in part.parameters]
            for p, value in zip(part.parameters, whole.split(sizes), strict=True):
                p.copy_(value.view_as(p))

    try:
        yield move
    finally:
        for p, value in kept:
            p.copy_(value)
