"""The sources of text: local files, a download from a public server or the hub, or a generator.

`locate` finds (and, for a corpus without a folder, downloads) the files and names them by digest;
`read` returns them as `datasets.Dataset` with a sentence that describes the splits exactly. A
folder appears complete or not at all, with any number of processes; a damaged one is renamed
and rebuilt. Its list of digests is canonical: it can be regenerated from the files and
compared byte for byte, so that a changed bit in any file, including the list, is detected. The hub
needs a network; the tests replace it.

Documents are split into sentences after each ``.``, ``!`` or ``?`` followed by white space and a
capital letter. Closing quotes and brackets directly after the mark belong to the sentence, and
opening ones may precede the capital. The end of a line always ends a sentence, so that a file with
one sentence per line is read as it is written. An abbreviation before a name splits a sentence in
two. Next sentence prediction does not mind: it needs contiguous pieces of text, not grammar.
"""

import gzip
import hashlib
import http.client
import json
import lzma
import os
import re
import shutil
import sys
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from lightning_app.core.errors import UserError
from lightning_app.core.files import free_name, output_folder, sha256_of
from lightning_app.data.columns import Columns
from lightning_app.data.config import (
    CORPORA,
    HUB,
    Corpus,
    CorpusReader,
    DataConfig,
    Lines,
    Source,
    Splits,
    repository,
    split_sizes,
)
from lightning_app.data.tokens import TokenFiles
from lightning_app.scores.task_facts import TASKS

LIST = "digests.sha256"


def write_list(folder: Path) -> None:
    """Write the list of the files in `folder`."""
    (folder / LIST).write_bytes(_render(folder))


def find_damage(folder: Path) -> str | None:
    """Return the damage: the first file of `folder` that differs from its list; None if intact."""
    try:
        listed = (folder / LIST).read_bytes()
    except FileNotFoundError:
        return f"{LIST} is missing"
    found = _render(folder)
    if found == listed:
        return None
    lines = set(listed.splitlines())
    changed = [line.split(b" ")[-1] for line in found.splitlines() if line not in lines]
    return f"{changed[0].decode() if changed else 'a file'} is not as it was written"


def digest_of(folder: Path, without: str) -> str:
    """Return the SHA-256 of the list of `folder` without the line of the file `without`."""
    lines = (folder / LIST).read_bytes().splitlines(keepends=True)
    ending = f" {without}\n".encode()
    return sha256_of(b"".join(line for line in lines if not line.endswith(ending)))


def _render(folder: Path) -> bytes:
    """Return one line per file: SHA-256, size and name, ordered by name."""
    lines = []
    # A file browser or NFS may add hidden files.
    for path in sorted(p for p in folder.iterdir() if p.name != LIST and p.name[0] != "."):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest} {file.tell()} {path.name}\n")
    return "".join(lines).encode()


_END = re.compile(r"""[.!?]["'”’»)\]]*\s+(?=["'“‘«(\[]*(\w))""")


class Sentences(NamedTuple):
    """The sentences of a split.

    Attributes:
        sentences: In the order of the text; none is empty.
        documents: The sentence at which each document begins, the first one at 0.
        left_out: The number of text lines that are not sentences, such as headings.
    """

    sentences: list[str]
    documents: list[int]
    left_out: int


def split_sentences(line: str) -> list[str]:
    """Return the sentences of a line; none for a blank line."""
    ends = [match.end() for match in _END.finditer(line) if match[1].isupper()]
    parts = (line[begin:end].strip() for begin, end in pairwise([0, *ends, len(line)]))
    return [part for part in parts if part]


def sentences_of(
    lines: Sequence[str], begins: Sequence[int], left_out: Callable[[str], bool]
) -> Sentences:
    """Return the sentences of the documents that begin at the lines `begins`.

    Lines for which `left_out` is true have none. Documents without sentences are dropped.
    """
    sentences: list[str] = []
    documents: list[int] = []
    without = 0
    for begin, end in pairwise([*begins, len(lines)]):
        first = len(sentences)
        for line in filter(str.strip, lines[begin:end]):
            if left_out(line):
                without += 1
            else:
                sentences += split_sentences(line)
        if len(sentences) > first:
            documents.append(first)
    return Sentences(sentences, documents, without)


def complete(
    folder: Path, make: Callable[[Path], None], find_damage: Callable[[Path], str | None]
) -> Path:
    """Return `folder`, built by `make(partial folder)` if it is missing or damaged.

    One process builds it under a lock, the others wait. The next process that holds the lock
    removes the files left by a killed process.

    Args:
        folder: The path of the folder.
        make: Fills an empty folder, which is then renamed to `folder`.
        find_damage: Describes the damage of an existing folder, None if intact.

    Raises:
        UserError: if the parent folder cannot be written.
        OSError: if the disk is full; nothing is left behind.
    """
    damage = find_damage(folder) if folder.is_dir() else ""
    if damage is None:
        return folder
    above = folder.parent
    try:
        with output_folder(above):  # in a read-only folder the lock would wait forever
            pass
    except UserError as error:
        why = f"{folder}: damaged: {damage}; " if damage else ""
        raise UserError(
            f"{why}{error}; give another folder as data.cache or LIGHTNING_APP_CACHE"
        ) from error
    with FileLock(above / f"{folder.name}.lock"):
        if folder.is_dir():
            damage = find_damage(folder)
            if damage is None:
                return folder
            aside = free_name(above / f"{folder.name}.damaged")
            folder.rename(aside)
            print(
                f"{folder}: damaged: {damage}; renamed to {aside.name} and made again",
                file=sys.stderr,
                flush=True,
            )
        partial = above / f"{folder.name}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            make(partial)
            os.replace(partial, folder)
        finally:
            if partial.exists():
                shutil.rmtree(partial)
    return folder


HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
NOTES = "protocol.txt"
TIMEOUT = 60  # seconds without an answer


def place(config: DataConfig, downloads: Path) -> Path:
    """Return the folder below `downloads` that holds the corpus once it is downloaded.

    Raises:
        UserError: if the corpus has no public download.
    """
    return downloads / CORPORA[config.name]().download_name(config)


def fetch(config: DataConfig, downloads: Path) -> Path:
    """Return the folder of the corpus below `downloads`, downloading it the first time.

    `data.root` null takes the public download: the tarball for iwslt14, the hub for wikitext2,
    one file for tinyshakespeare.
    `data.root` hf://OWNER/NAME takes parquet files of that hub dataset.

    Raises:
        UserError: for no network, a missing file, or unexpected content.
    """

    def make(partial: Path) -> None:
        CORPORA[config.name]().download(config, partial)
        write_list(partial)

    return complete(place(config, downloads), make, find_damage)


def get(config: DataConfig, url: str) -> bytes:
    """Return the file that a public server has at `url`.

    Raises:
        UserError: for no answer, or an answer without a file.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"data.name '{config.name}': cannot download {url} ({reason}); give its folder as "
            f"data.root, or the folder above it as LIGHTNING_APP_DATA"
        ) from error


def load_from_hub(
    config: DataConfig,
    home: str,
    name: str | None,
    revision: str | None,
    splits: Mapping[str, str] = HUB_SPLITS,
) -> dict[str, Any]:
    """Return split -> rows of the hub's dataset: from `data.root` or the public dataset.

    Args:
        config: The `data` section of a run.
        home: The public dataset, for `data.root` null.
        name: The configuration of the dataset.
        revision: Its branch or commit; null for main.
        splits: The name on the hub of each of our splits.

    Raises:
        UserError: if it cannot be loaded.
    """
    # Not tested with the real hub, only with a replacement of `load_dataset`.
    import datasets

    source = repository(config, home)
    try:
        loaded: Any = datasets.load_dataset(source, name=name, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"data.name '{config.name}': cannot load {HUB}{source} ({error}); give its folder "
            f"as data.root, or the folder above it as LIGHTNING_APP_DATA"
        ) from error
    return {split: loaded[theirs] for split, theirs in splits.items()}


def write_lines(path: Path, lines: Iterable[str], *, strips: bool = True) -> None:
    """Write one line of text for each of `lines`, without white space around it if it `strips`."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            text = " ".join(line.split("\n"))
            file.write((text.strip() if strips else text) + "\n")


class GeneratedCorpus(CorpusReader):
    """A corpus that is generated by code and has no files."""

    needs_root = False

    def generate(self, config: DataConfig) -> Lines:
        """Return split -> column -> lines; the columns are `source` and `target`, or `text`."""
        raise NotImplementedError

    def digest(self, config: DataConfig) -> str:
        """Return a SHA-256 that changes with the text and is part of an experiment's id."""
        return sha256_of(json.dumps(self.generate(config), sort_keys=True).encode())


SUFFIXES = ("", ".gz", ".xz")
RESERVED = "▁▅"
"""Characters that text for SentencePiece must not contain: it reads the first as a space, and drops
lines with the second from its training."""
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
        UserError: if a folder or file is missing, or the download fails.
    """
    reader = CORPORA[config.name]()
    if isinstance(reader, GeneratedCorpus):
        return Source()
    root = _root(config)
    if not root.is_dir():
        raise UserError(f"data.root: {root.absolute()} is not a folder")
    if isinstance(reader, TokenFiles):
        return reader.find(config, root)
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
        if config.pairs and split != "train" and (path := _found(root, raw)):
            references[split] = path
    notes = root / NOTES
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
        packed = "" if config.name == "tokens" else "[.gz|.xz]"
        wanted = " and ".join(" or ".join(f"{name}{packed}" for name in of) for of in names)
        raise UserError(
            f"data.splits.test: {root} has no file {wanted}, so the test split cannot be "
            f"evaluated; a run with model.objective.evaluate_test false needs none"
        )


def corpus_digest(config: DataConfig, fetch: bool = True) -> str | None:
    """Return the SHA-256 of the content of a corpus, independent of the location of its files.

    It covers each file on disk, by role, but not the notes of a download.

    Args:
        config: The `data` section of a run.
        fetch: Whether to download a corpus that is not on this machine. Otherwise None is
            returned for it.

    Raises:
        UserError: if a folder or file is missing, or the download fails.
    """
    reader = CORPORA[config.name]()
    if isinstance(reader, GeneratedCorpus):
        digest = reader.digest(config)
    elif not fetch and not _is_here(config):
        return None
    else:
        digests = locate(config).digests()
        digests.pop("notes", None)
        digest = sha256_of(json.dumps(sorted(digests.items())).encode())
    if config.tokenizer_file is None:
        return digest
    return sha256_of(given_tokenizer(config).read_bytes() + digest.encode())


def given_tokenizer(config: DataConfig) -> Path:
    """Return the file of a ready tokenizer.

    Raises:
        UserError: if it is missing.
    """
    path = Path(config.tokenizer_file or "").expanduser()
    if not path.is_file():
        raise UserError(f"data.tokenizer_file: {path.absolute()} is not a file")
    return path


def corpus_stamp(config: DataConfig, fetch: bool = True) -> tuple[Any, ...] | None:
    """Return path, size and time of each file of a corpus. If they change, it is read again.

    Also those of `data.tokenizer_file`. The built-in corpus has none; None if the corpus must be
    downloaded and `fetch` is false.
    """
    files = [] if config.tokenizer_file is None else [given_tokenizer(config)]
    if not isinstance(CORPORA[config.name](), GeneratedCorpus):
        if not fetch and not _is_here(config):
            return None
        files += locate(config).files().values()
    return tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


def _is_here(config: DataConfig) -> bool:
    if _local_root(config) is not None:
        return True
    folder = place(config, cache_root(config) / "downloads")
    return folder.is_dir() and find_damage(folder) is None


def _root(config: DataConfig) -> Path:
    return _local_root(config) or fetch(config, cache_root(config) / "downloads")


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
        is_public = config.root.startswith(HUB)
        return None if is_public else Path(config.root).expanduser()
    shared = os.environ.get("LIGHTNING_APP_DATA")
    folder = CORPORA[config.name].folder
    return Path(shared).expanduser() / folder if shared and folder else None


def _has_test(root: Path, config: DataConfig) -> bool:
    reader = CORPORA[config.name]()
    if isinstance(reader, TokenFiles):
        return "test" in reader.find(config, root).columns
    names = reader.file_names(config, config.splits.test).values()
    return any(_found(root, *of) for of in names)


def _found(root: Path, *names: str) -> Path | None:
    paths = (root / (name + suffix) for name in names for suffix in SUFFIXES)
    return next(filter(Path.is_file, paths), None)


def _find(root: Path, *names: str, hint: str = "") -> Path:
    if path := _found(root, *names):
        return path
    wanted = " or ".join(f"{name}[.gz|.xz]" for name in names)
    raise UserError(
        f"data.root: {root} has no file {wanted}; data.splits names the stem of each split{hint}"
    )


def read_lines(path: Path, *, strips: bool = True) -> list[str]:
    """Return the lines of a text file, plain, .gz or .xz, without surrounding white space.

    Lines end only at "\\n": Unicode line separators are part of a line. Unless it `strips`, a
    line loses only a carriage return at its end and byte order marks at its start (joined files).

    Raises:
        UserError: if the file is damaged or not UTF-8, naming the line.
    """
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            data = file.read()
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise UserError(f"{path}: not a complete {path.suffix} file ({error})") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        raise UserError(
            f"{path}: line {line} is not UTF-8 (byte 0x{byte:02x}); convert it to UTF-8"
        ) from error
    lines = [line.lstrip("\ufeff") for line in text.split("\n")]
    if "\r" in text and len(lines) == 1:
        raise UserError(f"{path}: line 1 has only carriage returns as line ends; convert it")
    if lines[-1] == "":
        lines.pop()
    return [line.strip() if strips else line.removesuffix("\r") for line in lines]


def read(source: Source, config: DataConfig) -> Corpus:
    """Read the located files.

    Raises:
        UserError: if a file is empty, damaged or not UTF-8, or two sides differ in length.
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
    from datasets import Dataset

    return Corpus(
        splits={split: Dataset.from_dict(columns) for split, columns in lines.items()},
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


def _check_text(lines: dict[str, Columns], source: Source, config: DataConfig) -> str:
    """Return the description's text about unusual characters inside the lines of a corpus.

    Raises:
        UserError: for a character that text, or a tokenizer with pieces, cannot contain.
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
                    continue  # the largest
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
    reader: CorpusReader, lines: Lines, config: DataConfig
) -> tuple[Lines, dict[str, list[int]], str]:
    """Return the sentences and the documents of each split, and a description.

    Raises:
        UserError: if a split has fewer than two documents.
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
                f"document{'' if count == 1 else 's'} with sentences; a random sentence comes "
                f"from another document, so at least 2 are needed{other}"
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


def corpus_of(section: Mapping[str, Any], fetch: bool = True) -> str | None:
    """Return `known_digest` of a resolved `data` section."""
    return known_digest(resolved_data(section), fetch)


def known_digest(config: DataConfig, fetch: bool = True) -> str | None:
    """Return the digest of the corpus of `config`, whose files are read once.

    None if it would have to be downloaded and `fetch` is false. Files are read again if their size
    or time has changed.

    Raises:
        UserError: if a folder or file is missing.
    """
    stamp = corpus_stamp(config, fetch)
    # The same seed for all, so that the cells of a grid share the digest.
    return None if stamp is None else _digest(replace(config, seed=1), stamp)


def resolved_data(section: Mapping[str, Any]) -> DataConfig:
    """Return the `data` section of a resolved and checked config as an object."""
    names = {field.name for field in fields(DataConfig)}
    known = {name: value for name, value in section.items() if name in names}
    return DataConfig(**{**known, "splits": Splits(**known["splits"])})


@lru_cache(maxsize=256)
def _digest(config: DataConfig, stamp: tuple[Any, ...]) -> str | None:
    return corpus_digest(config)
