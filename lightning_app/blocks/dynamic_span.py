"""Spans of self-attention that depend on the token."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.adaptive_span import AdaptiveSpan, SoftMask, SpanMask
from lightning_app.blocks.auxiliary import Term


class Counted(NamedTuple):
    """The tokens over which the mean span of a pass is taken.

    Attributes:
        here: True for the tokens of this rank that count.
        number: Those of the global batch, divided by the number of ranks.
    """

    here: Bool[Tensor, "batch token"]
    number: Float[Tensor, ""]


@final
class DynamicSpanMask(SoftMask):
    """``z_t = S sigmoid(v . x_t + b)`` of each head (Sukhbaatar et al. 2019, section 2.2).

    v has the shape ``(head, model)``. The paper gives no start of v; here it is 0, so that the
    spans of all tokens are ``S sigmoid(b)`` at first.

    `count` says before each forward pass of training over which tokens the penalty is the mean. A
    shared block is called once a step, and has the mean over its steps.
    """

    def __init__(self, spec: AdaptiveSpan, model_dim: int, num_heads: int) -> None:
        super().__init__(spec)
        assert spec.dynamic_bias is not None
        self.direction = nn.Parameter(torch.zeros(num_heads, model_dim))
        self.bias = nn.Parameter(torch.full((num_heads,), float(spec.dynamic_bias)))
        self._start = float(spec.dynamic_bias)
        self._counted: Counted | None = None
        self._pending: list[Tensor] = []  # sums over tokens, one for each call in the pass
        self._sums: list[Tensor] = []  # those of the last pass, without gradients
        self._tokens: Tensor | None = None

    def reset(self) -> None:
        self.direction.zero_()
        self.bias.fill_(self._start)

    def measured(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: spans are those of tokens, see `sums` and `ActivationHooks`."""
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
        """Return the penalty on the mean span of the last forward pass, once."""
        assert self._counted is not None, "the tokens that count are set before the pass"
        assert self._pending, "each pass of training has its penalty once"
        here, number = self._counted
        mean = torch.stack(self._pending).mean() / number.to(self._pending[0].dtype)
        self._sums, self._pending = [sums.detach() for sums in self._pending], []
        self._tokens, self._counted = here.sum().to(mean.dtype), None
        return {"span": Term(mean, weight=self.spec.penalty)}

    def sums(self, layer: int) -> tuple[Float[Tensor, " head"], Float[Tensor, ""]]:
        """Return the sum of each head's spans in the last pass of training, and the tokens summed.

        Args:
            layer: From 1; it matters in a shared block, which has spans of its own at each step.
        """
        assert self._tokens is not None
        return self._sums[min(layer, len(self._sums)) - 1], self._tokens


def build_soft_mask(spec: AdaptiveSpan, model_dim: int, num_heads: int) -> SoftMask:
    """Return the mask of dynamic spans, or of one span for all tokens."""
    if spec.dynamic_bias is None:
        return SpanMask(spec, num_heads)
    return DynamicSpanMask(spec, model_dim, num_heads)
