"""Measure a model on a few batches, as rows of numbers. The model is not changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_app.blocks.block import Block, Call
from lightning_app.models.transformer import stacks
from lightning_app.probes import measures
from lightning_app.probes.activation_hooks import ActivationHooks
from lightning_app.probes.gains import change_ratios, learned_gains
from lightning_app.probes.table import MODEL, Place, Row, RunningStats, ordered
from lightning_app.tasks.base import Predictions, Task

POSITIONS = 4
"""The number of target positions of a batch whose gradients are measured separately."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run `model` in evaluation mode and plain eager form; then restore its modes and the RNG.

    A compiled model would not see hooks that came after its compilation.
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
    model: nn.Module,
    task: Task,
    batches: Iterable[Any],
    step: int = 0,
    positions: int = POSITIONS,
) -> list[Row]:
    """Return what `ActivationHooks` measures and, with the loss L a mean over tokens:

    =====================  =====================================================================
    quantity               meaning
    =====================  =====================================================================
    w1_gradient            ``||dL/dW1||_F`` of the feed-forward's first matrix, mean over batches
    w2_gradient            the same of its second matrix
    w1_expected_gradient   the norm of the gradient averaged over batches, as Xiong et al. 2020
    w2_expected_gradient   (section 3.4) measure it
    w1_position_gradient   the norm of the gradient of the loss of one target position, mean over
    w2_position_gradient   `positions` of them in each batch
    loss, nll              of the model, nats a token; loss with label smoothing
    output_information     of the model: mean KL of its predictions from their average, nats
    (gains)                each learned gain, also for each head; those of projections as the
                           ratios ``value_change`` and ``output_change``
    =====================  =====================================================================

    In evaluation mode, in the precision of the weights. Gradients are taken by
    `torch.autograd.grad`, so that no ``.grad`` and no hook of DDP sees them.
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
    add_gains(model, taps.tally)
    return taps.rows(step)


def prediction(task: Task, model: nn.Module, batch: Any, token: int) -> Predictions:
    """Return one prediction of `batch`, from the one row on which it depends."""
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
            # Positions as classes: what a shorter batch does not have has the probability 0 there.
            total = nn.utils.rnn.pad_sequence(list(totals), batch_first=True).sum(dim=0)
            entropy = torch.stack(entropies).sum(dim=0)
            information = measures.output_information(total, entropy, self._tokens)
            self._tally.mean(Place("output_information", MODEL), information)


class Gradients:
    """Norms of the gradients of the feed-forward matrices over several batches.

    Forward passes run inside the context, in which each layer uses a view of its matrices. So a
    block that serves several layers has the gradient of each layer, not the sum over all of them.
    """

    def __init__(self, model: nn.Module, tally: RunningStats) -> None:
        self._tally = tally
        self._stacks = stacks(model)
        self._views: dict[Place, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._sums: list[Tensor] = []
        self._batches = 0

    def __enter__(self) -> Self:
        self._views.clear()
        for name, stack in self._stacks.items():
            for block in dict.fromkeys(block for _, block in stack.layers):
                self._handles.append(block.register_forward_pre_hook(self._before(name)))
                self._handles.append(block.register_forward_hook(self._after))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for stack in self._stacks.values():
            for _, block in stack.layers:
                self._after(block)

    def _before(self, stack: str) -> Callable[..., None]:
        def hook(block: Block, args: tuple[Any, Any, Call]) -> None:
            for quantity, linear in _matrices(block):
                view = linear.weight.view_as(linear.weight)
                self._views[Place(f"{quantity}_gradient", stack, args[2].layer)] = view
                # An attribute of the instance, which is found before the parameter of this name.
                object.__setattr__(linear, "weight", view)

        return hook

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


def add_gains(model: nn.Module, tally: RunningStats) -> None:
    """Add the mean of each learned gain, and each head's own."""
    for place, gain in [*learned_gains(model), *change_ratios(model)]:
        tally.mean(place, gain)
        if gain.ndim == 3 and gain.shape[0] > 1:
            for head, value in enumerate(gain.detach().flatten()):
                tally.mean(place._replace(head=head), value)


Snapshot = Mapping[nn.Parameter, Tensor]
"""A copy of each matrix of the blocks."""


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

    `before` holds W, from `snapshot`; the model holds W'. NaN where all of W was zero.
    """
    rows = []
    for name, stack in stacks(model).items():
        for layer, block in stack.layers:
            pairs = []
            for parameter in block.parameters():
                if parameter.ndim == 2:
                    old = before[parameter]
                    new = parameter.detach()
                    pairs.append(torch.stack([(new - old).square().sum(), old.square().sum()]))
            moved, whole = torch.stack(pairs).sum(dim=0)
            ratio = float((moved / whole).sqrt())
            rows.append(Row(step, name, layer, "update_ratio", None, ratio))
    return ordered(rows)
