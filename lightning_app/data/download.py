"""Download corpora from their public servers, and parquet files from the hub.

Each corpus becomes a folder of plain text files with the names that `sources` expects. The folder
appears complete or not at all. The hub needs a network; the tests use a replacement of it.
"""

import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_app.data.config import CORPORA, DataConfig
from lightning_app.data.digests import LIST, find_damage, write_list
from lightning_app.data.folders import complete
from lightning_app.errors import UserError

HUB = "hf://"
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
NOTES = "protocol.txt"
TIMEOUT = 60  # seconds without an answer


def place(config: DataConfig, downloads: Path) -> Path:
    """Return the folder below `downloads` that holds the corpus once it is downloaded.

    Raises:
        UserError: the corpus has no public download.
    """
    return downloads / CORPORA[config.name]().download_name(config)


def fetch(config: DataConfig, downloads: Path) -> Path:
    """Return the folder of the corpus below `downloads`, downloading it the first time.

    `data.root` null takes the public download: the tarball for iwslt14, the hub for wikitext2,
    one file for tinyshakespeare.
    `data.root` hf://OWNER/NAME takes parquet files of that hub dataset.

    Raises:
        UserError: no network, no such file, or not what was expected.
    """

    def make(partial: Path) -> None:
        CORPORA[config.name]().download(config, partial)
        write_list(partial)

    return complete(place(config, downloads), make, _damage)


def is_there(config: DataConfig, downloads: Path) -> bool:
    """Whether the corpus is downloaded and its files are unchanged since."""
    folder = place(config, downloads)
    return folder.is_dir() and _damage(folder) is None


def _damage(folder: Path) -> str | None:
    """Return the damage of a download; an old one without digests cannot be checked."""
    return find_damage(folder) if (folder / LIST).exists() else None


def get(config: DataConfig, url: str) -> bytes:
    """Return what a public server has at `url`.

    Raises:
        UserError: no answer, or none with a file.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read()
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"data.name '{config.name}': cannot download {url} ({reason}); give its folder as "
            f"data.root, or the folder above it as LIGHTNING_APP_DATA"
        ) from error


def hub_name(config: DataConfig, home: str) -> str:
    """Return the folder of a download from the hub: of `data.root`, or of the public dataset."""
    return f"{config.name}-{_repository(config, home).replace('/', '--')}"


def load_from_hub(
    config: DataConfig,
    home: str,
    name: str | None,
    revision: str | None,
    splits: Mapping[str, str] = HUB_SPLITS,
) -> dict[str, Any]:
    """Return split -> rows of the hub's dataset: of `data.root`, or of the public dataset.

    Args:
        config: The `data` section of a run.
        home: The public dataset, for `data.root` null.
        name: The configuration of the dataset.
        revision: Its branch or commit; null for main.
        splits: The name on the hub of each of our splits.

    Raises:
        UserError: it cannot be loaded.
    """
    # Not tested with the real hub, only with a replacement of `load_dataset`.
    import datasets

    repository = _repository(config, home)
    try:
        loaded: Any = datasets.load_dataset(repository, name=name, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"data.name '{config.name}': cannot load {HUB}{repository} ({error}); give its folder "
            f"as data.root, or the folder above it as LIGHTNING_APP_DATA"
        ) from error
    return {split: loaded[theirs] for split, theirs in splits.items()}


def _repository(config: DataConfig, home: str) -> str:
    return config.root.removeprefix(HUB) if config.root else home


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write one line of text for each of `lines`."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(" ".join(line.split("\n")).strip() + "\n")
