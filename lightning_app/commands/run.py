"""The commands of single runs: `fit`, `validate`, `test`, `predict`, `show`, `diff` and `probe`."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_app.commands.options import (
    EXPERIMENTS,
    RUN,
    Parser,
    add_checkpoint,
    add_json,
    add_threads,
)
from lightning_app.commands.recorded import (
    BEST,
    Recorded,
    described_run,
    evaluation_words,
    probed_configs,
    read_run,
)
from lightning_app.config.identity import is_irrelevant, leaves
from lightning_app.config.rulers import differences, ruler
from lightning_app.config.sources import CHECKPOINT, FIELDS_OF, Written
from lightning_app.config.tree import ROOT, cell_setting, label
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError
from lightning_app.grids.display import clock, document, plain_console
from lightning_app.runs.folder import is_file_name
from lightning_app.training.launcher import check_launcher, run_written

_ABSENT = object()


def add_diff(parser: Parser) -> None:
    parser.add("run RUN", RUN)
    parser.add("other RUN", "the run to compare it with")
    add_json(parser)
    parser.set_defaults(call=diff_command)


def diff_command(run: str, other: str, *, as_json: bool) -> int:
    """Print how two runs differ.

    Raises:
        UserError: if there is no such run, or one of its files is damaged.
    """
    with document("diff", as_json) as tree:
        left, right = read_run(run), read_run(other)
        tree |= compare_runs(left, right)
    if not as_json:
        show_difference(plain_console(), tree)
    return 0


def compare_runs(left: Recorded, right: Recorded) -> dict[str, Any]:
    """Return the differences of two runs.

    `config` and `provenance` hold the fields that differ; `counts` tells whether a field of the
    config can be part of an id. `metrics` holds all metrics, each with right minus left; a metric
    that counts different things in the two runs has no difference, and `unlike` gives the reason.
    `reason` states why the ids differ.
    """
    config = [
        {**field, "counts": not is_irrelevant(field["field"])}
        for field in differing(dict(leaves(left.config)), dict(leaves(right.config)))
    ]
    both = (left.outcome.get("metrics") or {}, right.outcome.get("metrics") or {})
    corpora = [run.record.corpus for run in (left, right)]
    # The content of the folder counts, not its place.
    roots = [{ROOT: corpus} if all(corpora) else {} for corpus in corpora]
    settings = [
        cell_setting(root, run.config) for root, run in zip(roots, (left, right), strict=True)
    ]
    return {
        "runs": [str(left.folder), str(right.folder)],
        "ids": [left.id, right.id],
        "same_experiment": left.id == right.id,
        "reason": None if left.id == right.id else left.record.difference(right.record),
        "states": [left.state.word, right.state.word],
        "config": config,
        "provenance": differing(left.made, right.made),
        "metrics": {
            name: _metric(
                both[0].get(name),
                both[1].get(name),
                differences([ruler(setting, name) for setting in settings]),
            )
            for name in sorted({*both[0], *both[1]})
        },
    }


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields whose values differ, or differ in type; an absent field is null."""
    fields = []
    for name in sorted({*left, *right}):
        values = [side.get(name, _ABSENT) for side in (left, right)]
        if _written(values[0]) != _written(values[1]):
            a, b = (None if value is _ABSENT else value for value in values)
            fields.append({"field": name, "left": a, "right": b})
    return fields


def _written(value: Any) -> str:
    return "" if value is _ABSENT else json.dumps(value, sort_keys=True, default=str)


def _metric(left: float | None, right: float | None, unlike: str) -> dict[str, Any]:
    difference = None if left is None or right is None or unlike else right - left
    return {"left": left, "right": right, "difference": difference, "unlike": unlike or None}


def show_difference(console: Console, tree: Mapping[str, Any]) -> None:
    """Print the differences as tables, after a sentence about the ids."""
    line = partial(console.print, soft_wrap=True)
    for side, folder, identity, state in zip(
        ("left", "right"), tree["runs"], tree["ids"], tree["states"], strict=True
    ):
        line(f"{side}: {folder}, id {identity}, {state}")
    if tree["same_experiment"]:
        line(
            "The same experiment: the ids are equal, so nothing in config, blocks or corpus that "
            "can change a result differs. Metrics differ only by what made the runs."
        )
    else:
        why = f": {tree['reason']} (there: left, here: right)" if tree["reason"] else ""
        line(f"Two experiments: the ids differ{why}.")
    fields = [
        (row["field"], label(row["left"]), label(row["right"]), "" if row["counts"] else "no")
        for row in tree["config"]
    ]
    _table(console, "config", ("left", "right", "counts"), fields)
    made = [(row["field"], _shown(row["left"]), _shown(row["right"])) for row in tree["provenance"]]
    _table(console, "made by", ("left", "right"), made)
    metrics = [
        (name, *(_number(row[side], "") for side in ("left", "right")), _number(row["difference"]))
        for name, row in tree["metrics"].items()
    ]
    _table(console, "metric", ("left", "right", "right - left"), metrics)
    for why in dict.fromkeys(row["unlike"] for row in tree["metrics"].values() if row["unlike"]):
        names = [name for name, row in tree["metrics"].items() if row["unlike"] == why]
        line(f"not comparable: {', '.join(names)}, because {why}")


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    if not rows:
        console.print(f"{title}: no difference" if title != "metric" else "metric: none recorded")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _shown(value: Any) -> str:
    return "not recorded" if value is None else label(value)


def _number(value: float | None, sign: str = "+") -> str:
    return "-" if value is None else f"{value:{sign}.6g}"


COMMIT = 12  # characters of a commit to show


def add_show(parser: Parser) -> None:
    parser.add("run RUN", RUN)
    add_json(parser)
    parser.set_defaults(call=show_command)


def show_command(run: str, *, as_json: bool) -> int:
    """Print what the folder of a run records about it.

    Raises:
        UserError: if there is no such run, or one of its files is damaged.
    """
    with document("show", as_json) as tree:
        tree |= described_run(read_run(run))
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
    yield "grids", ", ".join(f"{grid}/{name}" for grid, name in run["grids"].items()) or "none"
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


def add_fit(parser: Parser) -> None:
    parser.add("--name NAME", "the run's name in experiments/fit/runs (default: from its config)")
    parser.add("--again", "retrain a finished run; the earlier one is kept in the store")
    add_threads(parser)
    parser.set_defaults(call=partial(lightning_command, parser))


def add_evaluation(parser: Parser) -> None:
    """Accept a run in place of a config and a checkpoint; config fields remain possible."""
    parser.add("--run RUN", f"{RUN}; only evaluation options may follow")
    add_checkpoint(parser, None, "best with --run")
    add_threads(parser)
    parser.set_defaults(call=partial(lightning_command, parser))


def lightning_command(
    parser: Parser,
    words: Sequence[str],
    *,
    run: str | None = None,
    checkpoint: str | None = None,
    again: bool = False,
    name: str | None = None,
) -> int:
    """Run a command with Lightning's Trainer; `words` are the fields of its config.

    `run` replaces a config and a checkpoint; with `again` a finished run is trained
    again; `name` is its name. Raises `UserError` for a mistake in the call, a config or a
    checkpoint.
    """
    command = parser.command
    if run is not None:
        words = evaluation_words(run, checkpoint or BEST, words)
    elif checkpoint is not None:
        raise UserError(
            f"--checkpoint {checkpoint}: needs --run RUN; with --config use --ckpt_path"
        )
    if name is not None and (not is_file_name(name) or name.startswith(".")):
        raise UserError(f"--name: expected the name of a folder, found {name!r}")
    check_launcher(os.environ)
    written = Written(words, FIELDS_OF[command])
    if "help" in written.asked:
        from lightning_app.commands.config_help import config_help

        print(config_help(command, parser.format_help(), written.asked["help"]))
        return 0
    # The config of a run from elsewhere may not name code; that of --config is the user's own.
    imports = run is None
    if "print_config" in written.asked:
        from lightning_app.config.config import load_config, without_links

        tree = load_config(written, imports=imports, trains=command == "fit")
        print(strict_yaml.dump_yaml(without_links(tree), allow_unicode=True), end="")
        return 0
    _check_checkpoint(command, written)
    with ExitStack() as around:
        if command == "predict":
            # Standard output is only for predictions: Lightning's bars and tables go elsewhere.
            around.enter_context(redirect_stdout(sys.stderr))
        if run is not None:
            around.enter_context(_as_typed())
        done = run_written(command, written, imports=imports, again=again, name=name)
    for line in done.predictions:
        print(line)
    return 0


def _check_checkpoint(command: str, written: Written) -> None:
    """Refuse a missing or unnamed checkpoint, as the run itself would."""
    checkpoint = written.fields.get(CHECKPOINT)
    if command != "fit" and checkpoint is None:
        raise UserError(f"{command}: --ckpt_path is needed: a file, 'last' or 'best'")
    if checkpoint not in (None, "last", "best") and not Path(checkpoint).is_file():
        raise UserError(f"--ckpt_path {checkpoint}: there is no file {checkpoint}")


@contextmanager
def _as_typed() -> Iterator[None]:
    """Name the option of ``--run`` in messages: --checkpoint is passed as --ckpt_path."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--ckpt_path", "--checkpoint")) from error


def add_probe(parser: Parser) -> None:
    text = "a run's config; several give one curve each; overrides may follow, as for fit"
    parser.add("--config FILE", text, action="append")
    parser.add("--run RUN", f"instead of --config: {RUN}", action="append")
    add_checkpoint(parser, None, "best with --run, initial values with --config")
    add_threads(parser)
    parser.add("--batches N", "validation batches (default: 4)")
    text = "also measure the top eigenvalue of the Adam-preconditioned Hessian"
    parser.add("--sharpness", text)
    parser.add("--theory", "test the lemmas and the theorem of Xiong et al. instead")
    parser.add("--out DIR", "output folder (default: one in experiments/probe)")
    parser.set_defaults(call=probe_command)


def probe_command(
    config: Sequence[Path] | None,
    run: Sequence[str] | None,
    overrides: Sequence[str],
    *,
    checkpoint: str | None,
    batches: int | None,
    sharpness: bool,
    theory: bool,
    out: Path | None,
) -> int:
    """Probe the models of configs or runs, or test the theory.

    Raises `UserError` for a mistake in the call, a config or a checkpoint, before slow imports.
    """
    if theory:
        if any((config, run, overrides, checkpoint, batches, sharpness)):
            raise UserError("probe: --theory has its own setting and takes only --out")
        from lightning_app.lab.theory.run import run_theory

        return run_theory(out or EXPERIMENTS / "probe" / "theory")
    if run and config:
        raise UserError(f"--config {config[0]}: --run names the config already; use one")
    if run:
        checkpoint = checkpoint or BEST
        config = probed_configs(run, checkpoint, overrides)
    if not config:
        raise UserError("probe: --config FILE is needed, or --run RUN, or --theory")
    batches = 4 if batches is None else batches
    if batches < 1:
        raise UserError(f"probe: --batches {batches}: expected at least 1")
    for file in config:
        Written(["--config", str(file), *overrides])  # find mistakes before importing torch
    from lightning_app.config.config import read_config

    trees = [read_config(file, overrides) for file in config]  # before Lightning
    from lightning_app.commands.probe import probe_models

    return probe_models(config, trees, checkpoint, batches, sharpness=sharpness, out=out)
