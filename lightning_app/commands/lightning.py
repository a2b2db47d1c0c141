"""`ablate fit | validate | test | predict`: the commands of LightningCLI."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout

from lightning_app.commands.named_run import BEST, evaluation_words
from lightning_app.errors import UserError
from lightning_app.precheck import located, options_of, precheck


def lightning_command(
    command: str,
    words: Sequence[str],
    *,
    run: str | None,
    checkpoint: str | None,
    usage: str,
    again: bool = False,
) -> int:
    """Run a command of LightningCLI.

    Args:
        command: Its name.
        words: The arguments for LightningCLI.
        run: The value of ``--run``, in place of a config and a checkpoint; None without it.
        checkpoint: The value of ``--checkpoint``.
        usage: The help for the options that LightningCLI does not have.
        again: Whether `fit` trains a finished run again.

    Raises:
        UserError: for a mistake in the call, a config or a checkpoint.
    """
    if run is not None:
        words = evaluation_words(run, checkpoint or BEST, words)
    elif checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: needs --run RUN; beside --config: --ckpt_path")
    if "--help" in words or "-h" in words:
        print(usage)
    files = [value for name, value in options_of(words) if name == "config" and value is not None]
    precheck(files, words, command)
    from lightning_app.ablation.run import Run

    with ExitStack() as around:
        if command == "predict":
            # Its output has the predictions alone: Lightning's bars and tables go elsewhere.
            around.enter_context(redirect_stdout(sys.stderr))
        around.enter_context(located(files, words))
        if run is not None:
            around.enter_context(_as_typed())
        done = Run([command, *words], again=again)
    for line in done.predictions:
        print(line)
    return 0


@contextmanager
def _as_typed() -> Iterator[None]:
    """Name the option of ``--run`` in messages: --checkpoint is passed on as --ckpt_path."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--ckpt_path", "--checkpoint")) from error
