"""Learned spans of self-attention heads, and the terms that parts of a model add to the loss."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.masks import Mask
from lightning_app.blocks.norm import FollowsSteps, LearnedScalars
from lightning_app.blocks.windows import LocalisedSpan, LocalMask, Window

Spans = Float[Tensor, "#batch head #query 1"]
Scalar = Float[Tensor, ""]


class Term(NamedTuple):
    """``weight * value``, to be added to the loss.

    Attributes:
        value: A scalar with a gradient, from the last forward pass or from parameters only.
        weight: The factor in the loss.
        over_tokens: Whether `value` is a sum over the tokens of the batch, to be divided like
            the loss; otherwise it is a penalty, the same on every rank, and is not divided.
    """

    value: Scalar
    weight: float = 1.0
    over_tokens: bool = False


class AuxiliaryTerms(FollowsSteps, ABC):
    """A module that offers terms of the loss. Derive from it together with `nn.Module`."""

    @abstractmethod
    def auxiliary_terms(self) -> Mapping[str, Term]:
        """Return the terms by name, after each forward pass of training."""


def auxiliary_terms(model: nn.Module, normalizer: Scalar) -> dict[str, Scalar]:
    """Return the terms that all modules of `model` add to the loss, by name.

    Terms with the same name are added together. `normalizer` is the number by which sums over
    tokens are divided.
    """
    terms: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, AuxiliaryTerms):
            for name, term in module.auxiliary_terms().items():
                value = term.weight * (term.value / normalizer if term.over_tokens else term.value)
                terms[name] = terms[name] + value if name in terms else value
    return terms


TRIM = 64
"""A trimmed window is rounded up to a multiple of this, so that its size rarely changes."""

FAINT = 2.0**-60
"""The weight in place of an exact 0 at the end of the ramp. It changes no output: float64 keeps 52
bits. But a key there has a gradient, that of ``clamp`` in the authors' code (torch before 2.15),
which a weight of 0 cannot pass through its logarithm."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpan:
    """A learned span per head (Sukhbaatar et al. 2019, 1905.07799, section 2.2).

    The weight of a key at distance x is ``m_z(x) exp(s) / sum m_z exp(s)`` with ``m_z(x) =
    clamp((R + z - x) / R, 0, 1)``. ``z = S z'`` is the span of a head in tokens, z' within [0, 1].
    The loss has the penalty ``lambda / H sum_h z_h`` of every layer; with `share` all, where one
    block and thus one set of spans serves every layer of a stack, it has it once for the stack. A
    query sees its own key, at distance 0 with weight 1; in the paper it does not. In an encoder x
    is ``|i - j|``.

    A dynamic span depends on the query's token: ``z_t = S sigmoid(v . x_t + b)``, where x_t is what
    the layer's queries are projected from, with v and b per head. Its penalty is the mean over
    tokens.
    """

    longest: int
    """S, the largest span in tokens; no key at a larger distance is seen."""
    ramp: float = 32.0
    """R, the number of tokens over which weights fall from 1 to 0. Texts shorter than R are hardly
    masked, or not at all."""
    start: float = 0.0
    """z' at the start, a fraction of S."""
    penalty: float = 2.0e-6
    """lambda, the weight of the mean span of a layer, in nats per token of span."""
    lr: float | None = None
    """The peak learning rate of z', or of v and b; null for that of the optimizer. With Adam a span
    z' moves by at most about S times the rate in a step."""
    trim: bool = False
    """Skip the scores of keys that no head of a layer sees: exact, and faster for short spans."""
    dynamic_bias: float | None = None
    """b at the start of dynamic spans, where v is 0; -4 in the paper, a span of 0.018 S. null: the
    same span for all tokens."""

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"adaptive_span longest {self.longest}: must be at least 1")
        if not 0.0 < self.ramp < math.inf:
            raise ValueError(f"adaptive_span ramp {self.ramp}: must be a number above 0")
        if not 0.0 <= self.start <= 1.0:
            raise ValueError(
                f"adaptive_span start {self.start}: must be from 0 to 1, a fraction of longest"
            )
        if not 0.0 <= self.penalty < math.inf:
            raise ValueError(
                f"adaptive_span penalty {self.penalty}: must be a number of at least 0"
            )
        if self.lr is not None and not 0.0 < self.lr < math.inf:
            raise ValueError(f"adaptive_span lr {self.lr}: must be a rate above 0")
        if self.dynamic_bias is not None:
            self._check_dynamic(self.dynamic_bias)

    def _check_dynamic(self, bias: float) -> None:
        if not math.isfinite(bias):
            raise ValueError(f"adaptive_span dynamic_bias {bias}: must be a finite number")
        if self.start:
            raise ValueError(
                f"adaptive_span start {self.start} with dynamic_bias {bias}: dynamic spans start "
                "at longest * sigmoid(dynamic_bias); leave start at 0"
            )
        if self.trim:
            raise ValueError(
                f"adaptive_span trim true with dynamic_bias {bias}: the longest span of a layer is "
                "not known before its input; use trim false"
            )

    def check(self, localised: LocalisedSpan | None, carries: bool, gamma: float | None) -> None:
        """Refuse other parts of an attention with which the spans have no meaning.

        Raises:
            ValueError: naming the fields and what would be right.
        """
        if localised is not None:
            raise ValueError(
                "adaptive_span with localised_span: one of the two limits the keys of a layer"
            )
        if gamma is not None:
            raise ValueError(
                f"adaptive_span with shaped_attention gamma {gamma}: the centre C would have to "
                "move with the spans; use gamma null"
            )
        if self.trim and carries:
            raise ValueError(
                "adaptive_span trim true with residual_attention: all layers of a chain need the "
                "same keys; use trim false"
            )


class SoftMask(LearnedScalars, AuxiliaryTerms):
    """The soft mask of each head, with the penalty on its span."""

    def __init__(self, spec: AdaptiveSpan) -> None:
        super().__init__()
        self.spec = spec
        self.lr = spec.lr

    @property
    def window(self) -> Window:
        """The keys that some head may see: all up to S."""
        return Window(before=self.spec.longest, after=self.spec.longest)

    @abstractmethod
    def forward(self, u: Float[Tensor, "batch query model"]) -> Spans:
        """Return z in tokens, for the queries of `u`; in float32 at least."""

    def over(self, mask: LocalMask, spans: Tensor | None) -> Mask:
        """Return the mask of the maps that are computed, with a weight per key."""
        assert spans is not None
        # One span for all queries serves every block of a fold.
        folded = spans if spans.shape[2] == 1 else mask.queries(spans)
        return mask.mask.with_log_weights(self.log_weights(folded, mask.distance))

    def over_whole(self, mask: LocalMask, spans: Tensor | None) -> Mask:
        """Return the same for the maps of whole texts."""
        assert spans is not None
        return mask.whole.with_log_weights(self.log_weights(spans, mask.whole_distance))

    def log_weights(
        self, spans: Spans, distance: Int[Tensor, "#batch 1 query key"]
    ) -> Float[Tensor, "#batch head query key"]:
        """Return ``log m_z(x)``, and -finfo.max / 4 instead of the logarithm of 0.

        It is finite, so that the row of a padded query, which may see nothing near it, has no NaN.
        At both ends of the ramp the gradient is that of the ramp, as in the authors' code.
        """
        below_one = (spans - distance) / self.spec.ramp
        zero = torch.zeros_like(below_one)
        on_ramp = (below_one > -1.0) & (below_one <= 0.0)
        logarithm = torch.where(on_ramp, below_one, zero).log1p()
        end = below_one == -1.0
        faint = torch.where(end, below_one + 1.0, zero).add(FAINT).log()
        logarithm = torch.where(end, faint, logarithm)
        return logarithm.masked_fill(below_one < -1.0, -torch.finfo(zero.dtype).max / 4)


@final
class SpanMask(SoftMask):
    """One span for all tokens; z' has the shape ``(head, 1, 1)``."""

    def __init__(self, spec: AdaptiveSpan, num_heads: int) -> None:
        super().__init__(spec)
        self.fraction = nn.Parameter(torch.full((num_heads, 1, 1), float(spec.start)))

    def after_step(self) -> None:
        self.fraction.clamp_(0.0, 1.0)

    @property
    def tokens(self) -> Float[Tensor, "head 1 1"]:
        """z, the span of each head in tokens."""
        kept = torch.promote_types(self.fraction.dtype, torch.float32)
        return self.spec.longest * self.fraction.to(kept)

    def measured(self) -> Iterator[tuple[str, Tensor]]:
        yield "span", self.tokens

    def auxiliary_terms(self) -> Mapping[str, Term]:
        return {"span": Term(self.tokens.mean(), weight=self.spec.penalty)}

    @property
    def window(self) -> Window:
        """The keys that some head may see: all up to S, or up to ``max_h z_h + R`` if trimmed."""
        reach = self.spec.longest
        if self.spec.trim:
            # A key with x <= z + R has a weight or a gradient.
            most = float(self.tokens.detach().max()) + self.spec.ramp
            if math.isfinite(most):  # do not trim a diverged model
                reach = min(reach, TRIM * math.ceil(math.floor(most) / TRIM))
        return Window(before=reach, after=reach)

    def forward(self, u: Float[Tensor, "batch query model"]) -> Float[Tensor, "1 head 1 1"]:
        return self.tokens[None]


class Counted(NamedTuple):
    """The tokens over which the mean span of a pass is taken.

    Attributes:
        here: True for the tokens of this rank that count.
        number: Those of the global batch, divided by the number of ranks.
    """

    here: Bool[Tensor, "batch token"]
    number: Scalar


@final
class DynamicSpanMask(SoftMask):
    """``z_t = S sigmoid(v . x_t + b)`` of each head (Sukhbaatar et al. 2019, section 2.2).

    v has the shape ``(head, model)``. The paper gives no initial v; here it is 0, so that the
    spans of all tokens are ``S sigmoid(b)`` at first.

    `count` sets, before each forward pass of training, the tokens over which the penalty averages.
    A shared block is called once per step, and its penalty averages over its steps.
    """

    def __init__(self, spec: AdaptiveSpan, model_dim: int, num_heads: int) -> None:
        super().__init__(spec)
        assert spec.dynamic_bias is not None
        self.direction = nn.Parameter(torch.zeros(num_heads, model_dim))
        self.bias = nn.Parameter(torch.full((num_heads,), float(spec.dynamic_bias)))
        self._counted: Counted | None = None
        self._pending: list[Tensor] = []  # sums over tokens, one per call in the pass
        self._sums: list[Tensor] = []  # those of the last pass, without gradients
        self._tokens: Tensor | None = None

    def measured(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: these spans belong to tokens; see `sums` and `ActivationHooks`."""
        yield from ()

    def count(self, counted: Counted) -> None:
        """Set the tokens that count in the next forward pass of training."""
        self._counted, self._pending = counted, []

    def forward(self, u: Float[Tensor, "batch query model"]) -> Float[Tensor, "batch head query 1"]:
        kept = torch.promote_types(u.dtype, torch.float32)
        with torch.autocast(u.device.type, enabled=False):
            logits = F.linear(u.to(kept), self.direction.to(kept), self.bias.to(kept))
        # (batch, token, head) -> (batch, head, token)
        spans = self.spec.longest * logits.sigmoid().transpose(1, 2)
        if self.training and self._counted is not None:
            self._pending.append((spans * self._counted.here[:, None]).sum(dim=(0, 2)))
        return spans.unsqueeze(-1)

    def auxiliary_terms(self) -> Mapping[str, Term]:
        """Return the penalty on the mean span of the last forward pass; only once per pass."""
        assert self._counted is not None, "the tokens that count are set before the pass"
        assert self._pending, "each pass of training has its penalty once"
        is_counted, number = self._counted
        mean = torch.stack(self._pending).mean() / number.to(self._pending[0].dtype)
        self._sums, self._pending = [sums.detach() for sums in self._pending], []
        self._tokens, self._counted = is_counted.sum().to(mean.dtype), None
        return {"span": Term(mean, weight=self.spec.penalty)}

    def sums(self, layer: int) -> tuple[Float[Tensor, " head"], Scalar]:
        """Return the sum of each head's spans in the last pass of training, and the tokens summed.

        Args:
            layer: Counted from 1; it matters in a shared block, whose spans differ between steps.
        """
        assert self._tokens is not None
        return self._sums[min(layer, len(self._sums)) - 1], self._tokens
