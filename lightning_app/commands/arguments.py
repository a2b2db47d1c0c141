"""The arguments of every command.

The options of the longer commands. Fast to import, for `ablate --help`.

The arguments of the command `ablate`: its parser, and how they are parsed. Fast to import.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_app.commands import calls
from lightning_app.commands.words import Parser
from lightning_app.config.tree import SECTIONS
from lightning_app.core.errors import UserError, nearest
from lightning_app.version import __version__

GRID = "a YAML file, or the name of a shipped ablation"
RUN = "the folder of a run, or GRID/NAME for experiments/GRID/runs/NAME"
SHELLS = ("bash", "zsh", "fish")


def add_evaluated(command: argparse.ArgumentParser) -> None:
    """Add the run that is evaluated; the fields of a config remain possible without it."""
    what = f"{RUN}; only flags of evaluation may follow"
    command.add_argument("--run", metavar="RUN", help=what)
    add_checkpoint(command, None, "best with --run")


def add_checkpoint(
    command: argparse.ArgumentParser, default: str | None = "best", said: str = "best"
) -> None:
    command.add_argument(
        "--checkpoint",
        default=default,
        metavar="best|last|FILE",
        help=f"a checkpoint of the run, or a file (default: {said})",
    )


def add_threads(command: argparse.ArgumentParser, of: str = "of torch") -> None:
    command.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help=f"threads {of}, as OMP_NUM_THREADS sets them (default: that, or all cores)",
    )


def add_translate(command: argparse.ArgumentParser) -> None:
    """Add the options of `ablate translate`."""
    add = command.add_argument
    add("--run", required=True, metavar="RUN", help=RUN)
    add("--input", type=Path, metavar="FILE", help="its lines (default: those of standard input)")
    add("--beam", type=int, metavar="N", help="beams (default: as the run's config says)")
    add_checkpoint(command)
    add_threads(command)


def add_completion(command: argparse.ArgumentParser) -> None:
    """Add the shell of `ablate completion`."""
    command.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def add_generate(command: argparse.ArgumentParser) -> None:
    """Add the options of `ablate generate`."""
    add = command.add_argument
    add("--run", required=True, metavar="RUN", help=RUN)
    add("--prompt", default="", metavar="TEXT", help="the text to continue (default: none)")
    add("--tokens", type=int, default=200, metavar="N", help="tokens to draw (default: 200)")
    add("--texts", type=int, default=1, metavar="N", help="texts to draw (default: 1)")
    add("--temperature", type=float, default=1.0, metavar="X", help="0: greedy (default: 1)")
    add("--top-k", type=int, default=0, metavar="N", help="draw only the N likeliest tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw only the likeliest P of them")
    add("--seed", type=int, default=1, metavar="N", help="seed of the draws (default: 1)")
    add_checkpoint(command)
    add_threads(command)


def add_grid(command: argparse.ArgumentParser) -> None:
    """Add the grid, and the place of its folder."""
    command.add_argument("grid", metavar="GRID", help=GRID)
    add_experiments(command)


def add_experiments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--experiments",
        type=Path,
        default=Path("experiments"),
        metavar="DIR",
        help="the folder that holds the grid's folder (default: experiments)",
    )


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json",
        action="store_true",
        help="one JSON document on standard output, the rest on standard error",
    )


def add_report(command: argparse.ArgumentParser) -> None:
    """Add the grids of a report, its folder, and its server."""
    what = f"{GRID}, or the folder of a published study; several are compared"
    command.add_argument("grids", metavar="GRID", nargs="+", help=what)
    add_experiments(command)
    add = command.add_argument
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="the report's folder (default: the grid's; of several, A-vs-B beside it)",
    )
    add(
        "--publish",
        type=Path,
        metavar="DIR",
        help="also write the study into DIR: its results as one file, scores and headline figure",
    )
    add(
        "--serve",
        action="store_true",
        help="then serve it together with TensorBoard, to this machine only",
    )
    add("--port", type=int, metavar="N", help="of --serve (default: 6006; 0: any free one)")
    add_json(command)


def add_results(command: argparse.ArgumentParser) -> None:
    """Add the grid whose runs are shown, and what is shown of them."""
    command.add_argument(
        "grid", metavar="GRID", help=f"{GRID}, the folder of a grid, or of a published study"
    )
    add_experiments(command)
    add = command.add_argument
    add("--query", metavar="CONDITION", help="only these runs, such as \"variant == 'sas'\"")
    add("--compare", metavar="AXIS=BASELINE", help="instead compare the values of an axis")
    add("--metric", metavar="NAME", help="of --compare (default: the grid's)")
    add("--mode", choices=["min", "max"], help="which is best (default: known of the metric)")
    add("--csv", action="store_true", help="print all columns as CSV")


def add_storage(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--storage",
        metavar="URL",
        help="the queue: the path of a journal, or the URL of a database, as Optuna takes it, such "
        "as postgresql://user@host/db (default: ABLATE_STORAGE, else a journal in the grid's "
        "folder)",
    )


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the options of one supervisor."""
    add = command.add_argument
    add("--workers", type=int, metavar="N", help="cells at once (default: as many as fit)")
    add(
        "--devices-per-cell",
        type=int,
        metavar="N",
        help="devices, and so processes, for each cell (default: trainer.devices)",
    )
    add("--slots-per-device", type=int, metavar="N", help="cells that share a GPU (default: 1)")
    add_storage(command)
    add(
        "--lost-after",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="seconds without heartbeat until a supervisor's cells are taken over (default: 120)",
    )
    add(
        "--hang-limit",
        default="00:30",
        metavar="HH:MM[:SS]",
        help="kill a cell without progress for this time (default: 00:30)",
    )
    add(
        "--max-time",
        metavar="HH:MM[:SS]",
        help="stop and queue the running cells again after this time",
    )
    add("--retry-failed", action="store_true", help="also run cells that crashed before")
    add(
        "--no-wait",
        dest="wait",
        action="store_false",
        help="do not wait for cells of other supervisors, except to find lost ones",
    )


def add_submit(command: argparse.ArgumentParser) -> None:
    """Add the options of the array, and those of `ablate run` for each supervisor."""
    command.epilog = "Words after -- go to sbatch: ablate submit GRID -- -p gpu -t 12:00:00"
    add = command.add_argument
    add(
        "--array",
        type=int,
        default=1,
        metavar="N",
        help="supervisors, one for each job (default: 1)",
    )
    add("--concurrent", type=int, metavar="M", help="at most M of them at once")
    add(
        "--no-requeue",
        dest="requeue",
        action="store_false",
        help="do not queue an interrupted job again",
    )
    add("--dry-run", action="store_true", help="print the script; write and submit nothing")
    add_run(command)


def add_bench(command: argparse.ArgumentParser) -> None:
    """Add the measurements of `ablate bench`, their sizes and device, and the output files."""
    add = command.add_argument
    add(
        "--presets",
        nargs="*",
        metavar="NAME",
        help="compare these or all presets with pre_ln: a training step, then forward and backward",
    )
    add("--attention", action="store_true", help="compare the forms of attention without a model")
    add("--peers", action="store_true", help="compare with the same models of other libraries")
    add(
        "--growth",
        action="store_true",
        help="also measure growth with length, depth and width, as a figure",
    )
    add(
        "--explain",
        action="store_true",
        help="only show which form of attention is chosen, and why",
    )
    add("--quick", action="store_true", help="tiny sizes: takes seconds, to check that it works")
    add("--rounds", type=int, metavar="N", help="interleaved rounds (default: 5)")
    add("--threads", type=int, default=1, metavar="N", help="torch threads (default: 1)")
    add(
        "--device",
        choices=["cpu", "cuda"],
        help="where to measure (default: a GPU if there is one)",
    )
    add("--precision", choices=["32", "bf16"], default="32", help="bf16: autocast (default: 32)")
    add("--length", type=int, metavar="N", help="tokens of a row (default: 128)")
    add("--tokens", type=int, metavar="N", help="tokens of a batch (default: 1024, GPU: 4096)")
    add("--depth", type=int, metavar="N", help="blocks of a stack (default: 6)")
    add("--width", type=int, metavar="N", help="size of the stream (default: 256, GPU: 512)")
    add(
        "--resident",
        action="store_true",
        help="also the peak memory of a separate process for each",
    )
    add("--json", type=Path, metavar="FILE", help="write the numbers")
    add(
        "--figure",
        type=Path,
        default=Path("bench-growth.svg"),
        metavar="FILE",
        help="file for the figure of --growth (default: bench-growth.svg)",
    )


LIGHTNING = {
    "fit": "train one run: --config FILE, then overrides; every Trainer flag by Lightning's name",
    "validate": "evaluate a run's checkpoint on the validation split",
    "test": "evaluate a run's checkpoint on the test split, with BLEU for translation",
    "predict": "print the predictions of a run's checkpoint on the test split",
}

OTHER_NAMES = {
    **dict.fromkeys(("train", "continue", "resume"), "fit"),
    **dict.fromkeys(("evaluate", "eval", "score"), "validate"),
    **dict.fromkeys(("decode", "infer"), "predict"),
    **dict.fromkeys(("sample", "complete"), "generate"),
    **dict.fromkeys(("info", "describe", "inspect"), "show"),
    **dict.fromkeys(("compare", "difference"), "diff"),
    **dict.fromkeys(("presets", "variants", "list"), "blocks"),
}
"""Words that other programs have for a command, for the hint after an unknown one."""

WITHOUT_PARTS = ("init", "completion")
"""Commands that load no plug-in but those of `--plugin`: a shell starts with a completion, in any
folder, and a project may be begun in one whose plug-in is broken."""


def completion(args: argparse.Namespace) -> int:
    from lightning_app.commands.completion import completion_script

    print(completion_script(build_parser(), args.shell, LIGHTNING))
    return 0


def build_parser() -> Parser:
    """Return the parser of `ablate`, commands in the order of the documentation."""
    parser = Parser(
        prog="ablate",
        description="Which wiring of a Transformer block needs learning-rate warm-up?",
        epilog="exit codes: 0 done, 1 a run failed, 2 a mistake in the call, 130 interrupted",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE",
        help="load parts of your own first: a file NAME.py, or a module; may be repeated",
    )
    parser.add_argument("--version", action="version", version=f"ablate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(
        name: str, call: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(call=call, parser=command, uses_parts=name not in WITHOUT_PARTS)
        return command

    command = add(
        "blocks", calls.blocks, "table of the presets; with NAME its drawing and specification"
    )
    command.add_argument("name", metavar="NAME", nargs="?", help="a preset")
    command.add_argument("--encoder-depth", type=int, default=6, help="0: decoder alone")
    command.add_argument("--decoder-depth", type=int, default=6, help="0: encoder alone")
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="instead of NAME the stacks of a run's config; overrides may follow, as for fit",
    )
    command.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing of NAME")
    command.add_argument(
        "--svg-dir",
        type=Path,
        metavar="DIR",
        help="write the drawings of all presets, and a page with them",
    )
    command.add_argument("--json", action="store_true", help="the specification of NAME as JSON")

    for name, text in LIGHTNING.items():
        # All other words are fields of a config, and --help says which.
        command = commands.add_parser(
            name, help=text, description=text, add_help=False, allow_abbrev=False
        )
        command.set_defaults(call=calls.lightning, parser=command, uses_parts=True)
        if name == "fit":
            again = "train a finished run again, and replace its result"
            command.add_argument("--again", action="store_true", help=again)
        else:
            add_evaluated(command)
        add_threads(command)

    add_translate(add("translate", calls.translate, "translate lines of text with a trained run"))
    add_generate(add("generate", calls.generate, "continue a text with a trained run"))

    command = add(
        "init", calls.init, "write a small project: a plug-in, its test, a config and a grid"
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or one of yours")
    command.add_argument(
        "--data",
        type=Path,
        nargs=2,
        metavar="FILE",
        help="two text files, such as my.de my.en, line by line in translation",
    )
    command = add("show", calls.show, "what a run is, how it ended and what made it")
    command.add_argument("run", metavar="RUN", help=RUN)
    add_json(command)
    command = add("diff", calls.diff, "how two runs differ: config, what made them, metrics")
    command.add_argument("run", metavar="RUN", help=RUN)
    command.add_argument("other", metavar="RUN", help="the run to compare it with")
    add_json(command)

    command = add("prepare", calls.prepare, "fetch or read, check, tokenise and cache a corpus")
    command.add_argument(
        "--data",
        metavar="NAME",
        help="iwslt14, wikitext2, tinyshakespeare, books, text or synthetic",
    )
    command.add_argument("--root", metavar="DIR", help="the folder that holds the corpus")
    command.add_argument("--config", type=Path, metavar="FILE", help="take `data` from this config")

    command = add(
        "plan", calls.plan, "the cells of a grid, how many are done, and the cost of the rest"
    )
    add_grid(command)
    command.add_argument(
        "--probe", action="store_true", help="measure 20 steps of each distinct shape"
    )
    add_json(command)
    command = add("run", calls.run, "run the missing cells of a grid; resumes by itself")
    add_grid(command)
    add_run(command)
    add_threads(command, "of each process that trains a cell")
    command.add_argument(
        "--rerun-stale",
        action="store_true",
        help="rerun cells of other code, data or library versions; the old runs are kept",
    )
    add_json(command)
    command = add("status", calls.status, "counts by state, running cells, time left, failures")
    add_grid(command)
    add_json(command)
    command = add(
        "report", calls.report, "tables, figures and report.html of a grid, or of several"
    )
    add_report(command)
    add_results(add("results", calls.results, "the runs of a grid as a table; any axis compared"))
    command = add("submit", calls.submit, "run a grid on a SLURM cluster: an array of supervisors")
    add_grid(command)
    add_submit(command)
    command = add("doctor", calls.doctor, "find damage in the folders of a grid; --fix repairs it")
    add_grid(command)
    add_storage(command)
    command.add_argument("--fix", action="store_true", help="repair what can be repaired safely")
    command.add_argument(
        "--seal", action="store_true", help="seal sound results of earlier versions, without a seal"
    )

    command = add("probe", calls.probe, "signals and gradients of a block, as numbers and figures")
    command.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="a run's config; several give one curve each; overrides may follow, as for fit",
    )
    command.add_argument(
        "--run", action="append", metavar="RUN", help=f"instead of --config: {RUN}"
    )
    add_checkpoint(command, None, "best with --run; with --config at initialisation")
    add_threads(command)
    command.add_argument("--batches", type=int, metavar="N", help="validation batches (default: 4)")
    command.add_argument(
        "--sharpness",
        action="store_true",
        help="also the top eigenvalue of the Hessian preconditioned by Adam",
    )
    command.add_argument(
        "--theory",
        action="store_true",
        help="instead test the lemmas and the theorem of Xiong et al.",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: a folder in experiments/probe)",
    )
    command = add(
        "bench", calls.bench, "speed and memory of presets, forms of attention and other libraries"
    )
    add_bench(command)
    command = add("schema", calls.schema, "the JSON Schema of configs or grid files, for an editor")
    command.add_argument("kind", choices=("config", "grid"), help="of which files")
    add_completion(add("completion", completion, "a script that completes words in a shell"))
    return parser


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `ablate`; fields of a config stay unparsed in `rest`."""
    parser = build_parser()
    grids = ["plan", "run", "status", "report", "results", "submit", "doctor"]
    runs = ["translate", "generate", "show", "diff"]
    others = ["init", "prepare", "probe", "bench", "schema", "completion"]
    known = ["blocks", *LIGHTNING, *runs, *grids, *others]
    named, arguments = plugins_of(arguments)
    first = arguments[0] if arguments else ""
    if first and not first.startswith("-") and first not in known:
        hint = nearest(first, [*known, *OTHER_NAMES])
        for other, name in OTHER_NAMES.items():
            hint = hint.replace(f"'{other}'", f"'{name}'")
        raise UserError(f"unknown command '{first}'{hint}")
    overrides: list[str] = []
    if first in ("probe", "blocks"):
        # A word that begins like a section of the config is an override, as for fit.
        overrides, arguments = overrides_of(arguments)
    elif first == "submit" and "--" in arguments:
        at = arguments.index("--")
        overrides, arguments = list(arguments[at + 1 :]), arguments[:at]
    args, unread = parser.parse_known_args(arguments)
    if first in LIGHTNING:
        overrides, unread = unread, []
    args.rest, args.plugin = overrides, named
    if unread and unread[0].partition("=")[0] == "--plugin":
        raise UserError(f"--plugin: belongs before the command: ablate --plugin FILE {first} ...")
    if unread:
        options = re.findall(r"--[a-z-]+", args.parser.format_help())
        hint = nearest(unread[0], options)
        if first == "submit":
            hint += " (options of sbatch belong after --: ablate submit GRID -- --partition gpu)"
        raise UserError(f"{first}: unknown argument '{unread[0]}'{hint}")
    return args


def plugins_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the options `--plugin` in front of a command from the rest of the arguments."""
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
    """Split arguments into overrides of a config with their values, and the rest."""
    overrides: list[str] = []
    rest: list[str] = []
    taken = rest
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0].partition(".")[0]
            taken = overrides if name.rstrip("+") in SECTIONS else rest
        taken.append(word)
    return overrides, rest
