"""The learned gains are found by type, and named as the config names them."""

import pytest
import torch

from lightning_app.blocks.axes import BlockConfig
from lightning_app.callbacks.probes import learned_gains
from lightning_app.models.heads import ArchitectureConfig, build_model


def gains(preset: str, depth: int) -> dict[str, torch.Tensor]:
    architecture = ArchitectureConfig(
        encoder_depth=depth, decoder_depth=2, model_dim=8, ff_dim=12, num_heads=2
    )
    return dict(learned_gains(build_model(architecture, BlockConfig(preset=preset), 17, 0)))


def test_every_gain_of_a_shallow_stack_is_shown() -> None:
    quantities = ("alpha", "beta", "gamma", "attention_branch", "ff_branch")
    expected = {
        f"{quantity}/{stack}/{layer}"
        for quantity in quantities
        for stack, depth in (("encoder", 3), ("decoder", 2))
        for layer in range(1, depth + 1)
    }
    shown = gains("sas", 3)
    assert set(shown) == expected
    assert float(shown["ff_branch/encoder/1"].detach()) == pytest.approx(0.1 * (18 / 3) ** 0.5)


def test_a_deep_stack_is_shown_by_three_layers() -> None:
    layers = {int(name.rsplit("/", 1)[1]) for name in gains("sas_p", 12) if "/encoder/" in name}
    assert layers == {1, 6, 12}


@pytest.mark.parametrize("preset", ["post_ln", "pre_ln", "realformer", "parallel"])
def test_blocks_without_gains_show_none(preset: str) -> None:
    assert gains(preset, 2) == {}
