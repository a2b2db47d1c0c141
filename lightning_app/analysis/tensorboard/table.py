"""The HParams table: its columns, and the row of each cell."""

# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata

from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.metric import titled
from lightning_app.analysis.tensorboard.summaries import tensor
from lightning_app.grid_axes import label
from lightning_app.records import OUTCOMES
from lightning_app.task_facts import LOSS, task_facts

DELTA = "delta"
"""Nats per token that a cell loses against its reference run (`reference_cells`)."""
REPORTED = ("val/accuracy",)
"""Scores that every run reports, with any config."""
LEFT_OUT = ("test/perplexity", "test/accuracy")
"""Metrics that the table omits: a run has at most 40 tags."""
_END = {"failed": "FAILURE", "damaged": "UNKNOWN"}  # by state
FIELDS = {"BOOL": "bool_value", "FLOAT64": "number_value", "STRING": "string_value"}


def metric_tags(grid: GridResults) -> list[str]:
    """Metric columns: those that the task always reports, then all others of finished runs."""
    tested = grid.setting("model.objective.evaluate_test")
    scores = [score.metric for score in task_facts(grid.setting("model.objective.kind")).scores]
    expected = [LOSS, "val/perplexity", *(["test/nll"] if tested else [])]
    expected += [tag for tag in scores if tested and tag.startswith("test/")]
    expected += [tag for tag in scores if tag in REPORTED]
    found = {tag for cell in grid.finished for tag in cell.metrics if tag[:4] in ("val/", "test")}
    tags = [*expected, *sorted(found - {*expected, *LEFT_OUT})]
    return list(dict.fromkeys([grid.metric, *tags]))  # the metric of the grid comes first


def reference_cells(grid: GridResults) -> dict[str, CellResult]:
    """The reference cell of each cell by id, if the grid has one.

    It has the same variant, rate, seed and other axes, and the grid's reference warm-up; a
    reference cell is its own reference.
    """

    def twin(cell: CellResult) -> tuple[Any, ...]:
        return cell.variant, cell.lr, cell.group, cell.seed

    wanted = grid.reference_warmup
    if wanted is None:
        return {}
    found = {twin(cell): cell for cell in grid.cells if cell.warmup == wanted}
    return {cell.id: found[twin(cell)] for cell in grid.cells if twin(cell) in found}


def loss_difference(cell: CellResult, reference: CellResult | None) -> float:
    """`l(cell) - l(reference)`, nats per token, 0 for the reference itself (`CellResult.loss`).

    NaN if one of them has no finite loss, or if the reference stalled: the loss without warm-up
    cannot be compared if the variant learns nothing with it.
    """
    if reference is None or reference.state != "ok":
        return math.nan
    return cell.loss - reference.loss


def experiment(grid: GridResults, tags: Sequence[str], question: str) -> Summary:
    """The columns of the table, the same for every cell."""
    described = api_pb2.Experiment(name=grid.name, description=question)
    columns: dict[str, Sequence[Any]] = {"variant": grid.variants, **grid.axes}
    columns["status"] = ("ok", "diverged", "failed", *(["pruned"] if grid.pruner else []))
    columns["status"] += tuple({cell.state for cell in grid.cells} & {"damaged"})
    columns["outcome"] = tuple(OUTCOMES.values())
    for name, values in columns.items():
        present = [value for value in values if value is not None]
        info = described.hparam_infos.add(
            name=name,
            display_name=_short(name, columns),
            type=getattr(api_pb2, f"DATA_TYPE_{_kind(present)}"),
            differs=len(values) > 1,
        )
        for value in dict.fromkeys(_typed(value, present) for value in present):
            item = info.domain_discrete.values.add()
            setattr(item, FIELDS[_kind(present)], value)
    compared = [] if grid.reference_warmup is None else [DELTA]
    for tag in [*compared, *tags]:
        info = described.metric_infos.add(display_name=tag)
        info.name.tag = tag
        if tag == grid.metric:
            info.display_name = f"{titled(grid)} (the grid's metric)"
    return _hparams(
        hparams_metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=described)
    )


def started(grid: GridResults, cell: CellResult) -> Summary:
    """The parameters of a cell in the types of their columns, without missing values."""
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=_seconds(cell.record.get("started")))
    start.hparams["variant"].string_value = cell.variant
    for name, value in cell.axes.items():
        values = [each for each in grid.axes[name] if each is not None]
        if value is not None:
            setattr(start.hparams[name], FIELDS[_kind(values)], _typed(value, values))
    if cell.state != "unfinished":
        start.hparams["status"].string_value = cell.state
    if cell.finished:
        start.hparams["outcome"].string_value = cell.word
    data = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    return _hparams(hparams_metadata.SESSION_START_INFO_TAG, data)


def ended(cell: CellResult) -> Summary:
    """How a cell that no longer runs has ended."""
    end = plugin_data_pb2.SessionEndInfo(
        status=getattr(api_pb2, f"STATUS_{_END.get(cell.state, 'SUCCESS')}"),
        end_time_secs=finished_at(cell),
    )
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    return _hparams(hparams_metadata.SESSION_END_INFO_TAG, data)


def final_metrics(
    cell: CellResult, tags: Sequence[str], reference: CellResult | None
) -> dict[str, float]:
    """The metrics of a finished cell by column: NaN if not finite, omitted if not defined."""
    finals: dict[str, float] = {}
    for tag in tags:
        if tag in cell.metrics:
            value = cell.metrics[tag]
            finals[tag] = math.nan if value is None else value
    lost = loss_difference(cell, reference)
    if math.isfinite(lost):
        finals[DELTA] = lost
    return finals


def finished_at(cell: CellResult) -> float:
    """When a cell finished, in seconds since 1970; 0 before."""
    return _seconds(cell.record.get("finished"))


def _hparams(tag: str, data: plugin_data_pb2.HParamsPluginData) -> Summary:
    data.version = hparams_metadata.PLUGIN_DATA_VERSION
    return tensor(tag, hparams_metadata.PLUGIN_NAME, b"", data.SerializeToString(deterministic=True))


def _seconds(time: str | None) -> float:
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def _kind(values: Iterable[Any]) -> str:
    """The one type of a column: every value must fit, so mixed values are strings."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return "BOOL"
    return "FLOAT64" if kinds and kinds <= {int, float} else "STRING"


def _typed(value: Any, values: Iterable[Any]) -> Any:
    return label(value) if _kind(values) == "STRING" else value


def _short(name: str, names: Iterable[str]) -> str:
    """The shortest end of a dotted name that no other column shares."""
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in reversed(range(len(parts)))]
    others = [f".{other}" for other in names if other != name]
    return next((end for end in ends if not any(o.endswith(f".{end}") for o in others)), name)
