"""Positions, one file each; those imported here are registered wherever a model is."""

from lightning_app.blocks.placed import Places
from lightning_app.models.positions import learned, relative, rope, sinusoidal
from lightning_app.models.positions.base import POSITIONS, Positions

__all__ = ["POSITIONS", "Places", "Positions", "learned", "relative", "rope", "sinusoidal"]
