"""Where the real corpora are, and SQuAD's dev sets."""

import json
import lzma
import os
from pathlib import Path

import pytest


def folder_of_corpora() -> Path:
    """Return $LIGHTNING_APP_DATA; skip the test where it is unset."""
    given = os.environ.get("LIGHTNING_APP_DATA")
    if not given:
        pytest.skip("LIGHTNING_APP_DATA is unset: no real corpus to read")
    return Path(given)


def read_squad(folder: Path, version: str) -> list[dict]:
    """Return the paragraphs of a dev set of SQuAD, each with `context` and `qas`."""
    with lzma.open(folder / "squad" / f"dev-v{version}.json.xz", "rt", encoding="utf-8") as file:
        return [p for article in json.load(file)["data"] for p in article["paragraphs"]]
