"""Files of figures: the same bytes for the same runs, complete, inside the canvas, no more."""

import re
import xml.etree.ElementTree as ElementTree
from typing import get_args
from urllib.parse import unquote

import matplotlib
import pandas as pd
import pytest

from lightning_app.report.figures import sheet
from lightning_app.report.figures.sheet import LETTERS, MOST_PANELS, drawn_slices, thinned, wrapped
from lightning_app.report.results import read_results
from tests.report.conftest import PRESET, RATE, SEED, WARMUP

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


@pytest.mark.slow
@pytest.mark.pdf_files
def test_same_runs_same_bytes(make_grid, draw, outcome):
    folder = make_grid(outcome, {SEED: [1, 2], WARMUP: [0, 60], RATE: [1e-3, 4e-3]}).folder
    first, second = draw(folder, out="first"), draw(folder, out="second")
    assert first.names == second.names != []
    for name in first.names:
        for suffix in (".svg", ".pdf", ".csv"):
            content = (first.out / f"{name}{suffix}").read_bytes()
            assert content == (second.out / f"{name}{suffix}").read_bytes()
            assert not re.search(rb"CreationDate|ModDate|<dc:date>", content)
            assert str(first.out.parent).encode() not in content
        document = (first.out / f"{name}.pdf").read_bytes()
        assert document.startswith(b"%PDF-1")
        assert b"/FontFile2" in document  # TrueType; journals refuse type 3
        assert b"/Type3" not in document


def test_figures_come_by_question_and_settings_stay_as_they_were(make_grid, draw, outcome):
    before = dict(matplotlib.rcParams)
    folder = make_grid(outcome, {SEED: [1, 2], WARMUP: [0, 60], RATE: [1e-3, 4e-3]}).folder
    drawn = draw(folder)
    assert dict(matplotlib.rcParams) == before
    places = [get_args(sheet.Question).index(drawing.question) for drawing in drawn.list]
    assert places == sorted(places)
    assert [(d.path.stem, d.lr) for d in drawn.list[:5]] == [
        ("forest", None),
        ("loss_by_rate", None),
        ("rate_by_warmup", None),
        ("warmup_effect", 1e-3),
        ("training", 1e-3),
    ]
    assert drawn.by_name["rate_by_warmup"].lr is None
    for drawing in drawn.list:
        assert not drawing.title.endswith(".")
        assert drawing.text.endswith(".")
        assert drawing.limits.endswith(".")


def test_figures_that_are_no_more_are_removed(make_grid, draw, outcome):
    axes = {SEED: [1, 2], WARMUP: [0, 60], RATE: [1e-3, 4e-3]}
    first = draw(make_grid(outcome, axes).folder)
    (first.out / "loss_by_warmup_mine.svg").write_text("mine")
    (first.out / "training-3.svg").write_text("of an earlier version")
    axes[RATE] = [1e-3]
    second = draw(make_grid(outcome, axes, name="one_rate").folder)
    wanted = {f"{name}{suffix}" for name in second.names for suffix in (".svg", ".pdf", ".csv")}
    wanted |= {"forest-narrow.svg", "loss_by_warmup_mine.svg"}
    assert {path.name for path in first.out.iterdir()} == wanted
    assert "loss_by_warmup" in second.names
    assert not {"rate_by_warmup", "loss_by_rate"} & {*second.names}


def test_every_run_is_linked_and_described(make_grid, draw, outcome):
    fake = make_grid(outcome)
    drawn = draw(fake.folder)
    root = ElementTree.fromstring(drawn.svg("loss_by_warmup"))
    found = {}
    for link in root.iter(f"{SVG}a"):
        (title,) = link.iter(f"{SVG}title")
        there = drawn.out / unquote(link.attrib[LINK])
        found[there.resolve()] = title.text
    assert set(found) == {fake.run(cell).resolve() for cell in fake.cells}
    for cell in read_results(fake.folder).cells:
        told = found[cell.folder.resolve()]
        assert told.startswith(f"{cell.variant}, warm-up {cell.warmup}, lr 0.004, seed {cell.seed}")
        assert f"{cell.loss:.4f}" in told
        assert ("stalled" in told) == (cell.state == "diverged")


def test_words_of_a_name_stay_words(make_grid, draw):
    presets = ['<b>&"', "$x^2$"]
    drawn = draw(make_grid(lambda a: 2.0, {SEED: [1], PRESET: presets}).folder)
    for name in drawn.names:
        ElementTree.fromstring(drawn.svg(name))
    root = ElementTree.fromstring(drawn.svg("loss_by_warmup"))
    titles = [str(title.text).split(", ")[0] for title in root.iter(f"{SVG}title")]
    assert titles == presets


@pytest.mark.parametrize("variants", [1, 6])
def test_nothing_is_drawn_outside_the_canvas(make_grid, draw, variants):
    presets = [f"variant_{i}" for i in range(variants - 1)]
    presets.append("a_variant_with_a_very_long_name+x=y")
    axes = {SEED: [1, 2], PRESET: presets, WARMUP: [0, 100, 500, 4000], RATE: [5e-4, 1e-3]}
    folder = make_grid(lambda a: 2.0 + a[SEED] / 9, axes, curves=variants == 1).folder
    drawn = draw(folder)
    for name in drawn.names:
        text = drawn.svg(name)
        root = ElementTree.fromstring(text)
        width, height = (float(root.attrib[key].removesuffix("pt")) for key in ("width", "height"))
        placed = re.findall(r"<!-- .+? -->\s*<g [^>]*translate\(([\d.-]+) ([\d.-]+)\)", text)
        assert len(placed) > 4 + variants
        for x, y in placed:
            assert 0 <= float(x) < width
            assert 0 < float(y) <= height


def test_no_more_panels_are_drawn_than_a_page_can_hold(make_grid, draw, monkeypatch):
    presets, widths = ["post_ln", "pre_ln", "sas"], list(range(100, 100 + MOST_PANELS // 3 + 9))
    axes = {SEED: [1], PRESET: presets, "model.architecture.model_dim": widths}
    grid = read_results(make_grid(lambda a: 2.0, axes, curves=False).folder)
    drawn = drawn_slices(grid)
    assert [len(cells) for cells in drawn.values()] == [3] * (MOST_PANELS // 3)
    assert [group for group, _ in drawn] == [
        f"model.architecture.model_dim={width}" for width in widths[: MOST_PANELS // 3]
    ]
    many = {SEED: [1], PRESET: [f"v{i}" for i in range(MOST_PANELS + 1)]}
    grid = read_results(make_grid(lambda a: 2.0, many, curves=False, name="many").folder)
    assert [len(cells) for cells in drawn_slices(grid).values()] == [MOST_PANELS + 1]
    # All figures are of the combinations that are drawn.
    monkeypatch.setattr(sheet, "MOST_PANELS", 2)
    axes = {SEED: [1], WARMUP: [0, 60], "model.architecture.model_dim": [64, 65, 66]}
    drawn = draw(make_grid(lambda a: 2.0, axes, curves=False, name="few").folder)
    groups = {f"model.architecture.model_dim={width}" for width in (64, 65)}
    assert {drawing.group for drawing in drawn.list} == groups | {"all"}
    assert len(drawn.list) == 5  # what decides, and loss and resources of each


def test_long_curves_are_thinned_evenly_on_the_log_scale():
    steps = list(range(1, 20_001))
    kept = thinned(steps, 300)
    assert len(kept) <= 301
    assert kept[:10] == steps[:10]
    assert kept[-1] == 20_000
    assert kept == sorted(set(kept))
    assert thinned([3, 5, 9], 300) == [3, 5, 9]


@pytest.mark.parametrize(
    "name", ["sas", "sas+shaped_attention={alpha:1,beta:1}+norm=rms_norm", "x" * 70, "a_b" * 30]
)
def test_long_names_are_broken_and_kept(name):
    lines = wrapped(name).split("\n")
    assert "".join(lines) == name
    assert max(map(len, lines)) <= LETTERS
    assert all(lines)
    if name.startswith("sas+"):  # where its parts meet
        assert lines[0] == "sas+"
        assert lines[-1] == "norm=rms_norm"


def test_nothing_finished_is_no_figure(make_grid, draw):
    assert draw(make_grid(lambda axes: "waiting").folder).list == []
    bare = draw(make_grid(lambda axes: 2.0, {SEED: [1]}, curves=False, name="bare").folder)
    assert bare.names == ["loss_by_warmup", "resources"]


DEGENERATE = {
    "one seed": {SEED: [1], PRESET: ["post_ln", "sas"], WARMUP: [0, 60], RATE: [1e-3, 4e-3]},
    "no warm-up axis": {SEED: [1, 2], PRESET: ["post_ln", "sas"], RATE: [1e-3, 4e-3]},
    "no seed axis": {PRESET: ["post_ln", "sas"], WARMUP: [0, 60]},
}
ENDS = {
    "learned": lambda axes: 2.0 + axes.get(SEED, 0) / 10,
    "all stalled": lambda axes: 4.5,
    "not finite": lambda axes: None if axes.get(WARMUP, 0) == 0 else 2.0,
    "no loss at all": lambda axes: None,
    "half missing": lambda axes: "failed" if axes.get(PRESET) == "sas" else 2.0,
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("axes", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_degenerate_grids_are_drawn_as_far_as_they_go(make_grid, draw, axes, end):
    grid = read_results(make_grid(end, axes, curves=False, sensitivity={}).folder)
    drawn = draw(grid.folder)
    first = [name for name in drawn.names if name in ("loss_by_warmup", "loss_by_rate")]
    runs = pd.concat(drawn.table(name) for name in first)
    assert sorted(runs[runs["mark"] == "run"]["run"]) == sorted(cell.name for cell in grid.finished)


def test_a_run_that_is_ok_without_a_loss_is_not_drawn(make_grid, draw):
    fake = make_grid(lambda axes: 2.0, {SEED: [1, 2], WARMUP: [0, 60], RATE: [1e-3, 4e-3]})
    fake.edit(0, {"val/nll": None}, parameters=None, device=None)
    drawn = draw(fake.folder)
    table = drawn.table("loss_by_rate")
    assert fake.cells[0]["name"] not in set(table["run"].dropna())
    assert len(table[table["mark"] == "run"]) == 7
    assert drawn.table("rate_by_warmup")["n"].sum() == 7
