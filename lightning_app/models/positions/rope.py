"""Rotary positions inside self-attention."""

from typing import final

from lightning_app.blocks.placed import Places
from lightning_app.blocks.rotary import Rotation, rotation
from lightning_app.blocks.stack import StackSpec
from lightning_app.models.positions.base import POSITIONS, Place, Positions


@final
@POSITIONS.register("rope")
class Rope(Positions):
    """Su et al. 2021, RoPE (2104.09864): ``(R_i q_i) . (R_j k_j)``, which depends on i - j."""

    def check(self) -> None:
        head_dim, rest = divmod(self.model_dim, self.num_heads)
        if not rest and head_dim % 2:
            raise ValueError(
                f"positions rope: model_dim / num_heads is {head_dim}, and pairs need an even "
                "number"
            )

    def placing(self, spec: StackSpec) -> Place:
        return self._rotation

    def _rotation(self, places: Places) -> Rotation:
        return rotation(places.newest, self.model_dim // self.num_heads)
