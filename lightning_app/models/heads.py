"""The kinds of model: encoder-decoder, and encoder with a head for masked tokens."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.block import LayerCache, Sizes
from lightning_app.blocks.feed_forward import Activation
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.masks import causal_mask, full_mask, mask_of, padding_mask
from lightning_app.blocks.norm import Norm, build_norm
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.models.embedding import Embedding, EmbeddingSpec, Positions
from lightning_app.models.initialization import initialize
from lightning_app.models.transformer import Decoder, Encoder


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig:
    """The sizes of a model. What stands inside a block is said by the block alone."""

    kind: Literal["encoder_decoder", "encoder"] = "encoder_decoder"
    """encoder_decoder for translation, encoder for masked language modelling."""
    encoder_depth: int = 6
    """Blocks in the encoder."""
    decoder_depth: int = 6
    """Blocks in the decoder; not read where there is none."""
    model_dim: int = 512
    """Width of the stream."""
    ff_dim: int = 1024
    """Inner width of the feed-forward."""
    num_heads: int = 4
    """Attention heads; divides model_dim."""
    dropout: float = 0.3
    """Share of entries dropped from embeddings and from every branch."""
    attention_dropout: float = 0.0
    """Share of entries dropped from the softmax map, before shaping."""
    activation: Activation = "relu"
    """Between the two feed-forward matrices; geglu has a third matrix, as large as each."""
    activation_slope: float = 0.01
    """Slope of leaky_relu left of zero; not read elsewhere."""
    positions: Positions = "sinusoidal"
    """sinusoidal or learned: added to the embedding; rope: rotations inside self-attention."""
    max_positions: int = 1024
    """Length of the learned table; not read elsewhere."""
    embedding_norm: Norm = "none"
    """The norm of the sum of token and position, of an encoder alone. The official code of BERT and
    of RealFormer has layer_norm there; none is our default."""

    def __post_init__(self) -> None:
        for name in ("model_dim", "ff_dim", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: at least 1")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} {getattr(self, name)}: at least 0 and under 1")
        if not math.isfinite(self.activation_slope):
            raise ValueError(f"activation_slope {self.activation_slope}: a finite number")
        if self.positions == "sinusoidal" and self.model_dim % 2:
            raise ValueError(f"model_dim {self.model_dim}: sinusoidal positions need an even width")
        if self.embedding_norm != "none" and self.kind != "encoder":
            raise ValueError(
                f"embedding_norm {self.embedding_norm}: of kind encoder alone, as in BERT; an "
                "encoder_decoder takes none"
            )

    def sizes(self) -> Sizes:
        """Return the numbers that blocks share."""
        return Sizes(
            model_dim=self.model_dim,
            ff_dim=self.ff_dim,
            num_heads=self.num_heads,
            activation=self.activation,
            activation_slope=self.activation_slope,
            rotary=self.positions == "rope",
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
        )

    def stacks(self, block: BlockConfig) -> dict[str, StackSpec]:
        """Return the resolved specification of each stack.

        Raises:
            ValueError: if the block has no meaning here; the message names the field.
        """
        decoder_depth = self.decoder_depth if self.kind == "encoder_decoder" else 0
        encoder = Stack(side="encoder", depth=self.encoder_depth, peer_depth=decoder_depth)
        stacks = {"encoder": block.resolve(encoder)}
        if self.kind == "encoder_decoder":
            decoder = Stack(side="decoder", depth=decoder_depth, peer_depth=self.encoder_depth)
            stacks["decoder"] = block.resolve(decoder)
        if self.embedding_norm != "none":
            self._check_embedding_norm(stacks["encoder"], block.preset)
        return stacks

    def _check_embedding_norm(self, spec: StackSpec, preset: str) -> None:
        if spec.input_norm != "none":
            reason = "has a norm on the embedding already"
        elif spec.embedding_gain != 1.0:
            reason = "makes embeddings start smaller, which a norm of them undoes"
        else:
            return
        raise ValueError(
            f"embedding_norm {self.embedding_norm}: preset {preset} {reason}; take none"
        )


FEWEST_STEPS = 8  # that a cache has room for once it had to be moved


class DecodingState(NamedTuple):
    """What cached decoding keeps between steps, one row a sentence.

    The beams of a sentence share its caches: a token's keys and values are written once, into a
    slot of their own, and stay there whatever becomes of the beams. `lineage` says which slots
    hold the prefix of which beam. Steps write into the caches, so a state is stepped once.
    """

    source_allowed: Bool[Tensor, "sentence 1 1 source"]
    caches: list[LayerCache]
    lineage: Bool[Tensor, "sentence beam slot"]
    length: int

    def select(self, rows: Int[Tensor, " kept"]) -> "DecodingState":
        """Return the state of the sentences `rows`, which may repeat."""
        return self._replace(
            source_allowed=self.source_allowed.index_select(0, rows),
            caches=[cache.select(rows) for cache in self.caches],
            lineage=self.lineage.index_select(0, rows),
        )

    def reorder(self, beams: Int[Tensor, "sentence beam"]) -> "DecodingState":
        """Return the state in which each beam goes on from the prefix of `beams`."""
        every = beams[:, :, None].expand(-1, -1, self.lineage.shape[2])
        return self._replace(lineage=self.lineage.gather(1, every))

    def with_room(self, tokens: int) -> "DecodingState":
        """Return a state whose caches have room for `tokens` more a sentence.

        Where there is none, slots that no beam's prefix holds are dropped, and the others move to
        caches of twice their number. So as many slots are written between two moves as one of them
        copies, and a search of n tokens reads little more than n slots a sentence, not beam * n.
        """
        filled = self.lineage.shape[2]
        if not filled or filled + tokens <= self.caches[0].self_keys.shape[2]:
            return self
        held = self.lineage.any(dim=1)
        kept = int(held.sum(dim=1).max())
        slots = held.long().argsort(dim=1, descending=True, stable=True)[:, :kept]
        room = max(2 * kept, kept + FEWEST_STEPS * tokens)
        return self._replace(
            caches=[cache.moved(slots, room) for cache in self.caches],
            lineage=self.lineage.gather(2, slots[:, None].expand(-1, self.lineage.shape[1], -1)),
        )


@final
class EncoderDecoder(nn.Module):
    """Source tokens to a distribution over the next target token (Vaswani et al. 2017).

    One embedding serves source, target and output: the vocabulary is joint.
    """

    def __init__(
        self, encoder: StackSpec, decoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec
    ) -> None:
        super().__init__()
        self.pad = embedding.pad
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        self.encoder = Encoder(encoder, sizes)
        self.decoder = Decoder(decoder, sizes)
        initialize(self)

    @property
    def longest(self) -> float:
        """Tokens that the positions allow for; a learned table ends."""
        spec = self.embedding.spec
        return float(spec.max_positions) if spec.positions == "learned" else float("inf")

    def forward(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocabulary"]:
        """Return the logits of the token after each of `target` (teacher forcing)."""
        return self.embedding.logits(self.states(source, target))

    def states(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target model"]:
        """Return what the output layer reads to predict the token after each of `target`."""
        source_mask = padding_mask(source != self.pad)
        memory = self.encoder(self.embedding(source), source_mask)
        mask = causal_mask(target.shape[1], target.device)
        caches = self.decoder.start(memory)
        return self.decoder(self.embedding(target), mask, source_mask, caches)[0]

    def start(self, source: Int[Tensor, "sentence source"], beams: int = 1) -> DecodingState:
        """Encode `source`; return the state before the first token of `beams` targets of each."""
        mask = padding_mask(source != self.pad)
        caches = self.decoder.start(self.encoder(self.embedding(source), mask))
        lineage = torch.empty(len(source), beams, 0, dtype=torch.bool, device=source.device)
        return DecodingState(mask.allowed, caches, lineage, 0)

    def step(
        self, tokens: Int[Tensor, "sentence beam"], state: DecodingState
    ) -> tuple[Float[Tensor, "sentence*beam vocabulary"], DecodingState]:
        """Append one token to each beam and return the logits of the next, beam after beam."""
        sentences, beams = tokens.shape
        state = state.with_room(beams)
        own = torch.eye(beams, dtype=torch.bool, device=tokens.device).expand(sentences, -1, -1)
        lineage = torch.cat([state.lineage, own], dim=2)
        slots = lineage.shape[2]
        mask = full_mask(slots, tokens.device) if beams == 1 else mask_of(lineage[:, None])
        # All the newest tokens stand at one position.
        x = self.embedding(tokens.reshape(-1, 1), start=state.length).view(sentences, beams, -1)
        source_mask = mask_of(state.source_allowed)
        states, caches = self.decoder(x, mask, source_mask, state.caches, state.length)
        grown = DecodingState(state.source_allowed, caches, lineage, state.length + 1)
        return self.embedding.logits(states.flatten(0, 1)), grown


@final
class MaskedLanguageModel(nn.Module):
    """An encoder that predicts masked tokens (Devlin et al. 2019, 1810.04805).

    The head is ``E N(gelu(W h + b)) + c`` at the predicted positions alone; E is the embedding.
    """

    def __init__(self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__()
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        self.encoder = Encoder(encoder, sizes)
        self.transform = Linear(sizes.model_dim, sizes.model_dim)
        self.norm = build_norm("layer_norm", sizes.model_dim)
        self.output_bias = nn.Parameter(torch.zeros(embedding.vocab_size))
        initialize(self)

    def forward(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, " predicted"]
    ) -> Float[Tensor, "predicted vocabulary"]:
        """Return logits at `positions`, flat indices into batch * token. Windows are full."""
        return self.embedding.logits(self.states(tokens, positions)) + self.output_bias

    def states(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, " predicted"]
    ) -> Float[Tensor, "predicted model"]:
        """Return what the output layer reads at `positions`."""
        mask = full_mask(tokens.shape[1], tokens.device)
        states = self.encoder(self.embedding(tokens), mask)
        states = states.flatten(0, 1).index_select(0, positions)
        return self.norm(F.gelu(self.transform(states)))


def build_model(
    architecture: ArchitectureConfig, block: BlockConfig, vocab_size: int, pad: int
) -> EncoderDecoder | MaskedLanguageModel:
    """Return the model with its initial values."""
    stacks, sizes = architecture.stacks(block), architecture.sizes()
    gains = {spec.embedding_gain for spec in stacks.values()}
    assert len(gains) == 1, "one table serves every stack"
    embedding = EmbeddingSpec(
        vocab_size=vocab_size,
        pad=pad,
        positions=architecture.positions,
        max_positions=architecture.max_positions,
        gain=gains.pop(),
        norm=architecture.embedding_norm,
    )
    if architecture.kind == "encoder":
        return MaskedLanguageModel(stacks["encoder"], sizes, embedding)
    return EncoderDecoder(stacks["encoder"], stacks["decoder"], sizes, embedding)
