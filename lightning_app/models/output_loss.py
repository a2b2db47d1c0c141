"""The output layer and its loss in one, without the logits of a whole batch."""

import math
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.kernels.stored import no_second_derivative
from lightning_app.blocks.linear import linear, product, takes_onednn
from lightning_app.models.loss import LossSums, token_sums

# The number of tokens whose logits exist at a time: on a CPU few enough for the cache, yet enough
# for each chunk's pass over the table's gradient (see benchmarks/output_loss.py);
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
) -> LossSums:
    """Return `token_sums` of the logits ``states table^T + bias``, `chunk` tokens at a time.

    With gradients enabled it is differentiable once: for a second derivative, use the
    logits as a whole and `token_sums`.
    """
    longest = chunk or (CPU_TOKENS if states.device.type == "cpu" else DEVICE_TOKENS)
    chunks = max(1, math.ceil(len(states) / longest))
    size = max(1, math.ceil(len(states) / chunks))  # nearly equal chunks
    if torch.is_grad_enabled():
        loss, nll = OutputLoss.apply(states, table, bias, labels, counted, label_smoothing, size)
        return LossSums(loss=loss, nll=nll, correct=None, tokens=counted.sum())
    parts = []
    for x, y, c in zip(states.split(size), labels.split(size), counted.split(size), strict=True):
        logits = linear(x, table)
        parts.append(token_sums(logits if bias is None else logits + bias, y, c, label_smoothing))
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
    last form. Large numbers are subtracted from each other before a small one is added, so that
    logits of 1e3 do not cost a loss of 1 any digits. Under autocast, products use its type,
    and everything else, including sums over chunks, uses at least float32.
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
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return (loss, nll), in nats; nll has no gradient."""
        device, e = states.device.type, label_smoothing
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
            row = -e / len(table) * total
            if turned:
                d_table = row[:, None].expand(columns.shape).contiguous().t()
            else:
                d_table = row.expand(table.shape).contiguous()
            d_bias = None
            if bias is not None:
                d_bias = (-e / len(table) * weights.sum()).expand(bias.shape).contiguous()
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
                g = logits.softmax(dim=-1)
                own = logits.gather(1, y)
                # log-sum-exp from the largest entry: its probability is at least 1 / V, that of
                # the label may be zero in floating point.
                peak = logits.amax(dim=-1, keepdim=True)
                nll = (peak - own - g.amax(dim=-1, keepdim=True).log_()).squeeze(1)
                nlls.append(nll)
                if e:
                    above = ((table[y[:, 0]].to(exact) - mean) * whole.to(exact)).sum(dim=-1)
                    if bias is not None and bias_mean is not None:
                        above += bias[y[:, 0]] - bias_mean
                    nll = nll + e * above
                losses.append(nll)
                g.scatter_(1, y, e - 1.0, reduce="add")
                if d_bias is not None:
                    d_bias.addmv_(g.t(), c)
                g = g.to(narrow)
                dx.copy_(linear(g, columns))
                add_product(d_table, g.t(), cx)
                del logits, g  # free them for the next chunk
            d_states = d_states.sub_(e * mean).mul_(weights[:, None])
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
        return d_states, d_table, d_bias, None, None, None, None


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
