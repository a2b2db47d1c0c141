"""A corpus and a config of a run that takes a second, in a folder of a test."""

from pathlib import Path
from typing import Any

import yaml

from lightning_app.config.config import resolve

BASE = Path("ablations/base/synthetic.yaml").resolve()
GERMAN = ["der hund sieht die katze .", "die katze schläft .", "ein haus ist groß ."]
ENGLISH = ["the dog sees the cat .", "the cat sleeps .", "a house is big ."]


def write_corpus(root: Path, splits: tuple[str, ...] = ("train", "valid", "test")) -> None:
    """Write 30 pairs for each split into the folder `corpus`."""
    (root / "corpus").mkdir()
    for split in splits:
        for language, lines in (("de", GERMAN), ("en", ENGLISH)):
            text = "".join(f"{line}\n" for line in lines * 10)
            (root / "corpus" / f"{split}.{language}").write_text(text, encoding="utf-8")


def write_config(root: Path) -> None:
    """Write `config.yaml`, here and in the folder `run`: four steps of a tiny model."""
    tree: dict[str, Any] = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    tree["trainer"] |= {"max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1}
    tree["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
    tree["trainer"] |= {"default_root_dir": str(root / "run"), "accelerator": "cpu"}
    sizes = {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 8, "ff_dim": 8, "num_heads": 2}
    tree["model"]["architecture"] |= sizes
    tree["model"]["schedule"]["warmup_steps"] = 0
    tree["data"] = {"name": "text", "root": str(root / "corpus"), "cache": str(root / "cache")}
    tree["data"] |= {"tokenizer": "word", "vocab_size": None, "tokens_per_batch": 64}
    (root / "run").mkdir(exist_ok=True)
    complete = yaml.safe_dump(resolve(tree, "test"), sort_keys=False)
    (root / "run" / "config.yaml").write_text(complete)
    (root / "config.yaml").write_text(complete)
