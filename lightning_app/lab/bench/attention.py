"""Time only attention maps: from queries, keys and values to outputs and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_app.blocks.kernels.choose import (
    Form,
    attend,
    attend_with_carry,
    attend_with_sums,
    attention_form,
)
from lightning_app.blocks.kernels.stored import MapGains
from lightning_app.blocks.masks import Mask, causal_mask, full_mask
from lightning_app.lab.bench.compare import Contender
from lightning_app.lab.bench.measure import Work


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Sizes of a chain of attention maps; `tokens` counts those of a batch."""

    length: int = 512
    tokens: int = 4096
    heads: int = 4
    head_dim: int = 64
    depth: int = 1
    causal: bool = True
    device: str = "cpu"
    precision: str = "32"

    @property
    def rows(self) -> int:
        return max(1, self.tokens // self.length)


class AttentionInputs(NamedTuple):
    """Leaf tensors of one layer, ``(batch, token, head * dim)`` like the outputs of projections."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor
    """The gradient of the layer's output, ``(batch, head, token, dim)``."""


FORMS: tuple[Form, ...] = ("plain", "stored", "reversible", "blocked")
Forward = Callable[[list[AttentionInputs], Maps, Mask], list[Tensor]]


def attention_work(maps: Maps, forward: Forward) -> Work:
    """Return one forward and backward pass of `forward` over random queries, keys and values."""
    torch.manual_seed(1)
    dtype = torch.bfloat16 if maps.precision == "bf16" else torch.float32
    shape = (maps.rows, maps.length, maps.heads * maps.head_dim)
    layers = []
    for _ in range(maps.depth):
        query, key, value, upstream = torch.randn((4, *shape), device=maps.device, dtype=dtype)
        for leaf in (query, key, value):
            leaf.requires_grad_().register_post_accumulate_grad_hook(drop)
        layers.append(AttentionInputs(query, key, value, split(upstream, maps)))
    make_mask = causal_mask if maps.causal else full_mask
    mask = make_mask(maps.length, torch.device(maps.device))

    def run() -> None:
        outputs = forward(layers, maps, mask)
        torch.autograd.backward(outputs, [layer.upstream for layer in layers])

    return Work(run)


def drop(leaf: Tensor) -> None:
    """Free a gradient at once: in a model the projection below would consume it."""
    leaf.grad = None


def split(x: Tensor, maps: Maps) -> Tensor:
    """View ``(batch, token, head * dim)`` as ``(batch, head, token, dim)``."""
    return x.unflatten(-1, (maps.heads, -1)).transpose(1, 2)


def heads(layer: AttentionInputs, maps: Maps) -> tuple[Tensor, Tensor, Tensor]:
    return split(layer.query, maps), split(layer.key, maps), split(layer.value, maps)


def unit_gains(maps: Maps, value: Tensor) -> list[Tensor]:
    shape, how = (maps.heads, 1, 1), {"device": value.device, "dtype": value.dtype}
    return [torch.ones(shape, **how, requires_grad=True) for _ in range(3)]


def plain(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """``softmax(Q K^T / sqrt(d_k) + mask) V``."""
    return [attend(*heads(layer, maps), mask, 0.0) for layer in layers]


def shaped(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """``(alpha I + beta A - gamma C) V`` as the package computes it."""
    outputs = []
    for layer in layers:
        query, key, value = heads(layer, maps)
        outputs.append(attend(query, key, value, mask, 0.0, MapGains(*unit_gains(maps, value))))
    return outputs


def shaped_literally(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """The same, but with the whole shaped map in memory, as in the authors' code."""
    outputs = []
    for layer in layers:
        query, key, value = heads(layer, maps)
        scores = query @ key.transpose(-2, -1) * maps.head_dim**-0.5
        scores = scores.masked_fill(~mask.allowed, torch.finfo(scores.dtype).min)
        alpha, beta, gamma = unit_gains(maps, value)
        identity = torch.eye(maps.length, device=value.device, dtype=value.dtype)
        centre = mask.centre.to(value.dtype)
        shaped_map = alpha * identity + beta * scores.softmax(-1) - gamma * centre
        outputs.append(shaped_map @ value)
    return outputs


def residual(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """``softmax(Z_n) V``, ``Z_n = Q K^T / sqrt(d_k) + Z_{n-1}``, as the package computes it."""
    outputs, carry = [], None
    for layer in layers:
        output, carry = attend_with_carry(*heads(layer, maps), mask, 0.0, carry, 1.0)
        outputs.append(output)
    return outputs


def residual_literally(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """The same formula, taken literally: autograd keeps every map."""
    outputs, total = [], None
    for layer in layers:
        query, key, value = heads(layer, maps)
        scores = (query @ key.transpose(-2, -1)).float() * maps.head_dim**-0.5
        total = scores if total is None else total + scores
        logits = total.masked_fill(~mask.allowed, torch.finfo(total.dtype).min)
        outputs.append(logits.softmax(-1).to(value.dtype) @ value)
    return outputs


def residual_sums(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """Residual attention through sums of queries and of keys."""
    outputs, carry = [], None
    for layer in layers:
        output, carry = attend_with_sums(*heads(layer, maps), mask, 0.0, carry, 1.0)
        outputs.append(output)
    return outputs


def in_form(form: Form) -> Forward:
    """Return residual attention in `form`, independent of the policy; it can be pickled."""
    return partial(_forced, form)


def _forced(form: Form, layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    with attention_form(form):
        return residual(layers, maps, mask)


def contender(name: str, maps: Maps, forward: Forward) -> Contender:
    return Contender(name, partial(attention_work, maps, forward))


def single_forms(maps: Maps) -> list[Contender]:
    """Return the maps of one layer, SDPA first."""
    return [
        contender("plain (SDPA)", maps, plain),
        contender("shaped", maps, shaped),
        contender("shaped, literal", maps, shaped_literally),
    ]


def chain_forms(maps: Maps) -> list[Contender]:
    """Return the chains of `maps.depth` layers, SDPA without a chain first."""
    return [
        contender("plain (SDPA)", maps, plain),
        contender("residual scores, literal", maps, residual_literally),
        contender("residual scores, as chosen", maps, residual),
        *(contender(f"residual scores, {form}", maps, in_form(form)) for form in FORMS),
        contender("residual, sums of Q and K", maps, residual_sums),
    ]
