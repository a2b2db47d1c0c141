"""The gains of a model's blocks, with their names in the config."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import AnchoredProjection, Attention
from lightning_app.blocks.dynamic_span import DynamicSpanMask
from lightning_app.blocks.learned import LearnedScalars
from lightning_app.blocks.residual import FixedGain, LearnedGain
from lightning_app.models.transformer import stacks
from lightning_app.probes.table import Place


def layers_by_rank(model: nn.Module) -> list[list[tuple[str, int]]]:
    """Return (stack, layer) in the order in which layers are chosen where only some can be shown.

    Layers count from 1. The last of each stack comes first, then the first, the middle, the rest.
    """
    ranks: list[list[tuple[str, int]]] = []
    for name, stack in stacks(model).items():
        depth = stack.spec.depth
        order = dict.fromkeys([depth, 1, (depth + 1) // 2, *range(1, depth + 1)])
        for rank, layer in enumerate(order):
            if rank == len(ranks):
                ranks.append([])
            ranks[rank].append((name, layer))
    return ranks


def learned_gains(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Yield every learned scalar of the blocks, of any shape.

    A gain that several sub-layers of a layer share is there once, as that of the first; those of a
    shared block are there for each layer. The two gains of a projection ``a W_0 + b dW`` are in
    `change_ratios`.
    """
    for stack_name, stack in stacks(model).items():
        for layer, block in stack.layers:
            for path, part in block.named_modules():
                if not isinstance(part, LearnedScalars):
                    continue
                owner = block.get_submodule(path.rpartition(".")[0])
                if not isinstance(owner, AnchoredProjection):
                    for name, value in part.measured():
                        yield Place(_quantity(path, name), stack_name, layer), value


def dynamic_spans(
    model: nn.Module, over_ranks: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Place, Tensor]]:
    """Yield the dynamic spans of every layer: in tokens, the mean of each head over the last batch.

    ``(head, 1, 1)``, after a step of training.

    Args:
        model: The model of this rank.
        over_ranks: Returns the sum over all ranks of a tensor, which each of them gives.
    """
    for name, stack in stacks(model).items():
        for layer, block in stack.layers:
            part = block.self_attention.span
            if isinstance(part, DynamicSpanMask):
                spans, tokens = part.sums(layer)
                *sums, number = over_ranks(torch.cat([spans, tokens[None]])).unbind()
                yield Place("span", name, layer), (torch.stack(sums) / number)[:, None, None]


def _quantity(path: str, parameter: str) -> str:
    """Return the name under which a parameter of the module at `path` in its block is shown.

    A parameter ``gain`` has the name of its module. Gains around a sub-layer are called as in the
    config: around_self.branch is attention_branch. Cross-attention's have cross_ in front. Other
    parameters there keep their whole path, as several parts may have one of the same name.
    """
    *owner, module = path.split(".")
    name = module if parameter == "gain" else parameter
    match owner:
        case [around, *inside] if around.startswith("around_"):
            place = around.removeprefix("around_").replace("self", "attention")
            last = [] if parameter == "gain" else [parameter]
            return "_".join([place, *inside, module, *last])
        case ["cross_attention", *_]:
            return f"cross_{name}"
        case _:
            return name


def change_ratios(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Yield ``|b / a|`` of each projection ``a W_0 + b dW`` that trains a or b.

    He & Hofmann 2023 (2311.01906, figure 4): the remaining b shows which value or output
    matrices the model uses. The quantities are ``value_change`` and ``output_change``.
    """
    for stack_name, stack in stacks(model).items():
        for layer, block in stack.layers:
            for name, attention in block.named_modules():
                if not isinstance(attention, Attention):
                    continue
                for part in ("value", "output"):
                    projection = getattr(attention, part)
                    if not isinstance(projection, AnchoredProjection):
                        continue
                    gains = (projection.kept, projection.departure)
                    if any(isinstance(gain, LearnedGain) for gain in gains):
                        kept, change = (_value(gain, projection.change.weight) for gain in gains)
                        place = Place(f"{_prefix(name)}{part}_change", stack_name, layer)
                        yield place, (change / kept).abs()


def _prefix(name: str) -> str:
    return "cross_" if name.startswith("cross_attention") else ""


def _value(gain: nn.Module, like: Tensor) -> Tensor:
    if isinstance(gain, LearnedGain):
        return gain.gain
    assert isinstance(gain, FixedGain)
    return like.new_tensor(gain.value)
