"""The keys that each query may attend to, and quantities derived from them."""

from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


@final
class Mask:
    """The keys that each query may attend to; built once per batch, as small as possible.

    Args:
        keys: The number of keys.
        device: Their device.
        seen: True where attention is allowed; None if it is allowed everywhere.
        causal: Whether query i sees only the keys 0..i among those of `seen`.
        score_bias: A term added to the scores of each head, such as a slope over the distance
            between query and key; or None.
        log_weights: The logarithm of the weight of each key in the softmax, such as a soft mask;
            or None. It is added to the logits of one layer and never carried to another.
    """

    def __init__(
        self,
        keys: int,
        device: torch.device,
        *,
        seen: Bool[Tensor, "#batch 1 #query key"] | None = None,
        causal: bool = False,
        score_bias: Float[Tensor, "#batch #head #query key"] | None = None,
        log_weights: Float[Tensor, "#batch #head #query key"] | None = None,
    ) -> None:
        self.keys = keys
        self.device = device
        self.seen = seen
        self.causal = causal
        self.score_bias = score_bias
        self.log_weights = log_weights
        # No `cached_property`: its lock in Python 3.11 breaks a compiled graph in two.
        self._allowed: Tensor | None = None
        self._bias: Tensor | None = None
        self._count: Tensor | None = None
        self._blank: Tensor | None = None
        self._added: Tensor | None = None
        self._with_sink: Mask | None = None

    def with_score_bias(self, bias: Float[Tensor, "#batch #head #query key"]) -> "Mask":
        """Return the mask of the same keys with a bias added to the scores."""
        bias = bias if self.score_bias is None else self.score_bias + bias
        return Mask(self.keys, self.device, seen=self.seen, causal=self.causal, score_bias=bias)

    def with_log_weights(self, weights: Float[Tensor, "#batch #head #query key"]) -> "Mask":
        """Return the mask with a weight per key, passed as its logarithm."""
        mask = Mask(
            self.keys,
            self.device,
            seen=self.seen,
            causal=self.causal,
            score_bias=self.score_bias,
            log_weights=weights,
        )
        mask._allowed, mask._bias = self._allowed, self._bias
        return mask

    def with_sink(self, logit: Float[Tensor, "head 1 1"] | None) -> "Mask":
        """Return the mask with one more key, the last, which every query sees.

        `logit` is added to its score in the softmax of one layer.
        """
        if self._with_sink is None:
            everywhere = self.seen is None and not self.causal
            self._with_sink = Mask(
                self.keys + 1,
                self.device,
                seen=None if everywhere else self._wider(self.allowed, 1.0),
                score_bias=self._wider(self.score_bias, 0.0),
                log_weights=self._wider(self.log_weights, 0.0),
            )
        if logit is None:
            return self._with_sink
        column, others = F.pad(logit[None], (self.keys, 0)), self._with_sink.log_weights
        return self._with_sink.with_log_weights(column if others is None else others + column)

    def _wider(self, x: Tensor | None, value: float) -> Tensor | None:
        return None if x is None else F.pad(x.expand(*x.shape[:-1], self.keys), (0, 1), value=value)

    @property
    def adds_to_scores(self) -> bool:
        """Whether logits have terms with a gradient besides ``Q K^T``."""
        return self.score_bias is not None or self.log_weights is not None

    @property
    def allowed(self) -> Bool[Tensor, "#batch 1 #query key"]:
        """True where attention is allowed."""
        if self._allowed is None:
            rows = self.keys if self.causal else 1
            every = torch.ones(1, 1, rows, self.keys, dtype=torch.bool, device=self.device)
            every = every.tril() if self.causal else every
            self._allowed = every if self.seen is None else every & self.seen
        return self._allowed

    @property
    def blank(self) -> Bool[Tensor, "batch 1 #query 1"] | None:
        """The queries that see no key at all; None if every query sees one."""
        if self._blank is None and self.seen is not None:
            self._blank = ~self.allowed.any(dim=-1, keepdim=True)
        return self._blank

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "#batch 1 #query key"] | None:
        """0 where attention is allowed and -finfo.max/4 elsewhere; None if it is allowed
        everywhere.

        Finite, so that a row that sees nothing has no NaN and a sum of scores can be undone.
        """
        if self.seen is None and not self.causal:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            zeros = torch.zeros(self.allowed.shape, dtype=dtype, device=self.device)
            self._bias = zeros.masked_fill(~self.allowed, -torch.finfo(dtype).max / 4)
        return self._bias

    def logits(
        self, scores: Float[Tensor, "batch head query key"]
    ) -> Float[Tensor, "batch head query key"]:
        """Return the input of a softmax: `scores` with all biases, and hidden keys at
        -finfo.max/4, so that a row that sees nothing has no NaN."""
        for added in (self.score_bias, self.log_weights, self.bias(scores.dtype)):
            scores = scores if added is None else scores + added.to(scores.dtype)
        return scores

    def for_sdpa(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return arguments for `scaled_dot_product_attention` with queries of type `dtype`.

        A mask costs time, so there is no mask if none is needed. SDPA would turn a boolean mask
        into this one in every layer. It uses -inf, so that rows that see nothing give zeros. A mask
        of another type than the queries is misread on a CPU (torch 2.13, float64 queries and a
        float32 mask).
        """
        if self.seen is None and not self.adds_to_scores:
            return {"is_causal": self.causal}
        if self._added is None or self._added.dtype != dtype:
            added = torch.zeros(self.allowed.shape, dtype=dtype, device=self.device)
            if self.score_bias is not None:
                added = added + self.score_bias.to(dtype)
            if self.log_weights is not None:
                added = added + self.log_weights.to(dtype)
            self._added = added.masked_fill(~self.allowed, -torch.inf)
        return {"attn_mask": self._added}

    @property
    def count(self) -> Float[Tensor, "#batch 1 #query 1"]:
        """The number of keys that each query sees, at least 1."""
        if self._count is None:
            if self.seen is None and self.causal:
                count = torch.arange(1, self.keys + 1, device=self.device)[None, None, :, None]
            else:
                count = self.allowed.sum(dim=-1, keepdim=True).clamp(min=1)
            self._count = count.to(torch.get_default_dtype())
        return self._count

    @property
    def centre(self) -> Float[Tensor, "#batch #head #query key"]:
        """C: the map at ``Q K^T = 0`` (He & Hofmann 2023, 2311.01906, footnote 3).

        It is uniform over the keys that a query may see, and the softmax of the bias where scores
        have one, so that A = C at the start. Zeros where a query sees no key.
        """
        if self.score_bias is None:
            return self.allowed.to(self.count.dtype) / self.count
        logits = self.score_bias.masked_fill(~self.allowed, torch.finfo(self.score_bias.dtype).min)
        return logits.softmax(dim=-1).masked_fill(~self.allowed, 0.0)


def mask_of(seen: Bool[Tensor, "batch 1 #query key"]) -> Mask:
    """Queries see the keys where `seen` is True."""
    return Mask(seen.shape[-1], seen.device, seen=seen)


def padding_mask(present: Bool[Tensor, "batch key"]) -> Mask:
    """Every query sees the keys that are present."""
    return mask_of(present[:, None, None, :])


def causal_mask(length: int, device: torch.device) -> Mask:
    """Query i sees the keys 0..i. This suffices for padding on the right: no real token sees it."""
    return Mask(length, device, causal=True)


def document_mask(documents: Int[Tensor, "batch token"]) -> Mask:
    """Query i sees the keys 0..i of its own document: intra-document masking.

    `documents` has a number for each token, equal for neighbouring tokens of one document (Zhao et
    al. 2024, 2402.13991, section 2).
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return Mask(documents.shape[1], documents.device, seen=same, causal=True)


def full_mask(length: int, device: torch.device) -> Mask:
    """Every query sees every key: packed windows, and the newest query of cached decoding."""
    return Mask(length, device)
