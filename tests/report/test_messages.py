"""The sentences of a report: each is used, and has its name and its numbers for a program."""

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_app.report.comparisons import comparisons
from lightning_app.report.facts import say, texts
from lightning_app.report.headline import answer
from lightning_app.report.limits import limits
from lightning_app.report.pairs import Score
from lightning_app.report.results import read_results
from lightning_app.report.statistics import corrected
from lightning_app.report.verdicts import verdicts
from tests.noted import noted
from tests.report.conftest import PRESET, SEED, WARMUP, arm, change, messages, one_sentence, stalls

REPORT = Path(__file__).parents[2] / "lightning_app/report"


def test_every_text_is_used_and_every_name_has_a_text() -> None:
    code = "".join(path.read_text() for path in sorted(REPORT.rglob("*.py")))
    named = set(re.findall(r'"((?:limits|captions|figures)\.[\w.]+)"', code))
    assert named <= texts().keys()
    # A name may be put together; its last part, or that of the figure, is in the code then.
    lost = [name for name in texts() if name not in named and not _is_made(name, code)]
    assert lost == []
    for name, text in texts().items():
        if any(field for _, field, *_ in Formatter().parse(text)):
            with noted(name), pytest.raises(KeyError):
                say(name)


def _is_made(name: str, code: str) -> bool:
    *above, last = name.split(".")
    figure = above[-1]
    of_figure = f'"{figure}"' in code
    return (last in ("title", "text", "limits") and of_figure) or f'"{last}"' in code


def test_limits_have_their_numbers_also_that_of_translations(make_grid) -> None:
    axes = {SEED: [1, 2, 3, 4], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
    fake = make_grid(lambda a: "failed" if a[SEED] == 4 else 2.0 + a[SEED] / 10, axes)
    found = dict(messages(limits(read_results(fake.folder))))
    assert found["limits.missing"] == {"missing": 4, "cells": 16}
    assert found["limits.seeds"]["seeds"] == 3
    assert found["limits.one_rate"] == {"rate": "0.004"}
    assert found["limits.decoupled"] == {"begins": "at step 60"}
    assert not {"limits.early", "limits.adaptive"} & found.keys()
    chosen = replace(read_results(fake.folder), chosen=("x",))
    assert "limits.adaptive" in dict(messages(limits(chosen)))
    axes = {PRESET: ["pre_ln"], WARMUP: [0], SEED: [1, 2, 3]}
    fake = make_grid(lambda axes: 2.0, axes, name="cut")
    for number, cut in enumerate((0, 7, 1200)):
        fake.edit(number, cut_hypotheses=cut)
    found = dict(messages(limits(read_results(fake.folder))))["limits.cut"]
    assert (found["most"], found["cut"], found["runs"]) == (1200, 2, 3)


def test_what_a_grid_file_decides_after_the_runs_is_a_limit(make_grid, outcome) -> None:
    folder = make_grid(outcome).folder
    assert "limits.afterwards" not in dict(messages(limits(read_results(folder))))
    later = {"families": {"post": ["post_ln"]}, "sensitivity": {"matters": 0.1}}
    grid = read_results(folder, file=yaml.safe_load((folder / "grid.yaml").read_text()) | later)
    assert grid.afterwards == ("families", "sensitivity.matters")
    said = dict(messages(limits(grid)))["limits.afterwards"]["names"]
    assert all(name in said for name in grid.afterwards)
    change(SimpleNamespace(folder=folder), **later)
    assert read_results(folder).afterwards == ()


# Rows with each verdict, at least savings of 0.11 that matter.
OF_WORD: dict[str, list[Score]] = {
    "needs": [arm(0.5, 0.2), stalls(0.4, 0.01)],
    "gains": [arm(0.5, 0.2)],
    "slightly gains": [arm(0.15, 0.05)],
    "mixed": [arm(-0.5, 0.2), stalls(0.4, 0.01)],
    "loses": [arm(-0.5, 0.2)],
    "no need": [arm(0.0, 0.05)],
    "undecided": [arm(0.1, 0.9)],
    "never learned": [arm(0.0, 0.0, never=True)],
}
ON_AVERAGE = [word for word in OF_WORD if word not in ("needs", "mixed", "never learned")]
ASKED: Any = SimpleNamespace(
    **{"pruner": None, "searched": False, "asks_warmup": True, "reference_warmup": 60},
    **{"scored": (), "matters": 0.11, "finished": (None,), "trials": 0, "control": None},
    cells=(),
)
Words = Mapping[tuple[str, str], str]  # of group and name


def scores_of(arms: Words, pooled: Words, families: Words, rates: int) -> list[Score]:
    rows = []
    at: dict[str, Any] = {"score": "tuned", "tried": (rates, rates)}
    if rates == 1:
        at = {"score": "delta", "lr": 0.004}
    for words, kind in ((arms, at), (pooled, {"score": "pooled"}), (families, {"score": "family"})):
        for (group, name), word in words.items():
            measure, *fails = OF_WORD[word]
            rows += [replace(measure, group=group, variant=name, **kind)]
            rows += [replace(row, group=group, variant=name) for row in fails]
    return corrected(
        rows, lambda row: None if row.p_holm == row.p else (row.group, row.variant, row.score)
    )


@pytest.mark.parametrize("groups", [["all"], ["adam", "sgd", "muon"]])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 41])
def test_the_answer_is_one_short_sentence(count: int, groups: list[str]) -> None:
    draw = random.Random(count + len(groups))
    for kinds in [["undecided"], *([word] for word in OF_WORD), *[[*OF_WORD]] * 30]:
        some = draw.sample(kinds, draw.randint(1, len(kinds)))
        arms = {(g, f"v{n}"): draw.choice(some) for g in groups for n in range(count)}
        pooled = {(g, "all variants"): draw.choice(ON_AVERAGE) for g in groups if count > 1}
        names = ("pre", "post") if draw.random() < 0.5 and count > 1 else ()
        families = {(g, name): draw.choice(ON_AVERAGE) for g in groups for name in names}
        rows = scores_of(arms, pooled, families, draw.choice((1, 4)))
        found = {(v.group, v.variant): v.word for v in verdicts(ASKED, rows) if v.kind == "arm"}
        assert found == arms
        one_sentence(answer(ASKED, rows))


@pytest.mark.parametrize("seed", range(20))
def test_the_answer_names_who_has_which_verdict(seed: int) -> None:
    draw = random.Random(seed)
    names = ["pre_ln", "post_ln", "sas", "keel"][: draw.randint(1, 4)]
    arms = {("all", name): draw.choice([*OF_WORD]) for name in names}
    clauses = clauses_of(answer(ASKED, scores_of(arms, {}, {}, 4)), names)
    of_word: dict[str, set[str]] = {}
    for (_, name), word in arms.items():
        of_word.setdefault(word, set()).add(name)
    assert all(clause in of_word.values() for clause in clauses if clause)
    for word, who in of_word.items():
        most = word == "undecided" and 2 * len(who) > len(names)
        if who not in clauses:  # they are "all variants" or "the others"
            assert len(who) > 1
            assert most or len(who) == 4


def clauses_of(sentence: str, names: Iterable[str]) -> list[set[str]]:
    """The names in each clause."""
    parts = [set(re.findall(r"[\w.]+", part)) for part in one_sentence(sentence).split(";")]
    return [part & {*names} for part in parts]


def test_the_answer_names_families_the_rate_and_those_that_differ_from_most() -> None:
    arms = dict.fromkeys((("all", f"v{n}") for n in range(8)), "undecided")
    families = {("all", "narrow"): "gains", ("all", "wide"): "no need"}
    said = {rates: answer(ASKED, scores_of(arms, {}, families, rates)) for rates in (1, 4)}
    for text in said.values():
        assert [*filter(None, clauses_of(text, ["narrow", "wide"]))] == [{"narrow"}, {"wide"}]
    assert "0.004" in said[1]
    assert "0.004" not in said[4]
    arms = {("all", f"v{n}"): "gains" if n in (3, 7) else "undecided" for n in range(41)}
    clauses = clauses_of(answer(ASKED, scores_of(arms, {}, {}, 4)), [name for _, name in arms])
    assert [*filter(None, clauses)] == [{"v3", "v7"}]
    rows = scores_of({("all", "sas"): "needs", ("all", "keel"): "needs"}, {}, {}, 4)
    wide = replace(arm(0.1, 0.9), variant="keel", score="tuned", tried=(4, 4))
    rows[2:3] = corrected([wide], str)  # no saving is shown
    assert clauses_of(answer(ASKED, rows), ["sas", "keel"]) == [{"sas"}, {"keel"}]
    cells = [SimpleNamespace(variant="v1", axes={PRESET: "post_ln"})]
    blind: Any = SimpleNamespace(**{**vars(ASKED), "control": "post_ln", "cells": cells})
    for word in OF_WORD:  # no need is not said alone where the control shows nothing
        rows = scores_of({("all", "v0"): "no need", ("all", "v1"): word}, {}, {}, 4)
        differs = one_sentence(answer(blind, rows)) != answer(ASKED, rows)
        assert differs == (word in ("no need", "undecided", "loses"))


@pytest.mark.parametrize("count", [2, 4, 8, 41])
def test_the_answer_by_a_metric_is_one_short_sentence(make_grid, count: int) -> None:
    draw = random.Random(count)
    presets = ["pre_ln", *(f"v{n}" for n in range(1, count))]
    effects = {name: draw.choice([-0.5, 0.0, 0.5]) for name in presets} | {"pre_ln": 0.0}
    fake = make_grid(
        lambda at: 2.5 + effects[at[PRESET]] + draw.gauss(0, 0.005),
        {PRESET: presets, SEED: [1, 2, 3, 4, 5]},
        curves=False,
    )
    grid = read_results(fake.folder)
    text = one_sentence(answer(grid, []))
    assert "val/nll" in text
    clauses = [*filter(None, clauses_of(text, presets[1:]))]
    readings = {row.value: row.reading for row in comparisons(grid)}
    assert {*readings.values()} > {"better"} or count == 2
    for clause in clauses:
        assert len({readings[name] for name in clause}) == 1
    if count <= 4:
        assert set().union(*clauses) == {*presets[1:]}
