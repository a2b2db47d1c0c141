"""Worker processes: started warm by a fork server, watched, and ended with everything they started.

The fork server imports torch and Lightning once; a cell's process then starts in milliseconds. The
supervisor itself imports neither."""

import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import psutil

from lightning_app.config.grid import GridSpec
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, is_out_of_memory
from lightning_app.core.files import is_disk_full, move, write_whole
from lightning_app.grids.plan import Grid, expand
from lightning_app.grids.slots import Slot
from lightning_app.plugins import Plugin, check_used, load_given, loaded
from lightning_app.runs.folder import RESULT, AttemptFolder, RunFolder
from lightning_app.runs.locks import Held, Interrupted, Stop, bind_to_supervisor, run_lock
from lightning_app.runs.provenance import FOREIGN
from lightning_app.runs.records import Plan
from lightning_app.runs.run import Run

MARK = "ABLATE_ATTEMPT"
"""The environment variable that identifies the attempt to all programs it executes."""


def _mark(record: Path) -> str:
    """The name of an attempt of one grid: a run in the store may have attempts by several grids."""
    return str(record.parents[2].resolve().joinpath(*record.parts[-3:]))


def end_tree(pids: Iterable[int]) -> None:
    """Kill processes, their groups, and all of their descendants."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                _kill(child)
        with suppress(ProcessLookupError):  # it has ended or does not lead a group yet
            os.killpg(pid, signal.SIGKILL)


def end_marked(records: Iterable[Path]) -> None:
    """Kill processes left on this host by finished attempts, such as a launcher's orphans."""
    names = set(map(_mark, records))
    for process in psutil.process_iter() if names else ():
        with suppress(psutil.Error):
            if process.environ().get(MARK) in names:
                _kill(process)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


FAILED = 3  # exit code: the attempt left an error
DISK_FULL = 4  # exit code: the attempt is void
HELD = 5  # exit code: another process is training the run
OUT_OF_MEMORY = 6  # exit code: another attempt may succeed

_OLD_WORKER_GONE = 60.0  # seconds for the worker of a killed supervisor to end


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt of a cell, as its processes receive it.

    `program` is a module with `resolve`, `identify` and `run_cell`, `tree` the unresolved config of
    the cell and `identity` its planned id. `metric` is what a pruner compares, None without one;
    `keep` names the checkpoints to keep. `command` and `plugins` are those of the supervisor.
    """

    program: str
    folder: RunFolder
    attempt: int
    tree: Mapping[str, Any]
    identity: str
    slot: Slot
    metric: str | None
    keep: str
    command: tuple[str, ...] = ()
    plugins: tuple[Plugin, ...] = ()

    @property
    def record(self) -> AttemptFolder:
        """The folder of the attempt."""
        return self.folder.attempt(self.attempt)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended with a result, or by the pruner."""
        pruner = None if self.metric is None else self.folder.grid or ""
        return self.folder.is_over(pruner, self.metric)

    def error(self, rank: int) -> Path:
        """The file for a rank's error. The supervisor reports the first of several errors."""
        alone = self.slot.devices == 1
        return self.record.error if alone else self.record.error_of(rank)


def run_rank(job: Job, rank: int, *others: Job) -> None:
    """Run one rank of an attempt in this process, which then ends.

    All output goes to the rank's log. Rank 0 holds the run's lock and writes the files of
    the run. The process ends with exit code 0 and a result on disk, with one of the codes above, or
    by a signal. `others` are the other cells of its pack, whose logs name this one.
    """
    _begin()
    jobs = (job, *others)
    try:
        job.record.path.mkdir(parents=True, exist_ok=True)
        for other in others:
            other.record.log(rank).write_text(f"in a pack with {job.record.path}: its log\n")
        with job.record.log(rank).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        faulthandler.enable()
        os.environ[MARK] = _mark(job.record.path)
        if job.slot.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(job.slot.visible)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(job.slot.threads)
        program = importlib.import_module(job.program)
        load_given(job.plugins)
        if rank > 0:
            program.run_cell(job, rank)
            return
        with ExitStack() as held:
            for each in jobs:
                held.enter_context(run_lock(each.folder, _OLD_WORKER_GONE))
                if each.folder.last_attempt() != each.attempt:
                    # Another grid has started an attempt that continues this one.
                    raise Held(f"{each.folder}: has another attempt")
                if Run(each.folder, each.identity).state.short:
                    move(each.folder.result, each.folder.result.with_name(f"{RESULT}.short"))
            if left := [each for each in jobs if not each.is_over]:
                _train(program, left)
    except Held:
        sys.exit(HELD)
    except BaseException as error:
        _end([each.error(rank) for each in jobs if not each.is_over], error)


def send_result(
    channel: Connection, plugins: tuple[Plugin, ...], function: Callable[..., Any], *arguments: Any
) -> None:
    """Send the result of `function`, or the `UserError` or `OSError` that it raises.

    The plug-ins of the calling process are loaded first.
    """
    _begin()
    try:
        load_given(plugins)
        check_used(loaded())
        reply = function(*arguments)
    except (UserError, OSError) as error:
        reply = error
    channel.send(reply)


def make_plan(program: str, spec: GridSpec, experiments: Path) -> Plan:
    """The plan of a grid. It is computed in a child process because torch is slow to import."""
    module = importlib.import_module(program)
    return expand(spec, module.resolve, module.identify, experiments)[0]


def prepare_data(program: str, grid: Grid) -> None:
    """Prepare every corpus, so that cells only read.

    Cells are checked again if a corpus was missing when they were planned. Raises `UserError` for a
    mistake in a corpus, or a cell that does not fit it.
    """
    module = importlib.import_module(program)
    made = [module.prepare(config) for config in grid.data]
    if any(made):
        expand(grid.spec, module.resolve, module.identify, grid.folder.path.parent)


def count_devices(program: str) -> int:
    """The number of accelerators. The calling process must not fork afterwards."""
    return importlib.import_module(program).count_devices()


def look_here(program: str, configs: tuple[Mapping[str, Any], ...]) -> Mapping[str, Any]:
    """The code, libraries, device and data of a run started now."""
    return importlib.import_module(program).here(configs)


def _train(program: Any, jobs: Sequence[Job]) -> None:
    """Write the configs, which every rank reads, and train."""
    for job in jobs:
        config = program.resolve(dict(job.tree), str(job.folder.config))
        if (found := program.identify(config).id) != job.identity:
            raise RuntimeError(
                f"the config's id is {found}, but {job.identity} was planned: the files of the "
                "corpus or the program have changed since; start the grid again"
            )
        write_whole(job.folder.config, strict_yaml.dump_yaml(config))
    program.run_cell(jobs[0], 0, *jobs[1:])
    if not all(job.is_over for job in jobs):
        raise RuntimeError("the run ended without a result")


def _begin() -> None:
    os.setsid()
    bind_to_supervisor()
    gc.freeze()  # keep the collector from scanning imported modules, which would copy their pages
    gc.enable()


def _end(paths: Sequence[Path], error: BaseException) -> NoReturn:
    """Write the error and end this process with the matching exit code or signal."""
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SIGTERMException":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning turned it into an exception
        os.kill(os.getpid(), signal.SIGTERM)
    if is_disk_full(error):
        sys.exit(DISK_FULL)
    text = "".join(traceback.format_exception(error))
    line = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        print(text, file=sys.stderr)
        if is_out_of_memory(error):
            sys.exit(OUT_OF_MEMORY)
        for path in paths:
            write_whole(path, f"{text.rstrip()}\n{line}\n")
    except OSError as refused:
        if is_disk_full(refused):
            sys.exit(DISK_FULL)
        raise
    sys.exit(FAILED)


_CONTEXT = multiprocessing.get_context("forkserver")

# Variables of a launcher or scheduler would affect every cell: another rank,
# another seed, a port in use, automatic requeueing.
_FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED")


@contextmanager
def cell_environment() -> Iterator[None]:
    """Clean the environment while the fork server and cells may start."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(FOREIGN) or name in (*_FOREIGN_NAMES, "ABLATE_STORAGE"):
            del os.environ[name]
    # The usual way to count GPUs initialises CUDA, after which no process may be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # The fork server would, unlike this process, look for modules in the current folder first.
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def most_threads(environment: Mapping[str, str]) -> int | None:
    """Return the number of threads that the user allows per process, or None.

    OMP_NUM_THREADS may have one number per level of nested loops; the first counts.
    """
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def share_cores(threads: int) -> None:
    """Limit the threads of libraries in new processes to their share of the cores."""
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)


def preload(program: str) -> None:
    """Set the modules that the fork server imports before its first child."""
    ours = ("lightning_app.grids.fork_server", "lightning_app.grids.workers")
    _CONTEXT.set_forkserver_preload([*ours, program])


def start(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Call `function` in a new child, using a new fork server if the old one was killed."""
    for _ in range(3):
        process = _CONTEXT.Process(target=function, args=arguments)
        try:
            process.start()
            return process
        except (EOFError, ConnectionError):
            time.sleep(0.1)  # until waitpid reports the end of the old fork server
        except OSError as error:
            if "AF_UNIX" not in str(error):
                raise
            raise UserError(
                f"TMPDIR: {tempfile.gettempdir()} is too long for the socket of a process; "
                "set it to a shorter path"
            ) from error
    raise RuntimeError("the fork server ends right after its start")


def kill(*processes: ForkServerProcess) -> None:
    """Kill children and all processes they started, and wait until they have ended."""
    end_tree(process.pid for process in processes if process.pid is not None)
    for process in processes:
        process.kill()
        process.join()


def ask(stop: Stop, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a child and return its answer, or raise its `UserError` or `OSError`.

    Raises `Interrupted` when a signal arrives first.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = start(send_result, sender, tuple(loaded().values()), function, *arguments)
    sender.close()
    try:
        while not receiver.poll(0.1):
            if stop.requested:
                raise Interrupted
        reply = receiver.recv()
    except EOFError as error:
        process.join()
        raise RuntimeError(f"{function.__name__} ended with code {process.exitcode}") from error
    finally:
        kill(process)
        receiver.close()
    if isinstance(reply, Exception):
        raise reply
    return reply
