"""`ablate translate` and `ablate generate`: text from a trained run."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_app.commands.options import RUN, Parser, add_checkpoint, add_threads, as_options
from lightning_app.commands.recorded import check_saved
from lightning_app.core.errors import UserError

CHUNK = 512  # lines read before the first output


def add_translate(parser: Parser) -> None:
    parser.add("--run RUN", RUN, required=True)
    parser.add("--input FILE", "the lines to translate (default: standard input)")
    parser.add("--beam N", "beams (default: from the run's config)")
    add_checkpoint(parser)
    add_threads(parser)
    parser.set_defaults(call=translate_lines)


def translate_lines(run: str, input: Path | None, beam: int | None, checkpoint: str) -> int:
    """Print one translation per line of `input`, or of standard input if None.

    The input must have the form of the run's corpus: tokenised and lower-cased for IWSLT14.
    """
    folder, file = check_saved("translate", run, checkpoint)  # before imports that take seconds
    from lightning_app.api.trained import check_beam, load_run

    with as_options("translate", "beam"):
        check_beam(beam)
        trained = load_run(folder.path, file)
        trained.translate([], beam=beam)  # refuse another task before waiting for input
        lines = input_lines(input)
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


def add_generate(parser: Parser) -> None:
    parser.add("--run RUN", RUN, required=True)
    parser.add("--prompt TEXT", "the text to continue (default: none)", default="")
    parser.add("--tokens N", "tokens to draw (default: 200)", default=200)
    parser.add("--texts N", "texts to draw (default: 1)", default=1)
    parser.add("--temperature X", "0: greedy (default: 1)", default=1.0)
    parser.add("--top-k N", "draw only the N likeliest tokens", default=0)
    parser.add("--top-p P", "draw only the likeliest tokens with total probability P", default=1.0)
    parser.add("--seed N", "seed of the draws (default: 1)", default=1)
    add_checkpoint(parser)
    add_threads(parser)
    parser.set_defaults(call=generate_text)


def generate_text(run: str, prompt: str, texts: int, seed: int, checkpoint: str, **how: Any) -> int:
    """Print `prompt` with its continuation by the model of `run`, `texts` times.

    `how` are the other arguments of `TrainedRun.generate`.
    """
    folder, file = check_saved("generate", run, checkpoint)
    from lightning_app.api.trained import load_run, sampling

    with as_options("generate", "texts", "prompt", *how):
        sampling(texts=texts, **how)  # refuse mistakes before loading the model
        drawn = load_run(folder.path, file).generate(prompt, texts=texts, seed=seed, **how)
    for number, text in enumerate(drawn):
        if number:
            print("-" * 20)
        print(text)
    return 0
