"""A LightningModule and a LightningDataModule of a plug-in, named by ``class_path``."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app import UserError, fit, load_run
from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.config.experiment import cell_id, identity_of, named_by_content
from lightning_app.config.grid import GridSpec, check_config, read_spec
from lightning_app.grids.plan import expand
from lightning_app.plugins import load, unload
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.records import column_names
from lightning_app.runs.run import Run
from tests import warm
from tests.plugins.conftest import Write
from tests.small import write_config, write_corpus
from tests.told import told

CLASSES = '''
import torch

from lightning_app.training.datamodule import TextDataModule
from lightning_app.training.module import TransformerModule


class Scaled(TransformerModule):
    """Train on the loss times a factor, and report the factor at each validation."""

    def __init__(self, factor: float = 1.0, **others):
        super().__init__(**others)
        self.factor = factor

    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        return {**step, "loss": self.factor * step["loss"]}

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("val/factor", self.factor)


class Tagged(TransformerModule):
    """Log a tag in a hook."""

    def __init__(self, tag, hook, **others):
        super().__init__(**others)
        theirs = getattr(self, hook)

        def logging(*args):
            self.log(tag, 0.5, batch_size=1)
            return theirs(*args)

        setattr(self, hook, logging)


class Described(TextDataModule):
    """Add a word to the description of the data."""

    def __init__(self, word: str, **others):
        super().__init__(**others)
        self.word = word

    def setup(self, stage=None):
        super().setup(stage)
        self.description["protocol"] += f"; {self.word}"


class Late(TransformerModule):
    """Override a hook."""

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("val/late", 1.0)


class Same(TextDataModule):
    pass


class Whole(TextDataModule):
    """Train on batches of its own."""

    def train_dataloader(self):
        return self.val_dataloader()


class Apart(torch.nn.Module):
    pass
'''
MODEL = {"class_path": "mine.Scaled", "init_args": {"factor": 2.5}}
DATA = {"class_path": "mine.Described", "init_args": {"word": "described"}}


@pytest.fixture
def tree(tmp_path: Path, write: Write) -> dict[str, Any]:
    write_corpus(tmp_path)
    write_config(tmp_path)
    (tmp_path / "run" / "config.yaml").unlink()
    load(str(write(CLASSES, "mine")))
    return yaml.safe_load((tmp_path / "config.yaml").read_text())


def of(tree: dict[str, Any], model: Any = None, data: Any = None) -> dict[str, Any]:
    return {
        **tree,
        "model": {**tree["model"], **(model or {})},
        "data": {**tree["data"], **(data or {})},
    }


def test_a_run_uses_them_and_is_opened_with_them(tree: dict[str, Any], tmp_path: Path) -> None:
    result = fit(of(tree, MODEL, DATA))
    assert result.metrics["val/factor"] == 2.5
    assert result.record["data"]["protocol"].endswith("; described")
    assert result.record["provenance"]["plugins_used"].keys() == {"mine"}
    (folder,) = tmp_path.glob("run")
    run = load_run(folder, "last")
    assert run.metrics["val/factor"] == 2.5
    assert isinstance(run.translate(["der hund sieht die katze ."])[0], str)
    again = fit(of(tree, MODEL, DATA), {"trainer.max_steps": 6}, ckpt_path="last")
    assert (again.record["steps"], again.metrics["val/factor"]) == (6, 2.5)
    with pytest.raises(UserError, match=r"model\.init_args is.*2\.5.*3\.0"):
        fit(
            of(tree, {**MODEL, "init_args": {"factor": 3.0}}, DATA),
            {"trainer.default_root_dir": str(tmp_path / "other")},
            ckpt_path=folder / "checkpoints" / "last.ckpt",
        )
    unload("mine")
    with pytest.raises(UserError, match="mine"):
        load_run(folder, "last")


def test_a_factor_of_one_changes_no_number(tree: dict[str, Any], tmp_path: Path) -> None:
    plain = fit(tree)
    own, other = ({"trainer.default_root_dir": str(tmp_path / name)} for name in ("own", "none"))
    same = fit(of(tree, {"class_path": "mine.Scaled"}), own)
    none = fit(of(tree, {**MODEL, "init_args": {"factor": 0.0}}), other)
    assert same.metrics["val/nll"] == plain.metrics["val/nll"] != none.metrics["val/nll"]
    assert len({plain.id, same.id, none.id}) == 3


OURS = "logged by this program and by"


@pytest.mark.parametrize(
    ("tag", "hook", "said"),
    [
        ("val/nll", "on_validation_epoch_end", OURS),
        ("val/perplexity", "validation_step", OURS),
        ("val/nll", "training_step", OURS),
        ("step", "on_validation_epoch_start", OURS),
        ("test/nll", "test_step", OURS),
        ("train/loss", "training_step", OURS),
        ("train/tokens", "on_validation_epoch_end", OURS),
        ("val/two\nlines", "validation_step", "tag 'val/two"),
        ('val/a,"b"', "validation_step", ""),
    ],
)
def test_each_tag_is_logged_by_one(tree: dict[str, Any], tag: str, hook: str, said: str) -> None:
    given = {"class_path": "mine.Tagged", "init_args": {"tag": tag, "hook": hook}}
    changed = of(tree, given)
    changed["model"]["objective"]["evaluate_test"] = True
    if said:
        with pytest.raises(UserError, match=said):
            fit(changed)
        return
    result = fit(changed)
    assert {*Run(result.folder).curve(tag).values()} == {result.metrics[tag]} == {0.5}
    assert tag in column_names(RunFolder(result.folder).metrics)


def test_class_arguments_and_file_are_part_of_the_id(tree: dict[str, Any], write: Write) -> None:
    plain = resolve(tree, "a test")
    assert plain["model"]["class_path"] is None
    assert "plugins" not in named_by_content(plain)
    scaled = of(tree, {"class_path": "mine.Scaled"})
    cells = [of(tree), scaled, of(tree, MODEL), of(tree, None, DATA)]
    found = {cell_id(resolve(each, "a test")) for each in cells}
    assert len(found) == 4
    before = cell_id(resolve(cells[2], "a test"))
    unload("mine")
    load(str(write(CLASSES + "ANOTHER = 1\n", "mine")))
    assert cell_id(resolve(cells[2], "a test")) != before
    assert cell_id(resolve(cells[0], "a test")) in found


def test_classes_without_arguments_of_their_own(tree: dict[str, Any]) -> None:
    given = of(tree, {"class_path": "mine.Late"}, {"class_path": "mine.Same", "init_args": {}})
    complete = resolve(given, "a test")
    assert type(transformer_module(complete["model"])).__name__ == "Late"
    assert type(data_module(complete["data"])).__name__ == "Same"
    assert fit(given).metrics["val/late"] == 1.0


def test_batches_of_a_class_do_not_grow_unseen(tree: dict[str, Any], tmp_path: Path) -> None:
    schedule = {**tree["model"].get("schedule", {}), "batch_warmup_steps": 2}
    rising = of(tree, {"schedule": schedule})
    assert fit(of(rising, None, {"class_path": "mine.Same"})).record["steps"] == 4
    own = of(rising, None, {"class_path": "mine.Whole"})
    with pytest.raises(UserError, match=r"batch_warmup_steps: 2, .* makes batches of its own"):
        fit(own, {"trainer.default_root_dir": str(tmp_path / "none")})


MISTAKES: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("model", "mine.Late", {"factor": 1.0}, "'model.init_args.factor'"),
    ("model", "yours.Scaled", {}, "model.class_path: 'yours.Scaled' … --plugin FILE"),
    ("model", "mine.Scale", {}, "model.class_path: 'mine.Scale' … 'mine'; … 'Scaled'?"),
    ("model", "mine.Apart", {}, "model.class_path: 'mine.Apart' … module.TransformerModule"),
    ("data", "mine.Scaled", {}, "data.class_path: 'mine.Scaled' … datamodule.TextDataModule"),
    ("data", "mine.Described", {}, "data.init_args: missing … 'word'"),
    ("model", "mine.Scaled", {"facto": 1.0}, "'model.init_args.facto'; … 'factor'?"),
    ("model", "mine.Scaled", {"factor": "large"}, "model.init_args.factor: … 'large'"),
    ("model", "mine.Scaled", {"block": {}}, "model.init_args.block: belongs to model.block"),
    ("model", None, {"factor": 1.0}, "model.init_args: needs model.class_path, … null"),
]


def test_a_mistake_is_one_line(tree: dict[str, Any]) -> None:
    """All in one test, since to load the plug-in takes longer than its mistakes."""
    for section, path, arguments, said in MISTAKES:
        fields = {"class_path": path, "init_args": arguments}
        with pytest.raises(UserError) as found:
            resolve(of(tree, **{section: fields}), "a test")
        assert told(f"a test: … {said}").match(str(found.value)), fields


def test_a_grid_file_may_name_the_classes_of_plugins_alone(tree: dict[str, Any]) -> None:
    check_config(of({"model": {}, "data": {}}, MODEL, DATA))
    for wrong, said in (
        ({"class_path": "os.system"}, "model.class_path: 'os.system' is in no plug-in"),
        ({"class_path": ["mine.Scaled"]}, "model.class_path: expected a text or null"),
        ({**MODEL, "init_args": {"factor": "../secret"}}, "model.init_args.factor: a grid file"),
        ({**MODEL, "init_args": {"class_path": "os.system"}}, "init_args: a grid file may"),
    ):
        with pytest.raises(UserError, match=said.replace(".", r"\.")):
            check_config({"model": wrong})


@pytest.mark.slow
def test_a_grid_with_the_class_as_its_axis(tree, tmp_path: Path, monkeypatch) -> None:
    """The first cell breaks the file of the plug-in, which the second does not see."""
    monkeypatch.chdir(tmp_path)
    own, breaks = Path("mine.py"), "import os\nif 'ABLATE_ATTEMPT' in os.environ:\n"
    own.write_text(f"{CLASSES}\n{breaks}    open(__file__, 'w').write('broken(')\n")
    Path("ablate.yaml").write_text("plugins: [mine.py]\n")
    del tree["trainer"]["default_root_dir"]
    grid = {"name": "classes", "base_config": tree}
    grid["axes"] = {"model.class_path": [None, "mine.Scaled"]}
    Path("classes.yaml").write_text(yaml.safe_dump(grid))
    words = ["-m", "lightning_app", "run", "classes.yaml", "--workers", "1"]
    done = warm.run(words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine.py: was edited" in done.stdout
    own.write_text(f"{CLASSES}\nCHANGED = 1\n")
    plan = warm.run(["-m", "lightning_app", "plan", "classes.yaml"], folder=tmp_path)
    assert "1 finished runs with another mine.py" in plan.stdout
    by_class = {}
    for path in Path("experiments/classes/runs").glob("*/result.json"):
        config = yaml.safe_load((path.parent / "config.yaml").read_text())
        by_class[config["model"]["class_path"]] = json.loads(path.read_text())["metrics"]
    assert by_class.keys() == {None, "mine.Scaled"}
    assert by_class["mine.Scaled"]["val/factor"] == 1.0
    assert "val/factor" not in by_class[None]
    assert by_class["mine.Scaled"]["val/nll"] == by_class[None]["val/nll"]


def test_a_grid_may_use_what_the_class_logs(tree: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    metric = {"name": "val/factor", "mode": "max"}

    def spec(**changes: Any) -> GridSpec:
        given = {"name": "own", "base_config": of(tree, MODEL), "metric": metric}
        file.write_text(yaml.safe_dump({**given, "axes": {"seed_everything": [1]}, **changes}))
        return read_spec(file)

    plan, _ = expand(spec(), resolve, identity_of)
    assert (plan.metric, plan.mode) == ("val/factor", "max")
    with pytest.raises(UserError, match=r"metric\.mode: missing; only model\.class_path knows"):
        spec(metric={"name": "val/factor"})
    with pytest.raises(UserError, match=r"metric\.name: no metric 'val/factor'"):
        spec(base_config=tree)
    axes = {"model.class_path": [None, "mine.Scaled"]}
    with pytest.raises(UserError, match=r"'val/factor'"):
        expand(spec(base_config=tree, axes=axes), resolve, identity_of)
