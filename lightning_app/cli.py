"""The command `ablate`: the table of commands, and the dispatch from a call's words to its work.

A call imports only the module of its command; slow imports wait until the work begins.
"""

import argparse
import codecs
import errno
import locale
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from lightning_app.commands.options import Parser, use_threads
from lightning_app.config.tree import SECTIONS
from lightning_app.core.errors import UserError, nearest, printable_output
from lightning_app.plugins import load_all
from lightning_app.version import __version__


class Command(NamedTuple):
    """A command.

    Attributes:
        adds: A function in `commands`. It adds the arguments and sets the default of `call`, the
            function that does the work: it takes them by name and returns the exit code.
        help: A one-line description.
        takes: The parameter of `call` for words that argparse does not parse: `words`, everything
            it does not know; or `overrides`, words that begin like a config section.
        uses_parts: Whether it loads the project's plug-ins and not only those of `--plugin`.
    """

    adds: str
    help: str
    takes: str = ""
    uses_parts: bool = True


COMMANDS = {
    "blocks": Command(
        "run.add_blocks",
        "table of the presets; with NAME its drawing and specification",
        "overrides",
    ),
    "fit": Command(
        "run.add_fit",
        "train one run: --config FILE, then overrides; every Trainer flag by Lightning's name",
        "words",
    ),
    "validate": Command(
        "run.add_evaluation", "evaluate a run's checkpoint on the validation split", "words"
    ),
    "test": Command(
        "run.add_evaluation",
        "evaluate a run's checkpoint on the test split, with BLEU for translation",
        "words",
    ),
    "predict": Command(
        "run.add_evaluation",
        "print the predictions of a run's checkpoint on the test split",
        "words",
    ),
    "translate": Command("run.add_translate", "translate lines of text with a trained run"),
    "generate": Command("run.add_generate", "continue a text with a trained run"),
    # A project may be started in a folder whose plug-in is broken.
    "init": Command(
        "init.add_init",
        "write a small project: a plug-in, its test, a config and a grid",
        uses_parts=False,
    ),
    "show": Command("run.add_show", "what a run is, how it ended and what made it"),
    "diff": Command("run.add_diff", "how two runs differ: config, what made them, metrics"),
    "prepare": Command("run.add_prepare", "fetch or read, check, tokenise and cache a corpus"),
    "plan": Command(
        "grid.add_plan", "the cells of a grid, how many are done, and the cost of the rest"
    ),
    "ask": Command("ask.add_ask", "does a block need warm-up? writes a grid and runs it"),
    "run": Command("grid.add_run", "run the missing cells of a grid; resumes by itself"),
    "status": Command("grid.add_status", "counts by state, running cells, time left, failures"),
    "report": Command("grid.add_report", "tables, figures and report.html of a grid"),
    "results": Command("grid.add_results", "the runs of a grid as a table; any axis compared"),
    "probe": Command(
        "run.add_probe", "signals and gradients of a block, as numbers and figures", "overrides"
    ),
    "schema": Command("run.add_schema", "the JSON Schema of configs or grid files, for an editor"),
}
"""The commands in the order of the documentation."""

ONE_GRID = (
    "report: takes one grid; a third grid over both shows them together, and nothing trains again: "
    "equal experiments have equal ids"
)

OTHER_NAMES = {
    **dict.fromkeys(("train", "continue", "resume"), "fit"),
    **dict.fromkeys(("evaluate", "eval", "score"), "validate"),
    **dict.fromkeys(("decode", "infer"), "predict"),
    **dict.fromkeys(("sample", "complete"), "generate"),
    **dict.fromkeys(("info", "describe", "inspect"), "show"),
    **dict.fromkeys(("compare", "difference"), "diff"),
    **dict.fromkeys(("presets", "variants", "list"), "blocks"),
}
"""Other programs' names for a command, for the hint after an unknown command."""

GONE = {
    "run --lost-after": "a lost supervisor's cells are free as soon as its process has ended",
    "bench": "run python benchmarks/bench.py in the repository",
    "probe --theory": "run python benchmarks/theory/run.py in the repository",
    "completion": "use ablate --print-completion SHELL",
    "doctor": "ablate run moves damaged runs aside, and ablate status lists them",
    "submit": "edit docs/recipes/slurm_array.sh and give it to sbatch",
}
"""Former commands, and options after their command: what takes their place."""

_OF_LIGHTNING = ("fit", "validate", "test")
"""Commands whose progress bars write escape sequences."""
COMPLETION = "--print-completion"
_OF_TEXT = ("predict", "translate", "generate", COMPLETION)
"""Commands whose output is data."""
_OF_WORK = ("run", "ask", "fit")
"""Commands that do more than they print."""


class _PrintCompletion(argparse.Action):
    """`shtab`'s argument of this name; shtab is imported only for it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        import shtab

        for _, action in parser.all_arguments():
            if action.metavar in ("FILE", "GRID"):
                action.complete = shtab.FILE
            elif action.metavar in ("DIR", "RUN"):
                action.complete = shtab.DIRECTORY
        try:
            print(shtab.complete(parser, values))
        except NotImplementedError:
            raise UserError(f"--print-completion: no shell '{values}'") from None
        parser.exit()


def build_parser(whole: Iterable[str] = tuple(COMMANDS)) -> Parser:
    """Return the parser of `ablate`; only the commands in `whole` get their arguments."""
    parser = Parser(
        prog="ablate",
        description="Which wiring of a Transformer block needs learning-rate warm-up?",
        epilog="exit codes: 0 done, 1 a run failed, 2 a mistake in the call, 130 interrupted",
        allow_abbrev=False,
    )
    text = "load parts of your own first: a file NAME.py, or a module; may be repeated"
    parser.add("--plugin FILE", text, action="append")  # `plugins_of` reads them
    parser.add_argument("--version", action="version", version=f"ablate {__version__}")
    text = "print a script that completes words in bash, zsh or fish"
    parser.add(f"{COMPLETION} SHELL", text, action=_PrintCompletion, default=argparse.SUPPRESS)
    group = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parser.commands = group.choices
    for name, (adds, text, takes, _) in COMMANDS.items():
        command = group.add_parser(
            name,
            help=text,
            description=text,
            add_help=takes != "words",  # --help may name a section of the config
            allow_abbrev=False,
        )
        if name in whole:
            module, _, function = adds.rpartition(".")
            getattr(import_module(f"lightning_app.commands.{module}"), function)(command)
    return parser


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `ablate`; the rest has the name that its command `takes`."""
    plugins, words = plugins_of(words)
    name = words[0] if words else ""
    options = ("--help", "--version", "--plugin", COMPLETION)
    if name.startswith("-") and name not in ("-h", *options):
        raise UserError(f"unknown argument '{name}'{nearest(name, options)}")
    if name in GONE:
        raise UserError(f"{name}: no longer a command; {GONE[name]}")
    if name and not name.startswith("-") and name not in COMMANDS:
        hint = nearest(name, [*COMMANDS, *OTHER_NAMES])
        for other, ours in OTHER_NAMES.items():
            hint = hint.replace(f"'{other}'", f"'{ours}'")
        raise UserError(f"unknown command '{name}'{hint}")
    takes = COMMANDS[name].takes if name in COMMANDS else ""
    parser = build_parser() if name == COMPLETION else build_parser([name])
    rest: list[str] = []
    if takes == "overrides":
        rest, words = overrides_of(words)
    args, unread = parser.parse_known_args(words)
    if takes == "words":
        rest, unread = unread, []
    args.plugin = plugins
    if unread and unread[0].partition("=")[0] == "--plugin":
        raise UserError(f"--plugin: belongs before the command: ablate --plugin FILE {name} ...")
    if unread:
        former = GONE.get(f"{name} {unread[0].partition('=')[0]}")
        if former:
            raise UserError(f"{name}: no longer has {unread[0]}; {former}")
        options = re.findall(r"--[a-z-]+", parser.commands[name].format_help())
        hint = nearest(unread[0], options)
        if name == "report" and not unread[0].startswith("-"):
            raise UserError(ONE_GRID)
        raise UserError(f"{name}: unknown argument '{unread[0]}'{hint}")
    if takes:
        setattr(args, takes, rest)
    return args


def plugins_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the `--plugin` options before a command from the other arguments."""
    named, rest = [], list(words)
    while rest and rest[0].partition("=")[0] == "--plugin":
        _, equals, value = rest.pop(0).partition("=")
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value:
            raise UserError("--plugin: expected a file NAME.py or a module, found nothing")
        named.append(value)
    return named, rest


def overrides_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into overrides of a config, with their values, and the rest.

    A word that begins like a section of the config is an override, as for `ablate fit`.
    """
    overrides: list[str] = []
    rest: list[str] = []
    taken = rest
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0].partition(".")[0]
            taken = overrides if name.rstrip("+") in SECTIONS else rest
        taken.append(word)
    return overrides, rest


def interrupted() -> int:
    """Print that the user interrupted the command, and return the exit code."""
    print("ablate: interrupted; the same command continues", file=sys.stderr)
    return 130


def nobody_reads(words: Sequence[str]) -> int:
    """Return the exit code of a command whose output nobody reads any more."""
    # Nothing more can be written to it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return interrupted() if _command(words) in _OF_WORK else 0


def _command(words: Sequence[str]) -> str | None:
    """The first one, since a grid may be called `run`."""
    return next((word for word in words if word in (*COMMANDS, COMPLETION)), None)


def use_utf8() -> None:
    """Restart this command in Python's UTF-8 mode if the shell uses another encoding.

    Texts and names of files are UTF-8, but libraries open files without naming an encoding.
    """
    is_utf8 = codecs.lookup(locale.getencoding()).name == "utf-8"
    if is_utf8 or sys.flags.utf8_mode or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ablate` and return its exit code."""
    if arguments is None:
        use_utf8()
    words = sys.argv[1:] if arguments is None else arguments
    if (command := _command(words)) in _OF_LIGHTNING:
        return _main(words)
    with printable_output(only_terminals=command in _OF_TEXT):
        return _main(words)


def _main(words: Sequence[str]) -> int:
    try:
        values = vars(parse_arguments(words))
        command, plugins, call = (values.pop(key) for key in ("command", "plugin", "call"))
        if plugins or COMMANDS[command].uses_parts:
            load_all(plugins)
        use_threads(values.pop("threads", None))
        return call(**values)
    except UserError as mistake:
        print(f"ablate: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return interrupted()
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # rich ends so
            return nobody_reads(words)
        # Lightning ends with code 1 on Ctrl-C and with code 0 on SIGTERM.
        if isinstance(ending.__context__, KeyboardInterrupt) or ending.code is None:
            return interrupted()
        raise
    except BrokenPipeError:
        return nobody_reads(words)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = f" for {error.filename}" if error.filename else ""
            print(f"ablate: no space left on the disk{where}", file=sys.stderr)
            return 1
        raise
