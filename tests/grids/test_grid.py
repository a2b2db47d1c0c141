from pathlib import Path

import pytest
import yaml

from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.tree import same
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import combinations
from tests.told import told

GRID = {
    "name": "tiny",
    "base_config": {"seed_everything": 1},
    "axes": {"model.block.preset": ["post_ln", "pre_ln"], "model.schedule.warmup_steps": [0, 60]},
    "exclude": [{"model.block.preset": "pre_ln", "model.schedule.warmup_steps": 60}],
    "metric": {"name": "val/nll", "mode": "min"},
    "sensitivity": {"reference_warmup": 60, "baseline": "pre_ln"},
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(GRID | changes, sort_keys=False))
    return path


def again(spec: GridSpec, folder: Path) -> GridSpec:
    """The grid that is read from what another one writes."""
    (folder / "copy.yaml").write_text(yaml.safe_dump(spec.tree(), sort_keys=False))
    return read_spec(folder / "copy.yaml")


def test_reads_a_grid_with_its_question_and_base(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "run.yaml").write_text("model: {optimizer: {lr: 5e-4}}\n")
    path = tmp_path / "grid.yaml"
    path.write_text(
        "# Which one?\n# 4 cells.\n\n# no question\nname: a.b-c\nbase: base/run.yaml\n"
        "axes: {model.optimizer.lr: [1e-3, 2.0e-3]}\n"
    )
    grid = read_spec(path)
    assert grid.question == "Which one?\n4 cells."
    assert grid.base_config == {"model": {"optimizer": {"lr": 0.0005}}}
    assert grid.axes == {"model.optimizer.lr": [0.001, 0.002]}
    assert (grid.metric, grid.mode, grid.sensitivity) == ("val/nll", "min", {})


@pytest.mark.parametrize(
    ("name", "mode"),
    [("val/nll", "min"), ("test/perplexity", "min"), ("val/bleu", "max"), ("val/accuracy", "max")],
)
def test_a_metric_without_a_mode_has_its_own(tmp_path: Path, name: str, mode: str) -> None:
    """Where it was always `min`, a grid of BLEU called its worst run the best."""
    path = tmp_path / "mine.yaml"
    tree = {"name": "mine", "base_config": {}, "axes": {"seed_everything": [1]}}
    path.write_text(yaml.safe_dump({**tree, "metric": {"name": name}}))
    assert read_spec(path).mode == mode
    path.write_text(yaml.safe_dump({**tree, "metric": {"name": name, "mode": mode}}))
    assert read_spec(path).mode == mode
    other = {"min": "max", "max": "min"}[mode]
    path.write_text(yaml.safe_dump({**tree, "metric": {"name": name, "mode": other}}))
    with pytest.raises(UserError, match=rf"metric\.mode: {other}; expected {mode}"):
        read_spec(path)


TWO = {
    "model.block.preset": ["pre_ln", "post_ln"],
    "model.block.norm": ["layer_norm", "rms_norm"],
    "model.block.qk_norm": [False, True],
    "model.optimizer.lr": [1e-3, 2e-3],
    "model.optimizer.kind": ["adam", "sgd"],
    "seed_everything": [1, 2, 3],
}
FREE = {"sensitivity": {}, "exclude": []}
RATES = {"axes": {"model.optimizer.lr": [0.1, 0.2]}, **FREE}
STEPS = {"data.name": {"rte": 900, "cola": 2500, "mrpc": 900}}
FOLLOWS = {"data.name": ["cola", "rte", "mrpc"], "trainer.max_steps": STEPS, "seed_everything": [1]}


def of_axes(axes: dict, said: str, **given: object) -> tuple[dict, str]:
    return {"axes": axes, **FREE, **given}, said


LABELS = [
    ({"labels": {"model.block.nrom": ["a", "b"]}}, "did you mean 'model.block.norm'"),
    ({"labels": {"model.optimizer.lr": ["a", "b"]}}, "labels: model.optimizer.lr:"),
    ({"labels": {"model.optimizer.kind": ["", "b"]}}, "not 'all' … ''"),
    ({"labels": {"model.optimizer.kind": ["a", "b, c"]}}, "without + … 'all' and"),
    ({"labels": {"model.optimizer.kind": ["all", "b"]}}, "not empty, found 'all'"),
    ({"labels": {"model.optimizer.kind": ["a", "b "]}}, "not empty, found 'b '"),
    ({"labels": {"model.block.preset": ["", "b"]}}, "not empty, found ''"),
    ({"labels": {"model.block.norm": ["a", "a+b"]}}, "without + … 'all', found"),
    ({"labels": {f"model.block.{k}": ["", "x"] for k in ("norm", "qk_norm")}}, "'pre_ln+x'"),
    ({"labels": {"model.block.norm": ["a"]}}, "expected 2 different texts"),
    ({"labels": {"model.block.norm": ["a", "a"]}}, "expected 2 different texts"),
    ({"variants": ["model.block.norm"]}, "variants: model.block.norm: … are variants anyway"),
    ({"variants": ["model.optimizer.knid"]}, "variants: … did you mean 'model.optimizer.kind'"),
    ({"variants": ["seed_everything"]}, "variants: seed_everything: expected an axis"),
    ({"variants": ["model.optimizer.lr"]}, "variants: model.optimizer.lr: expected an axis"),
    ({"variants": ["model.optimizer.kind"] * 2}, "variants: … given twice"),
    (
        {
            "labels": {"model.block.qk_norm": ["", "x"], "model.optimizer.kind": ["", "x"]},
            "variants": ["model.optimizer.kind"],
        },
        "'pre_ln+norm=layer_norm+x' would name 2 variants",
    ),
    ({"factors": {"norm": "model.block.nrom"}}, "factors: norm: … 'model.block.nrom'"),
    ({"factors": {"rate": "model.optimizer.lr"}}, "has measures of"),
    ({"factors": {"seed": "seed_everything"}}, "has measures of"),
    ({"factors": {"a": "model.block.norm", "b": "model.block.norm"}}, "given twice"),
]
FOLLOWING = [
    ({}, "expected a list"),
    ({"data.nmae": {}}, "follows 'data.nmae'"),
    ({"trainer.max_steps": {}}, "follows 'trainer.max_steps'"),
    ({"data.name": [1, 2, 3]}, "data.name:"),
    ({"data.name": {"rte": 1, "cola": 2}}, "data.name: … 'mrpc'"),
    ({"data.name": {**STEPS["data.name"], "colla": 2}}, "data.name: … 'colla' … 'cola'?"),
    ({"data.name": {**STEPS["data.name"], "rte": float("nan")}}, "is not a"),
]
MISTAKES = [
    ({"exlude": []}, "'exlude'; … 'exclude'?"),
    ({"base": "base.yaml"}, "'base' ( … 'base_config'"),
    ({"axes": {}}, "at least one"),
    ({"axes": {"seed_everything": [1, 2, 1.0]}}, "seed_everything: value 1"),
    ({"axes": {"model.optimizer.lr": [float("nan")]}}, "lr: nan"),
    *(({"axes": {"model.block.norm": [*of]}}, "one name") for of in ((4, "4"), (True, "true"))),
    ({"axes": {"model.block.norm": [None, "null"]}}, "one name"),
    ({"axes": {"model": [{}], "model.block": [{}]}}, "model.block lies inside of"),
    (
        {"axes": {f"trainer.x{n}": list(range(1000)) for n in range(3)}, "exclude": []},
        "axes: … 1,000,000,000 cells",
    ),
    (
        {"axes": {f"trainer.x{n}": list(range(10)) for n in range(5000)}, "exclude": []},
        "axes: … 10^5000 cells",
    ),
    ({"exclude": [{"model.block.prest": "sas"}]}, "did you mean 'model.block.preset'?"),
    ({"exclude": [{"model.block.preset": "pre_nl"}]}, "did you mean 'pre_ln'?"),
    ({"exclude": [{}]}, "would exclude every"),
    ({"metric": {"name": "val/nl"}}, "metric.name: … 'val/nl'; … 'val/nll'?"),
    ({"sensitivity": {"reference_warmup": 50}}, "reference_warmup: 50"),
    ({"sensitivity": {"baseline": "preln"}}, "did you mean 'pre_ln'?"),
    ({"pruner": "median"}, "'sensitivity':"),
    ({"name": "fit"}, "name: 'fit'"),
    ({"published": "figures.yaml"}, "published: is no more; say what papers report"),
    (RATES | {"pruner": "median", "axes": GRID["axes"]}, "pruner: … model.schedule.warmup_steps:"),
    (
        RATES | {"pruner": "median", "metric": {"name": "test/nll"}},
        "pruner: … 'test/nll' … val/...",
    ),
    *(of_axes(TWO, said, **given) for given, said in LABELS),
    of_axes(
        TWO | {"model.block.preset": ["pre_ln", "post_ln", "sas"]},
        "placement: … has 3",
        factors={"placement": "model.block.preset"},
    ),
    *(  # their losses would be compared in one group
        of_axes({axis: values}, f"variants: {axis}: expected an axis", variants=[axis])
        for axis, values in (
            *(("data.vocab_size", [1, 2]), ("trainer.max_steps", [1, 2])),
            *(("data.name", ["synthetic", "iwslt14"]), ("model.objective.label_smoothing", [1, 2])),
        )
    ),
    *(
        of_axes({**FOLLOWS, "trainer.max_steps": given}, f"axes: trainer.max_steps: … {said}")
        for given, said in FOLLOWING
    ),
]


@pytest.mark.parametrize(("changes", "said"), MISTAKES)
def test_a_mistake_names_file_field_and_what_is_near(tmp_path, changes: dict, said: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(UserError, match=told(said)) as error:
        read_spec(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_labels_factors_values_that_follow_pruners_and_variants_are_kept(tmp_path: Path) -> None:
    given = {
        "labels": {"model.block.norm": ["", "rms"], "model.optimizer.kind": ["Adam", "SGD"]},
        "factors": {"placement": "model.block.preset", "norm": "model.block.norm"},
    }
    spec = read_spec(write(tmp_path, axes=TWO, sensitivity={}, exclude=[], **given))
    assert (spec.labels, spec.factors) == (given["labels"], given["factors"])
    copy = again(spec, tmp_path)
    assert (copy.labels, copy.factors) == (spec.labels, spec.factors)
    # An axis may follow another.
    spec = read_spec(write(tmp_path, axes=FOLLOWS, sensitivity={}, exclude=[]))
    assert spec.axes["trainer.max_steps"] == [2500, 900]
    steps = [(axes["data.name"], axes["trainer.max_steps"]) for axes in combinations(spec)]
    assert steps == [("cola", 2500), ("rte", 900), ("mrpc", 900)]
    copy = again(spec, tmp_path)
    assert (copy.tree(), copy.linked) == (spec.tree(), spec.linked)
    by_seed = {"trainer.max_steps": {"seed_everything": {1: 7, 2: 8}}, "seed_everything": 2}
    spec = read_spec(write(tmp_path, axes=by_seed, sensitivity={}, exclude=[]))
    assert spec.axes["trainer.max_steps"] == [7, 8]
    own = {"variants": ["model.optimizer.kind"], "labels": {"model.optimizer.kind": ["", "SGD"]}}
    axes = {name: TWO[name] for name in ("model.optimizer.kind", "seed_everything")}
    baseline = {"sensitivity": {"baseline": "SGD"}}  # without an axis of presets, a variant
    spec = read_spec(write(tmp_path, axes=axes, exclude=[], **own, **baseline))
    names = [spec.variant({"model.optimizer.kind": kind}) for kind in ("adam", "sgd")]
    assert names == ["base", "SGD"]  # the base config names no preset
    assert again(spec, tmp_path).variants == ("model.optimizer.kind",)
    plain = read_spec(write(tmp_path, **RATES))
    assert (plain.pruner, plain.checkpoints) == (None, "all")
    grid = read_spec(write(tmp_path, **RATES, pruner="hyperband", checkpoints="none"))
    assert (grid.pruner, grid.checkpoints) == ("hyperband", "none")
    assert again(grid, tmp_path).tree() == grid.tree()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: a\nname: b\n", "line 2: key 'name'"),
        (b"axes:\n  x: [1]\n  x: [2]\n", "line 3: key 'x'"),
        (b"name: [a\n", "line 2:"),
        (b"- a\n", "expected a mapping"),
        (b"", "expected a mapping"),
        (b"1: a\n", "unknown key '1'"),
        (b"name: \xff\xfe\n", "invalid UTF-8 at byte 6"),
        (b"name: !!python/object/apply:os.getcwd []\n", "could not determine"),
        (b"name: a\nbase: nowhere.yaml\naxes: {a: [1]}\n", "no such file"),
    ],
)
def test_a_file_that_is_no_grid(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=told(f"grid.yaml … {said}")):
        read_spec(path)


def test_a_mistake_in_the_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: 1\na: 2\n")
    (tmp_path / "grid.yaml").write_text("name: a\nbase: base.yaml\naxes: {a: [1]}\n")
    with pytest.raises(UserError, match=r"base\.yaml: line 2: key 'a'"):
        read_spec(tmp_path / "grid.yaml")


def test_values_mean_the_same_or_not() -> None:
    assert same(400, 400.0)
    assert same([1, {"a": None}], [1, {"a": None}])
    assert not same(1, True)
    assert not same(400.0, 400.001)
    assert not same("1", 1)
