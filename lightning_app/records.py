"""The records that a run writes at its end: their schema and a strict reader, used by all."""

import json
import math
import stat
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_app import strict_yaml
from lightning_app.archive import SEAL, Damaged, check_seal, sha256_of, with_seal
from lightning_app.errors import UserError
from lightning_app.run_folder import CONFIG, IDENTITY, METRICS, VOUCHED
from lightning_app.task_facts import LOSS
from lightning_app.version import BEFORE_STRIKING

SCHEMA = 3
"""The schema of `result.json`, `pruned.json` and `plan.json`, which have a seal. Schema 2, without
one, can also be read."""

_OLDEST = 2

_NEEDED = (CONFIG, IDENTITY, METRICS)
"""The sealed files without which a result is damaged. A published study leaves others out."""

SIGNATURES = ("bleu_signature", "sacrebleu_signature")
"""How the scores of the test split were computed; null in the result of a task without them."""

OUTCOMES = {
    "trained": "ok",
    "not_yet_learned": "not yet learned",
    "stalled": "stalled",
    "non_finite": "non-finite",
}
"""How a finished run ended, and the words for it. The first two have the status `ok`."""

_OUTCOMES_OF = {"ok": ("trained", "not_yet_learned"), "diverged": ("stalled", "non_finite")}
CUT_SHORT = "cut_short"  # status and outcome of a run of fewer steps than its config asks for
_LARGEST = 2**63  # the limit of a column of 64-bit integers
_DEEPEST = 100  # levels of nested mappings and lists
_TOO_DEEP = f"damaged: nested more than {_DEEPEST} deep"


class Unsound(Exception):
    """A file does not have the expected content; the message names the problem."""


class OtherVersion(Unsound):
    """A file that only another version of this program reads, and that this one must not change."""

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

    Without an id it may be of any cell. With `metric`, a run that trained must have reported it.
    Raises `Unsound`, also if the result or a file beside it is not what its seal says.
    """
    return _read(path, identity, lambda tree, of: check_result(tree, of, metric))


def read_pruned(path: Path, identity: str, *, beside: bool = True) -> dict[str, Any] | None:
    """The checked `pruned.json` of the cell with this id, None if there is no such file.

    Raises `Unsound`, as `read_result` does; without `beside` for its own content alone.
    """
    return _read(path, identity, check_pruned, beside)


def _read(
    path: Path,
    identity: str | None,
    check: Callable[[Mapping[str, Any], str], None],
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
    """A result with its seal over its content and the files of its run that are read later."""
    held = {name: folder / name for name in VOUCHED if (folder / name).is_file()}
    return sealed_with(tree, {name: bytes_of(path) for name, path in held.items()})


def sealed_with(tree: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """A result with its seal over files of this content."""
    digests = {name: sha256_of(data) for name, data in files.items()}
    return with_seal({**tree, "schema": SCHEMA}, digests)


def with_file(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A record after a sealed file beside it was written again: its seal covers the new one.

    Raises `Unsound` if the record itself is not what was sealed.
    """
    return with_seal(tree, {**_digests(tree), path.name: sha256_of(bytes_of(path))})


def is_sealed(tree: Mapping[str, Any]) -> bool:
    """Whether a checked result has a seal; those of earlier versions have none."""
    return SEAL in tree


def _digests(tree: Mapping[str, Any]) -> Mapping[str, str]:
    """The digests of files in the seal of a record that has not changed. Raises `Unsound`."""
    try:
        return check_seal(tree)
    except Damaged as error:
        raise Unsound(str(error)) from error


def _check_seal(tree: Mapping[str, Any], folder: Path | None) -> None:
    """Check that a result and the files of its run are those that were sealed."""
    if SEAL not in tree and not _is_later(tree):
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
            raise Unsound(f"{name} beside it {error}") from error
        if name not in files:
            raise Unsound(f"its {SEAL} knows no {name}, which was added after the run")
        if digest != files[name]:
            raise Unsound(f"its {SEAL} is of another {name}, which was changed after the run")


def _is_later(tree: Mapping[str, Any]) -> bool:
    """Whether a record is of a version that seals: then one without a seal has lost it."""
    return tree["schema"] >= SCHEMA or "arithmetic" in (tree.get("provenance") or {})


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

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, _ in pairs if sum(key == each for each, _ in pairs) > 1)
            raise Unsound(f"holds the key {twice[:40]!r} twice")
        return found

    try:
        tree = json.loads(
            bytes_of(path).decode(),
            parse_constant=refuse,
            object_pairs_hook=unique,
            parse_float=lambda text: number(text, float),
            parse_int=lambda text: number(text, int),
        )
    except (ValueError, RecursionError) as error:
        raise Unsound(f"torn or damaged: not valid JSON ({error})") from error
    if not isinstance(tree, dict):
        raise Unsound(f"expected a JSON object, found {type(tree).__name__}")
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        level = [each for held in level for each in _inside(held)]
    if level:
        raise Unsound(_TOO_DEEP)
    return tree


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


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
            raise Unsound("is not a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unsound(f"cannot be read: {error.strerror}") from error


def check_schema(tree: Mapping[str, Any]) -> None:
    """Refuse a record without a known schema. Raises `Unsound`, or `OtherVersion`."""
    if "schema" not in tree:
        raise Unsound("field 'schema' is missing")
    schema = tree["schema"]
    if not is_count(schema) or schema < 1:
        raise Unsound(f"schema: expected a number up to {SCHEMA}, found {str(schema)[:40]!r}")
    if not _OLDEST <= schema <= SCHEMA:
        raise OtherVersion(schema)


def check_plan(tree: Mapping[str, Any], folder: Path | None = None) -> None:
    """Refuse a plan of no known schema, or one that was changed; with its folder also if
    `grid.yaml`, which its seal covers, was changed. Raises `Unsound`, or `OtherVersion`."""
    check_schema(tree)
    files = _digests(tree) if SEAL in tree or tree["schema"] == SCHEMA else {}
    for name in files:
        if folder is not None and sha256_of(bytes_of(folder / name)) != files[name]:
            raise Unsound(f"its {SEAL} is of another {name}; `ablate run` writes both again")


def check_result(tree: Mapping[str, Any], identity: str, metric: str | None = None) -> None:
    """Check the content of `result.json` of the cell with this id. Raises `Unsound`."""
    _check(tree, _RESULT, identity)
    for name, (is_right, wanted) in _OPTIONAL.items():
        if tree.get(name) is not None and not is_right(tree[name]):
            raise _unexpected(tree, name, wanted)
    status, metrics = tree["status"], tree["metrics"]
    if (status == "diverged") != (tree["diverged"] is not None):
        raise Unsound(f"status '{status}' and the field diverged contradict each other")
    if tree["outcome"] not in _OUTCOMES_OF.get(status, (CUT_SHORT,)):
        raise Unsound(f"status '{status}' and outcome '{tree['outcome']}' contradict each other")
    if status == "ok" and metrics.get(LOSS) is None:
        raise Unsound(f"reports no finite '{LOSS}', though its status is ok")
    if status == "ok" and metric is not None and metric not in metrics:
        raise Unsound(f"reports no '{metric}', the metric of the grid")


def check_pruned(tree: Mapping[str, Any], identity: str) -> None:
    """Check the content of `pruned.json` of the cell with this id. Raises `Unsound`."""
    _check(tree, _PRUNED, identity)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _maps(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_right, value.values()))


def _is_divergence(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not {"step", "rule", "last_finite_loss"} <= value.keys():
        return False
    loss = value["last_finite_loss"]
    return (
        is_count(value["step"])
        and isinstance(value["rule"], str)
        and (loss is None or _is_number(loss))
    )


def _is_data(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    texts = (value.get(key) for key in ("name", "protocol"))
    vocabulary, sizes = value.get("vocab_size"), value.get("sizes")
    return (
        all(text is None or is_text(text) for text in texts)
        and (vocabulary is None or is_count(vocabulary))
        and (sizes is None or _maps(sizes, is_count))
    )


def _is_parts(value: Any) -> bool:
    if value is None:
        return True
    nll, tokens = (
        (value.get(key) for key in ("nll", "tokens")) if isinstance(value, dict) else (0, 0)
    )
    return (
        isinstance(nll, list)
        and isinstance(tokens, list)
        and len(nll) == len(tokens)
        and all(map(_is_number, nll))
        and all(is_count(count) and count > 0 for count in tokens)
    )


# The fields that other code relies on: for each a check, and the words for what is expected.
_Fields = Mapping[str, tuple[Callable[[Any], bool], str]]
_COMMON: _Fields = {
    "name": (is_text, "text"),
    "seconds": (lambda value: _is_number(value) and 0 <= value < _LARGEST, "a number from 0"),
    "attempt": (lambda value: is_count(value) and value > 0, "a whole number from 1"),
    "started": (_is_time, "a time with its zone"),
    "finished": (_is_time, "a time with its zone"),
}
_RESULT: _Fields = {
    **_COMMON,
    "status": (lambda value: value in (*_OUTCOMES_OF, CUT_SHORT), "ok or diverged"),
    "outcome": (lambda value: value in (*OUTCOMES, CUT_SHORT), " or ".join(OUTCOMES)),
    "diverged": (_is_divergence, "null or step, rule and last_finite_loss"),
    "metrics": (
        lambda value: _maps(value, lambda each: each is None or _is_number(each)),
        "numbers by name",
    ),
    # A vocabulary of 2**63 tokens has 44 nats.
    "unigram_entropy": (lambda value: _is_number(value) and 0 < value < 64, "a number of nats"),
    "steps": (is_count, "a whole number from 0"),
}
_OPTIONAL: _Fields = {  # some versions do not write them
    **dict.fromkeys(
        ("tokens", "parameters", "devices", "peak_memory_bytes", "steps_asked"),
        (is_count, "a whole number from 0"),
    ),
    **dict.fromkeys(("device", "precision", *SIGNATURES), (is_text, "text")),
    "versions": (lambda value: _maps(value, is_text), "texts by name"),
    "provenance": (lambda value: isinstance(value, dict), "what made the run, by name"),
    "validation_parts": (_is_parts, "null or equally many numbers and counts in nll and tokens"),
    "data": (_is_data, "name, protocol, sizes and vocab_size of a corpus"),
}
_PRUNED: _Fields = {
    **_COMMON,
    "status": (lambda value: value == "pruned", "pruned"),
    "step": (is_count, "a whole number from 0"),
    "value": (lambda value: value is None or _is_number(value), "a number or null"),
}


def _check(tree: Mapping[str, Any], fields: _Fields, identity: str) -> None:
    check_schema(tree)
    if tree.get("id") != identity:
        raise Unsound(f"id: {str(tree.get('id'))[:40]!r} is not the planned {identity}")
    for name in fields:
        if name not in tree:
            raise Unsound(f"field '{name}' is missing")
    for name, (is_right, wanted) in fields.items():
        if not is_right(tree[name]):
            raise _unexpected(tree, name, wanted)


def _unexpected(tree: Mapping[str, Any], name: str, wanted: str) -> Unsound:
    return Unsound(f"{name}: expected {wanted}, found {str(tree[name])[:40]!r}")
