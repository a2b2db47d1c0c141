"""Two small runs that the tests of the interface share, trained by `fit`."""

from pathlib import Path

import pytest
import yaml

from lightning_app import RunResult, fit
from tests.small import write_config, write_corpus


@pytest.fixture(scope="session")
def translation(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A translation run of four steps; its config is beside its folder."""
    root = tmp_path_factory.mktemp("translation")
    write_corpus(root)
    write_config(root)
    (root / "run" / "config.yaml").unlink()
    return fit(root / "config.yaml")


TEXT = "the dog ß\n  sees \n\nthe cat\n\n"
CAUSAL = {
    "trainer": {"max_steps": 3, "val_check_interval": 3, "accelerator": "cpu"},
    "model": {
        "architecture": {"kind": "decoder", "decoder_depth": 1, "model_dim": 8, "ff_dim": 8},
        "objective": {"kind": "causal_lm", "evaluate_test": False},
        "schedule": {"warmup_steps": 0},
    },
    "data": {
        **{"name": "text", "window": 16, "tokenizer": "char", "vocab_size": None},
        **{"evaluation_stride": 4, "tokens_per_batch": 64},
    },
}


def causal_config(root: Path, **data: object) -> dict:
    """A run of a causal language model of characters, with its corpus in `root`."""
    for split, times in (("train", 20), ("valid", 3)):
        (root / f"{split}.txt").write_text(TEXT * times, encoding="utf-8")
    tree = yaml.safe_load(yaml.safe_dump(CAUSAL))
    tree["trainer"] |= {"default_root_dir": str(root / "run"), "enable_progress_bar": False}
    tree["data"] |= {"root": str(root), "cache": str(root / "cache"), **data}
    return tree


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return fit(causal_config(tmp_path_factory.mktemp("causal")))
