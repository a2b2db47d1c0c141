"""Effects of factors against least squares, and the names of variants."""

# pyright: reportAttributeAccessIssue=false
# SciPy's results of tests carry their fields at run time only.

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from lightning_app.report.comparisons import effects
from lightning_app.report.results import read_results
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import write_report

PRESET, NORM, SEED = "model.block.preset", "model.block.norm", "seed_everything"
RESIDUAL, WARMUP = "model.block.residual_attention", "model.schedule.warmup_steps"
AXES = {
    SEED: [1, 2, 3, 4],
    PRESET: ["pre_ln", "post_ln"],
    RESIDUAL: ["none", "mean"],
    NORM: ["layer_norm", "rms_norm"],
    WARMUP: [0, 60],
}
FACTORS = {"placement": PRESET, "residual": RESIDUAL, "norm": NORM}


def levels_of(axes: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(AXES[axis].index(axes[axis]) for axis in FACTORS.values())


def noisy(axes: Mapping[str, Any]) -> float:
    """A loss with effects of every order and its own noise in each run."""
    place, residual, norm = levels_of(axes)
    need = 0.4 * place - 0.2 * residual + 0.1 * place * residual + 0.05 * place * residual * norm
    key = int("".join(map(str, (place, residual, norm, axes[SEED], int(axes[WARMUP] > 0)))))
    noise = np.random.default_rng(key).normal(0, 0.02)
    return 2.5 + need * (axes[WARMUP] == 0) + float(noise)


def add(folder: Any, **fields: Any) -> None:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | fields, sort_keys=False))


def test_effects_are_those_of_least_squares(make_grid: Any) -> None:
    """Seed by seed, every factor coded -1 and 1: an effect of k factors is 2^k coefficients."""
    grid = make_grid(noisy, AXES, curves=False)
    add(grid.folder, factors=FACTORS)
    found = read_results(grid.folder)
    scores = sensitivity_scores(found)
    losses = {(*levels_of(cell.axes), cell.seed, cell.warmup): cell.loss for cell in found.cells}
    corners = list(itertools.product((0, 1), repeat=3))
    subsets = [s for k in (1, 2, 3) for s in itertools.combinations(range(3), k)]
    rows = {e.factors: e for e in effects(found, scores) if e.measure == "delta"}
    assert len(rows) == len(subsets) == 7
    coded = [
        [math.prod(2 * corner[f] - 1 for f in s) for s in ((), *subsets)] for corner in corners
    ]
    by_seed = []
    for seed in AXES[SEED]:
        delta = [losses[*c, seed, 0] - losses[*c, seed, 60] for c in corners]
        by_seed.append(
            np.linalg.lstsq(np.array(coded, dtype=float), np.array(delta), rcond=None)[0]
        )
    for number, subset in enumerate(subsets, start=1):
        each = np.array(by_seed)[:, number] * 2 ** len(subset)
        effect = rows[" x ".join(list(FACTORS)[f] for f in subset)]
        test = stats.ttest_1samp(each, 0.0)
        ends = test.confidence_interval(0.95)
        assert (effect.estimate, effect.low, effect.high) == pytest.approx(
            (each.mean(), ends.low, ends.high)
        )
        assert effect.p == pytest.approx(test.pvalue)
        assert effect.seeds == 4
    assert rows["placement"].estimate == pytest.approx(0.4 + 0.05 + 0.0125, abs=0.05)
    holm = sorted(effect.p for effect in rows.values())
    assert min(e.p_holm for e in rows.values()) == pytest.approx(min(1.0, 17 * holm[0]))


def test_a_variant_without_runs_leaves_no_effect(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | str:
        return "waiting" if levels_of(axes) == (1, 0, 1) else noisy(axes)

    grid = make_grid(outcome, AXES, curves=False)
    add(grid.folder, factors=FACTORS)
    found = read_results(grid.folder)
    rows = [e for e in effects(found, sensitivity_scores(found)) if e.measure == "delta"]
    assert all(math.isnan(e.estimate) for e in rows)
    assert {e.note for e in rows} == {"1 of 8 variants have no value"}


def test_effects_of_two_seeds_or_of_missing_runs_have_no_p_value(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | str:
        last = (*levels_of(axes), axes[SEED], axes[WARMUP]) == (1, 1, 1, 4, 0)
        return "waiting" if last else noisy(axes)

    for name, made in (
        ("part", make_grid(outcome, AXES, name="part")),
        ("two", make_grid(noisy, {**AXES, SEED: [1, 2]}, name="two")),
    ):
        add(made.folder, factors=FACTORS)
        found = read_results(made.folder)
        rows = effects(found, sensitivity_scores(found))
        assert {e.measure for e in rows} == {"delta", "steps_saved"}
        assert {e.seeds for e in rows} == {3 if name == "part" else 2}
        assert all(math.isnan(e.p) and math.isnan(e.p_holm) for e in rows)
        assert {"not finished" in e.note for e in rows} == {name == "part"}


def test_the_report_has_the_effects(make_grid: Any) -> None:
    grid = make_grid(noisy, AXES, curves=False)
    add(grid.folder, factors=FACTORS, labels={RESIDUAL: ["", "residual"], NORM: ["", "rms"]})
    page = write_report(grid.folder, figures=False).read_text(encoding="utf-8")
    assert "(placement: pre_ln to post_ln; residual:" in page
    frame = pd.read_csv(grid.folder / "effects.csv")
    assert set(frame["measure"]) == {"delta", "steps_saved"}
    assert "placement x residual" in set(frame["factors"])
    variants = read_results(grid.folder).variants
    assert variants[:4] == ("pre_ln", "pre_ln+rms", "pre_ln+residual", "pre_ln+residual+rms")


def test_an_axis_that_is_no_factor_is_named_in_full_where_its_label_is_empty(
    make_grid: Any,
) -> None:
    grid = make_grid(noisy, AXES, curves=False)
    few = {name: axis for name, axis in FACTORS.items() if axis != NORM}
    add(grid.folder, factors=few, labels={NORM: ["", "rms"]})
    found = read_results(grid.folder)
    rows = effects(found, sensitivity_scores(found))
    assert {row.group for row in rows} == {f"{NORM}=layer_norm", "rms"}


def test_labels_that_no_longer_fit_are_left_out(make_grid: Any) -> None:
    grid = make_grid(noisy, AXES, curves=False)
    add(grid.folder, labels={NORM: ["one"]})
    assert read_results(grid.folder).variants[0] == "pre_ln+residual_attention=none+norm=layer_norm"


def test_an_axis_of_variants_has_an_interaction_with_its_first_value(make_grid: Any) -> None:
    """A class of one's own is compared with the package's, and its need is its own."""
    path = "model.class_path"
    axes = {PRESET: ["pre_ln", "post_ln"], path: [None, "mine.Model"], WARMUP: [0, 60]}
    axes[SEED] = [1, 2, 3]

    def loss(of: Mapping[str, Any]) -> float:
        need = 0.1 + 0.4 * (of[PRESET] == "post_ln") + 0.2 * (of[path] is not None)
        return 3.0 + 0.001 * of[SEED] + (0.0 if of[WARMUP] else need)

    grid = make_grid(loss, axes, curves=False)
    add(grid.folder, variants=[path], labels={path: ["", "mine"]}, exclude=[])
    found = read_results(grid.folder)
    assert {cell.group for cell in found.cells} == {"all"}
    assert found.variants == ("pre_ln", "pre_ln+mine", "post_ln", "post_ln+mine")
    rows = {r.variant: r for r in sensitivity_scores(found) if r.score == "interaction"}
    assert {name: round(row.estimate, 9) for name, row in rows.items() if row.values} == {
        "pre_ln+mine": 0.2,
        "post_ln": 0.4,
        "post_ln+mine": 0.6,
    }


def test_labels_name_groups_and_the_rest_of_a_factorial(make_grid: Any) -> None:
    """An axis outside the block makes groups; those of a factor are contrasted."""
    kind, coupling = "model.optimizer.kind", "model.schedule.coupling"
    axes = {
        PRESET: ["pre_ln", "post_ln"],
        kind: ["adam", "sgd"],
        coupling: ["decoupled", "paper"],
        WARMUP: [0, 60],
        SEED: [1, 2, 3],
    }

    def loss(of: Mapping[str, Any]) -> float:
        levels = [axes[key].index(of[key]) for key in (PRESET, kind, coupling)]
        need = np.dot([0.4, 0.2, 0.1], levels) + 0.05 * levels[0] * levels[2]
        return 3.0 + (0.0 if of[WARMUP] else need) + 0.01 * of[SEED] * (of[WARMUP] == 0)

    grid = make_grid(loss, axes, curves=False)
    names = {kind: ["Adam", "SGD"], coupling: ["decoupled", "coupled"]}
    add(grid.folder, labels=names, factors={"placement": PRESET, "coupling": coupling})
    found = read_results(grid.folder)
    assert {cell.group for cell in found.cells} == {
        "Adam, decoupled",
        "Adam, coupled",
        "SGD, decoupled",
        "SGD, coupled",
    }
    rows = [e for e in effects(found, sensitivity_scores(found)) if e.measure == "delta"]
    assert {(e.group, e.factors): round(e.estimate, 9) for e in rows} == {
        (group, name): value
        for group in ("Adam", "SGD")
        for name, value in {
            "placement": 0.425,
            "coupling": 0.125,
            "placement x coupling": 0.05,
        }.items()
    }


def test_an_axis_of_one_value_is_in_no_group(make_grid: Any) -> None:
    axes = {SEED: [1], PRESET: ["pre_ln"], WARMUP: [0, 60], "data.tokens_per_batch": [512]}
    assert {c.group for c in read_results(make_grid(lambda a: 2.0, axes).folder).cells} == {"all"}


def test_nats_of_two_vocabularies_have_no_effect(make_grid: Any) -> None:
    """But octaves and steps are counted alike."""
    size = "data.vocab_size"
    axes = {SEED: [1, 2, 3, 4], size: [12, 8], WARMUP: [0, 60]}
    grid = make_grid(
        lambda axes: 2.0 + axes[size] / 20 * (axes[WARMUP] == 0) + axes[SEED] / 100,
        axes,
        curves=False,
    )
    add(grid.folder, factors={"vocabulary": size})
    found = read_results(grid.folder)
    (delta,) = (row for row in effects(found, sensitivity_scores(found)) if row.measure == "delta")
    assert math.isnan(delta.estimate)
    assert f"{size} is 12 and 8" in delta.note
