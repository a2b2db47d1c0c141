"""Hooks that measure the states and attention maps of a running model without changing them."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, Carry, spread_heads
from lightning_app.blocks.block import Block, Call, Carries
from lightning_app.blocks.kernels.choose import QueryKeySums, own_scores, softmax_input, softmax_map
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.spans import DynamicSpanMask
from lightning_app.blocks.streams import Stream
from lightning_app.blocks.windows import LocalMask
from lightning_app.models.stack import stacks
from lightning_app.probes import measures
from lightning_app.runs.records import Place, probed_values

QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
"""The quantiles of a distribution, for a box with whiskers."""

MODEL = "model"
"""The name in column `stack` for quantities of the whole model."""

NO_RANK = 1 << 30  # sorts values of a whole stack, or of all heads, last


class Row(NamedTuple):
    """One number at one step of one run."""

    step: int
    stack: str
    layer: int | None
    quantity: str
    head: int | None
    value: float

    @classmethod
    def at(cls, step: int, place: Place, value: float) -> Self:
        return cls(step, place.stack, place.layer, place.quantity, place.head, value)

    @property
    def place(self) -> Place:
        return Place(self.quantity, self.stack, self.layer, self.head)


class RunningStats:
    """Means, maxima and quantiles over the items of several batches, kept on their device.

    Nothing is copied from a device before `rows`.
    """

    def __init__(self) -> None:
        self._sums: dict[Place, Tensor] = {}
        self._counts: dict[Place, int] = {}
        self._largest: dict[Place, Tensor] = {}
        self._samples: dict[Place, list[Tensor]] = {}

    def mean(self, place: Place, values: Tensor) -> None:
        """Add `values`, of any shape, to the mean at `place`."""
        total = values.detach().sum()
        self._sums[place] = self._sums[place] + total if place in self._sums else total
        self._counts[place] = self._counts.get(place, 0) + values.numel()

    def largest(self, place: Place, values: Tensor) -> None:
        """Raise the maximum at `place` to that of `values`."""
        if values.numel():
            top = values.detach().amax()
            old = self._largest.get(place)
            self._largest[place] = top if old is None else torch.maximum(old, top)

    def sample(self, place: Place, values: Tensor) -> None:
        """Add `values` to the distribution at `place`, whose quantiles are kept."""
        self._samples.setdefault(place, []).append(values.detach().flatten())

    def rows(self, step: int) -> list[Row]:
        """Return one row per number, in the order of `ordered`, without empty entries."""
        values: dict[Place, Tensor] = dict(self._largest)
        for place, total in self._sums.items():
            if self._counts[place]:
                values[place] = total / self._counts[place]
        for place, parts in self._samples.items():
            whole = torch.cat(parts)
            if whole.numel():
                points = whole.new_tensor(list(QUANTILES.values()))
                for name, value in zip(QUANTILES, quantiles(whole, points), strict=True):
                    values[place._replace(quantity=f"{place.quantity}_{name}")] = value
        if not values:
            return []
        numbers = torch.stack([value.to(torch.float64).cpu() for value in values.values()]).tolist()
        return ordered(Row.at(step, *each) for each in zip(values, numbers, strict=True))


def quantiles(values: Tensor, points: Tensor) -> Tensor:
    """Return the quantiles at `points`, interpolated linearly. `torch.quantile` has a limit
    of 2^24 values; sorting has no such limit."""
    ranked = values.sort().values
    places = points * (len(ranked) - 1)
    low, high = places.floor().long(), places.ceil().long()
    return torch.lerp(ranked[low], ranked[high], places - low)


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Return `rows` by step, stack, quantity, layer, head; the model as a whole comes last."""

    def rank(row: Row) -> tuple[int, int, str, int, int]:
        stacks = ("encoder", "decoder")
        stack = stacks.index(row.stack) if row.stack in stacks else len(stacks)
        layer = NO_RANK if row.layer is None else row.layer
        head = -1 if row.head is None else row.head
        return row.step, stack, row.quantity, layer, head

    return sorted(rows, key=rank)


HEADER = ("step", "stack", "layer", "quantity", "head", "value")


def to_csv(rows: Sequence[Row], *, headed: bool = True) -> str:
    """Return `rows` as one CSV table, with its header or to add to one; empty cells are missing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if headed:
        writer.writerow(HEADER)
    writer.writerows(cells(row) for row in rows)
    return text.getvalue()


def cells(row: Row) -> list[str]:
    """Return a row as text, in the order of `HEADER`."""
    return [*("" if cell is None else str(cell) for cell in row[:-1]), f"{row.value:.9g}"]


def from_csv(path: Path) -> list[Row]:
    """Read a table that `to_csv` wrote."""
    return [Row.at(*row) for row in probed_values(path)]


class Probed(NamedTuple):
    """The rows of one variant, and its name in tables and figures."""

    name: str
    rows: list[Row]

    def values(self, quantity: str, stack: str, head: int | None = None) -> dict[int, float]:
        """Return the value of each layer at the last measured step."""
        last = max((row.step for row in self.rows), default=0)
        return {
            row.layer: row.value
            for row in self.rows
            if row.step == last
            and (row.quantity, row.stack, row.head) == (quantity, stack, head)
            and row.layer is not None
        }

    def number(self, quantity: str, stack: str = MODEL) -> float:
        """Return a value of the whole stack or model, NaN if it is missing."""
        last = max((row.step for row in self.rows), default=0)
        for row in self.rows:
            if row.step == last and (row.quantity, row.stack) == (quantity, stack):
                return row.value
        return math.nan


def layers_of(model: nn.Module) -> Iterator[tuple[str, int, Block]]:
    """Yield the stack and the number, from 1, of each layer, and its block."""
    for name, stack in stacks(model).items():
        for layer, block in stack.layers:
            yield name, layer, block


Real = Mapping[str, Bool[Tensor, "batch token"]]
"""By stack, a mask of the input tokens that count."""


class ActivationHooks:
    """Forward hooks on every stack of `model` inside the context, which can be re-entered.

    Before each forward pass, `expect` sets the tokens that count. All measurements go to `tally`:

    ======================  ====================================================================
    quantity                for layer n (0: the input of the first layer)
    ======================  ====================================================================
    hidden_norm             ``||x||^2 / d`` of the stream after the layer, mean over tokens
    sum_norm                the same before the layer's last norm, if that is on the sum:
                            Xiong et al.'s x^{post,5}; elsewhere equal to hidden_norm
    token_cosine            mean cosine of pairs of tokens in a sentence, after the layer
    token_rank              effective rank of the tokens in a sentence, after the layer
    attention_entropy       of the softmax map, nats, mean over rows and heads; also per head, with
                            the quantiles ``_p5 .. _p95``
    attention_free_entropy  the same for the uniform map over the visible keys
    attention_distance      Jensen-Shannon divergence (bits) from the map of the layer below,
                            same head; also the mean per head
    attention_matched       the same under the best one-to-one matching of heads
    score_ratio             own scores relative to the running sum, if scores are carried
    largest_logit           the largest input of the softmax
    peaked_rows             share of rows whose largest probability is above 0.99
    running_tokens          with halting: share of tokens that the layer changes
    span                    of dynamic spans: tokens, mean over the queries; also per head
    ======================  ====================================================================

    A layer is one call of a block; a shared block has as many layers as steps. With halting,
    every quantity of a layer covers the tokens that have not halted before it.

    Maps are measured before shaping, and those of attention with a sink after division by the sums
    of their rows: an entropy is that of the keys without the sink. In differential attention each
    of the two maps of a head counts as a head, before their difference. Rows are the queries of
    counted tokens that may see two keys or more. A decoder's cross-attention has the same
    quantities with the prefix ``cross_``. A stack's output, after its final norm, has
    ``output_norm`` and ``output_cosine``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tally = RunningStats()
        self._stacks = stacks(model)
        self._hooks = ExitStack()
        self._real: Real = {}
        self._layer = 0
        self._running: Bool[Tensor, "batch token"] | None = None
        self._below: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._distances: dict[Place, list[tuple[Tensor, int]]] = {}

    def __enter__(self) -> Self:
        for name, stack in self._stacks.items():
            for block in dict.fromkeys(block for _, block in stack.layers):
                self._tap(name, block)
            self._keep(stack, partial(self._on_end, name))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        self._below.clear()

    def expect(self, real: Real) -> None:
        """Announce the next forward pass with the tokens of each stack that count in it."""
        self._real = real
        self._below.clear()

    def rows(self, step: int) -> list[Row]:
        """Return all measurements since the start."""
        rows = self.tally.rows(step)
        for place, parts in self._distances.items():
            items = sum(count for _, count in parts)
            distance = torch.stack([mean * (count / items) for mean, count in parts]).sum(dim=0)
            values = {None: float(distance.diagonal().mean())}
            values |= dict(enumerate(distance.diagonal().tolist()))
            rows += [Row.at(step, place._replace(head=n), value) for n, value in values.items()]
            matched = place._replace(quantity=place.quantity.replace("distance", "matched"))
            rows.append(Row.at(step, matched, measures.matched_distance(distance)))
        return ordered(rows)

    def _keep(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))

    def _tap(self, stack: str, block: Block) -> None:
        self._hooks.enter_context(block.register_forward_pre_hook(partial(self._on_entry, stack)))
        self._keep(block, partial(self._on_block, stack))
        norm = last_norm(block)
        if norm is not None:
            self._keep(norm, partial(self._on_sum, stack))
        if self._stacks[stack].has_maps:
            self._keep(block.self_attention, partial(self._on_attention, stack, ""))
        if block.cross_attention is not None:
            self._keep(block.cross_attention, partial(self._on_attention, stack, "cross_"))

    def _on_entry(self, stack: str, module: Block, args: tuple[Stream, Carries, Call]) -> None:
        stream, _, call = args
        self._layer, self._running = call.layer, call.running
        if call.layer == 1:
            self._state(stack, 0, stream.x)
        if call.running is not None:
            share = call.running[self._real[stack]].double()
            self.tally.mean(Place("running_tokens", stack, call.layer), share)

    def _on_block(self, stack: str, module: Block, args: Any, kwargs: Any, output: Any) -> None:
        stream, _ = output
        self._state(stack, self._layer, stream.x)
        if last_norm(module) is None:
            place = Place("sum_norm", stack, self._layer)
            self._mean(place, measures.squared_norms, stack, stream.x)

    def _on_sum(self, stack: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        place = Place("sum_norm", stack, self._layer)
        self._mean(place, measures.squared_norms, stack, args[0])

    def _on_end(self, stack: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running = None
        self._mean(Place("output_norm", stack), measures.squared_norms, stack, output)
        self._mean(Place("output_cosine", stack), measures.token_cosines, stack, output)

    def _state(self, stack: str, layer: int, x: Tensor) -> None:
        self._mean(Place("hidden_norm", stack, layer), measures.squared_norms, stack, x)
        self._mean(Place("token_cosine", stack, layer), measures.token_cosines, stack, x)
        self._mean(Place("token_rank", stack, layer), measures.token_ranks, stack, x)

    def _mean(
        self, place: Place, measure: Callable[[Tensor, Tensor], Tensor], stack: str, x: Tensor
    ) -> None:
        self.tally.mean(place, measure(x.detach(), self._counted(stack)))

    def _counted(self, stack: str) -> Bool[Tensor, "batch token"]:
        real = self._real[stack]
        return real if self._running is None else real & self._running

    @torch.no_grad()
    def _on_attention(
        self, stack: str, prefix: str, module: Attention, args: Any, kwargs: Any, output: Any
    ) -> None:
        layer, divisor = self._layer, kwargs["divisor"]
        if isinstance(module.span, DynamicSpanMask):
            self._spans(stack, kwargs["spans"])
        mask, new, total = scores(module, args, kwargs, output[1])
        allowed = mask.allowed.expand(total.shape[0], 1, *total.shape[2:])[:, 0]
        rows = self._counted(stack) & (allowed.sum(dim=-1) > 1)
        # (batch, head, query, key) -> (row, head, key)
        seen = allowed[rows][:, None]
        maps = softmax_map(total, mask, divisor).transpose(1, 2)[rows]
        logits = softmax_input(total, mask, divisor).transpose(1, 2)[rows]
        total = total.transpose(1, 2)[rows]
        if module.spec.carry != "none":
            cells = seen.expand_as(total)
            own = new.transpose(1, 2)[rows]
            ratio = measures.score_ratio(own[cells], total[cells])
            self.tally.mean(Place(f"{prefix}score_ratio", stack, layer), ratio)
        place = Place(f"{prefix}attention_entropy", stack, layer)
        entropies = measures.entropies(maps)
        self.tally.mean(place, entropies)
        for head in range(maps.shape[1]):
            self.tally.sample(place._replace(head=head), entropies[:, head])
        free = Place(f"{prefix}attention_free_entropy", stack, layer)
        self.tally.mean(free, seen[:, 0].sum(dim=-1).to(maps.dtype).log())
        peaked = Place(f"{prefix}peaked_rows", stack, layer)
        self.tally.mean(peaked, measures.peaked_rows(maps))
        # Compare the maps with those of the layer below for the same rows.
        if layer > 1 and len(maps):
            below, rows_below = self._below[stack, prefix]
            distances = Place(f"{prefix}attention_distance", stack, layer)
            found = measures.head_distances(maps, below[rows[rows_below]])
            self._distances.setdefault(distances, []).append((found, len(maps)))
        self._below[stack, prefix] = maps, rows
        largest = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
        self.tally.largest(Place(f"{prefix}largest_logit", stack, layer), largest)

    def _spans(self, stack: str, spans: Float[Tensor, "batch head query 1"]) -> None:
        # (batch, head, query, 1) -> (token, head)
        counted = spans.squeeze(-1).transpose(1, 2)[self._counted(stack)]
        place = Place("span", stack, self._layer)
        self.tally.mean(place, counted)
        for head, own in enumerate(counted.unbind(dim=1)):
            self.tally.mean(place._replace(head=head), own)


def last_norm(block: Block) -> nn.Module | None:
    """Return the norm on the sum of the block's last sub-layer, or None."""
    norm = block.last_residual.norm_sum
    return None if isinstance(norm, nn.Identity) else norm


def scores(
    module: Attention, args: tuple[Any, ...], kwargs: Mapping[str, Any], carry: Carry | None
) -> tuple[Mask, Tensor, Tensor]:
    """Return an attention's mask, its own scores S_n and the input Z_n of its softmax.

    `args` and `kwargs` belong to the call, `carry` is the state that the attention passed on, or
    None. Z_n is read immediately, since the next layer may change it in place. Scores are not
    masked: only cells that a query may see are meaningful. They have no sink, so maps of them are
    those of attention with a sink divided by the sums of their rows.
    """
    query, keys, _, mask, _ = args
    local: LocalMask | None = mask if isinstance(mask, LocalMask) else None
    whole = module.whole_mask(mask, kwargs.get("spans"))
    new = own_scores(query, spread_heads(keys, module.num_heads), whole, module.spec.score_cap)
    if carry is None:
        return whole, new, new
    computed = whole if local is None else local.mask
    if isinstance(carry, QueryKeySums):
        total = own_scores(carry.query, carry.key[:, :, : computed.keys], computed)
    else:
        total = carry.scores[..., : computed.keys]
    return whole, new, total if local is None else local.whole_map(total)
