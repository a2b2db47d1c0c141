"""`--threads`: the same as OMP_NUM_THREADS, which counts where the option is not given."""

import os
from collections.abc import Iterator

import pytest
import torch

from lightning_app.cli import parse_arguments
from lightning_app.commands.options import VARIABLES, use_threads
from lightning_app.grids.workers import most_threads


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    yield
    torch.set_num_threads(1)


def test_torch_and_the_cells_of_a_grid_use_this_number() -> None:
    for given, used in ((None, 1), (2, 2)):  # without it the environment counts
        use_threads(given)
        assert torch.get_num_threads() == most_threads(os.environ) == used
        assert {os.environ[name] for name in VARIABLES} == {str(used)}


@pytest.mark.parametrize(
    "words",
    [
        *(f"{name} --threads 2" for name in ("fit", "validate", "test", "predict", "run demo")),
        *(f"{name} --threads 2" for name in ("translate --run x", "generate --run x", "probe")),
    ],
)
def test_every_command_that_computes_has_it(words: str) -> None:
    args = parse_arguments(words.split())
    assert args.threads == 2
    assert not getattr(args, "words", [])
