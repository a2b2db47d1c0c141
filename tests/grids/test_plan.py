import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stand_in  # pyright: ignore[reportMissingImports]

from lightning_app.config.config import resolve
from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.tree import variant
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import (
    Grid,
    cell_tree,
    expand,
    is_valid,
    load_plan,
    made_from,
    score_of,
)
from lightning_app.grids.plan_checks import axis_cautions, devices_of, most_read
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.records import DamagedPlan, Plan, read_plan
from tests.told import told

PRESET, WARMUP, SEED = "model.block.preset", "model.schedule.warmup_steps", "seed_everything"


def grid(**changes: Any) -> GridSpec:
    axes = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], SEED: [1, 2, 3]}
    values = {"base_config": {}, "axes": axes, "exclude": (), "sensitivity": {}}
    texts = {"source": "g.yaml", "name": "tiny", "question": "", "metric": "val/nll", "mode": "min"}
    return GridSpec(**{**texts, **values, **changes})


def plan_of(given: GridSpec) -> Plan:
    return expand(given, stand_in.resolve, stand_in.identify)[0]


def test_seeds_are_slowest_then_file_order_and_names_stay_in_the_folder() -> None:
    cells = plan_of(grid()).cells
    assert [cell.axes[SEED] for cell in cells] == [1] * 4 + [2] * 4 + [3] * 4
    order = [(preset, warmup) for preset in ("post_ln", "pre_ln") for warmup in (0, 60)]
    assert [(cell.axes[PRESET], cell.axes[WARMUP]) for cell in cells[:4]] == order
    assert list(cells[0].axes) == [PRESET, WARMUP, SEED]
    assert cells[1].name == f"post_ln-warmup60-seed1-{cells[1].id[:8]}"
    evil = grid(axes={PRESET: ["../../etc/passwd", "-rf", ".", "a b\n\0c", "x" * 500]})
    for cell in plan_of(evil).cells:
        assert "/" not in cell.name
        assert cell.name[0] not in ".-"
        assert cell.name.isprintable()
        assert len(cell.name) < 200
        assert Path("runs", cell.name).resolve().parent == Path("runs").resolve()


def test_excluded_cells_are_left_out_and_counted() -> None:
    plan = plan_of(grid(exclude=({PRESET: "pre_ln", WARMUP: 60.0}, {SEED: 3, WARMUP: 0})))
    assert (plan.excluded, len(plan.cells)) == (5, 7)
    # A refinement asks for the cells of a round.
    asked = ({PRESET: "post_ln", WARMUP: 0, SEED: 1}, {PRESET: "post_ln", WARMUP: 30, SEED: 1})
    later = plan_of(grid(exclude=({PRESET: "pre_ln"},), asked=asked))
    assert (later.excluded, len(later.cells)) == (6, 2)
    for cell in plan.cells:
        assert (cell.axes[PRESET], cell.axes[WARMUP]) != ("pre_ln", 60)
        assert (cell.axes[SEED], cell.axes[WARMUP]) != (3, 0)
    with pytest.raises(UserError, match="no cell is"):
        plan_of(grid(exclude=({PRESET: "pre_ln"}, {PRESET: "post_ln"})))


def test_sections_resolved_apart_give_what_resolving_every_cell_gives() -> None:
    shaped = [None, {"alpha": 1.0}, {"beta": 2.0}]
    axes = {PRESET: ["post_ln", "sas"], "model.block.shaped_attention": shaped}
    axes |= {"model.optimizer.lr": [0.1, 0.2], "trainer.max_steps": [4, 5]}
    axes |= {WARMUP: [0, 60], SEED: [1, 2]}
    given = grid(axes=axes, exclude=({PRESET: "post_ln", SEED: 1},))
    plan, configs = expand(given, stand_in.resolve, stand_in.identify)
    assert len(plan.cells) == 72
    for cell, config in zip(plan.cells, configs, strict=True):
        full = stand_in.resolve(cell_tree(given.base_config, cell.axes), "")
        assert config == full
        assert cell.id == stand_in.cell_id(full)
        assert config["data"]["seed"] == cell.axes[SEED]  # a field that the seed reaches


def test_thousands_of_cells_take_few_resolutions() -> None:
    calls = []

    def counted(tree: dict, source: str) -> dict:
        calls.append(source)
        return stand_in.resolve(tree, source)

    axes = {PRESET: ["a", "b", "c"], "model.optimizer.lr": [k / 10 for k in range(1, 11)]}
    given = grid(axes={**axes, WARMUP: [0, 10, 20], SEED: list(range(50))})
    plan, _ = expand(given, counted, stand_in.identify)
    assert len(plan.cells) == 4500
    assert len(calls) <= 2 + 3 + 10 + 3 + 50


def test_an_impossible_pair_names_the_cell_which_runs_on_one_host() -> None:
    axes = {PRESET: ["post_ln", "sas"], "model.block.norm": ["none", "layer_norm"]}
    with pytest.raises(UserError, match=r"cell model.block.preset=sas, model.block.norm=none"):
        plan_of(grid(axes=axes))
    rest = plan_of(grid(axes=axes, exclude=({PRESET: "sas", "model.block.norm": "none"},)))
    assert len(rest.cells) == 3

    def on_two(tree: dict, source: str) -> dict:
        config = stand_in.resolve(tree, source)
        return {**config, "trainer": {**config["trainer"], "num_nodes": 2}}

    with pytest.raises(UserError, match=r"num_nodes: 2;.*1 host"):
        expand(grid(), on_two, stand_in.identify)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"model.optimizer.lrr": [1]}, "'model.optimizer.lrr'; … 'model.opt"),
        ({"modle.optimizer.lr": [1]}, "did you mean 'model.optimizer.lr'?"),
        ({"nonsense": [1]}, "g.yaml: axes: no field 'nonsense'"),
        ({"trainer.devices": [1, 2]}, "twice: trainer.devices=1, trainer.devi"),
        ({"trainer.devices": [[0, 1]]}, "g.yaml: trainer.devices: [0, 1]"),
        ({"trainer.devices": ["0,"]}, "g.yaml: trainer.devices: '0,'"),
        ({"trainer.devices": [0]}, "g.yaml: trainer.devices: expected 1 … 0"),
        ({"trainer.devices": ["two"]}, "trainer.devices: expected 1 … 'two'"),
        ({WARMUP: [0, 100]}, "reference_steps: 60"),
        ({"model.schedule.kind": ["linear"], WARMUP: [0, 100]}, "reference_steps: 60"),
    ],
)
def test_axes_that_cannot_be(axes: dict, said: str) -> None:
    with pytest.raises(UserError, match=told(said)):
        plan_of(grid(axes=axes))


@pytest.mark.parametrize(("value", "devices"), [("auto", 1), (-1, 1), (1, 1), ("2", 2), (4, 4)])
def test_devices_of_a_cell(value: Any, devices: int) -> None:
    in_base = grid(base_config={"trainer": {"devices": value}})
    assert devices_of(in_base) == devices_of(grid(axes={"trainer.devices": [value]})) == devices
    assert len(plan_of(in_base).cells) == 12
    assert devices_of(grid()) == 1


def test_a_coupled_schedule_needs_no_reference() -> None:
    base = {"model": {"schedule": {"coupling": "paper"}}}
    assert len(plan_of(grid(base_config=base, axes={WARMUP: [0, 100]})).cells) == 2


def test_a_variant_is_the_blocks_axes_preset_first_and_may_be_the_baseline() -> None:
    axes = {"model.block.norm": ["rms_norm", "layer_norm"]}
    plan_of(grid(axes=axes, sensitivity={"baseline": "norm=rms_norm"}))
    with pytest.raises(UserError, match=r"did you mean 'norm=rms_norm'\?"):
        plan_of(grid(axes=axes, sensitivity={"baseline": "norm=rmsnorm"}))
    assert variant({"model.block.norm": None, PRESET: "sas", SEED: 1}, {}) == "sas+norm=null"
    assert variant({"model.block.norm": "rms_norm"}, {}) == "norm=rms_norm"
    assert variant({SEED: 1}, {"model": {"block": {"preset": "pre_ln"}}}) == "pre_ln"
    assert variant({SEED: 1}, {}) == "base"


def test_a_plan_survives_the_disk_and_holds_while_nothing_changes(tmp_path: Path) -> None:
    given = grid()
    plan = plan_of(given)
    path = tmp_path / "plan.json"
    assert load_plan(path) is None
    saved = Grid(given, GridFolder(tmp_path), plan)
    assert not saved.is_saved()
    saved.save()
    assert saved.is_saved()
    assert load_plan(path) == plan
    assert is_valid(plan, given, lambda data: stand_in.CORPUS)
    other = replace(plan, cells=(replace(plan.cells[0], id="0" * 16), *plan.cells[1:]))
    assert not is_valid(other, given, lambda data: stand_in.CORPUS)
    assert plan.made_from == made_from(given) == made_from(read_spec(tmp_path / "grid.yaml"))
    assert made_from(replace(given, base_config={"data": {"delay": 1}})) != plan.made_from
    tree = json.loads((tmp_path / "plan.json").read_text())
    assert (tree["schema"], tree["name"], tree["excluded"]) == (3, "tiny", 0)
    assert tree["cells"][0].keys() == {"id", "name", "axes"}
    # An edited one is refused by every reader.
    assert read_plan(path).name == given.name
    cells = [{**tree["cells"][0], "axes": tree["cells"][-1]["axes"]}, *tree["cells"][1:]]
    path.write_text(json.dumps({**tree, "cells": cells}))
    with pytest.raises(UserError, match="seal"):
        read_plan(path)
    with pytest.raises(DamagedPlan, match="seal"):
        load_plan(path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(DamagedPlan, match=r"plan\.json:.*`ablate run` makes"):
        load_plan(path)
    (tmp_path / "plan.json").write_text(json.dumps({**tree, "schema": 99}))
    with pytest.raises(UserError, match=r"plan\.json: schema 99:.*$"):
        load_plan(path)
    for wrong in ({**tree, "cells": 3}, {**tree, "cells": [{"id": 1}]}, {"schema": 2}, []):
        (tmp_path / "plan.json").write_text(json.dumps(wrong))
        with pytest.raises(DamagedPlan, match=r"plan\.json: torn or damaged"):
            load_plan(path)


@pytest.mark.parametrize("name", ["../../..", "/tmp/x", "a/b", "", "..", "a\nb"])
def test_a_plan_names_no_folder_elsewhere(tmp_path: Path, name: str) -> None:
    """A plan of an earlier version has no seal, and may come from somebody else."""
    given = grid()
    path = tmp_path / "plan.json"
    Grid(given, GridFolder(tmp_path), plan_of(given)).save()
    whole = json.loads(path.read_text())
    del whole["seal"]
    first, *others = whole["cells"]
    for tree in (
        {**whole, "schema": 2, "name": name},
        {**whole, "schema": 2, "cells": [{**first, "name": name}, *others]},
    ):
        path.write_text(json.dumps(tree))
        with pytest.raises(UserError, match="the name of"):
            read_plan(path)
        with pytest.raises(DamagedPlan, match="the name of"):
            load_plan(path)
    with pytest.raises(UserError, match="the name of"):
        GridFolder(tmp_path).link(name)


def test_the_study_is_another_where_cells_or_metric_are(tmp_path: Path) -> None:
    plan = plan_of(grid())
    assert plan.study == f"tiny-{plan.hash}" == plan_of(grid(question="?")).study
    assert plan_of(grid(mode="max")).study != plan.study
    assert plan_of(grid(base_config={"data": {"delay": 1}})).study != plan.study


SHORT_RUN: dict[str, Any] = {
    "trainer": {"max_steps": 100, "accelerator": "cpu"},
    "model": {
        "architecture": {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 16, "ff_dim": 16},
        "schedule": {"warmup_steps": 10, "reference_steps": 10},
    },
    "data": {"name": "synthetic", "tokenizer": "word", "vocab_size": None},
}
STOPPING = {
    "class_path": "lightning.pytorch.callbacks.EarlyStopping",
    "init_args": {"monitor": "val/nll"},
}


def planned(axes: dict[str, list[Any]], fields: dict[str, Any] | None = None) -> Plan:
    """The plan of a real grid with fields of its base changed."""
    base = cell_tree(SHORT_RUN, fields or {})
    given = grid(base_config=base, axes=axes, base_source="base.yaml")
    return expand(given, resolve, partial(identity_of, fetch=False))[0]


@pytest.mark.parametrize("by_axis", [False, True])
@pytest.mark.parametrize(
    ("key", "value"), [("trainer.max_time", "00:00:01:00"), ("trainer.callbacks", [STOPPING])]
)
def test_what_cuts_cells_short_is_refused(key: str, value: Any, by_axis: bool) -> None:
    axes = {SEED: [1, 2], **({key: [None, value]} if by_axis else {})}
    with pytest.raises(UserError, match="ablate run --max-time") as error:
        planned(axes, {} if by_axis else {key: value})
    assert str(error.value).startswith(f"{'g' if by_axis else 'base'}.yaml: {key}: ")


@pytest.mark.parametrize("kind", ["inverse_sqrt", "linear", "cosine", "sqrt", "constant", "bert"])
def test_a_warmup_of_all_steps_is_refused_and_a_long_one_named(kind: str) -> None:
    fields = {"model.schedule.kind": kind, "model.schedule.reference_steps": 99}
    with pytest.raises(UserError, match="warmup_steps: 100"):
        planned({WARMUP: [0, 100]}, fields)
    (warning,) = planned({WARMUP: [0, 50, 51]}, fields).warnings
    assert "warmup_steps: 51" in warning
    if kind == "inverse_sqrt":  # which may be constant, as in a trial of few steps
        late = planned({WARMUP: [0, 50]}, fields | {"model.schedule.reference_steps": 100}).warnings
        assert [line.split(",")[0] for line in late] == ["model.schedule.reference_steps: 100"]
        assert "stays constant" in late[0]


@pytest.mark.parametrize(
    ("rates", "warmup", "said"),
    [
        ([1e-3, 1.0, 2.0], 0, "lr: 1, 2: … one rate in 100 of 100 steps"),
        ([1e-3, 0.1, 0.5, 1.0], 0, "lr: 0.5, 1: … one rate in 97 of 100 steps"),
        ([0.3, 1.0], 50, "lr: 0.3, 1: … one rate in 70 of 100 steps"),
        ([1e-3, 0.1, 1.0], 0, None),
    ],
)
def test_rates_above_the_cap_of_adafactor_are_named(rates: Any, warmup: int, said: Any) -> None:
    """By the authors' rule min(lr, 1 / sqrt(step)), with the schedule in lr."""
    fields = {"model.optimizer.kind": "adafactor", "model.schedule.kind": "constant"}
    axes = {"model.optimizer.lr": rates, SEED: [1, 2]}
    lines = planned(axes, fields | {WARMUP: warmup}).warnings
    assert len(lines) == (said is not None)
    assert said is None or told(said).search(lines[0])
    epochs = {"trainer.max_steps": -1, "trainer.max_epochs": 2, "trainer.val_check_interval": 1.0}
    epochs["trainer.check_val_every_n_epoch"] = 1
    others = ({"model.optimizer.weight_decay": 0.1}, {"model.optimizer.block_rate": 0.1}, epochs)
    assert not any(planned(axes, fields | each | {WARMUP: warmup}).warnings for each in others)


TASK = {
    "trainer": {"limit_val_batches": None, "accumulate_grad_batches": 1, "max_steps": 200},
    "model": {"objective": {"kind": "translation", "beam": 5, "validation_bleu": 0}},
    "data": {"tokenizer": "word", "vocab_size": 10, "tokens_per_batch": 256, "window": 32},
}


def with_task(tree: dict, source: str) -> dict:
    """What the stand-in resolves, with the fields of a task."""
    own = {**tree, "trainer": {}, "data": {}, "model": dict(tree.get("model", {}))}
    own["model"].pop("objective", None)
    config = stand_in.resolve({key: value for key, value in own.items() if value}, source)
    given = tree.get("model", {}).get("objective", {})
    config["trainer"] |= TASK["trainer"] | tree.get("trainer", {})
    config["data"] |= TASK["data"] | tree.get("data", {})
    config["model"]["objective"] = TASK["model"]["objective"] | given
    config["model"].setdefault("schedule", {})
    return config


EVALUATION = "changes only the evaluation"
TEXT, UNTESTED = {"kind": "causal_lm"}, {"evaluate_test": False}


@pytest.mark.parametrize(
    ("axis", "values", "said", "objective"),
    [
        ("data.vocab_size", [12, 8], "data.vocab_size: val/nll … test/sacrebleu", {}),
        ("data.vocab_size", [12, 8], "not compared", UNTESTED),
        ("data.tokenizer", ["word", "char"], "val/bits_per_byte", TEXT),
        ("model.objective.beam", [1, 4], f"model.objective.beam: {EVALUATION}", {}),
        ("trainer.limit_val_batches", [1, 2], f"trainer.limit_val_batches: {EVALUATION}", {}),
        ("data.tokens_per_batch", [128, 1024], "8 times the tokens", {}),
        ("trainer.accumulate_grad_batches", [1, 4], "4 times the tokens", {}),
        ("trainer.max_steps", [200, 100], "0.5 times the tokens", {}),
    ],
)
def test_a_plan_says_what_its_values_change_beside_the_model(axis, values, said, objective) -> None:
    base = {"model": {"objective": objective}} if objective else {}
    given = grid(base_config=base, axes={axis: values, PRESET: ["pre_ln", "post_ln"]})
    plan, configs = expand(given, with_task, stand_in.identify)
    (caution,) = axis_cautions(given, plan.cells, configs)
    assert told(said).search(caution)
    assert "tokens" not in said or str(values[1]) in caution
    plan, configs = expand(grid(), with_task, stand_in.identify)
    assert not axis_cautions(grid(), plan.cells, configs)


def test_a_pruner_ranks_cells_of_one_ruler_only() -> None:
    axes = {"data.vocab_size": [12, 8]}
    with pytest.raises(UserError, match=r"g.yaml: pruner: .*data.vocab_size is 12 and 8"):
        expand(grid(axes=axes, pruner="median"), with_task, stand_in.identify)
    plan_of(grid(axes={PRESET: ["pre_ln", "post_ln"]}, pruner="median"))


OPTIMIZER, SCHEDULE, WARMED = "model.optimizer", "model.schedule", "model.schedule.warmup_of"


def written(folder: Path, axes: dict[str, Any], **model: Any) -> GridSpec:
    tree = {"name": "g", "question": "?", "base_config": {"model": model}, "axes": axes}
    (folder / "g.yaml").write_text(json.dumps({**tree, "metric": {"name": "val/nll"}}))
    return read_spec(folder / "g.yaml")


def test_an_automatic_warmup_is_a_number_before_anything_reads_it(tmp_path: Path) -> None:
    model = {"optimizer": {"betas": [0.9, 0.999]}, "schedule": {"warmup_steps": "auto"}}
    spec = written(tmp_path, {PRESET: ["post_ln", "pre_ln"]}, **model)
    assert spec.base_config["model"]["schedule"] == {"warmup_steps": 2000}
    assert spec.base_config["model"]["optimizer"] == {"betas": [0.9, 0.999]}
    spec = written(tmp_path, {f"{OPTIMIZER}.betas": [[0.9, 0.98]], WARMUP: [7]}, **model)
    assert spec.base_config["model"]["schedule"] == {"warmup_steps": 2000}


@pytest.mark.parametrize(
    "axes",
    [
        {WARMUP: [0, "auto"]},
        {"model.schedule": [{"warmup_steps": 3}, {"warmup_steps": "auto"}]},
        {f"{OPTIMIZER}.betas": [[0.9, 0.98], [0.9, 0.999]]},
        {f"{OPTIMIZER}.kind": ["adam", "lamb"]},
        {OPTIMIZER: [{"kind": "adam"}, {"betas": [0.9, 0.95]}]},
    ],
)
def test_an_automatic_warmup_that_would_differ_by_cell_is_refused(tmp_path, axes) -> None:
    with pytest.raises(UserError, match=rf"g\.yaml: axes: {next(iter(axes))}: .*numbers"):
        written(tmp_path, axes, schedule={"warmup_steps": "auto"})


def test_what_is_warmed_up_is_checked_with_every_model() -> None:
    """Otherwise axes of the schedule are resolved only with the model of the first cell."""
    tied = "model.architecture.tie_embeddings"
    axes = {WARMED: ["all", "output"], tied: [False, None]}
    with pytest.raises(UserError, match=rf"{WARMED}=output, {tied}=null.*output, which .* lacks"):
        planned(axes)
    assert len(planned({WARMED: ["all", "output"], tied: [False]}).cells) == 2


QK_CLIP = {"class_path": "lightning_app.training.callbacks.safety.QKClip"}


@pytest.mark.parametrize(
    "axes",
    [
        {"model.block.qk_norm": ["none", "rms_norm"], "trainer.callbacks": [[], [QK_CLIP]]},
        {f"{OPTIMIZER}.kind": ["adamw", "adamh"], "trainer.callbacks": [[], [QK_CLIP]]},
        {PRESET: ["pre_ln", "ngpt"], f"{OPTIMIZER}.weight_decay": [0.0, 0.1]},
        {f"{SCHEDULE}.kind": ["constant", "sqrt"], f"{OPTIMIZER}.kind": ["adam", "schedule_free"]},
    ],
)
def test_pairs_of_sections_that_exclude_each_other_are_refused(axes: dict[str, Any]) -> None:
    (first, values), (second, others) = axes.items()
    for each in ({first: values, second: others[:1]}, {first: values[:1], second: others}):
        planned({**each, "model.optimizer.lr": [0.1, 0.2]})
    with pytest.raises(UserError, match=rf"{first}={values[1]}, {second}="):
        planned(axes)


def test_a_warmup_of_the_batch_leaves_out_rows_that_a_plan_counts_and_cuts_no_stream() -> None:
    """At steps 1 to 4 of 8: 0.5 + 0.5 t / 4 of each batch."""
    schedule = {"batch_warmup_steps": 4, "batch_start": 0.5}
    steps = 0.625 + 0.75 + 0.875 + 5
    for kind, tokens in (("translation", 100), ("causal_lm", 90)):  # whole windows
        config = {
            "trainer": {"max_steps": 8},
            "model": {"schedule": schedule, "objective": {"kind": kind}},
            "data": {"tokens_per_batch": 100, "window": 30},
        }
        assert most_read(config) == (round(tokens * steps), None)
    axes = {"data.order": ["shuffled", "streams"], f"{SCHEDULE}.batch_warmup_steps": [0, 5]}
    with pytest.raises(UserError, match=r"batch_warmup_steps: 5 with data\.order streams"):
        planned(axes, {"model.objective.kind": "causal_lm", "model.architecture.kind": "decoder"})


def test_a_failed_run_counts_as_no_context_whatever_its_last_validation_was() -> None:
    """A validation may lie before the step at which a run failed."""
    failed = {"status": "diverged", "unigram_entropy": 6.0, "metrics": {"val/nll": 3.0}}
    plan = replace(plan_of(grid()), metric="val/nll")
    assert score_of(plan, failed) == 6.0
    assert score_of(plan, {**failed, "status": "ok"}) == 3.0
    assert score_of(replace(plan, metric="val/perplexity"), failed) == math.exp(6.0)
    without = {**failed, "metrics": {"val/accuracy": None, "val/own": None}}
    assert score_of(replace(plan, metric="val/accuracy", mode="max"), without) == 0.0
    # What a class of a plug-in logs may be below 0: a log-likelihood, for example.
    assert score_of(replace(plan, metric="val/own", mode="max"), without) == -math.inf
