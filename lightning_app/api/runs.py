"""Runs and grids from Python: train one run, run a grid, read its results and compare them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.config.sources import (
    CHECKPOINT,
    FIELDS_OF,
    Written,
    nested,
    read_tree,
    without_derived,
)
from lightning_app.config.tree import SECTIONS, SEED, replaced
from lightning_app.core.errors import UserError, named
from lightning_app.plugins import load, loaded
from lightning_app.report.comparisons import compare_axis
from lightning_app.report.frames import runs_frame
from lightning_app.report.packed import Found, found_results
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.locks import is_held
from lightning_app.runs.run import Run
from lightning_app.training.launcher import LAUNCH, check_launcher, run_written

if TYPE_CHECKING:
    import pandas as pd

    from lightning_app.api.trained import TrainedRun

EXPERIMENTS = Path("experiments")
MISTAKE, INCOMPLETE = 2, 130  # exit codes of `ablate`


class RunResult:
    """The result of a finished run, read once from its folder.

    Attributes:
        folder: The folder of the run, as `ablate fit` leaves it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"RunResult({str(self.folder)!r})"

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of `result.json`: times, device, data, provenance and the rest.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return Run(self.folder).finished

    @property
    def id(self) -> str:
        """The id of the experiment; equal ids mean equal experiments."""
        return self.record["id"]

    @property
    def status(self) -> str:
        """`ok`, `diverged` if the run stalled or its loss became non-finite, or `cut_short`."""
        return self.record["status"]

    @property
    def outcome(self) -> str:
        """`trained`, `not_yet_learned`, `stalled`, `non_finite` or `cut_short`."""
        return self.record["outcome"]

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics at the end of the run by name, None where one was not finite."""
        return dict(self.record["metrics"])

    def load(self, checkpoint: str | Path = "best") -> "TrainedRun":
        """Return the trained model of the run: see `load_run`."""
        from lightning_app.api.trained import load_run

        return load_run(self.folder, checkpoint)


def fit(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    ckpt_path: str | Path | None = None,
    again: bool = False,
    name: str | None = None,
    **settings: Any,
) -> RunResult:
    """Train one run in this process, as `ablate fit --config FILE` does, and return its result.

        from lightning_app import fit

        result = fit(
            "ablations/base/synthetic.yaml",
            {"trainer.max_steps": 20, "model.schedule.warmup_steps": 5},
            seed_everything=2,
        )
        result.outcome, result.metrics["val/nll"], result.folder

    The folder, the id and all numbers are those of the command. A run that stalls or diverges is a
    result too: look at `outcome`. Without `trainer.default_root_dir` the run is stored in the
    store, and `folder` is its link in `experiments/fit/runs`. An interrupted run goes on from its
    last checkpoint. A finished run (also one of a grid) is refused without `again`, and so is a run
    that another process is training.

    Args:
        config: The path of a config, or its content as a mapping.
        overrides: Values by dotted key, as on the axes of a grid: each replaces the value at its
            key, and a mapping replaces the whole mapping there.
        ckpt_path: Another checkpoint to continue from: `last`, `best` or a file.
        again: Whether to train from step 0 where an earlier attempt left a result, which is kept in
            the store, or a checkpoint.
        name: The name of the link; None for a name derived from the config.
        settings: Overrides whose keys have no dot: ``seed_everything=2``.

    Raises:
        UserError: for a mistake in the config; the message is one line.
        KeyboardInterrupt: if the run was interrupted; the same call continues it.
    """
    over = _overrides(overrides or {}, settings)
    if isinstance(config, Mapping):
        source = "config"
        with named(source):
            tree = nested(without_derived(config))
    else:
        tree, source = nested(read_tree(config)), str(config)
    tree = reduce(lambda under, key: replaced(under, key, over[key]), over, tree)
    if ckpt_path is not None:
        tree[CHECKPOINT] = str(ckpt_path)
    check_launcher(os.environ)
    written = Written.of(tree, f"{source} with overrides" if over else source, FIELDS_OF["fit"])
    before = dict(os.environ)
    try:
        run = run_written("fit", written, again=again, name=name)
    except SystemExit as ending:
        # Lightning ends the process on Ctrl-C and on SIGTERM, which a caller does not expect.
        raise KeyboardInterrupt("interrupted; the same call continues") from ending
    finally:  # Lightning leaves behind the variables of the processes that it started
        for name in LAUNCH & os.environ.keys() - before.keys():
            del os.environ[name]
    result = RunResult(run.folder.path)
    if run.trainer.is_global_zero:
        with suppress(UserError):  # raised again when `record` is used
            _ = result.record  # read now: a run that continues in this folder writes another one
    return result


def _overrides(overrides: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all overrides; refuse one that would silently undo another."""
    if both := sorted(overrides.keys() & settings.keys()):
        raise UserError(f"{both[0]}: is given twice, in overrides and as a keyword")
    every = {**overrides, **settings}
    for key in every:
        if key in SECTIONS and key != SEED:
            raise UserError(f"{key}: would replace a whole section; name its fields: '{key}.NAME'")
        if inner := next((other for other in every if other.startswith(f"{key}.")), None):
            raise UserError(f"{inner}: lies inside of another override, {key}")
    return every


def results(grid: str | Path, *, experiments: str | Path = EXPERIMENTS) -> "pd.DataFrame":
    """Return a table with one row per planned run of a grid, finished or not.

        from lightning_app import results

        frame = results("ablations/results/joint")
        frame.status.value_counts()
        frame[frame.status == "ok"].groupby("variant")["val/nll"].min()

    Columns: `id`, `name`, `status`, `variant`, `group`, `baseline`; each axis by its dotted key,
    and `warmup`, `lr`, `seed` even if no axis varies them; the metrics of finished runs (NaN
    where one is missing or was not finite); `outcome`; the time and memory used; `error`, `folder`.

    `status` is `ok`, `diverged` (stalled or non-finite: see `outcome`), `pruned`, `failed`,
    `running`, `unfinished` (cut short), `waiting`, `damaged`, or `other_data` (finished with other
    data than the rest; its metrics are left out).

    Args:
        grid: The name of a grid, its file, its folder, or the folder of a published study, whose
            runs have no folder.
        experiments: The folder that holds the folders of grids.

    Raises:
        UserError: if there are no results, or they cannot be read.
    """
    with found_results(grid, Path(experiments)) as planned:
        return frame_of(planned)


def frame_of(planned: Found) -> "pd.DataFrame":
    """Return the table of `results`."""
    return runs_frame(
        planned.grid, lambda folder: is_held(RunFolder(folder).lock), restored=planned.restored
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

        from lightning_app import compare

        compare(
            "ablations/results/joint",
            axis="model.schedule.warmup_steps",
            baseline=0,
            metric="val/accuracy",
            mode="max",
        )

    One row per other value of the axis and combination of the remaining axes (`where`): `estimate`
    is the mean over seeds of the metric minus that of the baseline, `low` and `high` its 95 %
    interval by Student's t, `p` and `p_holm` its p value, the latter corrected by Holm over the
    rows of this table only, `reading` the conclusion, `note` what is missing, and `seed N` the
    difference of each seed. `lightning_app.report.comparisons` defines them. Seeds at which a run
    did not finish, or has no finite metric, are left out and counted in `seeds` and `note`.

    Args:
        grid: As for `results`.
        axis: The dotted key of an axis of the grid.
        baseline: One of its values.
        metric: A metric that the runs report; None for the metric of the grid, or for each task's
            own score where the report judges runs by it.
        mode: Whether `min` or `max` of it is best; None for the direction registered for the
            metric.
        experiments: The folder that holds the folders of grids.

    Raises:
        UserError: for an unknown axis, value or metric, and for a grid whose pruner
            ended cells.
    """
    with found_results(grid, Path(experiments)) as planned:
        return compare_axis(planned.grid, axis, baseline, metric=metric, mode=mode)


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
    """Run the missing cells of a grid, write its report, and return its `results`.

        from lightning_app import run_grid

        frame = run_grid("demo", workers=2)

    It starts `ablate run` in a separate process and shows its output, which makes it safe in
    a notebook and in a script: no process that holds torch is forked, and the script is not
    imported again. Plug-ins that this process has loaded are loaded there too. Cells that fail are
    rows with the status `failed`. An interrupt stops the cells as Ctrl-C stops the command, and the
    same call continues.

    Args:
        grid: A grid file, or the name of a shipped ablation.
        workers: The number of cells that run at the same time; None: as many as fit.
        experiments: The folder that holds the folders of grids.
        devices_per_cell: The number of devices of each cell.
        slots_per_device: The number of cells that share a GPU.
        storage: The queue, as for `ablate run --storage`.
        max_time: HH:MM[:SS] after which running cells are stopped and queued again.
        retry_failed: Whether to rerun cells that crashed before.
        rerun_stale: Whether to rerun cells from other data or libraries.

    Raises:
        UserError: for a mistake in the grid or in an option, and for a plug-in that has changed
            since this process loaded it.
        KeyboardInterrupt: if an interrupt ended the command. After the time limit or the loss of
            the storage, the missing cells appear as rows with their status.
    """
    plugins = tuple(loaded().values())
    for each in plugins:  # the process reads their files again
        load(each.source)
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
    words += [name for name, chosen in flags.items() if chosen]
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
        """Pass on each interrupt once, even one that arrives while the process starts."""
        nonlocal early, stopped
        stopped = True
        if process is None:
            early = True
        else:
            process.send_signal(signal.SIGINT)  # it stops its cells and keeps what is done

    last = ""
    folders = [folder or os.getcwd() for folder in sys.path]
    # The new process finds the modules that this one finds.
    modules = {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    with _handled(interrupt):
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_app", *words],
            env={**os.environ, **modules, **environment},
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
    """Let `handler` receive interrupts, which reach only the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
