"""`ablate run`: the steps of one supervisor before and after its loop over the missing cells."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_app.ablation.adoption import take_over
from lightning_app.ablation.cells import combinations
from lightning_app.ablation.finished_elsewhere import find_finished, refusals
from lightning_app.ablation.grid import Grid
from lightning_app.ablation.grid_spec import GridSpec
from lightning_app.ablation.plan import (
    Corpus,
    DamagedPlan,
    Plan,
    is_valid,
    load_plan,
    runs_with_plugins,
)
from lightning_app.ablation.plan_checks import devices_of
from lightning_app.ablation.queue.queue import Queue
from lightning_app.ablation.queue.retry import StorageLost
from lightning_app.ablation.queue.storages import storage_spec
from lightning_app.ablation.superseding import supersede
from lightning_app.ablation.supervision.locks import supervisor_lock, turn
from lightning_app.ablation.supervision.options import Options
from lightning_app.ablation.supervision.process import (
    count_devices,
    look_here,
    make_plan,
    prepare_data,
)
from lightning_app.ablation.supervision.slots import (
    Slots,
    default_workers,
    slots_of,
    visible_devices,
)
from lightning_app.ablation.supervision.stopping import Interrupted, Stop
from lightning_app.ablation.supervision.supervisor import Supervisor
from lightning_app.ablation.supervision.workers import (
    ask,
    cell_environment,
    most_threads,
    preload,
    share_cores,
)
from lightning_app.data.corpus import corpus_of
from lightning_app.errors import UserError
from lightning_app.grid_folder import GridFolder
from lightning_app.plugin_copies import hinting

PROGRAM = "lightning_app.ablation.program"

_NVIDIA = Path("/proc/driver/nvidia/version")  # without this file there is no CUDA device


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a supervisor ended.

    Attributes:
        grid: The grid, None if the supervisor was stopped before it was planned.
        elsewhere: The number of cells that other supervisors run now.
        cut: The reason why the supervisor stopped early; else empty.
    """

    grid: Grid | None
    elsewhere: int = 0
    cut: str = ""


def run_grid(
    spec: GridSpec,
    folder: GridFolder,
    options: Options | None = None,
    *,
    program: str = PROGRAM,
    corpus: Corpus = corpus_of,
    index: Callable[[Path], object] = lambda folder: None,
) -> Ending:
    """Run the missing cells of a grid until all are done, or a signal, time or outage ends it.

    In every case finished cells are kept and no process remains.

    Args:
        spec: The content of the grid file.
        folder: The grid's folder, made if it is missing.
        options: How the supervisor works.
        program: The module that resolves, prepares and trains.
        corpus: Returns the digest of the content of a corpus.
        index: Called with the grid's folder from time to time, to index the runs.

    Raises:
        UserError: for a mistake in the grid or the options, and for damaged results.
        OSError: ENOSPC, if the disk is full.
    """
    options = options or Options()
    until = time.monotonic() + options.seconds
    storage = storage_spec(options.storage, folder.journal)
    preload(program)
    grid = None
    try:
        with ExitStack() as held:
            held.enter_context(cell_environment())
            stop = held.enter_context(Stop().listening())
            slots = _slots(spec, options, program, stop)
            fresh = None
            if not folder.path.exists():  # plan first: a mistake in the grid creates no folder
                fresh = ask(stop, make_plan, program, spec, folder.path.parent)
                ask(stop, prepare_data, program, Grid(spec, folder, fresh))
            why = f"{folder}: another supervisor is starting; waiting for it"
            with turn(folder.start_lock, lambda: stop.requested, why):
                lock = supervisor_lock(folder, storage.shown, several=True)
                alone = held.enter_context(lock)
                make = partial(ask, stop, make_plan, program, spec, folder.path.parent)
                with hinting(runs_with_plugins(folder)):
                    grid = current_grid(
                        spec, folder, lambda: fresh or make(), alone, corpus, options.results
                    )
                if options.rerun_stale:
                    _rerun_stale(grid, program, stop, alone)
                queue = Queue(
                    grid,
                    storage,
                    retry_failed=options.retry_failed,
                    lost_after=options.lost_after,
                    alone=alone,
                    stopping=lambda: stop.requested,
                )
            held.callback(queue.close)
            for note in (*queue.notes, *(f"warning: {line}" for line in grid.plan.warnings)):
                print(note, flush=True)
            elsewhere = queue.elsewhere()
            total = max(0, queue.total - elsewhere)
            if (total or elsewhere) and time.monotonic() < until:
                print(f"{grid.name}: {total} cells to run; preparing their data", flush=True)
                if grid.plan is not fresh:
                    ask(stop, prepare_data, program, grid)
                supervisor = Supervisor(grid, queue, slots, options, stop, program, index, until)
                supervisor.run(total)
            return Ending(grid=grid, elsewhere=queue.elsewhere())
    except (Interrupted, StorageLost) as why:
        return Ending(grid=grid, cut=str(why) or "interrupted")


def current_grid(
    spec: GridSpec,
    folder: GridFolder,
    make: Callable[[], Plan],
    alone: bool,
    corpus: Corpus = corpus_of,
    results: Iterable[Path] = (),
) -> Grid:
    """The grid with its saved plan if that is valid, else with a new one, which is saved.

    The caller holds the start lock. A supervisor that is `alone` also takes over what is finished
    under other names, in the folders of `results` too.
    """
    try:
        plan = load_plan(folder.plan)
    except DamagedPlan as error:
        print(error, flush=True)
        plan = None
    valid = plan is not None and is_valid(plan, spec, corpus, folder.path.parent)
    if not valid and not alone:
        raise UserError(
            f"{folder}: other supervisors run this grid from another version of {spec.source}, of "
            "its corpus or of this program; let them end "
            "first"
        )
    # Parents may have finished since. Beside other supervisors the set of cells stays as it is.
    valid = valid and not (alone and plan is not None and plan.waiting)
    grid = Grid(spec, folder, plan if plan is not None and valid else make())
    if plan is not None and not valid:
        _refuse_lost_parents(grid, plan)
    if alone:
        found, refused = find_finished(grid, results)
        for line in (*refusals(refused), *take_over(grid, found)):
            print(line, flush=True)
    if not valid or (alone and not grid.is_saved()):
        grid.save()
    return grid


def _refuse_lost_parents(grid: Grid, former: Plan) -> None:
    """Refuse a new plan without finished cells whose parents are gone: their ids need these."""
    waiting = {cell.parent for cell in grid.plan.waiting}
    lost = [
        cell
        for cell in former.cells
        if cell.parent in waiting and grid.run(cell).result.is_file()
        if not (grid.folder.path.parent / cell.parent).exists()
    ]
    if lost:
        raise UserError(
            f"{grid.folder}: {len(lost)} finished cells started from runs that are gone, such as "
            f"{lost[0].parent}; put these back, or move the folder of this grid away"
        )


def _rerun_stale(grid: Grid, program: str, stop: Stop, alone: bool) -> None:
    if not alone:
        raise UserError(f"--rerun-stale: other supervisors run {grid.name}; let them end first")
    ask(stop, prepare_data, program, grid)
    for line in supersede(grid, ask(stop, look_here, program, grid.data)):
        print(line, flush=True)


def _slots(spec: GridSpec, options: Options, program: str, stop: Stop) -> Slots:
    """Divide this host over cells, and set the threads that each process of a cell may use."""
    accelerator = spec.base_config.get("trainer", {}).get("accelerator", "auto")
    count = 0
    if accelerator != "cpu" and _NVIDIA.exists():
        count = ask(stop, count_devices, program)
    slots = slots_of(
        cores=default_workers(),
        visible=visible_devices(count, os.environ),
        devices=options.devices_per_cell or devices_of(spec),
        sharing=options.slots_per_device,
        workers=options.workers,
        cells=sum(1 for _ in combinations(spec)),
        most_threads=most_threads(os.environ),
    )
    share_cores(slots.threads)
    return slots
