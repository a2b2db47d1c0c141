"""The TensorBoard index of a grid: one HParams table with all cells, three custom-scalars pages.

The trainer's event files hold the curves, the pictures and the histograms. This module adds one
event file in each run folder: the cell's parameters and status, and a text with the question, the
config and the resolved block; once finished also its final metrics, at its last step, and its loss
curves once more under tags that name variant and warm-up. The second copy is needed because a chart
of the custom-scalars plugin picks tags by a regular expression over all runs and cannot pick runs:
only through the tag can a chart show one variant.

Several grids may list one run. Its file has the parts of all of them, and is the same whichever
writes it: what depends on a grid has the grid's name in its tag, or in the name of the parameter.

The columns of the table and the layout of the pages have a file of their own, in the first run that
has begun and that no other grid lists, since TensorBoard reads them wherever it finds them. Without
such a run it lies at the root of the grid. There it counts as one more run, and with more than 40
TensorBoard shows none in most of its tabs until runs are ticked.

Writing again replaces only files whose content has changed. TensorBoard keeps the first parameters
that it reads of a session, so the `outcome` column stays
empty until the run has finished (its state is in the session status at all times), and a server
that was open when a failed cell was run again shows the old outcome until it is restarted.
"""

import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import cache
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

from lightning_app.config.identity import leaves
from lightning_app.config.rulers import differences, names_of, ruler
from lightning_app.config.tree import label
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.report.facts import direction, in_group
from lightning_app.report.headline import answer
from lightning_app.report.results import CellResult, GridResults, read_mapping, read_results
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.runs.folder import DRAWING, METRICS, STORE, GridFolder
from lightning_app.runs.locks import if_free, turn
from lightning_app.runs.records import OUTCOMES, column_names
from lightning_app.scores.task_facts import LOSS, task_facts


def tensorboard_path(folder: Path) -> str:
    """The path below the server's root at which TensorBoard serves the grid of a folder."""
    return f"/tensorboard/{quote(folder.resolve().name)}/"


def run_url(base: str, cell: CellResult) -> str:
    """The address that opens TensorBoard with only this run.

    `base` is the address of the server, ``http://127.0.0.1:6006``. The tab Time series uses
    `runFilter`; the other tabs use `regexInput`, which they share. With more than 500 runs
    TensorBoard selects no run by itself, and the user must tick the one that Time series lists.
    """
    name = re.sub(r"[^\w-]", r"\\\g<0>", cell.name)
    pattern = quote(f"runs/{name}$", safe="")
    return f"{base.rstrip('/')}/?runFilter={pattern}#timeseries&regexInput={pattern}"


# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.


RUN, WHOLE = ".run", ".grid"  # ends of names
FIRST, LAST = "0000000000", "9999999999"  # instead of the time in a file name


def scalar(tag: str, value: float) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


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
    folder: Path, wall_time: float, events: Iterable[tuple[int, Summary]], end: str = RUN
) -> Path:
    """Write one index file with these events, ordered by step, and remove others of this `end`.

    Return the file, which is as it was if its events are the same.

    The name of the file has a number that grows with each replacement, the digest of its content
    and `end`. TensorBoard reads the files of a folder in the order of their names and never
    returns to an earlier one, and a smaller step makes it forget the larger ones. So the file comes
    before that of the trainer while that may grow (no `wall_time`), and after it when the run has
    finished.
    """
    files = list(folder.glob("events.out.tfevents.*"))
    first = Event(wall_time=wall_time, file_version="brain.Event:2")
    others = (Event(wall_time=wall_time, step=step, summary=summary) for step, summary in events)
    records = [event.SerializeToString(deterministic=True) for event in (first, *others)]
    digest = hashlib.sha256(b"".join(records)).hexdigest()[:12]
    place = f"events.out.tfevents.{LAST if wall_time else FIRST}."
    same = [path for path in files if re.fullmatch(rf"{place}\d+-{digest}{end}", path.name)]
    if same:
        kept = max(same)
    else:
        numbers = [re.search(rf"\.({FIRST}|{LAST})\.(\d+)-", path.name) for path in files]
        number = 1 + max((int(match[2]) for match in numbers if match), default=0)
        kept = folder / f"{place}{number:06d}-{digest}{end}"
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)  # slow, as its checksums are in Python
        for record in records:
            writer.write(record)
        write_whole(kept, buffer.getvalue())
    for old in files:
        if old != kept and old.name.endswith(end):
            old.unlink(missing_ok=True)
    return kept


FENCE = "```"


def question_of(grid: GridResults) -> str:
    """The question, and the metrics by which not all runs can be ranked."""
    cautions = [
        f"Do not rank all runs by {metric}: it counts different things because {why}."
        for metric in dict.fromkeys([grid.metric, grid.monitored.loss])
        if (why := differences([ruler(cell.setting, metric) for cell in grid.cells]))
    ]
    question = grid.question or "No question is written in the grid file."
    return "\n\n".join([question, *cautions])


def run_text(cell: CellResult, question: str) -> str:
    """One Markdown text. A run that has not ended has no resolved block yet.

    `write.Site` answers the link to the drawing; a separate TensorBoard shows only its path.
    """
    parts = [f"# {cell.name}", question]
    config = cell.folder / "config.yaml"
    if config.is_file():
        text = config.read_text(encoding="utf-8", errors="replace").strip()
        parts += ["## Config", f"{FENCE}yaml\n{text}\n{FENCE}"]
    if (cell.folder / DRAWING).is_file():
        path = f"runs/{cell.folder.name}/{DRAWING}"
        parts.append(f"Drawing of the block: [{path}]({quote(path)})")
    block = cell.run.file("block.json")
    if block is not None:
        parts.append("## Resolved block")
        parts += [part for side, spec in read_mapping(block).items() for part in _stack(side, spec)]
    return "\n\n".join(parts) + "\n"


def _stack(side: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """A table of one stack: one row per field, one column per range of equal layers.

    An encoder uses no field of cross-attention.
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


def _fields(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, label(value)) for key, value in leaves(tree) if value != {}]


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
    "update_rms": "RMS of the update over the rate, all parameters (E2)",
    "momentum_cosine": "cosine of momentum and gradient, all parameters (E2)",
    "gradient_cosine": "cosine of successive gradients, all parameters (E2)",
    "row_angle": "angle by which rows of matrices turn, radians (E3)",
    "inverse_root_spread": "spread of 1 / sqrt(v) over its mean, all parameters (E1)",
    "below_eps": "share of coordinates with sqrt(v) below eps (E1)",
    "relative_change": "||x dW|| / ||x W||, all linear maps of blocks (E4)",
    "local_smoothness": "change of the gradient over that of the weights (E5)",
    "sharpness_over_threshold": "rate times sharpness, over the edge of stability (E5)",
    "critical_rate": "rate above which the step would raise the loss (E5)",
    "rate_over_critical": "rate over the critical one (E5)",
    "update_rms_noise": "RMS of the update over the rate under pure noise (E2)",
    "row_equilibrium": "angle of rows in AdamW's equilibrium, radians (E3)",
    "representation_change": "relative change of a stack's output by one step (E4)",
    "output_change": "squared change of a stack's output by one step, over d (E7)",
    "alpha": "alpha, gain of the identity, by layer",
    "beta": "beta, gain of the attention map, by layer",
    "gamma": "gamma, gain of the centre, by layer",
}
"""Titles of probed quantities; a quantity that is missing here is a learned gain."""

OF_LAYERS = " of layers"
"""Follows `output_change` of layers, a learned gain; that of stacks is of updates."""


class IndexedGrid:
    """A grid, with what the index files of its runs have of it."""

    def __init__(self, grid: GridResults) -> None:
        self.grid = grid
        self.name = grid.folder.resolve().name  # as in `RunFolder.grids`
        self.tags, self.compared = metric_tags(grid), reference_cells(grid)
        self.question = question_of(grid)
        self.kinds = dict(zip([cell.id for cell in grid.cells], rulers_of(grid), strict=True))
        self.cells = {cell.id: cell for cell in grid.cells}
        # An axis whose values name the variants would be a second column of the same texts.
        named = {
            axis: [label(cell.axes[axis]) == cell.variant for cell in grid.cells]
            for axis in grid.axes
        }
        self.axes = [axis for axis, same in named.items() if not all(same)]
        # TensorBoard does not find a run to which the grid has no link yet.
        self.begun = [c for c in grid.cells if c.state != "waiting" and c.run.folder.grid]
        key = hashlib.sha256(self.name.encode()).hexdigest()[:8]  # a name may have any characters
        self.end = f".{key}{WHOLE}"


def layout(part: IndexedGrid) -> Summary:
    """The pages: a chart for each variant and loss, the tags of all runs, and the probed ones."""
    pages, grid = layout_pb2.Layout(), part.grid
    warmup = pages.category.add(title="Warm-up")
    variants = dict.fromkeys((cell.variant, part.kinds[cell.id]) for cell in grid.cells)
    for tag in reversed(CURVES):
        for variant, kind in variants:
            of = f", {kind}" if kind else ""
            chart = warmup.chart.add(title=f"{variant}{of}: {tag} by warm-up, finished runs")
            curves = re.escape(_curves(part, variant, kind))
            chart.multiline.tag.append(rf"^{curves}warmup_\d+/{tag}$")
    health = pages.category.add(title="Health")
    for tag, title in HEALTH.items():
        chart = health.chart.add(title=f"{title}, all runs")
        chart.multiline.tag.append(f"^{tag}$")
    probed = _probed(grid)
    if probed:
        inside = pages.category.add(title="Inside the blocks")
        for quantity in probed:
            name = quantity.removesuffix(OF_LAYERS)
            gain = f"learned gain {name.replace('_', ' ')}, by layer"
            chart = inside.chart.add(title=INSIDE.get(quantity, gain))
            ending = (
                ("/[^/]+$" if quantity == name else "/[^/]+/") if name == "output_change" else "/"
            )
            chart.multiline.tag.append(f"^probe/{re.escape(name)}{ending}")
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


def curve_tag(part: IndexedGrid, cell: CellResult, tag: str) -> str:
    """The tag of the second copy of the curve of a finished run, one of `rulers_of`."""
    curves = _curves(part, cell.variant, part.kinds[cell.id])
    return f"{curves}warmup_{cell.warmup or 0}/{tag}"


def _curves(part: IndexedGrid, variant: str, kind: str) -> str:
    return f"curves/{part.name}/{variant}/{f'{kind}/' if kind else ''}"


def _probed(grid: GridResults) -> list[str]:
    """The quantities that some finished run has logged, those of `INSIDE` first."""
    tags = {
        tag
        for cell in grid.finished
        for tag in column_names(cell.folder / METRICS)
        if tag.startswith("probe/") and tag.count("/") > 1
    }
    found = {tag.split("/")[1] for tag in tags}
    if changed := {tag.count("/") for tag in tags if tag.startswith("probe/output_change/")}:
        found -= {"output_change"}
        found |= {"output_change" + (OF_LAYERS if count > 2 else "") for count in changed}
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
    reported = {
        tag for cell in grid.finished for tag in cell.metrics if tag[:4] in ("val/", "test")
    }
    tags = [*expected, *sorted(reported - {*expected, *LEFT_OUT})]
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
    by_twin = {twin(cell): cell for cell in grid.cells if cell.warmup == wanted}
    return {cell.id: by_twin[twin(cell)] for cell in grid.cells if twin(cell) in by_twin}


def experiment(part: IndexedGrid) -> Summary:
    """The columns of the table, the same for every cell."""
    grid = part.grid
    described = api_pb2.Experiment(name=grid.name, description=part.question)
    columns: dict[str, Sequence[Any]] = {"variant": grid.variants}
    columns |= {axis: grid.axes[axis] for axis in part.axes}
    columns["outcome"] = (*OUTCOMES.values(), "failed", *(["pruned"] if grid.pruner else []))
    columns["outcome"] += tuple({cell.state for cell in grid.cells} & {"damaged"})
    for name, values in columns.items():
        present = [value for value in values if value is not None]
        info = described.hparam_infos.add(
            name=f"{part.name}/{name}",
            display_name=_short(name, columns),
            type=getattr(api_pb2, f"DATA_TYPE_{_kind(present)}"),
            differs=len(values) > 1,
        )
        for value in dict.fromkeys(_typed(value, present) for value in present):
            item = info.domain_discrete.values.add()
            setattr(item, FIELDS[_kind(present)], value)
    compared = [] if grid.reference_warmup is None else [DELTA]
    for tag in [*compared, *part.tags]:
        info = described.metric_infos.add(display_name=tag)
        info.name.tag = f"{DELTA}/{part.name}" if tag == DELTA else tag
        if tag == grid.metric:
            info.display_name = f"{tag}, {direction(grid.mode)} (the grid's metric)"
    return _hparams(
        hparams_metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=described)
    )


def started(listed: Sequence[tuple[IndexedGrid, CellResult]]) -> Summary:
    """The parameters of a run in each grid, in the types of the columns, without missing values."""
    time = max(_seconds(cell.record.get("started")) for _, cell in listed)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time)
    for part, cell in listed:
        start.hparams[f"{part.name}/variant"].string_value = cell.variant
        for axis in part.axes:
            values = [each for each in part.grid.axes[axis] if each is not None]
            if (value := cell.axes[axis]) is not None:
                held = start.hparams[f"{part.name}/{axis}"]
                setattr(held, FIELDS[_kind(values)], _typed(value, values))
        if cell.state != "unfinished":
            word = cell.word if cell.finished else cell.state
            start.hparams[f"{part.name}/outcome"].string_value = word
    data = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    return _hparams(hparams_metadata.SESSION_START_INFO_TAG, data)


def ended(cells: Sequence[CellResult]) -> Summary:
    """How a run ended that is no longer running."""
    state = next((each for each in _END if each in [cell.state for cell in cells]), "ok")
    end = plugin_data_pb2.SessionEndInfo(
        status=getattr(api_pb2, f"STATUS_{_END.get(state, 'SUCCESS')}"),
        end_time_secs=max(map(finished_at, cells)),
    )
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    return _hparams(hparams_metadata.SESSION_END_INFO_TAG, data)


def final_metrics(part: IndexedGrid, cell: CellResult) -> dict[str, float]:
    """The metrics of a finished cell by column: NaN if not finite, omitted if not defined."""
    finals: dict[str, float] = {}
    for tag in part.tags:
        if tag in cell.metrics:
            value = cell.metrics[tag]
            finals[tag] = math.nan if value is None else value
    # Nats per token. NaN also if the reference stalled: the loss without warm-up cannot be
    # compared if the variant learns nothing with it.
    reference = part.compared.get(cell.id)
    lost = math.nan if reference is None or reference.state != "ok" else cell.loss - reference.loss
    if math.isfinite(lost):
        finals[f"{DELTA}/{part.name}"] = lost
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


def write_index(grid_dir: Path, only_new: bool = False) -> None:
    """Bring the event files of the index up to date with the run folders.

    With `only_new`, finished cells are skipped if their file is newer than the plan, their result,
    that of their reference run and their link, and all are while another grid writes its index.
    This is fast enough for a supervisor.
    """
    store = GridFolder(grid_dir).experiments / STORE
    lock = store / ".index.lock"
    why = f"{lock}: another process writes the TensorBoard index of a grid; waiting"
    taken = if_free(lock) if only_new else turn(lock, lambda: False, why)
    with taken if store.is_dir() else nullcontext() as free:
        if free is not False:
            _write_index(grid_dir, only_new)


def _write_index(grid_dir: Path, only_new: bool) -> None:
    @cache
    def part_of(folder: Path) -> IndexedGrid | None:
        with suppress(UserError, OSError):  # it is damaged, and shows nothing until it is repaired
            return IndexedGrid(read_results(folder))
        return None

    own = IndexedGrid(read_results(grid_dir))
    for cell in own.begun:
        folder, above = cell.folder, cell.folder.resolve().parent.parent
        others = cell.run.folder.grids().keys() - {own.name}
        wholes = [path for path in folder.glob(f"*{WHOLE}") if not path.name.endswith(own.end)]
        indexed = only_new and _is_indexed(own, cell)
        if indexed and not wholes:
            continue
        by_name = {name: part_of(above / name) for name in others} | {own.name: own}
        parts = [part for _, part in sorted(by_name.items()) if part and cell.id in part.cells]
        for path in wholes:  # would show in this grid too, or is of a grid that is gone
            for part in parts:
                if path.name.endswith(part.end):
                    _write_whole(part)
            path.unlink(missing_ok=True)
        if not indexed:
            listed = [(part, part.cells[cell.id]) for part in parts]
            kept = replace(folder, max(finished_at(each) for _, each in listed), _events(listed))
            if only_new:
                kept.touch()  # newer than its sources even if they changed nothing in it
    _write_whole(own, answered=not only_new)


def answer_text(grid: GridResults) -> str:
    """The answer of the report and the verdict on each variant, as Markdown."""
    scores = sensitivity_scores(grid)
    lines = [
        f"- {in_group(each.variant, each.group)}: {each.words}" for each in verdicts(grid, scores)
    ]
    said = answer(grid, scores)
    return "\n\n".join(filter(None, [f"# {said}" if said else "", "\n".join(lines)]))


def _write_whole(part: IndexedGrid, *, answered: bool = False) -> None:
    """Write the parts for a whole grid where no other grid shows them, and nowhere else."""
    grid, folders = part.grid, [cell.folder for cell in part.begun]
    alone = (cell for cell in part.begun if not cell.run.folder.grids().keys() - {part.name})
    holder = next(alone, None)
    place = grid.folder if holder is None else holder.folder
    for folder in {grid.folder, *folders} - {place}:
        for old in folder.glob("events.out.tfevents.*"):
            if old.name.endswith(part.end):
                old.unlink(missing_ok=True)
    if folders:
        whole = [(0, experiment(part)), (0, layout(part))]
        if answered and (text := answer_text(grid)):  # reads every run: not while the grid runs
            whole.append((0, tensor(f"answer/{part.name}", "text", text.encode())))
        replace(place, 0.0 if holder is None else finished_at(holder), whole, part.end)


def _is_indexed(part: IndexedGrid, cell: CellResult) -> bool:
    """Whether a finished cell has an index file that is newer than all of its sources."""
    if not cell.finished:
        return False
    sources = [part.grid.folder / "plan.json", cell.folder / "result.json"]
    other = part.compared.get(cell.id)
    if other is not None and other.finished:
        sources.append(other.folder / "result.json")
    listed = cell.run.folder.listed / part.name  # else the file is that of other grids
    newest = max(path.stat().st_mtime for path in (*sources, *filter(Path.exists, [listed])))
    files = cell.folder.glob(f"events.out.tfevents.{LAST}.*{RUN}")
    return any(path.stat().st_mtime > newest for path in files)


def _events(listed: Sequence[tuple[IndexedGrid, CellResult]]) -> list[tuple[int, Summary]]:
    """Parameters, status, texts and, once there is a result, curves and metrics of one run."""
    events = [(0, started(listed))]
    for part, cell in listed:
        text = run_text(cell, part.question).encode()
        events.append((0, tensor(f"{TEXT}/{part.name}", "text", text)))
    cells = [cell for _, cell in listed]
    if any(cell.state == "unfinished" for cell in cells):
        return events
    events.append((0, ended(cells)))
    finals: dict[str, float] = {}
    for part, cell in listed:
        if cell.finished:
            finals |= final_metrics(part, cell)
            for tag in CURVES:
                curve = curve_tag(part, cell, tag)
                events += [(step, scalar(curve, value)) for step, value in _thinned(cell, tag)]
    last = max(int(cell.record.get("steps") or 0) for cell in cells)
    return events + [(last, scalar(tag, value)) for tag, value in finals.items()]


def _thinned(cell: CellResult, tag: str) -> list[tuple[int, float]]:
    points = [point for point in cell.run.curve(tag).items() if math.isfinite(point[1])]
    stride = math.ceil(len(points) / POINTS) or 1
    return points[::-1][::stride][::-1]
