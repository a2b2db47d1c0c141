"""The place of the ablations that ship with the package."""

from importlib.resources import files
from pathlib import Path


def shipped_folder() -> Path:
    """Return the folder of the shipped ablations: inside the wheel, or beside it in a checkout."""
    package = Path(str(files("lightning_app")))
    inside = package / "shipped_ablations"
    return inside if inside.is_dir() else package.parent / "ablations"
