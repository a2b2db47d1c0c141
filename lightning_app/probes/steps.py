"""What one optimizer step does to a model: its update, its passes over a batch, its curvature."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_app.blocks.attention import AnchoredProjection, Attention, spread_heads
from lightning_app.blocks.block import Block, Call
from lightning_app.models.stack import stacks
from lightning_app.probes import measures
from lightning_app.probes.hooks import MODEL, Place, Row, RunningStats, ordered
from lightning_app.probes.probe import preconditioned_sharpness, untouched
from lightning_app.tasks.base import Task


@dataclass
class Part:
    """Trained parameters that are measured together: those of a block or, without layers, others.

    Matrices come first, those of one width side by side. `old` and `new` hold all of them as one
    vector, before and after the step.
    """

    layers: list[tuple[str, int]]
    parameters: list[nn.Parameter]
    old: Tensor
    new: Tensor | None = None
    roots: "tuple[Tensor, Tensor | float] | None" = None

    @property
    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of all matrices of each width, before and after the step."""
        assert self.new is not None
        start = 0
        matrices = (p for p in self.parameters if p.ndim == 2)
        for width, alike in groupby(matrices, lambda p: p.shape[1]):
            end = start + sum(p.numel() for p in alike)
            yield self.old[start:end].view(-1, width), self.new[start:end].view(-1, width)
            start = end


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors as one vector, in float32 at least."""
    whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return whole.to(torch.promote_types(whole.dtype, torch.float32))


def parts_of(model: nn.Module, trained: Container[nn.Parameter]) -> list[Part]:
    """Return the parts of `model`: a block that serves several layers is one."""
    layers: dict[Block, list[tuple[str, int]]] = {}
    for name, stack in stacks(model).items():
        for layer, block in stack.layers:
            layers.setdefault(block, []).append((name, layer))
    taken: set[nn.Parameter] = set()
    parts: list[Part] = []
    for module, places in [*layers.items(), (model, [])]:
        own = [p for p in module.parameters() if p in trained and p not in taken]
        own.sort(key=lambda p: (p.ndim != 2, p.shape[-1] if p.ndim else 0))
        taken.update(own)
        if own:
            parts.append(Part(places, own, flat(own)))
    return parts


STATES = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "mu_product"}
"""What an optimizer may keep for a parameter so that its moments mean what their names say. SOAP,
for example, keeps them in another basis, beside that basis; quantities of them are left out."""


class Step:
    """One step of any optimizer of PyTorch, measured by layer and over all trained parameters.

    Make it with the gradients of the step, after their all-reduce and before they are clipped; call
    `finish` when the step is done. All sums are in float32 at least. With g the gradient, m the
    first moment (of sgd: its momentum) before the step, v_hat the second moment after it divided
    by 1 - beta2^t, W and W' the weights before and after, eta the rate of a parameter:

    ====================  ======================================================================
    quantity              meaning
    ====================  ======================================================================
    momentum_cosine       ``cos(m, g)``
    gradient_cosine       ``cos(g_t, g_(t-1))``, with `earlier`, the gradients of the step before
    update_rms            ``RMS((W' - W) / eta)``, weight decay included
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
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        earlier: Mapping[nn.Parameter, Tensor],
    ) -> None:
        self.optimizer = optimizer
        self.groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        rates = {id(group): float(group["lr"]) for group in optimizer.param_groups}
        self.rates = {p: rates[id(group)] for p, group in self.groups.items() if p.requires_grad}
        self.earlier = earlier
        self.parts = parts_of(model, self.rates)
        self._sums: dict[tuple[str, int], list[Tensor | float]] = {}
        self._add(QUANTITIES.keys() & BEFORE)

    @torch.no_grad()
    def finish(self) -> float:
        """Note the weights after the step; return the length of the update."""
        for part in self.parts:
            part.new = flat(part.parameters)
        lengths = [(part.new - part.old).norm() for part in self.parts if part.new is not None]
        return float(torch.stack(lengths).norm())

    @torch.no_grad()
    def rows(self, step: int) -> list[Row]:
        """Return all quantities of the finished step."""
        self._add(QUANTITIES.keys() - BEFORE)
        rows = [*self._equilibrium(step)]
        numbers = [number for sums in self._sums.values() for number in sums]
        tensors = [number.float() for number in numbers if isinstance(number, Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else [])  # one transfer
        found = {
            key: [next(read) if isinstance(number, Tensor) else float(number) for number in sums]
            for key, sums in self._sums.items()
        }
        for name, measured in QUANTITIES.items():
            by_part = {part: sums for (each, part), sums in found.items() if each == name}
            if not by_part:
                continue
            whole = [sum(column) for column in zip(*by_part.values(), strict=True)]
            places = [(MODEL, None, whole)]
            for number, sums in by_part.items():
                places += [(stack, layer, sums) for stack, layer in self.parts[number].layers]
            for stack, layer, sums in places:
                with suppress(ZeroDivisionError):
                    rows.append(Row(step, stack, layer, name, None, measured.value(*sums)))
        return ordered(rows)

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            for number, part in enumerate(self.parts):
                sums = QUANTITIES[name].sums(self, part)
                if sums is not None:
                    self._sums[name, number] = list(sums)

    def _equilibrium(self, step: int) -> Iterator[Row]:
        if type(self.optimizer) is not torch.optim.AdamW:
            return
        angles = {
            measures.equilibrium_angle(rate, group["weight_decay"], group["betas"][0])
            for p, rate in self.rates.items()
            if (group := self.groups[p])["weight_decay"] > 0.0 and p.ndim == 2
        }
        if len(angles) == 1:
            yield Row(step, MODEL, None, "row_equilibrium", None, angles.pop())

    def state(self, parameter: nn.Parameter, *names: str) -> Any:
        """Return the first of `names` in the optimizer's state of `parameter`, or None."""
        state = self.optimizer.state.get(parameter, {})
        if not state.keys() <= STATES:
            return None
        return next((state[name] for name in names if state.get(name) is not None), None)

    def second_moments(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, float]:
        """Return ``1 - beta2^t`` of those of `parameters` that have a second moment."""
        steps = {
            p: self.state(p, "step")
            for p in parameters
            if self.state(p, "exp_avg_sq") is not None and "betas" in self.groups[p]
        }
        steps = {p: step for p, step in steps.items() if step is not None}
        if not steps:
            return {}
        # One transfer from the device instead of one per parameter.
        counts = torch.stack([torch.as_tensor(step).float() for step in steps.values()]).tolist()
        return {
            p: 1.0 - float(self.groups[p]["betas"][1]) ** count
            for p, count in zip(steps, counts, strict=True)
        }


def _spread(values: Sequence[float], parameters: Sequence[nn.Parameter]) -> Tensor | float:
    """Return `values` of parameters for each of their coordinates, or the number if all agree."""
    if len(set(values)) == 1:
        return values[0]
    device = parameters[0].device
    numbers = torch.tensor([p.numel() for p in parameters], device=device)
    return torch.tensor(values, device=device).repeat_interleave(numbers)


Sums = Sequence[Tensor | float]


@dataclass(frozen=True)
class Quantity:
    """A quantity of a step: sums over the coordinates of a part, and its value from the sums."""

    sums: Callable[[Step, Part], Sums | None]
    value: Callable[..., float]


def _cosine(
    other: Callable[[Step, nn.Parameter], Tensor | None],
) -> Callable[[Step, Part], Sums | None]:
    def sums(step: Step, part: Part) -> Sums | None:
        pairs = [(p.grad, other(step, p)) for p in part.parameters]
        kept = [(g, o) for g, o in pairs if g is not None and o is not None]
        if not kept:
            return None
        g, o = (flat(each) for each in zip(*kept, strict=True))
        return torch.dot(g, o), torch.dot(g, g), torch.dot(o, o)

    return sums


def _update(step: Step, part: Part) -> Sums | None:
    assert part.new is not None
    rates = [step.rates[p] for p in part.parameters]
    moving = sum(p.numel() for p, rate in zip(part.parameters, rates, strict=True) if rate)
    if not moving:
        return None
    inverse = _spread([1.0 / rate if rate else 0.0 for rate in rates], part.parameters)
    return ((part.new - part.old) * inverse).square().sum(), moving


def _angles(step: Step, part: Part) -> Sums | None:
    angles = [measures.row_angles(old, new) for old, new in part.rows]
    if not angles:
        return None
    whole = torch.cat(angles)
    return whole.sum(), len(whole)


def _roots(step: Step, part: Part) -> tuple[Tensor, Tensor | float] | None:
    """Return ``sqrt(v_hat)`` of each coordinate, and eps; they are computed once per part."""
    if part.roots is not None:
        return part.roots
    corrections = step.second_moments(part.parameters)
    if not corrections:
        return None
    parameters = list(corrections)
    v = flat(step.state(p, "exp_avg_sq") for p in parameters)
    eps = [float(step.groups[p].get("eps", 0.0)) for p in parameters]
    scale = _spread([number**-0.5 for number in corrections.values()], parameters)
    part.roots = v.sqrt() * scale, _spread(eps, parameters)
    return part.roots


def _inverse_roots(step: Step, part: Part) -> Sums | None:
    found = _roots(step, part)
    if found is None:
        return None
    root, eps = found
    large = (root >= eps) & (root > 0.0)
    inverse = torch.where(large, root.reciprocal(), 0.0)
    return large.sum(), inverse.sum(), inverse.square().sum()


def _below_eps(step: Step, part: Part) -> Sums | None:
    found = _roots(step, part)
    return None if found is None else ((found[0] < found[1]).sum(), found[0].numel())


QUANTITIES = {
    "momentum_cosine": Quantity(
        _cosine(lambda step, p: step.state(p, "exp_avg", "momentum_buffer")),
        lambda both, g, m: both / math.sqrt(g * m),
    ),
    "gradient_cosine": Quantity(
        _cosine(lambda step, p: step.earlier.get(p)),
        lambda both, now, before: both / math.sqrt(now * before),
    ),
    "update_rms": Quantity(_update, lambda total, count: math.sqrt(total / count)),
    "row_angle": Quantity(_angles, lambda total, count: total / count),
    "inverse_root_spread": Quantity(
        _inverse_roots,
        lambda n, total, squares: math.sqrt(max(n * squares / total**2 - 1.0, 0.0)),
    ),
    "below_eps": Quantity(_below_eps, lambda count, n: count / n),
}
"""The quantities of a step by name. Add one here, and to `EXPLAINED` of reports to draw it."""
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
    kept = [
        g if g is not None else torch.zeros_like(p) for g, p in zip(found, parameters, strict=True)
    ]
    maps = dict.fromkeys(linear for *_, linear, _ in taps.inputs)
    return Passage(taps.outputs, taps.inputs, {each: _matrix(each) for each in maps}, flat(kept))


@torch.no_grad()
def _matrix(linear: nn.Module) -> Tensor:
    """Return W of ``x W``: of a projection ``a W_0 + b dW``, the sum."""
    if isinstance(linear, nn.Linear):
        return linear.weight.detach().mT.clone()
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
        self._handles: list[RemovableHandle] = []
        self._layer: tuple[Block, int] | None = None
        self._attentions: list[Attention] = []

    def __enter__(self) -> None:
        for name, stack in self._stacks.items():
            self._handles.append(stack.register_forward_hook(self._output(name)))
            layers: dict[Block, list[int]] = {}
            for layer, block in stack.layers:
                layers.setdefault(block, []).append(layer)
            for block, served in layers.items():
                self._tap(name, block, served)

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for attention in self._attentions:
            for method in PROJECTING:
                vars(attention).pop(method, None)

    def _tap(self, name: str, block: Block, served: list[int]) -> None:
        self._handles.append(block.register_forward_pre_hook(self._entry))
        tokens = name, block, served
        fused: set[nn.Module] = set()
        for attention in (block.self_attention, block.cross_attention):
            if attention is None:
                continue
            read = name if attention is block.self_attention else "encoder"
            self._attentions.append(attention)
            for method, maps in PROJECTING.items():
                projections = [getattr(attention, each) for each in maps]
                fused.update(part for each in projections for part in each.modules())
                of = name if maps == ("query",) else read
                recorded = self._recorded(attention, method, projections, of, tokens)
                # An instance attribute, which takes precedence over the method.
                object.__setattr__(attention, method, recorded)
        maps = [m for m in block.modules() if isinstance(m, nn.Linear | AnchoredProjection)]
        inside = {
            p for m in maps if isinstance(m, AnchoredProjection) for p in m.modules() if p is not m
        }
        for linear in maps:
            if linear not in fused | inside:
                self._handles.append(linear.register_forward_hook(self._input(tokens)))

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

    def _output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self._layer = None
            self.outputs[name] = self._counted(name, output)

        return hook

    def _input(self, tokens: tuple[str, Block, list[int]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            self._record(tokens, module, tokens[0], args[0])

        return hook

    def _recorded(
        self,
        attention: Attention,
        method: str,
        projections: Sequence[nn.Module],
        of: str,
        tokens: tuple[str, Block, list[int]],
    ) -> Callable[..., Any]:
        def call(x: Tensor, *rest: Any) -> Any:
            for each in projections:
                if isinstance(each, nn.Linear | AnchoredProjection):
                    self._record(tokens, each, of, x)
            return getattr(type(attention), method)(attention, x, *rest)

        return call


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
    for name, stack in stacks(model).items():
        for layer, block in stack.layers:
            for prefix, attention in (
                ("", block.self_attention),
                ("cross_", block.cross_attention),
            ):
                if attention is not None:
                    place = Place(f"{prefix}qk_singular_value", name, layer)
                    values = _singular_values(attention)
                    tally.largest(place, values)
                    for head, value in enumerate(values):
                        tally.mean(place._replace(head=head), value)
    return tally.rows(step)


def _singular_values(attention: Attention) -> Tensor:
    queries, keys = (
        spread_heads(each.weight.unflatten(0, (heads, -1))[None], attention.num_heads)[0]
        for each, heads in (
            (attention.query, attention.num_heads),
            (attention.key, attention.kv_heads),
        )
    )
    return measures.largest_singular_values(queries, keys)


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
    parameters = [p for p in model.parameters() if p.requires_grad]
    if limit is not None:
        corrections = made.second_moments(parameters)
        adaptive = "betas" in made.optimizer.param_groups[0]
        moments = [
            made.state(p, "exp_avg_sq") / corrections[p]
            if p in corrections
            else (torch.zeros_like(p) if adaptive else torch.ones_like(p))
            for p in parameters
        ]
        eps = float(made.optimizer.param_groups[0]["eps"]) if adaptive else 0.0
        rates = [made.rates.get(p, 0.0) for p in parameters]
        top = preconditioned_sharpness(model, task, batch, eps, moments, rates)
        value = top.value / limit if top.converged else math.nan
        rows.append(Row(step, MODEL, None, "sharpness_over_threshold", None, value))
    factor = critical_factor(model, task, batch, made)
    rate = made.rates[next(iter(made.rates))]
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
        for part in made.parts:
            assert part.new is not None
            whole = part.old + factor * (part.new - part.old)
            sizes = [p.numel() for p in part.parameters]
            for p, value in zip(part.parameters, whole.split(sizes), strict=True):
                p.copy_(value.view_as(p))

    try:
        yield move
    finally:
        for p, value in kept:
            p.copy_(value)
