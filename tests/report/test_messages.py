"""The sentences of a report: each is used, and has its name and its numbers for a program."""

import json
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest

from lightning_app.report.facts import p_value, say, texts
from lightning_app.report.headline import findings, with_numbers
from lightning_app.report.limits import limits
from lightning_app.report.results import read_results
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, SEED, WARMUP, messages

REPORT = Path(__file__).parents[2] / "lightning_app/report"


def test_every_text_is_used_and_every_name_has_a_text() -> None:
    code = "".join(path.read_text() for path in sorted(REPORT.rglob("*.py")))
    named = set(re.findall(r'"((?:limits|captions|figures|findings)\.[\w.]+)"', code))
    assert named <= texts().keys()
    # A name may be put together; its last part, or that of the figure, is in the code then.
    lost = [name for name in texts() if name not in named and not _is_made(name, code)]
    assert lost == []


def _is_made(name: str, code: str) -> bool:
    *above, last = name.split(".")
    figure = above[-1]
    of_figure = f'sketch("{figure}"' in code or f'name="{figure}"' in code or figure == "curves"
    return (last in ("title", "text", "limits") and of_figure) or f'"{last}"' in code


@pytest.mark.parametrize("name", sorted(texts()))
def test_a_value_that_is_missing_is_an_error(name: str) -> None:
    fields = {field for _, field, *_ in Formatter().parse(texts()[name]) if field}
    if fields:
        with pytest.raises(KeyError):
            say(name)


def test_limits_have_their_numbers(make_grid) -> None:
    axes = {SEED: [1, 2, 3, 4], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
    fake = make_grid(lambda a: "failed" if a[SEED] == 4 else 2.0 + a[SEED] / 10, axes)
    found = dict(messages(limits(read_results(fake.folder))))
    assert found["limits.missing"] == {"missing": 4, "cells": 16}
    assert found["limits.seeds"]["seeds"] == 3
    assert found["limits.one_rate"] == {"rate": "0.004"}
    assert found["limits.decoupled"] == {"begins": "at step 60"}
    assert "limits.early" not in found


def test_rates_that_were_chosen_by_results_are_a_limit(make_grid, outcome) -> None:
    grid = read_results(make_grid(outcome).folder)
    assert "limits.adaptive" not in dict(messages(limits(grid)))
    assert "limits.adaptive" in dict(messages(limits(replace(grid, chosen=("x",)))))


def test_findings_have_their_numbers(make_grid, outcome) -> None:
    grid = read_results(make_grid(outcome).folder)
    scores = sensitivity_scores(grid)
    found = dict(messages(findings(grid, scores)))
    own = {(score.variant, score.score): score for score in scores}
    assert found["findings.first"]["budget"] == "200 steps"
    assert found["findings.stalling"] == {
        "names": "post_ln (5 of 5 runs without warm-up, 0 of 5 with it)",
        "ends": "stalls",
        "where": "without warm-up",
        "p": p_value(own["post_ln", "stall_difference"].p_holm),
    }
    helped = " and ".join(with_numbers(own[name, "delta"]) for name in ("post_ln", "pre_ln"))
    assert found["findings.own.helps"] == {"names": helped}
    assert found["findings.own.not_shown"] == {"names": with_numbers(own["sas", "delta"])}
    assert found["findings.against"]["baseline"] == "pre_ln"
    for kind, name in (("more", "post_ln"), ("less", "sas")):
        words = {"names": with_numbers(own[name, "interaction"])}
        assert found[f"findings.versus_baseline.{kind}"] == words
    assert not {"findings.own.costs", "findings.stalling_by_chance"} & found.keys()


def test_translations_that_the_limit_ended_are_told(make_grid) -> None:
    fake = make_grid(lambda axes: 2.0, {PRESET: ["pre_ln"], WARMUP: [0], SEED: [1, 2, 3]})
    for cell, cut in zip(fake.cells, (0, 7, 1200), strict=True):
        path = fake.run(cell) / "result.json"
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "cut_hypotheses": cut}))
    found = dict(messages(limits(read_results(fake.folder))))["limits.cut"]
    assert (found["most"], found["cut"], found["runs"]) == (1200, 2, 3)
