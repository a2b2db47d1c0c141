"""The loss against the learning rate, which a grid of several rates opens with."""

import re
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.collections import PathCollection

from lightning_app.report.figures import need
from lightning_app.report.figures.sheet import Part, drawn_slices
from lightning_app.report.page import Report, page
from lightning_app.report.results import read_results
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, keep, write_report

RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
AXES = {SEED: [1, 2, 3], PRESET: ["post_ln", "pre_ln", "sas"], WARMUP: [0, 60], RATE: RATES}


def outcome(axes):
    """A parabola in the octaves of the rate; warm-up moves that of Post-LN by an octave."""
    helped = axes[PRESET] == "post_ln" and axes[WARMUP] == 60
    octaves = np.log2(axes[RATE] / 1e-3) - (1 if helped else 0)
    loss = 2.0 + 0.25 * octaves**2 + 0.01 * axes[SEED]
    return 4.5 if loss > 3.5 else loss


def test_dots_are_the_losses_of_the_runs_and_lines_their_means(make_grid, draw):
    fake = make_grid(outcome, AXES, curves=False)
    drawn = draw(fake.folder, "loss_by_rate")
    table = drawn.table("loss_by_rate")
    runs = table[table["mark"] == "run"].set_index("run")
    assert sorted(runs.index) == sorted(cell["name"] for cell in fake.cells)
    for cell in fake.cells:
        assert runs.loc[cell["name"], "value"] == pytest.approx(outcome(cell["axes"]))
    means = table[table["mark"] == "mean"]
    assert len(means) == 3 * 2 * 5
    for _, row in means.iterrows():
        point = {PRESET: row["variant"], WARMUP: row["warmup"], RATE: row["lr"]}
        ends = [outcome({**point, SEED: seed}) for seed in (1, 2, 3)]
        assert row["value"] == pytest.approx(np.mean(ends))


def rings(folder):
    """The rings of each panel, of all runs."""
    grid = read_results(folder)
    (drawn,) = need.loss_by_rate(Part(grid=grid, group="all", lr=None, cells=grid.finished))
    return {
        axes.get_title(): [
            np.asarray(ring.get_offsets()).tolist()
            for ring in axes.findobj(PathCollection)
            if isinstance(ring, PathCollection) and 90 in ring.get_sizes()
        ]
        for axes in drawn.figure.axes
    }


def test_few_rates_have_numbers_which_do_not_overlap(make_grid):
    """With nine rates in four octaves matplotlib also labels the small ticks."""
    rates = [1e-3 * 2 ** (step / 2) for step in range(9)]
    axes = {**AXES, SEED: [1], PRESET: ["post_ln", "pre_ln", "sas", "b2t"], RATE: rates}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    (drawn,) = need.loss_by_rate(Part(grid=grid, group="all", lr=None, cells=grid.finished))
    drawn.figure.canvas.draw()
    for panel in drawn.figure.axes:
        ticks = [*panel.xaxis.get_ticklabels(), *panel.xaxis.get_ticklabels(minor=True)]
        labels = [label for label in ticks if label.get_visible() and label.get_text()]
        spans = sorted((box.x0, box.x1) for box in (e.get_window_extent() for e in labels))
        assert 0 < len(spans) <= 4
        assert all(one[1] < two[0] for one, two in pairwise(spans))


def test_the_best_rates_are_ringed_unless_all_fail_and_one_of_few_arms_not_drawn(make_grid):
    found = rings(make_grid(outcome, AXES, curves=False).folder)
    for variant, moved in (("post_ln", 2e-3), ("pre_ln", 1e-3), ("sas", 1e-3)):
        assert found[variant] == [[pytest.approx([1e-3, 2.02]), pytest.approx([moved, 2.02])]]

    def stalls(axes):
        bare = axes[PRESET] == "post_ln" and axes[WARMUP] == 0
        return 4.5 if bare else outcome(axes)

    found = rings(make_grid(stalls, AXES, curves=False, name="stalls").folder)
    counts = {variant: len(ringed) for variant, ringed in found.items()}
    assert counts == {"post_ln": 0, "pre_ln": 1, "sas": 1}
    best = {8e-3: 1.9}
    fake = make_grid(lambda a: best.get(a[RATE]) or outcome(a), AXES, curves=False, name="few")
    keep(fake, lambda at: at[RATE] != 8e-3 or at[PRESET] == "sas")
    assert {lr for _, lr in drawn_slices(read_results(fake.folder))} == {1e-3}


def test_a_small_screen_has_the_same_panels_two_in_a_row(make_grid):
    fake = make_grid(outcome, AXES, curves=False)
    text = write_report(fake.folder).read_text(encoding="utf-8")
    panels = ["post_ln", "pre_ln", "sas"]
    for place, names in ((1, ["all variants", *panels]), (2, panels)):
        wide, narrow = (
            re.findall(
                r"<!-- (all variants|post_ln|pre_ln|sas) -->",
                text.split(start)[place].partition("</svg>")[0],
            )
            for start in ('class="wide">', 'class="narrow">')
        )
        assert sorted(wide) == sorted(narrow) == names
    svg = (fake.folder / "figures" / "loss_by_rate-narrow.svg").read_text(encoding="utf-8")
    width, height = (float(side) for side in re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2])
    assert width < height * 1.35  # two rows
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_groups_with_common_rates_share_a_figure(make_grid, draw):
    kind, coupling = "model.optimizer.kind", "model.schedule.coupling"
    axes = {**AXES, PRESET: ["post_ln", "pre_ln"], RATE: [1e-3, 2e-3, 4e-3, 0.5, 1.0]}
    axes |= {kind: ["adam", "sgd"], coupling: ["decoupled", "paper"]}

    def one(point):
        if (point[kind] == "sgd") != (point[RATE] > 0.1):
            return "waiting"  # like cells that `exclude` leaves out
        if point[RATE] == (4e-3 if point[coupling] == "decoupled" else 1e-3):
            return "waiting"  # the couplings have only 2e-3 in common
        return outcome({**point, RATE: point[RATE] / (500 if point[kind] == "sgd" else 1)})

    fake = make_grid(one, axes, curves=False)
    drawn = draw(fake.folder)
    assert drawn.names[:2] == ["loss_by_rate-1", "loss_by_rate-2"]
    for number, optimizer, rates in ((1, "adam", {1e-3, 2e-3, 4e-3}), (2, "sgd", {0.5, 1.0})):
        table = drawn.table(f"loss_by_rate-{number}")
        groups = {f"{kind}={optimizer}, {coupling}={each}" for each in axes[coupling]}
        assert set(table["group"]) == groups
        assert set(table["lr"]) == rates
        assert len(table[table["mark"] == "mean"]) == 2 * 2 * 2 * 2
        svg = drawn.svg(f"loss_by_rate-{number}")
        assert svg.count("<!-- post_ln -->") == svg.count("<!-- pre_ln -->") == 2
    grid = read_results(fake.folder)
    text = page(Report(grid, sensitivity_scores(grid), drawn.out.parent), drawn.list, "")
    caption = f"n = 3 seeds, 48 finished runs; {kind}=adam, {coupling}=decoupled and {kind}=adam, "
    assert f"{caption}{coupling}=paper." in text
    folded = re.findall(r"<summary>The same for ([^<]*)</summary>", text)
    assert len(set(folded)) == 3
    unfolded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert 2 <= unfolded.count("<figure") < text.count("<figure") <= 12


THREE = [1e-3, 2e-3, 4e-3]
FEW = {SEED: [1, 2, 3], PRESET: ["post_ln", "sas"], WARMUP: [0, 60], RATE: THREE}
ENTROPY = 4.5


def stalling(axes):
    """Post-LN without warm-up stalls at 4e-3 for all seeds and at 2e-3 for one; sas never."""
    bare = axes[PRESET] == "post_ln" and axes[WARMUP] == 0
    if bare and (axes[RATE] == 4e-3 or (axes[RATE] == 2e-3 and axes[SEED] == 2)):
        return ENTROPY
    return 2.0 + axes[SEED] / 10 + axes[RATE]


def test_the_map_holds_means_and_counts_on_a_scale_that_ends_at_the_entropy(make_grid, draw):
    drawn = draw(make_grid(stalling, FEW, curves=False).folder, "rate_by_warmup")
    table = drawn.table("rate_by_warmup").set_index(["variant", "warmup", "lr"])
    assert len(table) == 12
    for (preset, warmup, lr), row in table.iterrows():
        ends = [stalling({PRESET: preset, WARMUP: warmup, RATE: lr, SEED: s}) for s in (1, 2, 3)]
        assert row["loss"] == pytest.approx(np.mean(ends))
        assert row["stalled"] == ends.count(ENTROPY)
        assert row["n"] == 3
    text = drawn.svg("rate_by_warmup")
    shown = re.findall(r"<!-- (.+?) -->", text, flags=re.DOTALL)
    assert sorted(words for words in shown if words.startswith("×")) == ["× 1/3", "× 3/3"]
    assert drawn.by_name["rate_by_warmup"].lr is None
    pattern = r"<title>(.+?), mean [^<]*</title>.*?fill: (#\w+)"
    tiles = dict(re.findall(pattern, text, flags=re.DOTALL))
    assert len(tiles) == 12
    top = tiles.pop("post_ln, warm-up 0, lr 0.004")
    assert top == "#fee838"  # the last colour of cividis
    assert top not in tiles.values()


def test_points_without_a_run_stay_empty_and_pruned_grids_have_no_map(make_grid, draw):
    def missing(axes):
        return "waiting" if axes[RATE] == 2e-3 and axes[WARMUP] == 60 else stalling(axes)

    folder = make_grid(missing, FEW, curves=False).folder
    table = draw(folder, "rate_by_warmup").table("rate_by_warmup")
    empty = table[table["n"] == 0]
    assert set(zip(empty["warmup"], empty["lr"], strict=True)) == {(60, 2e-3)}
    assert empty["loss"].isna().all()
    fake = make_grid(stalling, FEW, curves=False, name="pruned")
    fake.prune(0)
    names = draw(fake.folder, "loss_by_rate", "rate_by_warmup", "forest").names
    assert "loss_by_rate" in names
    assert not {"rate_by_warmup", "forest"} & {*names}
