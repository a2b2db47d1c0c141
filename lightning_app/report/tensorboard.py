"""The TensorBoard index of a grid: one HParams table with all cells, three custom-scalars pages.

The trainer's event files hold the curves, the pictures and the histograms. This package adds one
event file in each run folder: the cell's parameters and status, and a text with the question, the
config and the resolved block; once finished also its final metrics, at its last step, and its loss
curves once more under tags that name variant and warm-up. The second copy is needed because a chart
of the custom-scalars plugin picks tags by a regular expression over all runs and cannot pick runs:
only through the tag can a chart show one variant.

The columns of the table and the layout of the pages are in the file of the first run that has
begun. In a file at the root of the grid they would count as one more run, and with more than 40
TensorBoard shows none in most of its tabs until runs are ticked.

Writing again replaces only files whose content has changed. TensorBoard keeps the first parameters
that it reads of a session, so the `status` column stays
empty until the run has finished (its state is in the session status at all times), and a server
that was open when a failed cell was run again shows the old status until it is restarted.
"""

import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_app.config.rulers import differences, names_of, ruler
from lightning_app.config.tree import label
from lightning_app.core.files import write_whole
from lightning_app.report.comparisons import titled
from lightning_app.report.results import CellResult, GridResults, read_mapping, read_results
from lightning_app.runs.folder import DRAWING, METRICS
from lightning_app.runs.records import OUTCOMES, column_names
from lightning_app.scores.task_facts import LOSS, task_facts


def tensorboard_path(folder: Path) -> str:
    """The path below the server's root at which TensorBoard serves the grid of a folder."""
    return f"/tensorboard/{quote(folder.resolve().name)}/"


def run_url(base: str, cell: CellResult) -> str:
    """The address that opens TensorBoard with this run alone.

    `base` is the address of the server, ``http://127.0.0.1:6006``. The tab Time series uses
    `runFilter`; the other tabs use `regexInput`, which they share. With more than 500 runs
    TensorBoard selects no run by itself, and the user must tick the one that Time series lists.
    """
    name = re.sub(r"[^\w-]", r"\\\g<0>", cell.name)
    pattern = quote(f"runs/{name}$", safe="")
    return f"{base.rstrip('/')}/?runFilter={pattern}#timeseries&regexInput={pattern}"


# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.


SUFFIX = ".index"
FIRST, LAST = "0000000000", "9999999999"  # instead of the time in a file name


def scalar(tag: str, value: float) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def markdown_summary(tag: str, text: str) -> Summary:
    """A text of the Text tab."""
    return tensor(tag, "text", text.encode())


def tensor(tag: str, plugin: str, content: bytes, data: bytes = b"") -> Summary:
    """A summary that holds one byte string (or nothing) and the data of a plugin."""
    kind = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin, content=data)
    held = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
        string_val=[content],
    )
    described = summary_pb2.SummaryMetadata(
        plugin_data=kind, data_class=summary_pb2.DATA_CLASS_TENSOR
    )
    return Summary(value=[Summary.Value(tag=tag, metadata=described, tensor=held)])


def replace(
    folder: Path, wall_time: float, events: Iterable[tuple[int, Summary]], mark: str = ""
) -> None:
    """Write one index file with these events, ordered by step, and remove all others.

    The name of the file has a number that grows with each replacement, the digest of its content
    and `mark`. TensorBoard reads the files of a folder in the order of their names and never
    returns to an earlier one, and a smaller step makes it forget the larger ones. So the file comes
    before that of the trainer while that may grow (no `wall_time`), and after it when the run has
    finished.
    """
    found = list(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
    content = _records(wall_time, events)
    digest = hashlib.sha256(content).hexdigest()[:12]
    place = f"events.out.tfevents.{LAST if wall_time else FIRST}."
    end = f"-{digest}{mark}{SUFFIX}"
    same = [path for path in found if re.fullmatch(rf"{place}\d+{end}", path.name)]
    if same:
        kept = max(same)
    else:
        numbers = [re.search(r"\.(\d+)-[0-9a-f]+\.", path.name) for path in found]
        number = 1 + max((int(match[1]) for match in numbers if match), default=0)
        kept = folder / f"{place}{number:06d}{end}"
        write_whole(kept, content)
    for old in found:
        if old != kept:
            old.unlink(missing_ok=True)


def _records(wall_time: float, events: Iterable[tuple[int, Summary]]) -> bytes:
    """An event file."""
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    writer.write(Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())
    for step, summary in events:
        event = Event(wall_time=wall_time, step=step, summary=summary)
        writer.write(event.SerializeToString(deterministic=True))
    return buffer.getvalue()


FENCE = "```"


def question_of(grid: GridResults) -> str:
    """The question, and the metrics by which no ranking of all runs is possible."""
    said = [
        f"Do not rank all runs by {metric}: it counts other things where {why}."
        for metric in dict.fromkeys([grid.metric, grid.monitored.loss])
        if (why := differences([ruler(cell.setting, metric) for cell in grid.cells]))
    ]
    question = grid.question or "No question is written in the grid file."
    return "\n\n".join([question, *said])


def run_text(cell: CellResult, question: str) -> str:
    """One Markdown text. A run that has not ended has no resolved block yet.

    `serve.Site` answers the link to the drawing; a TensorBoard of its own shows only its path.
    """
    parts = [f"# {cell.name}", question]
    config = cell.folder / "config.yaml"
    if config.is_file():
        text = config.read_text(encoding="utf-8", errors="replace").strip()
        parts += ["## Config", f"{FENCE}yaml\n{text}\n{FENCE}"]
    if (cell.folder / DRAWING).is_file():
        path = f"runs/{cell.folder.name}/{DRAWING}"
        parts.append(f"Drawing of the block: [{path}]({quote(path)})")
    block = cell.run.sound("block.json")
    if block is not None:
        parts.append("## Resolved block")
        parts += [part for side, spec in read_mapping(block).items() for part in _stack(side, spec)]
    return "\n\n".join(parts) + "\n"


def _stack(side: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """A table of one stack: a row for each field, a column for consecutive equal layers.

    An encoder reads no field of cross-attention.
    """
    blocks = [
        {key: value for key, value in block.items() if side == "decoder" or "cross" not in key}
        for block in spec.get("blocks") or []
    ]
    around = {key: value for key, value in spec.items() if key != "blocks"}
    yield f"### {side.capitalize()}"
    if around:
        yield ", ".join(f"{key} `{value}`" for key, value in _fields(around))
    runs = [list(same) for _, same in groupby(enumerate(blocks, 1), key=lambda pair: pair[1])]
    layers = [(run[0][0], run[-1][0]) for run in runs]
    columns = [dict(_fields(run[0][1])) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    heads = [f"layer {a}" if a == b else f"layers {a}-{b}" for a, b in layers]
    rows = [["field", *heads], ["---"] * (1 + len(heads))]
    rows += [[f"`{name}`", *(column.get(name, "") for column in columns)] for name in names]
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _fields(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and short values of all leaves of a tree."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", label(value)


CURVES = ("train/nll", LOSS)
HEALTH = {
    "train/grad_norm": "gradient norm",
    "train/tokens_per_second": "tokens per second",
    "train/data_wait_share": "share of the time spent waiting for data",
    "train/lr": "learning rate",
}
INSIDE = {
    "token_cosine": "mean cosine of the tokens of a sentence, last layer (1: all alike)",
    "output_information": "information in the output, nats (0: equal for every input)",
    "w2_gradient": "gradient norm of the feed-forward's W2, last layer",
    "alpha": "alpha, gain of the identity, by layer",
    "beta": "beta, gain of the attention map, by layer",
    "gamma": "gamma, gain of the centre, by layer",
}
"""Titles of probed quantities; a quantity that is missing here is a learned gain."""


def layout(grid: GridResults) -> Summary:
    """The pages: a chart for each variant and loss, the tags of all runs, and the probed ones."""
    pages = layout_pb2.Layout()
    warmup = pages.category.add(title="Warm-up")
    variants = [cell.variant for cell in grid.cells]
    for tag in reversed(CURVES):
        for variant, kind in dict.fromkeys(zip(variants, rulers_of(grid), strict=True)):
            of = f", {kind}" if kind else ""
            chart = warmup.chart.add(title=f"{variant}{of}: {tag} by warm-up, finished runs")
            chart.multiline.tag.append(rf"^{re.escape(_curves(variant, kind))}warmup_\d+/{tag}$")
    health = pages.category.add(title="Health")
    for tag, title in HEALTH.items():
        chart = health.chart.add(title=f"{title}, all runs")
        chart.multiline.tag.append(f"^{tag}$")
    probed = _probed(grid)
    if probed:
        inside = pages.category.add(title="Inside the blocks")
        for quantity in probed:
            gain = f"learned gain {quantity.replace('_', ' ')}, by layer"
            chart = inside.chart.add(title=INSIDE.get(quantity, gain))
            chart.multiline.tag.append(f"^probe/{re.escape(quantity)}/")
    return tensor(
        metadata.CONFIG_SUMMARY_TAG,
        metadata.PLUGIN_NAME,
        pages.SerializeToString(deterministic=True),
    )


def rulers_of(grid: GridResults) -> list[str]:
    """What the loss counts in each cell, where it counts other things in others: no chart has both.

    It is what the configs say, as a plan of charts is written before the results are there.
    """
    return names_of([ruler(cell.setting, cell.monitored.loss) for cell in grid.cells])


def curve_tag(cell: CellResult, tag: str, kind: str) -> str:
    """The tag of the second copy of the curve of a finished run, one of `rulers_of`."""
    return f"{_curves(cell.variant, kind)}warmup_{cell.warmup or 0}/{tag}"


def _curves(variant: str, kind: str) -> str:
    return f"curves/{variant}/{f'{kind}/' if kind else ''}"


def _probed(grid: GridResults) -> list[str]:
    """The quantities that some finished run has logged, those of `INSIDE` first."""
    found = {
        tag.split("/")[1]
        for cell in grid.finished
        for tag in column_names(cell.folder / METRICS)
        if tag.startswith("probe/") and tag.count("/") > 1
    }
    return [*(name for name in INSIDE if name in found), *sorted(found - INSIDE.keys())]


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
    return tensor(
        tag, hparams_metadata.PLUGIN_NAME, b"", data.SerializeToString(deterministic=True)
    )


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


POINTS = 500  # points of one copied curve, at most
TEXT = "run"
WHOLE = ".grid"
"""Marks the file that also has the parts for the whole grid."""


def write_index(grid_dir: Path, only_new: bool = False) -> None:
    """Bring the event files of the index up to date with the run folders.

    The file of the first cell that has begun also holds the table's columns and the pages. With
    `only_new`, other finished cells are skipped if their file is newer than the plan, their result
    and that of their reference run. This is fast enough for a supervisor.
    """
    grid = read_results(grid_dir)
    tags, compared = metric_tags(grid), reference_cells(grid)
    question = question_of(grid)
    kinds = {cell.id: name for cell, name in zip(grid.cells, rulers_of(grid), strict=True)}
    for old in grid.folder.glob(f"events.out.tfevents.*{SUFFIX}"):  # of earlier versions
        old.unlink(missing_ok=True)
    begun = [cell for cell in grid.cells if cell.state != "waiting"]
    for cell in begun[:1]:
        whole = [(0, experiment(grid, tags, question)), (0, layout(grid))]
        events = whole + _events(grid, tags, cell, compared, kinds[cell.id], question)
        replace(cell.folder, finished_at(cell), events, mark=WHOLE)
    for cell in begun[1:]:
        if not (only_new and _is_indexed(grid, cell, compared)):
            events = _events(grid, tags, cell, compared, kinds[cell.id], question)
            replace(cell.folder, finished_at(cell), events)


def _is_indexed(grid: GridResults, cell: CellResult, compared: Mapping[str, CellResult]) -> bool:
    """Whether a finished cell has an index file that is newer than all of its sources."""
    if not cell.finished:
        return False
    sources = [grid.folder / "plan.json", cell.folder / "result.json"]
    other = compared.get(cell.id)
    if other is not None and other.finished:
        sources.append(other.folder / "result.json")
    newest = max(path.stat().st_mtime for path in sources)
    files = [
        path
        for path in cell.folder.glob(f"events.out.tfevents.{LAST}.*{SUFFIX}")
        if not path.name.endswith(WHOLE + SUFFIX)  # now an earlier cell has begun
    ]
    return any(path.stat().st_mtime > newest for path in files)


def _events(
    grid: GridResults,
    tags: Sequence[str],
    cell: CellResult,
    compared: Mapping[str, CellResult],
    kind: str,
    question: str,
) -> list[tuple[int, Summary]]:
    """Parameters, status, text and, once there is a result, curves and metrics of one cell."""
    events = [(0, started(grid, cell)), (0, markdown_summary(TEXT, run_text(cell, question)))]
    if cell.state == "unfinished":
        return events
    events.append((0, ended(cell)))
    if not cell.finished:
        return events
    events += [
        (step, scalar(curve_tag(cell, tag, kind), value))
        for tag in CURVES
        for step, value in _thinned(cell, tag)
    ]
    last = int(cell.record.get("steps") or 0)
    finals = final_metrics(cell, tags, compared.get(cell.id))
    return events + [(last, scalar(tag, value)) for tag, value in finals.items()]


def _thinned(cell: CellResult, tag: str) -> list[tuple[int, float]]:
    points = [point for point in cell.run.curve(tag).items() if math.isfinite(point[1])]
    stride = math.ceil(len(points) / POINTS) or 1
    return points[::-1][::stride][::-1]
