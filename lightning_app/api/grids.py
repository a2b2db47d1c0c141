"""Grids from Python: run the missing cells, read all results, compare the values of an axis."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.core.errors import UserError
from lightning_app.grids.find_results import Found, found_results
from lightning_app.plugins import given, load_given
from lightning_app.report.comparisons import compare_axis
from lightning_app.report.frames import runs_frame
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.locks import is_held

if TYPE_CHECKING:
    import pandas as pd

EXPERIMENTS = Path("experiments")
MISTAKE, INCOMPLETE = 2, 130  # exit codes of `ablate`


def results(grid: str | Path, *, experiments: str | Path = EXPERIMENTS) -> "pd.DataFrame":
    """Return a table with a row for every planned run of a grid, finished or not.

    ::

        from lightning_app import results

        frame = results("ablations/results/joint")
        frame.status.value_counts()
        frame[frame.status == "ok"].groupby("variant")["val/nll"].min()

    Columns: `id`, `name`, `status`, `variant`, `group`, `baseline`; each axis by its dotted key,
    and `warmup`, `lr`, `seed` also where no axis varies them; the metrics of finished runs (NaN
    where one is missing or was not finite); `outcome`; what the run took; `error` and `folder`.

    `status` is `ok`, `diverged` (stalled or non-finite: see `outcome`), `pruned`, `failed`,
    `running`, `unfinished` (cut short), `waiting`, `damaged`, or `other_data` (finished on other
    data than the rest; its metrics are left out).

    Args:
        grid: The name of a grid, its file, its folder, or the folder of a published study, whose
            runs have no folder.
        experiments: The folder that holds the folders of grids.

    Raises:
        UserError: if there are no results, or they cannot be read.
    """
    with found_results(grid, Path(experiments)) as found:
        return frame_of(found)


def frame_of(found: Found) -> "pd.DataFrame":
    """Return the table of `results`."""
    return runs_frame(
        found.grid, lambda folder: is_held(RunFolder(folder).lock), restored=found.restored
    )


def compare(
    grid: str | Path,
    *,
    axis: str,
    baseline: Any,
    metric: str | None = None,
    mode: str | None = None,
    experiments: str | Path = EXPERIMENTS,
) -> "pd.DataFrame":
    """Compare a metric at each value of an axis with that at a baseline, seed by seed.

    ::

        from lightning_app import compare

        compare(
            "ablations/results/joint",
            axis="model.schedule.warmup_steps",
            baseline=0,
            metric="val/accuracy",
            mode="max",
        )

    A row for each other value of the axis and each combination of the remaining axes (`where`):
    `estimate` is the mean over seeds of the metric less that of the baseline, `low` and `high` its
    95 % interval by Student's t, `p` and `p_holm` its p value, the latter corrected by Holm over
    the rows of this table alone, `reading` what may be said, `note` what is missing, and `seed N`
    the difference of each seed. `lightning_app.report.comparisons` defines them. Seeds at which a
    run did not finish, or has no finite metric, are left out and counted in `seeds` and `note`.

    Args:
        grid: As for `results`.
        axis: The dotted key of an axis of the grid.
        baseline: One of its values.
        metric: A metric that the runs report; None for that of the grid, or the own score of each
            task where the report judges runs by it.
        mode: Whether `min` or `max` of it is best; None for what is known of the metric.
        experiments: The folder that holds the folders of grids.

    Raises:
        UserError: for an unknown axis, value or metric, and for a grid whose pruner
            ended cells.
    """
    with found_results(grid, Path(experiments)) as found:
        return compare_axis(found.grid, axis, baseline, metric=metric, mode=mode)


def run_grid(
    grid: str | Path,
    *,
    workers: int | None = None,
    experiments: str | Path = EXPERIMENTS,
    devices_per_cell: int | None = None,
    slots_per_device: int | None = None,
    storage: str | None = None,
    max_time: str | None = None,
    retry_failed: bool = False,
    rerun_stale: bool = False,
) -> "pd.DataFrame":
    """Run the missing cells of a grid, write its report, and return `results` of it.

    ::

        from lightning_app import run_grid

        frame = run_grid("demo", workers=2)

    It starts `ablate run` as a process of its own and shows what that prints, so that it is safe in
    a notebook and in a script: no process that holds torch is forked, and the script is not
    imported again. Plug-ins that this process has loaded are loaded there too. Cells that fail are
    rows with the status `failed`. An interrupt stops the cells as Ctrl-C stops the command, and the
    same call continues.

    Args:
        grid: A grid file, or the name of a shipped ablation.
        workers: The number of cells that run at once; None: as many as fit.
        experiments: The folder that holds the folders of grids.
        devices_per_cell: The number of devices of each cell.
        slots_per_device: The number of cells that share a GPU.
        storage: The queue, as of `ablate run --storage`.
        max_time: HH:MM[:SS] after which running cells are stopped and queued again.
        retry_failed: Whether to run cells again that crashed before.
        rerun_stale: Whether to run cells again of other code, data or libraries.

    Raises:
        UserError: for a mistake in the grid or in an option, and for a plug-in that has changed
            since this process has loaded it.
        KeyboardInterrupt: if an interrupt ended it. After the time limit, or the loss of the
            storage, the missing cells are rows with their state.
    """
    plugins = given()
    load_given(plugins)  # the process reads their files again
    words = [word for each in plugins for word in ("--plugin", each.source)]
    words += ["run", str(grid), "--experiments", str(experiments)]
    options = {
        "--workers": workers,
        "--devices-per-cell": devices_per_cell,
        "--slots-per-device": slots_per_device,
        "--max-time": max_time,
    }
    words += [f"{name}={value}" for name, value in options.items() if value is not None]
    flags = {"--retry-failed": retry_failed, "--rerun-stale": rerun_stale}
    words += [name for name, given in flags.items() if given]
    # A URL may hold a password, which the list of processes would show.
    environment = {} if storage is None else {"ABLATE_STORAGE": storage}
    code, last = _ablate(words, environment)
    if code == MISTAKE:
        raise UserError(last.removeprefix("ablate: ") or "ablate run: refused without a message")
    if code not in (0, 1, INCOMPLETE):
        raise RuntimeError(f"ablate run {grid}: ended with code {code}: {last}")
    return results(grid, experiments=experiments)


def _ablate(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run `ablate` to its end and show what it prints; return its exit code and its last line."""
    process: subprocess.Popen[str] | None = None
    early = stopped = False

    def interrupt(*_: Any) -> None:
        """Pass on each interrupt once, also one that comes while the process starts."""
        nonlocal early, stopped
        stopped = True
        if process is None:
            early = True
        else:
            process.send_signal(signal.SIGINT)  # it stops its cells and keeps what is done

    last = ""
    with _handled(interrupt):
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_app", *words],
            env={**os.environ, **_same_modules(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # an interrupt reaches it once, from here
        )
        if early:
            process.send_signal(signal.SIGINT)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                print(line, end="", flush=True)
            code = process.wait()
        finally:
            with process:  # waits for its end
                if process.poll() is None:
                    process.terminate()
    if stopped:
        raise KeyboardInterrupt("finished cells are kept; the same call continues")
    return code, last


@contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    """Let `handler` receive interrupts, which reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _same_modules() -> dict[str, str]:
    """The environment in which a new process finds the modules that this one finds."""
    folders = [folder or os.getcwd() for folder in sys.path]
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
