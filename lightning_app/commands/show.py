"""`ablate show RUN`: what a run is, how it ended and what made it."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_app.ablation.display import clock
from lightning_app.ablation.documents import document
from lightning_app.commands.recorded import described_run, read_run
from lightning_app.grid_axes import label

COMMIT = 12  # shown characters of a commit


def show_command(given: str, *, as_json: bool) -> int:
    """Print what the folder of a run says about it.

    Raises:
        UserError: if there is no such run, or one of its files is damaged.
    """
    with document("show", as_json) as tree:
        tree |= described_run(read_run(given))
    if not as_json:
        lines = list(lines_of(tree))
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            print(f"{name:<{width}}  {value}")
    return 0


def lines_of(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the terminal: a name and a text."""
    axes = [f"{key}={label(value)}" for key, value in run["block"].items()]
    yield "run", run["folder"]
    yield "id", run["id"]
    yield "task", f"{run['task_title']} ({run['task']})"
    yield "block", ", ".join([run["preset"], *axes])
    data = run["data"]
    sizes = ", ".join(f"{size} {split}" for split, size in (data.get("sizes") or {}).items())
    vocabulary = data.get("vocab_size")
    facts = [data["name"], sizes, f"vocabulary {vocabulary}" if vocabulary else ""]
    yield "data", "; ".join(filter(None, facts))
    if data.get("protocol"):
        yield "protocol", data["protocol"]
    yield "seed", str(run["seed"])
    rule = run["outcome_rule"]
    yield "outcome", f"{run['state']} ({rule})" if rule else run["state"]
    if run["error"]:
        yield "error", run["error"]
    if run["steps"] is not None:
        yield "steps", f"{run['steps']} of at most {run['max_steps']}"
    elif run["step"] is not None:
        yield "steps", f"{run['step']} of at most {run['max_steps']} so far"
    for name, value in run["metrics"].items():
        yield name, "not finite" if value is None else f"{value:.6g}"
    if run["tokens"] is not None:
        yield "tokens", f"{run['tokens']:,}"
    if run["parameters"] is not None:
        yield "parameters", f"{run['parameters']:,}"
    if run["seconds"] is not None:
        noun = "attempt" if run["attempts"] == 1 else "attempts"
        yield "time", f"{clock(run['seconds'])} in {run['attempts']} {noun}"
    if run["device"]:
        yield "device", f"{run['device']}, precision {run['precision']}"
    if run["sealed"] is False:
        yield "seal", "none, as results of earlier versions; a change of its files is not found"
    yield "checkpoints", ", ".join(run["checkpoints"]) or "none"
    yield from _made(run["provenance"])


def _made(made: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not made:
        yield "made by", "not recorded"
        return
    commit = f"commit {made['commit'][:COMMIT]}" if made.get("commit") else "no commit recorded"
    changed = " with changes" if made.get("dirty") else ""
    yield "made by", f"version {made.get('package')}, {commit}{changed}, code {made.get('code')}"
    libraries = made.get("libraries") or {}
    yield "libraries", ", ".join(f"{name} {version}" for name, version in libraries.items())
    if made.get("data"):
        yield "data digest", str(made["data"])
    if made.get("resumed_from"):
        yield "resumed", f"{len(made['resumed_from'])} earlier attempts were made by something else"
    if made.get("command"):
        yield "command", " ".join(made["command"])
