"""Strict readers for the records of runs and grids: result, plan, state, tables of numbers."""

import csv
import json
import math
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Lt

from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError
from lightning_app.core.files import SEAL, Damaged, check_seal, sha256_of, with_seal, write_whole
from lightning_app.core.schema import read
from lightning_app.runs.folder import CONFIG, IDENTITY, METRICS, VOUCHED, GridFolder, is_file_name
from lightning_app.scores.task_facts import LOSS
from lightning_app.version import BEFORE_STRIKING

T = TypeVar("T")

SCHEMA = 3
"""The schema of `result.json`, `pruned.json` and `plan.json`, all sealed. Schema 2, without
a seal, can also be read."""

_OLDEST = 2

_NEEDED = (CONFIG, IDENTITY, METRICS)
"""The sealed files without which a result is damaged. Published studies omit the others."""

SIGNATURES = ("bleu_signature", "sacrebleu_signature", "cut_hypotheses")
"""How the scores of the test split were computed; null for a task without them."""

OUTCOMES = {
    "trained": "ok",
    "not_yet_learned": "not yet learned",
    "stalled": "stalled",
    "non_finite": "non-finite",
}
"""The outcomes of a finished run, in words. The first two have the status `ok`."""

_OUTCOMES_OF = {"ok": ("trained", "not_yet_learned"), "diverged": ("stalled", "non_finite")}
CUT_SHORT = "cut_short"  # status and outcome of a run with fewer steps than its config requests
_LARGEST = 2**63  # the limit of a column of 64-bit integers


class Unsound(Exception):
    """A file does not have the expected content; the message names the problem."""


class Unreadable(Unsound):
    """A file that cannot be read by this user or from this disk."""


class LacksMetric(Unsound):
    """A sound result without the metric of the grid."""


class OtherVersion(Unsound):
    """A file for another version of this program, which this one must not change."""

    def __init__(self, schema: int) -> None:
        newer = f"schema {schema}: made by a newer version of this program; update the program"
        older = (
            f"schema {schema}: made by an early version of this program, which commit "
            f"{BEFORE_STRIKING} is the last to read; move its folder away, and its cells run again"
        )
        super().__init__(newer if schema > SCHEMA else older)


def read_result(
    path: Path, identity: str | None, metric: str | None = None
) -> dict[str, Any] | None:
    """The checked `result.json` of the cell with this id, None if there is no such file.

    Without an id it may belong to any cell. With `metric`, a trained run must have reported it.
    Raises `Unsound`, also if the result or a file next to it does not match its seal.
    """
    tree = _read(path, identity, lambda tree, of: check_result(tree, of, metric))
    return tree and tree | {"metrics": finite_metrics(tree["metrics"], tree["outcome"])}


def finite_metrics(metrics: Mapping[str, float | None], outcome: str) -> dict[str, float | None]:
    """The metrics at the end of a run by tag, None where the run has no finite one.

    A run that became non-finite has none of its model: values that it logged are of a validation
    before that. Its speed is known.
    """

    def ended_with(tag: str, value: float | None) -> bool:
        ended = outcome != "non_finite" or tag.startswith("train/")
        return ended and value is not None and math.isfinite(value)

    return {tag: v if ended_with(tag, v) else None for tag, v in sorted(metrics.items())}


def read_pruned(path: Path, identity: str | None, *, beside: bool = True) -> dict[str, Any] | None:
    """The checked `pruned.json` of the cell with this id, None if there is no such file.

    Raises `Unsound`, as `read_result` does; without `beside` only for its own content.
    """
    return _read(path, identity, partial(_checked, PrunedRecord), beside)


def _read(
    path: Path,
    identity: str | None,
    check: Callable[[Mapping[str, Any], str], object],
    beside: bool = True,
) -> dict[str, Any] | None:
    try:
        tree = read_json(path)
    except FileNotFoundError:
        return None
    check(tree, str(tree.get("id")) if identity is None else identity)
    _check_seal(tree, path.parent if beside else None)
    return tree


def sealed(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A result with a seal over its content and the files of its run that are read later."""
    held = {name: folder / name for name in VOUCHED if (folder / name).is_file()}
    return sealed_with(tree, {name: bytes_of(path) for name, path in held.items()})


def sealed_with(tree: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """A result with a seal over files with this content."""
    digests = {name: sha256_of(data) for name, data in files.items()}
    return with_seal({**tree, "schema": SCHEMA}, digests)


def is_sealed(tree: Mapping[str, Any]) -> bool:
    """Whether a checked result has a seal; those of earlier versions do not."""
    return SEAL in tree


def _digests(tree: Mapping[str, Any]) -> Mapping[str, str]:
    """The digests of files in the seal of an unchanged record. Raises `Unsound`."""
    try:
        return check_seal(tree)
    except Damaged as error:
        raise Unsound(str(error)) from error


def _check_seal(tree: Mapping[str, Any], folder: Path | None) -> None:
    """Check that a result and the files of its run match the seal."""
    later = tree["schema"] >= SCHEMA or "arithmetic" in (tree.get("provenance") or {})
    if SEAL not in tree and not later:  # of a version without seals: none was removed
        return
    files = _digests(tree)
    if folder is None:
        return
    for name in VOUCHED:
        try:
            digest = sha256_of(bytes_of(folder / name))
        except FileNotFoundError as error:
            if name in files and name in _NEEDED:
                raise Unsound(f"its {SEAL} covers {name}, which is missing") from error
            continue
        except Unsound as error:
            raise Unreadable(f"{name} beside it {error}") from error
        if name not in files:
            raise Unsound(f"its {SEAL} knows no {name}, which was added after the run")
        if digest != files[name]:
            raise Unsound(f"its {SEAL} is of another {name}, which was changed after the run")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; refuse NaN, infinities and integers of more than 64 bits.

    Raises `Unsound`, and `FileNotFoundError` if there is no file.
    """

    def refuse(word: str) -> float:
        raise Unsound(f"holds {word}, which is not JSON")

    def number(text: str, kind: Callable[[str], float]) -> float:
        value = kind(text)
        if abs(value) >= (_LARGEST if kind is int else math.inf):
            raise Unsound(f"holds the number {text[:40]}, which is too large")
        return value

    try:
        tree = json.loads(
            bytes_of(path).decode(),
            parse_constant=refuse,
            parse_float=lambda text: number(text, float),
            parse_int=lambda text: number(text, int),
        )
    except (ValueError, RecursionError) as error:
        raise Unsound(f"torn or damaged: not valid JSON ({error})") from error
    if not isinstance(tree, dict):
        raise Unsound(f"expected a JSON object, found {type(tree).__name__}")
    return tree


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping whose last line is complete.

    Raises `Unsound`, and `FileNotFoundError` if there is no file.
    """
    data = bytes_of(path)
    if not data.endswith(b"\n"):
        raise Unsound("torn or damaged: its last line has no end")
    try:
        tree = strict_yaml.load_yaml(data.decode())
    except (UserError, ValueError) as error:
        raise Unsound(f"torn or damaged: not valid YAML ({error})") from error
    if not isinstance(tree, dict):
        raise Unsound(f"expected a YAML mapping, found {type(tree).__name__}")
    return tree


def bytes_of(path: Path) -> bytes:
    """The content of a file. Raises `Unsound` for a folder, a pipe or a device."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("is not a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def check_schema(tree: Mapping[str, Any]) -> None:
    """Refuse a record without a known schema. Raises `Unsound`, or `OtherVersion`."""
    if "schema" not in tree:
        raise Unsound("field 'schema' is missing")
    schema = tree["schema"]
    if type(schema) is not int or schema < 1:
        raise Unsound(f"schema: expected a number up to {SCHEMA}, found {str(schema)[:40]!r}")
    if not _OLDEST <= schema <= SCHEMA:
        raise OtherVersion(schema)


def check_result(tree: Mapping[str, Any], identity: str, metric: str | None = None) -> None:
    """Check the content of `result.json` of the cell with this id. Raises `Unsound`."""
    result = _checked(ResultRecord, tree, identity)
    if (result.status == "diverged") != (result.diverged is not None):
        raise Unsound(f"status '{result.status}' and the field diverged contradict each other")
    if result.outcome not in _OUTCOMES_OF.get(result.status, (CUT_SHORT,)):
        raise Unsound(
            f"status '{result.status}' and outcome '{result.outcome}' contradict each other"
        )
    if result.status == "ok" and result.metrics.get(LOSS) is None:
        raise Unsound(f"reports no finite '{LOSS}', though its status is ok")
    if result.status == "ok" and metric is not None and metric not in result.metrics:
        raise LacksMetric(f"reports no '{metric}', the metric of the grid")


def _checked(kind: type[T], tree: Mapping[str, Any], identity: str) -> T:
    check_schema(tree)
    if tree.get("id") != identity:
        raise Unsound(f"id: {str(tree.get('id'))[:40]!r} is not the planned {identity}")
    return _read_record(kind, tree)


def _read_record(kind: type[T], tree: Mapping[str, Any]) -> T:
    try:
        return read(kind, tree)
    except UserError as error:
        raise Unsound(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class _OpenRecord:
    """Part of a file written by a program; it may have other fields, too."""

    EXTRA: ClassVar = "ignore"


Count = Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class Ended(_OpenRecord):
    """The fields of `result.json` and `pruned.json` about the end of a run."""

    name: str
    seconds: Annotated[float, Ge(0), Lt(_LARGEST)]
    attempt: Annotated[int, Ge(1)]
    started: str
    finished: str

    def __post_init__(self) -> None:
        for name, value in (("started", self.started), ("finished", self.finished)):
            try:
                if datetime.fromisoformat(value).tzinfo is not None:
                    continue
            except ValueError:
                pass  # refused below
            raise ValueError(f"{name}: expected a time with its zone, found {value[:40]!r}")


@dataclass(frozen=True)
class Divergence(_OpenRecord):
    """When and by which rule a run diverged, and its last finite training loss (nats)."""

    step: Count
    rule: str
    last_finite_loss: float | None


@dataclass(frozen=True, kw_only=True)
class ValidationParts(_OpenRecord):
    """The loss of each part of the validation split, in nats per token, and its tokens."""

    nll: list[float]
    tokens: list[Annotated[int, Ge(1)]]

    def __post_init__(self) -> None:
        if len(self.nll) != len(self.tokens):
            raise ValueError("nll and tokens: expected equally many numbers")


@dataclass(frozen=True, kw_only=True)
class CorpusFacts(_OpenRecord):
    """The corpus of a run."""

    name: str | None = None
    protocol: str | None = None
    vocab_size: Count | None = None
    sizes: dict[str, Count] | None = None


@dataclass(frozen=True, kw_only=True)
class ResultRecord(Ended):
    """The fields of `result.json` that other code relies on; some versions omit some of them."""

    status: Literal["ok", "diverged", "cut_short"]
    outcome: Literal["trained", "not_yet_learned", "stalled", "non_finite", "cut_short"]
    diverged: Divergence | None
    metrics: dict[str, float | None]
    # In nats; a vocabulary of 2**63 tokens has 44.
    unigram_entropy: Annotated[float, Gt(0), Lt(64)]
    steps: Count
    steps_asked: Count | None = None
    tokens: Count | None = None
    parameters: Count | None = None
    devices: Count | None = None
    peak_memory_bytes: Count | None = None
    device: str | None = None
    precision: str | None = None
    bleu_signature: str | None = None
    sacrebleu_signature: str | None = None
    cut_hypotheses: Count | None = None
    versions: dict[str, str] | None = None
    provenance: dict[str, Any] | None = None
    validation_parts: ValidationParts | None = None
    data: CorpusFacts | None = None


@dataclass(frozen=True, kw_only=True)
class PrunedRecord(Ended):
    """The fields of `pruned.json`."""

    status: Literal["pruned"]
    step: Count
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Cell(_OpenRecord):
    """One run of a grid: `axes` maps each dotted key to this cell's value, in the file's order.

    `parent` is the folder of the parent grid's run from which it starts, `GRID/runs/NAME` in the
    folder of experiments; empty without a parent grid.
    """

    id: str
    name: str
    axes: dict[str, Any]
    parent: str = ""


@dataclass(frozen=True, kw_only=True)
class Waiting(_OpenRecord):
    """A cell that cannot start because its parent run is not finished.

    It has no id yet, since an id covers the weights that a run starts from. `parent` is as in
    `Cell`, and `parent_id` the id of that run; both are empty if that run is itself waiting.
    """

    name: str
    axes: dict[str, Any]
    parent: str
    parent_id: str


@dataclass(frozen=True, kw_only=True)
class Plan(_OpenRecord):
    """The cells of a grid and the sources they were derived from.

    It is valid while `made_from` is unchanged, which identifies the content of the grid file and
    the code that resolved it.
    """

    name: str
    hash: str  # identifies the axes, the cells and the metric, and so the study
    made_from: str
    metric: str  # by which cells are compared
    mode: str  # whether `min` or `max` of the metric is best
    axes: dict[str, list[Any]]  # the values of each dotted key
    excluded: int  # the number of combinations that the grid file excludes
    data: tuple[dict[str, Any], ...]  # the distinct data configs of the cells
    cells: tuple[Cell, ...]  # those that can run, in the order in which they run
    corpora: tuple[str | None, ...] = ()  # the digest of each of `data`, None if it is not here
    waiting: tuple[Waiting, ...] = ()  # those with an unfinished parent in another grid
    # For each `Cell.parent`, and the parents of these runs, its name in the id of its children.
    parents: dict[str, str] = field(default_factory=dict)
    # Like `data` and `corpora`, for the parent grid and the grids that it continues.
    parent_data: tuple[dict[str, Any], ...] = ()
    parent_corpora: tuple[str | None, ...] = ()
    warnings: tuple[str, ...] = ()  # allowed settings that weaken comparisons, a sentence each
    more: int = 0  # the largest number of cells that a search or refinement may still ask for
    seal: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (self.name, *(cell.name for cell in (*self.cells, *self.waiting))):
            if not is_file_name(name):
                raise ValueError(f"name: expected the name of a folder, found {name!r}")
        for cell in self.cells:
            if others := cell.axes.keys() - self.axes.keys():
                raise ValueError(f"cells: {cell.name} has {sorted(others)[0]!r}, which is no axis")

    @property
    def study(self) -> str:
        """The name of the grid's study in a storage."""
        return f"{self.name}-{self.hash}"


class DamagedPlan(UserError):
    """`plan.json` cannot be used; `ablate run` rebuilds it."""


def read_plan(path: Path, *, beside: bool = True) -> Plan:
    """Read a plan and, unless `beside` is false, check that the `grid.yaml` next to it is its own.

    Raises:
        DamagedPlan: if one of them was changed or is incomplete.
        UserError: if it is from a version of this program that this one cannot read.
        FileNotFoundError: if there is no such file.
    """
    try:
        tree = read_json(path)
        check_schema(tree)
        files = _digests(tree) if SEAL in tree or tree["schema"] == SCHEMA else {}
        for name in files if beside else ():
            if sha256_of(bytes_of(path.parent / name)) != files[name]:
                raise Unsound(f"its {SEAL} is of another {name}")
        return _read_record(Plan, tree)
    except OtherVersion as error:
        raise UserError(f"{path}: {error}") from error
    except Unsound as error:
        again = "`ablate run` makes it again"
        raise DamagedPlan(f"{path}: torn or damaged ({error}); {again}") from error


def save_plan(path: Path, plan: Plan) -> None:
    """Write `plan.json`, with the fields about a parent grid only if there is one.

    Its seal covers the `grid.yaml` next to it, which names the metric, its mode and the baseline.
    """
    beside = GridFolder(path.parent).specification
    files = {beside.name: sha256_of(beside.read_bytes())} if beside.is_file() else {}
    tree = {"schema": SCHEMA, **asdict(plan)}
    tree["cells"] = [_without_empty(cell, "parent") for cell in tree["cells"]]
    tree = _without_empty(
        tree, "waiting", "parents", "warnings", "more", "parent_data", "parent_corpora", SEAL
    )
    write_whole(path, json.dumps(with_seal(tree, files), indent=1))


def _without_empty(tree: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if value or key not in names}


PROBED = ("step", "quantity", "stack", "layer", "head", "value")
_LONGEST_LINE = 1 << 20  # bytes


Curve = dict[int, float]  # by optimizer step


def read_curves(path: Path, wanted: Callable[[str], bool]) -> dict[str, Curve]:
    """The `wanted` columns of a checked `metrics.csv` by name; the last value per step counts.

    Steps are optimizer steps from 1, in ascending order.
    """
    names, *rows = _rows(path.read_bytes())
    columns = [(place, name) for place, name in enumerate(names) if wanted(name)]
    found: dict[str, Curve] = {name: {} for _, name in columns}
    at = names.index("step")
    for row in rows:
        for place, name in columns:
            if row[place]:
                found[name][int(float(row[at]))] = float(row[place])
    return {name: dict(sorted(curve.items())) for name, curve in found.items()}


class Place(NamedTuple):
    """The place that a probed number describes. Layer 0 is the input of the first layer, layer 1.

    `layer` is None for a quantity of a stack or of the model, `head` None for all heads.
    """

    quantity: str
    stack: str
    layer: int | None = None
    head: int | None = None


def probed_values(path: Path) -> Iterator[tuple[int, Place, float]]:
    """The rows of a checked `probes.csv`: step, place and value."""
    names, *rows = _rows(path.read_bytes())
    at, name, *others, value = map(names.index, PROBED)
    for row in rows:
        stack, layer, head = (row[other] for other in others)
        place = Place(row[name], stack, _whole(layer), _whole(head))
        yield int(row[at]), place, float(row[value])


def _whole(text: str) -> int | None:
    return int(text) if text else None


def column_names(path: Path) -> list[str]:
    """The names of a table's columns, from its first line; none where it is damaged."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        line = file.readline(_LONGEST_LINE).decode(errors="replace")
    try:
        return next(csv.reader([line.rstrip()]), [])
    except csv.Error:  # a damaged line
        return []


def _rows(data: bytes) -> Iterator[list[str]]:
    return csv.reader(data.decode().splitlines(), strict=True)
