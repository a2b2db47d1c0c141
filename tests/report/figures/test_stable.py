"""The maps over rates and warm-ups."""

import re

import numpy as np
import pytest

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
RATES = [1e-3, 2e-3, 4e-3]
AXES = {SEED: [1, 2, 3], PRESET: ["post_ln", "sas"], WARMUP: [0, 60], RATE: RATES}
ENTROPY = 4.5


def outcome(axes):
    """Post-LN without warm-up stalls at 4e-3 for all seeds and at 2e-3 for one; sas never."""
    bare = axes[PRESET] == "post_ln" and axes[WARMUP] == 0
    if bare and (axes[RATE] == 4e-3 or (axes[RATE] == 2e-3 and axes[SEED] == 2)):
        return ENTROPY
    return 2.0 + axes[SEED] / 10 + axes[RATE]


def test_the_map_holds_means_and_counts(make_grid, draw):
    drawn = draw(make_grid(outcome, AXES, curves=False).folder)
    table = drawn.table("rate_by_warmup").set_index(["variant", "warmup", "lr"])
    assert len(table) == 12
    for (preset, warmup, lr), row in table.iterrows():
        ends = [outcome({PRESET: preset, WARMUP: warmup, RATE: lr, SEED: s}) for s in (1, 2, 3)]
        assert row["loss"] == pytest.approx(np.mean(ends))
        assert row["stalled"] == ends.count(ENTROPY)
        assert row["n"] == 3
    text = drawn.svg("rate_by_warmup")
    shown = re.findall(r"<!-- (.+?) -->", text, flags=re.DOTALL)
    assert sorted(words for words in shown if words.startswith("×")) == ["× 1/3", "× 3/3"]
    assert drawn.by_name["rate_by_warmup"].lr is None


def test_the_scale_ends_at_the_entropy(make_grid, draw):
    """A point where all runs stalled has the colour of the top, all others another one."""
    drawn = draw(make_grid(outcome, AXES, curves=False).folder)
    text = drawn.svg("rate_by_warmup")
    tiles = dict(
        re.findall(r"<title>(.+?), mean [^<]*</title>.*?fill: (#\w+)", text, flags=re.DOTALL)
    )
    assert len(tiles) == 12
    top = tiles.pop("post_ln, warm-up 0, lr 0.004")
    assert top == "#fee838"  # the last colour of cividis
    assert top not in tiles.values()


def test_stalled_everywhere(make_grid, draw):
    drawn = draw(make_grid(lambda a: ENTROPY, AXES, curves=False).folder)
    assert set(drawn.table("rate_by_warmup")["loss"]) == {ENTROPY}


def test_points_without_a_run_stay_empty(make_grid, draw):
    def missing(axes):
        return "waiting" if axes[RATE] == 2e-3 and axes[WARMUP] == 60 else outcome(axes)

    table = draw(make_grid(missing, AXES, curves=False).folder).table("rate_by_warmup")
    empty = table[table["n"] == 0]
    assert set(zip(empty["warmup"], empty["lr"], strict=True)) == {(60, 2e-3)}
    assert empty["loss"].isna().all()


@pytest.mark.parametrize("rates", [[4e-3], None])
def test_one_rate_has_none(make_grid, draw, rates):
    axes = {key: value for key, value in AXES.items() if key != RATE}
    axes |= {RATE: rates} if rates else {}
    fake = make_grid(lambda a: outcome({RATE: 4e-3, **a}), axes, curves=False)
    assert "rate_by_warmup" not in draw(fake.folder).names


def test_pruned_grids_have_none(make_grid, draw):
    """Where bad runs were ended early, none of them could have stalled."""
    fake = make_grid(outcome, AXES, curves=False)
    fake.prune(0)
    names = draw(fake.folder).names
    assert "loss_by_rate" in names
    assert "rate_by_warmup" not in names
