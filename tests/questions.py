"""Small files of SQuAD in the published format, and configs that read them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests import tables

WORDS = [f"w{number}" for number in range(12)]
VERSIONS = {"squad1": "1.1", "squad2": "2.0"}


def article(title: str, questions: int, random: np.random.Generator, *, version: str) -> Any:
    """Three questions a paragraph. An answer follows the word that its question begins with."""
    paragraphs = []
    while questions > 0:
        words = [str(word) for word in random.choice(WORDS, random.integers(6, 24))]
        context, qas = " ".join(words), []
        for number in range(min(3, questions)):
            at = int(random.integers(len(words) - 2))
            asked = f"{words[at]} {random.choice(WORDS)}"
            length = int(random.integers(1, 3))
            before = " ".join(words[: at + 1])
            gold = {
                "text": " ".join(words[at + 1 : at + 1 + length]),
                "answer_start": len(before) + 1,
            }
            name = f"{title}-{len(paragraphs)}-{number}"
            question = {"id": name, "question": asked, "answers": [gold]}
            if version == "2.0":
                question["is_impossible"] = bool(random.random() < 0.5)
                if question["is_impossible"]:
                    question |= {"answers": [], "plausible_answers": [gold]}
            qas.append(question)
        paragraphs.append({"context": context, "qas": qas})
        questions -= len(qas)
    return {"title": title, "paragraphs": paragraphs}


def tree_of(name: str, questions: int, seed: int, articles: int = 4) -> dict[str, Any]:
    """The content of a file with that many questions."""
    random, version = np.random.default_rng(seed), VERSIONS[name]
    counts = [len(part) for part in np.array_split(np.arange(questions), articles)]
    data = [
        article(f"T{seed}x{number}", count, random, version=version)
        for number, count in enumerate(counts)
    ]
    return {"version": version, "data": data}


def write_squad(root: Path, name: str, train: int = 40, dev: int = 35, test: int = 0) -> Path:
    """Write the files of a version; those of 0 questions are left out."""
    root.mkdir(parents=True, exist_ok=True)
    for seed, (stem, count) in enumerate({"train": train, "dev": dev, "test": test}.items()):
        if count:
            file = root / f"{stem}-v{VERSIONS[name]}.json"
            file.write_text(json.dumps(tree_of(name, count, seed)))
    return root


def answering(root: Path, name: str, **objective: Any) -> dict[str, Any]:
    """A config as a user writes it, whose contexts have several windows."""
    tree = tables.fine_tuning(root, name, **objective)
    tree["model"]["objective"] |= {"kind": "squad", "evaluate_test": False, **objective}
    tree["data"] |= {"context_stride": 5}
    return tree
