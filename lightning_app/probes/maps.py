"""The attention maps of one sentence, head by head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention
from lightning_app.blocks.score_map import softmax_map
from lightning_app.data.batching import MaskedBatch, TranslationBatch
from lightning_app.models.transformer import stacks
from lightning_app.objectives.base import Objective
from lightning_app.probes.probe import untouched
from lightning_app.probes.taps import scores


def longest_sentence(
    batch: TranslationBatch | MaskedBatch, pad: int
) -> TranslationBatch | MaskedBatch:
    """Return the longest row of a batch, the first of those, as a batch without padding."""
    if isinstance(batch, MaskedBatch):
        return batch._replace(
            tokens=batch.tokens[:1],
            positions=batch.positions.new_zeros(1),
            labels=batch.labels[:1],
            index=batch.index[:1],
        )
    lengths = [(text != pad).sum(dim=1) for text in (batch.source, batch.target)]
    row = int((lengths[0] + lengths[1]).argmax())
    source, target = (int(each[row]) for each in lengths)
    return batch._replace(
        source=batch.source[row : row + 1, :source],
        target=batch.target[row : row + 1, :target],
        index=batch.index[row : row + 1],
    )


@torch.no_grad()
def attention_maps(
    model: nn.Module, objective: Objective, sentence: TranslationBatch | MaskedBatch
) -> dict[str, Tensor]:
    """Return the softmax maps of a batch of one row: (layer, head, query, key), float32 on the CPU.

    Named ``encoder``, ``decoder`` and ``cross``. In evaluation mode, before shaping; NaN where a
    query may not see a key. The model stays as it was.
    """
    found: dict[str, list[Tensor]] = {}
    handles = []
    for name, stack in stacks(model).items():
        for block in dict.fromkeys(block for _, block in stack.layers):
            watched = {name: block.self_attention}
            if block.cross_attention is not None:
                watched["cross"] = block.cross_attention
            for key, attention in watched.items():
                hook = _keep(found.setdefault(key, []))
                handles.append(attention.register_forward_hook(hook))
    try:
        with untouched(model):
            objective.logits(model, sentence)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.stack(maps).float().cpu() for name, maps in found.items()}


def _keep(maps: list[Tensor]) -> Callable[..., None]:
    def hook(module: Attention, args: Any, output: Any) -> None:
        mask, _, total = scores(args, output[1])
        weights = softmax_map(total, mask, module.spec.score_divisor)
        maps.append(weights.masked_fill(~mask.allowed, torch.nan)[0])

    return hook
