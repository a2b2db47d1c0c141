"""Random encoders in the setting of the theorems of Xiong et al. 2020 (2002.04745), section 3.3.

The letters are those of `lemmas`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.analysis.statistics import mean
from lightning_app.blocks.attention import Attention
from lightning_app.blocks.block import Sizes
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.blocks.stack import Stack
from lightning_app.models.transformer import BlockStack
from lightning_app.probes.measures import squared_norms
from lightning_app.theory.statements import POST, PRE, seeded


@dataclass(frozen=True, kw_only=True)
class TheorySetting:
    """One head, all matrices d x d, n Gaussian tokens of squared norm d, `draws` random draws."""

    dim: int = 512
    tokens: int = 16
    draws: int = 12
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    classes: int = 500
    """Rows of the output matrix E, of entries N(0, 1/d)."""


def theoretical_encoder(preset: str, depth: int, dim: int) -> BlockStack:
    """Return a stack of our blocks with the matrices of the theorems.

    W_Q = W_K = 0, so that attention is the mean over tokens times W_V; no output projection; W_V,
    W1 and W2 are N(0, 1/d), biases zero, norms one and zero.
    """
    config = BlockConfig(preset=preset, output_projection="identity")
    spec = config.resolve(Stack(depth=depth))
    encoder = BlockStack(spec, Sizes(model_dim=dim, ff_dim=dim, num_heads=1)).requires_grad_(False)
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=dim**-0.5)
            nn.init.zeros_(module.bias)
    for module in encoder.modules():
        if isinstance(module, Attention):
            nn.init.zeros_(module.query.weight)
            nn.init.zeros_(module.key.weight)
    return encoder


@dataclass(frozen=True)
class Draw:
    """One random encoder, input and loss."""

    squared: list[list[float]]
    """``||x||^2 / d`` of each token. Pre-LN: of x_0 to x_L. Post-LN: of what the last norm of each
    layer reads, x^{post,5}_1 to x^{post,5}_L."""
    gradients: list[float]
    """Norm of the gradient by W2 in each requested layer; the last layer comes last."""
    through_norm: float
    """Length of the gradient below the last norm over its length above it."""


def random_draw(
    preset: str, depth: int, setting: TheorySetting, *, every_layer: bool = False
) -> Draw:
    """Return one draw for the loss of one position: the cross-entropy of its logits ``x E^T``."""
    encoder = theoretical_encoder(preset, depth, setting.dim)
    x = torch.randn(1, setting.tokens, setting.dim)
    classes = torch.randn(setting.classes, setting.dim) * setting.dim**-0.5
    position = int(torch.randint(setting.tokens, ()))
    label = torch.randint(setting.classes, (1,))

    # The inputs of the norms are the stream, in every form that a block may use.
    norms: list[nn.Module] = []
    weights: list[Tensor] = []
    for _, block in encoder.layers:
        norms.append(block.around_ff.norm_sum if preset == POST else block.around_self.norm_input)
        weights.append(block.feed_forward.outer.weight)
    if preset == PRE:
        norms.append(encoder.final_norm)
    weights = weights if every_layer else weights[-1:]
    for weight in weights:
        weight.requires_grad_(True)

    passed: list[tuple[Tensor, Tensor]] = []

    def watch(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        passed.append((inputs[0], output))

    for norm in norms:
        norm.register_forward_hook(watch)
    states = encoder(x, full_mask(setting.tokens, x.device))
    loss = F.cross_entropy(states[:, position] @ classes.T, label)
    below, above, *gradients = torch.autograd.grad(loss, [*passed[-1], *weights])
    real = torch.ones(1, setting.tokens, dtype=torch.bool)
    return Draw(
        [squared_norms(stream.detach(), real).tolist() for stream, _ in passed],
        [gradient.norm().item() for gradient in gradients],
        (below.norm() / above.norm()).item(),
    )


@dataclass(frozen=True)
class Draws:
    """All draws of the theoretical setting."""

    setting: TheorySetting
    last: dict[str, dict[int, list[Draw]]]
    """By preset and depth."""
    every: dict[str, list[Draw]]
    """By preset at half the largest depth, gradients of every layer."""

    def gradients(self, preset: str) -> dict[int, list[float]]:
        """Return each draw's norm of the last W2's gradient, by depth."""
        return {L: [one.gradients[-1] for one in found] for L, found in self.last[preset].items()}

    def squared(self, preset: str) -> list[float]:
        """Return the mean ``||x||^2 / d`` of each layer at the largest depth."""
        drawn = self.last[preset][self.setting.depths[-1]]
        layers = zip(*[[mean(tokens) for tokens in one.squared] for one in drawn], strict=True)
        return [mean(layer) for layer in layers]


def draw_all(setting: TheorySetting) -> Draws:
    """Draw encoders with both norm placements at every depth."""
    last: dict[str, dict[int, list[Draw]]] = {}
    every: dict[str, list[Draw]] = {}
    for number, preset in enumerate((POST, PRE)):
        last[preset] = {depth: [] for depth in setting.depths}
        every[preset] = []
        for seed in range(setting.draws):
            for depth in setting.depths:
                with seeded(number, depth, seed):
                    last[preset][depth].append(random_draw(preset, depth, setting))
            with seeded(number, 1, seed):
                depth = setting.depths[-1] // 2
                every[preset].append(random_draw(preset, depth, setting, every_layer=True))
    return Draws(setting, last, every)
