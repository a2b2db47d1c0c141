"""The command `ablate`: parse, call, print. Slow imports wait until a command needs them."""

import codecs
import errno
import locale
import os
import sys
from collections.abc import Sequence

from lightning_app.commands.arguments import parse_arguments
from lightning_app.core.errors import UserError, printable_output
from lightning_app.plugins import load_all


def interrupted() -> int:
    """Print that the user ended the command, and return the exit code for it."""
    print("ablate: interrupted; the same command continues a grid, ", end="", file=sys.stderr)
    print("--ckpt_path last continues a fit", file=sys.stderr)
    return 130


def use_utf8() -> None:
    """Start this command again in Python's UTF-8 mode where the shell has another encoding.

    Texts and names of files are UTF-8, and libraries open files without saying so.
    """
    is_utf8 = codecs.lookup(locale.getencoding()).name == "utf-8"
    if is_utf8 or sys.flags.utf8_mode or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


_OF_LIGHTNING = ("fit", "validate", "test")
"""Commands whose progress bars write escape sequences."""
_OF_TEXT = ("predict", "translate", "generate", "completion")
"""Commands whose output is data."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ablate` and return its exit code."""
    if arguments is None:
        use_utf8()
    words = sys.argv[1:] if arguments is None else arguments
    if any(command in words for command in _OF_LIGHTNING):
        return _main(words)
    with printable_output(only_terminals=any(command in words for command in _OF_TEXT)):
        return _main(words)


def _main(words: Sequence[str]) -> int:
    try:
        args = parse_arguments(words)
        if args.plugin or args.uses_parts:
            load_all(args.plugin)
        if getattr(args, "threads", None) is not None and args.command != "bench":
            from lightning_app.commands.words import use_threads

            use_threads(args.threads)
        return args.call(args)
    except UserError as mistake:
        print(f"ablate: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return interrupted()
    except SystemExit as ending:
        # Lightning ends with code 1 on Ctrl-C and with code 0 on SIGTERM.
        if isinstance(ending.__context__, KeyboardInterrupt) or ending.code is None:
            return interrupted()
        raise
    except BrokenPipeError:
        # The reader of the pipe has ended; nothing more can be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = f" for {error.filename}" if error.filename else ""
            print(f"ablate: no space left on the disk{where}", file=sys.stderr)
            return 1
        raise
