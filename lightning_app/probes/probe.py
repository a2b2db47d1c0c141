"""Probes of a model on a few batches: signals, gradients, gains, attention maps and sharpness."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_app.blocks.attention import AnchoredProjection, Attention
from lightning_app.blocks.block import Block, Call
from lightning_app.blocks.kernels.choose import attention_form, softmax_map
from lightning_app.blocks.linear import SpectralLinear
from lightning_app.blocks.norm import LearnedScalars
from lightning_app.blocks.residual import FixedGain, LearnedGain, Shrink
from lightning_app.blocks.spans import DynamicSpanMask
from lightning_app.core.errors import UserError
from lightning_app.models.stack import stacks
from lightning_app.probes import measures
from lightning_app.probes.hooks import (
    MODEL,
    ActivationHooks,
    Place,
    Row,
    RunningStats,
    layers_of,
    ordered,
    scores,
)
from lightning_app.tasks.base import Predictions, Task


def layers_by_rank(model: nn.Module) -> list[list[tuple[str, int]]]:
    """Return (stack, layer) in order of preference for when only some layers can be shown.

    Layers count from 1. The last of each stack comes first, then the first, the middle, the rest.
    """
    ranks: list[list[tuple[str, int]]] = []
    for name, stack in stacks(model).items():
        depth = stack.spec.depth
        order = dict.fromkeys([depth, 1, (depth + 1) // 2, *range(1, depth + 1)])
        for rank, layer in enumerate(order):
            if rank == len(ranks):
                ranks.append([])
            ranks[rank].append((name, layer))
    return ranks


def learned_gains(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Yield every learned scalar of the blocks, of any shape.

    A gain shared by several sub-layers of a layer appears once, as that of the first; gains of a
    shared block appear in each layer. Different ones of one name, such as those of several linear
    maps, have the names of their modules before it. The two gains of a projection
    ``a W_0 + b dW`` are in `change_ratios`.
    """
    for stack, layer, block in layers_of(model):
        found: list[tuple[str, str, Tensor]] = []
        for path, part in block.named_modules():
            if isinstance(part, LearnedScalars):
                owner = block.get_submodule(path.rpartition(".")[0])
                if not isinstance(owner, AnchoredProjection):
                    found += [(path, name, value) for name, value in part.measured()]
        counts = Counter(_quantity(path, name) for path, name, _ in found)
        for path, name, value in found:
            quantity = _quantity(path, name)
            if counts[quantity] > 1:
                quantity = "_".join([*path.split("."), *([name] if name != "gain" else [])])
            yield Place(quantity, stack, layer), value


def dynamic_spans(
    model: nn.Module, over_ranks: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Place, Tensor]]:
    """Yield the dynamic spans of every layer in tokens: the mean per head over the last batch.

    They have the shape ``(head, 1, 1)`` and exist after a training step.

    Args:
        model: The model of this rank.
        over_ranks: Returns the sum over all ranks of a tensor that each of them passes.
    """
    for stack, layer, block in layers_of(model):
        part = block.self_attention.span
        if isinstance(part, DynamicSpanMask):
            spans, tokens = part.sums(layer)
            *sums, number = over_ranks(torch.cat([spans, tokens[None]])).unbind()
            yield Place("span", stack, layer), (torch.stack(sums) / number)[:, None, None]


def _quantity(path: str, parameter: str) -> str:
    """Return the name under which a parameter of the module at `path` in its block is shown.

    A parameter ``gain`` takes the name of its module. Gains around a sub-layer are named as in the
    config: around_self.branch is attention_branch. Those of cross-attention have the prefix cross_.
    Other parameters there keep their whole path, since several parts may share a name.
    """
    *owner, module = path.split(".")
    name = module if parameter == "gain" else parameter
    match owner:
        case [around, *inside] if around.startswith("around_"):
            place = around.removeprefix("around_").replace("self", "attention")
            last = [] if parameter == "gain" else [parameter]
            return "_".join([place, *inside, module, *last])
        case ["cross_attention", *_]:
            return f"cross_{name}"
        case _:
            return name


def change_ratios(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Yield ``|b / a|`` of each projection ``a W_0 + b dW`` that trains a or b.

    He & Hofmann 2023 (2311.01906, figure 4): the remaining b shows which value or output
    matrices the model uses. The quantities are ``value_change`` and ``output_change``.
    """
    for stack, layer, block in layers_of(model):
        for name, attention in block.named_modules():
            if not isinstance(attention, Attention):
                continue
            for part in ("value", "output"):
                projection = getattr(attention, part)
                if not isinstance(projection, AnchoredProjection):
                    continue
                gains = (projection.kept, projection.departure)
                if any(isinstance(gain, LearnedGain) for gain in gains):
                    kept, change = (_value(gain, projection.change.weight) for gain in gains)
                    prefix = "cross_" if name.startswith("cross_attention") else ""
                    yield Place(f"{prefix}{part}_change", stack, layer), (change / kept).abs()


def _value(gain: nn.Module, like: Tensor) -> Tensor:
    if isinstance(gain, LearnedGain):
        return gain.gain
    assert isinstance(gain, FixedGain)
    return like.new_tensor(gain.value)


POSITIONS = 4
"""The number of target positions of a batch whose gradients are measured separately."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run `model` in evaluation mode and plain eager form; then restore its modes and the RNG.

    A compiled model would not run hooks added after its compilation.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)), torch.compiler.set_stance("force_eager"):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def probe(
    model: nn.Module, task: Task, batches: Iterable[Any], step: int = 0, positions: int = POSITIONS
) -> list[Row]:
    """Return the quantities of `ActivationHooks` and, with the loss L a mean over tokens:

    =====================  =====================================================================
    quantity               meaning
    =====================  =====================================================================
    w1_gradient            ``||dL/dW1||_F`` of the feed-forward's first matrix, mean over batches
    w2_gradient            the same for its second matrix
    w1_expected_gradient   the norm of the gradient averaged over batches, as Xiong et al. 2020
    w2_expected_gradient   (section 3.4) measure it
    w1_position_gradient   the norm of the gradient of the loss at one target position, mean over
    w2_position_gradient   `positions` of them in each batch
    loss, nll              of the model, in nats per token; loss with label smoothing
    output_information     of the model: mean KL of its predictions from their average, nats
    (gains)                each learned gain, also per head; gains of projections as the
                           ratios ``value_change`` and ``output_change``
    =====================  =====================================================================

    It runs in evaluation mode and the precision of the weights. Gradients are taken with
    `torch.autograd.grad`, so that neither ``.grad`` nor DDP hooks see them.
    """
    taps = ActivationHooks(model)
    gradients = Gradients(model, taps.tally)
    outputs = Outputs(taps.tally)
    with untouched(model), torch.enable_grad():
        for batch in batches:
            with taps, gradients:
                taps.expect(task.real_tokens(batch))
                predictions = task.predictions(model, batch)
            loss = task.mean_loss(predictions)
            gradients.add(loss)
            outputs.add(predictions, loss)
            for token in evenly_spaced(len(predictions.labels), positions):
                with gradients:
                    one = prediction(task, model, batch, token)
                gradients.add_one(task.mean_loss(one))
    gradients.close()
    outputs.close()
    for place, gain in [*learned_gains(model), *change_ratios(model)]:
        taps.tally.mean(place, gain)
        if gain.ndim == 3 and gain.shape[0] > 1:
            for head, value in enumerate(gain.detach().flatten(1).mean(dim=1)):
                taps.tally.mean(place._replace(head=head), value)
    return taps.rows(step)


def prediction(task: Task, model: nn.Module, batch: Any, token: int) -> Predictions:
    """Return one prediction of `batch`, using only the row on which it depends."""
    logits, labels = task.predictions(model, task.alone(batch, token))
    return Predictions(logits[-1:], labels[-1:])


class Outputs:
    """The loss and the predictions of the whole model over several batches."""

    def __init__(self, tally: RunningStats) -> None:
        self._tally = tally
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._tokens = 0

    @torch.no_grad()
    def add(self, predictions: Predictions, loss: Tensor) -> None:
        """Add the tokens of a batch, with their mean loss."""
        logits, labels = predictions
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self._tally.mean(Place("loss", MODEL), loss.expand(len(labels)))
        nll = nn.functional.cross_entropy(wide, labels, reduction="none")
        self._tally.mean(Place("nll", MODEL), nll)
        self._sums.append(measures.distribution_sums(logits))
        self._tokens += len(labels)

    def close(self) -> None:
        """Add the quantities over all tokens."""
        if self._tokens:
            totals, entropies = zip(*self._sums, strict=True)
            # Treat positions as classes; those missing from a shorter batch have probability 0.
            total = nn.utils.rnn.pad_sequence(list(totals), batch_first=True).sum(dim=0)
            entropy = torch.stack(entropies).sum(dim=0)
            information = measures.output_information(total, entropy, self._tokens)
            self._tally.mean(Place("output_information", MODEL), information)


class Gradients:
    """Norms of the gradients of the feed-forward matrices over several batches.

    Forward passes run inside the context, in which each layer uses a view of its matrices. Thus a
    block that serves several layers has a gradient per layer instead of their sum.
    """

    def __init__(self, model: nn.Module, tally: RunningStats) -> None:
        self._tally = tally
        self._blocks = dict.fromkeys((stack, block) for stack, _, block in layers_of(model))
        self._views: dict[Place, Tensor] = {}
        self._hooks = ExitStack()
        self._sums: list[Tensor] = []
        self._batches = 0

    def __enter__(self) -> Self:
        self._views.clear()
        for stack, block in self._blocks:
            before = partial(self._before, stack)
            self._hooks.enter_context(block.register_forward_pre_hook(before))
            self._hooks.enter_context(block.register_forward_hook(self._after))
            self._hooks.callback(self._after, block)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _before(self, stack: str, block: Block, args: tuple[Any, Any, Call]) -> None:
        for quantity, linear in _matrices(block):
            view = linear.weight.view_as(linear.weight)
            self._views[Place(f"{quantity}_gradient", stack, args[2].layer)] = view
            # An instance attribute, which takes precedence over the parameter of this name.
            object.__setattr__(linear, "weight", view)

    @staticmethod
    def _after(block: Block, *rest: Any) -> None:
        for _, linear in _matrices(block):
            vars(linear).pop("weight", None)

    def add(self, loss: Tensor) -> None:
        """Add the gradient of the mean loss of a batch."""
        found = self._of(loss)
        self._norms("gradient", found)
        if not self._batches:
            self._sums = [torch.zeros_like(gradient) for gradient in found]
        for total, gradient in zip(self._sums, found, strict=True):
            total += gradient
        self._batches += 1

    def add_one(self, loss: Tensor) -> None:
        """Add the gradient of the loss of one position."""
        self._norms("position_gradient", self._of(loss))

    def close(self) -> None:
        """Add the norms of the averages over batches."""
        if self._batches:
            self._norms("expected_gradient", [total / self._batches for total in self._sums])

    def _of(self, loss: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(loss, list(self._views.values()))

    def _norms(self, kind: str, gradients: Sequence[Tensor]) -> None:
        for place, gradient in zip(self._views, gradients, strict=True):
            quantity = place.quantity.replace("gradient", kind)
            self._tally.mean(place._replace(quantity=quantity), gradient.norm())


def _matrices(block: Block) -> tuple[tuple[str, nn.Linear], ...]:
    return ("w1", block.feed_forward.inner), ("w2", block.feed_forward.outer)


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return `wanted` evenly spaced positions of 0 .. count - 1, or all if there are fewer."""
    wanted = min(wanted, count)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


Snapshot = Mapping[nn.Parameter, Tensor]
"""A copy of every matrix of the blocks."""


def snapshot(model: nn.Module) -> Snapshot:
    """Return a copy of every matrix of every block, for `update_ratios`."""
    return {
        parameter: parameter.detach().clone()
        for stack in stacks(model).values()
        for parameter in stack.blocks.parameters()
        if parameter.ndim == 2
    }


def update_ratios(model: nn.Module, before: Snapshot, step: int) -> list[Row]:
    """Return ``||W' - W||_F / ||W||_F`` over the matrices of each layer: the size of one update.

    `before` holds W, from `snapshot`; the model holds W'. NaN if W was all zeros.
    """
    rows = []
    for stack, layer, block in layers_of(model):
        pairs = [(p.detach(), before[p]) for p in block.parameters() if p.ndim == 2]
        sums = [[(new - old).square().sum(), old.square().sum()] for new, old in pairs]
        moved, whole = torch.stack([torch.stack(each) for each in sums]).sum(dim=0)
        ratio = float((moved / whole).sqrt())
        rows.append(Row(step, stack, layer, "update_ratio", None, ratio))
    return ordered(rows)


@torch.no_grad()
def attention_maps(model: nn.Module, task: Task, sentence: Any) -> dict[str, Tensor]:
    """Return the softmax maps of a batch of one row: (layer, head, query, key), float32 on the CPU.

    Named ``encoder``, ``decoder`` and ``cross``. They are taken in evaluation mode, before shaping
    and with rows that sum to 1, also beside a sink; NaN where a query may not see a key, and for
    tokens that halted before the layer. The model is not changed. A layer is one call of a block; a
    shared block has as many layers as steps.
    """
    found: dict[str, list[Tensor]] = {}
    calls: list[Call] = []
    with ExitStack() as hooks, untouched(model):
        for name, stack in stacks(model).items():
            for block in dict.fromkeys(block for _, block in stack.layers):
                hooks.enter_context(block.register_forward_pre_hook(partial(_note, calls)))
                watched = {name: block.self_attention} if stack.has_maps else {}
                if block.cross_attention is not None:
                    watched["cross"] = block.cross_attention
                for key, attention in watched.items():
                    hook = partial(_keep, found.setdefault(key, []), calls)
                    hooks.enter_context(attention.register_forward_hook(hook, with_kwargs=True))
        task.logits(model, sentence)
    return {name: torch.stack(maps).float().cpu() for name, maps in found.items()}


def _note(calls: list[Call], module: Block, args: tuple[Any, Any, Call]) -> None:
    calls[:] = [args[2]]


def _keep(
    maps: list[Tensor], calls: list[Call], module: Attention, args: Any, kwargs: Any, output: Any
) -> None:
    mask, _, total = scores(module, args, kwargs, output[1])
    weights = softmax_map(total, mask, kwargs["divisor"]).masked_fill(~mask.allowed, torch.nan)
    (call,) = calls
    if call.running is not None:
        weights = weights.masked_fill(~call.running[:, None, :, None], torch.nan)
    maps.append(weights[0])


TOLERANCE = 1e-2  # of the residual's norm, relative to the eigenvalue
ITERATIONS = 200
SEED = 1  # the seed of the start vector


Vector = list[Tensor]
"""One tensor per parameter; together they form one vector."""


class Sharpness(NamedTuple):
    """The eigenvalue and whether the iteration converged to `TOLERANCE` within `ITERATIONS`."""

    value: float
    converged: bool


def preconditioned_sharpness(
    model: nn.Module,
    task: Task,
    batch: Any,
    eps: float,
    second_moments: Sequence[Tensor] | None = None,
    rates: Sequence[float] | None = None,
) -> Sharpness:
    """Return the largest eigenvalue of ``P^(-1/2) H P^(-1/2)``, H the Hessian of the mean loss.

    It has the eigenvalues of ``P^(-1) H`` (Kalra & Barkeshli 2024, 2406.09405). With P held fixed,
    Adam diverges on a quadratic if ``eta lambda > (2 + 2 beta1) / (1 - beta1)``, 38 at beta1 = 0.9
    (Cohen et al. 2022, 2207.14484). P is ``sqrt(v) + eps``: `second_moments` holds v for each
    parameter, with bias correction; without them v is the squared gradient of this batch, as after
    the first step of Adam. In that case the entries with the smallest gradients dominate, and the
    value is large. Parameters that do not affect the loss are left out.

    Raises:
        UserError: for a model with `Shrink`, whose gradient is not the derivative of its loss, or
            with `SpectralLinear`, whose gradient leaves out a term of the second derivative.
    """
    for part, what in (
        (Shrink, "residual_rule gpas: it stops gradients, so what training follows is not"),
        (
            SpectralLinear,
            "sigma_reparam: it takes vectors of the largest singular value as fixed, "
            "so what has a second derivative is not",
        ),
    ):
        if any(isinstance(module, part) for module in model.modules()):
            raise UserError(
                f"probe: --sharpness with {what} the gradient of the loss; leave --sharpness out"
            )
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Fused attention kernels have no second derivative.
    with (
        untouched(model),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        attention_form("plain"),
    ):
        loss = task.mean_loss(task.predictions(model, batch))
        found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used = [i for i, g in enumerate(found) if g is not None and g.requires_grad]
        gradients, parameters = [found[i] for i in used], [parameters[i] for i in used]
        if second_moments is None:
            roots = [gradient.detach().abs() for gradient in gradients]
        else:
            roots = [second_moments[i].sqrt() for i in used]
        etas = [1.0 if rates is None else rates[i] for i in used]
        scales = [((root + eps) / eta).rsqrt() for root, eta in zip(roots, etas, strict=True)]

        def product(v: Vector) -> Vector:
            scaled = [s * part for s, part in zip(scales, v, strict=True)]
            curved = torch.autograd.grad(
                gradients, parameters, scaled, retain_graph=True, materialize_grads=True
            )
            return [s * part for s, part in zip(scales, curved, strict=True)]

        return top_eigenvalue(product, parameters)


def top_eigenvalue(product: Callable[[Vector], Vector], like: Sequence[Tensor]) -> Sharpness:
    """Return the largest eigenvalue, with its sign, of the symmetric matrix A behind `product`.

    Power iteration made locally optimal (Knyazev 2001, LOBPCG with one vector). Each step takes
    one product and moves x to the best vector of the span of x, its residual ``A x - lambda x``
    and the previous step. Plain power iteration would find the eigenvalue of largest magnitude,
    which for this Hessian is as often the most negative one.
    """
    generator = torch.Generator().manual_seed(SEED)
    start = [torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for p in like]
    x = orthonormal([(start, start)])[0][0]
    basis = [(x, product(x))]  # pairs (v, A v), the first of them x
    value = math.nan
    for _ in range(ITERATIONS):
        x, image = basis[0]
        value = float(inner(x, image))
        residual = combined([(1.0, image), (-value, x)])
        distance = float(inner(residual, residual)) ** 0.5
        # Some eigenvalue is within this distance.
        if not distance > TOLERANCE * abs(value):
            return Sharpness(value, math.isfinite(value))
        direction = orthonormal([*((v, v) for v, _ in basis), (residual, residual)])[-1][0]
        basis = orthonormal([*basis[:1], (direction, product(direction)), *basis[1:]])
        if len(basis) == 1:  # non-finite vectors were dropped
            break
        table = torch.tensor(
            [[float(inner(v, image)) for _, image in basis] for v, _ in basis], dtype=torch.float64
        )
        weights = torch.linalg.eigh((table + table.T) / 2).eigenvectors[:, -1].tolist()
        # The new x and its new component, each with its image.
        best = list(zip(weights, basis, strict=True))
        terms = [[(w, v) for w, (v, _) in best], [(w, image) for w, (_, image) in best]]
        x, image = (combined(of) for of in terms)
        step, step_image = (combined(of[1:]) for of in terms)
        basis = orthonormal([(x, image), (step, step_image)])
    return Sharpness(value, False)


def orthonormal(pairs: Sequence[tuple[Vector, Vector]]) -> list[tuple[Vector, Vector]]:
    """Orthonormalise the first parts in order, combining the second parts in the same way.

    A vector that lies in the span of those before it is dropped.
    """
    kept: list[tuple[Vector, Vector]] = []
    for v, image in pairs:
        length = float(inner(v, v)) ** 0.5
        for _ in range(2):  # the second pass removes rounding errors
            for other, other_image in kept:
                part = float(inner(v, other))
                v = combined([(1.0, v), (-part, other)])
                image = combined([(1.0, image), (-part, other_image)])
        left = float(inner(v, v)) ** 0.5
        if left > 1e-5 * length:
            kept.append((combined([(1 / left, v)]), combined([(1 / left, image)])))
    return kept


def combined(terms: Sequence[tuple[float, Vector]]) -> Vector:
    """Return the sum of factor times vector."""
    (factor, vector), *rest = terms
    total = [factor * part for part in vector]
    for factor, vector in rest:
        total = [a + factor * b for a, b in zip(total, vector, strict=True)]
    return total


def inner(a: Vector, b: Vector) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
