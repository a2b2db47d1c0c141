"""The kinds of model: encoder-decoder, encoder with a head for masked tokens, decoder only."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention
from lightning_app.blocks.block import Sizes
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.feed_forward import ACTIVATIONS, Activation
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.masks import causal_mask, document_mask, full_mask, mask_of, padding_mask
from lightning_app.blocks.memory import (
    LayerCache,
    Recurrence,
    SegmentMemory,
    empty_memory,
    segment_mask,
)
from lightning_app.blocks.norm import EPSILON, NORM_KINDS, LearnedScalars, Norm, PlainRMSNorm
from lightning_app.blocks.placed import Places, within_documents
from lightning_app.blocks.residual import FixedGain
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.blocks.steps import Halting
from lightning_app.blocks.streams import Stream
from lightning_app.core.errors import UserError
from lightning_app.core.schema import check_range
from lightning_app.models.auxiliary_heads import AuxiliaryHeads
from lightning_app.models.encoder_heads import MaskedLanguageModel
from lightning_app.models.initialization import INITIALS, initial_values, initialize
from lightning_app.models.positions import (
    POSITIONS,
    Embedding,
    EmbeddingSpec,
    OutputTable,
    PerToken,
    Positions,
)
from lightning_app.models.stack import BlockStack, Memory

FEWEST_STEPS = 8  # a moved cache has room for at least this number of steps
Source = Int[Tensor, "batch source"]
Target = Int[Tensor, "batch target"]


class DecodingState(NamedTuple):
    """The state of cached decoding between steps, one row per sentence.

    The beams of a sentence share its caches: a token's keys and values are written once, into a
    separate slot, and stay there for all later beams. `beam_ancestry` records which slots hold the
    prefix of each beam, `places` the positions of their tokens. Steps write into the caches, so a
    state can be stepped only once.
    """

    memory: Memory | None
    caches: list[LayerCache]
    beam_ancestry: Bool[Tensor, "sentence beam slot"]
    places: Int[Tensor, "sentence slot"]
    length: int

    @classmethod
    def start(
        cls, stack: BlockStack, memory: Memory | None, sentences: int, beams: int
    ) -> "DecodingState":
        """Return the state before the first token of `beams` texts of each sentence."""
        device = next(stack.parameters()).device
        beam_ancestry = torch.empty(sentences, beams, 0, dtype=torch.bool, device=device)
        places = torch.empty(sentences, 0, dtype=torch.long, device=device)
        return cls(memory, [LayerCache() for _ in stack.layers], beam_ancestry, places, 0)

    def select(self, rows: Int[Tensor, " kept"]) -> "DecodingState":
        """Return the state of the sentences `rows`, which may repeat."""
        return self._replace(
            memory=None if self.memory is None else self.memory.select(rows),
            caches=[cache.select(rows) for cache in self.caches],
            beam_ancestry=self.beam_ancestry.index_select(0, rows),
            places=self.places.index_select(0, rows),
        )

    def reorder(self, beams: Int[Tensor, "sentence beam"]) -> "DecodingState":
        """Return the state in which each beam continues the prefix of `beams`."""
        every = beams[:, :, None].expand(-1, -1, self.beam_ancestry.shape[2])
        return self._replace(beam_ancestry=self.beam_ancestry.gather(1, every))

    def with_room(self, tokens: int, first: int = 0) -> "DecodingState":
        """Return a state whose caches have room for `tokens` more per sentence.

        If there is no room, slots that belong to no beam's prefix, and those of positions before
        `first`, are dropped, and the others move to caches of twice the size. Thus between two
        moves as many slots are written as one move copies, and a search of n tokens reads little
        more than n slots per sentence instead of beam * n.
        """
        filled = self.beam_ancestry.shape[2]
        if not filled or filled + tokens <= self.caches[0].room:
            return self
        held = self.beam_ancestry.any(dim=1) & (self.places >= first)
        kept = int(held.sum(dim=1).max())
        slots = held.long().argsort(dim=1, descending=True, stable=True)[:, :kept]
        room = max(2 * kept, kept + FEWEST_STEPS * tokens)
        return self._replace(
            caches=[cache.moved(slots, room) for cache in self.caches],
            beam_ancestry=self.beam_ancestry.gather(
                2, slots[:, None].expand(-1, self.beam_ancestry.shape[1], -1)
            ),
            places=self.places.gather(1, slots),
        )


class _Predictor(nn.Module):
    """A model whose decoder predicts the next token, also by cached decoding."""

    embedding: Embedding
    decoder: BlockStack

    @property
    def longest(self) -> float:
        """The largest length of a text in tokens; finite for a learned table."""
        return self.embedding.spec.positions.longest

    def step(
        self, tokens: Int[Tensor, "text beam"], state: DecodingState
    ) -> tuple[Float[Tensor, "text*beam vocabulary"], DecodingState]:
        """Append one token to each beam and return the logits of the next, ordered by beam."""
        texts, beams = tokens.shape
        state = state.with_room(beams, self.decoder.first_seen(state.length))
        own = torch.eye(beams, dtype=torch.bool, device=tokens.device).expand(texts, -1, -1)
        beam_ancestry = torch.cat([state.beam_ancestry, own], dim=2)
        slots = beam_ancestry.shape[2]
        mask = full_mask(slots, tokens.device) if beams == 1 else mask_of(beam_ancestry[:, None])
        # All the newest tokens have the same position.
        newest = torch.full((1,), state.length, device=tokens.device)
        keys = torch.cat([state.places, newest.expand(texts, beams)], dim=1)
        x = self.embedding(tokens.reshape(-1, 1), start=state.length).view(texts, beams, -1)
        places = Places(newest, keys, state.length)
        states = self.decoder(x, mask, state.memory, state.caches, places, tokens=tokens)
        grown = state._replace(beam_ancestry=beam_ancestry, places=keys, length=state.length + 1)
        return self.embedding.logits(states.flatten(0, 1)), grown


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig:
    """The sizes of a model. The block config defines the parts inside a block."""

    kind: Literal["encoder_decoder", "encoder", "decoder"] = "encoder_decoder"
    """encoder_decoder for translation, encoder for masked language modelling; decoder is one causal
    stack without cross-attention."""
    encoder_depth: int = 6
    """Blocks in the encoder; ignored in a model without one."""
    decoder_depth: int = 6
    """Blocks in the decoder; ignored in a model without one."""
    model_dim: int = 512
    """Width of the stream."""
    ff_dim: int = 1024
    """Inner width of the feed-forward."""
    num_heads: int = 4
    """Attention heads; must divide model_dim."""
    kv_heads: int | None = None
    """Heads of keys and values, each of which serves num_heads / kv_heads heads of queries (grouped
    queries); must divide num_heads; null: as many."""
    dropout: float = 0.3
    """The fraction of entries dropped from embeddings and from every branch."""
    attention_dropout: float = 0.0
    """The fraction of entries dropped from the softmax map, before shaping."""
    activation: Activation = "relu"
    """A name of `ACTIVATIONS`, between the two feed-forward matrices: relu, gelu, leaky_relu,
    relu_squared, geglu or swiglu; the last two have a third matrix, as large as each."""
    activation_slope: float = 0.01
    """Slope of leaky_relu below zero; only for leaky_relu."""
    positions: str = "sinusoidal"
    """A name of `POSITIONS`. sinusoidal, sinusoidal_fairseq (sines, then cosines, counted from 2)
    or learned: added to the embedding; rope: rotations inside self-attention; relative:
    Transformer-XL's term of the scores, with biases u and v shared by the layers of a stack, or
    separate per layer in relative_untied."""
    max_positions: int = 1024
    """Length of a learned table; only for learned positions."""
    clamp_length: int | None = None
    """c: in evaluation, larger distances count as c, and to later tokens as -c (Transformer-XL,
    XLNet); only for relative positions."""
    embedding_norm: Norm = "none"
    """The norm of the sum of token and position, only in an encoder. The official code of BERT and
    RealFormer uses layer_norm here; by default there is no norm."""
    logit_cap: float | None = None
    """c of ``c tanh(z / c)``, the scores over the vocabulary in loss and decoding; null: none. Only
    labels, as in glue and squad, have no such scores."""

    tie_embeddings: bool | None = None
    """false: the output layer has a table of its own, which starts like that of the input; null or
    true: they share one. Only labels, as in glue and squad, have no such layer."""

    embedding_scale: Literal["sqrt_dim", "none"] = "sqrt_dim"
    """The factor on the embedding of a token before positions are added: sqrt(model_dim) (Vaswani
    et al. 2017), or none (GPT, BERT)."""
    bias: bool = True
    """Whether linear layers, but the halting unit, and layer norms have biases."""
    norm_eps: float = EPSILON
    """eps of layer and RMS norms."""
    initial: str = "xavier"
    """A name of `INITIALS`, the rule of initial values: xavier; fairseq (xavier in attention alone,
    with biases); normal (BERT); or gpt2 (normal, output matrices smaller by the square root of the
    number of branches)."""
    initial_std: float = 0.02
    """The standard deviation of normal and gpt2."""
    parametrization: Literal["standard", "mup"] = "standard"
    """mup: the rates, initial values and factors of Yang et al. (2203.03466), with which a rate
    tuned at one width serves others under Adam; see `ArchitectureConfig.width_factor`."""
    base_width: int | None = None
    """The width at which the factors of mup are 1; only with it."""
    seeding: Literal["order", "name"] = "order"
    """How initial values are drawn. order: one after the other, so that values after an additional
    or a missing matrix are others; name: from the seed and the name of each part, so that parts of
    one name, size and rule start equal in every variant."""

    def __post_init__(self) -> None:
        check_range(self, "at least 1", "model_dim", "ff_dim", "num_heads", "max_positions")
        check_range(self, "at least 1", "clamp_length", "base_width")
        check_range(self, "at least 0 and less than 1", "dropout", "attention_dropout")
        check_range(self, "a number above 0", "logit_cap", "norm_eps", "initial_std")
        if self.clamp_length is not None and not self.order().clamps:
            raise ValueError(
                f"clamp_length {self.clamp_length} with positions {self.positions}, which have "
                "no term of distances; take relative or relative_untied, or leave it out"
            )
        if not math.isfinite(self.activation_slope):
            raise ValueError(f"activation_slope {self.activation_slope}: must be a finite number")
        _ = ACTIVATIONS[self.activation]
        NORM_KINDS.require(self.embedding_norm, "model.architecture.embedding_norm")
        INITIALS.require(self.initial, "model.architecture.initial")
        by_shape = self.initial in ("xavier", "fairseq")
        if by_shape and self.initial_std != 0.02:
            std = self.initial_std
            raise ValueError(f"initial_std {std} with initial {self.initial}: leave it out")
        if (self.parametrization == "mup") != (self.base_width is not None):
            raise ValueError(
                f"base_width {self.base_width} with parametrization {self.parametrization}: mup "
                "needs a width, at which its factors are 1; standard takes none"
            )
        if self.base_width and (by_shape or self.embedding_scale != "none"):
            raise ValueError(
                f"parametrization mup with initial {self.initial} and embedding_scale "
                f"{self.embedding_scale}: it has rules for initial normal or gpt2, and none"
            )
        self.order().check()
        if self.embedding_norm != "none" and self.kind != "encoder":
            raise ValueError(
                f"embedding_norm {self.embedding_norm}: only kind encoder has one, as in BERT; "
                f"kind {self.kind} takes none"
            )

    def sizes(self) -> Sizes:
        """Return the numbers shared by all blocks."""
        names = ("model_dim", "ff_dim", "num_heads", "kv_heads", "dropout", "attention_dropout")
        names += ("activation", "activation_slope")
        return Sizes(**{name: getattr(self, name) for name in names})

    @property
    def width_factor(self) -> float:
        """m = model_dim / base_width of muP, 1 without it.

        ===============================  ==================  ===========  =====================
        role                             standard deviation  Adam's rate  factor
        ===============================  ==================  ===========  =====================
        embeddings, learned positions    s                   r            1
        matrices of blocks               s / sqrt(m)         r / m        1
        norm gains, biases, scalars      as without          r            1
        table of the output              s                   r            logits / m
        query times key                                                   1/d, not 1/sqrt(d)
        eps of Adam                                                       eps / m
        ===============================  ==================  ===========  =====================

        Yang et al. 2022 (2203.03466), table 8, as in EleutherAI/nanoGPT-mup (3904404), d being the
        width of a head. It is derived for blocks like Pre-LN. For Post-LN nothing is proven.
        """
        return self.model_dim / self.base_width if self.base_width else 1.0

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that `build` returns, with these initial values, biases and norms."""
        by_name, factor = self.seeding == "name", self.width_factor
        with initial_values(self.initial, self.initial_std, by_name=by_name, width_factor=factor):
            model = build()
        for module in model.modules() if self.base_width else ():
            if isinstance(module, Embedding | OutputTable):
                module.logit_factor = 1.0 / self.width_factor
            elif isinstance(module, Attention) and module.spec.scores != "cosine":
                gain = FixedGain((self.model_dim // self.num_heads) ** -0.5)
                module.query_norm = nn.Sequential(module.query_norm, gain)
            elif isinstance(module, LearnedScalars):
                shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
                if any(sum(size > 1 for size in shape) > 1 for shape in shapes):
                    raise UserError(
                        "model.architecture.parametrization: mup has no rule for the matrix of "
                        f"learned scalars {type(module).__name__}; use standard"
                    )
        keep = {module.unit for module in model.modules() if isinstance(module, Halting)}
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | PlainRMSNorm):
                module.eps = self.norm_eps
            if not self.bias and isinstance(module, nn.LayerNorm | Linear) and module not in keep:
                module.register_parameter("bias", None)
        return model

    @property
    def predicting(self) -> str:
        """The name of the stack that the output layer reads."""
        return "encoder" if self.kind == "encoder" else "decoder"

    def order(self) -> Positions:
        """Return the positions."""
        return POSITIONS[self.positions](
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            max_positions=self.max_positions,
            clamp_length=self.clamp_length,
        )

    def stacks(self, block: BlockConfig) -> dict[str, StackSpec]:
        """Return the resolved specification of each stack.

        Raises:
            ValueError: if the block is meaningless here; the message names the field.
        """
        both = self.kind == "encoder_decoder"
        stacks: dict[str, StackSpec] = {}
        if self.kind != "decoder":
            peer = self.decoder_depth if both else 0
            stacks["encoder"] = block.resolve(Stack(depth=self.encoder_depth, peer_depth=peer))
        if self.kind != "encoder":
            peer = self.encoder_depth if both else 0
            stack = Stack(depth=self.decoder_depth, peer_depth=peer, causal=True, cross=both)
            stacks["decoder"] = block.resolve(stack)
        for spec in stacks.values():
            self.order().check_stack(spec)
            for each in spec.blocks:
                self.sizes().check(each)
            if spec.memory is not None and self.order().absolute:
                raise ValueError(
                    f"positions {self.positions} with block.memory: a token of the memory would "
                    "have the position of a newer one; take relative, relative_untied or rope"
                )
        if self.embedding_norm != "none":
            self._check_embedding_norm(stacks["encoder"], block.preset)
        return stacks

    def _check_embedding_norm(self, spec: StackSpec, preset: str) -> None:
        if spec.input_norm != "none":
            reason = "has a norm on the embedding already"
        elif spec.embedding_gain != 1.0:
            reason = "makes embeddings start smaller, which a norm of them undoes"
        elif spec.step_signal != "none":
            raise ValueError(
                f"embedding_norm {self.embedding_norm} with step_signal {spec.step_signal}: the "
                "norm is of token and position, and positions are added before each step; take none"
            )
        else:
            return
        raise ValueError(
            f"embedding_norm {self.embedding_norm}: preset {preset} {reason}; take none"
        )


@final
class EncoderDecoder(_Predictor):
    """Source tokens to a distribution over the next target token (Vaswani et al. 2017).

    One embedding serves source, target and output, unless `source_vocab` is the number of tokens
    of a source with a vocabulary and an embedding of its own.
    """

    def __init__(
        self,
        encoder: StackSpec,
        decoder: StackSpec,
        sizes: Sizes,
        embedding: EmbeddingSpec,
        source_vocab: int | None = None,
    ) -> None:
        super().__init__()
        self.pad = embedding.pad
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        read = replace(embedding, vocab_size=source_vocab or embedding.vocab_size)
        own = Embedding(read, sizes.model_dim, sizes.dropout) if source_vocab else None
        if own is not None:
            own.logit_scale = None  # it has no scores over its vocabulary
        self.source_embedding = own
        of_source = replace(sizes, vocabulary=read.vocab_size)
        sizes = replace(sizes, vocabulary=embedding.vocab_size)
        self.encoder = BlockStack(encoder, of_source, embedding.positions)
        self.decoder = BlockStack(decoder, sizes, embedding.positions, cross=True)
        self.auxiliary: AuxiliaryHeads | None = None  # of the decoder; created by `add_heads`
        initialize(self)

    def present(self, source: Source, target: Target) -> dict[str, Bool[Tensor, "batch token"]]:
        """Return which tokens of each stack are not padding, from the inputs of `forward`."""
        return {"encoder": source != self.pad, "decoder": target != self.pad}

    def forward(self, source: Source, target: Target) -> Float[Tensor, "batch target vocabulary"]:
        """Return the logits of the token after each of `target` (teacher forcing)."""
        return self.embedding.logits(self.states(source, target))

    def states(
        self, source: Source, target: Target, seen: list[Stream] | None = None
    ) -> Float[Tensor, "batch target model"]:
        """Return the states from which the output predicts the token after each of `target`.

        The stream after each layer of the decoder is appended to `seen`.
        """
        memory = self._memory(source)
        mask = causal_mask(target.shape[1], target.device)
        return self.decoder(self.embedding(target), mask, memory, seen=seen, tokens=target)

    def _memory(self, source: Source) -> Memory:
        mask = padding_mask(source != self.pad)
        read = self.embedding if self.source_embedding is None else self.source_embedding
        states = self.encoder(read(source), mask, tokens=source)
        return self.decoder.remember(states, mask)

    def start(self, source: Int[Tensor, "sentence source"], beams: int = 1) -> DecodingState:
        """Encode `source`; return the state before the first of `beams` targets per source."""
        return DecodingState.start(self.decoder, self._memory(source), len(source), beams)


@final
class CausalLanguageModel(_Predictor):
    """Tokens to a distribution over the next one: only a causal stack, as in GPT.

    One embedding serves input and output. Padding may only be on the right, where no real
    token sees it. A row is one text or has several documents; `documents` then holds a number for
    each token: a token sees only its own document, and positions count from its start.
    """

    def __init__(self, decoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__()
        self.pad = embedding.pad
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        sizes = replace(sizes, vocabulary=embedding.vocab_size)
        self.decoder = BlockStack(decoder, sizes, embedding.positions)
        self.auxiliary: AuxiliaryHeads | None = None  # created by `add_heads`
        initialize(self)

    def present(
        self, tokens: PerToken, documents: PerToken | None = None
    ) -> dict[str, Bool[Tensor, "batch token"]]:
        """Return which tokens of each stack are not padding, from the inputs of `forward`."""
        return {"decoder": tokens != self.pad}

    def forward(
        self, tokens: PerToken, documents: PerToken | None = None
    ) -> Float[Tensor, "batch token vocabulary"]:
        """Return the logits of the token after each of `tokens`."""
        return self.embedding.logits(self.states(tokens, documents=documents))

    def states(
        self, tokens: PerToken, seen: list[Stream] | None = None, documents: PerToken | None = None
    ) -> Float[Tensor, "batch token model"]:
        """Return the states from which the output predicts the token after each of `tokens`.

        The stream after each layer is appended to `seen`.
        """
        if documents is None:
            mask, places = causal_mask(tokens.shape[1], tokens.device), None
        else:
            mask, places = document_mask(documents), within_documents(documents)
        x = self.embedding(tokens, in_document=places)
        return self.decoder(x, mask, seen=seen, in_document=places, tokens=tokens)

    def states_after(
        self, before: SegmentMemory | None, tokens: PerToken, seen: list[Stream] | None = None
    ) -> tuple[Float[Tensor, "batch token model"], SegmentMemory]:
        """Return the states of a segment after those of `before`, and the memory for the next one.

        Args:
            before: The memory; None at the start of the texts.
            tokens: The segment.
            seen: A list to which the stream after each layer is appended.
        """
        spec = self.decoder.spec.memory
        assert spec is not None
        x = self.embedding(tokens)
        before = before or empty_memory(self.decoder.spec.depth, x)
        most = spec.tokens(training=self.training)
        limit = most if spec.same_length else None
        mask, places = segment_mask(x.shape[1], before.tokens, limit, x.device)
        recurrence = Recurrence(before, [])
        states = self.decoder(x, mask, places=places, seen=seen, recurrence=recurrence)
        return states, before.after(recurrence.inputs, most)

    def start(self, texts: int, beams: int = 1) -> DecodingState:
        """Return the state before the first token of `beams` continuations per text."""
        return DecodingState.start(self.decoder, None, texts, beams)


def embedding_of(
    architecture: ArchitectureConfig, stacks: Mapping[str, StackSpec], vocab_size: int, pad: int
) -> EmbeddingSpec:
    """Return the specification of the embedding that serves `stacks`."""
    gains = {spec.embedding_gain for spec in stacks.values()}
    assert len(gains) == 1, "one table serves every stack"
    return EmbeddingSpec(
        vocab_size=vocab_size,
        pad=pad,
        positions=architecture.order(),
        gain=gains.pop(),
        norm=architecture.embedding_norm,
        logit_cap=architecture.logit_cap,
        unit=any(block.unit_matrices for spec in stacks.values() for block in spec.blocks),
        adds_positions={spec.step_signal for spec in stacks.values()} == {"none"},
        scaled=architecture.embedding_scale == "sqrt_dim",
    )


def build_model(
    architecture: ArchitectureConfig,
    block: BlockConfig,
    vocab_size: int,
    pad: int,
    source_vocab: int | None = None,
) -> EncoderDecoder | MaskedLanguageModel | CausalLanguageModel:
    """Return the model with its initial values; see `EncoderDecoder` for `source_vocab`."""
    stacks, sizes = architecture.stacks(block), architecture.sizes()
    embedding = embedding_of(architecture, stacks, vocab_size, pad)
    match architecture.kind:
        case "encoder_decoder":
            sides = stacks["encoder"], stacks["decoder"]
            model = EncoderDecoder(*sides, sizes, embedding, source_vocab)
        case "encoder":
            model = MaskedLanguageModel(stacks["encoder"], sizes, embedding)
        case "decoder":
            model = CausalLanguageModel(stacks["decoder"], sizes, embedding)
    if architecture.tie_embeddings is False:
        # Drawn after the other initial values, which equal those of the model with one table.
        model.embedding.output = OutputTable(vocab_size, sizes.model_dim)
        initialize(model.embedding.output)
        model.embedding.after_step()
    return model
