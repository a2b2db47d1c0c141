"""`ablate run`: what one supervisor needs before and after its loop over the missing cells."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lightning_app.ablation.adoption import find_finished, take_over
from lightning_app.ablation.grid import Grid
from lightning_app.ablation.plan import (
    Corpus,
    Plan,
    cell_tree,
    combinations,
    devices_of,
    load_plan,
    save_plan,
    still_holds,
)
from lightning_app.ablation.queue.queue import Claim, Queue
from lightning_app.ablation.queue.storages import storage_spec
from lightning_app.ablation.runs import run_folder
from lightning_app.ablation.superseding import supersede
from lightning_app.ablation.supervision.guard import START, supervisor_lock, turn
from lightning_app.ablation.supervision.options import Options
from lightning_app.ablation.supervision.process import (
    Job,
    count_devices,
    look_here,
    make_plan,
    prepare_data,
)
from lightning_app.ablation.supervision.slots import (
    Slot,
    Slots,
    default_workers,
    slots_of,
    visible_devices,
)
from lightning_app.ablation.supervision.supervisor import Supervisor
from lightning_app.ablation.supervision.workers import (
    Stop,
    ask,
    cell_environment,
    preload,
    share_cores,
)
from lightning_app.data.corpus import corpus_of
from lightning_app.errors import UserError
from lightning_app.files import writing_in
from lightning_app.provenance import command_line

PROGRAM = "lightning_app.ablation.program"

_NVIDIA = Path("/proc/driver/nvidia/version")  # where it is missing, nobody need ask CUDA


def current_plan(
    grid: Grid, directory: Path, make: Callable[[], Plan], alone: bool, corpus: Corpus = corpus_of
) -> Plan:
    """The saved plan of a grid where it still holds, else a new one, saved. Under the lock.

    Who is alone takes over what is finished under other names.
    """
    plan = load_plan(directory)
    if plan is None or not still_holds(plan, grid, corpus):
        if not alone:
            raise UserError(
                f"{directory}: other supervisors run this grid from another form of {grid.source}, "
                "on another state of its corpus or with another version of this program; let them "
                "end first"
            )
        plan = make()
        _take_over(grid, directory, plan)
        with writing_in(directory):
            save_plan(directory, grid, plan)
    elif alone:
        _take_over(grid, directory, plan)
    return plan


def _take_over(grid: Grid, directory: Path, plan: Plan) -> None:
    for line in take_over(directory, find_finished(directory, plan), grid.checkpoints):
        print(line, flush=True)


def run_grid(
    grid: Grid,
    directory: Path,
    options: Options | None = None,
    *,
    program: str = PROGRAM,
    corpus: Corpus = corpus_of,
    index: Callable[[Path], object] = lambda directory: None,
) -> tuple[Plan, int]:
    """Run what is missing of a grid; return its plan and how many cells others run at the end.

    `program` is the module that resolves, prepares and trains; `corpus` gives the digest of what a
    corpus holds; `index` is called with the grid's
    folder now and then. Raises `UserError`, `Interrupted` when a signal came, `StorageLost`, and
    `OSError` (ENOSPC) when the disk is full. Whatever happens, what is done stays done and no
    process is left.
    """
    options = options or Options()
    until = time.monotonic() + options.seconds
    spec = storage_spec(options.storage, directory)
    preload(program)
    with ExitStack() as held:
        held.enter_context(cell_environment())
        stop = held.enter_context(Stop().listening())
        slots = _slots(grid, options, program, stop)
        if spec.kind == "sqlite" and len(slots) > 1:
            raise UserError(
                "--storage: SQLite hands one cell to several workers; give --workers 1, or use "
                "the journal or PostgreSQL"
            )
        make = partial(ask, stop, make_plan, program, grid)
        fresh = None
        if not directory.exists():  # a mistake leaves no folder
            fresh = make()
            ask(stop, prepare_data, program, fresh.data)
        with writing_in(directory):
            directory.mkdir(parents=True, exist_ok=True)
        why = f"{directory}: another supervisor is starting; waiting for it"
        with turn(directory / START, lambda: stop.requested, why):
            lock = supervisor_lock(directory, spec.shown, spec.several)
            alone = held.enter_context(lock)
            plan = current_plan(grid, directory, lambda: fresh or make(), alone, corpus)
            if options.rerun_stale:
                if not alone:
                    raise UserError(
                        f"--rerun-stale: other supervisors run {grid.name}; let them end first"
                    )
                ask(stop, prepare_data, program, plan.data)
                now = ask(stop, look_here, program, plan.data)
                for line in supersede(directory, plan, now):
                    print(line, flush=True)
            queue = Queue(
                directory,
                plan,
                options.retry_failed,
                spec=spec,
                lost_after=options.lost_after,
                alone=alone,
                pruner=grid.pruner,
                stopping=lambda: stop.requested,
            )
        held.callback(queue.close)
        for note in queue.notes:
            print(note, flush=True)
        elsewhere = queue.elsewhere()
        total = max(0, queue.total - elsewhere)
        if (total or elsewhere) and time.monotonic() < until:
            print(f"{grid.name}: {total} cells to run; preparing their data", flush=True)
            if plan is not fresh:
                ask(stop, prepare_data, program, plan.data)
            Supervisor(
                directory,
                queue,
                slots,
                partial(_job, directory, grid, program),
                index,
                stop,
                until=until,
                hang_limit=options.hang_limit,
                wait=options.wait,
                lost_after=options.lost_after,
                prune=grid.pruner is not None,
            ).run(grid.name, total)
        return plan, queue.elsewhere()


def _job(directory: Path, grid: Grid, program: str, claim: Claim, attempt: int, slot: Slot) -> Job:
    return Job(
        program=program,
        folder=run_folder(directory, claim.cell),
        attempt=attempt,
        tree=cell_tree(grid.base_config, claim.cell.axes),
        identity=claim.cell.id,
        slot=slot,
        metric=None if grid.pruner is None else grid.metric,
        keep=grid.checkpoints,
        command=tuple(command_line()),
    )


def _slots(grid: Grid, options: Options, program: str, stop: Stop) -> Slots:
    """Divide this host over cells, and have the fork server know each one's share of cores."""
    accelerator = grid.base_config.get("trainer", {}).get("accelerator", "auto")
    count = 0
    if accelerator != "cpu" and _NVIDIA.exists():
        count = ask(stop, count_devices, program)
    slots = slots_of(
        cores=default_workers(),
        visible=visible_devices(count, os.environ),
        devices=options.devices_per_cell or devices_of(grid),
        sharing=options.slots_per_device,
        workers=options.workers,
        cells=sum(1 for _ in combinations(grid)),
    )
    share_cores(slots.threads)
    return slots
