"""A corpus without test files serves every command that does not evaluate them."""

from pathlib import Path

import pytest
import yaml

from lightning_app.cli import main
from tests.small import write_config, write_corpus

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.xdist_group("planned"),  # one fork server serves all
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_corpus(tmp_path, ("train", "valid"))
    write_config(tmp_path)
    (tmp_path / "run" / "config.yaml").unlink()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert main(list(command)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_that_evaluates_no_test_needs_none(folder: Path, capsys) -> None:
    assert main(["fit", "--config", "config.yaml"]) == 0
    last = ("--config", "config.yaml", "--ckpt_path", "last")
    assert main(["validate", *last]) == 0
    for command in ("test", "predict"):
        assert "test.de[.gz|.xz] and test.en[.gz|.xz]" in refused(capsys, command, *last)


def test_a_run_or_grid_that_evaluates_the_test_is_refused_first(folder: Path, capsys) -> None:
    given = ("--config", "config.yaml", "--model.objective.evaluate_test", "true")
    line = refused(capsys, "fit", *given)
    assert "config.yaml: data.splits.test: " in line
    assert "model.objective.evaluate_test false needs none" in line
    assert list((folder / "run").iterdir()) == []
    assert not (folder / "cache").exists()
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["model"]["objective"]["evaluate_test"] = True
    tree["trainer"]["default_root_dir"] = None
    grid = {"name": "tiny", "base_config": tree, "axes": {"seed_everything": [1, 2]}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(grid))
    for command in ("plan", "run"):
        assert "tiny.yaml" in (line := refused(capsys, command, "tiny.yaml"))
        assert "data.splits.test: " in line
    assert not (folder / "experiments").exists()
