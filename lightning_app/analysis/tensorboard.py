"""The TensorBoard index of a grid: one HParams table with all cells, one custom-scalars layout.

The trainer's event files hold the curves. This module adds one event file at the root of the grid
(the columns of the table, the layout) and one in each run folder (the cell's parameters and status;
once finished its final metrics, at its last step, and its loss curves once more under tags that
name variant and warm-up). The second copy is needed because a chart of the custom-scalars plugin
picks tags by a regular expression over all runs and cannot pick runs: only through the tag can a
chart show one variant.

A file is named by what it holds. Writing again changes nothing where nothing has changed, and
replaces the file where something has. TensorBoard keeps the first parameters that it reads of a
session, so the `status` column stays empty until the run has finished (its state is in the session
status at all times), and a server that was open when a failed cell was run again shows the old
status until it is restarted.
"""

# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.

import hashlib
import io
import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.runs import LOSS, Cell, Grid, curve, label, read_grid
from lightning_app.files import write_whole

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

SUFFIX = ".index"
FIRST, LAST = "0000000000", "9999999999"  # where a file name has its time
CURVES = ("train/nll", LOSS)
POINTS = 500  # of one copied curve, at most
DIVERGED = "diverged"  # 0 or 1, beside the metrics
ALWAYS = (LOSS, "val/perplexity", "val/accuracy")
HEALTH = {
    "train/grad_norm": "gradient norm",
    "train/tokens_per_second": "tokens per second",
    "train/data_wait_share": "share of the time spent waiting for data",
    "train/lr": "learning rate",
}
FIELDS = {"BOOL": "bool_value", "FLOAT64": "number_value", "STRING": "string_value"}
TESTED = ("test/nll", "test/bleu", "test/sacrebleu")


def write_index(grid_dir: Path, only_new: bool = False) -> None:
    """Bring the event files of the index up to date with the run folders.

    With `only_new`, finished cells whose file is newer than their result and the plan are not
    looked at: what a supervisor has the time for, every now and then.
    """
    grid = read_grid(grid_dir)
    tags = metric_tags(grid)
    planned = (grid.folder / "plan.json").stat().st_mtime
    _replace(grid.folder, 0.0, [(0, _experiment(grid, tags)), (0, _layout(grid))])
    for cell in grid.cells:
        if cell.state != "waiting" and not (only_new and _is_indexed(cell, planned)):
            _replace(cell.folder, _finished(cell), _session(grid, tags, cell))


def _is_indexed(cell: Cell, planned: float) -> bool:
    """Whether a finished cell has a file that was written after its result and the plan."""
    if not cell.finished:
        return False
    newest = max(planned, (cell.folder / "result.json").stat().st_mtime)
    files = cell.folder.glob(f"events.out.tfevents.{LAST}.*{SUFFIX}")
    return any(path.stat().st_mtime > newest for path in files)


def metric_tags(grid: Grid) -> list[str]:
    """Metric columns: what the task always reports, then whatever else a finished run holds."""
    expected = list(ALWAYS)
    if grid.setting("model.objective.kind") == "translation":
        tested = grid.setting("model.objective.evaluate_test")
        expected = [LOSS, "val/perplexity", *(TESTED if tested else ())]
    found = {tag for cell in grid.finished for tag in cell.metrics if tag[:4] in ("val/", "test")}
    return [*expected, *sorted(found - set(expected))]


def _experiment(grid: Grid, tags: Sequence[str]) -> "Summary":
    """The columns of the HParams table, the same for every cell."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    experiment = api_pb2.Experiment(name=grid.name, description=grid.question)
    columns: dict[str, Sequence[Any]] = {"variant": grid.variants, **grid.axes}
    columns["status"] = ("ok", "diverged", "failed", *(["pruned"] if grid.pruner else []))
    for name, values in columns.items():
        present = [value for value in values if value is not None]
        info = experiment.hparam_infos.add(
            name=name,
            display_name=_short(name, columns),
            type=getattr(api_pb2, f"DATA_TYPE_{_kind(present)}"),
            differs=len(values) > 1,
        )
        for value in dict.fromkeys(_typed(value, present) for value in present):
            item = info.domain_discrete.values.add()
            setattr(item, FIELDS[_kind(present)], value)
    for tag in [*tags, DIVERGED]:
        info = experiment.metric_infos.add(display_name=tag)
        info.name.tag = tag
    return _hparams(
        metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)
    )


def _session(grid: Grid, tags: Sequence[str], cell: Cell) -> "list[tuple[int, Summary]]":
    """Parameters, status and, once there is a result, metrics and curves of one cell, by step."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=_seconds(cell.record.get("started")))
    start.hparams["variant"].string_value = cell.variant
    for name, value in cell.axes.items():
        values = [each for each in grid.axes[name] if each is not None]
        if value is not None:
            setattr(start.hparams[name], FIELDS[_kind(values)], _typed(value, values))
    if cell.state != "unfinished":
        start.hparams["status"].string_value = cell.state
    data = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    events = [(0, _hparams(metadata.SESSION_START_INFO_TAG, data))]
    if cell.state == "unfinished":
        return events
    end = plugin_data_pb2.SessionEndInfo(
        status=api_pb2.STATUS_FAILURE if cell.state == "failed" else api_pb2.STATUS_SUCCESS,
        end_time_secs=_finished(cell),
    )
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    events.append((0, _hparams(metadata.SESSION_END_INFO_TAG, data)))
    if not cell.finished:
        return events
    last = int(cell.record.get("steps") or 0)
    finals = {tag: cell.metrics[tag] for tag in tags if tag in cell.metrics}
    finals[DIVERGED] = float(cell.state == "diverged")
    scalars = [
        (step, f"{_curves(cell.variant)}warmup_{cell.warmup or 0}/{tag}", value)
        for tag in CURVES
        for step, value in _thinned(cell, tag)
    ]
    scalars += [(last, tag, math.nan if value is None else value) for tag, value in finals.items()]
    return events + [
        (step, Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
        for step, tag, value in scalars
    ]


def _layout(grid: Grid) -> "Summary":
    """Custom scalars: "Warm-up" (a chart for each variant and loss) and "Health" (all runs)."""
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    layout = layout_pb2.Layout()
    warmup = layout.category.add(title="Warm-up")
    for tag in reversed(CURVES):
        for variant in grid.variants:
            chart = warmup.chart.add(title=f"{variant}: {tag} by warm-up, finished runs")
            chart.multiline.tag.append(rf"^{re.escape(_curves(variant))}warmup_\d+/{tag}$")
    health = layout.category.add(title="Health")
    for tag, title in HEALTH.items():
        chart = health.chart.add(title=f"{title}, all runs")
        chart.multiline.tag.append(f"^{tag}$")
    return _tensor(metadata.CONFIG_SUMMARY_TAG, metadata.PLUGIN_NAME, layout.SerializeToString())


def _hparams(tag: str, data: "HParamsPluginData") -> "Summary":
    from tensorboard.plugins.hparams import metadata

    data.version = metadata.PLUGIN_DATA_VERSION
    return _tensor(tag, metadata.PLUGIN_NAME, b"", data.SerializeToString())


def _tensor(tag: str, plugin: str, content: bytes, data: bytes = b"") -> "Summary":
    """A summary that holds one byte string (or nothing) and the data of a plugin."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

    kind = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin, content=data)
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
        string_val=[content],
    )
    described = summary_pb2.SummaryMetadata(
        plugin_data=kind, data_class=summary_pb2.DATA_CLASS_TENSOR
    )
    value = summary_pb2.Summary.Value(tag=tag, metadata=described, tensor=tensor)
    return summary_pb2.Summary(value=[value])


def _replace(folder: Path, wall_time: float, events: "Iterable[tuple[int, Summary]]") -> None:
    """Leave exactly one index file in the folder, the one with these events.

    TensorBoard reads the files of a folder by name and does not come back to an earlier one, and a
    smaller step makes it forget the greater ones. So the file stands before the trainer's as long
    as that one may grow (no `wall_time`), and after it when the run has finished.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    writer.write(Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())
    for step, summary in events:
        event = Event(wall_time=wall_time, step=step, summary=summary)
        writer.write(event.SerializeToString(deterministic=True))
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:12]
    path = folder / f"events.out.tfevents.{LAST if wall_time else FIRST}.{digest}{SUFFIX}"
    if not path.is_file():
        write_whole(path, buffer.getvalue())
    for old in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        if old != path:
            old.unlink(missing_ok=True)


def _thinned(cell: Cell, tag: str) -> list[tuple[int, float]]:
    points = [point for point in zip(*curve(cell, tag), strict=True) if math.isfinite(point[1])]
    stride = math.ceil(len(points) / POINTS) or 1
    return points[::-1][::stride][::-1]


def _curves(variant: str) -> str:
    return f"curves/{variant}/"


def _finished(cell: Cell) -> float:
    return _seconds(cell.record.get("finished"))


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
