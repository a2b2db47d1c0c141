"""Training steps and attention, as ratios: presets, forms of attention, and other libraries.

    python benchmarks/bench.py --presets sas realformer      # against pre_ln
    python benchmarks/bench.py --attention --length 1024     # one map, and a chain of maps
    python benchmarks/bench.py --peers --json peers.json     # needs pip install -e '.[bench]'

Contenders run in interleaved rounds. Ratios are to the first row, under 1 is better: medians of
the ratios within a round with their quartiles, and peak memory beyond the model. `share` is the
part of the time that the matrix products would take at the rate of the first line.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import (
    Comparison,
    Contender,
    How,
    Rates,
    Result,
    Work,
    as_mappings,
    compare,
    machine,
    matmul_rates,
    rate_in_force,
    same_library,
)
from benchmarks.peers import (
    Setting,
    TorchTranslator,
    XTranslator,
    bert_peer,
    masked,
    preset_work,
    residual_encoder,
    translation_peer,
)
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import (
    Form,
    attend,
    attend_with_carry,
    attend_with_sums,
    attention_form,
)
from lightning_app.blocks.kernels.stored import MapGains
from lightning_app.blocks.masks import Mask, causal_mask, full_mask
from lightning_app.blocks.presets import PRESETS


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


def _chained(
    attend_to: Callable[..., tuple[Tensor, Any]],
    layers: list[AttentionInputs],
    maps: Maps,
    mask: Mask,
) -> list[Tensor]:
    outputs, carry = [], None
    for layer in layers:
        output, carry = attend_to(*heads(layer, maps), mask, 0.0, carry, 1.0)
        outputs.append(output)
    return outputs


residual: Forward = partial(_chained, attend_with_carry)
"""``softmax(Z_n) V``, ``Z_n = Q K^T / sqrt(d_k) + Z_{n-1}``, as the package computes it."""
residual_sums: Forward = partial(_chained, attend_with_sums)
"""Residual attention through sums of queries and of keys."""


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


BASELINE = "pre_ln"
WORK = {True: "training step", False: "forward and backward"}


def sizes_of(setting: Setting) -> str:
    """Return the sizes of `setting` as text."""
    stacks = setting.architecture().stacks(BlockConfig())
    depth = "+".join([str(setting.depth)] * len(stacks))
    return (
        f"{depth} blocks of width {setting.width}, ff {setting.ff_dim}, {setting.heads} heads, "
        f"{setting.rows} x {setting.length} tokens"
    )


def presets(setting: Setting, names: Sequence[str], how: How) -> Iterator[Comparison]:
    """Compare presets with the baseline: a training step, then only its passes."""
    others = [name for name in names if name != BASELINE]
    for step in (True, False):
        mine = replace(setting, step=step)
        contenders = [
            Contender(name, partial(preset_work, mine, name)) for name in (BASELINE, *others)
        ]
        yield compare(f"Presets, {WORK[step]}: {sizes_of(mine)}", contenders, how)


def attention(maps: Maps, how: How) -> Iterator[Comparison]:
    """Compare the forms of a single map, causal and not, and of a chain of maps."""
    sizes = f"{maps.rows} x {maps.length} tokens, {maps.heads} heads of {maps.head_dim}"
    for causal in (True, False):
        mine = replace(maps, depth=1, causal=causal)
        seen = "causal" if causal else "all keys"
        yield compare(f"One attention map, {seen}: {sizes}", single_forms(mine), how)
    chain = chain_forms(replace(maps, causal=False))
    yield compare(f"A chain of {maps.depth} maps, all keys: {sizes}", chain, how)


def peers(setting: Setting, how: How, rates: Rates) -> Iterator[Comparison]:
    """Compare our models with the same models of other libraries, each with our weights.

    If our products use a different matrix library than theirs, everything is compared
    again with both models' linear maps on each library: the first ratio is what a user gets, the
    others show the effect of the model's form.
    """
    yield from _peers(setting, how)
    if setting.device != "cpu" or setting.precision != "32":
        return
    for library, context in same_library().items():
        with context():
            rate = rate_in_force(rates, setting.device, bf16=False)
            for comparison in _peers(setting, replace(how, rate=rate)):
                title = f"{comparison.title}; linear maps of both by {library}"
                yield replace(comparison, title=title)


def _peers(setting: Setting, how: How) -> Iterator[Comparison]:
    for step in (True, False):
        mine = replace(setting, step=step)
        contenders = [
            Contender("ours, post_ln", partial(preset_work, mine, "post_ln")),
            Contender("torch.nn.Transformer", partial(translation_peer, mine, TorchTranslator)),
            Contender("x-transformers", partial(translation_peer, mine, XTranslator)),
        ]
        yield compare(f"Translation, {WORK[step]}: {sizes_of(mine)}", contenders, how)
    for step in (True, False):
        mine = replace(masked(setting), step=step)
        body = partial(bert_peer, mine, predicted_only=True)
        contenders = [
            Contender("ours, post_ln", partial(preset_work, mine, "post_ln")),
            Contender("Hugging Face BERT", partial(bert_peer, mine, predicted_only=False)),
            Contender("the same, predicted places alone", body),
        ]
        yield compare(f"Masked tokens, {WORK[step]}: {sizes_of(mine)}", contenders, how)
    mine = replace(masked(setting), step=False)
    contenders = [
        Contender("ours, realformer", partial(residual_encoder, mine, ours=True)),
        Contender("x-transformers, residual_attn", partial(residual_encoder, mine, ours=False)),
    ]
    yield compare(
        f"Residual attention, {WORK[False]}: encoder of {sizes_of(mine)}", contenders, how
    )


def line(result: Result) -> str:
    """Return one contender as a line of the table."""
    if result.missing is not None:
        return f"  {result.name}: {result.missing}"
    assert result.seconds is not None
    assert result.time is not None
    assert result.peak_bytes is not None
    time = f"{result.time.median:.3f} ({result.time.low:.3f} to {result.time.high:.3f})"
    share = "" if result.share is None else f", share {result.share:.2f}"
    return (
        f"  {result.name:<32} {1e3 * result.seconds.median:9.4g} ms, {time}; "
        f"{result.peak_bytes / 1e6:,.4g} MB, {result.memory:.3f}; "
        f"{result.calls:,} calls, {result.parameters:,} parameters{share}"
    )


def main() -> None:
    """Print the comparisons that are asked for, by default all, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, metavar="NAME")
    parser.add_argument("--attention", action="store_true", help="one map, and a chain of maps")
    parser.add_argument("--peers", action="store_true", help="the same models of other libraries")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("32", "bf16"), default="32")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens of a text")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens per batch")
    parser.add_argument("--depth", type=int, default=6, metavar="N", help="blocks per stack")
    parser.add_argument("--width", type=int, metavar="N", help="a multiple of 64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu = args.device == "cpu"
    width = args.width or (256 if on_cpu else 512)
    setting = Setting(
        depth=args.depth,
        width=width,
        ff_dim=2 * width,
        heads=max(2, width // 64),
        length=args.length,
        tokens=max(args.tokens or (1024 if on_cpu else 4096), args.length),
        device=args.device,
        precision=args.precision,
    )
    rates = matmul_rates(torch.device(args.device))
    rate = rate_in_force(rates, args.device, bf16=args.precision == "bf16")
    how = How(rounds=args.rounds, device=args.device, rate=rate)
    print("GFLOP/s of products:", {name: round(rate / 1e9) for name, rate in rates.items()})
    every = not (args.presets or args.attention or args.peers)
    found: list[Comparison] = []
    for asked, comparisons in (
        (args.presets, lambda: presets(setting, args.presets or list(PRESETS), how)),
        (args.attention, lambda: attention(maps_of(setting), how)),
        (args.peers, lambda: peers(setting, how, rates)),
    ):
        for comparison in comparisons() if asked or every else ():
            found.append(comparison)
            print(
                f"\n{comparison.title}, {comparison.clock}",
                *map(line, comparison.results),
                sep="\n",
            )
    if args.json is not None:
        content = {"machine": machine(args.device), "rates": rates, "comparisons": found}
        args.json.write_text(json.dumps(as_mappings(content), indent=1) + "\n", encoding="utf-8")


def maps_of(setting: Setting) -> Maps:
    """Return the sizes of the attention maps of `setting`."""
    return Maps(
        length=setting.length,
        tokens=setting.tokens,
        heads=setting.heads,
        head_dim=setting.width // setting.heads,
        depth=setting.depth,
        device=setting.device,
        precision=setting.precision,
    )


if __name__ == "__main__":
    main()
