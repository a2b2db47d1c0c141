"""The tasks of GLUE (Wang et al. 2018, 1804.07461), from the published tables or from the hub.

A table has one row per line, tab-separated columns and no quoting: quotation marks are text. CoLA
has no header. The dev set is our validation split. GLUE keeps the labels of its test sets, so a
test split is read only from your own file, `test_labelled.tsv`; MNLI's is its mismatched dev
set. A label in words becomes the hub's number for it.

The hub needs a network; it was not tried: tests only use a replacement of `load_dataset`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from lightning_app.core.errors import UserError
from lightning_app.data.config import CORPORA, CorpusReader, DataConfig, Lines, Source, split_sizes
from lightning_app.data.sources import load_from_hub, write_lines
from lightning_app.scores.task_facts import GLUE_CORPORA, GLUE_TASKS, WNLI, GlueTask

_REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
_COLA = ("source", "label", "mark", "sentence")
LARGEST_SCORE = 5.0
"""The largest score of STS-B; the smallest is 0."""


class GlueReader(CorpusReader):
    """Reads one task. Subclasses define its columns.

    Attributes:
        corpus: Its `data.name`.
        texts: The columns of its one or two texts.
        label: The column of the label.
        words: The labels in words, class 0 first; empty if labels are numbers.
        header: The names of the columns of a table without a header.
        leaves_out_short: Whether lines with too few columns are dropped, as the published readers
            of QQP do, rather than refused.
        published: The rows of the published tables of train, valid and, if it has one, test.
        hub_texts: The texts' columns on the hub, if the names differ.
        hub_splits: The name on the hub of each of our splits.
        stems: The stems of the tables of splits that the published files name otherwise.
    """

    pairs = False
    needs_root = False
    labels_of = "glue"
    hub = "nyu-mll/glue"
    base = "finetune_rte.yaml"
    corpus: ClassVar[str]
    texts: ClassVar[tuple[str, ...]] = ("sentence1", "sentence2")
    label: ClassVar[str] = "label"
    words: ClassVar[tuple[str, ...]] = ()
    header: ClassVar[tuple[str, ...]] = ()
    leaves_out_short: ClassVar[bool] = False
    published: ClassVar[tuple[int, ...]]
    hub_texts: ClassVar[tuple[str, ...]] = ()
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "valid": "validation"}
    stems: ClassVar[Mapping[str, str]] = {"valid": "dev", "test": "test_labelled"}

    @property
    def task(self) -> GlueTask:
        """GLUE's facts about the task."""
        return GLUE_TASKS[GLUE_CORPORA[self.corpus]]

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return the name of the table; the default stem `valid` means `dev`."""
        return {"table": (f"{self.stems.get(stem, stem)}.tsv",)}

    def parse(self, columns: dict[str, list[str]], path: Path) -> dict[str, list[Any]]:
        """Return the columns `first`, `second` if there are two texts, and `label`.

        Raises:
            UserError: naming the file and the line of a missing column, an empty text or a label
                that the task does not have.
        """
        lines = columns["table"]
        header = list(self.header) or lines[0].split("\t")
        begin = 0 if self.header else 1
        wanted = (*self.texts, self.label)
        for name in wanted:
            if header.count(name) != 1:
                raise UserError(
                    f"{path}: line 1: expected the columns {', '.join(wanted)} of "
                    f"{self.task.name}, found {header.count(name)} columns '{name}'"
                )
        places = [header.index(name) for name in wanted]
        rows: list[list[Any]] = []
        for number, line in enumerate(lines[begin:], start=begin + 1):
            cells = line.split("\t")
            if len(cells) < len(header) and self.leaves_out_short:
                continue
            if len(cells) != len(header):
                raise UserError(
                    f"{path}: line {number}: expected {len(header)} columns between tabs, as "
                    f"{self.task.name} has, found {len(cells)}"
                )
            *texts, label = (cells[place].strip() for place in places)
            for name, text in zip(self.texts, texts, strict=True):
                if not text and not self.leaves_out_short:
                    raise UserError(f"{path}: line {number}: the column '{name}' is empty")
            rows.append([*texts, self._label(label, path, number)])
        if not rows:
            raise UserError(f"{path}: empty, no row below its header")
        names = ("first", "second")[: len(self.texts)]
        return dict(zip((*names, "label"), map(list, zip(*rows, strict=True)), strict=True))

    def _label(self, text: str, path: Path, number: int) -> float:
        """Return a label as a number."""
        classes = self.task.classes
        if classes is None:
            try:
                score = float(text)
            except ValueError:
                score = math.nan
            if not 0.0 <= score <= LARGEST_SCORE:
                self._refuse(path, number, text, f"a score from 0 to {LARGEST_SCORE:g}")
            return score
        known = self.words or tuple(map(str, range(classes)))
        if text not in known:
            self._refuse(path, number, text, " or ".join(map(repr, known)))
        return float(known.index(text))

    def _refuse(self, path: Path, number: int, text: str, right: str) -> NoReturn:
        raise UserError(
            f"{path}: line {number}: the label '{text:.40}' is not one of {self.task.name}: "
            f"expected {right}"
        )

    def download(self, config: DataConfig, folder: Path) -> None:
        """Write tables with only the columns that are read, from the hub's pinned revision."""
        revision = None if config.root else _REVISION
        tables = load_from_hub(config, self.hub, self.corpus, revision, self.hub_splits)
        for split, rows in tables.items():
            (name,) = self.file_names(config, getattr(config.splits, split))["table"]
            # A row that begins or ends with an empty text begins or ends with a tab.
            write_lines(folder / name, self._lines(rows), strips=False)

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        lines = [] if self.header else ["\t".join((*self.texts, self.label))]
        for row in rows:
            texts = [re.sub(r"[\t\r\n]", " ", row[name]) for name in self.hub_texts or self.texts]
            label = self._written(row["label"])
            if self.header:
                cells = {"source": "hub", "label": label, "mark": "", self.texts[0]: texts[0]}
                lines.append("\t".join(cells[name] for name in self.header))
            else:
                lines.append("\t".join((*texts, label)))
        return lines

    def _written(self, label: float) -> str:
        classes = self.task.classes
        if classes is None:
            return f"{label:.3f}"  # float32 on the hub, 3 digits in the published table
        if label not in range(classes):  # there, -1 marks a row without a label
            raise UserError(
                f"data.name '{self.corpus}': a row of the hub has the label {label}; it "
                f"must be from 0 to {classes - 1}"
            )
        return self.words[int(label)] if self.words else str(int(label))

    def protocol(self, source: Source, lines: Lines, counts: dict[str, int]) -> str:
        """Return the number of rows, and whether it matches the published tables."""
        expected = dict(zip(("train", "valid", "test"), self.published, strict=False))
        same = "the published counts" if counts == expected else "not the published counts"
        # Only the stem: a compressed table has the same rows.
        tables = " / ".join(of["table"].name.partition(".")[0] for of in source.columns.values())
        return f"GLUE {self.task.name}: {split_sizes(counts)} rows of {tables}, {same}"


@CORPORA.register("cola")
class CoLA(GlueReader):
    """Whether a sentence is acceptable English: 1 if it is."""

    corpus = "cola"
    folder = "glue/CoLA"
    texts = ("sentence",)
    header = _COLA
    published = (8_551, 1_043)


@CORPORA.register("sst2")
class SST2(GlueReader):
    """Whether a phrase of a film review is positive: 1 if it is."""

    corpus = "sst2"
    folder = "glue/SST-2"
    texts = ("sentence",)
    published = (67_349, 872)


@CORPORA.register("mrpc")
class MRPC(GlueReader):
    """Whether two sentences of news mean the same: 1 if they do."""

    corpus = "mrpc"
    folder = "glue/MRPC"
    texts = ("#1 String", "#2 String")
    label = "Quality"
    hub_texts = ("sentence1", "sentence2")
    published = (3_668, 408)


@CORPORA.register("stsb")
class STSB(GlueReader):
    """How similar two sentences are, from 0 to 5."""

    corpus = "stsb"
    folder = "glue/STS-B"
    label = "score"
    published = (5_749, 1_500)


@CORPORA.register("qqp")
class QQP(GlueReader):
    """Whether two questions ask the same: 1 if they do."""

    corpus = "qqp"
    folder = "glue/QQP"
    texts = ("question1", "question2")
    label = "is_duplicate"
    leaves_out_short = True
    published = (363_846, 40_430)


@CORPORA.register("mnli")
class MNLI(GlueReader):
    """Whether a premise entails a hypothesis (0), is neutral (1) or contradicts it (2).

    The matched dev set is the validation split, the mismatched one the test split.
    """

    corpus = "mnli"
    folder = "glue/MNLI"
    label = "gold_label"
    words = ("entailment", "neutral", "contradiction")
    hub_texts = ("premise", "hypothesis")
    published = (392_702, 9_815, 9_832)
    stems: ClassVar = {"valid": "dev_matched", "test": "dev_mismatched"}
    hub_splits: ClassVar = {
        "train": "train",
        "valid": "validation_matched",
        "test": "validation_mismatched",
    }


@CORPORA.register("qnli")
class QNLI(GlueReader):
    """Whether a sentence answers a question: 0 if it does."""

    corpus = "qnli"
    folder = "glue/QNLI"
    texts = ("question", "sentence")
    words = ("entailment", "not_entailment")
    published = (104_743, 5_463)


@CORPORA.register("rte")
class RTE(GlueReader):
    """Whether a text entails a hypothesis: 0 if it does."""

    corpus = "rte"
    folder = "glue/RTE"
    words = ("entailment", "not_entailment")
    published = (2_490, 277)


@CORPORA.register("wnli")
class WNLIReader(CorpusReader):
    """Refuses the one unsupported task of GLUE, giving the reason."""

    base = "finetune_rte.yaml"

    def __init__(self) -> None:
        raise UserError(f"data.name 'wnli': {WNLI}")
