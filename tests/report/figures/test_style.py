"""Colours that everyone sees, on paper and on the dark page."""

import itertools

import numpy as np
import pytest

from lightning_app.report.figures.sheet import (
    COLOURS,
    FIXED,
    GRID,
    INK,
    MUTED,
    PAPER,
    colours,
    darken,
    warmup_colours,
)
from lightning_app.report.figures.sheet import DARK as IN_THE_DARK

DARK = "#12151a"


def matrix(*numbers: float) -> np.ndarray:
    return np.reshape(numbers, (3, 3))


# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": matrix(
        *(0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216),
        *(-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": matrix(
        *(0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413),
        *(-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": matrix(
        *(1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602),
        *(0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05) of the relative luminances, the lighter first."""
    lights = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def oklab(light: np.ndarray) -> np.ndarray:
    """Ottosson (2020), a space where equal distances look equal."""
    cones = matrix(
        *(0.4122214708, 0.5363325363, 0.0514459929, 0.2119034982, 0.6806995451, 0.1073969566),
        *(0.0883024619, 0.2817188376, 0.6299787005),
    )
    lab = matrix(
        *(0.2104542553, 0.7936177850, -0.0040720468, 1.9779984951, -2.4285922050, 0.4505937099),
        *(0.0259040371, 0.7827717662, -0.8086757660),
    )
    return lab @ np.cbrt(cones @ np.clip(light, 0, 1))


def test_the_measure_knows_black_and_white():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert oklab(linear("#ffffff"))[0] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("page", ["#ffffff", DARK])
@pytest.mark.parametrize("colour", COLOURS)
def test_each_variant_can_be_seen_on_either_page(colour, page):
    assert contrast(colour, page) >= 3


@pytest.mark.parametrize("seen", BLINDNESS.values(), ids=BLINDNESS)
def test_no_two_variants_look_alike(seen):
    """0.02 can just be distinguished side by side; lines at a distance need more."""
    for one, other in itertools.combinations(COLOURS, 2):
        distance = np.linalg.norm(oklab(seen @ linear(one)) - oklab(seen @ linear(other)))
        assert distance > 0.07, (one, other)


def test_a_preset_has_one_colour_in_every_grid():
    for names in itertools.permutations((*FIXED, "deepnorm")):
        found = colours(names)
        assert list(found) == list(names)
        assert [found[name] for name in FIXED] == list(COLOURS[: len(FIXED)])
        assert len({*found.values()}) == len(names)
    assert colours(["deepnorm", "admin"])["deepnorm"] == COLOURS[0]  # no other takes it there
    # Nor do many variants.
    names = ["post_ln", *(f"variant_{i}" for i in range(9))]
    found = colours(names)
    assert list(found.values()).count(found["post_ln"]) == 1


@pytest.mark.parametrize("count", range(1, 8))
def test_warmups_have_different_colours(count):
    warmups = list(range(0, 100 * count, 100))
    found = warmup_colours(warmups)
    assert list(found) == warmups
    assert len({*found.values()}) == count
    assert found[warmups[-1]] == warmup_colours([0, 60])[60]


def test_a_dark_figure_keeps_its_colours_and_changes_ink_and_paper():
    from matplotlib.colors import to_hex, to_rgba_array
    from matplotlib.figure import Figure

    figure = Figure(facecolor=PAPER)
    axes = figure.subplots()
    axes.set_facecolor(PAPER)
    (line,) = axes.plot([1, 2], color=INK)
    (other,) = axes.plot([2, 1], color=COLOURS[0])
    dots = axes.scatter([1, 2], [1, 2], c=[COLOURS[1], MUTED], edgecolors=PAPER, alpha=0.5)
    text = axes.set_title("title", color=INK)
    rule = axes.axhline(1.0, color=GRID)
    darken(figure)
    assert to_hex(figure.get_facecolor()) == to_hex(axes.get_facecolor()) == IN_THE_DARK[PAPER]
    assert to_hex(line.get_color()) == to_hex(text.get_color()) == IN_THE_DARK[INK]
    assert to_hex(rule.get_color()) == IN_THE_DARK[GRID]
    assert other.get_color() == COLOURS[0]
    faces, (edge,) = to_rgba_array(dots.get_facecolor()), to_rgba_array(dots.get_edgecolor())
    assert [to_hex(face) for face in faces.tolist()] == [COLOURS[1].lower(), IN_THE_DARK[MUTED]]
    assert {face[3] for face in faces.tolist()} == {0.5}
    assert to_hex(edge.tolist()) == IN_THE_DARK[PAPER]
