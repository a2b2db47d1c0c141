"""Translate lines of text with the checkpoint of a run."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_app.data.tokenizer import EOS, PAD, Tokenizer, load_tokenizer, sha256
from lightning_app.errors import UserError
from lightning_app.models.heads import EncoderDecoder
from lightning_app.models.search import SearchConfig, search
from lightning_app.saved import read_checkpoint
from lightning_app.task_facts import task_facts
from lightning_app.tasks.translation import MARKS, Translation

CHUNK = 512  # lines read before the first is written
TOKENS = 4096  # source tokens translated at once, including padding


def translate_lines(run: Path, source: Path | None, beam: int | None, checkpoint: str) -> int:
    """Print a translation on a line for each line of `source`, or of standard input if None.

    The input must have the form of the run's corpus: tokenised and lower-cased for IWSLT14.
    """
    path = run / "checkpoints" / f"{checkpoint}.ckpt"
    vocabulary = run / "tokenizer.model"
    for needed in (path, vocabulary):
        if not needed.is_file():
            raise UserError(
                f"translate: {needed} is missing: --run takes a finished run's folder whose grid "
                "keeps that checkpoint (checkpoints: all, last or best)"
            )
    if beam is not None and beam < 1:
        raise UserError(f"translate: --beam {beam}: expected at least 1, which is greedy search")
    # Lightning is imported here, so that the checks above are fast.
    from lightning_app.datamodule import TextDataModule
    from lightning_app.module import TransformerModule

    try:
        data = read_checkpoint(path).get(TextDataModule.__qualname__)
    except UserError as error:
        raise UserError(f"translate: {error}") from error
    if data is not None and sha256(vocabulary.read_bytes()) != data["tokenizer_sha256"]:
        raise UserError(f"translate: {vocabulary}: damaged, or not the tokenizer of {path.name}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = TransformerModule.load_from_checkpoint(path, map_location=device, weights_only=True)
    task, model = module.objective, module.model
    if not isinstance(task, Translation):
        title = task_facts(task.config.kind).title
        raise UserError(f"translate: {run} holds a model for {title}, not for translation")
    assert isinstance(model, EncoderDecoder)
    if beam is not None and beam > module.vocab_size:
        raise UserError(
            f"translate: --beam {beam}: expected at most the vocabulary, {module.vocab_size}"
        )
    model.eval()
    how = task.config.search(beam)
    tokenizer = load_tokenizer(vocabulary)
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
