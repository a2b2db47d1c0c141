"""Translate lines of text with the checkpoint of a run."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_app.commands.trained import load_trained
from lightning_app.data.tokenizer import EOS, PAD, Tokenizer
from lightning_app.errors import UserError
from lightning_app.models.heads import EncoderDecoder
from lightning_app.models.search import SearchConfig, search
from lightning_app.tasks.translation import MARKS

CHUNK = 512  # lines read before the first is written
TOKENS = 4096  # source tokens translated at once, including padding


def translate_lines(run: str | Path, source: Path | None, beam: int | None, checkpoint: str) -> int:
    """Print a translation on a line for each line of `source`, or of standard input if None.

    The input must have the form of the run's corpus: tokenised and lower-cased for IWSLT14.
    """
    if beam is not None and beam < 1:
        raise UserError(f"translate: --beam {beam}: expected at least 1, which is greedy search")
    task, model, tokenizer, vocab_size, device = load_trained(
        "translate", run, checkpoint, "translation"
    )
    if beam is not None and beam > vocab_size:
        raise UserError(f"translate: --beam {beam}: expected at most the vocabulary, {vocab_size}")
    how = task.config.search(beam)
    lines = input_lines(source)
    while chunk := list(islice(lines, CHUNK)):
        for translation in translate(model, tokenizer, chunk, how, device):
            print(translation)
        sys.stdout.flush()
    return 0


def input_lines(source: Path | None) -> Iterator[str]:
    """Yield the lines of a file or of standard input, without their ends."""
    name = "standard input" if source is None else str(source)
    try:
        stream = sys.stdin.buffer if source is None else source.open("rb")
    except OSError as error:
        raise UserError(f"translate: --input {source}: {error.strerror}") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"translate: {name}, line {number}: not valid UTF-8") from error


def translate(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    lines: Iterable[str],
    how: SearchConfig,
    device: torch.device,
) -> list[str]:
    """Return the translation of each line; an empty line stays empty."""
    sources = [[*tokenizer.encode(line), EOS] for line in lines]
    translations = [""] * len(sources)
    # Sorted by length; a source with only its end mark has nothing to translate.
    order = sorted((i for i, s in enumerate(sources) if len(s) > 1), key=lambda i: len(sources[i]))
    while order:
        longest = len(sources[order[-1]])
        count = max(1, TOKENS // (longest * how.beam))
        rows, order = order[-count:], order[:-count]
        batch = [torch.tensor(sources[i], device=device) for i in rows]
        batch = pad_sequence(batch, batch_first=True, padding_value=PAD)
        for i, hypothesis in zip(rows, search(model, batch, MARKS, how), strict=True):
            translations[i] = tokenizer.decode(hypothesis.tokens)
    return translations
