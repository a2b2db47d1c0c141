"""A block as the config names it: a preset, then single axes set on top of it."""

from dataclasses import dataclass, replace
from typing import Literal

from lightning_app.blocks.attention import AttentionSpec, Projection, ShapingSpec
from lightning_app.blocks.block import BlockSpec, Layout
from lightning_app.blocks.norm import Norm
from lightning_app.blocks.presets import ABSENT, PRESETS, Stack, StackSpec, carry_scores
from lightning_app.blocks.residual import Gain, ResidualSpec

Placement = Literal["post", "pre", "none"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A preset and the axes changed on top of it; an axis left out is as the preset has it."""

    preset: str = "pre_ln"
    """A name that `ablate blocks` lists."""
    norm_placement: Placement | None = None
    """post: norm(x + f(x)); pre: x + f(norm(x)) and a final norm; none: x + f(x)."""
    norm: Literal["layer_norm", "rms_norm"] | None = None
    """The norm, wherever the placement puts one."""
    residual_attention: Literal["none", "sum", "mean"] | None = None
    """Carry scores from layer to layer; mean divides the logits of layer n by n."""
    shaped_attention: ShapingSpec | None = None
    """The weights of A' = alpha I + beta A - gamma C in self-attention."""
    value_projection: Projection | None = None
    """The value projection of self-attention, in every layer."""
    output_projection: Projection | None = None
    """The output projection of self-attention, in every layer."""
    layout: Layout | None = None
    """Self-attention and feed-forward in turn, or in one sum."""
    attention_skip: Gain | None = None
    """The gain of the skip around self-attention; 0 removes it."""
    ff_skip: Gain | None = None
    """The gain of the skip around the feed-forward; in the parallel layout, of the one skip."""
    attention_branch: Gain | None = None
    """The gain of the self-attention branch."""
    ff_branch: Gain | None = None
    """The gain of the feed-forward branch."""

    def resolve(self, stack: Stack) -> StackSpec:
        """Return the specification of every layer of `stack`.

        Raises:
            ValueError: for an unknown preset or a combination without meaning; the message names
                the field.
        """
        if self.preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"preset '{self.preset}' is not one of {known}")
        spec = PRESETS[self.preset](stack)
        final_norm = spec.final_norm
        if self.norm_placement is not None:
            final_norm = "layer_norm" if self.norm_placement == "pre" else "none"
        if self.norm is not None and final_norm != "none":
            final_norm = self.norm
        blocks = tuple(self._block(block) for block in spec.blocks)
        spec = StackSpec(blocks=blocks, final_norm=final_norm)
        if self.residual_attention is not None:
            spec = carry_scores(spec, self.residual_attention)
        return spec

    def _block(self, block: BlockSpec) -> BlockSpec:
        around_self = self._residual(block.around_self, self.attention_skip, self.attention_branch)
        around_cross = self._residual(block.around_cross, None, None)
        around_ff = self._residual(block.around_ff, self.ff_skip, self.ff_branch)
        layout = self.layout or block.layout
        if layout != block.layout and self.attention_skip is None:
            # Two skips become one, or one becomes two.
            skip = ABSENT if layout == "parallel" else block.around_ff.skip
            around_self = replace(around_self, skip=skip)
        return replace(
            block,
            around_self=around_self,
            around_cross=around_cross,
            around_ff=around_ff,
            self_attention=self._attention(block.self_attention),
            layout=layout,
        )

    def _residual(self, residual: ResidualSpec, skip: Gain | None, branch: Gain | None):
        match self.norm_placement:
            case "post":
                residual = replace(residual, norm_input="none", norm_sum="layer_norm")
            case "pre":
                residual = replace(residual, norm_input="layer_norm", norm_sum="none")
            case "none":
                residual = replace(residual, norm_input="none", norm_sum="none")
            case None:
                pass
        return replace(
            residual,
            norm_input=self._kind(residual.norm_input),
            norm_sum=self._kind(residual.norm_sum),
            skip=skip or residual.skip,
            branch=branch or residual.branch,
        )

    def _kind(self, norm: Norm) -> Norm:
        return norm if norm == "none" or self.norm is None else self.norm

    def _attention(self, attention: AttentionSpec) -> AttentionSpec:
        if self.shaped_attention is not None:
            # The centre cancels the map at the start only where the scores are zero.
            zeros = self.shaped_attention.gamma != 0.0
            attention = replace(
                attention,
                shaping=self.shaped_attention,
                query_init="zeros" if zeros else "xavier",
            )
        return replace(
            attention,
            value=self.value_projection or attention.value,
            output=self.output_projection or attention.output,
        )
