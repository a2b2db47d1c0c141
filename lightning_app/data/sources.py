"""Where text comes from: local files, a download, or a generated corpus.

`locate` finds (and, for a corpus without a folder, downloads) the files and names them by digest;
`read` returns them as `datasets.Dataset` with a sentence that describes the splits exactly.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.data import download
from lightning_app.data.config import CORPORA, CorpusReader, DataConfig
from lightning_app.data.generated_corpus import GeneratedCorpus
from lightning_app.data.sentences import sentences_of
from lightning_app.data.source import Corpus, Source, split_sizes
from lightning_app.errors import UserError
from lightning_app.task_facts import TASKS

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = ("", ".gz", ".xz")
RESERVED = "▁▅"
"""Characters that no text of SentencePiece may have: it reads the first one as a space, and leaves
lines with the second one out of its training."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NO_PIECES = re.compile(f"[\0\ud800-\udfff{RESERVED}]")
_NOTED = {
    "byte order marks (U+FEFF)": re.compile("\ufeff"),
    "carriage returns": re.compile("\r"),
    "other control characters or line separators": re.compile(
        "[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029]"
    ),
}
_MARKS = re.compile("<(?:pad|s|/s|mask)>")
_DIVIDES = ", and data.train_from_dev a share of the dev set that trains instead"


def cache_root(config: DataConfig) -> Path:
    """Return the folder of caches: `data.cache`, $LIGHTNING_APP_CACHE, or the user's cache."""
    given = config.cache or os.environ.get("LIGHTNING_APP_CACHE")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "transformer-ablations"


def locate(config: DataConfig) -> Source:
    """Find the files of the corpus; download them if no folder is configured.

    Raises:
        UserError: a folder or file is missing, or the download fails.
    """
    reader = CORPORA[config.name]()
    if isinstance(reader, GeneratedCorpus):
        return Source()
    root = _root(config)
    if not root.is_dir():
        raise UserError(f"data.root: {root} is not a folder")
    columns: dict[str, dict[str, Path]] = {}
    references = {}
    for split, stem in config.splits.items():
        if split == "test" and not _has_test(root, config):
            continue
        if split == "train" and config.train_from_dev is not None:
            continue
        names = reader.file_names(config, stem)
        hint = _DIVIDES if split == "train" and reader.divides_dev else ""
        columns[split] = {column: _find(root, *names[column], hint=hint) for column in names}
        raw = f"{stem}.raw.{config.target_language}"
        if config.pairs and split != "train" and _exists(root, raw):
            references[split] = _find(root, raw)
    notes = root / download.NOTES
    return Source(columns=columns, references=references, notes=notes if notes.is_file() else None)


def require_test(config: DataConfig) -> None:
    """Refuse a local corpus without a test split, without reading or downloading anything.

    Raises:
        UserError: naming the files that are missing.
    """
    generated = isinstance(CORPORA[config.name](), GeneratedCorpus)
    root = None if generated else _named_root(config)
    if root is not None and root.is_dir() and not _has_test(root, config):
        names = CORPORA[config.name]().file_names(config, config.splits.test).values()
        wanted = " and ".join(" or ".join(f"{name}[.gz|.xz]" for name in of) for of in names)
        raise UserError(
            f"data.splits.test: {root} has no file {wanted}, so the test split cannot be "
            f"evaluated; a run with model.objective.evaluate_test false needs none"
        )


def corpus_digest(config: DataConfig, fetch: bool = True) -> str | None:
    """Return the SHA-256 of the content of a corpus, independent of the place of its files.

    It covers each file on disk, by role, but not the notes of a download.

    Args:
        config: The `data` section of a run.
        fetch: Whether to download a corpus that is not on this machine. Otherwise None is
            returned for it.

    Raises:
        UserError: a folder or file is missing, or the download fails.
    """
    reader = CORPORA[config.name]()
    if isinstance(reader, GeneratedCorpus):
        return reader.digest(config)
    if not fetch and not _is_here(config):
        return None
    digests = locate(config).digests()
    digests.pop("notes", None)
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def corpus_stamp(config: DataConfig, fetch: bool = True) -> tuple[Any, ...] | None:
    """Return path, size and time of each file of a corpus. If they changed, it is read again.

    Empty for the built-in corpus, and None if the corpus must be downloaded and `fetch` is false.
    """
    if isinstance(CORPORA[config.name](), GeneratedCorpus):
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
    """Return the folder that the config or the environment names, None for a public download."""
    root = _named_root(config)
    if root is not None and config.root is None and not root.is_dir():
        raise UserError(
            f"LIGHTNING_APP_DATA: {root} is not a folder; data.name '{config.name}' needs it"
        )
    return root


def _named_root(config: DataConfig) -> Path | None:
    if config.root is not None:
        is_public = config.root.startswith(download.HUB)
        return None if is_public else Path(config.root).expanduser()
    shared = os.environ.get("LIGHTNING_APP_DATA")
    folder = CORPORA[config.name].folder
    return Path(shared).expanduser() / folder if shared and folder else None


def _has_test(root: Path, config: DataConfig) -> bool:
    """Whether any file of the test split exists; without one, the split is left out."""
    names = CORPORA[config.name]().file_names(config, config.splits.test).values()
    return any(_exists(root, name) for of in names for name in of)


def _exists(root: Path, name: str) -> bool:
    return any((root / (name + suffix)).is_file() for suffix in SUFFIXES)


def _find(root: Path, *names: str, hint: str = "") -> Path:
    for name in names:
        for suffix in SUFFIXES:
            path = root / (name + suffix)
            if path.is_file():
                return path
    wanted = " or ".join(f"{name}[.gz|.xz]" for name in names)
    raise UserError(
        f"data.root: {root} has no file {wanted}; data.splits names the stem of each split{hint}"
    )


def read_lines(path: Path, *, strips: bool = True) -> list[str]:
    """Return the lines of a text file, plain, .gz or .xz, without outer white space.

    Lines end only at "\\n": a line separator of Unicode is part of a line. Unless it `strips`, a
    line loses only a carriage return at its end.

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
    if "\r" in text and len(lines) == 1:
        raise UserError(f"{path}: line 1 has carriage returns alone as ends of lines; convert it")
    if lines[-1] == "":
        lines.pop()
    return [line.strip() if strips else line.removesuffix("\r") for line in lines]


def read(source: Source, config: DataConfig) -> Corpus:
    """Read the located files.

    Raises:
        UserError: a file is empty, damaged or not UTF-8, or two sides differ in length.
    """
    reader = CORPORA[config.name]()
    if isinstance(reader, GeneratedCorpus):
        lines = reader.generate(config)
    else:
        strips = config.rows.strips
        lines = {
            split: reader.parse(_read_split(reader, columns, strips), next(iter(columns.values())))
            for split, columns in source.columns.items()
        }
        if config.train_from_dev is not None:
            lines = reader.divided(config, lines)
    noted = _check_text(lines, source, config)
    references = {split: read_lines(path) for split, path in source.references.items()}
    for split, reference in references.items():
        if len(reference) != len(lines[split]["target"]):
            raise UserError(
                f"{source.references[split]} has {len(reference)} lines but "
                f"{source.columns[split]['target']} has {len(lines[split]['target'])}"
            )
    counts = {split: len(next(iter(columns.values()))) for split, columns in lines.items()}
    protocol = reader.protocol(source, lines, counts) + noted
    documents: dict[str, list[int]] = {}
    if TASKS[config.task].running_text:
        for split, of in lines.items():
            if (begins := reader.documents(config, of["text"])) is not None:
                documents[split] = begins
    if config.next_sentence:
        lines, documents, said = _sentences(reader, lines, config)
        protocol += said
    return Corpus(
        splits=_datasets(lines),
        references=references,
        protocol=protocol,
        tokenized=reader.tokenized,
        documents=documents,
        max_ratio=reader.max_ratio(config),
    )


def _read_split(
    reader: CorpusReader, columns: dict[str, Path], strips: bool
) -> dict[str, list[str]]:
    lines = {column: read_lines(path, strips=strips) for column, path in columns.items()}
    for column, path in columns.items():
        if not any(map(str.strip, lines[column])):
            raise UserError(f"{path}: empty, no line with text in it")
    if reader.parallel and len({len(of) for of in lines.values()}) > 1:
        counts = " but ".join(f"{columns[c]} has {len(of)} lines" for c, of in lines.items())
        raise UserError(f"{counts}: line n of one must translate line n of the other")
    return lines


def _check_text(lines: dict[str, dict[str, list[Any]]], source: Source, config: DataConfig) -> str:
    """Return what the description of a corpus says of unusual characters inside its lines.

    Raises:
        UserError: for a character that no text or, with pieces, no tokenizer can have.
    """
    pieces = config.tokenizer != "byte"
    refused = _NO_PIECES if pieces else _NO_TEXT
    found: Counter[str] = Counter()
    unit = "row" if CORPORA[config.name].labels_of else "line"
    for split, columns in lines.items():
        files = source.columns.get(split, {})
        for column, rows in columns.items():
            if column in config.rows.beside:
                continue
            for number, row in enumerate(rows, start=1):
                if row.isascii() and row.isprintable() and "<" not in row:
                    continue  # the most
                if match := refused.search(row):
                    where = files.get(column) or next(iter(files.values()), f"{split} split")
                    other = ", or data.tokenizer 'byte'" if match[0] in RESERVED else ""
                    raise UserError(
                        f"{where}: {unit} {number} has the character U+{ord(match[0]):04X}, which "
                        f"data.tokenizer '{config.tokenizer}' cannot read; remove it{other}"
                    )
                for what, pattern in _NOTED.items():
                    found[what] += len(pattern.findall(row))
                if pieces:
                    found["marks such as <s>, read as unknown"] += len(_MARKS.findall(row))
    noted = [f"{count:,} {what}" for what, count in found.items() if count]
    return f"; inside its lines: {', '.join(noted)}" if noted else ""


def _sentences(
    reader: CorpusReader, lines: dict[str, dict[str, list[str]]], config: DataConfig
) -> tuple[dict[str, dict[str, list[str]]], dict[str, list[int]], str]:
    """Return the sentences and the documents of each split, and a description.

    Raises:
        UserError: a split has fewer than two documents.
    """
    found = {}
    for split, of in lines.items():
        begins = reader.documents(config, of["text"])
        assert begins is not None, "checked by DataConfig"
        found[split] = sentences_of(of["text"], begins, lambda line: reader.left_out(config, line))
        if (count := len(found[split].documents)) < 2:
            other = ", or another data.document_separator" if reader.separated else ""
            raise UserError(
                f"model.objective.next_sentence is true, but the {split} split has {count} "
                f"document{'' if count == 1 else 's'} with sentences, and a random sentence is of "
                f"another document: at least 2 needed{other}"
            )
    counts = split_sizes({split: len(of.sentences) for split, of in found.items()})
    documents = split_sizes({split: len(of.documents) for split, of in found.items()})
    left_out = split_sizes({split: of.left_out for split, of in found.items()})
    said = (
        f"; split into {counts} sentences of {documents} documents, {left_out} lines of headings "
        "and separators left out"
    )
    return (
        {split: {"text": of.sentences} for split, of in found.items()},
        {split: of.documents for split, of in found.items()},
        said,
    )


def _datasets(lines: dict[str, dict[str, list[str]]]) -> dict[str, "Dataset"]:
    from datasets import Dataset

    return {split: Dataset.from_dict(columns) for split, columns in lines.items()}
