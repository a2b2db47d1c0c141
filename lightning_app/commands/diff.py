"""`ablate diff RUN RUN`: how the configs, what made them and the metrics of two runs differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_app.ablation.display import plain_console
from lightning_app.ablation.documents import document
from lightning_app.commands.recorded import Recorded, read_run
from lightning_app.grid_axes import ROOT, cell_setting, label
from lightning_app.identity.relevant import is_irrelevant, leaves
from lightning_app.rulers import differences, ruler

_ABSENT = object()


def diff_command(given: Sequence[str], *, as_json: bool) -> int:
    """Print how two runs differ.

    Raises:
        UserError: if there is no such run, or one of its files is damaged.
    """
    with document("diff", as_json) as tree:
        left, right = map(read_run, given)
        tree |= compare_runs(left, right)
    if not as_json:
        show_difference(plain_console(), tree)
    return 0


def compare_runs(left: Recorded, right: Recorded) -> dict[str, Any]:
    """Return the differences of two runs.

    `config` and `provenance` hold the fields that differ; `counts` says whether a field of the
    config can be part of an id. `metrics` holds all, each with right minus left; where it counts
    other things in the two runs it has no difference, and `unlike` says why.
    """
    config = [
        {**field, "counts": not is_irrelevant(field["field"])}
        for field in differing(dict(leaves(left.config)), dict(leaves(right.config)))
    ]
    both = (left.outcome.get("metrics") or {}, right.outcome.get("metrics") or {})
    corpora = [run.record.corpus for run in (left, right)]
    # What the folder holds counts, not where it lies.
    roots = [{ROOT: corpus} if all(corpora) else {} for corpus in corpora]
    settings = [
        cell_setting(root, run.config) for root, run in zip(roots, (left, right), strict=True)
    ]
    return {
        "runs": [str(left.folder), str(right.folder)],
        "ids": [left.id, right.id],
        "same_experiment": left.id == right.id,
        "reason": why_unlike(left, right),
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
    """Return the fields whose values differ, also in type; an absent one is null."""
    found = []
    for name in sorted({*left, *right}):
        values = [side.get(name, _ABSENT) for side in (left, right)]
        if _written(values[0]) != _written(values[1]):
            a, b = (None if value is _ABSENT else value for value in values)
            found.append({"field": name, "left": a, "right": b})
    return found


def _written(value: Any) -> str:
    return "" if value is _ABSENT else json.dumps(value, sort_keys=True, default=str)


def _metric(left: float | None, right: float | None, unlike: str) -> dict[str, Any]:
    difference = None if left is None or right is None or unlike else right - left
    return {"left": left, "right": right, "difference": difference, "unlike": unlike or None}


def why_unlike(left: Recorded, right: Recorded) -> str | None:
    """Return in words why two ids differ, None where they are equal."""
    return None if left.id == right.id else left.record.difference(right.record)


def show_difference(console: Console, tree: Mapping[str, Any]) -> None:
    """Print the differences as tables, with a sentence about the ids first."""

    def line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

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
        table.add_row(*map(Text, row))
    console.print(table)


def _shown(value: Any) -> str:
    return "not recorded" if value is None else label(value)


def _number(value: float | None, sign: str = "+") -> str:
    return "-" if value is None else f"{value:{sign}.6g}"
