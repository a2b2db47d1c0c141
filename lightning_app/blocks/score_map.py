"""From scores to weights by the definition: the reference of every fast form, used by probes.

The fast forms are PyTorch's `scaled_dot_product_attention` and `attend_plainly` in `kernels`, and
`tiling.Softmax` for maps that are never stored whole.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.blocks.masks import Mask


def own_scores(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    mask: Mask,
) -> Float[Tensor, "batch head query key"]:
    """``Q K^T / sqrt(d_k) + B``, unmasked, in float32 at least; B is the bias of the positions."""
    kept = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(kept) @ key.to(kept).transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores if mask.score_bias is None else scores + mask.score_bias


def softmax_input(
    scores: Float[Tensor, "*batch head query key"], mask: Mask, divisor: float = 1.0
) -> Float[Tensor, "*batch head query key"]:
    """``Z / divisor`` and the weights of keys, if the mask has any; unmasked."""
    logits = scores / divisor
    return logits if mask.log_weights is None else logits + mask.log_weights


def softmax_map(
    scores: Float[Tensor, "batch head query key"], mask: Mask, divisor: float = 1.0
) -> Float[Tensor, "batch head query key"]:
    """``softmax(Z / divisor)`` over the keys that a query may see; zeros where it sees none."""
    logits = softmax_input(scores, mask, divisor).masked_fill(
        ~mask.allowed, torch.finfo(scores.dtype).min
    )
    return logits.softmax(dim=-1).masked_fill(~mask.allowed, 0.0)
