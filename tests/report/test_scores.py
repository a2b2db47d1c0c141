"""Scores and verdicts of the small grids of `scores.yaml`, which the oracle recomputes."""

import itertools
import math
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from lightning_app.config.tree import PRESET, RATE, SEED, WARMUP
from lightning_app.report.comparisons import comparisons, effects
from lightning_app.report.limits import limits
from lightning_app.report.pairs import Score, scores_frame
from lightning_app.report.results import read_results
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import SHORT, change, keep, link, messages, write_report, written
from tests.told import told

CASES = yaml.safe_load(Path(__file__).with_name("scores.yaml").read_text(encoding="utf-8"))
LONG = {"p": PRESET, "w": WARMUP, "r": RATE, "s": SEED}
AXES = {"p": ["post_ln", "pre_ln"], "w": [0, 60], "s": [1, 2, 3]}
DRAW = random.Random(5)
DRAWN = {
    (p, w): [DRAW.uniform(1.5, 4.4) for _ in range(7)]
    for p in ("post_ln", "pre_ln", "sas", "realformer")
    for w in (0, 30, 60)
}


def value(text: str, at: Mapping[str, Any], case: Mapping[str, Any]) -> Any:
    """An expression of the table, at one point of its grid.

    i, j and k are the levels of the axes that the case lists, without rates, warm-ups and seeds.
    """
    given: dict[str, Any] = case.get("axes", {})
    axes = {LONG.get(key, key): values for key, values in given.items() if values}
    names = {short: at.get(axis) for short, axis in LONG.items()}
    names |= {"T": case.get("table"), "DRAWN": DRAWN, "log2": math.log2, "normal": normal}
    names["at"] = axes[RATE].index(at[RATE]) if RATE in axes else None
    names["x"] = next((at[axis] for axis in at if axis not in SHORT), None)
    levels = (of.index(at[axis]) for axis, of in axes.items() if axis not in (WARMUP, RATE, SEED))
    names |= zip("ijk", levels, strict=False)
    names["noise"] = random.Random(str(sorted(at.items()))).gauss(0.0, 0.02)
    return eval(text, names)


def normal(seed: int) -> float:
    return float(np.random.default_rng(seed).normal(0, 0.02))


def rows_of(found: Any, first: tuple[str, str], second: tuple[str, str], wanted: Any) -> list[Any]:
    """The row whose two fields have these values, or every row that has where one is "*"."""
    where = {key: wanted[key] for key in ("lr", "group") if key in wanted}
    where |= {key: of for key, of in (first, second) if of != "*"}
    rows = [row for row in found if all(getattr(row, k) == v for k, v in where.items())]
    assert rows
    assert len(rows) == 1 or "*" in (first[1], second[1])
    return rows


def check(row: Score, wanted: Mapping[str, Any]) -> None:
    for field, expected in wanted.items():
        found: Any = getattr(row, field, None)
        if field == "says":
            assert told(expected).search(row.note)
        elif field == "lacks":
            assert expected not in row.note
        elif field == "nan":
            assert all(math.isnan(getattr(row, name)) for name in expected.split())
        elif field == "interval":
            found = row.low, row.estimate, row.high
            assert found == pytest.approx(expected, rel=1e-7, abs=1e-6)
        elif field in ("each", "values"):
            assert [value for _, value in found] == pytest.approx(expected)
        elif isinstance(expected, list):
            assert [*found] == expected, field
        elif isinstance(expected, float):
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9), field
        else:
            assert found == expected, field


@pytest.mark.parametrize("name", [name for name in CASES if name[0] != "_"])
def test_scores(make_grid: Any, oracle: ModuleType, name: str) -> None:
    case = CASES[name]
    axes = {LONG.get(k, k): v for k, v in {**AXES, **case.get("axes", {})}.items() if v}
    how = {"sensitivity": case.get("asks"), "curves": case.get("curves", False)}
    fake = make_grid(lambda at: value(case["loss"], at, case), axes, **how)
    if "keep" in case:
        keep(fake, lambda at: value(case["keep"], at, case))
    if "link" in case:
        axis, other, values = case["link"]
        link(fake, axis, other, values)
    change(fake, **case.get("file", {}))
    for edit in case.get("records", ()):
        for number, cell in enumerate(fake.cells):
            if value(edit.get("of", "True"), cell["axes"], case):
                steps = value(edit.get("steps", "200"), cell["axes"], case)
                fake.edit(number, edit.get("metrics"), **edit.get("set", {}), steps=steps)
    grid = read_results(fake.folder)
    scores = sensitivity_scores(grid)
    tables: dict[str, tuple[Any, str, str]]
    tables = {"effects": (effects(grid, scores), "factors", "measure")}
    tables["compared"] = (comparisons(grid), "value", "where")
    for kind, (found, first, second) in tables.items():
        for one, other, wanted in case.get(kind, ()):
            for row in rows_of(found, (first, one), (second, other), wanted):
                check(row, wanted)
        assert len(found) == case.get("counts", {}).get(kind, len(found))
    for variants, names, wanted in case.get("rows", ()):
        for variant, name in itertools.product(variants.split(", "), names.split(", ")):
            for row in rows_of(scores, ("variant", variant), ("score", name), wanted):
                check(row, wanted)
    groups = {cell.group for cell in grid.cells}
    assert groups == {*case.get("groups", groups)}
    assert [*grid.variants][: len(case.get("variants", ()))] == case.get("variants", [])
    words = {row.variant: row.word for row in verdicts(grid, scores)}
    assert case.get("words", {}).items() <= words.items()
    over = [row.variant for row in scores if row.score in ("pooled", "family", "family_difference")]
    assert over == case.get("named", over)
    if "limits" in case:
        told_of = [message for message, _ in messages(limits(grid))]
        assert [each for each in told_of if each.startswith("limits.no_")] == case["limits"]
    if "over_rates" in case:
        assert {row.score for row in scores if math.isnan(row.lr)} == {*case["over_rates"]}
    if "undefined" in case:
        assert len(scores) == case["undefined"]
        assert all(math.isnan(row.estimate) and row.note for row in scores)
    assert all(math.isnan(row.p) for row in scores if row.score in case.get("untested", ()))
    assert {*case.get("untested", ())} <= {row.score for row in scores}
    assert not case.get("oracle", True) or oracle.check(written(grid)) == []


def test_the_table_has_a_row_for_each_variant_and_score(make_grid: Any) -> None:
    case = CASES["three seeds by hand"]
    axes = {LONG[key]: values for key, values in AXES.items()}
    grid = read_results(make_grid(lambda at: value(case["loss"], at, case), axes).folder)
    frame = scores_frame(sensitivity_scores(grid))
    wanted = "group lr variant score estimate low high p p_holm p_sign holm_low holm_high bound"
    assert list(frame) == [*wanted.split(), "seeds", "cells", "diverged", "note"]
    assert len(frame) == 15
    assert not frame.duplicated(["group", "lr", "variant", "score"]).any()
    assert frame["note"].tolist()[0] == "per seed 1: 2.5000, 2: 2.3000, 3: 2.1000"


def test_runs_that_end_at_different_steps_have_no_lost_steps(make_grid: Any) -> None:
    """A run that becomes non-finite has no rates after that step: their sum says nothing."""

    def lost(fake: Any) -> Score:
        found = sensitivity_scores(read_results(fake.folder))
        return next(row for row in found if row.score == "lost_steps")

    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], SEED: [1, 2]}
    fake = make_grid(lambda at: 2.0 + 0.01 * at[SEED] + at[WARMUP] / 9999, axes)
    assert not math.isnan(lost(fake).estimate)
    short = next(cell for cell in fake.cells if cell["axes"][WARMUP] == 0)
    path = fake.run(short) / "metrics.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    assert math.isnan(lost(fake).estimate)
    assert "runs that ended" in lost(fake).note


def test_the_report_has_the_effects(make_grid: Any) -> None:
    case = CASES["effects of three factors"]
    axes = {LONG.get(key, key): values for key, values in {**AXES, **case["axes"]}.items()}
    grid = make_grid(lambda at: value(case["loss"], at, case), axes, curves=False)
    _, residual, norm = case["file"]["factors"].values()
    change(grid, **case["file"], labels={residual: ["", "residual"], norm: ["", "rms"]})
    page = write_report(grid.folder, figures=False).read_text(encoding="utf-8")
    assert "(placement: pre_ln to post_ln; residual:" in page
    frame = pd.read_csv(grid.folder / "effects.csv")
    assert set(frame["measure"]) == {"delta", "steps_saved"}
    assert "placement x residual" in set(frame["factors"])
    variants = read_results(grid.folder).variants
    assert variants[:4] == ("pre_ln", "pre_ln+rms", "pre_ln+residual", "pre_ln+residual+rms")
