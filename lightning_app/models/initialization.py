"""Every initial value, in one function."""

import torch
from torch import nn

from lightning_app.blocks.attention import Attention, IdentityPlus, Shaping
from lightning_app.blocks.residual import LearnedGain
from lightning_app.models.embedding import Embedding


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Set every parameter of `model`. Run once, after the whole model is built.

    ====================================  =====================================================
    parameter                             initial value
    ====================================  =====================================================
    matrices of linear layers             Xavier uniform, U(+-sqrt(6 / (fan_in + fan_out)))
    query, key, value of attention        the same with gain 1/sqrt(2): one fused matrix of the
                                          three would get it, as in fairseq
    query of shaped attention with C      zero, so that A = C at the start (He & Hofmann 2023)
    W of ``identity_plus``                zero
    biases                                zero
    norm gain, norm bias                  one, zero
    embedding                             N(0, 1/d), the row of the padding zero
    learned gains, alpha, beta, gamma     the value in the specification
    ====================================  =====================================================
    """
    for module in model.modules():
        match module:
            case nn.Linear():
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            case Embedding():
                nn.init.normal_(module.tokens.weight, std=module.model_dim**-0.5)
                module.tokens.weight[module.tokens.padding_idx] = 0.0
            case nn.LayerNorm():
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            case nn.RMSNorm():
                nn.init.ones_(module.weight)
            case LearnedGain():
                module.gain.fill_(module.start)
            case Shaping():
                for name, value in module.start.items():
                    getattr(module, name).fill_(value)
    # After the loop: what attention wants of its own matrices overrides the rule for all.
    for module in model.modules():
        if isinstance(module, Attention):
            for projection in (module.query, module.key, module.value):
                if isinstance(projection, nn.Linear):
                    nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
            if module.spec.query_init == "zeros":
                nn.init.zeros_(module.query.weight)
        elif isinstance(module, IdentityPlus):
            nn.init.zeros_(module.change.weight)
