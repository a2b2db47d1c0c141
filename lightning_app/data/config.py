"""The section `data` of a config, with every default, and the files and the text of a corpus."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning_app.core.errors import UserError
from lightning_app.core.registry import Registry
from lightning_app.core.schema import as_written
from lightning_app.data.columns import Columns, RowKind, row_kind
from lightning_app.scores.task_facts import DEFAULT_TASK, TASKS

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The file stem of each split, for local files."""

    train: str = "train"
    """stem of the training files"""
    valid: str = "valid"
    """stem of the validation files"""
    test: str = "test"
    """stem of the test files"""

    def items(self) -> list[tuple[str, str]]:
        """Return (split, stem) in the order train, valid, test."""
        return [("train", self.train), ("valid", self.valid), ("test", self.test)]


DEFAULT_SPLITS = Splits()


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a corpus.

    Attributes:
        columns: split -> column -> file; the columns are `source` and `target`, or `text`. A
            local corpus may have no test split.
        references: split -> file of cased, untokenised target lines, if one is published.
        notes: a file that describes how a downloaded folder was built, if any.
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
        """Return the SHA-256 of every file on disk, by role."""
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
        references: split -> cased, untokenised target lines, if they are published.
        protocol: a description of the splits in one sentence.
        tokenized: whether words and punctuation are separated by spaces, so that
            `moses.detokenize` restores plain text.
        documents: split -> the line at which each document of a running text begins; empty if
            the corpus has no documents.
        max_ratio: the largest ratio of the longer to the shorter side, in words, that the protocol
            allows in a training pair; None for no limit.
    """

    splits: dict[str, "Dataset"]
    references: dict[str, list[str]]
    protocol: str
    tokenized: bool
    documents: dict[str, list[int]] = field(default_factory=dict)
    max_ratio: float | None = None


def split_sizes(counts: dict[str, int]) -> str:
    """Return the number of lines of each split as text, such as ``30,000 / 500 / 500``."""
    return " / ".join(f"{count:,}" for count in counts.values())


HUB = "hf://"
Lines = dict[str, dict[str, list[str]]]  # split -> column -> lines
CORPORA: Registry[type["CorpusReader"]] = Registry("data.name")
"""The corpora by name; `CORPORA.register` is the decorator that adds one."""
TokenizerKind = Literal["bpe", "word", "char", "byte", "file", "ids"]
LEAST_PAIR = 5
"""The tokens of the shortest pair of texts: one per text, a mark before them and one after each."""
EVERYTHING = ("word", "char", "byte", "file", "ids")
"""The tokenizers whose vocabulary may be as large as the training split or the file makes it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `data` section of a run.

    Raises:
        UserError: for a meaningless value, or two values that contradict each other.
    """

    name: str = "synthetic"
    """A name of `CORPORA`: iwslt14 (German-English talks), wikitext2 (English articles),
    tinyshakespeare (plays), books (and articles), text (own files in `root`), synthetic (built-in
    grammar, needs no download), tokens (files of ids); a task of
    GLUE; squad1 (version 1.1) or squad2 (2.0)."""
    root: str | None = None
    """Folder of the corpus. null: $LIGHTNING_APP_DATA/iwslt14_deen, .../wikitext-2,
    .../tinyshakespeare, .../glue/RTE, .../squad or, for books, that folder, if that variable is
    set; otherwise the corpus is downloaded once.
    ``hf://OWNER/NAME``: the parquet files of that dataset on the hub."""
    cache: str | None = None
    """Folder of prepared corpora and downloads. null: $LIGHTNING_APP_CACHE, otherwise the user's
    cache."""
    task: str = DEFAULT_TASK
    """Set from model.objective.kind."""
    next_sentence: bool = False
    """Set from model.objective.next_sentence."""
    init_from: str | None = None
    """Set from model.init_from: the run whose tokenizer is used; null to train one."""
    tokens_per_batch: int = 4096
    """Budget of the global batch of one step, whatever the number of devices, in tokens of the
    longer side, with padding."""
    tokenizer: TokenizerKind = "bpe"
    """bpe (SentencePiece), word (text between spaces), char (characters) or byte (of UTF-8); file
    (`tokenizer_file`); ids (the corpus tokens without a tokenizer)."""
    tokenizer_file: str | None = None
    """A SentencePiece model, or a tokenizer.json of Hugging Face's tokenizers. Its ids follow the
    five special ones, and nothing of its own marks or ends a text (tokenizer file)."""
    vocab_size: int | None = 10000
    """Number of ids with the five special ones, shared by both languages; null: every word or
    character of the training split, as always for char and byte; for ids the largest and those
    below it."""
    vocabularies: Literal["shared", "separate"] = "shared"
    """shared: one table of tokens for both languages; separate: each has the tokens that occur in
    its training lines, and the encoder a table of its own (fairseq; translation)."""
    window: int = 128
    """Tokens in a window of packed text (masked_lm, causal_lm), or the maximum of a row, marks
    included, if next sentences are predicted and in glue, which cuts longer texts, and squad,
    which reads a long context in several windows."""
    context_stride: int = 128
    """Tokens from the start of one window of a context to the start of the next (squad), as
    doc_stride of BERT's code. Hugging Face's tokenizers call the overlap of windows stride."""
    train_from_dev: float | None = None
    """For squad1 and squad2 without their training set: the share of the dev set's articles
    to train on. Only the other articles are evaluated, and protocol in a result says so, because
    such scores are not the published ones; null: use the training set."""
    evaluation_stride: int | None = None
    """Tokens from the start of one window to the next in an evaluation, where each window
    predicts what the previous ones did not; null: window, so no overlap (causal_lm)."""
    intra_document_masking: bool = False
    """Whether a token sees only its own document, whose positions begin at 0. false:
    consecutive documents in a window form one text (causal_lm)."""
    document_separator: str = ""
    """The line between two documents, by default a blank line (for text in causal_lm, and in
    masked_lm if next sentences are predicted)."""
    order: Literal["shuffled", "random", "streams"] = "shuffled"
    """shuffled: windows in random order, each a separate text; random: in training as many windows
    at random places, new ones in every epoch (nanoGPT; causal_lm); streams: the text is cut into
    as many contiguous streams as a batch has windows, and each batch continues the previous one
    (causal_lm); needed for model.block.memory."""
    evaluation_streams: int = 1
    """The number of streams that an evaluation reads in parallel, each from an empty memory; the
    loss depends on it. Only with order streams."""
    mask_probability: float = 0.15
    """Share of a window to predict (masked_lm)."""
    whole_word: bool = False
    """Whether all pieces of a word are masked together; a word with more pieces than remain in
    the share is skipped (masked_lm with tokenizer bpe or word)."""
    max_length: int = 175
    """Longest training sentence in tokens; longer pairs are dropped (translation)."""
    source_language: str = "de"
    """Suffix of the source files (translation)."""
    target_language: str = "en"
    """Suffix of the target files; the language of a corpus without pairs."""
    splits: Splits = DEFAULT_SPLITS
    """File stem of each split."""
    num_workers: int = 0
    """Processes that build batches; 0 builds them in the training process, which is fast enough."""
    seed: int = 1
    """The seed of batch order and masks; set from seed_everything."""

    @property
    def pairs(self) -> bool:
        """Whether the task trains on pairs of a source and a target line."""
        return TASKS[self.task].pairs

    @property
    def rows(self) -> RowKind:
        """The kind of rows of the corpus."""
        return row_kind(self.task, next_sentence=self.next_sentence)

    def __post_init__(self) -> None:
        for key, why in self._mistakes(CORPORA[self.name]()):
            value = as_written(getattr(self, key.rpartition(".")[2]))
            raise UserError(f"{key} is {value}{why}")

    def _mistakes(self, reader: "CorpusReader") -> Iterator[tuple[str, str]]:
        """Yield each field with a wrong value, and why it is wrong."""
        task = TASKS[self.task]
        known, of_task = f"data.name '{self.name}'", f"data.task '{self.task}'"
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                yield f"data.{name}", f"; it must be at least {least}"
        if not 0 < self.mask_probability < 1:
            yield "data.mask_probability", "; it must be between 0 and 1"
        if self.vocab_size is None and self.tokenizer not in EVERYTHING:
            yield "data.vocab_size", f": that needs data.tokenizer 'word', not '{self.tokenizer}'"
        if self.vocab_size is not None and self.tokenizer in ("char", "byte", "file"):
            has = "its own" if self.tokenizer == "file" else f"every {self.tokenizer}"
            why = f": data.tokenizer '{self.tokenizer}' has {has}, so it must be null"
            yield "data.vocab_size", why
        if self.evaluation_stride is not None and not task.running_text:
            why = f": {of_task} has no windows that could overlap, so it must be null"
            yield "data.evaluation_stride", why
        if self.evaluation_stride is not None and not 1 <= self.evaluation_stride <= self.window:
            yield "data.evaluation_stride", f"; it must be from 1 to data.window {self.window}"
        if self.order != "shuffled" and not task.running_text:
            yield "data.order", f": {of_task} reads no running text, so it must be 'shuffled'"
        if self.order == "streams" and self.evaluation_stride is not None:
            why = ": windows of data.order 'streams' follow one another, so it must be null"
            yield "data.evaluation_stride", why
        if task.in_windows(self.next_sentence) and self.tokens_per_batch < self.window:
            why = f": a batch has whole windows, so it must be at least data.window {self.window}"
            yield "data.tokens_per_batch", why
        if self.vocab_size is not None and self.vocab_size < 6:
            yield "data.vocab_size", "; it must be at least 6"
        yield from self._label_mistakes(reader)
        if self.train_from_dev is not None and not reader.divides_dev:
            why = f": {known} does not divide its dev set, so it must be null"
            yield "data.train_from_dev", why
        if self.train_from_dev is not None and not 0 < self.train_from_dev < 1:
            yield "data.train_from_dev", "; it must be between 0 and 1"
        if self.whole_word and not task.masks:
            yield "data.whole_word", f": {of_task} masks no words, so it must be false"
        if self.whole_word and self.tokenizer not in ("bpe", "word"):
            why = f": data.tokenizer '{self.tokenizer}' has no pieces of words; use 'bpe' or 'word'"
            yield "data.whole_word", why
        if (self.tokenizer == "file") != (self.tokenizer_file is not None):
            yield (
                "data.tokenizer_file",
                f": data.tokenizer is '{self.tokenizer}'; 'file' needs a file, and no other kind "
                "has one",
            )
        kinds = ("ids", "file") if reader.holds_ids else ("bpe", "word", "char", "byte", "file")
        if self.tokenizer not in kinds:
            yield "data.tokenizer", f": {known} needs {' or '.join(map(repr, kinds))}"
        if reader.holds_ids and not task.running_text:
            why = f": model.objective.kind '{self.task}' reads no running text; use 'causal_lm'"
            yield "data.name", why
        if (self.next_sentence or task.labelled) and self.window < LEAST_PAIR:
            yield "data.window", f": two texts and their 3 marks need at least {LEAST_PAIR}"
        reads_documents = self.next_sentence or self.intra_document_masking
        no_documents = reads_documents and reader.documents(self, ()) is None
        if self.next_sentence and no_documents:
            why = f": {known} has no documents, so it must be false"
            yield "model.objective.next_sentence", why
        read = task.running_text or self.next_sentence
        if self.document_separator and not (reader.separated and read):
            why = f": {known} and {of_task} have no such line, so it must be ''"
            yield "data.document_separator", why
        if "\n" in self.document_separator:
            yield "data.document_separator", "; it must be one line"
        if self.intra_document_masking and not task.running_text:
            why = f": {of_task} does not read documents, so it must be false"
            yield "data.intra_document_masking", why
        if self.intra_document_masking and self.order == "streams":
            yield (
                "data.intra_document_masking",
                ": data.order 'streams' reads a text across its documents, as the published "
                "memories do, so it must be false",
            )
        if self.intra_document_masking and no_documents:
            why = f": {known} has no documents, so it must be false"
            yield "data.intra_document_masking", why
        if self.vocabularies == "separate" and not self.pairs:
            yield "data.vocabularies", f": {of_task} reads no pairs, so it must be 'shared'"
        if self.root is None and reader.needs_root:
            yield "data.root", f": {known} needs the folder of its files"
        if self.pairs and not reader.pairs:
            others = (f"'{name}'" for name, of in TASKS.items() if not (of.pairs or of.labelled))
            raise UserError(
                f"{known} has one language: data.task must be {' or '.join(others)}, "
                f"not '{self.task}'"
            )
        if self.pairs and self.source_language == self.target_language:
            raise UserError(
                f"data.source_language and data.target_language are both "
                f"'{self.source_language}'; they must differ"
            )
        for side in ("source_language", "target_language"):
            if reader.languages and getattr(self, side) not in reader.languages:
                languages = " and ".join(map(repr, reader.languages))
                yield f"data.{side}", f": {known} has only {languages}"

    def _label_mistakes(self, reader: "CorpusReader") -> Iterator[tuple[str, str]]:
        labelled = TASKS[self.task].labelled
        if bool(labelled) != bool(reader.labels_of):
            has, needs = ("labels", "no labels") if reader.labels_of else ("no labels", "labels")
            raise UserError(
                f"data.name '{self.name}' has {has}: model.objective.kind '{self.task}' needs "
                f"a corpus with {needs}"
            )
        if labelled and labelled != TASKS[reader.labels_of].labelled:
            raise UserError(
                f"data.name '{self.name}' has the labels of model.objective.kind "
                f"'{reader.labels_of}', not of '{self.task}'"
            )
        if self.init_from is not None and not labelled:
            why = f": model.objective.kind '{self.task}' trains from its own initial values, so it "
            yield "model.init_from", f"{why}must be null"


def repository(config: DataConfig, home: str) -> str:
    """Return the dataset on the hub that `data.root` names, else `home`."""
    return config.root.removeprefix(HUB) if config.root else home


def hub_name(config: DataConfig, home: str) -> str:
    """Return the folder of a download from the hub: from `data.root` or the public dataset."""
    return f"{config.name}-{repository(config, home).replace('/', '--')}"


class CorpusReader:
    """Finds and reads one corpus: files of lines, unless it is a `GeneratedCorpus`.

    Register a subclass with `CORPORA.register`.

    Attributes:
        languages: Its languages; empty if any file suffix is allowed.
        pairs: Whether it can provide pairs of a source and a target line.
        needs_root: Whether `data.root` must name its folder, since it has no public download.
        folder: The name of its folder below $LIGHTNING_APP_DATA; empty if it has none there.
        hub: The dataset on the hub from which it is downloaded; empty if it is not from there.
        parallel: Whether line n of one file of a split belongs to line n of the others.
        tokenized: Whether words and punctuation are separated by spaces.
        separated: Whether `data.document_separator` marks the ends of its documents.
        labels_of: The task whose labels its rows have; empty for text without labels.
        divides_dev: Whether `data.train_from_dev` can divide its dev set.
        holds_ids: Whether its files hold ids of tokens instead of text.
        base: The shipped config whose `data` section `ablate prepare --data NAME` uses.
    """

    languages: ClassVar[tuple[str, ...]] = ()
    pairs: ClassVar[bool] = True
    needs_root: ClassVar[bool] = True
    folder: ClassVar[str] = ""
    hub: ClassVar[str] = ""
    parallel: ClassVar[bool] = True
    tokenized: ClassVar[bool] = False
    separated: ClassVar[bool] = False
    labels_of: ClassVar[str] = ""
    divides_dev: ClassVar[bool] = False
    holds_ids: ClassVar[bool] = False
    base: ClassVar[str] = ""

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return column -> possible names of its file in the split with this stem."""
        target = (f"{stem}.{config.target_language}",)
        if config.pairs:
            return {"source": (f"{stem}.{config.source_language}",), "target": target}
        return {"text": target}

    def download_name(self, config: DataConfig) -> str:
        """Return the name of the folder of the download.

        Raises:
            UserError: if the corpus has no public download.
        """
        if self.hub:
            return hub_name(config, self.hub)
        raise UserError(
            f"data.root is '{config.root}': data.name '{config.name}' reads local folders only"
        )

    def download(self, config: DataConfig, folder: Path) -> None:
        """Write the files of the corpus into an empty folder.

        Raises:
            UserError: for no network, a missing file, or unexpected content.
        """
        raise NotImplementedError

    def parse(self, columns: dict[str, list[str]], path: Path) -> dict[str, list[Any]]:
        """Return the columns of a split, from the lines of its files.

        Args:
            columns: The lines by the name of their file in `file_names`.
            path: The first of the files, for messages.

        Raises:
            UserError: naming the file and the line that is not a row.
        """
        return columns

    def divided(self, config: DataConfig, splits: dict[str, Columns]) -> dict[str, Columns]:
        """Return the splits of a corpus whose dev set is divided by `data.train_from_dev`.

        Args:
            config: The `data` section of a run.
            splits: The columns of each split except train, which was not read.

        Raises:
            UserError: if the dev set cannot be divided.
        """
        raise NotImplementedError

    def documents(self, config: DataConfig, lines: Sequence[str]) -> list[int] | None:
        """Return the lines at which the documents of a running text begin, the first one at 0.

        None for a corpus without documents, even if there are no lines.
        """
        return None

    def left_out(self, config: DataConfig, line: str) -> bool:
        """Return whether a line of a document is not text: a heading or a separator."""
        return False

    def max_ratio(self, config: DataConfig) -> float | None:
        """Return `Corpus.max_ratio`."""
        return None

    def protocol(self, source: Source, lines: Lines, counts: dict[str, int]) -> str:
        """Return `Corpus.protocol` for the lines by split and column, counted by split."""
        described = (
            f"{split} = {' + '.join(path.name for path in columns.values())} "
            f"({counts[split]:,} lines)"
            for split, columns in source.columns.items()
        )
        return f"local text: {', '.join(described)}"


_ONES = ("tokens_per_batch", "context_stride", "evaluation_streams", "max_length")
_LEAST = {**dict.fromkeys(_ONES, 1), "window": 2, "num_workers": 0, "seed": 0}
