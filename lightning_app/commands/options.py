"""The options of the longer commands. Fast to import, for `ablate --help`."""

import argparse
from pathlib import Path

GRID = "a YAML file, or the name of a shipped ablation"
RUN = "the folder of a run, or GRID/NAME for experiments/GRID/runs/NAME"
SHELLS = ("bash", "zsh", "fish")


def add_evaluated(command: argparse.ArgumentParser) -> None:
    """Add the run that is evaluated; LightningCLI's options remain possible without it."""
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
