"""`ablate results`: the runs of a grid as a table, or the comparison of an axis with a baseline."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_app.commands.options import GRID, Parser, add_experiments
from lightning_app.config.tree import BLOCK, RATE, SEED, WARMUP
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from lightning_app.report.results import GridResults

_IN_WORDS = ("comparable", "why_unlike", "tokens_ratio", "seconds_ratio")
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
    from lightning_app.grids.find_results import found_results
    from lightning_app.report.comparisons import compare_axis, titled, why_apart
    from lightning_app.report.facts import records_of
    from lightning_app.report.results import damaged_files
    from lightning_app.runs.mixtures import unsealed

    with found_results(grid, experiments) as results:
        damaged = damaged_files(results.grid)
        without_seal = unsealed(records_of(results.grid))
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
        what = "runs" if compare is None else "comparisons"
        print(f"{len(short)} {what} of {results.grid.name}")
        if pair is None and (why := why_apart(results.grid)):
            print(f"{titled(results.grid)}: not comparable between all runs, because {why}")
    for line in [*damaged, *filter(None, [without_seal])]:
        print(line, file=sys.stderr)
    return 1 if damaged else 0


def select(frame: "pd.DataFrame", query: str) -> "pd.DataFrame":
    """Return the rows for which a condition in pandas' query language holds.

    Write a column whose name is not an identifier in backticks. A condition on a missing number
    does not hold.

    Raises:
        UserError: if pandas cannot evaluate it, or it is not a condition.
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
    axes = [axis for axis in grid.axes if not axis.startswith(BLOCK)]
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
