"""A corpus and a config of a run that takes a second, in a folder of a test."""

from pathlib import Path
from typing import Any

import yaml

from lightning_app.config.config import resolve
from tests.tables import changed

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


def tiny_config(trainer: dict[str, Any], width: int = 16, **fields: Any) -> dict[str, Any]:
    """The demo's config with a tiny model without a warm-up, and fields set, `a__b` for `a.b`."""
    tree: dict[str, Any] = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    tree["trainer"] |= {"accelerator": "cpu", **trainer}
    tree["model"]["architecture"] |= {"encoder_depth": 1, "decoder_depth": 1, "num_heads": 2}
    tree["model"]["architecture"] |= {"model_dim": width, "ff_dim": width}
    tree["model"]["schedule"]["warmup_steps"] = 0
    return changed(tree, **fields)


def write_config(root: Path) -> None:
    """Write `config.yaml`, here and in the folder `run`: four steps of a tiny model."""
    trainer = {"max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1}
    trainer |= {"enable_progress_bar": False, "enable_model_summary": False}
    tree = tiny_config({**trainer, "default_root_dir": str(root / "run")}, width=8)
    tree["data"] = {"name": "text", "root": str(root / "corpus"), "cache": str(root / "cache")}
    tree["data"] |= {"tokenizer": "word", "vocab_size": None, "tokens_per_batch": 64}
    (root / "run").mkdir(exist_ok=True)
    complete = yaml.safe_dump(resolve(tree, "test"), sort_keys=False)
    (root / "run" / "config.yaml").write_text(complete)
    (root / "config.yaml").write_text(complete)
