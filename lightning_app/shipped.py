"""The files outside of the package that ship with it."""

from importlib.resources import files
from pathlib import Path


def shipped_folder() -> Path:
    """Return the folder of the shipped ablations: inside the wheel, or beside it in a checkout."""
    return _shipped("shipped_ablations", "ablations")


def recompute_program() -> Path:
    """Return the program that computes the numbers of a report again, found in the same way."""
    return _shipped("analysis/recompute_study.py", "docs/recompute_study.py")


def _shipped(in_wheel: str, in_checkout: str) -> Path:
    package = Path(str(files("lightning_app")))
    inside = package / in_wheel
    return inside if inside.exists() else package.parent / in_checkout
