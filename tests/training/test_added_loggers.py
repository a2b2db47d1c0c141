"""Loggers of a config come beside those of every run, say which run it is, and change no id.

Stand-ins with the public constructors of Lightning's loggers take the place of those whose packages
are not installed.
"""

import csv
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from lightning.pytorch.loggers import Logger

from lightning_app.config import classes
from lightning_app.config.config import resolve
from lightning_app.config.experiment import cell_id
from lightning_app.core.errors import UserError
from lightning_app.training.run import TrainingRun
from tests.small import write_config, write_corpus

LOGGERS = "lightning.pytorch.loggers"


class StandIn(Logger):
    """Records how it was made and what it was given."""

    made: ClassVar[list["StandIn"]] = []

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given
        self.hyperparameters: Any = None
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.finished = 0
        self.made.append(self)

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(finish=self._finish)

    def _finish(self) -> None:
        self.finished += 1

    @property
    def name(self) -> str:
        return "stand-in"

    @property
    def version(self) -> int:
        return 1

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        self.hyperparameters = params

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.metrics.append((step, dict(metrics)))


class WandbLogger(StandIn):
    def __init__(
        self,
        name: str | None = None,
        save_dir: str = ".",
        version: str | None = None,
        offline: bool = False,
        project: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"save_dir": save_dir, "version": version, "offline": offline, "project": project}
        super().__init__(name=name, **given, **kwargs)


class MLFlowLogger(StandIn):
    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | None = "./mlruns",
    ) -> None:
        super().__init__(experiment_name=experiment_name, run_name=run_name, tags=tags)


@pytest.fixture(autouse=True)
def loggers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    classes._listed.cache_clear()  # another test may have looked Lightning's classes up
    for kind in (WandbLogger, MLFlowLogger):
        monkeypatch.setattr(f"{LOGGERS}.{kind.__name__}", kind)
    for name in ("wandb", "mlflow"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StandIn, "made", [])
    write_corpus(tmp_path)
    write_config(tmp_path)
    yield
    classes._listed.cache_clear()


def config(*loggers: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    tree = yaml.safe_load(Path("config.yaml").read_text())
    entries = [{"class_path": f"{LOGGERS}.{name}", "init_args": args} for name, args in loggers]
    tree["trainer"]["logger"] = entries or None
    return resolve(tree, "test")


def fit(tree: dict[str, Any], name: str) -> Path:
    folder = Path("experiments/mine/runs").resolve() / name
    TrainingRun(tree, folder=folder, attempt=1).fit()
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_they_are_named_after_the_run_and_the_own_files_stay() -> None:
    csv_logger = ("CSVLogger", {"save_dir": "elsewhere"})
    tree = config(("WandbLogger", {"project": "wiring"}), ("MLFlowLogger", {}), csv_logger)
    folder = fit(tree, "one")
    wandb, mlflow = StandIn.made
    assert wandb.given["name"] == "one"
    assert wandb.given["group"] == "mine"
    assert wandb.given["project"] == "wiring"
    assert {"preset:pre_ln", "task:translation", "seed:1", "warmup:0"} < {*wandb.given["tags"]}
    assert mlflow.given["experiment_name"] == "mine"
    assert mlflow.given["run_name"] == "one"
    assert mlflow.given["tags"]["preset"] == "pre_ln"
    for logger in (wandb, mlflow):
        assert logger.hyperparameters["model"]["block"]["preset"] == "pre_ln"
        assert f"id:{logger.hyperparameters['id']}" in wandb.given["tags"]
        assert logger.finished == 1
        assert [step for step, found in logger.metrics if "val/nll" in found] == [2, 4]
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    alone = fit(config(), "two")
    assert rows(folder / "metrics.csv")[0].keys() == rows(alone / "metrics.csv")[0].keys()
    # Below the folder of the cell: a grid file cannot write into the run of another grid.
    assert (folder / "added" / "elsewhere" / "mine" / "one" / "1" / "metrics.csv").is_file()
    assert not Path("elsewhere").exists()
    written = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["logger"]
    assert written[0]["init_args"]["name"] is None  # the config stays as the user wrote it
    assert "dict_kwargs" not in written[0]


def test_what_the_user_writes_stays() -> None:
    args = {"name": "chosen"}
    tree = config(("WandbLogger", args), ("MLFlowLogger", {"experiment_name": "theirs"}))
    TrainingRun(tree, folder=Path("runs/one").resolve(), attempt=1)
    wandb, mlflow = StandIn.made
    assert wandb.given["name"] == "chosen"
    assert wandb.given["group"] is None or wandb.given["group"] == Path().resolve().name
    assert mlflow.given["experiment_name"] == "theirs"


def test_they_change_no_id_and_one_whose_package_is_missing_is_refused(tmp_path: Path) -> None:
    wandb = ("WandbLogger", {"project": "wiring", "offline": True})
    others = ("MLFlowLogger", {"experiment_name": "x"}), ("CSVLogger", {"save_dir": "x"})
    for logger in (wandb, *others):
        assert cell_id(config(logger)) == cell_id(config())
    (tmp_path / "wandb.py").unlink()
    with pytest.raises(UserError, match="WandbLogger needs the package 'wandb'"):
        config(("WandbLogger", {}))


def test_without_loggers_there_are_none_and_true_means_the_own_ones() -> None:
    tree = config()
    tree["trainer"]["logger"] = False
    assert not list(fit(resolve(tree, "test"), "none").glob("events.out.tfevents.*"))
    tree["trainer"]["logger"] = True
    folder = fit(resolve(tree, "test"), "own")
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert not list(folder.rglob("lightning_logs"))
