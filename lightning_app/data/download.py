"""The public homes of the corpora: IWSLT14's tarball and parquet files on the hub.

Each corpus becomes a folder of plain text files, named as `sources` wants them, that appears whole
or not at all. The hub and the tarball's server need a network; the tests read a small tarball of
the same shape from a local server instead, and a replacement of the hub.
"""

import hashlib
import io
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_app.data import moses
from lightning_app.data.config import DataConfig
from lightning_app.data.digests import LIST, find_damage, write_list
from lightning_app.data.folders import complete
from lightning_app.errors import UserError

HUB = "hf://"
NOTES = "protocol.txt"
IWSLT14_URL = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
IWSLT14_PAIRS = {"train": 160_239, "valid": 7_283, "test": 6_750}
_TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
_TAGS = re.compile(r"</?(?:title|description)>")
_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*(.*?)\s*</seg>')
_SKIPPED = ("<url>", "<talkid>", "<keywords>")
WIKITEXT2_HUB = "Salesforce/wikitext"
TIMEOUT = 60  # seconds without an answer


def place(config: DataConfig, downloads: Path) -> Path:
    """Return the folder below `downloads` that holds the corpus once it is downloaded.

    Raises:
        UserError: the corpus has no public home.
    """
    if config.name == "text":
        raise UserError(f"data.root is '{config.root}': data.name 'text' reads local folders only")
    if config.root is None and config.name == "iwslt14":
        return downloads / "iwslt14_deen"
    return downloads / f"{config.name}-{_repository(config).replace('/', '--')}"


def fetch(config: DataConfig, downloads: Path) -> Path:
    """Return the folder of the corpus below `downloads`, downloading it the first time.

    `data.root` null takes the public home: the tarball for iwslt14, the hub for wikitext2.
    `data.root` hf://OWNER/NAME takes parquet files of that hub dataset.

    Raises:
        UserError: no network, no such file, or not what was expected.
    """

    def make(partial: Path) -> None:
        if config.root is None and config.name == "iwslt14":
            _iwslt14(IWSLT14_URL, partial)
        else:
            _hub(config, _repository(config), partial)
        write_list(partial)

    return complete(place(config, downloads), make, _damage)


def is_there(config: DataConfig, downloads: Path) -> bool:
    """Whether the corpus is downloaded, and as it was then."""
    folder = place(config, downloads)
    return folder.is_dir() and _damage(folder) is None


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a download; one of before there were lists cannot be checked."""
    return find_damage(folder) if (folder / LIST).exists() else None


def _repository(config: DataConfig) -> str:
    return config.root.removeprefix(HUB) if config.root else WIKITEXT2_HUB


def _iwslt14(url: str, folder: Path) -> None:
    archive = _get(url)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            members = {Path(m.name).name: m for m in tar.getmembers() if m.isfile()}

            def lines(name: str) -> list[str]:
                if name not in members:
                    raise UserError(f"{url}: the archive has no file {name}")
                file = tar.extractfile(members[name])
                assert file is not None, "only regular files are listed"
                return file.read().decode("utf-8").split("\n")

            trains = {
                side: _train_lines(lines(f"train.tags.de-en.{side}"), side) for side in _SIDES
            }
            tests = {
                side: [
                    segment
                    for name in _TEST_SETS
                    for segment in _segments(lines(f"IWSLT14.{name}.de-en.{side}.xml"))
                ]
                for side in _SIDES
            }
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{url}: not the expected archive ({error})") from error
    for what, sides in (("training", trains), ("test", tests)):
        if len(sides["de"]) != len(sides["en"]):
            raise UserError(
                f"{url}: {len(sides['de'])} German but {len(sides['en'])} English {what} lines"
            )
    pairs = list(zip(trains["de"], trains["en"], strict=True))
    clean = [pair for pair in pairs if _is_clean(*pair)]
    splits = {
        "train": [pair for n, pair in enumerate(clean, start=1) if n % 23],
        "valid": [pair for n, pair in enumerate(clean, start=1) if n % 23 == 0],
        "test": [
            (_tokenize(german, "de"), _tokenize(english, "en"))
            for german, english in zip(tests["de"], tests["en"], strict=True)
        ],
    }
    for split, of in splits.items():
        for i, side in enumerate(_SIDES):
            _write(folder / f"{split}.{side}", (pair[i] for pair in of))
    for side in _SIDES:
        _write(folder / f"test.raw.{side}", tests[side])
    counts = {split: len(of) for split, of in splits.items()}
    expected = (
        "the published counts"
        if counts == IWSLT14_PAIRS
        else "not the published 160,239 / 7,283 / 6,750, so BLEU may not be comparable"
    )
    notes = (
        f"IWSLT14 de-en made from {url} (sha256 {hashlib.sha256(archive).hexdigest()}) by "
        f"fairseq's rules, Moses-tokenised, lower-cased: of {len(pairs):,} training lines "
        f"{len(pairs) - len(clean):,} left out (1-175 words a side, ratio at most 1.5); valid is "
        f"every 23rd of the rest, test is dev2010 + dev2012 + tst2010-2012: {counts['train']:,} / "
        f"{counts['valid']:,} / {counts['test']:,} pairs, {expected}"
    )
    _write(folder / NOTES, [notes])


_SIDES: tuple[str, str] = ("de", "en")


def _tokenize(line: str, side: str) -> str:
    return moses.tokenize(line, side).lower()


def _train_lines(lines: list[str], side: str) -> list[str]:
    if lines and lines[-1] == "":
        lines.pop()
    kept = (line for line in lines if not any(tag in line for tag in _SKIPPED))
    return [_tokenize(_TAGS.sub("", line), side) for line in kept]


def _segments(lines: list[str]) -> list[str]:
    found = (_SEGMENT.search(line) for line in lines)
    return [match[1].replace("’", "'") for match in found if match]


def _is_clean(german: str, english: str) -> bool:
    lengths = len(german.split()), len(english.split())
    return min(lengths) >= 1 and max(lengths) <= 175 and max(lengths) <= 1.5 * min(lengths)


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read()
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"data.name 'iwslt14': cannot download {url} ({reason}); give its folder as data.root, "
            f"or the folder above it as LIGHTNING_APP_DATA"
        ) from error


def _hub(config: DataConfig, repository: str, folder: Path) -> None:
    # Never run against the real hub: only with a replacement of `load_dataset`.
    import datasets

    # Salesforce/wikitext holds parquet files on its main branch; others were converted by the hub
    name, revision = "wikitext-2-v1", None
    if config.name == "iwslt14":
        name, revision = None, "refs/convert/parquet"
    try:
        loaded: Any = datasets.load_dataset(repository, name=name, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"data.name '{config.name}': cannot load {HUB}{repository} ({error}); give its folder "
            f"as data.root, or the folder above it as LIGHTNING_APP_DATA"
        ) from error
    counts = []
    for split, theirs in (("train", "train"), ("valid", "validation"), ("test", "test")):
        rows = loaded[theirs]
        counts.append(f"{len(rows):,}")
        if config.name == "wikitext2":
            _write(folder / f"wiki.{split}.tokens", (row["text"] for row in rows))
        else:
            for side in _SIDES:
                raw = [row["translation"][side] for row in rows]
                _write(folder / f"{split}.{side}", (_tokenize(line, side) for line in raw))
                if split == "test":
                    _write(folder / f"test.raw.{side}", raw)
    if config.name == "iwslt14":
        notes = (
            f"IWSLT14 de-en as {HUB}{repository} has it, Moses-tokenised, lower-cased: "
            f"{' / '.join(counts)} pairs, not fairseq's splits, so BLEU is not comparable with "
            f"published numbers"
        )
        _write(folder / NOTES, [notes])


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(" ".join(line.split("\n")).strip() + "\n")
