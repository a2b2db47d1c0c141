"""Small tables of the tasks of GLUE, in the published formats, and configs that read them."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests import warm

WORDS = [f"w{number}" for number in range(12)]
FOLDERS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B"}
FOLDERS |= {"qqp": "QQP", "mnli": "MNLI", "qnli": "QNLI", "rte": "RTE"}
ENTAILS = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")


def text(random: np.random.Generator) -> str:
    return " ".join(random.choice(WORDS, random.integers(2, 9)))


def line(name: str, number: int, one: str, two: str, label: int) -> str:
    """A row as the published table has it; `label` counts from 0."""
    sides = {
        "cola": ("gj04", str(label), "*" if label == 0 else "", one),
        "sst2": (f"{one} ", str(label)),
        "mrpc": (str(label), "1", "2", one, two),
        "stsb": (*(str(number), "g", "f", "2012", "1", "none", "none"), one, two, f"{label:.3f}"),
        "qqp": (str(number), "1", "2", one, two, str(label)),
        "mnli": (*(str(number), "1", "1", "slate"), one, two, MNLI[label % 3], MNLI[label % 3]),
        "qnli": (str(number), one, two, ENTAILS[label % 2]),
        "rte": (str(number), one, two, ENTAILS[label % 2]),
    }
    return "\t".join(sides[name])


HEADERS = {
    "sst2": "sentence\tlabel",
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\t"
    "sentence1\tsentence2\tscore",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
    "qnli": "index\tquestion\tsentence\tlabel",
    "rte": "index\tsentence1\tsentence2\tlabel",
}


def write_table(root: Path, name: str, train: int = 40, dev: int = 71) -> Path:
    """Write the tables of a task. The first text begins with a word that gives the label away."""
    root.mkdir(parents=True, exist_ok=True)
    classes = {"mnli": 3, "stsb": 6}.get(name, 2)
    stems = {"train": train, "dev": dev}
    if name == "mnli":
        stems = {"train": train, "dev_matched": dev, "dev_mismatched": 13}
    for seed, (stem, rows) in enumerate(stems.items()):
        random = np.random.default_rng(seed)
        lines = [HEADERS[name]] if name in HEADERS else []
        for number in range(rows):
            label = int(random.integers(classes))
            lines.append(line(name, number, f"{WORDS[label]} {text(random)}", text(random), label))
        (root / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    return root


def fine_tuning(root: Path, name: str, **objective: Any) -> dict[str, Any]:
    """A config as a user writes it."""
    architecture = {"kind": "encoder", "encoder_depth": 2, "model_dim": 12, "ff_dim": 14}
    return {
        "seed_everything": 1,
        "trainer": {
            "max_steps": 5,
            "val_check_interval": 5,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(root / "run"),
        },
        "model": {
            "block": {"preset": "post_ln"},
            "architecture": {**architecture, "num_heads": 3, "dropout": 0.0},
            "objective": {"kind": "glue", "evaluate_test": name == "mnli", **objective},
            "optimizer": {"lr": 3.0e-3},
            "schedule": {"kind": "constant", "warmup_steps": 2},
        },
        "data": {
            "name": name,
            "root": str(root),
            "cache": str(root / "cache"),
            "tokenizer": "word",
            "vocab_size": None,
            "tokens_per_batch": 128,
            "window": 16,
        },
    }


def changed(tree: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The tree with fields set, `a__b` for `a.b`."""
    found: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in tree.items()}
    for name, value in fields.items():
        part = found
        *above, last = name.split("__")
        for key in above:
            part[key] = dict(part.get(key, {}))
            part = part[key]
        part[last] = value
    return found


def fitted(tree: dict[str, Any], folder: Path, *more: str, **fields: Any) -> Path:
    """The folder of the run of `ablate fit`."""
    folder.mkdir(exist_ok=True)
    path = folder / "run.yaml"
    whole = changed(tree, trainer__default_root_dir=str(folder / "it"), **fields)
    path.write_text(yaml.safe_dump(whole))
    command = ["-m", "lightning_app", "fit", "--config", str(path), *more]
    done = warm.run_ranks(command, whole["trainer"].get("devices", 1))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "it"
