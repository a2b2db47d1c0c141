"""What the grid needs of the rest of the package. Heavy: only the processes of cells import it."""

from typing import Any

from lightning_app.ablation.trial import run_cell
from lightning_app.config import cell_id, data_module, resolve

__all__ = ["cell_id", "prepare", "resolve", "run_cell"]


def prepare(config: dict[str, Any]) -> None:
    """Have the corpus of a resolved data config ready on disk."""
    data_module(config).prepare_data()
