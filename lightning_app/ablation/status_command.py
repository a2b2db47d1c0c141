"""`ablate status`: the state of a grid, read from its folder while it runs and afterwards."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_app.ablation.counts import by_status, describe
from lightning_app.ablation.display import bar, clock, plain_console, running_table, states_table
from lightning_app.ablation.documents import document
from lightning_app.ablation.find_results import check_same_cells
from lightning_app.ablation.grid import Grid
from lightning_app.ablation.grid_spec import read_spec
from lightning_app.ablation.parent_cells import waiting_document, waiting_lines
from lightning_app.ablation.plan import load_plan
from lightning_app.ablation.supervision.locks import is_held
from lightning_app.errors import UserError
from lightning_app.grid_folder import GridFolder
from lightning_app.records import OUTCOMES
from lightning_app.run_state import fraction, read_progress

STATES = ("ok", "diverged", "pruned", "failed", "running", "waiting")
PROGRESS = ("step", "max_steps", "rate", "loss")  # rate in steps per second, loss in nats
BAR = 80  # characters at most


def status_command(
    grid: str | Path, experiments: Path = Path("experiments"), *, as_json: bool = False
) -> int:
    """Print counts by state and variant, running cells, time left, and errors of failed cells.

    Time left: the mean seconds of finished cells, divided over the cells that run now.
    """
    held = GridFolder(Path(grid))
    spec = read_spec(held.specification if held.plan.is_file() else grid)
    folder = held if held.plan.is_file() else GridFolder(experiments / spec.name)
    plan = load_plan(folder.plan)
    if plan is None:
        raise UserError(f"{folder}: holds no plan yet; `ablate plan` or `ablate run` makes one")
    check_same_cells(folder, spec)
    with document("status", as_json) as tree:
        tree |= {"grid": plan.name, "folder": folder.path, **_look(Grid(spec, folder, plan))}
        _print(tree)
    return 0


def _look(grid: Grid) -> dict[str, Any]:
    variants: dict[str, Counter[str]] = {}
    running, failed, seconds = [], [], []
    for cell in grid.cells:
        folder, run = grid.run(cell), grid.state(cell)
        word = run.word
        if run.result is not None:
            seconds.append(run.result["seconds"])
        elif run.state != "pruned" and is_held(folder.lock):
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
    found = by_status(words, STATES)
    return {**found["states"], "outcomes": found["outcomes"]}


def _words(states: Mapping[str, int], outcomes: Mapping[str, int]) -> dict[str, int]:
    """Counts by what people read, in the order of the bar."""
    ended = {word: outcomes[key] for key, word in OUTCOMES.items()}
    return ended | {state: states[state] for state in STATES if state not in ("ok", "diverged")}


def _print(tree: dict[str, Any]) -> None:
    console = plain_console()
    words, running = Counter(_words(tree["states"], tree["outcomes"])), tree["running"]
    console.print(f"{tree['grid']}: {tree['cells']} cells: {describe(words)}", markup=False)
    if console.is_terminal and not console.options.ascii_only:
        console.print(bar(words, min(console.width, BAR)))
    variants = {name: _words(each, each["outcomes"]) for name, each in tree["variants"].items()}
    console.print(states_table(variants, words))
    if running:
        begun = [(each["name"], None if each["step"] is None else each) for each in running]
        console.print(running_table(begun))
    if tree["seconds_left"] is not None:
        left = clock(tree["seconds_left"])
        console.print(f"time left: {left} with {len(running)} workers", markup=False)
    for line in waiting_lines(tree["waiting"]):
        console.print(line, markup=False)
    for each in tree["failed"]:
        console.print(f"{each['name']}: {each['error']}", markup=False)
