"""Figures: the same bytes for the same runs, every seed in them, nothing outside the canvas."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest

from lightning_app.analysis.figures import (
    ALL_POINTS,
    COLOURS,
    FEWEST_POINTS,
    MOST_PANELS,
    POINTS,
    _thinned,
    _wrapped,
    drawn_slices,
    write_figures,
)
from lightning_app.analysis.runs import read_grid

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"


def draw(folder: Path, out: Path) -> dict[str, str]:
    drawings = write_figures(read_grid(folder), out)
    return {drawing.kind: drawing.path.read_text(encoding="utf-8") for drawing in drawings}


def test_settings_of_matplotlib_stay_as_they_were(make_grid, outcome, tmp_path):
    before = dict(matplotlib.rcParams)
    draw(make_grid(outcome, {SEED: [1], WARMUP: [0, 60]}).folder, tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_figures_carry_no_date_and_no_absolute_path(make_grid, outcome, tmp_path):
    figures = draw(make_grid(outcome).folder, tmp_path)
    assert set(figures) == {"final", "train/nll", "val/nll"}
    for text in figures.values():
        ElementTree.fromstring(text)
        assert "<dc:date>" not in text
        assert str(tmp_path) not in text


def test_every_variant_has_its_colour(make_grid, outcome, tmp_path):
    figures = draw(make_grid(outcome).folder, tmp_path)
    for text in figures.values():
        for colour in COLOURS[:3]:
            assert colour.lower() in text


def test_every_seed_is_drawn(make_grid, outcome, tmp_path):
    """A marker for each run, a larger cross for each that stalled."""
    text = draw(make_grid(outcome).folder, tmp_path)["final"]
    uses = re.findall(r'<use xlink:href="#(\w+)"[^>]*stroke: #ffffff', text)
    assert len(uses) == 30
    assert sorted(uses.count(name) for name in set(uses)) == [5, 5, 10, 10]


@pytest.mark.parametrize("variants", [1, 6])
def test_nothing_is_drawn_outside_the_canvas(make_grid, tmp_path, variants):
    presets = [f"variant_{i}" for i in range(variants - 1)] + [
        "a_variant_with_a_very_long_name+x=y"
    ]
    axes = {SEED: [1, 2], PRESET: presets, WARMUP: [0, 100, 500, 4000]}
    folder = make_grid(lambda a: 2.0 + a[SEED] / 9, axes).folder
    for text in draw(folder, tmp_path).values():
        root = ElementTree.fromstring(text)
        width, height = (float(root.attrib[key].removesuffix("pt")) for key in ("width", "height"))
        placed = re.findall(r"<!-- .+? -->\s*<g [^>]*translate\(([\d.-]+) ([\d.-]+)\)", text)
        assert len(placed) > 4 + variants
        for x, y in placed:
            assert 0 <= float(x) < width
            assert 0 < float(y) <= height


def test_long_curves_are_thinned_evenly_on_the_log_scale():
    steps = list(range(1, 20_001))
    kept = _thinned(steps)
    assert len(kept) <= POINTS + 1
    assert kept[:10] == steps[:10]
    assert kept[-1] == 20_000
    assert kept == sorted(set(kept))
    assert _thinned([3, 5, 9]) == [3, 5, 9]


def test_no_more_panels_are_drawn_than_a_page_can_hold(make_grid):
    """Whole combinations of the other axes, in their order; the first one in any case."""
    presets, widths = ["post_ln", "pre_ln", "sas"], list(range(100, 100 + MOST_PANELS // 3 + 9))
    axes = {SEED: [1], PRESET: presets, "model.architecture.model_dim": widths}
    grid = read_grid(make_grid(lambda a: 2.0, axes, curves=False).folder)
    slices = drawn_slices(grid)
    assert [len(cells) for cells in slices.values()] == [3] * (MOST_PANELS // 3)
    assert [group for group, _ in slices] == [
        f"model.architecture.model_dim={width}" for width in widths[: MOST_PANELS // 3]
    ]
    many = {SEED: [1], PRESET: [f"v{i}" for i in range(MOST_PANELS + 1)]}
    grid = read_grid(make_grid(lambda a: 2.0, many, curves=False, name="many").folder)
    assert [len(cells) for cells in drawn_slices(grid).values()] == [MOST_PANELS + 1]


def test_single_curves_have_fewer_points_where_there_are_many(make_grid, tmp_path):
    """A page of thousands of curves stays small; the curve of the mean keeps its points."""
    most = ALL_POINTS // (ALL_POINTS // POINTS + 100)
    longest = []
    for name, seeds in (("few", 2), ("many", ALL_POINTS // POINTS + 100)):
        fake = make_grid(lambda a: 2.0, {SEED: list(range(seeds))}, curves=False, name=name)
        rows = "".join(f"{step},{4 + step % 2}\n" for step in range(1, POINTS + 1))
        for cell in fake.cells:
            (fake.run(cell) / "metrics.csv").write_text(f"step,train/nll\n{rows}")
        text = draw(fake.folder, tmp_path / name)["train/nll"]
        lines = re.findall(r'<path d="(M [^"]+)"[^>]*stroke-opacity: 0.2', text)
        assert len(lines) == seeds
        longest.append(max(line.count("L ") for line in lines) + 1)
        means = re.findall(r'<path d="(M [^"]+)"[^>]*stroke-width: 1.9', text)
        assert max(mean.count("L ") for mean in means) > most
    few, many = longest
    assert POINTS <= few <= POINTS + 1
    assert FEWEST_POINTS < many <= most + 2  # the last point is kept in any case


def test_long_names_are_broken_and_kept():
    name = "sas+shaped_attention={alpha:1}+norm=rms_norm"
    lines = _wrapped(name).split("\n")
    assert "".join(lines) == name
    assert max(map(len, lines)) <= 24


def test_no_curve_and_no_loss_is_no_figure(make_grid, tmp_path):
    folder = make_grid(lambda axes: "waiting").folder
    assert draw(folder, tmp_path) == {}
    folder = make_grid(lambda axes: 2.0, {SEED: [1]}, curves=False, name="bare").folder
    assert set(draw(folder, tmp_path)) == {"final"}
