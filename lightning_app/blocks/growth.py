"""The growth of a stream at initialisation, and its upper bound."""

import math
from collections.abc import Sequence
from typing import Literal

from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.residual import SUM


def check_growth(blocks: Sequence[BlockSpec]) -> None:
    """Refuse streams that explode: added variance or amplification over e along a stack.

    SkipInit's 1 / sqrt(depth), ReZero's 0 and T-Fixup's small matrices pass, as do blocks
    without a skip, and any skip where a norm follows the sum.

    Raises:
        ValueError: naming the fields that make the stream explode.
    """
    for part in ("around_self", "around_ff"):
        if sum(growth(block, part) for block in blocks) > 1.0 + 1e-9:
            raise ValueError(
                "the stream explodes at initialisation: norm_placement none with an ordinary "
                "attention_skip or ff_skip, or a skip well over 1 without a norm of the sum "
                "(norm_placement post); use skipless attention, attention_branch and ff_branch "
                "that start at 1 / sqrt(depth) or less, or preset t_fixup"
            )


def growth(block: BlockSpec, part: Literal["around_self", "around_ff"]) -> float:
    """Return the variance that a branch adds to the stream at the start, over the stream's.

    ``(branch / skip)^2`` times the squared gains of the branch's two matrices, unless a norm of
    the branch bounds it, and the ``ln skip^2`` by which a skip over 1 amplifies the stream
    itself; 0 where a norm of any sum of the block, or a missing skip, bounds the stream, and where
    a rule of a plug-in joins the two, of which nothing is known.
    """
    residual = block.around_self if part == "around_self" else block.around_ff
    # Both branches of a parallel block join the skip of the feed-forward.
    skip = block.around_ff.skip if block.layout == "parallel" else residual.skip
    sums = {block.around_self.norm_sum, block.around_cross.norm_sum, block.around_ff.norm_sum}
    if sums != {"none"} or skip.value == 0.0 or residual.rule != SUM:
        return 0.0
    # B2T's last sum takes the block's input twice.
    twice = block.bottom_to_top and part == "around_ff"
    kept = abs(skip.value) + (1.0 if twice else 0.0)
    amplified = max(0.0, math.log(kept**2))
    if not residual.unnormalized:
        return amplified
    if part == "around_self":
        attention = block.self_attention
        gains = block.init.value if attention.value == "full" else 1.0
        gains *= block.init.output if attention.output == "full" else 1.0
    else:
        gains = block.init.ff**2
    return (residual.branch.value * gains / kept) ** 2 + amplified
