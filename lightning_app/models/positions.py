"""How token order enters a model; `model.architecture.positions` selects a way by name."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_app.blocks.linear import Linear, linear
from lightning_app.blocks.norm import LearnedScalars, Norm, Scale, build_norm, unit_rows
from lightning_app.blocks.placed import Placed, Places, Rotation, rotation
from lightning_app.blocks.stack import StackSpec
from lightning_app.core.errors import UserError
from lightning_app.core.registry import Registry

POSITIONS: Registry["type[Positions]"] = Registry("model.architecture.positions")
"""The positions by name; `POSITIONS.register` is the decorator that adds a class."""

Rows = Float[Tensor, "position model"]


class Table(nn.Module, ABC):
    """Positions that are added to the embedding of each token."""

    @abstractmethod
    def forward(self, start: int, end: int, device: torch.device) -> Rows:
        """Return the rows of the positions start .. end - 1."""


Place = Callable[[Places], Placed]
PerToken = Int[Tensor, "batch token"]
"""Ids of tokens, or numbers of their documents or segments."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """One kind of positions; this base ignores order. Subclasses override what they use."""

    absolute: ClassVar[bool] = False
    """Whether tokens enter a model together with their positions."""
    clamps: ClassVar[bool] = False
    """Whether `clamp_length` applies."""

    model_dim: int
    num_heads: int
    max_positions: int
    clamp_length: int | None = None

    def check(self) -> None:
        """Refuse sizes that these positions do not support.

        Raises:
            ValueError: naming the field and what would be right.
        """

    @property
    def longest(self) -> float:
        """The largest number of tokens of a text."""
        return math.inf

    def check_length(self, tokens: int) -> None:
        """Refuse a text of more tokens than there are positions.

        Raises:
            UserError: naming the field and both numbers.
        """
        if tokens > self.longest:
            raise UserError(
                f"model.architecture.max_positions is {self.max_positions}, and a text has "
                f"{tokens} tokens; learned positions end there"
            )

    def table(self) -> Table | None:
        """Return the table that is added to the embedding, or None."""
        return None

    def check_stack(self, spec: StackSpec) -> None:
        """Refuse a stack in which these positions are meaningless.

        Raises:
            ValueError: naming the field and what would be right.
        """

    def placing(self, spec: StackSpec) -> Place | None:
        """Return the term in the scores of self-attention for the places of a pass.

        It is a function, or a module if it has parameters; None if positions do not enter there.
        Each stack has its own and calls it once per pass, for all layers.
        """
        return None


@final
class LearnedTable(Table):
    """One vector per position, initially from N(0, 0.02^2) (Devlin et al. 2019)."""

    def __init__(self, max_positions: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, model_dim))
        nn.init.normal_(self.weight)

    def forward(self, start: int, end: int, device: torch.device) -> Rows:
        return self.weight[start:end]


@final
@POSITIONS.register("learned")
class Learned(Positions):
    """Devlin et al. 2019, BERT (1810.04805)."""

    absolute = True

    @property
    def longest(self) -> float:
        return float(self.max_positions)

    def table(self) -> LearnedTable:
        return LearnedTable(self.max_positions, self.model_dim)


@final
class ScoreBiases(LearnedScalars):
    """u and v, one vector per head each, initially from N(0, 0.02^2)."""

    def __init__(self, num_heads: int, head_dim: int, *, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.content = nn.Parameter(torch.empty(num_heads, 1, head_dim))
        self.position = nn.Parameter(torch.empty(num_heads, 1, head_dim))
        with torch.no_grad():
            self.reset()

    def reset(self) -> None:
        for bias in (self.content, self.position):
            nn.init.zeros_(bias) if self.zero else nn.init.normal_(bias, std=0.02)


@final
class RelativeTerm(nn.Module):
    """The scores of Transformer-XL, for every layer of a stack:

    ``S_ij = ((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(d_k)``

    with ``r_x = [sin(x w) ; cos(x w)]``, ``w_k = 10000^(-2k/d)``, one W per layer, and u and v
    shared by the layers or one pair per layer. With ``a = W^T (q_i + v)`` in two halves and the
    angle ``g = i w``, the second product is an inner product with the sinusoids of j only:

    ``a . r_(i-j) = [-a_s cos g + a_c sin g ; a_s sin g + a_c cos g] . r_j``

    So queries and keys get d more features, and every form of attention works unchanged.

    With `clamp_length` c distances above c count as c, and in an encoder those below -c as -c, in
    evaluation only. Distances are then no longer differences of positions, so the second product is
    a separate term per query and key.
    """

    def __init__(
        self,
        layers: int,
        model_dim: int,
        num_heads: int,
        *,
        shared: bool,
        zero: bool,
        clamp_length: int | None = None,
    ) -> None:
        super().__init__()
        self.clamp_length = clamp_length
        head_dim, pairs = model_dim // num_heads, 1 if shared else layers
        self.projections = nn.ModuleList(
            Linear(model_dim, model_dim, bias=False) for _ in range(layers)
        )
        self.biases = nn.ModuleList(
            ScoreBiases(num_heads, head_dim, zero=zero) for _ in range(pairs)
        )

    def forward(self, places: Places) -> Placed:
        if self.clamp_length is None or self.training:
            return RelativeScores(self, *self.sinusoids(places.newest))
        most = self.clamp_length
        # (#batch, #token, key), a later key at a distance below 0
        distance = places.newest[:, None] - places.keys[:, None]
        table = torch.cat(self.sinusoids(torch.arange(-most, most + 1)), dim=-1)
        return ClampedScores(self, distance.clamp(-most, most) + most, table)

    def sinusoids(
        self, places: Int[Tensor, " place"]
    ) -> tuple[Float[Tensor, "place half"], Float[Tensor, "place half"]]:
        """Return the sines and cosines at these positions, in the type of the weights."""
        weight, _ = self.of(1)
        dim = weight.shape[-1]
        rate = torch.exp(
            torch.arange(0, dim, 2, device=weight.device, dtype=torch.float64)
            * (-math.log(10000.0) / dim)
        )
        # Computed from angles in full precision.
        angle = torch.outer(places.to(weight.device).double(), rate)
        return angle.sin().to(weight.dtype), angle.cos().to(weight.dtype)

    def of(self, layer: int) -> tuple[Float[Tensor, "head dim model"], ScoreBiases]:
        """Return W, and u and v, of a layer, counted from 1."""
        weight = self.projections[layer - 1].weight
        assert isinstance(weight, Tensor)
        biases = self.biases[0 if len(self.biases) == 1 else layer - 1]
        assert isinstance(biases, ScoreBiases)
        return weight.unflatten(0, (len(biases.content), -1)), biases


@final
@dataclass(frozen=True)
class RelativeScores(Placed):
    """The features of the newest tokens of one pass; `at` returns those of a layer."""

    term: RelativeTerm
    sin: Float[Tensor, "token half"]
    cos: Float[Tensor, "token half"]
    layer: int = 1

    def at(self, layer: int) -> "RelativeScores":
        return replace(self, layer=layer)

    def queries(self, x: Float[Tensor, "batch head token dim"]) -> Tensor:
        weight, biases = self.term.of(self.layer)
        a = (x + biases.position) @ weight
        a_sin, a_cos = a.chunk(2, dim=-1)
        turned = [a_cos * self.sin - a_sin * self.cos, a_sin * self.sin + a_cos * self.cos]
        features = torch.cat([x + biases.content, *turned], dim=-1)
        # Attention divides by the root of the number of features, but the divisor must be that of
        # d_k.
        return (features * math.sqrt(features.shape[-1] / x.shape[-1])).to(x.dtype)

    def keys(self, x: Float[Tensor, "batch head token dim"]) -> Tensor:
        sinusoids = torch.cat([self.sin, self.cos], dim=-1).to(x.dtype)
        return torch.cat([x, sinusoids.expand(*x.shape[:3], -1)], dim=-1)


@final
@dataclass(frozen=True)
class ClampedScores(Placed):
    """The scores of one pass with clamped distances; `at` returns those of a layer.

    `distance` holds the row of `table` of each distance.
    """

    term: RelativeTerm
    distance: Int[Tensor, "#batch #token key"]
    table: Float[Tensor, "distance model"]
    layer: int = 1

    def at(self, layer: int) -> "ClampedScores":
        return replace(self, layer=layer)

    def queries(self, x: Float[Tensor, "batch head token dim"]) -> Tensor:
        return (x + self.term.of(self.layer)[1].content).to(x.dtype)

    def added(self, query: Float[Tensor, "batch head token dim"]) -> Tensor:
        weight, biases = self.term.of(self.layer)
        x = query - biases.content + biases.position
        # (head, dim, model) -> (head, dim, distance)
        by_distance = x @ (weight @ self.table.T) / math.sqrt(x.shape[-1])
        # The newest tokens of all beams have the same distance to a key.
        index = self.distance[:, None].expand(*x.shape[:3], -1)
        return by_distance.gather(3, index).to(query.dtype)


@POSITIONS.register("relative")
class Relative(Positions):
    """Dai et al. 2019, Transformer-XL (1901.02860), section 3.3.

    u and v are shared by all layers of a stack, as in the authors' code.
    """

    clamps = True
    shared: ClassVar[bool] = True

    def check(self) -> None:
        if self.model_dim % 2:
            raise ValueError(f"model_dim {self.model_dim}: relative positions need an even width")

    def check_stack(self, spec: StackSpec) -> None:
        if any(block.self_attention.carry == "qk_sum" for block in spec.blocks):
            raise ValueError(
                "positions relative with residual_attention qk_sum: sums over layers would add "
                "the sinusoids of a key once a layer; take residual_attention mean or sum"
            )
        if self.clamp_length is not None:
            self._check_clamped(spec)

    def _check_clamped(self, spec: StackSpec) -> None:
        for attention in (block.self_attention for block in spec.blocks):
            if attention.shaping is not None and attention.shaping.centred:
                raise ValueError(
                    f"clamp_length {self.clamp_length} with a shaped_attention gamma: the centre "
                    "would move with the term of large distances; leave clamp_length out"
                )
            if attention.localised_span is not None or attention.adaptive_span is not None:
                raise ValueError(
                    f"clamp_length {self.clamp_length} with localised_span or adaptive_span: a "
                    "span hides large distances already; leave clamp_length out"
                )

    def placing(self, spec: StackSpec) -> RelativeTerm:
        # With a centre the map must be uniform at the start, which u and v would break.
        shapings = [block.self_attention.shaping for block in spec.blocks]
        zero = any(shaping is not None and shaping.centred for shaping in shapings)
        return RelativeTerm(
            len(spec.blocks),
            self.model_dim,
            self.num_heads,
            shared=self.shared,
            zero=zero,
            clamp_length=self.clamp_length,
        )


@final
@POSITIONS.register("relative_untied")
class RelativeUntied(Relative):
    """Each layer has its own u and v."""

    shared = False


@final
@POSITIONS.register("rope")
class Rope(Positions):
    """Su et al. 2021, RoPE (2104.09864): ``(R_i q_i) . (R_j k_j)``, which depends on i - j."""

    def check(self) -> None:
        head_dim, rest = divmod(self.model_dim, self.num_heads)
        if not rest and head_dim % 2:
            raise ValueError(
                f"positions rope: model_dim / num_heads is {head_dim}, and pairs need an even "
                "number"
            )

    def placing(self, spec: StackSpec) -> Place:
        return self._rotation

    def _rotation(self, places: Places) -> Rotation:
        return rotation(places.newest, self.model_dim // self.num_heads)


def sinusoids(length: int, dim: int, device: torch.device) -> Float[Tensor, "{length} {dim}"]:
    """``PE(i, 2k) = sin(i / 10000^(2k/d))``, ``PE(i, 2k+1) = cos(same)`` (Vaswani et al. 2017)."""
    position = torch.arange(length, device=device, dtype=torch.float64)[:, None]
    rate = torch.exp(
        torch.arange(0, dim, 2, device=device, dtype=torch.float64) * (-math.log(10000.0) / dim)
    )
    angle = position * rate
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return table[:, :dim].to(torch.get_default_dtype())


def sines_then_cosines(
    length: int, dim: int, device: torch.device
) -> Float[Tensor, "{length} {dim}"]:
    """``PE(i, k) = sin((i + 2) w_k)``, ``PE(i, d/2 + k) = cos(same)``, as in fairseq.

    ``w_k = 10000^(-k/(d/2-1))``, as in tensor2tensor; fairseq counts from 2, after its padding.
    """
    position = torch.arange(2, length + 2, device=device, dtype=torch.float64)[:, None]
    places = torch.arange(dim // 2, device=device, dtype=torch.float64)
    angle = position * torch.exp(places * (-math.log(10000.0) / (dim // 2 - 1)))
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(torch.get_default_dtype())


@final
class Sinusoids(Table):
    """The sinusoids of all positions needed so far."""

    def __init__(self, model_dim: int, rows: Callable[..., Rows] = sinusoids) -> None:
        super().__init__()
        self.model_dim, self._rows_of = model_dim, rows
        # Grown on demand: sentences at inference may be longer than any in training.
        # Not a buffer: distributed training would broadcast tables of different lengths.
        self.rows = torch.empty(0, model_dim)

    def forward(self, start: int, end: int, device: torch.device) -> Rows:
        if self.rows.shape[0] < end or self.rows.device != device:
            length = max(end, 2 * self.rows.shape[0], 256)
            self.rows = self._rows_of(length, self.model_dim, device)
        return self.rows[start:end]


@POSITIONS.register("sinusoidal")
class Sinusoidal(Positions):
    """Vaswani et al. 2017 (1706.03762), section 3.5."""

    absolute = True

    def check(self) -> None:
        if self.model_dim % 2:
            raise ValueError(f"model_dim {self.model_dim}: sinusoidal positions need an even width")

    def table(self) -> Sinusoids:
        return Sinusoids(self.model_dim)


@final
@POSITIONS.register("sinusoidal_fairseq")
class FairseqSinusoids(Sinusoidal):
    """The sinusoids of fairseq; see `sines_then_cosines`."""

    def check(self) -> None:
        if self.model_dim % 2 or self.model_dim < 4:
            raise ValueError(
                f"model_dim {self.model_dim}: positions sinusoidal_fairseq need an even width of "
                "at least 4"
            )

    def table(self) -> Sinusoids:
        return Sinusoids(self.model_dim, sines_then_cosines)


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """The specification of the token table and the positions."""

    vocab_size: int
    pad: int
    positions: Positions
    gain: float = 1.0
    """The factor on the table's initial values (T-Fixup)."""
    norm: Norm = "none"
    """The norm of the sum of token and position."""
    adds_positions: bool = True
    """Whether the position table is added here rather than before each step of a stack."""
    logit_cap: float | None = None
    """c, a bound of the scores over the vocabulary."""
    scaled: bool = True
    """Whether an embedding is multiplied by sqrt(model_dim)."""
    unit: bool = False
    """Whether the table has rows of length 1, and scores over the vocabulary learned factors."""


@final
class Embedding(nn.Module):
    """``norm(sqrt(d) E[token] + PE(position) + S[segment])``, or without the factor sqrt(d).

    E serves inputs and output, or `output` has a table of its own. E starts at N(0, 1/d), so that
    the sum starts with entries of variance one. PE is the table of the positions, zero if they
    enter attention instead. By default there is no norm; BERT's official code has a LayerNorm
    there, with dropout after it (Devlin et al. 2019, `embedding_postprocessor`). A norm turns the
    factor sqrt(d), which BERT lacks, into a weight of the token relative to its position. S exists
    only for pairs of texts: see `SegmentTable`. With `unit` both tables are projected after each
    step, apart from E's row of the padding.
    """

    def __init__(self, spec: EmbeddingSpec, model_dim: int, dropout: float) -> None:
        super().__init__()
        self.spec = spec
        self.model_dim = model_dim
        self.tokens = nn.Embedding(spec.vocab_size, model_dim, padding_idx=spec.pad)
        self.position_table = spec.positions.table() if spec.adds_positions else None
        self.segments: SegmentTable | None = None  # created by `add_next_sentence`
        self.output: OutputTable | None = None  # created by `build_model`
        self.norm = build_norm(spec.norm, model_dim)
        self.dropout = nn.Dropout(dropout)
        scale = Scale(spec.vocab_size, stored=model_dim**-0.5)
        self.logit_scale = scale if spec.unit else None
        self.logit_factor = 1.0

    @torch.no_grad()
    def after_step(self) -> None:
        if self.spec.unit:
            table = self.tokens.weight
            padding = table[self.spec.pad].clone()
            unit_rows(table)
            table[self.spec.pad] = padding
        if self.spec.unit and self.output is not None:
            unit_rows(self.output.weight)

    def forward(
        self,
        tokens: PerToken,
        start: int = 0,
        in_document: PerToken | None = None,
        segments: PerToken | None = None,
    ) -> Float[Tensor, "batch token model"]:
        """Embed `tokens`, the first at position `start`, or at the positions `in_document`.

        `segments` has 0 or 1 for each token; passed exactly if there is a table for it.

        Raises:
            UserError: for a text longer than a learned position table.
        """
        end = start + tokens.shape[1]
        self.spec.positions.check_length(end)
        embedded = self.tokens(tokens)
        if self.spec.scaled:
            embedded = embedded * math.sqrt(self.model_dim)
        if self.position_table is not None:
            table = self.position_table(start, end, tokens.device)
            if in_document is not None:
                table = nn.functional.embedding(in_document, table)
            embedded = embedded + table.to(embedded.dtype)
        assert (segments is None) == (self.segments is None), "a table of segments reads them"
        if segments is not None and self.segments is not None:
            embedded = embedded + self.segments(segments).to(embedded.dtype)
        return self.dropout(self.norm(embedded))

    @property
    def table(self) -> Float[Tensor, "vocabulary model"]:
        """The table of the output layer times `logit_factor`, with `unit` the learned ones too."""
        table = (self.output or self.tokens).weight
        if self.logit_factor != 1.0:
            table = self.logit_factor * table
        return table if self.logit_scale is None else self.logit_scale.factor[:, None] * table

    def logits(
        self, states: Float[Tensor, "*shape model"], bias: Tensor | None = None
    ) -> Float[Tensor, "*shape vocabulary"]:
        """Return ``states T^T + bias``, T the `table`: scores over the vocabulary, maybe capped."""
        logits = linear(states, self.table)
        return capped(logits if bias is None else logits + bias, self.spec.logit_cap)


def capped(logits: Float[Tensor, "*shape"], cap: float | None) -> Float[Tensor, "*shape"]:
    """``c tanh(z / c)``, in float32 at least (Gemma 2, 2408.00118); z without a cap."""
    if cap is None:
        return logits
    return cap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap)


@final
class SegmentTable(nn.Module):
    """One vector per text of a pair, initially from N(0, 0.02^2) like learned positions.

    Devlin et al. 2019 (1810.04805). The authors truncate that distribution at two standard
    deviations.
    """

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, model_dim))

    def forward(self, segments: PerToken) -> Float[Tensor, "batch token model"]:
        return nn.functional.embedding(segments, self.weight)


@final
class OutputTable(nn.Module):
    """An output table not shared with any input; its entries start at N(0, 1/d), like E's."""

    logit_factor = 1.0

    def __init__(self, vocab_size: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, model_dim))
