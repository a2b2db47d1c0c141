"""Where text comes from: local files, a public tarball, the hub, or the synthetic grammar.

`locate` finds (and, for a corpus without a folder, downloads) the files and names them by digest;
`read` returns them as `datasets.Dataset` with a sentence that says exactly what the splits are.
"""

import gzip
import hashlib
import json
import lzma
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.data import download
from lightning_app.data.config import DataConfig
from lightning_app.data.synthetic import sentences
from lightning_app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = ("", ".gz", ".xz")
FOLDERS = {"iwslt14": "iwslt14_deen", "wikitext2": "wikitext-2"}

# SHA-256 of the text of the published validation and test files.
_FAIRSEQ_IWSLT14 = {
    "valid.de": "3f051579c9d8c7281a6ea8c72ad4ae09dbaa9bb24dfd41166f2c3a3df7cd940a",
    "valid.en": "e6d7317a9772cd1ed970910c611e9e7dada1f34439269b44a9d801334bff948d",
    "test.de": "e718c783e33160b7d72af8f733756a466e0d0c016eff8ab624c1b0d1d01cbbdf",
    "test.en": "4b127beb9050511a3e6209cd837ff36f623a3a423666b32aba6e208b7330cf4c",
}
_FAIRSEQ_TRAIN_PAIRS = 160_239
_WIKITEXT2_LINES = {"train": 36_718, "valid": 3_760, "test": 4_358}


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a corpus.

    Attributes:
        columns: split -> column -> file; the columns are `source` and `target`, or `text`. A
            local corpus may have no test split.
        references: split -> file of cased, untokenised target lines, where one is published.
        notes: a file that says how a downloaded folder was made, where there is one.
    """

    columns: dict[str, dict[str, Path]] = field(default_factory=dict)
    references: dict[str, Path] = field(default_factory=dict)
    notes: Path | None = None

    def files(self) -> dict[str, Path]:
        """Return every file by its role, such as `train.source`."""
        files = {f"{s}.{c}": path for s, of in self.columns.items() for c, path in of.items()}
        files |= {f"{split}.reference": path for split, path in self.references.items()}
        return files if self.notes is None else files | {"notes": self.notes}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file as it lies on disk, by role."""
        digests = {}
        for role, path in self.files().items():
            with path.open("rb") as file:
                digests[role] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text in memory.

    Attributes:
        splits: split -> dataset with the columns `source` and `target`, or `text`.
        references: split -> cased, untokenised target lines, where they are published.
        protocol: what the splits are, in one sentence.
        tokenized: whether words and punctuation are separated by spaces, so that `detokenize` is
            the way to plain text.
        max_ratio: longest over shortest side, in words, that the protocol allows in a training
            pair; None where it says nothing.
    """

    splits: dict[str, "Dataset"]
    references: dict[str, list[str]]
    protocol: str
    tokenized: bool
    max_ratio: float | None = None


def cache_root(config: DataConfig) -> Path:
    """Return the folder of caches: `data.cache`, $LIGHTNING_APP_CACHE, or the user's cache."""
    given = config.cache or os.environ.get("LIGHTNING_APP_CACHE")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "transformer-ablations"


def locate(config: DataConfig) -> Source:
    """Find the files of the corpus, downloading them if nothing says where they are.

    Raises:
        UserError: a folder or file is missing, or the download fails.
    """
    if config.name == "synthetic":
        return Source()
    root = _root(config)
    if not root.is_dir():
        raise UserError(f"data.root: {root} is no folder")
    columns: dict[str, dict[str, Path]] = {}
    references = {}
    for split, stem in config.splits.items():
        if split == "test" and not _has_test(root, config):
            continue
        names = _names(config, stem)
        columns[split] = {column: _find(root, *names[column]) for column in names}
        raw = f"{stem}.raw.{config.target_language}"
        if config.pairs and split != "train" and _exists(root, raw):
            references[split] = _find(root, raw)
    notes = root / download.NOTES
    return Source(columns=columns, references=references, notes=notes if notes.is_file() else None)


def require_test(config: DataConfig) -> None:
    """Refuse a local corpus without a test split; nothing is read or downloaded.

    Raises:
        UserError: naming the files that are missing.
    """
    root = None if config.name == "synthetic" else _named_root(config)
    if root is not None and root.is_dir() and not _has_test(root, config):
        names = _names(config, config.splits.test).values()
        wanted = " and ".join(" or ".join(f"{name}[.gz|.xz]" for name in of) for of in names)
        raise UserError(
            f"data.splits.test: {root} has no file {wanted}, so the test split cannot be "
            f"evaluated; a run with model.objective.evaluate_test false needs none"
        )


def corpus_digest(config: DataConfig, fetch: bool = True) -> str | None:
    """Return the SHA-256 of what the corpus of `config` holds, wherever its files lie.

    It covers each file as it lies on disk, by role, but not the notes of a download.

    Args:
        config: The `data` section of a run.
        fetch: Whether to download a corpus that is not on this machine. Otherwise None is
            returned for it.

    Raises:
        UserError: a folder or file is missing, or the download fails.
    """
    if config.name == "synthetic":
        return hashlib.sha256(f"synthetic-{sentences.SEED}".encode()).hexdigest()
    if not fetch and not _is_here(config):
        return None
    digests = locate(config).digests()
    digests.pop("notes", None)
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def corpus_stamp(config: DataConfig, fetch: bool = True) -> tuple[Any, ...] | None:
    """Return path, size and time of each file of a corpus, which tell whether to read it again.

    Empty for the built-in corpus, and None for one that `fetch` does not allow to download.
    """
    if config.name == "synthetic":
        return ()
    if not fetch and not _is_here(config):
        return None
    files = locate(config).files().values()
    return tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


def _is_here(config: DataConfig) -> bool:
    local = _local_root(config) is not None
    return local or download.is_there(config, _downloads(config))


def _root(config: DataConfig) -> Path:
    return _local_root(config) or download.fetch(config, _downloads(config))


def _downloads(config: DataConfig) -> Path:
    return cache_root(config) / "downloads"


def _local_root(config: DataConfig) -> Path | None:
    """Return the folder that the config or the environment names, None for a public home."""
    root = _named_root(config)
    if root is not None and config.root is None and not root.is_dir():
        raise UserError(
            f"LIGHTNING_APP_DATA: {root} is no folder; data.name '{config.name}' needs it"
        )
    return root


def _named_root(config: DataConfig) -> Path | None:
    if config.root is not None:
        is_public = config.root.startswith(download.HUB)
        return None if is_public else Path(config.root).expanduser()
    shared = os.environ.get("LIGHTNING_APP_DATA")
    return Path(shared).expanduser() / FOLDERS[config.name] if shared else None


def _names(config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
    """Return the names that the file of each column of a split may have."""
    target = f"{stem}.{config.target_language}"
    if config.pairs:
        return {"source": (f"{stem}.{config.source_language}",), "target": (target,)}
    if config.name == "wikitext2":
        return {"text": (f"wiki.{stem}.tokens",)}
    return {"text": (target, f"{stem}.txt") if config.name == "text" else (target,)}


def _has_test(root: Path, config: DataConfig) -> bool:
    """Whether any file of the test split is there; where none is, it is left out."""
    names = _names(config, config.splits.test).values()
    return any(_exists(root, name) for of in names for name in of)


def _exists(root: Path, name: str) -> bool:
    return any((root / (name + suffix)).is_file() for suffix in SUFFIXES)


def _find(root: Path, *names: str) -> Path:
    for name in names:
        for suffix in SUFFIXES:
            path = root / (name + suffix)
            if path.is_file():
                return path
    wanted = " or ".join(f"{name}[.gz|.xz]" for name in names)
    raise UserError(
        f"data.root: {root} has no file {wanted}; data.splits names the stem of each split"
    )


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, plain, .gz or .xz, without outer white space.

    Lines end at "\\n" and nowhere else: a line separator of Unicode is part of a line.

    Raises:
        UserError: the file is damaged or not UTF-8; names the line.
    """
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            data = file.read()
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise UserError(f"{path}: not a complete {path.suffix} file ({error})") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, start) + 1
        raise UserError(
            f"{path}: line {line} is not UTF-8 (byte 0x{data[start]:02x}); convert it to UTF-8"
        ) from error
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.strip() for line in lines]


def read(source: Source, config: DataConfig) -> Corpus:
    """Read the located files.

    Raises:
        UserError: a file is empty, damaged or not UTF-8, or two sides differ in length.
    """
    if config.name == "synthetic":
        return _read_synthetic(config)
    lines = {split: _read_split(columns) for split, columns in source.columns.items()}
    references = {split: read_lines(path) for split, path in source.references.items()}
    for split, reference in references.items():
        if len(reference) != len(lines[split]["target"]):
            raise UserError(
                f"{source.references[split]} has {len(reference)} lines but "
                f"{source.columns[split]['target']} has {len(lines[split]['target'])}"
            )
    counts = {split: len(next(iter(columns.values()))) for split, columns in lines.items()}
    protocol = {"iwslt14": _iwslt14, "wikitext2": _wikitext2, "text": _text}[config.name]
    return Corpus(
        splits=_datasets(lines),
        references=references,
        protocol=protocol(source, lines, counts),
        tokenized=config.name != "text",
        max_ratio=1.5 if config.name == "iwslt14" and config.pairs else None,
    )


def _read_split(columns: dict[str, Path]) -> dict[str, list[str]]:
    lines = {column: read_lines(path) for column, path in columns.items()}
    for column, path in columns.items():
        if not any(lines[column]):
            raise UserError(f"{path}: empty, no line with text in it")
    if len({len(of) for of in lines.values()}) > 1:
        counts = " but ".join(f"{columns[c]} has {len(of)} lines" for c, of in lines.items())
        raise UserError(f"{counts}: line n of one must translate line n of the other")
    return lines


def _datasets(lines: dict[str, dict[str, list[str]]]) -> dict[str, "Dataset"]:
    from datasets import Dataset

    return {split: Dataset.from_dict(columns) for split, columns in lines.items()}


def _read_synthetic(config: DataConfig) -> Corpus:
    pairs = sentences.splits()
    sides = {"de": 0, "en": 1}
    wanted = {"text": config.target_language}
    if config.pairs:
        wanted = {"source": config.source_language, "target": config.target_language}
    lines = {
        split: {c: [pair[sides[language]] for pair in of] for c, language in wanted.items()}
        for split, of in pairs.items()
    }
    counts = " / ".join(f"{len(of):,}" for of in pairs.values())
    return Corpus(
        splits=_datasets(lines),
        references={},
        protocol=(
            f"synthetic German-English grammar, seed {sentences.SEED}: {counts} distinct pairs; "
            f"no sentence of either language is in two splits"
        ),
        tokenized=True,
    )


def _iwslt14(source: Source, lines: dict[str, dict[str, list[str]]], counts: dict[str, int]) -> str:
    if source.notes is not None:
        return source.notes.read_text(encoding="utf-8").strip()
    published = {digest: name for name, digest in _FAIRSEQ_IWSLT14.items()}
    sizes = _sizes(counts)
    for split in ("valid", "test"):
        for column, path in source.columns.get(split, {}).items():
            text = "".join(line + "\n" for line in lines[split][column])
            name = published.get(hashlib.sha256(text.encode()).hexdigest())
            if name is None or not name.startswith(split):
                return (
                    f"local files named as IWSLT14: {sizes} lines; {path.name} is not fairseq's "
                    f"{split} set, so BLEU is not comparable with published numbers"
                )
    tested = "verified by checksum, there are no test files"
    if "test" in counts:
        tested = (
            f"test is dev2010 + dev2012 + tst2010-2012 ({counts['test']:,}), both verified by "
            "checksum"
        )
    whole = counts["train"] == _FAIRSEQ_TRAIN_PAIRS
    return (
        "IWSLT14 de-en, fairseq's splits, Moses-tokenised, lower-cased: "
        f"valid is every 23rd pair of the cleaned training data ({counts['valid']:,}), "
        f"{tested}; train has {counts['train']:,} of its {_FAIRSEQ_TRAIN_PAIRS:,} pairs"
        + ("" if whole else ", so BLEU is not comparable with published numbers")
    )


def _wikitext2(
    source: Source, lines: dict[str, dict[str, list[str]]], counts: dict[str, int]
) -> str:
    expected = {split: _WIKITEXT2_LINES[split] for split in counts}
    official = "the official splits" if counts == expected else "not the official splits' counts"
    sizes = f"{_sizes(counts)} lines"
    return f"WikiText-2, word level with <unk>: {sizes}, {official}; blank lines left out"


def _sizes(counts: dict[str, int]) -> str:
    return " / ".join(f"{count:,}" for count in counts.values())


def _text(source: Source, lines: dict[str, dict[str, list[str]]], counts: dict[str, int]) -> str:
    described = (
        f"{split} = {' + '.join(path.name for path in columns.values())} ({counts[split]:,} lines)"
        for split, columns in source.columns.items()
    )
    return f"local text: {', '.join(described)}"
