"""What the grid needs of the rest of the package. Heavy: only the processes of cells import it."""

from lightning_app.ablation.trial import run_cell
from lightning_app.config import cell_id, resolve
from lightning_app.data.prepare import prepare

__all__ = ["cell_id", "prepare", "resolve", "run_cell"]
