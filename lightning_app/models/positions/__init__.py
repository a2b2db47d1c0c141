"""Positions, one file each; those imported here are registered wherever a model is."""

from lightning_app.blocks.placed import Places
from lightning_app.models.positions.base import POSITIONS, Positions

