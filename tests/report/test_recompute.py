"""Reports of odd grids: `docs/recompute_study.py` computes their numbers again, beside them."""

import html
import itertools
import math
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lightning_app.report.results import read_results
from tests import warm
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, change, keep, write_report, written

SHARE = "model.block.share"
NUMBERS = ["estimate", "low", "high", "p", "p_holm", "holm_low", "holm_high"]
PRESETS = ["post_ln", "pre_ln", "sas", "realformer"]


def noise(axes: Mapping[str, Any], spread: float = 0.1) -> float:
    return random.Random(str(sorted(axes.items()))).gauss(0.0, spread)


def regular(axes):
    return 2.0 + 0.4 * (axes[PRESET] == "post_ln" and axes[WARMUP] == 0) + noise(axes)


def mixed(axes):
    """Some runs of Post-LN stall without warm-up, one of RealFormer's with any warm-up."""
    if axes[PRESET] == "post_ln" and axes[WARMUP] == 0 and axes[SEED] % 2:
        return 4.49
    return 4.6 if axes[PRESET] == "realformer" and axes[SEED] == 1 else regular(axes)


def missing(axes):
    preset, warmup, seed = axes[PRESET], axes[WARMUP], axes[SEED]
    if preset in ("sas", "pre_ln") and warmup == 60 and seed == 2:
        return "waiting"
    if preset == "post_ln" and warmup == 20 and seed == 1:
        return None
    return "failed" if preset == "realformer" and warmup == 20 else regular(axes)


def at_rates(axes):
    if axes[RATE] > 0.003 and axes[WARMUP] == 0 and axes[PRESET] != "pre_ln":
        return 4.5
    return regular(axes) + 100 * abs(axes[RATE] - 0.002)


def never(axes):
    return 4.43 + noise(axes, 0.001) if axes[PRESET] == "post_ln" else regular(axes)


def axes_of(seeds: int, *warmups: int) -> dict[str, list[Any]]:
    return {SEED: list(range(1, seeds + 1)), PRESET: PRESETS, WARMUP: list(warmups)}


RATES = {RATE: [0.001, 0.002, 0.004]}
BATCH = "data.tokens_per_batch"
KINDS = ("noise", "stalls of some", "stalls at all rates", "refined", "missing", "groups")


def drawn(kind: str) -> dict[tuple[Any, ...], float | str | None]:
    """How each planned run of a grid ended: parabolas over the octaves of rates, and noise.

    The points are batch, preset, warm-up, rate and seed.
    """
    rng = np.random.default_rng([KINDS.index(kind), 0])
    every = (0.0005, 0.001, 0.0014, 0.002, 0.0028, 0.004, 0.008)
    groups = (512, 1024) if kind == "groups" else (512,)
    seeds = range(1, 4 if kind == "groups" else 7 if kind == "noise" else 6)
    found: dict[tuple[Any, ...], float | str | None] = {}
    for group, preset, warmup in itertools.product(groups, PRESETS, (0, 60)):
        best, gain = rng.uniform(-9, -7.5), rng.uniform(-0.1, 0.5) * (warmup == 0)
        own = (0.001, 0.002, 0.004, 0.008)
        if kind == "refined":
            own = tuple(sorted(rng.choice(every, rng.integers(3, 7), replace=False).tolist()))
        for rate, seed in itertools.product(own, seeds):
            loss = 2.0 + gain + 0.3 * (math.log2(rate) - best) ** 2 + rng.normal(0, 0.1)
            stalled = kind == "stalls of some" and rng.random() < 0.4 + 0.2 * (seed == 1)
            if kind == "stalls at all rates":  # realformer never learns
                alone = (preset, warmup) in (("post_ln", 0), ("sas", 60))
                stalled = preset == "realformer" or alone
            end = rng.choice([np.nan, 4.47, 4.6]) if stalled else min(loss, 4.3)
            late = kind == "missing" and rng.random() < 0.03
            ended = None if math.isnan(end) else float(end)
            found[group, preset, warmup, rate, seed] = "waiting" if late else ended
    return found


def drawn_grid(kind: str) -> tuple[Any, dict[str, list[Any]]]:
    ends = drawn(kind)
    values = [sorted({point[place] for point in ends}) for place in range(5)]
    axes: dict[str, Any] = dict(zip((BATCH, PRESET, WARMUP, RATE, SEED), values, strict=True))
    return (lambda at: ends.get(tuple(at.values()), "waiting")), axes


def grouped(axes):
    """Groups, labels, factors; post_ln of one group stalls without warm-up at one rate."""
    point = axes[PRESET], axes[COUPLING], axes[WARMUP], axes[RATE]
    if point == ("post_ln", "decoupled", 0, 0.004):
        return 4.49
    later = (axes[COUPLING] == "paper") + (axes["model.optimizer.kind"] == "sgd")
    return at_rates(axes) + 0.1 * later


COUPLING, NAMES = "model.schedule.coupling", ["Adam", "SGD"]
GRIDS = {
    "regular": (regular, axes_of(3, 0, 60)),
    "many seeds": (mixed, axes_of(6, 0, 60)),
    "mixed stalls": (mixed, axes_of(3, 0, 20, 60)),
    "missing runs": (missing, axes_of(4, 0, 20, 60)),
    "one seed": (regular, axes_of(1, 0, 60)),
    "several-rates": (at_rates, axes_of(3, 0, 20, 60) | RATES),
    "another axis": (regular, axes_of(3, 0, 60) | {"model.architecture.model_dim": [64, 128]}),
    "two vocabularies": (at_rates, axes_of(3, 0, 60) | RATES | {"data.vocab_size": [8, 12]}),
    "families": (at_rates, axes_of(3, 0, 60) | RATES | {SHARE: [False, True]}),
    "a search": (at_rates, axes_of(3, 0, 60) | RATES),
    "arms with their own rates": (  # as after a refinement
        at_rates,
        axes_of(3, 0, 60) | {RATE: [0.0005, *RATES[RATE], 0.008]},
    ),
    "one variant never learned": (never, axes_of(3, 0, 60)),
    "all stall without warm-up": (lambda at: regular(at) if at[WARMUP] else 4.7, axes_of(3, 0, 60)),
    "nothing learned": (lambda axes: 4.7, axes_of(3, 0, 60)),
    "nothing finite": (lambda axes: None, axes_of(2, 0, 60)),
    "no warm-up axis": (lambda axes: 2 + noise(axes), {SEED: [1, 2, 3], PRESET: PRESETS}),
    "no arm without warm-up": (regular, axes_of(3, 20, 60)),
    "no seed axis": (regular, {PRESET: PRESETS, WARMUP: [0, 60]}),
    "an arm with fewer seeds": (
        lambda at: 4.5 if at[WARMUP] == 0 and at[PRESET] == "post_ln" else at_rates(at),
        axes_of(5, 0, 60) | RATES,
    ),
    "arms with one rate": (regular, axes_of(3, 0, 60) | RATES),
    "groups and factors": (
        grouped,
        axes_of(3, 0, 60)
        | RATES
        | {PRESET: ["pre_ln", "post_ln"], COUPLING: ["decoupled", "paper"]}
        | {"model.optimizer.kind": ["adam", "sgd"]},
    ),
    **{f"drawn {kind}": drawn_grid(kind) for kind in KINDS},
}
FILES = {
    "drawn noise": {"families": {"pre": ["pre_ln"], "others": ["post_ln", "sas"]}},
    "groups and factors": {
        "labels": {COUPLING: ["decoupled", "paper's coupling"], "model.optimizer.kind": NAMES},
        "factors": {"placement": PRESET, "coupling": COUPLING},
    },
    "families": {"families": {"shared": [True], "own": ["false"], "post": ["post_ln"], "": [3]}},
    "a search": {"search": {"fields": {RATE: {"low": 0.001, "high": 0.004}}, "budget": 3}},
}
LEFT_OUT = {
    (preset, warmup): random.Random(f"{preset} {warmup}").sample([0.0005, 0.004, 0.008], 2)
    for preset in PRESETS
    for warmup in (0, 60)
}
REFINED = drawn("refined")
KEPT = {  # the cells of a grid that are planned
    "drawn refined": lambda at: tuple(at.values()) in REFINED,
    "arms with their own rates": lambda at: at[RATE] not in LEFT_OUT[at[PRESET], at[WARMUP]],
    "an arm with fewer seeds": lambda at: (at[PRESET], at[SEED]) != ("pre_ln", 5),
    "arms with one rate": lambda at: (
        at[RATE] == 0.001 * (1 + (at[PRESET] == "sas")) and (at[PRESET], at[WARMUP]) != ("sas", 0)
    ),
}


def report(make_grid: Any, name: str) -> Path:
    """The tables of the report of one of these grids."""
    fake = make_grid(*GRIDS[name], name=name.replace(" ", "-"))
    change(fake, **FILES.get(name, {}))
    keep(fake, KEPT.get(name, lambda at: True))
    return written(read_results(fake.folder))


@pytest.mark.parametrize("name", GRIDS)
def test_every_score_and_mean_of_a_report_is_recomputed(make_grid: Any, oracle, name: str) -> None:
    folder = report(make_grid, name)
    assert oracle.check(folder) == []
    if "factors" in FILES.get(name, {}):
        table = pd.read_csv(folder / "effects.csv")
        assert set(table["group"]) == {*NAMES}
        assert len(table) == 2 * 3 * (4 + 2 * 3)


def test_these_grids_have_every_score_and_number(make_grid: Any) -> None:
    frames = []
    for name in ("regular", "families", "arms with their own rates"):
        folder = report(make_grid, name)
        frames.append(pd.read_csv(folder / "sensitivity.csv").dropna(subset="estimate"))
        assert (folder / "tables" / "loss_by_warmup.md").is_file()
    assert len(frames[-1].query("score == 'tuned'")) > 1
    defined = pd.concat(frames)
    assert {score.split()[0] for score in defined["score"]} == {
        *("delta", "interaction", "stalls", "stall_difference", "steps_saved", "lost_steps"),
        *("tuned", "tuned_interaction", "tuned_steps_saved", "against_baseline", "rate_shift"),
        *("mean_over_rates", "pooled", "family", "family_difference"),
    }
    assert all(len(defined[number].dropna()) > 2 for number in NUMBERS)


@pytest.mark.parametrize("prunes", [False, True])
def test_a_grid_without_scores_has_nothing_to_recompute(make_grid: Any, oracle, prunes) -> None:
    fake = make_grid(lambda axes: 2.0 if prunes else "waiting", {SEED: [1, 2]})
    if prunes:
        fake.prune(0)
    assert oracle.check(written(read_results(fake.folder))) == []


@pytest.mark.parametrize("name", ["mixed stalls", "missing runs", "one seed", "another axis"])
def test_every_bleu_difference_is_recomputed(make_grid: Any, oracle: ModuleType, name: str) -> None:
    fake = make_grid(*GRIDS[name], curves=False)
    for number, cell in enumerate(fake.cells):
        if cell["axes"][PRESET] != "sas":
            fake.edit(number, {"test/bleu": 30 + noise(cell["axes"], 2.0)})
    folder = written(read_results(fake.folder))
    assert oracle.check(folder) == []
    table = pd.read_csv(folder / "sensitivity.csv")
    assert len(set(table[table["score"] == "bleu"]["variant"])) == 3


def test_one_changed_digit_of_any_table_is_found(make_grid: Any, oracle: ModuleType) -> None:
    folder = report(make_grid, "missing runs")
    for name in ("sensitivity.csv", "tables/loss_by_warmup.md"):
        path = folder / name
        kept = path.read_text(encoding="utf-8")
        places = [match.start(1) for match in re.finditer(r"[|,] ?\d\.\d(\d)", kept)]
        assert len(places) > 10
        for place in places[:: len(places) // 10]:
            digit = str((int(kept[place]) + 5) % 10)
            path.write_text(kept[:place] + digit + kept[place + 1 :], encoding="utf-8")
            assert oracle.check(folder), kept[place - 20 : place + 20]
        path.write_text(kept, encoding="utf-8")
    table = (folder / "sensitivity.csv").read_text().splitlines(keepends=True)
    unknown, wider = table[-1].replace("pooled", "need"), [f"O,{table[0]}"]
    wider += [f",{line}" for line in table[1:]]
    for changed in (table[:-1], [*table, table[-1]], [*table, unknown], wider):
        (folder / "sensitivity.csv").write_text("".join(changed))
        assert len(oracle.check(folder)) == 1


@pytest.mark.slow
def test_a_report_brings_the_program_and_says_how_to_run_it(make_grid: Any, tmp_path: Path) -> None:
    first = make_grid(*GRIDS["no seed axis"]).folder
    for number, out in enumerate((None, tmp_path / "else where")):
        page = write_report(first, out, figures=False)
        text = page.read_text(encoding="utf-8")
        assert 'href="recompute_study.py"' in text
        (shown,) = re.findall(r"<code>python (recompute_study.py [^<]*)", text)
        if number == 0:  # as a reader would; the others in forks of a process with pandas
            command = f"{sys.executable} {html.unescape(shown)}"
            cold = subprocess.run(command, shell=True, cwd=page.parent, check=False)
            assert cold.returncode == 0
            continue
        done = warm.run(shlex.split(html.unescape(shown)), folder=page.parent)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shown = warm.run(["recompute_study.py", "--former", "."], folder=first)
    assert shown.returncode == 0
    assert shown.stdout.count("need") == shown.stdout.count("octaves") == 4
    path = first / "sensitivity.csv"
    path.write_text(path.read_text().replace(",0.", ",1.", 1))
    assert warm.run(["recompute_study.py", "."], folder=first).returncode == 1
