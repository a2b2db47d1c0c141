"""One block, an encoder or a decoder of any preset as a plain `torch.nn.Module`."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_app.blocks.block import Block as WiredBlock
from lightning_app.blocks.block import BlockSpec, Call, Carries, CrossAttentionInput, Sizes
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.feed_forward import ACTIVATIONS, Activation
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.norm import acts_after_steps, after_steps
from lightning_app.blocks.presets.registry import check_spec
from lightning_app.blocks.spans import auxiliary_terms
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.blocks.streams import DUAL, PLAIN, Stream
from lightning_app.blocks.windows import WindowMasks
from lightning_app.core.errors import UserError
from lightning_app.core.schema import as_plain, as_written, hints_of, read
from lightning_app.models.initialization import initialize
from lightning_app.models.positions import POSITIONS
from lightning_app.models.stack import BlockStack, count_tokens_of

Wiring = str | Mapping[str, Any] | BlockConfig
"""The name of a preset, or a preset with axes, as in the section `model.block` of a config."""


def wiring(block: Wiring, axes: Mapping[str, Any]) -> BlockConfig:
    """Return the config of `block` with the `axes` set on top of it.

    Raises:
        UserError: naming the axis, the value and what would be right.
    """
    if isinstance(block, str):
        block = {"preset": block}
    if not isinstance(block, Mapping | BlockConfig):
        raise UserError(f"block: expected a preset or a mapping, found {as_written(block)}")
    config = block if isinstance(block, BlockConfig) else _read(block, "block")
    check_types(BlockConfig, block=config)
    if "preset" in axes:
        raise UserError("preset: is the first argument, block; name it there alone")
    parsed = _read(axes, "")
    return replace(config, **{name: getattr(parsed, name) for name in axes})


def _read(values: Mapping[str, Any], at: str) -> BlockConfig:
    """Read axes as a config would; some of them may already be specifications."""
    hints = hints_of(BlockConfig)
    for name, value in values.items():
        if is_dataclass(value) and name in hints:
            check_types(hints[name], **{name: value})
    return read(BlockConfig, as_plain(values), at=at)


@contextmanager
def one_line() -> Iterator[None]:
    """Raise a mistake in a specification as a `UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def check_types(hint: Any, **values: Any) -> None:
    """Refuse arguments that are not of a type. Raises `UserError`."""
    with one_line():
        for name, value in values.items():
            check_spec(value, hint, name)


def _check_positive(**values: int) -> None:
    check_types(int, **values)
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")


def _check_peer(cross: bool, peer_depth: int) -> None:
    check_types(bool, cross=cross)
    check_types(int, peer_depth=peer_depth)
    if peer_depth < 0 or (cross and not peer_depth):
        raise UserError(
            f"peer_depth {peer_depth}: expected the depth of the other stack, at least "
            f"{int(cross)}; constants of presets depend on it"
        )


def _sizes(
    dim: int,
    heads: int,
    ff_dim: int | None,
    activation: Activation,
    dropout: float,
    attention_dropout: float,
) -> Sizes:
    """Return the sizes that blocks share."""
    ff_dim = 4 * dim if ff_dim is None else ff_dim
    _check_positive(dim=dim, heads=heads, ff_dim=ff_dim)
    for name, value in (("dropout", dropout), ("attention_dropout", attention_dropout)):
        check_types(float, **{name: value})
        if not 0.0 <= value < 1.0:
            raise UserError(f"{name} {value}: must be at least 0 and less than 1")
    _ = ACTIVATIONS.require(activation, "activation")
    if dim % heads:
        raise UserError(f"heads {heads}: expected a divisor of dim {dim}")
    return Sizes(
        model_dim=dim,
        ff_dim=ff_dim,
        num_heads=heads,
        activation=activation,
        dropout=dropout,
        attention_dropout=attention_dropout,
    )


def _resolved(config: BlockConfig, place: Stack) -> StackSpec:
    """Return the specification of a stack that needs no data from a run."""
    if config.memory is not None:
        raise UserError("memory: belongs to a whole model of a text, which `fit` trains")
    with one_line():
        spec = config.resolve(place)
    for block in spec.blocks:
        around = (block.around_self, block.around_cross, block.around_ff)
        if any(each.branch.ramp for each in around):
            raise UserError(
                "branch_ramp, as in preset prores, follows the steps of a run, which only `fit` "
                "counts; take gains with a value"
            )
        if block.unit_matrices:
            raise UserError(
                "unit_matrices, as in preset ngpt, are projected after each step of a run, which "
                "only `fit` makes; use another preset"
            )
        if any(each.skip.profiled for each in around):
            raise UserError(
                "profiled skips, as in preset admin, start from a pass over the data of a run, "
                "which only `fit` makes; take gains with a value"
            )
    return spec


def _mask(
    name: str,
    x: Tensor,
    dim: int,
    present: Tensor | None,
    *,
    batch: int | None = None,
    causal: bool = False,
) -> Mask:
    """Return a mask of the tokens of `x`, the argument `name`, that may be attended to.

    `present`, (batch, token) bool, is True at real tokens and False at padding; None if nothing is
    padding. `batch` is the size of the batch, if it is fixed.
    """
    if x.dim() != 3 or x.shape[2] != dim:
        shape = tuple(x.shape)
        raise UserError(f"{name}: expected the shape (batch, token, {dim}), found {shape}")
    if batch not in (None, len(x)):
        raise UserError(f"{name}: expected a batch of {batch}, as x has, found {len(x)}")
    if present is None:
        return Mask(x.shape[1], x.device, causal=causal)
    shape, kind = tuple(present.shape), str(present.dtype).removeprefix("torch.")
    if shape != x.shape[:2] or kind != "bool":
        raise UserError(
            f"{'present' if name == 'x' else f'{name}_present'}: expected bool of the shape "
            f"{tuple(x.shape[:2])}, True at real tokens and False at padding, found {kind} of the "
            f"shape {shape}"
        )
    return Mask(x.shape[1], x.device, seen=present[:, None, None, :], causal=causal)


def _check_memory(memory: Tensor | None, present: Tensor | None, *, cross: bool) -> None:
    if cross and memory is None:
        raise UserError("memory: missing; cross=True reads the states of another stack")
    if not cross and (memory is not None or present is not None):
        raise UserError("memory: there is no cross-attention; build it with cross=True")


DEPTHS = (2, 3, 6, 12, 24)
"""The depths of the stacks that are compared to see whether a block depends on its layer."""


class BlockState(NamedTuple):
    """The state that a block passes to the layer above besides the stream x.

    Attributes:
        carries: The scores of residual attention, or their queries and keys.
        parts: What the stream rule keeps besides x, such as the second stream r of `dual_stream`,
            whose stack ends in ``x + N(r)``.
    """

    carries: Carries
    parts: tuple[Tensor, ...] = ()

    @property
    def total(self) -> Tensor | None:
        """The second stream r of `dual_stream`; None without parts."""
        return self.parts[0] if self.parts else None


@final
class Block(nn.Module):
    """One block: self-attention, cross-attention if it has one, feed-forward, with their norms.

        import torch
        from lightning_app import Block

        block = Block("sas", dim=32, heads=4, depth=6, layer=2)
        y = block(torch.randn(2, 10, 32), causal=True)      # (batch, token, dim)

    The norms around the whole stack are not part of a block: the one after the last block (as in
    `pre_ln`), and the one before the first (as in `peri_ln`). `Encoder` and `Decoder` have them.

    **Position in the stack.** Without `depth` and `layer` the block is the only layer of a stack of
    depth 1. Some presets have constants that depend on it, such as DeepNorm's alpha and the gains
    of `sas`, whose first layer also differs from the others: without a position these warn.

    **Chains.** A block with residual attention (`realformer`), and one of `dual_stream`, passes
    more than x to the layer above. A call of such a block is refused, since it would lose the rest
    silently; `chained` returns both:

        blocks = [Block("realformer", dim=32, heads=4) for _ in range(3)]
        x, state = torch.randn(2, 10, 32), None
        for block in blocks:
            x, state = block.chained(x, state)

    Args:
        block: A preset that `ablate blocks` lists, or a mapping as in `model.block` of a config.
        dim: The width of the stream.
        heads: The number of attention heads; must divide `dim`.
        ff_dim: The inner width of the feed-forward; None: 4 `dim`.
        depth: The number of blocks of the stack that this one belongs to; None: 1.
        layer: The position in this stack, counted from 1; None: 1.
        cross: Whether the block has a cross-attention; its calls then need `memory`.
        peer_depth: The depth of the stack that this one reads (with `cross`) or that reads this
            one; 0 without one. Constants such as DeepNorm's depend on it.
        activation: The activation between the matrices of the feed-forward.
        dropout: The fraction of entries dropped from every branch.
        attention_dropout: The fraction of entries dropped from the softmax map.
        axes: Any other field of `BlockConfig`, such as ``residual_attention="sum"`` or
            ``shaped_attention={"alpha": 0.5}``.

    Raises:
        UserError: for a meaningless combination, and for features that only a whole stack has:
            `share`, `step_signal`, `halting`, `memory`, dynamic spans, streams other than plain
            and dual; and for what needs a run: skips of `admin`, `unit_matrices`, `branch_ramp`.
    """

    def __init__(
        self,
        block: Wiring = "pre_ln",
        *,
        dim: int,
        heads: int,
        ff_dim: int | None = None,
        depth: int | None = None,
        layer: int | None = None,
        cross: bool = False,
        peer_depth: int = 0,
        activation: Activation = "relu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        **axes: Any,
    ) -> None:
        super().__init__()
        config = wiring(block, axes)
        sizes = _sizes(dim, heads, ff_dim, activation, dropout, attention_dropout)
        _check_peer(cross, peer_depth)
        spec, stack = _placed(config, depth, layer, cross=cross, peer_depth=peer_depth)
        with one_line():
            sizes.check(spec)
        self.dim = dim
        self.layer = layer
        self.depth = depth
        rules = [*stack.stream_rules(dim, cross=cross)]
        first = ((layer or 1) - 1) * (len(rules) // stack.depth)
        self.block = WiredBlock(spec, sizes, cross=cross, streams=iter(rules[first:]))
        chains = [spec.self_attention, *([spec.cross_attention] if cross else [])]
        self._carries_values = stack.carries_values
        self.passes_state = (
            stack.rule != PLAIN
            or stack.carries_values
            or any(each.carry != "none" or each.attention != "softmax" for each in chains)
        )
        """Whether the layer above needs more than the stream, so that `chained` must be used."""
        # Only its parameterless `start` is used, so it is no submodule.
        self._start, self._preset = rules[-1].start, config.preset
        place = Stack(depth=depth or 1, peer_depth=peer_depth, causal=True, cross=cross)
        self._serves_causal = cross or _is_block_of(spec, config, place, layer or 1)
        initialize(self)

    def forward(
        self,
        x: Tensor,
        *,
        causal: bool = False,
        present: Tensor | None = None,
        memory: Tensor | None = None,
        memory_present: Tensor | None = None,
    ) -> Tensor:
        """Return the stream after the block, (batch, token, dim).

        The arguments are those of `chained`; a block that passes more than the stream is refused.
        """
        if self.passes_state:
            raise UserError(
                f"{self._preset}: the layer above needs more than the stream; use "
                "`y, state = block.chained(x, state)`, with the state None in the first layer"
            )
        output, _ = self.chained(
            x, causal=causal, present=present, memory=memory, memory_present=memory_present
        )
        return output

    def chained(
        self,
        x: Tensor,
        state: BlockState | None = None,
        *,
        causal: bool = False,
        present: Tensor | None = None,
        memory: Tensor | None = None,
        memory_present: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """Return the stream after the block, and whatever else the layer above needs.

        Args:
            x: (batch, token, dim), the stream before the block.
            state: The state passed up by the layer below; None in the first layer.
            causal: Whether attention is causal; the same in all layers of a chain.
            present: (batch, token) bool, True at real tokens and False at padding.
            memory: (batch, source, dim), the states that a cross-attention reads.
            memory_present: (batch, source) bool, its real tokens.
        """
        self._check_state(state)
        if causal and not self._serves_causal:
            raise UserError(f"{self._preset}: has another block in a causal stack; use Decoder")
        cross = self.block.cross_attention
        _check_memory(memory, memory_present, cross=cross is not None)
        mask = _mask("x", x, self.dim, present, causal=causal)
        source = None
        if cross is not None and memory is not None:
            seen = _mask("memory", memory, self.dim, memory_present, batch=len(x))
            source = CrossAttentionInput(*cross.keys_values(memory, None), seen)
        stream, carries = self.block(
            self._start(x) if state is None else Stream(x, state.parts),
            Carries() if state is None else state.carries,
            Call(
                layer=self.layer or 1,
                mask=WindowMasks(mask, x.shape[0], None).within(self.block.self_attention.window),
                source=source,
                carries_values=self._carries_values,
            ),
        )
        return stream.x, BlockState(carries, stream.parts)

    def extra_repr(self) -> str:
        return f"{self._preset}, {self._place()}"

    def _place(self) -> str:
        return f"layer {self.layer or 1} of {self.depth or 1}"

    def _check_state(self, state: BlockState | None) -> None:
        if not self.passes_state or self.layer is None:
            return
        if (state is None) != (self.layer == 1):
            need = "no state" if self.layer == 1 else "the state of the layer below"
            raise UserError(f"state: {self._place()} of a chain of {self._preset} takes {need}")


def _placed(
    config: BlockConfig, depth: int | None, layer: int | None, *, cross: bool, peer_depth: int
) -> tuple[BlockSpec, StackSpec]:
    """Return the specification of one layer, and that of its stack."""

    def resolved(depth: int) -> StackSpec:
        place = Stack(depth=depth, peer_depth=peer_depth, causal=cross, cross=cross)
        return _resolved_for_block(config, place)

    if (depth is None) != (layer is None):
        raise UserError("depth and layer: the place of a block needs both, or neither")
    if depth is not None and layer is not None:
        _check_positive(depth=depth)
        check_types(int, layer=layer)
        if not 1 <= layer <= depth:
            raise UserError(f"layer {layer}: expected 1 to {depth}, the depth")
        spec = resolved(depth)
        return spec.blocks[layer - 1], spec
    alone, *others = [resolved(each) for each in (1, *DEPTHS)]
    if any(block != alone.blocks[0] for spec in others for block in spec.blocks):
        warnings.warn(
            f"{config.preset}: this block is the only layer of a stack of depth 1, and in a deeper "
            "one it differs by its place; give depth and layer",
            stacklevel=3,
        )
    return alone.blocks[0], alone


def _is_block_of(spec: BlockSpec, config: BlockConfig, place: Stack, layer: int) -> bool:
    try:
        return _resolved_for_block(config, place).blocks[layer - 1] == spec
    except UserError:
        return False


def _resolved_for_block(config: BlockConfig, place: Stack) -> StackSpec:
    """Return the specification of a stack in which each block can be used on its own."""
    spec = _resolved(config, place)
    for name in ("share", "step_signal", "halting"):
        if getattr(spec, name) not in ("none", None):
            raise UserError(f"{name}: belongs to a whole stack; use Encoder or Decoder")
    if spec.rule not in (PLAIN, DUAL):
        raise UserError(f"stream {spec.rule}: belongs to a whole stack; use Encoder or Decoder")
    if spec.blocks[0].self_attention.adaptive_span is not None:
        raise UserError("adaptive_span: its penalty belongs to a whole stack; use Encoder")
    return spec


class _Stacked(nn.Module):
    """A stack of blocks with its norms and initial values."""

    _causal: bool

    def __init__(
        self,
        block: Wiring = "pre_ln",
        *,
        depth: int,
        dim: int,
        heads: int,
        ff_dim: int | None = None,
        cross: bool = False,
        peer_depth: int = 0,
        activation: Activation = "relu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        positions: str | None = None,
        max_positions: int | None = None,
        **axes: Any,
    ) -> None:
        """Build the stack with its initial values.

        Args:
            block: A preset that `ablate blocks` lists, or a mapping as in `model.block` of a
                config.
            depth: The number of blocks.
            dim: The width of the stream, and of `memory`.
            heads: The number of attention heads; must divide `dim`.
            ff_dim: The inner width of the feed-forward; None: 4 `dim`.
            cross: Whether each block has a cross-attention, which reads `memory`; decoders only.
            peer_depth: The depth of the other stack: the decoder that reads this encoder, or
                the encoder that this decoder reads with `cross`; 0 without one. Constants such
                as DeepNorm's depend on it.
            activation: The activation between the matrices of the feed-forward.
            dropout: The fraction of entries dropped from every branch.
            attention_dropout: The fraction of entries dropped from the softmax map.
            positions: Positions that act inside the stack, such as `rope` or `relative`; None:
                no positions.
            max_positions: The length of a learned table of positions; None: 1024.
            axes: Any other field of `BlockConfig`, such as ``residual_attention="sum"`` or
                ``shaped_attention={"alpha": 0.5}``.

        Raises:
            UserError: for a meaningless combination.
        """
        super().__init__()
        if cross and not self._causal:
            raise UserError("cross: an encoder reads no other stack; use Decoder")
        _check_peer(cross, peer_depth)
        if peer_depth and self._causal and not cross:
            raise UserError(f"peer_depth {peer_depth}: a decoder without cross=True reads no stack")
        _check_positive(depth=depth)
        if max_positions is not None:
            _check_positive(max_positions=max_positions)
            if positions is None:
                raise UserError(f"max_positions {max_positions}: there are no positions; name them")
        config = wiring(block, axes)
        sizes = _sizes(dim, heads, ff_dim, activation, dropout, attention_dropout)
        with one_line():
            place = Stack(depth=depth, peer_depth=peer_depth, causal=self._causal, cross=cross)
        spec, order = _resolved(config, place), None
        if positions is not None:
            order = POSITIONS[positions](
                model_dim=dim, num_heads=heads, max_positions=max_positions or 1024
            )
            with one_line():
                order.check()
                order.check_stack(spec)
            if order.placing(spec) is None and spec.step_signal == "none":
                raise UserError(
                    f"positions {positions}: are added to the embedding, which is yours; add to x"
                )
        with one_line():
            for each in spec.blocks:
                sizes.check(each)
        self.dim = dim
        self.stack = BlockStack(spec, sizes, order, cross=cross)
        self._cross, self._preset, self._order = cross, config.preset, order
        initialize(self)
        self._projects = any(map(acts_after_steps, self.modules()))

    @property
    def embedding_gain(self) -> float:
        """The factor for the initial values of your own embedding: 1 except in `t_fixup`."""
        return self.stack.spec.embedding_gain

    def auxiliary_losses(self, tokens: int) -> dict[str, Tensor]:
        """Return the terms of the loss of the last forward pass in training, by name.

        They are penalties on adaptive spans and the cost of steps with `halting`; add them to
        your loss. Their weights are already applied.

        Args:
            tokens: The number of tokens by which your loss, and so a sum over tokens, is
                divided.
        """
        return auxiliary_terms(self, torch.tensor(float(tokens)))

    def extra_repr(self) -> str:
        return f"{self._preset}, depth={self.stack.spec.depth}, dim={self.dim}"

    def _states(
        self,
        x: Tensor,
        present: Tensor | None,
        memory: Tensor | None = None,
        memory_present: Tensor | None = None,
    ) -> Tensor:
        """Check the arguments of a call and return the states of the tokens."""
        _check_memory(memory, memory_present, cross=self._cross)
        mask, read = _mask("x", x, self.dim, present, causal=self._causal), None
        if memory is not None:
            seen = _mask("memory", memory, self.dim, memory_present, batch=len(x))
            read = self.stack.remember(memory, seen)
        if self._order is not None:
            self._order.check_length(x.shape[1])
        if self._projects:  # spans stay within their range, as after each step of `fit`
            after_steps(self)()
        if self.training:  # steps and spans of padding cost nothing
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            count_tokens_of(self, {"stack": real if present is None else present})
        return self.stack(x, mask, read)


@final
class Encoder(_Stacked):
    """`depth` blocks in which every token attends to all tokens, with the norms of the stack.

        import torch
        from lightning_app import Encoder

        encoder = Encoder("pre_ln", depth=2, dim=32, heads=4, qk_norm="layer_norm")
        present = torch.tensor([[True] * 10, [True] * 7 + [False] * 3])
        states = encoder(torch.randn(2, 10, 32), present=present)    # (batch, token, dim)

    It equals the encoder of the models that `fit` trains: ``encoder.stack.load_state_dict`` takes
    the weights of their `encoder`. The embedding, the positions added to it, and the dropout of the
    embedding are up to you.
    """

    _causal = False

    def forward(self, x: Tensor, *, present: Tensor | None = None) -> Tensor:
        """Return the states of the tokens, (batch, token, dim).

        Args:
            x: (batch, token, dim), embedded tokens.
            present: (batch, token) bool, True at real tokens and False at padding.
        """
        return self._states(x, present)


@final
class Decoder(_Stacked):
    """`depth` causal blocks, with cross-attention if `cross` is set, and the norms of the stack.

        import torch
        from lightning_app import Decoder

        decoder = Decoder("sas", depth=2, dim=32, heads=4)                # on its own, as in GPT
        states = decoder(torch.randn(2, 10, 32))                          # (batch, token, dim)

        reader = Decoder("post_ln", depth=2, dim=32, heads=4, cross=True, peer_depth=2)
        states = reader(torch.randn(2, 10, 32), memory=torch.randn(2, 7, 32))

    It equals the decoder of the models that `fit` trains: ``decoder.stack.load_state_dict`` takes
    the weights of their `decoder`. Each call reads complete texts.
    """

    _causal = True

    def forward(
        self,
        x: Tensor,
        *,
        present: Tensor | None = None,
        memory: Tensor | None = None,
        memory_present: Tensor | None = None,
    ) -> Tensor:
        """Return the states of the tokens, (batch, token, dim).

        Args:
            x: (batch, token, dim), embedded tokens.
            present: (batch, token) bool, True at real tokens and False at padding; not needed for
                padding on the right, which real tokens never see.
            memory: (batch, source, dim), the states of an encoder.
            memory_present: (batch, source) bool, its real tokens.
        """
        return self._states(x, present, memory, memory_present)
