"""A finished run, opened to use its model: to translate, continue and score texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_app.api.blocks import check_types, one_line
from lightning_app.config.classes import named_class
from lightning_app.config.identity import require, require_of
from lightning_app.core.errors import UserError
from lightning_app.core.files import sha256_of
from lightning_app.data.config import CORPORA, DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.sources import resolved_data
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, UNK, Tokenizer, load_tokenizer
from lightning_app.models.search import Sampling, sample_texts, search
from lightning_app.runs.folder import NAMED, RunFolder
from lightning_app.runs.parent import data_state, read_checkpoint
from lightning_app.runs.run import Run
from lightning_app.scores.task_facts import task_facts
from lightning_app.tasks.base import Task, task_class, to_device
from lightning_app.tasks.translation import MARKS

TOKENS = 4096  # source tokens translated at once, including padding
NEVER = (PAD, UNK, BOS, MASK)  # tokens that are not text
SPLIT = "given"
Rows = Mapping[str, Sequence[Sequence[int]]]  # the ids of each row, by column


def check_beam(beam: int | None, vocabulary: int | None = None) -> None:
    """Refuse a meaningless search width. None means that of the run's config."""
    check_types(int | None, beam=beam)
    if beam is not None and beam < 1:
        raise UserError(f"beam {beam}: expected at least 1, which is greedy search")
    if beam is not None and vocabulary is not None and beam > vocabulary:
        raise UserError(f"beam {beam}: expected at most the vocabulary, {vocabulary}")


def sampling(*, texts: int, tokens: int, temperature: float, top_k: int, top_p: float) -> Sampling:
    """Return the sampling settings. Raises `UserError` naming the argument."""
    check_types(int, texts=texts, tokens=tokens, top_k=top_k)
    check_types(float, temperature=temperature, top_p=top_p)
    for name, value in (("texts", texts), ("tokens", tokens)):
        if value < 1:
            raise UserError(f"{name} {value}: expected at least 1")
    with one_line():
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p)


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text of several lines, after the end of a line."""
    ids = [EOS]
    for number, line in enumerate(text.split("\n")):
        ids += [EOS] * (number > 0) + tokenizer.encode(line)
    return ids


def text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the lines of `ids`, each ended by EOS."""
    ends = [-1, *(place for place, token in enumerate(ids) if token == EOS), len(ids)]
    return "\n".join(tokenizer.decode(ids[a + 1 : b]) for a, b in pairwise(ends))


class TextScore(NamedTuple):
    """The score that a model gives a text.

    Attributes:
        nll: The sum of ``-ln p`` over the predicted tokens, in nats, without label smoothing.
        tokens: The number of predicted tokens, with the end mark of each line.
        unknown: The number of them that replace text outside the vocabulary. Do not compare texts
            with such tokens: predicting that a token is unknown costs less than predicting its
            spelling.
    """

    nll: float
    tokens: int
    unknown: int

    @property
    def nll_per_token(self) -> float:
        """Nats per predicted token; comparable only under the same tokenizer."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(nll / tokens)``; infinite if too large for a float."""
        return math.exp(self.nll_per_token) if self.nll_per_token < 700 else math.inf


class GivenCorpus:
    """Texts as the part of a `PreparedCorpus` that tasks read: one split of columns of ids.

    `documents` has the index of the first token of each document.
    """

    def __init__(self, columns: Rows, documents: Sequence[int] = (0,)) -> None:
        self._columns, self._documents = columns, documents
        self.meta: dict[str, Any] = {"text": {SPLIT: {}}}

    def ids(self, split: str, column: str) -> np.ndarray:
        """Return all token ids of a column, int32."""
        rows = self._columns[column]
        return np.array([token for row in rows for token in row], dtype=np.int32)

    def offsets(self, split: str, column: str) -> np.ndarray:
        """Return where each row begins, int64, (rows + 1,)."""
        return np.cumsum([0, *map(len, self._columns[column])])

    def documents(self, split: str) -> np.ndarray:
        """Return the index of the first token of each document."""
        return np.array(self._documents, dtype=np.int64)


@dataclass(eq=False, repr=False, kw_only=True)
class TrainedRun:
    """A trained model with the tokenizer of its run, in evaluation mode, on a GPU if there is one.

    `load_run` returns it. A method that the run's task does not support raises `UserError`.

    Attributes:
        folder: The folder of the run.
        checkpoint: The file from which the weights were read.
        model: The model, a plain `torch.nn.Module`.
        task: Its task: loss, batches, decoding.
        tokenizer: The tokenizer of its data; of source texts `tokenizer.source`.
        vocab_size: The size of the vocabulary, of the target if each language has its own.
        device: The device that holds the model.
    """

    folder: Path
    checkpoint: Path
    model: Any
    task: Task
    tokenizer: Tokenizer
    vocab_size: int
    device: torch.device

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r}, checkpoint={str(self.checkpoint)!r})"

    @cached_property
    def run(self) -> Run:
        """The run as its folder holds it."""
        return Run(self.folder)

    @property
    def config(self) -> dict[str, Any]:
        """The config of the run with every default, as `config.yaml` holds it."""
        return self.run.config

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics at the end of the run by name, None where one was not finite.

        They belong to its last step, whichever checkpoint is loaded.
        """
        return dict(self.run.finished["metrics"])

    def translate(self, lines: Iterable[str], *, beam: int | None = None) -> list[str]:
        """Return the translation of each line; an empty line stays empty.

            load_run("experiments/fit/runs/RUN").translate(["vielen dank ."])

        Args:
            lines: Lines in the form of the run's corpus: tokenised and lower-cased for IWSLT14.
            beam: The width of the search, 1 for greedy; None for that of the run's config.
        """
        check_beam(beam, self.vocab_size)
        self._needs("translation")
        lines = _listed("lines", lines)
        if any("\n" in line for line in lines):
            raise UserError("lines: one of them has a line break; give each line by itself")
        how = self.task.config.search(beam)
        sources = [self._row(line, self.tokenizer.source) for line in lines]
        translations = [""] * len(sources)
        # Sorted by length; a source with only its end mark has nothing to translate.
        order = [i for i, source in enumerate(sources) if len(source) > 1]
        order.sort(key=lambda i: len(sources[i]))
        while order:
            longest = len(sources[order[-1]])
            count = max(1, TOKENS // (longest * how.beam))
            rows, order = order[-count:], order[:-count]
            batch = [torch.tensor(sources[i], device=self.device) for i in rows]
            batch = pad_sequence(batch, batch_first=True, padding_value=PAD)
            for i, hypothesis in zip(rows, search(self.model, batch, MARKS, how), strict=True):
                translations[i] = self.tokenizer.decode(hypothesis.tokens)
        return translations

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        texts: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
    ) -> list[str]:
        """Return `prompt` with its continuation by the model, `texts` times.

            load_run("experiments/fit/runs/RUN").generate("the", tokens=30, top_p=0.9)

        Args:
            prompt: The beginning of the text.
            tokens: The number of tokens to generate.
            texts: The number of texts.
            temperature: 0 for the likeliest token.
            top_k: Only the likeliest `top_k` tokens can be drawn; 0 for all.
            top_p: Only the likeliest tokens that together have this probability can be drawn.
            seed: The seed of the draws.

        Raises:
            UserError: for a prompt with text outside the vocabulary, and for too many tokens.
        """
        how = sampling(
            texts=texts, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p
        )
        self._needs("causal_lm")
        check_types(int, seed=seed)
        check_types(str, prompt=prompt)
        if not 0 <= seed < 2**63:
            raise UserError(f"seed {seed}: expected 0 to 2^63 - 1")
        prefix = ids_of(prompt, self.tokenizer)
        if UNK in prefix:
            raise UserError(f"prompt {prompt!r}: has text outside the run's vocabulary")
        longest = self.model.longest
        if len(prefix) + tokens - 1 > longest:
            raise UserError(
                f"tokens {tokens}: with a prompt of {len(prefix)} tokens at most "
                f"{max(0, int(longest) - len(prefix) + 1)}: the model has {int(longest)} learned "
                "positions"
            )
        draws = torch.Generator(self.device).manual_seed(seed)
        continuations = sample_texts(
            self.model, prefix, texts=texts, tokens=tokens, how=how, never=NEVER, generator=draws
        )
        return [text_of([*prefix[1:], *row], self.tokenizer) for row in continuations.tolist()]

    def score(self, lines: Iterable[str], targets: Iterable[str] | None = None) -> list[TextScore]:
        """Return the negative log-likelihood of each text, in nats, and its number of tokens.

            load_run("experiments/fit/runs/RUN").score(["the dog sees the cat ."])

        and of a translation model:

            load_run("experiments/fit/runs/RUN").score(["der hund ."], ["the dog ."])

        A text is read as an evaluation reads a split: nll is ``-sum ln p(token)`` over every token
        of the text and the end mark of each of its lines, without label smoothing and in the
        precision of the weights. Over the rows of a split, ``sum nll / sum tokens`` is the `nll` of
        an evaluation of these weights.

        - Causal language model: each text is scored separately; its first token is predicted from
          the end of a line; it may have several lines. It is cut into windows of `data.window`
          tokens starting every `data.evaluation_stride` tokens, as in an evaluation; with
          `model.block.memory` the segments form one stream. With `data.intra_document_masking`
          documents begin where the run's corpus has them. To get the loss of a split, give its
          file as one text: as there, an empty last line does not count.
        - Translation: each target line given its source line.

        Args:
            lines: Texts; for a translation model the source lines.
            targets: For a translation model, the target lines.
        """
        kind = self.task.config.kind
        if kind not in ("translation", "causal_lm"):
            raise UserError(
                f"score: {self.folder} holds a model for {task_facts(kind).title}, which gives no "
                "probability of a text"
            )
        lines = _listed("lines", lines)
        if kind == "causal_lm":
            if targets is not None:
                raise UserError("targets: only a model for translation takes them")
            return [self._score_text(text) for text in lines]
        targets = None if targets is None else _listed("targets", targets)
        if targets is None or len(targets) != len(lines):
            number = "none" if targets is None else len(targets)
            raise UserError(f"targets: expected a line for each of {len(lines)}, found {number}")
        for name, each in (("lines", lines), ("targets", targets)):
            if any("\n" in line for line in each):
                raise UserError(f"{name}: a pair is two lines, and one of them has a line break")
        if not lines:
            return []
        rows = [self._row(line) for line in targets]
        sources = [self._row(line, self.tokenizer.source) for line in lines]
        columns = {"source": sources, "target": rows}
        nll, tokens = self._sums_by_row(columns, self._data)
        return [
            TextScore(float(nll[row]), int(tokens[row]), ids.count(UNK))
            for row, ids in enumerate(rows)
        ]

    def _score_text(self, text: str) -> TextScore:
        """Return the score of a text of one or several lines, read from its start."""
        # As a corpus is read: a line ends in "\n", the last one too.
        lines = [line.lstrip("\ufeff").removesuffix("\r") for line in text.split("\n")]
        if len(lines) > 1 and not lines[-1]:
            lines.pop()
        data = replace(self._data, evaluation_streams=1)
        rows = [self._row(line) for line in lines]
        ids = [token for row in rows for token in row]
        starts = np.cumsum([0, *map(len, rows)])
        documents = CORPORA[data.name]().documents(data, lines) or []
        begins = sorted({0, *(int(starts[line]) for line in documents)})
        nll, tokens = self._sums_by_row({"text": [ids]}, data, begins)
        return TextScore(float(nll.sum()), int(tokens.sum()), ids.count(UNK))

    @torch.no_grad()
    def _sums_by_row(
        self, columns: Rows, data: DataConfig, documents: Sequence[int] = (0,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of nll and the predicted tokens of each row of an evaluation."""
        corpus = cast(
            PreparedCorpus, GivenCorpus(columns, documents)
        )  # its own reader would need files
        rows = task_class(self.task.config.kind).rows(corpus, SPLIT, data, seed=None)
        nll = torch.zeros(len(rows), dtype=torch.float64)
        tokens = torch.zeros(len(rows), dtype=torch.float64)
        for item in rows.sampler(data.tokens_per_batch):
            batch = to_device(rows[item], self.device)
            by_token = self.task.sums(self.model, batch).by_token
            assert by_token is not None
            row, (losses, counted) = self.task.rows_of(batch).cpu(), by_token.double().cpu()
            real = row >= 0
            nll.index_add_(0, row[real], losses[real])
            tokens.index_add_(0, row[real], counted[real])
        return nll, tokens

    def _row(self, line: str, tokenizer: Tokenizer | None = None) -> list[int]:
        return [*(tokenizer or self.tokenizer).encode(line), EOS]

    @property
    def _data(self) -> DataConfig:
        return resolved_data(self.config["data"])

    def _needs(self, kind: str) -> None:
        if self.task.config.kind != kind:
            title, wanted = (task_facts(name).title for name in (self.task.config.kind, kind))
            raise UserError(f"{self.folder} holds a model for {title}, not for {wanted}")


def load_run(path: str | Path, checkpoint: str | Path = "best") -> TrainedRun:
    """Open a finished run with the weights of one of its checkpoints.

        from lightning_app import load_run

        run = load_run("experiments/fit/runs/RUN", checkpoint="last")
        run.metrics["val/nll"], run.config["model"]["block"]["preset"]

    Args:
        path: The folder of a run, from `fit` or from a cell of a grid.
        checkpoint: `best`, `last`, or the path of a checkpoint of this run.

    Raises:
        UserError: if a file is missing or damaged, or the checkpoint was trained on other data.
    """
    folder = RunFolder(Path(path))
    held = str(checkpoint) in NAMED
    file = folder.checkpoint(str(checkpoint)) if held else Path(checkpoint)
    for needed in (file, folder.tokenizer):
        if not needed.is_file():
            raise UserError(
                f"{needed} is missing: needed is a finished run's folder whose grid keeps that "
                "checkpoint (checkpoints: all, last or best)"
            )
    require(folder.path)
    require_of(file)
    if folder.result.is_file():
        _ = Run(folder).finished  # refuses a run whose files were changed
    stored = read_checkpoint(file, folder.path)
    data = data_state(stored)
    if data is not None and sha256_of(folder.tokenizer.read_bytes()) != data["tokenizer_sha256"]:
        raise UserError(f"{folder.tokenizer}: damaged, or not the tokenizer of {file.name}")
    # Lightning is imported here, so that the checks above are fast.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = named_class("model", stored["hyper_parameters"])
    module = kind.load_from_checkpoint(file, map_location=device, weights_only=True)
    assert module.model is not None
    module.model.eval()
    return TrainedRun(
        folder=folder.path,
        checkpoint=file,
        model=module.model,
        task=module.objective,
        tokenizer=load_tokenizer(folder.tokenizer),
        vocab_size=module.vocab_size,
        device=device,
    )


def _listed(name: str, lines: Iterable[str]) -> list[str]:
    """The texts as a list, which an iterator gives once only.

    Raises:
        UserError: for a single string, each character of which would be taken for a line, and for
            what is no text.
    """
    if isinstance(lines, str):
        raise UserError(f"{name}: expected a list of texts, found one text; put it into a list")
    if not isinstance(lines, Iterable):
        raise UserError(f"{name}: expected a list of texts, found {lines!r}")
    found = list(lines)
    for line in found:
        if not isinstance(line, str):
            raise UserError(f"{name}: expected texts, found {line!r}")
    return found
