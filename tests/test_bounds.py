"""What no run can start with, refused in one line before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.config.config import resolve
from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import expand
from tests.tables import changed
from tests.told import told

BASES = Path(__file__).parents[1] / "ablations" / "base"
HUGE = 10**400


def base(name: str = "synthetic", /, **fields: Any) -> dict[str, Any]:
    """A shipped config with fields set, `a__b` for `a.b`."""
    return changed(yaml.safe_load((BASES / f"{name}.yaml").read_text()), **fields)


LOGGERS = "lightning.pytorch.loggers"
CALLBACKS = "lightning.pytorch.callbacks"


@pytest.mark.parametrize("path", [f"{CALLBACKS}.", ""])
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("GradientAccumulationScheduler", {"scheduling": {0: 1, 4: 2}}, "{4: 2}"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1, "device": None}, "EMAWeightAveraging"),
        *(("LearningRateFinder", {}, ""), ("BatchSizeFinder", {}, "")),
        *(("BackboneFinetuning", {}, ""), ("ModelPruning", {"pruning_fn": "l1_unstructured"}, "")),
    ],
)
def test_a_callback_that_no_run_can_have_is_refused_by_its_name(
    path: str, name: str, arguments: dict[str, Any], said: str
) -> None:
    callback = {"class_path": path + name, "init_args": arguments}
    for callbacks in ([callback], [{"class_path": f"{CALLBACKS}.DeviceStatsMonitor"}, callback]):
        with pytest.raises(UserError) as caught:
            resolve(base(trainer__callbacks=callbacks), "mine.yaml")
        assert told(f"mine.yaml: trainer.callbacks: {name} … {said}").match(str(caught.value))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seed_everything", False, "seed_everything: … 0 to"),
        ("seed_everything", 1.5, "seed_everything: expected"),
        ("seed_everything", 1 << 32, "found 4294967296"),
        ("trainer__max_steps", -2, "trainer.max_steps: -2 trains nothing"),
        ("trainer__max_epochs", 0, "trainer.max_epochs: 0 … 1 epoch"),
        ("trainer__max_time", "00:00:00:00", "trainer.max_time: expected 'DD:HH:MM:SS'"),
        ("trainer__max_time", {"hours": 0}, "trainer.max_time: expected 'DD:HH:MM:SS'"),
        ("trainer__max_time", "soon", "found 'soon'"),
        ("trainer__limit_train_batches", 0, "trainer.limit_train_batches: expected batches from 1"),
        ("trainer__limit_train_batches", 0.0, "found 0.0"),
        ("trainer__limit_val_batches", 1.5, "found 1.5"),
        ("trainer__limit_test_batches", 0, "trainer.limit_test_batches: expected batches from 1"),
        ("trainer", {"max_steps": -1, "max_epochs": -1}, "trainer.max_steps: -1 never ends"),
        ("trainer__fast_dev_run", 3, "trainer.fast_dev_run: 3 leaves"),
        ("trainer__overfit_batches", 2, "trainer.overfit_batches: 2 replaces the samplers"),
        ("trainer__overfit_batches", 0.1, "use limit_train_batches and limit_val_batches"),
        ("model__optimizer__lr", HUGE, "model.optimizer.lr:"),
        ("model__optimizer__betas", [0.9, float("inf")], "betas"),
        ("model__architecture__ff_dim", HUGE, "ff_dim: … 401 digits"),
        ("trainer__gradient_clip_val", float("inf"), "gradient_clip_val: inf"),
        ("trainer__max_steps", HUGE, "max_steps: … 401"),
        ("data__mask_probability", float("nan"), "data.mask_probability: nan"),
        ("trainer__logger", [{"class_path": f"{LOGGERS}.WandbLogger"}], "package 'wandb'"),
        ("trainer__logger", {"class_path": f"{LOGGERS}.MLFlowLogger"}, "package 'mlflow'"),
    ],
)
def test_a_run_refuses_it(field: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(base(**{field: value}), "mine.yaml")
    assert str(caught.value).startswith("mine.yaml: ")
    assert told(said).search(str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed_everything", 0), ("seed_everything", (1 << 32) - 1), ("trainer__max_epochs", -1)),
        *(("trainer__max_time", "00:00:00:01"), ("trainer__limit_train_batches", 1)),
        *(("trainer__limit_val_batches", 0.5), ("trainer__fast_dev_run", False)),
        *(("trainer__overfit_batches", 0.0), ("trainer__precision", "bf16-true")),
        ("trainer__logger", False),
    ],
)
def test_what_lies_just_inside_stays_possible(field: str, value: Any) -> None:
    config = resolve(base(**{field: value}), "mine.yaml")
    for key in field.split("__"):
        config = config[key]
    assert config == value


def test_a_ramp_of_branches_ends_within_the_run(tmp_path: Path) -> None:
    """Else the model that is evaluated has smaller branches than the config says."""

    def run(steps: int, ramp: int) -> dict[str, Any]:
        block = {"preset": "pre_ln", "branch_ramp": {"steps": ramp}}
        return base(trainer__max_steps=steps, model__block=block)

    resolve(run(100, 100), "mine.yaml")
    said = r"mine\.yaml: model\.block\.branch_ramp: steps 101, .* 100"
    with pytest.raises(UserError, match=said):
        resolve(run(100, 101), "mine.yaml")


def grid(folder: Path, tree: dict[str, Any], metric: str = "val/nll", /, **axes: list[Any]) -> Path:
    path = folder / "mine.yaml"
    axes = {axis.replace("__", "."): values for axis, values in axes.items()}
    whole = {"name": "mine", "base_config": tree, "axes": axes, "metric": {"name": metric}}
    path.write_text(yaml.safe_dump(whole))
    return path


@pytest.mark.parametrize("seed", [True, False, 1.0, 1.5, "1", None, -1, 1 << 32, [1]])
def test_a_seed_of_a_grid_is_a_whole_number(tmp_path: Path, seed: Any) -> None:
    """As it is written: the parser would take the text '1' and true."""
    with pytest.raises(UserError, match=r"mine\.yaml: seed_everything:"):
        read_spec(grid(tmp_path, base(seed_everything=seed), model__optimizer__lr=[0.1]))
    with pytest.raises(UserError, match=r"mine\.yaml: axes: seed_everything:"):
        read_spec(grid(tmp_path, base(), seed_everything=[3, seed]))


@pytest.mark.parametrize("section", ["model__optimizer__eps", "trainer__x", "data__window"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e999])
def test_a_number_of_a_grid_is_finite(tmp_path: Path, section: str, value: float) -> None:
    said = rf"{section.replace('__', r'.')}: -?(nan|inf) is not a finite number"
    with pytest.raises(UserError, match=said):
        read_spec(grid(tmp_path, base(**{section: value}), seed_everything=[1]))
    with pytest.raises(UserError, match=said):
        read_spec(grid(tmp_path, base(), **{section: [1, value]}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"axes: {{model.optimizer.lr: [{HUGE}]}}", "line 2: a value: … 401"),
        (f"axes: {{model.optimizer.lr: [{'9' * 5000}]}}", "5000"),
        ("axes: {? [a, b] : 1}", "a key must"),
        ('"\\e[2Jaxes": 1', r"unknown key '\x1b[2Jaxes'"),
    ],
    ids=["huge", "digits", "key", "escape"],
)
def test_a_file_that_is_too_much(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\n{text}\n")
    with pytest.raises(UserError) as caught:
        read_spec(path)
    assert told(said).search(str(caught.value))
    assert str(caught.value).isprintable()


FALSE, TEST = "model__objective__evaluate_test", "metric.name: a cell reports 'test/nll' only with"


@pytest.mark.parametrize(
    ("name", "metric", "fields", "axes", "said"),
    [
        ("synthetic", "test/nll", {}, {FALSE: [True, False]}, f"{TEST} model.objective"),
        ("synthetic_mlm", "val/bleu", {}, {}, "model.objective.kind: translation"),
        ("synthetic_mlm", "test/sacrebleu", {FALSE: True}, {}, "model.objective.kind: translation"),
    ],
)
def test_a_metric_is_one_that_every_cell_reports(
    tmp_path: Path, name: str, metric: str, fields: dict, axes: dict, said: str
) -> None:
    path = grid(tmp_path, base(name, **fields), metric, seed_everything=[1], **axes)
    with pytest.raises(UserError) as caught:
        expand(read_spec(path), resolve, identity_of)
    assert said in str(caught.value)


def test_a_metric_that_every_cell_reports_stays_possible(tmp_path: Path) -> None:
    tree = base(**{FALSE: True, "model__objective__validation_bleu": 3})
    for metric in ("test/nll", "test/bleu", "test/sacrebleu", "val/bleu", "val/accuracy"):
        path = grid(tmp_path, tree, metric, seed_everything=[1, 2])
        assert len(expand(read_spec(path), resolve, identity_of)[0].cells) == 2
