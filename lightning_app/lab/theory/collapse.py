"""Rank collapse: without a skip around attention, all tokens turn to the same direction."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, AttentionSpec, ShapingSpec
from lightning_app.blocks.block import Sizes
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.stack import Stack
from lightning_app.lab.theory.statements import Statement, seeded
from lightning_app.models.initialization import initialize
from lightning_app.models.stack import BlockStack
from lightning_app.probes.measures import token_cosines


@dataclass(frozen=True, kw_only=True)
class Skipless:
    """A sequence of attention sub-layers without skips, each after a norm."""

    dim: int = 256
    tokens: int = 32
    heads: int = 4
    depth: int = 18
    draws: int = 8


PLAIN = AttentionSpec()
PLAIN_IDENTITY = AttentionSpec(value="identity", output="identity")
SHAPED = AttentionSpec(
    shaping=ShapingSpec(), value="identity", output="identity", query_init="zeros"
)
SKIPLESS = {
    "plain, V and P random": PLAIN,
    "plain, V and P identity": PLAIN_IDENTITY,
    "shaped, V and P identity": SHAPED,
}
SAS = "sas, whole blocks"


def skipless_attention(spec: AttentionSpec, setting: Skipless) -> Attention:
    """Return attention with the same initial values as inside a block."""
    attention = Attention(spec, setting.dim, setting.heads, 0.0)
    initialize(attention)
    for part in (attention.query, attention.key, attention.value):
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, gain=2**-0.5)
    if spec.query_init == "zeros":
        nn.init.zeros_(attention.query.weight)
    return attention


@torch.no_grad()
def skipless_cosines(spec: AttentionSpec, setting: Skipless) -> list[float]:
    """Return the mean token cosine of the input and after each of `depth` sub-layers."""
    norm = build_norm("layer_norm", setting.dim)
    x = torch.randn(1, setting.tokens, setting.dim)
    mask, real = full_mask(setting.tokens, x.device), torch.ones(1, setting.tokens).bool()
    cosines = [token_cosines(x, real).item()]
    for _ in range(setting.depth):
        attention = skipless_attention(spec, setting)
        u = norm(x)
        x, _ = attention(*attention.queries_keys_values(u, None), mask, None)
        cosines.append(token_cosines(x, real).item())
    return cosines


@torch.no_grad()
def block_cosines(preset: str, setting: Skipless) -> list[float]:
    """Return the mean token cosines for the whole blocks of an encoder of `preset`."""
    spec = BlockConfig(preset=preset).resolve(Stack(depth=setting.depth))
    sizes = Sizes(model_dim=setting.dim, ff_dim=4 * setting.dim, num_heads=setting.heads)
    encoder = BlockStack(spec, sizes)
    initialize(encoder)
    x = torch.randn(1, setting.tokens, setting.dim)
    real = torch.ones(1, setting.tokens).bool()
    cosines: list[float] = []

    def watch(module: nn.Module, inputs: tuple[Tensor]) -> None:
        cosines.append(token_cosines(inputs[0], real).item())

    for _, block in encoder.layers:
        block.around_self.norm_input.register_forward_pre_hook(watch)
    encoder.final_norm.register_forward_pre_hook(watch)
    encoder(x, full_mask(setting.tokens, x.device))
    return cosines


def collapse(setting: Skipless) -> dict[str, list[list[float]]]:
    """Return the cosines of every draw, by kind of attention."""
    cosines: dict[str, list[list[float]]] = {}
    for number, (name, spec) in enumerate(SKIPLESS.items()):
        cosines[name] = []
        for seed in range(setting.draws):
            with seeded(7, number, seed):
                cosines[name].append(skipless_cosines(spec, setting))
    cosines[SAS] = []
    for seed in range(setting.draws):
        with seeded(11, seed):
            cosines[SAS].append(block_cosines("sas", setting))
    return cosines


def rank_collapse(cosines: Mapping[str, Sequence[Sequence[float]]]) -> Iterator[Statement]:
    """Above 0.95 after 3 layers without a skip, below 0.05 in all layers for shaped maps."""
    for name, draws in cosines.items():
        if name.startswith("plain"):
            yield Statement(
                claim=f"{name}: smallest token cosine of any draw after 3",
                source="rank collapse without a skip (Dong et al. 2021, 2103.03404)",
                predicted=1.0,
                measured=min(one[3] for one in draws),
                accepted=(0.95, 1.0 + 1e-9),
            )
        else:
            yield Statement(
                claim=f"{name}: largest token cosine of any draw through {len(draws[0]) - 1}",
                source="He & Hofmann 2023 (2311.01906), equation 6",
                predicted=0.0,
                measured=max(max(one) for one in draws),
                accepted=(-1.0, 0.05),
            )
