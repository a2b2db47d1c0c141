"""Whole stacks of a preset as plain `torch.nn.Module`s, which take embedded inputs."""

from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_app.api.block import check_peer, check_trainable, check_whole, sizes_of
from lightning_app.api.inputs import (
    Wiring,
    check_memory,
    memory_mask,
    refused,
    self_mask,
    wiring,
)
from lightning_app.blocks.auxiliary import auxiliary_terms
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.feed_forward import Activation
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.errors import UserError
from lightning_app.models.initialization import initialize
from lightning_app.models.positions import POSITIONS, Positions
from lightning_app.models.transformer import BlockStack, Memory, count_tokens_of


class _Wired(nn.Module):
    """A stack of blocks with its norms and initial values."""

    def __init__(
        self,
        config: BlockConfig,
        place: Stack,
        *,
        dim: int,
        heads: int,
        ff_dim: int | None,
        activation: Activation,
        dropout: float,
        attention_dropout: float,
        positions: str | None,
        max_positions: int,
    ) -> None:
        super().__init__()
        check_whole("max_positions", max_positions, 1)
        sizes = sizes_of(dim, heads, ff_dim, activation, dropout, attention_dropout)
        if config.memory is not None:
            raise UserError("memory: belongs to a whole model of a text, which `fit` trains")
        spec = refused(lambda: config.resolve(place))
        check_trainable(spec)
        order = None
        if positions is not None:
            order = POSITIONS[positions](
                model_dim=dim, num_heads=heads, max_positions=max_positions
            )
            _check_positions(positions, order, spec)
        self.dim = dim
        self.stack = BlockStack(spec, sizes, order, cross=place.cross)
        self._preset = config.preset
        initialize(self)

    @property
    def embedding_gain(self) -> float:
        """The factor on the initial values of the embedding, which is yours: not 1 in `t_fixup`."""
        return self.stack.spec.embedding_gain

    def auxiliary_losses(self, tokens: int) -> dict[str, Tensor]:
        """Return the terms of the loss of the last forward pass in training, by name.

        Those are penalties on adaptive spans, and the cost of steps with `halting`; add them to
        your loss. Each has its weight.

        Args:
            tokens: The number by which sums over tokens are divided, as your loss is.
        """
        return auxiliary_terms(self, torch.tensor(float(tokens)))

    def extra_repr(self) -> str:
        return f"{self._preset}, depth={self.stack.spec.depth}, dim={self.dim}"

    def _states(
        self, x: Tensor, mask: Mask, present: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        if self.training:  # steps and spans of padding cost nothing
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            count_tokens_of(self, {"stack": real if present is None else present})
        return self.stack(x, mask, memory)


@final
class Encoder(_Wired):
    """`depth` blocks in which every token attends to all tokens, with the norms of the stack.

    ::

        import torch
        from lightning_app import Encoder

        encoder = Encoder("pre_ln", depth=2, dim=32, heads=4, qk_norm="layer_norm")
        present = torch.tensor([[True] * 10, [True] * 7 + [False] * 3])
        states = encoder(torch.randn(2, 10, 32), present=present)    # (batch, token, dim)

    It equals the encoder of the models that `fit` trains: ``encoder.stack.load_state_dict`` takes
    the weights of their `encoder`. Embedding, positions that are added to it, and dropout of the
    embedding are yours.

    Args:
        block: A preset that `ablate blocks` lists, or a mapping as in `model.block` of a config.
        depth: The number of blocks.
        dim: The width of the stream.
        heads: The number of attention heads; divides `dim`.
        ff_dim: The inner width of the feed-forward; None: 4 `dim`.
        peer_depth: The depth of the decoder that reads this encoder; 0 for an encoder alone.
            Constants such as DeepNorm's depend on it.
        activation: Between the matrices of the feed-forward.
        dropout: The fraction of entries dropped from every branch.
        attention_dropout: The fraction of entries dropped from the softmax map.
        positions: Positions that act inside of the stack, such as `rope` or `relative`; None:
            without any.
        max_positions: The length of a learned table of positions.
        axes: Any other field of `BlockConfig`, such as ``residual_attention="sum"`` or
            ``shaped_attention={"alpha": 0.5}``.

    Raises:
        UserError: for a combination that has no meaning.
    """

    def __init__(
        self,
        block: Wiring = "pre_ln",
        *,
        depth: int,
        dim: int,
        heads: int,
        ff_dim: int | None = None,
        peer_depth: int = 0,
        activation: Activation = "relu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        positions: str | None = None,
        max_positions: int = 1024,
        **axes: Any,
    ) -> None:
        check_peer(False, peer_depth)
        check_whole("depth", depth, 1)
        super().__init__(
            wiring(block, axes),
            refused(lambda: Stack(depth=depth, peer_depth=peer_depth)),
            dim=dim,
            heads=heads,
            ff_dim=ff_dim,
            activation=activation,
            dropout=dropout,
            attention_dropout=attention_dropout,
            positions=positions,
            max_positions=max_positions,
        )

    def forward(self, x: Tensor, *, present: Tensor | None = None) -> Tensor:
        """Return the states of the tokens, (batch, token, dim).

        Args:
            x: (batch, token, dim), embedded tokens.
            present: (batch, token) bool, True at real tokens and False at padding.
        """
        mask = self_mask(x, self.dim, present, causal=False)
        return self._states(x, mask, present)


@final
class Decoder(_Wired):
    """`depth` causal blocks, with cross-attention if `cross` is set, and the norms of the stack.

    ::

        import torch
        from lightning_app import Decoder

        decoder = Decoder("sas", depth=2, dim=32, heads=4)                # alone, as in GPT
        states = decoder(torch.randn(2, 10, 32))                          # (batch, token, dim)

        reader = Decoder("post_ln", depth=2, dim=32, heads=4, cross=True, peer_depth=2)
        states = reader(torch.randn(2, 10, 32), memory=torch.randn(2, 7, 32))

    It equals the decoder of the models that `fit` trains: ``decoder.stack.load_state_dict`` takes
    the weights of their `decoder`. Each call reads whole texts.

    Args:
        block: A preset that `ablate blocks` lists, or a mapping as in `model.block` of a config.
        depth: The number of blocks.
        dim: The width of the stream, and of `memory`.
        heads: The number of attention heads; divides `dim`.
        ff_dim: The inner width of the feed-forward; None: 4 `dim`.
        cross: Whether each block has a cross-attention, which reads `memory`.
        peer_depth: With `cross` the depth of the encoder that it reads; constants such as
            DeepNorm's depend on it.
        activation: Between the matrices of the feed-forward.
        dropout: The fraction of entries dropped from every branch.
        attention_dropout: The fraction of entries dropped from the softmax map.
        positions: Positions that act inside of the stack, such as `rope` or `relative`; None:
            without any.
        max_positions: The length of a learned table of positions.
        axes: Any other field of `BlockConfig`, such as ``residual_attention="sum"``.

    Raises:
        UserError: for a combination that has no meaning.
    """

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
        max_positions: int = 1024,
        **axes: Any,
    ) -> None:
        check_peer(cross, peer_depth)
        check_whole("depth", depth, 1)
        if peer_depth and not cross:
            raise UserError(f"peer_depth {peer_depth}: a decoder without cross=True reads no stack")
        super().__init__(
            wiring(block, axes),
            refused(lambda: Stack(depth=depth, peer_depth=peer_depth, causal=True, cross=cross)),
            dim=dim,
            heads=heads,
            ff_dim=ff_dim,
            activation=activation,
            dropout=dropout,
            attention_dropout=attention_dropout,
            positions=positions,
            max_positions=max_positions,
        )
        self._cross = cross

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
                padding on the right, which no real token sees.
            memory: (batch, source, dim), the states of an encoder.
            memory_present: (batch, source) bool, its real tokens.
        """
        check_memory(memory, memory_present, cross=self._cross)
        mask = self_mask(x, self.dim, present, causal=True)
        read = None
        if memory is not None:
            seen = memory_mask(x, memory, self.dim, memory_present)
            read = self.stack.remember(memory, seen)
        return self._states(x, mask, present, read)


def _check_positions(name: str, order: Positions, spec: StackSpec) -> None:
    """Refuse positions that would do nothing in a stack, or have no meaning there."""
    refused(order.check)
    refused(lambda: order.check_stack(spec))
    inside = order.placing(spec) is not None or bool(order.layer_tables(spec.depth))
    if not inside and spec.step_signal == "none":
        raise UserError(f"positions {name}: are added to the embedding, which is yours; add to x")
