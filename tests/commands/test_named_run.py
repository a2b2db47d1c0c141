"""`--run RUN`: one name for a run in every command, which never changes its folder."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_app.cli import main
from lightning_app.commands.options import VARIABLES
from lightning_app.commands.recorded import EVALUATION_FLAGS, evaluation_words, find_run
from lightning_app.config.config import Config, load_config
from lightning_app.config.sources import FIELDS_OF, Written
from lightning_app.core.errors import UserError
from lightning_app.core.schema import hint_at
from lightning_app.training import checkpoint
from lightning_app.training.run import TrainingRun
from tests.records import unseal
from tests.told import told

pytestmark = pytest.mark.xdist_group("trained")
ONE = Path("experiments/mine/runs/one")


@pytest.fixture(autouse=True)
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    for name in VARIABLES:  # set by --threads
        monkeypatch.setenv(name, "1")
    return trained


def contents(run: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(run)): (
            hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted([run, *run.rglob("*")])
    }


@pytest.fixture
def unchanged(capfd, recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """Neither the run nor the folder around changes, and nothing is said that is of no use."""
    before, around = contents(ONE), set(Path().iterdir())
    assert len(before) > 10
    yield
    assert contents(ONE) == before
    assert set(Path().iterdir()) == around
    assert "Tip: " not in "".join(capfd.readouterr())
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    "words",
    [
        ["test", "--run", str(ONE), "--trainer.limit_test_batches", "1", "--threads", "1"],
        ["probe", "--run", "mine/one", "--batches", "1"],
    ],
    ids=lambda words: words[0],
)
def test_an_evaluation_leaves_the_folder_of_the_run_as_it_is(words, tmp_path, unchanged) -> None:
    out = ["--out", str(tmp_path)] if words[0] == "probe" else []
    assert main([*words, *out]) == 0


def test_predict_writes_a_line_for_each_row_and_nothing_else(capfd, unchanged: None) -> None:
    assert main(["predict", "--run", "mine/one", "--trainer.enable_progress_bar", "true"]) == 0
    predicted = capfd.readouterr()
    assert "Tip: " not in predicted.err
    assert main(["translate", "--run", "mine/one", "--input", "corpus/test.de"]) == 0
    assert predicted.out == capfd.readouterr().out
    assert predicted.out.count("\n") == 30


def test_the_last_checkpoint_has_the_metrics_of_the_result(unchanged: None) -> None:
    words = evaluation_words("mine/one", "last", [])
    written = Written(words, FIELDS_OF["validate"])
    file = written.fields["ckpt_path"]
    run = TrainingRun(load_config(written), command="validate", ckpt_path=file)
    run.evaluate(verbose=False)
    found = run.trainer.callback_metrics
    result = json.loads((ONE / "result.json").read_text())
    assert float(found["val/nll"]) == pytest.approx(result["metrics"]["val/nll"], rel=1e-6)


def test_a_checkpoint_is_evaluated_with_the_config_of_the_run(tmp_path: Path) -> None:
    """A file is taken, and never one in the place of another that is missing."""
    other = Path("experiments/mine/runs/two/checkpoints/last.ckpt")
    words = evaluation_words("mine/one", str(other), ["--verbose", "false"])
    assert words[:4] == ["--config", str(ONE / "config.yaml"), "--ckpt_path", str(other)]
    assert words[4:] == ["--trainer.logger=false", "--verbose", "false"]
    run = tmp_path / "experiments/mine/runs/one"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "checkpoints/last.ckpt").touch()
    with pytest.raises(UserError, match=r"best\.ckpt.*--checkpoint last"):
        evaluation_words(run, "best", [])


def test_a_checkpoint_of_an_earlier_version_has_the_defaults_of_later_fields(monkeypatch) -> None:
    path = ONE / "checkpoints/last.ckpt"
    stored = checkpoint.read_checkpoint(path)
    for name in ("initial", "parametrization"):
        del stored["hyper_parameters"]["architecture"][name]
    monkeypatch.setattr(checkpoint, "read_checkpoint", lambda path: stored)
    model = yaml.safe_load((ONE / "config.yaml").read_text())["model"]
    checkpoint.check_checkpoint(path, model)
    model["architecture"]["initial"] = "normal"
    with pytest.raises(UserError, match=r"initial is xavier there and normal"):
        checkpoint.check_checkpoint(path, model)


def test_every_flag_of_evaluation_is_one_of_the_parser() -> None:
    for flag in EVALUATION_FLAGS:
        assert flag == "verbose" or hint_at(Config, flag.split(".")) is not None


def test_a_folder_comes_before_the_short_name(tmp_path: Path, monkeypatch) -> None:
    for folder in ("mine/one", "experiments/mine/runs/one"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert find_run("mine/one").path == Path("mine/one")
    (tmp_path / "mine/one/config.yaml").unlink()  # any other folder of that name
    assert find_run("mine/one").path == ONE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("test --run mine/onee", "did you mean 'one'?"),
        ("translate --run corpus", "config.yaml"),
        ("test --run mine/one --checkpoint no.ckpt", "--checkpoint no.ckpt:"),
        ("test --run mine/one --checkpoint config.yaml", "--checkpoint config.yaml: "),
        ("test --run mine/one --model.optimizer.lr 1", "--model.optimizer.lr: with --run only"),
        ("test --run mine/one --trainer.limit_test_batchs 1", "did you mean 'limit_test_batches'?"),
        ("test --run mine/one --model=x.yaml", "--model: with --run"),
        ("test --run mine/one --trainer.logger true", "--trainer.logger: with --run only"),
        ("test --run mine/one -cconfig.yaml", "--config config.yaml: --run names the"),
        ("test --run mine/one --ckpt_path last", "with --run … --checkpoint"),
        ("test --run mine/one --model.objective.beam 0", "command line: model.objective: beam 0"),
        ("probe --run mine/one --model.block.preset sas", "--model.block.preset: with --run"),
        ("probe --run mine/one --config config.yaml", "--run"),
        ("probe --run mine/one --checkpoint x", "--checkpoint x:"),
        ("generate --run mine/one", "holds a model"),
    ],
)
def test_a_mistake_is_one_line(words: str, said: str, capfd) -> None:
    before = contents(ONE)
    assert main(words.split()) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told(said).search(err)
    assert contents(ONE) == before


LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
EVIL = """
import pathlib
pathlib.Path(__file__).with_name("sprung").touch()
from lightning.pytorch import Callback
class Trap(Callback): pass
"""


@pytest.mark.parametrize(
    "callback",
    [
        {"class_path": "copied.trap.Trap"},
        {"class_path": LAMBDA, "init_args": {"on_validation_start": "builtins.print"}},
        "copied.trap.Trap",
        {"class_path": "Timer", "init_args": {"duration": {"class_path": "copied.trap.Trap"}}},
    ],
)
@pytest.mark.parametrize("command", ["validate", "test", "predict", "probe"])
def test_nothing_that_a_config_names_is_imported(tmp_path, monkeypatch, capsys, callback, command):
    """The folder may come from somebody else; it is importable from the working folder."""
    run = Path(shutil.copytree(ONE, tmp_path / "copied"))
    (run / "trap.py").write_text(EVIL)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["trainer"]["callbacks"] = [callback]
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main([command, "--run", str(run)]) == 2
    assert "seal" in capsys.readouterr().err
    unseal(run / "result.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main([command, "--run", "copied"]) == 2
    error = capsys.readouterr().err
    assert "trainer.callbacks" in error
    assert error.count("\n") == 1
    assert not (run / "sprung").exists()
