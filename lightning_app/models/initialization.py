"""Every initial value, in one function."""

import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import AnchoredProjection, Attention
from lightning_app.blocks.block import Block, InitSpec
from lightning_app.blocks.halting import Halting
from lightning_app.blocks.learned import LearnedScalars
from lightning_app.models.embedding import Embedding, OutputTable, SegmentTable
from lightning_app.models.positions.learned import LearnedLayerTable, LearnedTable


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Set every parameter of `model`. Run once, after the whole model is built.

    ====================================  =====================================================
    parameter                             initial value
    ====================================  =====================================================
    matrices of linear layers             Xavier uniform, U(+-sqrt(6 / (fan_in + fan_out)))
    matrices of a block                   Xavier uniform or normal with the gains of its
                                          `InitSpec`: 1/sqrt(2) for query, key and value unless
                                          the preset says otherwise
    query of shaped attention with C      zero, so that A = C at the start (He & Hofmann 2023)
    ``orthogonal`` value and output       a random orthogonal matrix
    W_0 of ``orthogonal_plus``            the same, a buffer; tied: the output's is the
                                          transpose of the value's
    dW of ``identity_plus`` and
    ``orthogonal_plus``                   zero
    biases                                zero, of the halting unit `HaltingSpec.bias`
    norm gain, norm bias                  one, zero
    embedding                             N(0, 1/d) times the embedding gain of the stack, the
                                          row of the padding zero
    tables of auxiliary heads             N(0, 1/d)
    learned positions, steps, segments    N(0, 0.02^2)
    learned scalars                       their own start (`LearnedScalars.reset`)
    ====================================  =====================================================
    """
    for module in model.modules():
        match module:
            case nn.Linear():
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            case Embedding():
                std = module.spec.gain * module.model_dim**-0.5
                nn.init.normal_(module.tokens.weight, std=std)
                module.tokens.weight[module.tokens.padding_idx] = 0.0
            case OutputTable():
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            case LearnedTable() | LearnedLayerTable() | SegmentTable():
                nn.init.normal_(module.weight, std=0.02)
            case nn.LayerNorm():
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            case nn.RMSNorm():
                nn.init.ones_(module.weight)
            case LearnedScalars():
                module.reset()
    # After the loop: these override the general rule.
    for module in model.modules():
        if isinstance(module, Block):
            initialize_block(module, module.spec.init)
        elif isinstance(module, Halting):
            nn.init.constant_(module.unit.bias, module.spec.bias)


def initialize_block(block: Block, init: InitSpec) -> None:
    """Set the matrices of `block` by the gains of `init`."""

    def xavier(part: nn.Module | None, gain: float) -> None:
        if not isinstance(part, nn.Linear):
            return
        if init.distribution == "normal":
            nn.init.xavier_normal_(part.weight, gain=gain)
        elif gain != 1.0:  # at gain 1 the general rule has drawn it already
            nn.init.xavier_uniform_(part.weight, gain=gain)

    for attention in block.modules():
        if not isinstance(attention, Attention):
            continue
        xavier(attention.query, init.query_key)
        xavier(attention.key, init.query_key)
        if attention.spec.value == "full":
            xavier(attention.value, init.value)
        if attention.spec.output == "full":
            xavier(attention.output, init.output)
        if attention.spec.query_init == "zeros":
            nn.init.zeros_(attention.query.weight)
        orthogonalize(attention)
    for part in (block.feed_forward.inner, block.feed_forward.gate, block.feed_forward.outer):
        xavier(part, init.ff)


def orthogonalize(attention: Attention) -> None:
    """Set the orthogonal matrices of value and output, and set dW to zero."""
    matrices: list[Tensor] = []
    kinds = (attention.spec.value, attention.spec.output)
    for kind, part in zip(kinds, (attention.value, attention.output), strict=True):
        if isinstance(part, AnchoredProjection):
            nn.init.zeros_(part.change.weight)
        if kind == "orthogonal_plus":
            assert isinstance(part, AnchoredProjection)
            assert part.initial is not None
            matrices.append(nn.init.orthogonal_(part.initial))
        elif kind == "orthogonal":
            assert isinstance(part, nn.Linear)
            matrices.append(nn.init.orthogonal_(part.weight))
    if attention.spec.tied:
        value, output = matrices
        output.copy_(value.T)
