"""The named variants: each is a pure function from a stack to its specification.

A new combination of existing parts is one function in `published`, whose order is that of all
lists. Letters: x the stream,
f a sub-layer, N a norm, SA self-attention, CA cross-attention, FF the feed-forward, A the attention
map, C its centre, L the depth of the stack, l or n the layer from 1.
"""

from lightning_app.blocks.presets.registry import ABSENT, PRESETS, Preset, preset

from lightning_app.blocks.presets import published  # isort: skip

__all__ = ["ABSENT", "PRESETS", "Preset", "preset", "published"]
