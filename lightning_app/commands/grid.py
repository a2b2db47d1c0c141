"""The commands that read a grid: `plan`, `report` and `status`."""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
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
    add_threads,
)
from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.identity import hinting, require
from lightning_app.config.tree import RATE, SEED, WARMUP
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, named, nearest
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
from lightning_app.grids.plan import (
    Grid,
    expand,
    lacking_lines,
    load_plan,
    more_lines,
    other_versions,
    runs_with_plugins,
    waiting_document,
    waiting_lines,
)
from lightning_app.grids.plan_checks import axis_cautions
from lightning_app.grids.slots import Options
from lightning_app.report.packed import find_planned, published
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import is_held, supervisor_lock, turn
from lightning_app.runs.mixtures import STALE, Groups, counted, some
from lightning_app.runs.records import OUTCOMES, is_sealed, read_plan
from lightning_app.runs.run import fraction, read_progress

if TYPE_CHECKING:
    import pandas as pd

    from lightning_app.report.results import GridResults


def add_plan(parser: Parser) -> None:
    add_grid(parser)
    parser.add("--probe", "measure 20 steps of each distinct shape")
    parser.add("--explain", "show which parameters are trained by what, and at which rate")
    add_json(parser)
    parser.set_defaults(call=plan_command)


def plan_command(
    grid: str | Path,
    experiments: Path = EXPERIMENTS,
    *,
    probe: bool = False,
    explain: bool = False,
    as_json: bool = False,
) -> int:
    """Print the size of a grid and the number of finished cells. Trains nothing.

    The plan is written if it does not exist yet; only `ablate run` changes it later. With
    `probe`, 20 steps of each distinct shape are measured; with `explain`, what trains the
    parameters of each shape is shown. Raises `UserError`.
    """
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
        from lightning_app.grids.size import KEPT, plan_document, shapes_of, stale_cells, trained_by

        shapes = shapes_of(planned, configs)
        if probe:
            from lightning_app.grids.program import seconds_per_step

            for shape in (each for each in shapes if each.done < len(each.cells)):
                shape.step = seconds_per_step(shape.config)
        tree |= plan_document(planned, shapes)
        if explain:
            for shape, row in zip(shapes, tree["shapes"], strict=True):
                row["trained_by"] = trained_by(shape.config)
        tree["waiting"] = waiting_document(plan.waiting, experiments)
        tree |= {
            "lacking": planned.lacking(
                {cell.id: run for s in shapes for cell, run in zip(s.cells, s.runs, strict=True)}
            ),
            "warnings": [*plan.warnings, *other_versions(planned)],
            "fetched": None not in plan.corpora,
            "stale": stale_cells(planned, shapes),
            "cautions": axis_cautions(spec, plan.cells, configs),
        }
        _print_plan(tree, KEPT[spec.checkpoints][1])
    return 0


_WORDS = {
    "code": "version of the code",
    "data": "state of the data",
    "libraries": "set of library versions",
    "device": "kind of device",
}


def _stale_lines(stale: Mapping[str, Groups]) -> Iterator[str]:
    for kind, runs in stale.items():
        total, names = sum(map(len, runs.values())), some(runs)
        cells = "1 finished cell" if total == 1 else f"{total} finished cells"
        if kind == "unrecorded":
            yield f"{cells} without a record of the code and libraries that made them: {names}"
        else:
            yield f"{cells} of another {_WORDS[kind]} than here and now ({counted(runs)}): {names}"


def _print_plan(tree: dict[str, Any], kept: str) -> None:
    console = plain_console()
    states, stale = tree["states"], tree["stale"]
    head = f"{tree['grid']}: {tree['cells']} cells, {tree['excluded']} excluded, "
    head += f"{states['done']} done, "
    head += f"{states['pruned']} pruned, " if states["pruned"] else ""
    retried = " (run with --retry-failed)" * bool(states["failed"])
    head += f"{states['failed']} failed{retried}, {states['to_run'] - states['failed']} to run"
    head += f", {states['waiting']} waiting for their parents" if states["waiting"] else ""
    notes = [*more_lines(tree["more"]), *waiting_lines(tree["waiting"])]
    notes += lacking_lines(tree["lacking"], tree["grid"])
    if not tree["fetched"]:
        where = "the corpus is not on this machine"
        notes.append(f"{where}: runs that are finished on it cannot be found")
    notes += [f"warning: {line}" for line in tree["warnings"]]
    notes += _stale_lines(stale)
    if any(kind in stale for kind in STALE):
        notes.append("`ablate run --rerun-stale` reruns those of other data or libraries")
    for axis, values in tree["axes"].items():
        if axis not in tree["trials"]:
            notes.append(f"{axis}: {', '.join(map(json.dumps, values))}")
        for seed, trials in tree["trials"].get(axis, {}).items():
            notes.append(f"{axis}, seed {seed}: {', '.join(map(json.dumps, trials))}")
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
    for shape in tree["shapes"]:
        _print_trained(shape)
    left_out = ", without the cells that wait" if states["waiting"] else ""
    console.print(f"tokens: {_count(tree['tokens'])} in all{left_out}")
    if tree["devices"] > 1:
        console.print(f"devices: {tree['devices']} for each cell")
    console.print(f"time: {_time(tree)}")
    console.print(f"disk: about {tree['bytes'] / 1e6:,.0f} MB in all; {kept}")


def _print_trained(shape: Mapping[str, Any]) -> None:
    """Print the optimizer groups of the parameters of a shape, by its first cell."""
    if "trained_by" not in shape:
        return
    table = counts_table("parameters", "role", "by", "rate", "weight decay", "warm-up steps")
    table.title = f"{shape['label']}, first cell"
    for row in shape["trained_by"]:
        low, high = row["rate"]
        rate = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        cells = (f"{row['parameters']:,}", row["role"], row["by"], rate)
        table.add_row(*cells, f"{row['weight_decay']:g}", str(row["warmup_steps"]))
    plain_console().print(table)


def _count(tokens: int | None) -> str:
    return "unbounded" if tokens is None else f"{tokens:,}"


def _time(tree: dict[str, Any]) -> str:
    if not tree["states"]["to_run"]:
        return "nothing can run now" if tree["waiting"] else "nothing is left to run"
    if tree["seconds_left"] is None:
        return "unknown, use --probe"
    source = "from a probe" if tree["probed"] else "from the cells that are done"
    return f"about {clock(tree['seconds_left'])} with {tree['workers']} workers, {source}"


_REPORTED = ("ok", "diverged", "pruned", "failed", "unfinished", "waiting", "damaged", "other_data")


def add_report(parser: Parser) -> None:
    parser.add("grid GRID", f"{GRID}, or the folder of a published study")
    add_experiments(parser)
    parser.add("--out DIR", "the report's folder (default: the grid's)")
    text = "also write the study into DIR: its results as one file, scores and headline figure"
    parser.add("--publish DIR", text, dest="publish_in")
    parser.add("--serve", "then serve it with TensorBoard, on this machine only")
    parser.add("--port N", "the port for --serve (default: 6006; 0: any free one)")
    add_json(parser)
    parser.set_defaults(call=report_command)


def report_command(
    grid: str | Path,
    experiments: Path = EXPERIMENTS,
    out: Path | None = None,
    *,
    publish_in: Path | None = None,
    serve: bool = False,
    port: int | None = None,
    as_json: bool = False,
) -> int:
    """`ablate report`: tables, figures and `report.html` from run folders only.

    A grid may also be the folder of a published study, whose runs are then restored in
    `experiments`; `publish_in` is the place to write such a folder. With `serve` the page is served
    together with TensorBoard until a signal arrives, at `port` or 6006; port 0 picks a free one.
    Raises `UserError`.
    """
    if port is not None and not serve:
        raise UserError("--port: needs --serve")
    if port is not None and not 0 <= port < 1 << 16:
        raise UserError(f"--port: expected 0 to 65535, found {port}")
    if serve and as_json:
        raise UserError("--serve: runs until it is stopped; --json needs a command that ends")
    from lightning_app.report.packed import unpack
    from lightning_app.report.results import read_grid_file, read_results
    from lightning_app.report.tensorboard import write_index
    from lightning_app.report.write import FILE, claim, publish, serve_report, write

    if publish_in is not None and GridFolder(publish_in).plan.is_file():
        raise UserError(f"--publish: {publish_in}: is the folder of a grid; name another folder")
    if (study := published(grid, experiments)) is None:
        folder, file = find_planned(grid, experiments)
    else:
        folder, file = unpack(study, experiments).path, None
        print(f"{study}: read in {folder}, which holds the same runs", file=sys.stderr, flush=True)
        if (study.parent / FILE).is_file():
            file = read_grid_file(study.parent / FILE)
    for run in runs_with_plugins(GridFolder(folder)):
        require(run)  # it may define facts about a task
    port = 6006 if port is None else port  # TensorBoard's default
    writes = out is None and _can_write(folder)
    with claim(port) if serve else nullcontext() as claimed, document("report", as_json) as tree:
        with _writing(GridFolder(folder)) if writes else nullcontext():
            results = read_results(folder, file)
            _check_apart(folder, out or folder)
            if as_json and out is None and not writes:
                print(f"{folder}: may only be read: no report.html", file=sys.stderr)
                page = None
            else:
                page = write(results, out or folder, file)
            if publish_in is not None:
                publish(results, publish_in, file)
            if _can_write(folder):
                write_index(folder)
        words = Counter(cell.word for cell in results.cells)
        words["waiting"] += len(results.without_parent)
        tree |= {"grid": results.name, "report": page, "cells": words.total()}
        tree |= {**by_status(words, _REPORTED), **show_headline(results)}
        if page is not None:
            print(f"report: {page}")
        if page is not None and claimed is not None:
            serve_report(page, folder, claimed)
    return 1 if tree["damaged"] else 0


def _writing(folder: GridFolder) -> AbstractContextManager[None]:
    """Hold the report of a grid: its page and tables are made from the same results."""
    why = f"{folder.report}: another process writes it; waiting"
    return turn(folder.report_lock, lambda: False, why)


def _can_write(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(existing, os.W_OK)


def _check_apart(grid: Path, out: Path) -> None:
    """Refuse to overwrite the report of a grid with one of another."""
    from lightning_app.report.packed import PACKED

    if (out / PACKED).is_file():
        raise UserError(
            f"--out: {out}: holds a published study, whose tables the report would overwrite; "
            "name another folder"
        )
    for folder in (out.resolve(), *out.resolve().parents):
        if folder != grid.resolve() and GridFolder(folder).plan.is_file():
            raise UserError(
                f"--out: {out}: lies in the folder of the grid {folder.name}, which has a report "
                "of its own; name another folder"
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
    from lightning_app.report.headline import answer
    from lightning_app.report.results import damaged_files
    from lightning_app.report.statistics import row_document
    from lightning_app.report.tasks import failed_runs, failure_tests, task_scores
    from lightning_app.report.terminal import headline_document, mixtures, show_report
    from lightning_app.report.verdicts import verdict_document, verdicts
    from lightning_app.report.warmup import sensitivity_scores

    scores = sensitivity_scores(grid)
    show_report(plain_console(), grid, scores)
    damaged = damaged_files(grid)
    for line in damaged:
        print(line, file=sys.stderr, flush=True)
    return {
        "damaged": damaged,
        "answer": answer(grid, scores),
        "verdicts": [verdict_document(verdict) for verdict in verdicts(grid, scores)],
        "headline": headline_document(scores),
        "effects": [row_document(effect) for effect in effects(grid, scores)],
        "comparisons": [comparison_document(row) for row in comparisons(grid)],
        "metrics": metrics_document(grid),
        "failed_runs": [asdict(arm) for arm in failed_runs(grid)],
        "failure_tests": [asdict(test) for test in failure_tests(grid)],
        "task_scores": [asdict(score) for score in task_scores(grid)],
        "mixtures": mixtures(grid),
        "left_out": dict(grid.strangers),
        "unsealed": [name for name, record in records_of(grid).items() if not is_sealed(record)],
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
    with document("status", as_json) as tree:
        tree |= {"grid": plan.name, "folder": folder.path, **_status(Grid(spec, folder, plan))}
        _print_status(tree)
    return 0


def _status(grid: Grid) -> dict[str, Any]:
    variants: defaultdict[str, Counter[str]] = defaultdict(Counter)
    running, interrupted, failed, damaged, seconds = [], [], [], [], []
    for cell in grid.cells:
        if damage := grid.damage(cell):
            damaged.append({"name": cell.name, "error": f"{damage.path}: {damage}"})
            variants[grid.variant(cell)]["waiting"] += 1
            continue
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
            if progress := read_progress(grid.run(cell), run.attempts):
                interrupted.append({"name": cell.name, "step": progress["step"]})
        variants[grid.variant(cell)][word] += 1
    for cell in grid.plan.waiting:
        variants[grid.variant(cell)]["waiting"] += 1
    remaining = None
    if running and seconds:
        waiting = sum(words["waiting"] for words in variants.values())
        cells = waiting + sum(1 - fraction(progress) for _, progress in running)
        remaining = cells * sum(seconds) / len(seconds) / len(running)
    return {
        "cells": len(grid.cells) + len(grid.plan.waiting),
        "more": grid.plan.more,
        **by_status(sum(variants.values(), Counter()), STATES),
        "variants": {name: _counted(words) for name, words in variants.items()},
        "running": [
            {"name": name, **{key: (progress or {}).get(key) for key in PROGRESS}}
            for name, progress in running
        ],
        "interrupted": interrupted,
        "failed": failed,
        "damaged": damaged,
        "waiting": waiting_document(grid.plan.waiting, grid.folder.path.parent),
        "seconds_left": remaining,
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
    variants = {name: _words(row, row["outcomes"]) for name, row in tree["variants"].items()}
    console.print(states_table(variants, words))
    if running:
        begun = [(cell["name"], None if cell["step"] is None else cell) for cell in running]
        console.print(running_table(begun))
    if tree["seconds_left"] is not None:
        remaining = clock(tree["seconds_left"])
        console.print(f"time left: {remaining} with {len(running)} workers")
    for line in waiting_lines(tree["waiting"]):
        console.print(line)
    if begun := tree["interrupted"]:
        steps = ", ".join(str(cell["step"]) for cell in begun)
        console.print(f"{len(begun)} of the waiting cells continue, interrupted at step {steps}")
    for cell in tree["failed"]:
        console.print(f"{cell['name']}: {cell['error']}")
    for cell in tree["damaged"]:
        console.print(f"{cell['error']}; `ablate run` moves the run aside and trains it again")


_IN_WORDS = ("comparable", "why_unlike", "tokens_ratio")
"""The columns of a comparison that `reading`, `note` and `budget` put into words."""


def add_results(parser: Parser) -> None:
    parser.add("grid GRID", f"{GRID}, the folder of a grid, or of a published study")
    add_experiments(parser)
    parser.add("--query CONDITION", "only these runs, such as \"variant == 'sas'\"")
    parser.add("--compare AXIS=BASELINE", "compare the values of an axis instead")
    parser.add("--metric NAME", "the metric for --compare (default: the grid's)")
    text = "the better direction (default: the metric's own)"
    parser.add("--mode", text, choices=("min", "max"))
    parser.add("--csv", "print all columns as CSV")
    parser.set_defaults(call=results_command)


def results_command(
    grid: str,
    experiments: Path,
    *,
    query: str | None,
    compare: str | None,
    metric: str | None,
    mode: str | None,
    csv: bool,
) -> int:
    """Print one row per planned run or per comparison; all columns with `csv`.

    Returns 1 if a file of a run is damaged, after the table. Raises `UserError`.
    """
    if compare is None and (metric is not None or mode is not None):
        raise UserError("--metric and --mode: need --compare AXIS=BASELINE")
    if compare is not None and query is not None:
        raise UserError("--query: selects runs of the table, not of --compare; use one of the two")
    pair = _pair(compare) if compare is not None else None
    from lightning_app.api.runs import frame_of
    from lightning_app.report.comparisons import compare_axis, titled, why_apart
    from lightning_app.report.packed import found_results
    from lightning_app.report.results import damaged_files

    with found_results(grid, experiments) as results:
        damaged = damaged_files(results.grid)
        if pair is None:
            frame = frame_of(results)
            shown = frame if query is None else select(frame, query)
            short = _short(results.grid, shown)
        else:
            shown = compare_axis(results.grid, *pair, metric=metric, mode=mode)
            short = shown.drop(columns=["grid", "axis", "mode", "p", "p_sign", *_IN_WORDS])
    if csv:
        print(shown.to_csv(index=False), end="")
    else:
        if len(short):
            print(short.to_string(index=False, na_rep="-"))
        noun = "runs" if compare is None else "comparisons"
        print(f"{len(short)} {noun} of {results.grid.name}")
        if pair is None and (why := why_apart(results.grid)):
            print(f"{titled(results.grid)}: not comparable between all runs, because {why}")
    for line in damaged:
        print(line, file=sys.stderr)
    return 1 if damaged else 0


def select(frame: "pd.DataFrame", query: str) -> "pd.DataFrame":
    """Return the rows for which a condition in pandas' query language holds.

    Write a column whose name is not an identifier in backticks. A condition on a missing number
    does not hold. Raises `UserError` if pandas cannot evaluate it, or it is not a condition.
    """
    import pandas as pd

    try:
        # NaN differs from every number, so a condition with `!=` or `not` would hold.
        holds = frame.convert_dtypes().eval(query, local_dict={}, global_dict={})
    except pd.errors.UndefinedVariableError as error:
        name = str(error).split("'")[1]
        raise UserError(
            f"--query {query!r}: no column {name!r}{nearest(name, frame.columns)}"
        ) from error
    except Exception as error:  # pandas raises errors of many kinds for a bad query
        raise UserError(f"--query {query!r}: {error}") from error
    if not isinstance(holds, pd.Series) or not pd.api.types.is_bool_dtype(holds):
        raise UserError(f"--query {query!r}: expected a condition, such as variant == 'sas'")
    return frame.loc[holds.fillna(False).astype(bool)]


def _short(grid: "GridResults", frame: "pd.DataFrame") -> "pd.DataFrame":
    """The columns that distinguish the runs of a grid, and those for how they ended."""
    axes = [axis for axis in grid.axes if not axis.startswith(grid.wiring)]
    axes = [axis for axis in axes if axis not in (SEED, WARMUP, RATE) and grid.varies(axis)]
    names = ["variant", *axes, "warmup", "lr", "seed", "status", "outcome", grid.metric, "name"]
    return frame.loc[:, [name for name in names if name in frame.columns]]


def _pair(text: str) -> tuple[str, object]:
    axis, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--compare {text}: expected AXIS=BASELINE, such as model.block.norm=null")
    try:
        return axis, strict_yaml.load_yaml(value)
    except UserError as error:
        raise UserError(f"--compare {text}: {value!r} is not valid YAML: {error}") from error


INTERRUPTED = 130
_STATES = ("ok", "diverged", "pruned", "failed", "missing", "waiting")


def add_run(parser: Parser) -> None:
    parser.add("grid GRID", GRID)
    add_run_options(parser)
    parser.set_defaults(call=run_command)


def add_run_options(parser: Parser) -> None:
    add_experiments(parser)
    parser.add("--workers N", "cells to run at once (default: as many as fit)")
    text = "devices, and so processes, per cell (default: trainer.devices)"
    parser.add("--devices-per-cell N", text)
    parser.add("--slots-per-device N", "cells that share a GPU (default: 1)")
    parser.add(
        "--storage URL",
        "the Optuna study: the path of a journal, or the URL of a database, such as "
        "postgresql+psycopg://user@host/db (default: ABLATE_STORAGE or a journal in the grid's "
        "folder)",
    )
    text = "kill a cell after this time without progress (default: 00:30)"
    parser.add("--hang-limit HH:MM[:SS]", text, default="00:30")
    text = "stop and requeue running cells after this time"
    parser.add("--max-time HH:MM[:SS]", text)
    parser.add("--retry-failed", "also rerun crashed cells")
    text = "do not wait while other supervisors run cells, in case one is lost"
    parser.add("--no-wait", text, dest="wait", action="store_false")
    add_threads(parser, "of each process that trains a cell")
    text = "rerun cells of other data or library versions; the old runs are kept"
    parser.add("--rerun-stale", text)
    text = "move damaged runs aside and rerun them, even if there are many"
    parser.add("--retry-damaged", text)
    add_json(parser)


def run_command(
    grid: str | Path, experiments: Path = EXPERIMENTS, *, as_json: bool = False, **words: Any
) -> int:
    """`ablate run`: run the missing cells, write the report, and return the exit code.

    The code is 0 if every cell is done or waits for a run of its parent grid, 1 if cells failed,
    130 if a signal or the time limit ended it early. `words` are parsed by
    `Options.of`. Raises `UserError`, and `OSError` (ENOSPC) when the disk is full.
    """
    options = Options.of(words)
    spec = read_spec(grid)
    folder = GridFolder(experiments / spec.name)
    with document("run", as_json) as tree:
        tree |= {"grid": spec.name, "folder": folder.path, "cells": 0, "elsewhere": 0}
        tree |= by_status(Counter(), _STATES)
        tree |= {"report": None, "answer": "", "mixtures": {}, "left_out": {}}
        lists = ("damaged", "verdicts", "headline", "comparisons", "effects", "metrics")
        lists += ("failed_runs", "failure_tests", "task_scores", "waiting", "unsealed")
        tree |= dict.fromkeys(lists, ())
        tree["exit_code"] = _run(spec, folder, options, tree)
    return tree["exit_code"]


def _run(spec: GridSpec, folder: GridFolder, options: Options, tree: dict[str, Any]) -> int:
    """Run, write the report, fill the document, and return the exit code."""
    from lightning_app.grids.supervisor import run_grid
    from lightning_app.report.tensorboard import write_index

    ending = run_grid(spec, folder, options, index=partial(write_index, only_new=True))
    grid = ending.grid
    words = Counter[str]() if grid is None else _cells_by_word(grid, tree)
    if grid is None or ending.cut:
        print(f"{ending.cut}; finished cells are kept, the same command continues ({folder})")
        return INTERRUPTED
    tree["elsewhere"] = ending.elsewhere
    print(f"{grid.name}: {tree['cells']} cells: {describe(words)}")
    for line in waiting_lines(tree["waiting"]):
        print(line)
    if words["missing"] > ending.elsewhere:
        print("cells are still missing; the same command continues")
        return INTERRUPTED
    if ending.elsewhere:
        print(f"{ending.elsewhere} cells run elsewhere; the last supervisor writes the report")
        return 1 if words["failed"] else 0
    if not grid.cells:
        print("no cell can start yet; the same command continues")
        return 0
    tree |= _report(grid)
    print(f"report: {tree['report']}")
    print(f"curves: tensorboard --logdir {folder}")
    if words["failed"]:
        print("--retry-failed runs failed cells again; `ablate status` shows their errors")
    return 1 if words["failed"] else 0


def _cells_by_word(grid: Grid, tree: dict[str, Any]) -> Counter[str]:
    words = Counter(grid.state(cell).word for cell in grid.cells)
    waiting = waiting_document(grid.plan.waiting, grid.folder.path.parent)
    words["waiting"] = len(waiting)
    tree |= {"cells": words.total(), "waiting": waiting, **by_status(words, _STATES)}
    return words


def _report(grid: Grid) -> dict[str, Any]:
    """Write the report unless it is up to date; show it and return it for the document."""
    from lightning_app.report.results import read_results
    from lightning_app.report.tensorboard import write_index
    from lightning_app.report.write import is_current, write

    folder = grid.folder
    with _writing(folder):
        results = read_results(folder.path)
        if not is_current(results, folder.report):
            write(results, folder.path)
            write_index(folder.path)
    return {"report": folder.report, **show_headline(results)}
