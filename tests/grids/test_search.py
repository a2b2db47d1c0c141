"""Searches and refinements: what they ask for, and that nothing but results decides it."""

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from conftest import World  # pyright: ignore[reportMissingImports]
from optuna.storages.journal import JournalFileBackend

from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.search import Range, Refine
from lightning_app.config.tree import RATE, SEED, WARMUP, canonical
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import combinations
from lightning_app.grids.search import (
    TrialScore,
    distribution,
    further,
    grid_points,
    search_arms,
    wanted,
)

SEARCH = {"fields": {RATE: {"low": 1e-4, "high": 1.0, "log": True}}, "budget": 24, "together": 3}
RATE_AXIS = {RATE: [1e-3, 1e-2]}
CURVE: dict[str, Any] = {"base_config": {"data": {"behaviour": "curve"}}}


def spec_of(folder: Path, **parts: Any) -> GridSpec:
    axes = {"model.block.preset": ["pre_ln", "post_ln"], SEED: [1, 2], **parts.pop("axes", {})}
    base = {"model": {"optimizer": {"kind": "adam"}}, "data": {"name": "synthetic"}}
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"name": "g", "base_config": base, "axes": axes, **parts}))
    return read_spec(path)


def loss(cell: dict[str, Any]) -> float:
    """A parabola over the rate whose optimum is 2^-5 for pre_ln and 2^-7 for post_ln."""
    best = -5 if cell["model.block.preset"] == "pre_ln" else -7
    return 4.0 + 0.1 * (math.log2(cell[RATE]) - best) ** 2 + 0.01 * cell[SEED]


def ended(spec: GridSpec, score: Callable[[dict[str, Any]], float] = loss, shuffle: int = 0):
    """Run all rounds; return the cells and the number of rounds. Outcomes arrive in any order."""
    known: dict[str, TrialScore] = {}
    for number in range(100):
        asked = search_arms(spec, list(combinations(spec)), known)
        cells = list(wanted(asked))
        new = [cell for cell in cells if canonical(cell) not in known]
        if not new:
            assert all(arm.more == 0 for arm in asked)
            return cells, number
        random.Random(shuffle).shuffle(new)
        known |= {canonical(cell): TrialScore(score(cell)) for cell in new}
        known = dict(random.Random(shuffle).sample(list(known.items()), len(known)))
    raise AssertionError("does not end")


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "qmc"])
def test_a_search_spends_its_budget_in_every_arm_and_asks_the_same_again(tmp_path, sampler) -> None:
    spec = spec_of(tmp_path, search={**SEARCH, "sampler": sampler})
    cells, rounds = ended(spec)
    assert rounds == 4  # 24 runs are 12 trials with 2 seeds, 3 at a time
    assert cells == ended(spec, shuffle=7)[0]
    for preset in ("pre_ln", "post_ln"):
        arm = [cell for cell in cells if cell["model.block.preset"] == preset]
        assert len(arm) == 24
        rates = {cell[RATE] for cell in arm}
        assert len(rates) == 12
        assert all(1e-4 <= rate <= 1.0 for rate in rates)
        assert {(cell[RATE], cell[SEED]) for cell in arm} == {(r, s) for r in rates for s in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "budget"), [("tpe", 48), ("gp", 20)])
def test_a_model_finds_the_best_rate_of_each_arm(tmp_path: Path, sampler: str, budget: int) -> None:
    spec = spec_of(tmp_path, search={**SEARCH, "sampler": sampler, "budget": budget})
    cells, _ = ended(spec)
    if sampler == "gp":
        assert cells == ended(spec, shuffle=3)[0]
    for preset, best in (("pre_ln", 2**-5), ("post_ln", 2**-7)):
        arm = [cell for cell in cells if cell["model.block.preset"] == preset]
        assert len(arm) == budget
        assert abs(math.log2(min(arm, key=loss)[RATE] / best)) < 0.5


def test_the_order_of_a_round_is_that_of_asking(tmp_path: Path) -> None:
    """What ends first must not matter: TPE's proposals depend on the order of its trials."""
    spec = spec_of(tmp_path, search=SEARCH)
    first = list(wanted(search_arms(spec, list(combinations(spec)), {})))
    known = {canonical(cell): TrialScore(loss(cell)) for cell in first}
    again = dict(reversed(known.items()))
    one, other = (search_arms(spec, list(combinations(spec)), each) for each in (known, again))
    assert [arm.rounds for arm in one] == [arm.rounds for arm in other]
    known.popitem()  # a round goes on only when it has ended, each arm for itself
    partly = search_arms(spec, list(combinations(spec)), known)
    assert [len(arm.rounds) for arm in partly] == [2, 1]


def test_whole_numbers_and_steps() -> None:
    assert grid_points(Range(low=1, high=9, step=4), 5) == [1, 5, 9]
    assert grid_points(Range(low=0.0, high=1.0, step=0.25), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    for low, high, step, points in (
        (1, 8, 4, [1, 5]),
        (1, 10, 6, [1, 7]),
        (0, 19, 4, [0, 4, 12, 16]),
        (0.0, 1.0, 0.6, [0.0, 0.6]),
        (0.0, 0.3, 0.1, pytest.approx([0.0, 0.1, 0.2, 0.3])),
    ):
        values = Range(low=low, high=high, step=step)
        assert grid_points(values, 4) == points
        for point in points if isinstance(points, list) else [0.0, 0.3]:
            optuna.create_trial(
                value=0.0, params={"x": point}, distributions={"x": distribution(values)}
            )  # refuses a value outside
    assert grid_points(Range(low=1.0, high=4.0, log=True), 3) == pytest.approx([1.0, 2.0, 4.0])


def outcomes(*scores: float) -> list[TrialScore]:
    return [TrialScore(score, sound=score < 9) for score in scores]


@pytest.mark.parametrize(
    ("rates", "scores", "expected"),
    [
        ([1, 2, 4], (3.0, 2.0, 1.0), [8]),  # one octave beyond the edge
        ([1, 2, 4], (1.0, 2.0, 3.0), [0.5]),
        ([1, 4, 16], (2.0, 1.0, 2.0), [2, 8]),
        ([1, 4, 32], (2.0, 1.0, 2.0), [11.31, 2]),  # the wider gap first
        ([1, 2, 4, 8], (1.0, 1.0, 1.0, 1.0), []),  # nothing beyond the edge of a flat range
        ([1, 4, 16], (1.0, 1.0, 2.0), [2, 8]),
        ([1, 4, 16], (2.0, 1.0, 1.0), [2, 8]),
        ([1, 2, 4], (9.0, 1.0, 1.0), [1.414]),
        ([1, 2, 8], (2.0, 1.0, 2.0), [4]),  # an octave is narrow enough
        ([1, 2, 4], (2.0, 1.0, 9.0), [2.828]),  # beside a failed rate there is no parabola
        ([1, 2, 4], (9.0, 9.0, 9.0), []),
        # (x - 0.2)^2 in octaves from 2: the parabola is lowest a quarter of an octave above.
        ([1, 2, 4], (1.44, 0.04, 0.64), [2.378]),
        ([1, 2, 4], (1.21, 0.01, 0.81), []),  # (x - 0.1)^2: only 0.01 may be gained
        # 2 |x - 0.3|: parabola and cubics disagree on what the middle of the V has.
        ([0.5, 1, 2, 4, 8], (4.6, 2.6, 0.6, 1.4, 3.4), [2.378]),
        # The parabola is lowest at the best rate, the cubic through 8 between it and 1.
        ([1, 2, 4, 8], (2.0, 1.0, 2.0, 2.2), [1.682]),
        # The cubic 1.2 - 0.117 (x - 1) (x - 2) (x - 3) is 0.045 lower 1.42 octaves above 1.
        ([1, 2, 4, 8], (1.9, 1.2, 1.2, 1.2), [2.828]),
        # All three curves are within 0.03 of the best mean.
        ([0.5, 1, 2, 4, 8], (1.04, 1.02, 1.0, 1.02, 1.04), []),
        ([2, 2.378, 2.828], (2.0, 1.0, 2.0), []),  # a quarter of an octave is the finest gap
    ],
)
def test_the_rates_that_a_refinement_asks_for(rates, scores, expected: list[float]) -> None:
    refine = Refine(budget=100)
    assert list(further(rates, outcomes(*scores), refine, "min")) == expected
    if 9.0 not in scores:
        assert list(further(rates, outcomes(*(-s for s in scores)), refine, "max")) == expected


@pytest.mark.parametrize("budget", [6, 10, 40])
def test_a_refinement_ends_within_its_budget(tmp_path: Path, budget: int) -> None:
    axes = {RATE: [2**-9, 2**-7, 2**-5]}
    spec = spec_of(tmp_path, axes=axes, refine={"budget": budget, "until": 0.01})
    cells, _ = ended(spec)
    for preset, best in (("pre_ln", -5), ("post_ln", -7)):
        arm = [cell for cell in cells if cell["model.block.preset"] == preset]
        assert len(arm) <= budget
        if budget == 40:
            assert len(arm) < 40  # it stops by itself
            assert min(arm, key=loss)[RATE] == pytest.approx(2.0**best, rel=1e-3)


def finished(world: World) -> dict[str, Any]:
    """The trials and their results, without what tells one attempt from another."""
    plan = json.loads((world.folder / "plan.json").read_text())
    assert plan.get("more", 0) == 0
    metrics = {name: run.result and run.result["metrics"] for name, run in world.runs().items()}
    return {"cells": plan["cells"], "axes": plan["axes"], "metrics": metrics}


TRIALS = {**SEARCH, "budget": 12, "together": 2}
RATES = {"low": 0.02, "high": 0.3, "log": True}
KINDS: dict[str, dict[str, Any]] = {
    "search": {**CURVE, "search": TRIALS},
    "refine": {**CURVE, "axes": {RATE: [0.0125, 0.05, 0.2]}, "refine": {"budget": 14}},
    "until": {
        **CURVE,
        "axes": {SEED: 5},
        "search": {"per": "seed", "fields": {RATE: RATES}, "trials": 2},
        "until": {"half_width": 0.3, "most_seeds": 12},
        "sensitivity": {"reference_warmup": 60},
    },
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What each kind finds with one worker that nobody disturbs."""
    made: dict[str, dict[str, Any]] = {}

    def of(kind: str) -> dict[str, Any]:
        if kind not in made:
            world = World(tmp_path_factory.mktemp(kind))
            world.write(delay=0.01, **KINDS[kind])
            done = world.run(workers=1)
            assert (done.returncode, done.stderr) == (0, ""), done.stdout
            made[kind] = finished(world)
        return made[kind]

    return of


@pytest.mark.dear("about 40 attempts of a stand-in")
@pytest.mark.parametrize(
    "kind",
    ["until", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("refine", "search"))],
)
def test_two_workers_and_kills_change_nothing(world, undisturbed, kind: str) -> None:
    world.write(delay=0.01, **KINDS[kind])
    for _ in range(4):
        until = len(world.lines("end")) + 3
        supervisor = world.start(workers=2)
        while len(world.lines("end")) < until and supervisor.poll() is None:
            time.sleep(0.01)
        supervisor.kill()
        supervisor.communicate()
        world.assert_nothing_left()
    pair = [world.start(workers=1) for _ in range(2)]
    for process in pair:
        world.end(process)
    assert finished(world) == undisturbed(kind)
    world.assert_nothing_left()


@pytest.mark.slow
def test_twenty_kills_and_two_supervisors_change_no_study_of_a_seed(world, undisturbed) -> None:
    world.write(delay=0.01, **KINDS["until"])
    pair = [world.start(workers=1) for _ in range(2)]
    for kill in range(20):
        ends = len(world.lines("end"))
        world.wait_for(lambda before=ends: len(world.lines("end")) > before or not pair)
        pair[kill % 2].kill()
        pair[kill % 2].communicate()
        pair[kill % 2] = world.start(workers=1)
    for process in pair:
        world.end(process)
    assert finished(world) == undisturbed("until")
    world.assert_nothing_left()
    assert studies_by_name(world).keys() == {
        f"tiny, model.block.preset={preset}, model.schedule.warmup_steps={warmup}, {SEED}={seed}"
        for preset in ("post_ln", "pre_ln")
        for warmup in (0, 60)
        for seed in range(1, 8)
    }


def test_a_crashed_cell_holds_its_round_until_it_is_repaired(world: World) -> None:
    base = {"data": {"behaviour": "crash once"}}
    world.write(delay=0.01, base_config=base, search={**TRIALS, "budget": 8})
    first = world.run()
    assert first.returncode == 0
    assert {run.state for run in world.runs().values()} == {"failed"}
    assert world.plan().more == 16  # 2 trials x 2 seeds in each of 4 arms
    again = world.run("retry")
    assert again.returncode == 0, again.stderr
    # The cells of the next round crash in their first attempt as well.
    assert len(world.runs()) == 32
    assert world.run("retry").returncode == 0
    assert {run.state for run in world.runs().values()} == {"done"}
    assert world.plan().more == 0


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("way", ["rerun", "removed", "replaced"])
def test_a_refinement_is_open_again_if_its_results_change(world: World, way: str) -> None:
    world.write(delay=0.01, **KINDS["refine"])
    assert world.run().returncode == 0
    before = {cell.id for cell in world.plan().cells}
    world.environment |= {"SHIFT": "0.25", "CODE": "b" if way == "rerun" else "a"}
    for run in world.value().cells if way != "rerun" else ():
        result = world.value().run(run).result
        record = json.loads(result.read_text())
        result.unlink()
        if way == "replaced":  # as by `ablate fit --again`
            low = -4 if run.axes[WARMUP] else -5
            record["metrics"]["val/nll"] = 3.0 + 0.4 * (math.log2(run.axes[RATE]) - low + 2) ** 2
            result.write_text(json.dumps(record))
    again = world.refused("rerun") if way == "rerun" else world.refused()
    assert "the search asks for other cells" in again.stderr
    assert world.run().returncode == 2  # as long as its plan is there
    (world.folder / "plan.json").unlink()
    assert world.run().returncode == 0
    assert world.plan().more == 0
    after = {cell.id for cell in world.plan().cells}
    assert after - before
    assert before - after
    for warmup in (0, 60):
        rates = [cell.axes[RATE] for cell in world.plan().cells if cell.axes[WARMUP] == warmup]
        assert min(rates) < (0.025 if warmup else 0.0125)


def test_time_that_ends_between_two_rounds_is_no_success(world: World) -> None:
    world.write(delay=0.01, **KINDS["refine"])
    cut = world.run("seconds=1000", "late=24")
    assert len(world.lines("end")) == 24
    assert cut.returncode == 130
    assert world.plan().more > 0
    assert world.run().returncode == 0
    assert world.plan().more == 0


@pytest.mark.parametrize(("kind", "edited"), [("search", True), ("refine", False)])
def test_a_damaged_result_of_a_search_is_repaired(world: World, kind: str, edited: bool) -> None:
    """Also with an edited grid file, for which a new plan is made from the finished results."""
    world.write(delay=0.01, **KINDS[kind])
    assert world.run().returncode == 0
    result, before = sorted(world.folder.glob("runs/*/result.json"))[0], world.plan().cells
    result.write_text(result.read_text()[:-5])
    if edited:
        world.write(delay=0.01, **KINDS[kind], question="Which rate is best?")
    done = world.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "@damaged-1, the cell runs again" in done.stdout
    assert {run.state for run in world.runs().values()} == {"done"}
    assert world.plan().cells == before


def studies_by_name(world: World) -> dict[str, optuna.Study]:
    """The studies of a grid that optuna-dashboard shows besides that of its cells."""
    journal = JournalFileBackend(str(world.folder / "optuna.journal"))
    storage = optuna.storages.JournalStorage(journal)
    names = [each for each in optuna.get_all_study_names(storage) if each.startswith("tiny, ")]
    return {name: optuna.load_study(study_name=name, storage=storage) for name in names}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("kind", "number"), [("search", 4), ("until", 28)])
def test_a_study_per_arm_or_seed_for_the_dashboard(world, undisturbed, kind, number) -> None:
    world.write(delay=0.01, **KINDS[kind])
    assert world.run().returncode == 0
    studies = studies_by_name(world)
    assert len(studies) == number
    chosen = {"model.block.preset": "pre_ln", WARMUP: 60} | ({SEED: 6} if kind == "until" else {})
    name = ", ".join(["tiny", *(f"{axis}={value}" for axis, value in chosen.items())])
    study, cells = studies[name], undisturbed(kind)["cells"]
    cells = [cell for cell in cells if chosen.items() <= cell["axes"].items()]
    rates = list(dict.fromkeys(cell["axes"][RATE] for cell in cells))
    assert study.metric_names == ["val/nll"]
    assert [trial.params[RATE] for trial in study.trials] == rates
    metrics = undisturbed(kind)["metrics"]
    for trial in study.trials:
        values = [
            # At most H_uni, which a failed run has
            6.0 if cell["axes"][RATE] > 0.3 else min(6.0, metrics[cell["name"]]["val/nll"])
            for cell in cells
            if cell["axes"][RATE] == trial.params[RATE]
        ]
        assert trial.value == pytest.approx(sum(values) / len(values), abs=1e-12)
    assert study.best_trial.value == min(trial.value or math.inf for trial in study.trials)


def searching(*fields: str, **changes: Any) -> dict[str, Any]:
    named = {"fields": {field: {"low": 8, "high": 9} for field in fields}} if fields else {}
    return {"search": {**SEARCH, **named, **changes}}


def refining(axes: Any = RATE_AXIS, **changes: Any) -> dict[str, Any]:
    return {"refine": {"budget": 20, **changes}, "axes": axes}


HALF = {"base_config": {"trainer": {"precision": "bf16-true"}}}
DECAY = "model.optimizer.weight_decay"
STEPPED = {RATE: {"low": 0.1, "high": 0.4, "step": 0.1}}
BY_SEED = {"fields": STEPPED, "per": "seed", "trials": 4, "budget": None}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (searching("model.optimizer.kind"), "model.optimizer.kind: .* found 'adam'"),
    (searching(fields={RATE: {"low": 1.0, "high": 1.0}}), r"above low \(1\), found 1"),
    (searching(budget=4), "search.budget: .* 6 runs per arm, .* found 4"),
    (searching() | {"axes": RATE_AXIS}, f"search.fields: {RATE}: is also on the axis {RATE}"),
    (refining({RATE: [1e-3]}), f"refine: .* {RATE} of at least two rates, found 1"),
    (refining({}), "at least two rates, found 0"),
    (refining(budget=3), "refine.budget: .* 4 runs per arm"),
    (refining(until=0), "until: .* above 0, found 0"),
    (searching(sampler="best"), "sampler"),
    (searching(WARMUP) | {"pruner": "median", "metric": {"name": "val/nll"}}, f"axis {WARMUP}"),
    (searching(WARMUP) | HALF, f"axes: {WARMUP}: .*bf16-mixed"),
    ({"axes": {**RATE_AXIS, "trainer.precision": ["32-true", "16-true"]}}, f"{RATE}: .* 16-true"),
    (searching(fields={}), "fields: .* at least one"),
    (searching(**BY_SEED), f"fields: {RATE}: step: .* remove step"),
    (searching() | {"refine": {"budget": 20}}, "refine: cannot be combined with 'search'"),
    (refining({**RATE_AXIS, DECAY: {RATE: {1e-3: 0.1, 1e-2: 0.01}}}), f"{DECAY}: follows {RATE}"),
    (refining() | {"exclude": [{RATE: 1e-2, SEED: 2}]}, f"exclude: names {RATE}"),
    ({"metric": {"name": "val/bleu", "mode": "min"}}, "metric.mode: min; expected max"),
    (searching() | {"metric": {"name": "test/bleu"}}, "metric.name: 'test/bleu' would"),
    (refining() | {"metric": {"name": "test/nll"}}, "metric.name: 'test/nll' would choose"),
    *(
        (searching(field), f"fields: {field}: ch")
        for field in (
            *("data.vocab_size", "trainer.limit_val_batches", "trainer.max_steps", "data.window"),
            *("data.tokens_per_batch", "trainer.accumulate_grad_batches", "model.objective.beam"),
            "data.evaluation_stride",
        )
    ),
    (refining() | {"pruner": "median"}, "pruner"),
]


@pytest.mark.parametrize(("parts", "message"), MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        spec_of(tmp_path, **parts)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sampler", "fields", "said"),
    [
        ("cmaes", [RATE], "cmaes searches at least two fields"),
        ("cmaes", [RATE, "model.architecture.dropout"], "cmaes needs `pip install cmaes`"),
    ],
)
def test_a_sampler_that_cannot_search_is_refused(tmp_path, monkeypatch, sampler, fields, said):
    """Optuna imports the packages of a sampler only once a round has ended."""
    there = "there" if len(fields) == 1 else None
    monkeypatch.setattr("lightning_app.grids.search.find_spec", lambda _: there)
    chosen = {field: {"low": 1e-4, "high": 0.5} for field in fields}
    spec = spec_of(tmp_path, search={**SEARCH, "sampler": sampler, "fields": chosen})
    with pytest.raises(UserError, match=said):
        search_arms(spec, list(combinations(spec)), {})


def test_every_arm_has_as_many_trials_whatever_seeds_it_lacks(tmp_path: Path) -> None:
    exclude = [{"model.block.preset": "pre_ln", SEED: 2}]
    for parts in ({"search": SEARCH}, {"refine": {"budget": 6}, "axes": {RATE: [0.01, 0.02]}}):
        spec = spec_of(tmp_path, exclude=exclude, **parts)
        cells, _ = ended(spec, lambda cell: -cell[RATE])  # a refinement goes to larger rates
        rates = {cell["model.block.preset"]: set() for cell in cells}
        for cell in cells:
            rates[cell["model.block.preset"]].add(cell[RATE])
        found = {name: len(tried) for name, tried in rates.items()}
        assert found == dict.fromkeys(("pre_ln", "post_ln"), 12 if "search" in parts else 3)


@pytest.mark.parametrize("step", [None, 0.25])
def test_a_field_is_searched_by_its_type_and_not_by_its_bounds(world: World, step: Any) -> None:
    """Whole numbers as bounds of a float, which would otherwise be the only values."""
    field = {"low": 1, "high": 2, "step": step}
    search = {"sampler": "random", "fields": {RATE: field}, "budget": 16}
    world.write(delay=0.01, search=search)
    assert world.run().returncode == 0
    tried = {cell.axes[RATE] for cell in world.plan().cells}
    assert len(tried) > 2
    assert all(isinstance(value, float) for value in tried)
    kinds = [
        kind
        for study in (world.study(), *studies_by_name(world).values())
        for trial in study.trials
        for kind in trial.distributions.values()
    ]
    assert not any(isinstance(kind, optuna.distributions.IntDistribution) for kind in kinds)


def test_the_grid_file_in_the_folder_is_the_same_grid(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, axes={RATE: [1e-3, 1e-2]}, refine={"budget": 20})
    cells = list(wanted(search_arms(spec, list(combinations(spec)), {})))
    path = tmp_path / "written.yaml"
    path.write_text(yaml.safe_dump(spec.with_cells([*cells, {**cells[0], RATE: 0.1}]).tree()))
    assert read_spec(path).tree() == spec.tree()
