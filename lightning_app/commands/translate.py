"""Translate lines of text with the checkpoint of a run."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from lightning_app.commands.as_options import as_options
from lightning_app.errors import UserError
from lightning_app.trained.run import load_run
from lightning_app.trained.translating import check_beam

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
