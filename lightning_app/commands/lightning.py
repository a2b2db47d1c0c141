"""`ablate fit | validate | test | predict`: one run by Lightning's Trainer."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from lightning_app import strict_yaml
from lightning_app.commands.named_run import BEST, evaluation_words
from lightning_app.config.sources import CHECKPOINT, FIELDS_OF, Written
from lightning_app.errors import UserError
from lightning_app.launcher import check_launcher


def lightning_command(
    command: str,
    words: Sequence[str],
    *,
    run: str | None,
    checkpoint: str | None,
    usage: str,
    again: bool = False,
) -> int:
    """Run a command.

    Args:
        command: Its name.
        words: The options of a config, as `Written` reads them.
        run: The value of ``--run``, in place of a config and a checkpoint; None without it.
        checkpoint: The value of ``--checkpoint``.
        usage: The help for the other options.
        again: Whether `fit` trains a finished run again.

    Raises:
        UserError: for a mistake in the call, a config or a checkpoint.
    """
    if run is not None:
        words = evaluation_words(run, checkpoint or BEST, words)
    elif checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: needs --run RUN; beside --config: --ckpt_path")
    check_launcher(os.environ)
    written = Written(words, FIELDS_OF[command])
    if "help" in written.asked:
        from lightning_app.commands.config_help import config_help

        print(config_help(command, usage, written.asked["help"]))
        return 0
    if "print_config" not in written.asked:
        _check_checkpoint(command, written)
    # The config of a run from elsewhere names no code; that of --config is the user's own.
    tree = _loaded(command, written, imports=run is None)
    if "print_config" in written.asked:
        from lightning_app.config.config import without_links

        print(strict_yaml.dump_yaml(without_links(tree), allow_unicode=True), end="")
        return 0
    from lightning_app.ablation.run import Run

    with ExitStack() as around:
        if command == "predict":
            # Its output has the predictions alone: Lightning's bars and tables go elsewhere.
            around.enter_context(redirect_stdout(sys.stderr))
        around.enter_context(written.located())
        if run is not None:
            around.enter_context(_as_typed())
        done = Run(tree, command=command, ckpt_path=written.fields.get(CHECKPOINT), again=again)
        if command == "fit":
            done.fit()
        elif command == "predict":
            done.predict()
        else:
            done.evaluate(verbose=written.fields.get("verbose", True))
    for line in done.predictions:
        print(line)
    return 0


def _loaded(command: str, written: Written, *, imports: bool) -> dict[str, Any]:
    from lightning_app.config.config import load_config

    return load_config(written, imports=imports, trains=command == "fit")


def _check_checkpoint(command: str, written: Written) -> None:
    """Refuse a checkpoint that the call does not name or that does not exist, as the run would."""
    given = written.fields.get(CHECKPOINT)
    if command != "fit" and given is None:
        raise UserError(f"{command}: --ckpt_path is needed: a file, 'last' or 'best'")
    if given not in (None, "last", "best") and not Path(given).is_file():
        raise UserError(f"--ckpt_path {given}: there is no file {given}")


@contextmanager
def _as_typed() -> Iterator[None]:
    """Name the option of ``--run`` in messages: --checkpoint is passed on as --ckpt_path."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--ckpt_path", "--checkpoint")) from error
