"""A run of four steps that several tests of commands evaluate or read."""

from pathlib import Path

import pytest
import yaml

from lightning_app.cli import main
from tests.small import write_config, write_corpus


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
