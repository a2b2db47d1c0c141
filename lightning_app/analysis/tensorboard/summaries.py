"""Summaries of TensorBoard's plugins, and the one file of a folder that holds them."""

# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.

import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_app.atomic_write import write_whole

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
