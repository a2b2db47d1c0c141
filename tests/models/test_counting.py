"""Parameters are counted without a value drawn, and as the built model has them."""

import subprocess
import sys

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.models.initialization import count_parameters


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["encoder", "encoder_decoder"])
def test_the_count_is_that_of_the_built_model(preset: str, kind: str) -> None:
    architecture = ArchitectureConfig(
        kind="encoder" if kind == "encoder" else "encoder_decoder",
        decoder_depth=3,
        positions="learned",
        max_positions=9,
        model_dim=16,
        ff_dim=24,
        num_heads=2,
        encoder_depth=2,
    )

    def build() -> torch.nn.Module:
        return build_model(architecture, BlockConfig(preset=preset), 11, 0)

    before = torch.get_rng_state()
    count = count_parameters(build)
    assert torch.equal(torch.get_rng_state(), before)
    assert count == sum(p.numel() for p in build().parameters())


def test_counting_imports_no_compiler() -> None:
    code = (
        "import sys\n"
        "from lightning_app.blocks.config import BlockConfig\n"
        "from lightning_app.models.initialization import count_parameters\n"
        "from lightning_app.models.heads import ArchitectureConfig, build_model\n"
        "count_parameters(lambda: build_model(ArchitectureConfig(), BlockConfig(), 11, 0))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
