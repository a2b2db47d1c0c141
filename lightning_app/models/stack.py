"""A stack of blocks as a module, and the signals added before each step of a shared block."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.block import Block, Call, Carries, CrossAttentionInput, Earlier, Sizes
from lightning_app.blocks.kernels.choose import recomputed_norms, saves_memory
from lightning_app.blocks.masks import Mask, mask_of
from lightning_app.blocks.memory import LayerCache, Recurrence
from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.placed import Placed, Places
from lightning_app.blocks.spans import Counted, DynamicSpanMask
from lightning_app.blocks.stack import StackSpec, StepSignal
from lightning_app.blocks.steps import Halting, Pondering, StepCounts
from lightning_app.blocks.streams import States, Stream, select_tokens
from lightning_app.blocks.windows import Window, WindowMasks
from lightning_app.models.positions import LearnedTable, Positions, Sinusoids


@final
class StepSignals(nn.Module):
    """``PE(i) + S(n)`` at position i before step n (Dehghani et al. 2019, 1807.03819, section 2.1).

    PE is the table of the positions, absent if they enter attention. S(n) is the row of the
    sinusoids at n, from 1, or a learned vector of step n. The embedding then does not add PE.
    """

    def __init__(self, kind: StepSignal, steps: int, dim: int, positions: Positions | None) -> None:
        super().__init__()
        self.position_table = None if positions is None else positions.table()
        self.step_table = LearnedTable(steps, dim) if kind == "learned" else Sinusoids(dim)

    def forward(self, x: States, places: Places, step: int) -> States:
        """Return `x` with the signals of `step`, counted from 1, at the newest of `places`."""
        row = step - 1 if isinstance(self.step_table, LearnedTable) else step
        signal = self.step_table(row, row + 1, x.device)
        if self.position_table is not None:
            end = places.start + len(places.newest)
            table = self.position_table(places.start, end, x.device)
            if places.in_document is not None:
                table = nn.functional.embedding(places.in_document, table)
            signal = signal + table
        return x + signal.to(x.dtype)


class Memory(NamedTuple):
    """The input of a stack's cross-attentions: keys and values per layer."""

    layers: list[tuple[Tensor, Tensor]]
    mask: Mask

    def select(self, rows: Int[Tensor, " kept"]) -> "Memory":
        """Return the memory of `rows` of the batch, which may repeat."""
        layers = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.layers]
        return Memory(layers, mask_of(self.mask.allowed.index_select(0, rows)))


@final
class BlockStack(nn.Module):
    """``depth`` blocks, or one block used that often, and the norms around the stack."""

    def __init__(
        self,
        spec: StackSpec,
        sizes: Sizes,
        positions: Positions | None = None,
        *,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        # False if the blocks are compiled, since hooks on their norms would break compilation.
        self.recomputes_norms = True
        self.place = None if positions is None else positions.placing(spec)
        self.input_norm = build_norm(spec.input_norm, sizes.model_dim)
        built = spec.blocks[:1] if spec.share == "all" else spec.blocks
        streams = spec.stream_rules(sizes.model_dim, cross=cross)
        self.blocks = nn.ModuleList(
            Block(block, sizes, cross=cross, streams=streams) for block in built
        )
        self.signals = (
            None
            if spec.step_signal == "none"
            else StepSignals(spec.step_signal, spec.depth, sizes.model_dim, positions)
        )
        self.halting = None if spec.halting is None else Halting(spec.halting, sizes.model_dim)
        self.final_norm = build_norm(spec.final_norm, sizes.model_dim)
        *_, self.stream_end = streams

    @property
    def layers(self) -> Iterator[tuple[int, Block]]:
        """Each layer, from 1, with its block; layers may share one."""
        for layer in range(1, self.spec.depth + 1):
            block = self.blocks[0 if self.spec.share == "all" else layer - 1]
            assert isinstance(block, Block)
            yield layer, block

    @property
    def has_maps(self) -> bool:
        """Whether every self-attention is a softmax, whose maps probes and pictures show."""
        return all(block.self_attention.own is None for _, block in self.layers)

    @property
    def dynamic_spans(self) -> list[DynamicSpanMask]:
        """The dynamic spans of the blocks; empty if there are no such spans."""
        spans = (block.self_attention.span for _, block in self.layers)
        return list(dict.fromkeys(span for span in spans if isinstance(span, DynamicSpanMask)))

    def first_seen(self, position: int) -> int:
        """Return the first position that a query at `position` may see in any layer."""
        windows = [self._window(block, cached=True) for _, block in self.layers]
        return min(0 if window is None else window.first(position) for window in windows)

    def _window(self, block: Block, *, cached: bool) -> Window | None:
        """Return the keys around each query that it may see; None if there is no limit.

        In cached decoding a segment is one token, with the memory before it.
        """
        window = block.self_attention.window
        if window is not None or self.spec.memory is None or not cached:
            return window
        return self.spec.memory.window(training=False)

    def remember(self, states: Float[Tensor, "batch source model"], mask: Mask) -> Memory:
        """Return the keys and values that each cross-attention computes from `states`."""
        layers = []
        for _, block in self.layers:
            assert block.cross_attention is not None
            layers.append(block.cross_attention.keys_values(states, None))
        return Memory(layers, mask)

    def forward(
        self,
        x: States,
        mask: Mask,
        memory: Memory | None = None,
        caches: list[LayerCache] | None = None,
        places: Places | None = None,
        kept: Int[Tensor, " kept"] | None = None,
        seen: list[Stream] | None = None,
        in_document: Int[Tensor, "batch token"] | None = None,
        recurrence: Recurrence | None = None,
        tokens: Int[Tensor, "batch token"] | None = None,
    ) -> States | Float[Tensor, "1 kept model"]:
        """Return the states of `x`.

        Args:
            x: The newest tokens.
            mask: The tokens of this stack that each token may attend to.
            memory: The input of cross-attention.
            caches: One per layer, with the tokens before `x`; `x` is appended to them.
            places: The positions of the tokens; None if `x` is a whole text.
            kept: The tokens whose states are returned, as flat indices into batch * token;
                None for all. The last block computes everything after its map for these only.
            seen: A list to which the stream after each layer is appended.
            in_document: `Places.in_document` of a whole text, whose mask separates documents.
            recurrence: The memory of each layer, with the positions before those of `x`. The input
                of each layer is appended to its inputs.
            tokens: The ids of the newest tokens, for layers whose values read them.

        Raises:
            ValueError: for documents in a stack whose attention has blocks of queries.
        """
        given, places = places, places or Places.whole(x.shape[1], x.device)
        if in_document is not None:
            self.spec.check_documents()
            places = places._replace(in_document=in_document)
        placed = None
        if self.place is not None:
            placed = self.place(places)
            if placed.bias is not None:
                mask = mask.with_score_bias(placed.bias)
        masks = WindowMasks(mask, x.shape[0], given)
        x = self.input_norm(x)
        stream = self.stream_end.start(x)
        recomputing = self.recomputes_norms and saves_memory(x)
        # A branch is dropped for whole rows, which the last block would no longer see.
        late = kept is not None and self.training and any(b.drops for b in self.spec.blocks)
        early = None if late else kept
        with recomputed_norms(self) if recomputing else nullcontext():
            stream = self._run(
                stream, masks, memory, caches, places, placed, early, seen, recurrence, tokens
            )
        if late and kept is not None:
            stream = stream.at(kept)
        return self.stream_end.end(stream, self.final_norm)

    def _run(
        self,
        stream: Stream,
        masks: WindowMasks,
        memory: Memory | None,
        caches: list[LayerCache] | None,
        places: Places,
        placed: Placed | None,
        kept: Int[Tensor, " kept"] | None,
        seen: list[Stream] | None,
        recurrence: Recurrence | None,
        tokens: Int[Tensor, "batch token"] | None,
    ) -> Stream:
        carries = Carries()
        earlier = None
        if recurrence is not None and self.place is not None:
            earlier = self.place(Places.whole(recurrence.memory.tokens, stream.x.device))
        pondering = None if self.halting is None else Pondering.start(stream.x)
        for layer, block in self.layers:
            source = past = None
            if memory is not None:
                source = CrossAttentionInput(*memory.layers[layer - 1], memory.mask)
            if recurrence is not None:
                at = None if earlier is None else earlier.at(layer)
                past = Earlier(recurrence.memory.layers[layer - 1], at)
            cache = None if caches is None else caches[layer - 1]
            last = layer == self.spec.depth
            call = Call(
                layer=layer,
                mask=masks.within(self._window(block, cached=caches is not None)),
                placed=None if placed is None else placed.at(layer),
                source=source,
                cache=cache,
                spec=self.spec.blocks[layer - 1],
                running=None if pondering is None else pondering.running,
                before=past,
                kept=kept if last and pondering is None else None,
                carries_values=self.spec.carries_values,
                tokens=tokens,
            )
            before = stream.x
            if self.signals is not None:
                stream = stream._replace(x=self.signals(before, places, layer))
            if recurrence is not None:
                recurrence.inputs.append(block.around_self.stream.read(stream))
            stream, carries = block(stream, carries, call)
            if self.halting is not None:
                assert pondering is not None
                # A token that has halted keeps its state, without the signals of later steps.
                state = torch.where(pondering.running.unsqueeze(-1), stream.x, before)
                pondering = self.halting(pondering, state, last=last)
                stream = Stream(state)
            if seen is not None:
                seen.append(stream)
        if self.halting is None:
            return stream
        assert pondering is not None
        self.halting.finish(pondering, self.spec.depth)
        average = pondering.average.to(stream.x.dtype)
        return Stream(average if kept is None else select_tokens(average, kept))


def stacks(model: nn.Module) -> dict[str, BlockStack]:
    """Return the stacks of `model` by name."""
    return {name: s for name, s in model.named_children() if isinstance(s, BlockStack)}


def count_tokens_of(
    model: nn.Module,
    counted: Mapping[str, Bool[Tensor, "batch token"]],
    over_ranks: Callable[[Tensor], Tensor] = lambda number: number,
) -> None:
    """Set the tokens of each stack that count in its loss terms in the next forward pass.

    Args:
        model: A model; only stacks that halt or have dynamic spans have such terms.
        counted: The tokens of this rank, by stack.
        over_ranks: Returns the mean over all ranks of a number that each of them passes.
    """
    for name, stack in stacks(model).items():
        if stack.halting is not None:
            stack.halting.counted = counted[name]
        if stack.dynamic_spans:
            # In float64, so that a mean over ranks is not an integer division.
            number = over_ranks(counted[name].sum().to(torch.float64))
            for spans in stack.dynamic_spans:
                spans.count(Counted(counted[name], number))


def step_counts(model: nn.Module) -> dict[str, StepCounts]:
    """Return the steps of the last forward pass of training, of each stack that halts."""
    return {
        name: stack.halting.step_counts()
        for name, stack in stacks(model).items()
        if stack.halting is not None
    }
