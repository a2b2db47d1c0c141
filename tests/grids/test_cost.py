"""What `plan --probe` measures."""

from pathlib import Path

import torch
import yaml

from lightning_app.config.config import resolve
from lightning_app.grids.program import seconds_per_step


def test_a_few_steps_of_a_linear_schedule_are_measured(cache: str) -> None:
    """The schedule is that of the whole run: its decay begins after the steps measured."""
    tree = yaml.safe_load(Path("ablations/base/synthetic_mlm.yaml").read_text())
    tree["model"]["architecture"] |= {"encoder_depth": 1, "model_dim": 8, "num_heads": 2}
    tree["data"]["cache"] = cache
    before = torch.get_num_threads()
    assert seconds_per_step(resolve(tree, "test"), steps=3) > 0
    assert torch.get_num_threads() == before == 1
