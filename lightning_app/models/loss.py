"""The objective of a task and the sums of a batch, including those of auxiliary heads."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.kernels.stored import no_second_derivative
from lightning_app.blocks.linear import is_followed, linear, product, takes_onednn
from lightning_app.blocks.streams import Stream
from lightning_app.core.schema import check_range
from lightning_app.models.auxiliary_heads import AuxiliarySpec
from lightning_app.models.positions import capped
from lightning_app.models.search import SearchConfig
from lightning_app.scores.task_facts import DEFAULT_TASK, TASKS


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The training objective and its evaluation."""

    kind: str = DEFAULT_TASK
    """The task: translation needs an encoder_decoder, masked_lm, glue and squad an encoder,
    causal_lm a decoder."""
    label_smoothing: float | None = None
    """Share of the target's probability spread evenly over the vocabulary, in the loss only. null:
    0.1 for translation, else 0."""
    z_loss: float = 0.0
    """w: w (log sum_v exp z_v)^2 of each token is added to the training loss (PaLM: 1e-4)."""
    intermediate_weight: float = 0.0
    """Weight of the losses of layers below the last: layer l of n also predicts until l / (2n) of
    the steps are done (Al-Rfou et al. 2019: 1); 0: none."""
    second_target_weight: float = 0.0
    """Weight of the prediction of the token after next in a decoder (Al-Rfou et al.: 0.5)."""
    auxiliary_tables: Literal["tied", "own"] = "tied"
    """Output tables of intermediate layers: the last layer's, or one per layer."""
    next_sentence: bool = False
    """Whether masked_lm also predicts whether the second of two texts follows the first in its
    document (BERT); it then reads pairs of texts instead of windows."""
    glue: str | None = None
    """Set from data.name: the GLUE task whose labels are predicted; null for other tasks."""
    beam: int = 5
    """Beams of the final test and of `ablate translate`; 1 is greedy search."""
    length_penalty: float = 1.0
    """Exponent of the length in a hypothesis' score (fairseq's lenpen)."""
    validation_bleu: int = 0
    """Decode this many validation sentences greedily at each validation, for val/bleu."""
    evaluate_test: bool = True
    """Evaluate the test split when `fit` ends: test/nll, and for translation both BLEUs."""

    def __post_init__(self) -> None:
        _ = TASKS[self.kind]
        check_range(self, "at least 0 and less than 1", "label_smoothing")
        check_range(self, "at least 0", "validation_bleu")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss {self.z_loss}: must be a number of at least 0")
        _ = self.auxiliary(), self.search()  # they check their values
        if self.next_sentence and not TASKS[self.kind].masks:
            raise ValueError(
                f"next_sentence true: only kind masked_lm has it; kind {self.kind} takes false"
            )
        self._check_labels()

    def _check_labels(self) -> None:
        if not TASKS[self.kind].labelled:
            return
        if not self.auxiliary().absent or self.z_loss:
            raise ValueError(
                f"intermediate_weight {self.intermediate_weight}, second_target_weight "
                f"{self.second_target_weight}, z_loss {self.z_loss}: only for kinds that predict "
                f"tokens; kind {self.kind} takes 0 for all"
            )
        if TASKS[self.kind].labelled == "answers" and self.smoothing:
            raise ValueError(
                f"label_smoothing {self.smoothing}: kind {self.kind} predicts places in a text, of "
                "which each row has a different number; it must be 0"
            )
        if self.glue == "STS-B" and self.smoothing:
            raise ValueError(
                f"label_smoothing {self.smoothing}: the labels of STS-B are scores, not classes; "
                "it must be 0"
            )

    @property
    def smoothing(self) -> float:
        """`label_smoothing`, or the task's if it is null."""
        if self.label_smoothing is None:
            return TASKS[self.kind].label_smoothing
        return self.label_smoothing

    def auxiliary(self) -> AuxiliarySpec:
        """Return the losses trained in addition to the last layer's."""
        return AuxiliarySpec(
            intermediate=self.intermediate_weight,
            second_target=self.second_target_weight,
            own_tables=self.auxiliary_tables == "own",
        )

    def search(self, beam: int | None = None) -> SearchConfig:
        """Return how the test is decoded, with another `beam` unless it is None."""
        return SearchConfig(beam=beam or self.beam, length_penalty=self.length_penalty)


class LossSums(NamedTuple):
    """Sums over the predicted tokens of one rank's share of a batch, scalars.

    `loss` is the training loss, `nll` the unsmoothed negative log-likelihood, both in nats.
    The rest is not needed in a training step and exists only without gradients: `correct` counts
    the tokens with the highest probability, `by_token` (2, token) has the `nll` of each token and
    1 if it counts, otherwise 0.
    """

    loss: Tensor
    nll: Tensor
    correct: Tensor | None
    tokens: Tensor
    by_token: Tensor | None = None


class Evaluated(NamedTuple):
    """The evaluation of a split: the sum of `nll` in nats and the number of predicted tokens."""

    nll: float
    tokens: int


def token_sums(
    logits: Float[Tensor, "token vocabulary"],
    labels: Int[Tensor, " token"],
    counted: Bool[Tensor, " token"],
    label_smoothing: float,
    z_loss: float = 0.0,
) -> LossSums:
    """Sum the losses of the `counted` tokens.

    ``loss = (1 - e) nll + e mean_v(-log p_v) + w (log sum_v exp z_v)^2`` with ``e`` the label
    smoothing (Szegedy et al. 2016, 1512.00567) and ``w`` the `z_loss`. This is the plain form,
    differentiable any number of times; training takes the same sums from `output_sums`, which never
    holds the logits of a whole batch.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = logits.log_softmax(dim=-1)
    nll = -log_probs.gather(1, labels[:, None]).squeeze(1)
    loss = nll
    if label_smoothing:
        loss = (1.0 - label_smoothing) * nll - label_smoothing * log_probs.mean(dim=-1)
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(dim=-1).square()
    return counted_sums(loss, nll, counted, lambda: logits.argmax(dim=-1) == labels)


def counted_sums(
    loss: Float[Tensor, " token"],
    nll: Float[Tensor, " token"],
    counted: Bool[Tensor, " token"],
    right: Callable[[], Bool[Tensor, " token"]],
) -> LossSums:
    """Return the sums over the `counted` tokens; `right` is called only without gradients."""
    correct = by_token = None
    if not torch.is_grad_enabled():
        correct = (right() & counted).sum()
        by_token = torch.stack([nll * counted, counted.to(nll)])
    return LossSums(
        loss=(loss * counted).sum(),
        nll=(nll.detach() * counted).sum(),
        correct=correct,
        tokens=counted.sum(),
        by_token=by_token,
    )


Sums = Callable[..., LossSums]
"""Returns the sums of (states, table, labels, counted) over tokens, such as `output_sums`; with a
cap of the logits it also takes `cap`."""


def sums_of_all_heads(
    sums: Sums,
    model: Any,
    states: Float[Tensor, "*text model"],
    labels: Int[Tensor, "*text"],
    counted: Bool[Tensor, "*text"],
    seen: list[Stream] | None,
    finish: Callable[[Tensor], Tensor] | None = None,
    documents: Int[Tensor, "batch row"] | None = None,
) -> LossSums:
    """Return the sums of only the output layer; store the losses of other heads in the heads.

    Args:
        sums: The training sums of a head; the same for all heads.
        model: A model with an output table in its embedding.
        states: The input of the output layer.
        labels: The labels to predict, in the order of the text along the last axis.
        counted: The labels that count.
        seen: The streams after the layers, from `watched`; None if no other head predicts.
        finish: Turns the states of a stack into those that the output layer reads; None if those
            are the same.
        documents: The number of the document of each label; None if each text is one document.
    """
    table, cap = model.embedding.table, model.embedding.spec.logit_cap
    sums = sums if cap is None else partial(sums, cap=cap)
    if seen is not None:
        model.auxiliary.score(
            lambda *of: sums(*of).loss, table, seen, states, labels, counted, finish, documents
        )
    return sums(states.flatten(0, -2), table, labels.flatten(), counted.flatten())


# The number of tokens whose logits exist at a time: on a CPU few enough for the cache, yet enough
# for each chunk's pass over the table's gradient (see benchmarks/README.md);
# elsewhere, few launches matter more.
CPU_TOKENS = 256
DEVICE_TOKENS = 4096


def output_sums(
    states: Float[Tensor, "token model"],
    table: Float[Tensor, "vocabulary model"],
    labels: Int[Tensor, " token"],
    counted: Bool[Tensor, " token"],
    label_smoothing: float,
    bias: Float[Tensor, " vocabulary"] | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    z_loss: float = 0.0,
) -> LossSums:
    """Return `token_sums` of ``states table^T + bias``, `capped`, `chunk` tokens at a time.

    With gradients enabled it is differentiable once: for a second derivative, use the
    logits as a whole and `token_sums`.
    """
    if is_followed():
        logits = linear(states, table)
        logits = capped(logits if bias is None else logits + bias, cap)
        return token_sums(logits, labels, counted, label_smoothing, z_loss)
    longest = chunk or (CPU_TOKENS if states.device.type == "cpu" else DEVICE_TOKENS)
    chunks = max(1, math.ceil(len(states) / longest))
    size = max(1, math.ceil(len(states) / chunks))  # nearly equal chunks
    if torch.is_grad_enabled():
        loss, nll = OutputLoss.apply(
            states, table, bias, labels, counted, label_smoothing, size, cap, z_loss
        )
        return LossSums(loss=loss, nll=nll, correct=None, tokens=counted.sum())
    parts = []
    for x, y, c in zip(states.split(size), labels.split(size), counted.split(size), strict=True):
        logits = linear(x, table)
        logits = capped(logits if bias is None else logits + bias, cap)
        parts.append(token_sums(logits, y, c, label_smoothing, z_loss))
    *sums, by_token = zip(*parts, strict=True)
    loss, nll, correct, tokens = (torch.stack(column).sum() for column in sums)
    return LossSums(loss, nll, correct, tokens, torch.cat(by_token, dim=1))


@final
class OutputLoss(torch.autograd.Function):
    """Cross-entropy of the output layer that computes its gradients in the forward pass.

    With states x_t, table E of V rows, bias b and labels y_t: ``z_t = E x_t + b`` and
    ``p_t = softmax(z_t)``. Summed over tokens t, with c_t 1 if t counts and 0 otherwise,

        nll  = sum_t c_t (-log p_t[y_t])
        loss = (1 - e) nll + e sum_t c_t mean_v(-log p_t[v])
             = nll + e sum_t c_t (z_t[y_t] - mean_v z_t[v])
             = nll + e sum_t c_t ((E[y_t] - mean_v E[v]) x_t + b[y_t] - mean_v b[v])

    with e the label smoothing (Szegedy et al. 2016, 1512.00567). The gradient with respect to z_t
    is
    ``c_t (g_t - e / V)`` with ``g_t = p_t - (1 - e) onehot(y_t)``, so that

        dx_t = c_t (E^T g_t - e mean_v E[v])
        dE   = sum_t c_t g_t x_t^T - (e / V) 1 (sum_t c_t x_t)^T
        db   = sum_t c_t g_t - (e / V) sum_t c_t

    Each chunk of tokens computes its g and discards it; the backward pass only scales dx, dE and db
    by the incoming gradient. Smoothing needs no pass over entries (token, vocabulary): see the
    last form, which has no equal where z is ``C tanh((E x + b) / C)``, C the cap; its gradient has
    the factor ``1 - (z / C)^2``. The z-loss ``w sum_t c_t Z_t^2``, ``Z_t = log sum_v exp z_t[v]``,
    multiplies p_t in g by ``1 + 2 w Z_t``. Large numbers are subtracted from each other before a
    small one is added, so that logits of 1e3 do not cost a loss of 1 any digits. Under autocast,
    products use its type, and everything else, including sums over chunks, at least float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "token model"],
        table: Float[Tensor, "vocabulary model"],
        bias: Float[Tensor, " vocabulary"] | None,
        labels: Int[Tensor, " token"],
        counted: Bool[Tensor, " token"],
        label_smoothing: float,
        chunk: int,
        cap: float | None,
        z_loss: float,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return (loss, nll), in nats; nll has no gradient."""
        device, e = states.device.type, label_smoothing
        linear_e = e if cap is None else 0.0  # the part that needs no pass over z
        narrow = torch.promote_types(states.dtype, table.dtype)
        if torch.is_autocast_enabled(device):
            narrow = torch.get_autocast_dtype(device)
        exact = torch.promote_types(table.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            weights = counted.to(exact)
            matrix, inputs = table.to(narrow), states.to(narrow)
            # With many tokens, a pass over the table costs less than it saves in the chunks.
            turned = takes_onednn(inputs, matrix) and len(states) > states.shape[1]
            columns = matrix.t().contiguous() if turned else matrix.t()
            seen = inputs * weights[:, None].to(narrow)
            mean, total = table.mean(dim=0, dtype=exact), weights @ states.to(exact)
            bias_mean = None if bias is None else bias.mean(dtype=exact)
            # Start from the contribution of smoothing to a row.
            row = -linear_e / len(table) * total
            if turned:
                d_table = row[:, None].expand(columns.shape).contiguous().t()
            else:
                d_table = row.expand(table.shape).contiguous()
            d_bias = None
            if bias is not None:
                d_bias = (-linear_e / len(table) * weights.sum()).expand(bias.shape).contiguous()
            d_states = torch.empty(states.shape, dtype=exact, device=states.device)
            losses, nlls = [], []
            for whole, x, cx, c, y, dx in zip(
                states.split(chunk),
                inputs.split(chunk),
                seen.split(chunk),
                weights.split(chunk),
                labels[:, None].split(chunk),
                d_states.split(chunk),
                strict=True,
            ):
                logits = linear(x, matrix).to(exact)
                if bias is not None:
                    logits += bias
                if cap is not None:
                    logits.div_(cap).tanh_().mul_(cap)
                g = logits.softmax(dim=-1)
                own = logits.gather(1, y)
                # log-sum-exp from the largest entry: its probability is at least 1 / V, that of
                # the label may be zero in floating point.
                peak = logits.amax(dim=-1, keepdim=True)
                log_g = g.amax(dim=-1, keepdim=True).log_()
                nll = (peak - own - log_g).squeeze(1)
                nlls.append(nll)
                if e and cap is not None:
                    nll = nll + e * (own - logits.mean(dim=-1, keepdim=True)).squeeze(1)
                elif e:
                    above = ((table[y[:, 0]].to(exact) - mean) * whole.to(exact)).sum(dim=-1)
                    if bias is not None and bias_mean is not None:
                        above += bias[y[:, 0]] - bias_mean
                    nll = nll + e * above
                if z_loss:
                    nll = nll + z_loss * (peak - log_g).square().squeeze(1)
                    g.mul_(1.0 + 2.0 * z_loss * (peak - log_g))
                losses.append(nll)
                g.scatter_(1, y, e - 1.0, reduce="add")
                if cap is not None:
                    g.sub_(e / len(table)).mul_(logits.div_(cap).square_().neg_().add_(1.0))
                if d_bias is not None:
                    d_bias.addmv_(g.t(), c)
                g = g.to(narrow)
                dx.copy_(linear(g, columns))
                add_product(d_table, g.t(), cx)
                del logits, g  # free them for the next chunk
            d_states = d_states.sub_(linear_e * mean).mul_(weights[:, None])
            loss, nll = weights @ torch.cat(losses), weights @ torch.cat(nlls)
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        ctx.save_for_backward(
            d_states.to(states.dtype), d_table.to(table.dtype).contiguous(), d_bias
        )
        ctx.mark_non_differentiable(nll)
        ctx.set_materialize_grads(False)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, d_nll: None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scale the gradients of the forward pass."""
        if torch.is_grad_enabled():
            raise no_second_derivative("the loss in chunks")
        d_states, d_table, d_bias = (
            None if found is None else d_loss * found for found in ctx.saved_tensors
        )
        return d_states, d_table, d_bias, *(None,) * 6


def add_product(
    total: Float[Tensor, "row column"], a: Float[Tensor, "row k"], b: Float[Tensor, "k column"]
) -> None:
    """``total += a b``, summed in the type of `total`."""
    if total.t().is_contiguous():
        total, a, b = total.t(), b.t(), a.t()
    if a.dtype == total.dtype and not takes_onednn(a, b.t()):
        total.addmm_(a, b)
    else:
        total += product(a, b)
