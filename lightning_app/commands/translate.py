"""The commands that translate and generate with a trained run.

Translate lines of text with the checkpoint of a run.

Continue a text with the checkpoint of a run.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from lightning_app.api.trained import check_beam, load_run, sampling
from lightning_app.commands.words import as_options
from lightning_app.core.errors import UserError

CHUNK = 512  # lines read before the first is written


def translate_lines(run: Path, source: Path | None, beam: int | None, checkpoint: Path) -> int:
    """Print a translation on a line for each line of `source`, or of standard input if None.

    The input must have the form of the run's corpus: tokenised and lower-cased for IWSLT14.
    """
    with as_options("translate", "beam"):
        check_beam(beam)
        trained = load_run(run, checkpoint)
        trained.translate([], beam=beam)  # refuses another task before it waits for input
        lines = input_lines(source)
        while chunk := list(islice(lines, CHUNK)):
            for translation in trained.translate(chunk, beam=beam):
                print(translation)
            sys.stdout.flush()
    return 0


def input_lines(source: Path | None) -> Iterator[str]:
    """Yield the lines of a file or of standard input, without their ends."""
    name = "standard input" if source is None else str(source)
    try:
        stream = sys.stdin.buffer if source is None else source.open("rb")
    except OSError as error:
        raise UserError(f"--input {source}: {error.strerror}") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{name}, line {number}: not valid UTF-8") from error


ARGUMENTS = ("texts", "tokens", "temperature", "top_k", "top_p", "prompt")


def generate_text(
    run: Path,
    prompt: str,
    *,
    texts: int,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    checkpoint: Path,
) -> int:
    """Print `prompt` with what the model of `run` writes after it, `texts` times."""
    drawn = {"texts": texts, "tokens": tokens, "temperature": temperature}
    with as_options("generate", *ARGUMENTS):
        sampling(**drawn, top_k=top_k, top_p=top_p)  # refuses a mistake before it loads the model
        trained = load_run(run, checkpoint)
        found = trained.generate(prompt, **drawn, top_k=top_k, top_p=top_p, seed=seed)
    for number, text in enumerate(found):
        if number:
            print("-" * 20)
        print(text)
    return 0
