"""A run of four steps that several tests of commands evaluate or read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_app.cli import main
from tests.small import write_config, write_corpus
from tests.told import told


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished runs `experiments/mine/runs/one` and `two`, of other seeds."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    write_config(folder)
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed, name in enumerate(("one", "two"), start=1):
            tree["trainer"]["default_root_dir"] = f"experiments/mine/runs/{name}"
            tree["seed_everything"] = tree["data"]["seed"] = seed
            (folder / "config.yaml").write_text(yaml.safe_dump(tree))
            assert main(["fit", "--config", "config.yaml"]) == 0
    return folder


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command ends with code 0, and nothing is said besides the text that it prints."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """A command ends with code 2, prints nothing, and says so in one line."""

    def check(said: str, *words: object) -> None:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), err
        assert told(said).search(err), err

    return check
