"""The commands that read a grid: `plan`, `report` and `status`."""

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.commands.options import (
    EXPERIMENTS,
    GRID,
    Parser,
    add_experiments,
    add_grid,
    add_json,
)
from lightning_app.config.grid import read_spec
from lightning_app.config.run_plugins import hinting, require
from lightning_app.core.errors import UserError, named
from lightning_app.core.project import read_project
from lightning_app.grids.copies import find_elsewhere
from lightning_app.grids.display import (
    bar,
    by_status,
    clock,
    counts_table,
    describe,
    document,
    plain_console,
    running_table,
    states_table,
)
from lightning_app.grids.find_results import check_same_cells, find_planned, published
from lightning_app.grids.plan import (
    Grid,
    expand,
    lacking_lines,
    load_plan,
    more_lines,
    runs_with_plugins,
    waiting_document,
    waiting_lines,
)
from lightning_app.grids.plan_checks import axis_cautions
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import is_held, supervisor_lock
from lightning_app.runs.mixtures import STALE, Groups, counted, some
from lightning_app.runs.records import OUTCOMES, is_sealed, read_plan
from lightning_app.runs.run import fraction, read_progress

if TYPE_CHECKING:
    from lightning_app.report.results import GridResults


def add_plan(parser: Parser) -> None:
    add_grid(parser)
    parser.add("--probe", "measure 20 steps of each distinct shape")
    add_json(parser)
    parser.set_defaults(call=plan_command)


def plan_command(
    grid: str | Path, experiments: Path = EXPERIMENTS, *, probe: bool = False, as_json: bool = False
) -> int:
    """Print the size of a grid and the number of finished cells. Trains nothing.

    The plan is written if it does not exist yet; only `ablate run` changes it later. With
    `probe`, 20 steps of each distinct shape are measured. Raises `UserError`.
    """
    results = read_project().folders_of_results()
    spec = read_spec(grid)  # finds mistakes before torch is imported
    from lightning_app.config.config import check_rows, resolve
    from lightning_app.config.experiment import identity_of

    folder = GridFolder(experiments / spec.name)
    with document("plan", as_json) as tree:
        with hinting(runs_with_plugins(folder)):
            identify = partial(identity_of, fetch=False)
            plan, configs = expand(spec, resolve, identify, experiments)
        with named(spec.source):
            for config in configs:
                check_rows(config)
        planned = Grid(spec, folder, plan)
        if load_plan(folder.plan) is None:
            with supervisor_lock(folder):
                planned.save()
        from lightning_app.grids.size import KEPT, plan_document, shapes_of, stale_cells

        elsewhere = find_elsewhere(planned, results)
        shapes = shapes_of(planned, configs, elsewhere.found)
        for shape in shapes:
            if probe and shape.done < len(shape.cells):
                shape.step = _measured(shape.config)
        tree |= plan_document(planned, shapes)
        tree["waiting"] = waiting_document(plan.waiting, experiments)
        tree |= {
            "elsewhere": len(elsewhere.found),
            "found_in": {planned.by_id[each].name: at for each, at in elsewhere.places.items()},
            "refused": [
                {"cell": cell.name, "folder": path, "reason": reason}
                for cell, path, reason in elsewhere.refused
            ],
            "lacking": planned.lacking(
                {cell.id: run for s in shapes for cell, run in zip(s.cells, s.runs, strict=True)}
            ),
            "warnings": plan.warnings,
            "fetched": None not in plan.corpora,
            "stale": stale_cells(planned, shapes),
            "cautions": axis_cautions(spec, plan.cells, configs),
        }
        _print_plan(tree, KEPT[spec.checkpoints][1], elsewhere.lines())
    return 0


_WORDS = {
    "code": "version of the code",
    "data": "state of the data",
    "libraries": "set of library versions",
    "device": "kind of device",
}


def _stale_lines(stale: Mapping[str, Groups]) -> Iterator[str]:
    """One line per kind of stale cell."""
    for kind, of in stale.items():
        total = sum(map(len, of.values()))
        cells = "1 finished cell" if total == 1 else f"{total} finished cells"
        if kind == "unrecorded":
            yield f"{cells} without a record of the code and libraries that made them: {some(of)}"
        else:
            yield f"{cells} of another {_WORDS[kind]} than here and now ({counted(of)}): {some(of)}"


def _measured(config: dict[str, Any]) -> float:
    from lightning_app.grids.cost import seconds_per_step

    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.ERROR)
    return seconds_per_step(config)


def _print_plan(tree: dict[str, Any], kept: str, elsewhere: Iterable[str]) -> None:
    console = plain_console()
    states, stale = tree["states"], tree["stale"]
    head = f"{tree['grid']}: {tree['cells']} cells, {tree['excluded']} excluded, "
    head += f"{states['done']} done, "
    head += f"{states['pruned']} pruned, " if states["pruned"] else ""
    head += f"{states['failed']} failed, {states['to_run']} to run"
    head += f", {states['waiting']} waiting for their parents" if states["waiting"] else ""
    notes = [*more_lines(tree["more"]), *waiting_lines(tree["waiting"]), *elsewhere]
    notes += lacking_lines(tree["lacking"], tree["grid"])
    if not tree["fetched"]:
        where = "the corpus is not on this machine"
        notes.append(f"{where}: runs that are finished on it cannot be found")
    notes += [f"warning: {line}" for line in tree["warnings"]]
    notes += _stale_lines(stale)
    if any(kind in stale for kind in STALE):
        notes.append("`ablate run --rerun-stale` reruns those of other code, data or libraries")
    for axis, values in tree["axes"].items():
        notes.append(f"{axis}: {', '.join(map(json.dumps, values))}")
    notes += [f"caution: {line}" for line in tree["cautions"]]
    console.print("\n  ".join([f"{head} ({tree['folder']})", *notes]))
    table = counts_table("variant", "cells", "done", "parameters", "tokens a run", "seconds a run")
    for shape in tree["shapes"]:
        table.add_row(
            shape["label"],
            str(shape["cells"]),
            str(shape["done"]),
            f"{shape['parameters']:,}",
            _count(shape["tokens"]),
            "unknown" if shape["seconds"] is None else f"{shape['seconds']:.1f}",
        )
    console.print(table)
    left_out = ", without the cells that wait" if states["waiting"] else ""
    console.print(f"tokens: {_count(tree['tokens'])} in all{left_out}")
    if tree["devices"] > 1:
        console.print(f"devices: {tree['devices']} for each cell")
    console.print(f"time: {_time(tree)}")
    console.print(f"disk: about {tree['bytes'] / 1e6:,.0f} MB in all; {kept}")


def _count(tokens: int | None) -> str:
    return "unbounded" if tokens is None else f"{tokens:,}"


def _time(tree: dict[str, Any]) -> str:
    if not tree["states"]["to_run"]:
        return "nothing can run now" if tree["waiting"] else "nothing is left to run"
    if tree["seconds_left"] is None:
        return "unknown, use --probe"
    source = "from a probe" if tree["probed"] else "from the cells that are done"
    return f"about {clock(tree['seconds_left'])} with {tree['workers']} workers, {source}"


_REPORTED = (  # read from the run folders
    *("ok", "diverged", "pruned", "failed", "unfinished", "waiting", "damaged"),
    "other_data",
)


def add_report(parser: Parser) -> None:
    text = f"{GRID}, or the folder of a published study; several are compared"
    parser.add("grids GRID", text, nargs="+")
    add_experiments(parser)
    text = "the report's folder (default: the grid's; for several grids, A-vs-B next to it)"
    parser.add("--out DIR", text)
    text = "also write the study into DIR: its results as one file, scores and headline figure"
    parser.add("--publish DIR", text, dest="publish_in")
    parser.add("--serve", "then serve it with TensorBoard, on this machine only")
    parser.add("--port N", "the port for --serve (default: 6006; 0: any free one)")
    add_json(parser)
    parser.set_defaults(call=report_command)


def report_command(
    grids: Sequence[str | Path],
    experiments: Path = EXPERIMENTS,
    out: Path | None = None,
    *,
    publish_in: Path | None = None,
    serve: bool = False,
    port: int | None = None,
    as_json: bool = False,
) -> int:
    """`ablate report`: tables, figures and `report.html` from run folders only.

    Several grids get one joint report in a separate folder. A grid may also be the folder of a
    published study, whose runs are then restored in `experiments`; `publish_in` is the place to
    write such a folder. With `serve` the page is served together with TensorBoard until a signal
    arrives, at `port` or 6006; port 0 picks a free one. Raises `UserError`.
    """
    if port is not None and not serve:
        raise UserError("--port: needs --serve")
    if port is not None and not 0 <= port < 1 << 16:
        raise UserError(f"--port: expected 0 to 65535, found {port}")
    if serve and as_json:
        raise UserError("--serve: runs until it is stopped; --json needs a command that ends")
    from lightning_app.report import serve as server
    from lightning_app.report.results import different, read_results, together
    from lightning_app.report.tensorboard import write_index
    from lightning_app.report.write import publish, write

    if publish_in is not None and len(grids) > 1:
        raise UserError(f"--publish: takes the results of one grid, found {len(grids)} grids")
    if publish_in is not None and GridFolder(publish_in).plan.is_file():
        raise UserError(f"--publish: {publish_in}: is the folder of a grid; name another folder")
    planned = [find_planned(_restored(grid, experiments), experiments) for grid in grids]
    folders = [folder for folder, _ in planned]
    for run in (run for folder in folders for run in runs_with_plugins(GridFolder(folder))):
        require(run)  # it may define facts about a task
    with ExitStack() as held, document("report", as_json) as tree:
        port = 6006 if port is None else port  # TensorBoard's default
        claimed = held.enter_context(server.claim(port)) if serve else None
        read = [read_results(folder, file) for folder, file in planned]
        grid = read[0] if len(read) == 1 else together(read)
        if grid.parts:
            _check_apart(out or grid.folder)
        if as_json and out is None and not _can_write(grid.folder):
            print(f"{grid.folder}: may only be read: no report.html", file=sys.stderr)
            page = None
        else:
            page = write(grid, out or grid.folder)
        if publish_in is not None:
            publish(grid, publish_in)
        for folder in filter(_can_write, folders):
            write_index(folder)
        cells = different(grid)
        words = Counter(cell.word for cell in cells)
        words["waiting"] += len(grid.without_parent)
        tree |= {"grids": [each.name for each in read], "report": page, "cells": words.total()}
        tree |= {**by_status(words, _REPORTED), **show_headline(grid)}
        if page is not None:
            print(f"report: {page}")
        if page is not None and claimed is not None:
            server.serve(page, folders, claimed)
    return 1 if tree["damaged"] else 0


def _can_write(folder: Path) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK)


def _restored(grid: str | Path, experiments: Path) -> str | Path:
    """The folder in which a published study was restored; any other grid unchanged."""
    from lightning_app.report.packed import unpack

    if (study := published(grid, experiments)) is None:
        return grid
    folder = unpack(study, experiments).path
    print(f"{study}: read in {folder}, which holds the same runs", file=sys.stderr, flush=True)
    return folder


def _check_apart(out: Path) -> None:
    """Refuse to overwrite the report of a single grid with a joint one."""
    for folder in (out.resolve(), *out.resolve().parents):
        if GridFolder(folder).plan.is_file():
            raise UserError(
                f"--out: {out}: lies in the folder of a grid; a report of several needs its own"
            )


def show_headline(grid: "GridResults") -> dict[str, Any]:
    """Print the headline of a report, and return it for the JSON document."""
    from lightning_app.report.comparisons import (
        comparison_document,
        comparisons,
        effects,
        metrics_document,
    )
    from lightning_app.report.facts import records_of
    from lightning_app.report.headline import findings
    from lightning_app.report.results import damaged_files
    from lightning_app.report.tasks import failed_runs, failure_tests, task_scores
    from lightning_app.report.terminal import headline_document, mixtures, show_report
    from lightning_app.report.warmup import sensitivity_scores

    scores = sensitivity_scores(grid)
    show_report(plain_console(), grid, scores)
    damaged = damaged_files(grid)
    for line in damaged:
        print(line, file=sys.stderr, flush=True)
    return {
        "damaged": damaged,
        "findings": findings(grid, scores),
        "headline": headline_document(scores),
        "effects": [asdict(effect) for effect in effects(grid, scores)],
        "comparisons": [comparison_document(row) for row in comparisons(grid)],
        "metrics": metrics_document(grid),
        "failed_runs": [asdict(arm) for arm in failed_runs(grid)],
        "failure_tests": [asdict(test) for test in failure_tests(grid)],
        "task_scores": [asdict(score) for score in task_scores(grid)],
        "mixtures": mixtures(grid),
        "left_out": dict(grid.strangers),
        "unsealed": [name for name, each in records_of(grid).items() if not is_sealed(each)],
    }


STATES = ("ok", "diverged", "pruned", "failed", "running", "waiting")
PROGRESS = ("step", "max_steps", "rate", "loss")  # rate in steps per second, loss in nats
BAR = 80  # characters at most


def add_status(parser: Parser) -> None:
    add_grid(parser)
    add_json(parser)
    parser.set_defaults(call=status_command)


def status_command(
    grid: str | Path, experiments: Path = EXPERIMENTS, *, as_json: bool = False
) -> int:
    """Print counts by state and variant, running cells, time left, and errors of failed cells.

    Time left: the mean seconds of finished cells, divided over the running cells.
    """
    path, file = find_planned(grid, experiments)
    folder = GridFolder(path)
    spec = read_spec(folder.specification if file is None else grid)
    plan = read_plan(folder.plan)
    check_same_cells(folder, spec)
    with document("status", as_json) as tree:
        tree |= {"grid": plan.name, "folder": folder.path, **_status(Grid(spec, folder, plan))}
        _print_status(tree)
    return 0


def _status(grid: Grid) -> dict[str, Any]:
    variants: dict[str, Counter[str]] = {}
    running, failed, seconds = [], [], []
    for cell in grid.cells:
        run = grid.state(cell)
        word = run.word
        if run.result is not None:
            seconds.append(run.result["seconds"])
        elif run.state != "pruned" and is_held((folder := grid.run(cell)).lock):
            word = "running"
            running.append((cell.name, read_progress(folder, run.attempts)))
        elif run.state == "failed":
            failed.append({"name": cell.name, "error": run.error})
        elif run.state == "missing":
            word = "waiting"
        variants.setdefault(grid.variant(cell), Counter())[word] += 1
    for cell in grid.plan.waiting:
        variants.setdefault(grid.variant(cell), Counter())["waiting"] += 1
    left = None
    if running and seconds:
        waiting = sum(words["waiting"] for words in variants.values())
        cells = waiting + sum(1 - fraction(progress) for _, progress in running)
        left = cells * sum(seconds) / len(seconds) / len(running)
    return {
        "cells": len(grid.cells) + len(grid.plan.waiting),
        "more": grid.plan.more,
        **by_status(sum(variants.values(), Counter()), STATES),
        "variants": {name: _counted(words) for name, words in variants.items()},
        "running": [
            {"name": name, **{key: (progress or {}).get(key) for key in PROGRESS}}
            for name, progress in running
        ],
        "failed": failed,
        "waiting": waiting_document(grid.plan.waiting, grid.folder.path.parent),
        "seconds_left": left,
    }


def _counted(words: Counter[str]) -> dict[str, Any]:
    counts = by_status(words, STATES)
    return {**counts["states"], "outcomes": counts["outcomes"]}


def _words(states: Mapping[str, int], outcomes: Mapping[str, int]) -> dict[str, int]:
    """Counts by displayed state, in the order of the bar."""
    ended = {word: outcomes[key] for key, word in OUTCOMES.items()}
    return ended | {state: states[state] for state in STATES if state not in ("ok", "diverged")}


def _print_status(tree: dict[str, Any]) -> None:
    console = plain_console()
    words, running = Counter(_words(tree["states"], tree["outcomes"])), tree["running"]
    console.print(f"{tree['grid']}: {tree['cells']} cells: {describe(words)}")
    for line in more_lines(tree["more"]):
        console.print(line)
    if console.is_terminal and not console.options.ascii_only:
        console.print(bar(words, min(console.width, BAR)))
    variants = {name: _words(each, each["outcomes"]) for name, each in tree["variants"].items()}
    console.print(states_table(variants, words))
    if running:
        begun = [(each["name"], None if each["step"] is None else each) for each in running]
        console.print(running_table(begun))
    if tree["seconds_left"] is not None:
        left = clock(tree["seconds_left"])
        console.print(f"time left: {left} with {len(running)} workers")
    for line in waiting_lines(tree["waiting"]):
        console.print(line)
    for each in tree["failed"]:
        console.print(f"{each['name']}: {each['error']}")
