"""The attention maps of one sentence, head by head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention
from lightning_app.blocks.block import Block, Call
from lightning_app.blocks.score_map import softmax_map
from lightning_app.models.transformer import stacks
from lightning_app.probes.activation_hooks import scores
from lightning_app.probes.probe import untouched
from lightning_app.tasks.base import Task


@torch.no_grad()
def attention_maps(model: nn.Module, task: Task, sentence: Any) -> dict[str, Tensor]:
    """Return the softmax maps of a batch of one row: (layer, head, query, key), float32 on the CPU.

    Named ``encoder``, ``decoder`` and ``cross``. In evaluation mode, before shaping; NaN where a
    query may not see a key, and of a token that has halted before the layer. The model is not
    changed. A layer is one call of a block: a shared block has as many layers as steps.
    """
    found: dict[str, list[Tensor]] = {}
    handles = []
    calls: list[Call] = []
    for name, stack in stacks(model).items():
        for block in dict.fromkeys(block for _, block in stack.layers):
            handles.append(block.register_forward_pre_hook(_note(calls)))
            watched = {name: block.self_attention}
            if block.cross_attention is not None:
                watched["cross"] = block.cross_attention
            for key, attention in watched.items():
                hook = _keep(found.setdefault(key, []), calls)
                handles.append(attention.register_forward_hook(hook, with_kwargs=True))
    try:
        with untouched(model):
            task.logits(model, sentence)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.stack(maps).float().cpu() for name, maps in found.items()}


def _note(calls: list[Call]) -> Callable[..., None]:
    def hook(module: Block, args: tuple[Any, Any, Call]) -> None:
        calls[:] = [args[2]]

    return hook


def _keep(maps: list[Tensor], calls: list[Call]) -> Callable[..., None]:
    def hook(module: Attention, args: Any, kwargs: Any, output: Any) -> None:
        mask, _, total = scores(module, args, kwargs, output[1])
        weights = softmax_map(total, mask, kwargs["divisor"]).masked_fill(~mask.allowed, torch.nan)
        (call,) = calls
        if call.running is not None:
            weights = weights.masked_fill(~call.running[:, None, :, None], torch.nan)
        maps.append(weights[0])

    return hook
