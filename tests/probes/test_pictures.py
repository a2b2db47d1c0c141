"""The image of attention maps, read pixel by pixel."""

import numpy as np
import pytest
import torch
from matplotlib import colormaps

from lightning_app.probes.figures import GAP, HIDDEN, SQUARE, attention_image


def viridis(share: float) -> tuple[int, ...]:
    return tuple(int(255 * part) for part in colormaps["viridis"](int(255 * share))[:3])


def test_a_weight_is_a_square_of_its_colour_and_the_deepest_layer_is_on_top() -> None:
    weights = torch.tensor([[1.0, torch.nan], [0.75, 0.25]])
    plain = np.asarray(attention_image({"encoder": weights.expand(1, 1, 2, 2)}, []))
    for share in (1.0, 0.75**0.5, 0.5):
        assert (plain == viridis(share)).all(axis=-1).sum() >= (SQUARE // 2) ** 2
    assert (plain == HIDDEN).all(axis=-1).sum() == (SQUARE // 2) ** 2
    rows, columns = np.nonzero((plain == viridis(1.0)).all(axis=-1))
    hidden_rows, hidden_columns = np.nonzero((plain == HIDDEN).all(axis=-1))
    assert rows.min() == hidden_rows.min()  # the query of both is the first
    assert hidden_columns.min() == columns.min() + SQUARE // 2  # a later key
    weights = torch.stack([torch.zeros(1, 3, 3), torch.ones(1, 3, 3)])
    plain = np.asarray(attention_image({"encoder": weights}, []))
    full, empty = (np.nonzero((plain == viridis(s)).all(axis=-1))[0].min() for s in (1.0, 0.0))
    assert full + SQUARE + GAP == empty


@pytest.mark.parametrize(("layers", "heads", "rows", "columns"), [(2, 3, 2, 3), (24, 16, 6, 8)])
def test_six_layers_and_eight_heads(layers: int, heads: int, rows: int, columns: int) -> None:
    plain = np.asarray(attention_image({"encoder": torch.ones(layers, heads, 2, 2)}, []))
    squares = (plain == viridis(1.0)).all(axis=-1).sum()
    assert rows * columns == squares // SQUARE**2


def test_long_text_and_a_dead_model_are_drawn() -> None:
    maps = {name: torch.full((2, 2, 130, 130), torch.nan) for name in ("encoder", "cross")}
    plain = np.asarray(attention_image(maps, ["word " * 200, ""]))
    assert (plain == HIDDEN).all(axis=-1).any()
    assert plain.shape[0] > np.asarray(attention_image(maps, [])).shape[0]
