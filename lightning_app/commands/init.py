"""`ablate init`: a small project with a plug-in, its test, a config and a grid."""

import gzip
import hashlib
import lzma
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from string import Template
from textwrap import fill
from typing import IO

from lightning_app.commands.options import Parser
from lightning_app.core.errors import UserError
from lightning_app.core.project import PROJECT

LEAST = 200
"""Lines or pairs from which a validation and a test split can be taken."""
SHARE = 20
"""One line or pair in this many goes to validation, and one to the test."""
MOST = 2000
"""The approximate size of a split where one in `SHARE` would be more: enough for a small error."""

_OPEN: Mapping[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}  # pyright: ignore[reportAssignmentType]
_PIECES = 1.4  # pieces in a word, with punctuation and the mark at the end
_PASSES = 10
_LARGEST = 10_000  # the largest vocabulary, unless the characters alone need more
_SPECIALS = 5  # as in data.tokenizer, which imports numpy
_LONGEST_PIECE = 16  # of SentencePiece, with the mark of a space


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """The counts of a corpus: those of its training split, after removing the others.

    `languages`: of its pairs; one that is empty for a text to model. `words` counts all languages,
    `longer` the one with more words, `distinct` distinct words.
    `smallest` and `safe` are the bounds of a vocabulary for which byte-pair encoding surely works.
    """

    languages: tuple[str, ...]
    lines: Mapping[str, int]
    dropped: int
    words: int
    longer: int
    distinct: int
    smallest: int
    safe: int


@dataclass(frozen=True, kw_only=True)
class ProjectSizes:
    """The numbers of a config, chosen for a corpus."""

    width: int
    depth: int
    steps: int

    @property
    def rate(self) -> float:
        """The rate of the config for IWSLT14, 5e-4 at width 512, times sqrt(512 / width)."""
        return float(f"{5.0e-4 * (512 / self.width) ** 0.5:.1e}")

    @property
    def reference(self) -> int:
        """The largest warm-up: a fifth of the run, as in that config."""
        return self.steps // 5


def add_init(parser: Parser) -> None:
    parser.add("folder DIR", "a new or existing folder")
    text = "two parallel text files, such as my.de my.en, or one for a language model, or a "
    text += "folder with train.bin and val.bin"
    parser.add("--data FILE", text, nargs="+")
    parser.set_defaults(call=init_command)


def init_command(folder: Path, data: Sequence[Path] | None) -> int:
    """Write a project into `folder`; with `data`, also the splits of that corpus.

    Raises `UserError`, and writes nothing, if a file of the project exists already, or the corpus
    cannot be read.
    """
    texts: dict[str, str] = {}
    if data is None:
        sizes, values = _synthetic()
    else:
        if len(data) > 2:
            raise UserError(f"init: --data: expected one or two files, found {len(data)}")
        if len(data) == 1 and data[0].is_dir():
            sizes, values = _of_ids(data[0].absolute())
        else:
            corpus, texts = _split(data)
            sizes, values = _of_corpus(corpus, [str(path) for path in data])
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", folder.resolve().name).lstrip("_.-")[:64]
    values |= {
        "name": name or "project",
        "project": PROJECT,
        "steps": str(sizes.steps),
        "interval": str(sizes.steps // 10),
        "reference": str(sizes.reference),
        "rate": f"{sizes.rate:.1e}",
        "low": f"{sizes.rate / 4:.1e}",
        "high": f"{sizes.rate * 4:.1e}",
    }
    templates = files("lightning_app.commands").joinpath("project")
    for target in ("ablate.yaml", "config.yaml", "grid.yaml", "blocks.py", "test_blocks.py"):
        text = templates.joinpath(f"{target}.txt").read_text("utf-8")
        texts[target] = Template(text).substitute(values)
    _write(folder, texts)
    print(f"{folder}: {', '.join(sorted(texts))}")
    look = "ablate blocks my_block; ablate plan grid.yaml --probe"
    print(f"next: cd {folder}; pip install pytest; pytest; {look}")
    return 0


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files that do not exist yet, all or none."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"init: {folder} is a file; expected a folder, new or yours")
    for name in texts:
        if (folder / name).exists():
            raise UserError(f"init: {folder / name} exists already; nothing was written")
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)


def _language(path: Path) -> str:
    inner = Path(path.stem) if path.suffix in _OPEN else path
    language = inner.suffix.removeprefix(".")
    if not re.fullmatch(r"[A-Za-z0-9_]+", language):
        raise UserError(f"init: --data {path}: expected a name that ends in its language, as my.de")
    return language


def _lines(path: Path) -> list[str]:
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8", newline="\n") as file:
            return [line.strip() for line in file]
    except UnicodeDecodeError as error:
        raise UserError(f"init: --data {path}: invalid UTF-8 at byte {error.start}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"init: --data {path}: cannot be read: {reason}") from error


def split_of_line(source: str, share: float) -> str:
    """Return the split of a pair by the SHA-256 of its source line.

    Pairs with the same source are in the same split, so that the test has no trained source; the
    order of the lines does not matter.
    """
    place = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") / 2**64
    if place < share:
        return "valid"
    return "test" if place < 2 * share else "train"


def _split(paths: Sequence[Path]) -> tuple[TextCounts, dict[str, str]]:
    """Count a corpus, and return the contents of its split files."""
    languages = tuple(map(_language, paths)) if len(paths) > 1 else ("",)
    named = " and ".join(map(str, paths))
    if len({*languages}) < len(languages):
        raise UserError(f"init: --data: {named} end in the same language; they must differ")
    sides = [_lines(path) for path in paths]
    if len({*map(len, sides)}) > 1:
        raise UserError(
            f"init: --data: {named} have {' and '.join(str(len(side)) for side in sides)} lines; "
            "line i of one is the translation of line i of the other"
        )
    lines = [row for row in zip(*sides, strict=True) if all(row)]
    if len(lines) < LEAST:
        raise UserError(
            f"init: --data: {named}: {len(lines)} lines with text; at least {LEAST} are needed"
        )
    held = min(MOST, len(lines) // SHARE)
    splits: dict[str, list[tuple[str, ...]]] = {"train": [], "valid": [], "test": []}
    if len(paths) > 1:
        for line in lines:
            splits[split_of_line(line[0], held / len(lines))].append(line)
    else:  # a text goes on from line to line, so that its splits are parts of it
        rest, splits["test"] = lines[:-held], lines[-held:]
        splits |= {"train": rest[:-held], "valid": rest[-held:]}
    if empty := [name for name, rows in splits.items() if not rows]:
        raise UserError(f"init: --data: too few different source lines: {empty[0]} would be empty")
    counts = [0] * len(sides)
    distinct: set[str] = set()
    characters: set[str] = set()
    for row in splits["train"]:
        for side, line in enumerate(row):
            words = line.split()
            characters.update(line)
            counts[side] += len(words)
            distinct.update(words)
    smallest = len(characters - {" "}) + 1 + _SPECIALS  # a space is a piece in any case
    corpus = TextCounts(
        languages=languages,
        lines={name: len(rows) for name, rows in splits.items()},
        dropped=len(sides[0]) - len(lines),
        words=sum(counts),
        longer=max(counts),
        distinct=len(distinct),
        smallest=smallest,
        safe=smallest + sum(1 for _ in islice(filter(_is_piece, distinct), _LARGEST)),
    )
    texts = {
        f"data/{name}.{language or 'txt'}": "".join(f"{row[side]}\n" for row in rows)
        for name, rows in splits.items()
        for side, language in enumerate(languages)
    }
    return corpus, texts


def _is_piece(word: str) -> bool:
    """Whether byte-pair encoding can merge a word into one piece: short, of one alphabet."""
    alphabets = {unicodedata.name(char, "").partition(" ")[0] for char in word}
    return word[0].isalpha() and len(word) < _LONGEST_PIECE and len(alphabets) == 1


def _synthetic() -> tuple[ProjectSizes, dict[str, str]]:
    sizes = ProjectSizes(width=64, depth=2, steps=300)
    comment = (
        "# The corpus is the built-in German-English grammar, which needs no download. Sizes are\n"
        "# small, so that a run takes seconds; `ablate init DIR --data my.de my.en` chooses them\n"
        "# from a corpus of yours.\n"
    )
    data = "{name: synthetic, tokens_per_batch: 1024, tokenizer: word, vocab_size: null}"
    return sizes, {"data": data, "counted": comment, **_task(sizes, paired=True)}


def _task(sizes: ProjectSizes, *, paired: bool, tested: bool = True) -> dict[str, str]:
    width, depth = sizes.width, sizes.depth
    if paired:
        model = f"kind: encoder_decoder, encoder_depth: {depth}, decoder_depth: {depth}"
        model += f", model_dim: {width}, ff_dim: {2 * width}"
        objective = "kind: translation, label_smoothing: 0.1, beam: 5, evaluate_test: true"
        return {"model": model, "objective": objective, "matters": "0.1"}
    model = f"kind: decoder, decoder_depth: {2 * depth}, model_dim: {width}, ff_dim: {4 * width}"
    objective = f"kind: causal_lm, evaluate_test: {str(tested).lower()}"
    return {"model": f"{model}, activation: gelu", "objective": objective, "matters": "0.05"}


def _of_ids(folder: Path) -> tuple[ProjectSizes, dict[str, str]]:
    """Return small sizes for files of ids, so that `ablate ask` takes about an hour."""
    from lightning_app.data.config import DataConfig
    from lightning_app.data.prepare import open_ids
    from lightning_app.data.tokens import TokenFiles

    columns = TokenFiles().find(DataConfig(), folder).columns
    tokens = {split: sum(map(len, map(open_ids, of.values()))) for split, of in columns.items()}
    ready = [name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    kind = f"file, tokenizer_file: {_quoted(folder / ready[0])}" if ready else "ids"
    found = ", ".join(f"{count:,} in {split}" for split, count in tokens.items())
    counted = f"# Ids of {folder}: {found}. Sizes are small, so that a run takes seconds.\n"
    data = f"{{name: tokens, root: {_quoted(folder)}, window: 64, tokens_per_batch: 1024, "
    data += f"tokenizer: {kind}, vocab_size: null}}"
    sizes = ProjectSizes(width=64, depth=3, steps=400)
    return sizes, {
        "data": data,
        "counted": counted,
        **_task(sizes, paired=False, tested="test" in tokens),
    }


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _of_corpus(corpus: TextCounts, paths: Sequence[str]) -> tuple[ProjectSizes, dict[str, str]]:
    """Choose sizes for a corpus, and explain the choice in comments."""
    scales = ((300_000, 128, 2, 1024), (3_000_000, 256, 3, 2048))
    largest = (512, 6, 4096)
    width, depth, batch = next((rest for most, *rest in scales if corpus.words < most), largest)
    wanted = min(_LARGEST, max(500, corpus.distinct // 4)) // 100 * 100
    vocabulary = min(corpus.safe, max(corpus.smallest, wanted))
    steps = corpus.longer * _PIECES * _PASSES / batch
    steps = min(20_000, max(500, round(steps / 100) * 100))
    sizes = ProjectSizes(width=width, depth=depth, steps=steps)
    passes = steps * batch / (corpus.longer * _PIECES)
    paired = len(corpus.languages) > 1
    empty = "with an empty line" if paired else "empty ones"
    lines, one = corpus.lines, "pair" if paired else "line"
    depths = [f"{layers}+{layers}" if paired else f"{2 * layers}" for layers in (depth, 2, 3)]
    split = (
        "The split of a pair depends on the SHA-256 of its source line alone: equal sources are "
        "in one split."
        if paired
        else "The last lines are the test, those before them the validation."
    )
    facts = [
        f"Corpus: {' and '.join(paths)}.",
        f"{sum(lines.values()):,} {one}s: {lines['train']:,} to train, {lines['valid']:,} to "
        f"validate, {lines['test']:,} to test; {corpus.dropped:,} {empty} are left out.",
        f"{split} Each of the two gets about one {one} in {SHARE}, or about {MOST:,} where "
        "those are fewer.",
        f"Training has {corpus.words:,} words, {corpus.distinct:,} different ones.",
        f"Vocabulary {vocabulary:,}: a quarter of the different words, between 500 and "
        f"{_LARGEST:,}; at least the {corpus.smallest:,} that the characters need, and at most "
        f"{corpus.safe:,}, as many as these words surely allow.",
        f"Width {width}, {depths[0]} layers: 128 and {depths[1]} below 300,000 words, 256 and "
        f"{depths[2]} below 3 million, else those of the IWSLT14 config, as larger ones would "
        "overfit.",
        f"{steps:,} steps of {batch:,} tokens: about {passes:.1f} passes, at {_PIECES} pieces a "
        "word; between 500 and 20,000 steps.",
        f"Rate {sizes.rate:.1e}: 5e-4 at width 512, times sqrt(512 / width).",
        f"Warm-up {sizes.reference:,}: a fifth of the run, as for IWSLT14.",
    ]
    name = "name: text, root: data"
    if paired:
        source, target = corpus.languages
        name += f", source_language: {source}, target_language: {target}"
    else:
        name += ", window: 64"
    data = f"{{{name}, tokens_per_batch: {batch}, tokenizer: bpe, vocab_size: {vocabulary}}}"
    wrapped = (
        fill(line, 99, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False)
        for line in facts
    )
    counted = "".join(f"{line}\n" for line in wrapped)
    return sizes, {"data": data, "counted": counted, **_task(sizes, paired=paired)}
