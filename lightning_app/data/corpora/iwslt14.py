"""IWSLT14 German-English: talks, in fairseq's splits (Cettolo et al. 2014).

The tarball needs a network; the tests read a small tarball with the same layout from a local
server instead.
"""

import hashlib
import io
import re
import tarfile
from pathlib import Path

from lightning_app.core.errors import UserError
from lightning_app.data import moses
from lightning_app.data.config import (
    CORPORA,
    CorpusReader,
    DataConfig,
    Lines,
    Source,
    hub_name,
    split_sizes,
)
from lightning_app.data.sources import NOTES, get, load_from_hub, write_lines

IWSLT14_URL = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
IWSLT14_PAIRS = {"train": 160_239, "valid": 7_283, "test": 6_750}
_TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
_TAGS = re.compile(r"</?(?:title|description)>")
_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*(.*?)\s*</seg>')
_SKIPPED = ("<url>", "<talkid>", "<keywords>")

# SHA-256 of the text of the published validation and test files.
_FAIRSEQ_IWSLT14 = {
    "valid.de": "3f051579c9d8c7281a6ea8c72ad4ae09dbaa9bb24dfd41166f2c3a3df7cd940a",
    "valid.en": "e6d7317a9772cd1ed970910c611e9e7dada1f34439269b44a9d801334bff948d",
    "test.de": "e718c783e33160b7d72af8f733756a466e0d0c016eff8ab624c1b0d1d01cbbdf",
    "test.en": "4b127beb9050511a3e6209cd837ff36f623a3a423666b32aba6e208b7330cf4c",
}


@CORPORA.register("iwslt14")
class IWSLT14(CorpusReader):
    """IWSLT14 from local files, the public tarball or the hub."""

    languages = ("de", "en")
    needs_root = False
    folder = "iwslt14_deen"
    tokenized = True
    base = "iwslt14.yaml"

    def max_ratio(self, config: DataConfig) -> float | None:
        """Return fairseq's bound for pairs."""
        return 1.5 if config.pairs else None

    def download_name(self, config: DataConfig) -> str:
        """Return the folder of the tarball, or of the dataset that `data.root` names."""
        return self.folder if config.root is None else hub_name(config, "")

    def download(self, config: DataConfig, folder: Path) -> None:
        """Build fairseq's splits from the tarball, or write the hub's dataset."""
        if config.root is None:
            _unpack(config, IWSLT14_URL, folder)
            return
        counts: list[str] = []
        splits = load_from_hub(config, "", None, "refs/convert/parquet")
        for split, rows in splits.items():
            counts.append(f"{len(rows):,}")
            for side in _SIDES:
                raw = [row["translation"][side] for row in rows]
                write_lines(folder / f"{split}.{side}", (_tokenize(line, side) for line in raw))
                if split == "test":
                    write_lines(folder / f"test.raw.{side}", raw)
        notes = (
            f"IWSLT14 de-en as {config.root} has it, Moses-tokenised, lower-cased: "
            f"{' / '.join(counts)} pairs, not fairseq's splits, so BLEU is not comparable with "
            f"published numbers"
        )
        write_lines(folder / NOTES, [notes])

    def protocol(self, source: Source, lines: Lines, counts: dict[str, int]) -> str:
        """Return how the splits were built, from the notes of a download or by checksums."""
        if source.notes is not None:
            return source.notes.read_text(encoding="utf-8").strip()
        published = {digest: name for name, digest in _FAIRSEQ_IWSLT14.items()}
        sizes = split_sizes(counts)
        for split in ("valid", "test"):
            for column, path in source.columns.get(split, {}).items():
                text = "".join(line + "\n" for line in lines[split][column])
                name = published.get(hashlib.sha256(text.encode()).hexdigest())
                if name is None or not name.startswith(split):
                    return (
                        f"local files named as IWSLT14: {sizes} lines; {path.name} is not "
                        f"fairseq's {split} set, so BLEU is not comparable with published numbers"
                    )
        tested = "verified by checksum, there are no test files"
        if "test" in counts:
            tested = (
                f"test is dev2010 + dev2012 + tst2010-2012 ({counts['test']:,}), both verified by "
                "checksum"
            )
        whole = counts["train"] == IWSLT14_PAIRS["train"]
        return (
            "IWSLT14 de-en, fairseq's splits, Moses-tokenised, lower-cased: "
            f"valid is every 23rd pair of the cleaned training data ({counts['valid']:,}), "
            f"{tested}; train has {counts['train']:,} of its {IWSLT14_PAIRS['train']:,} pairs"
            + ("" if whole else ", so BLEU is not comparable with published numbers")
        )


def _unpack(config: DataConfig, url: str, folder: Path) -> None:
    archive = get(config, url)
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
            write_lines(folder / f"{split}.{side}", (pair[i] for pair in of))
    for side in _SIDES:
        write_lines(folder / f"test.raw.{side}", tests[side])
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
    write_lines(folder / NOTES, [notes])


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
