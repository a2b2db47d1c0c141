"""The records that a run writes at its end: their schema and a strict reader, used by all."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lightning_app.task_facts import LOSS

SCHEMA = 2
"""The schema of `result.json` and `pruned.json`. Schema 1, whose id covers only the config, can
also be read."""

PLAN_SCHEMA = 2
"""The schema of `plan.json`. Schema 1 can also be read."""

SIGNATURES = ("bleu_signature", "sacrebleu_signature")
"""How the scores of the test split were computed; null in the result of a task without them."""

OUTCOMES = {
    "trained": "ok",
    "not_yet_learned": "not yet learned",
    "stalled": "stalled",
    "non_finite": "non-finite",
}
"""How a finished run ended, and the words for it. The first two have the status `ok`."""

CUT_SHORT = "cut_short"
"""The status and the outcome of a run that ended before the steps that its config asks for, by
something else than the rules of this program. It is no result of a grid."""

_OUTCOMES_OF = {
    "ok": ("trained", "not_yet_learned"),
    "diverged": ("stalled", "non_finite"),
    CUT_SHORT: (CUT_SHORT,),
}
YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 6 times as fast where it is built
_LARGEST = 2**63  # the limit of a column of 64-bit integers
_DEEPEST = 100  # levels of nested mappings and lists
_TOO_DEEP = f"damaged: nested more than {_DEEPEST} deep"


class Unsound(Exception):
    """A file does not have the expected content; the message names the problem."""


class Newer(Unsound):
    """A file of a newer version of this program, which this version must not change."""

    def __init__(self, schema: int) -> None:
        super().__init__(
            f"schema {schema}: made by a newer version of this program; update the program"
        )


def read_result(path: Path, identity: str, metric: str | None = None) -> dict[str, Any] | None:
    """The checked `result.json` of the cell with this id, None if there is no such file.

    With `metric`, a run that trained must have reported it. Raises `Unsound`.
    """
    return _read(path, lambda tree: check_result(tree, identity, metric))


def read_pruned(path: Path, identity: str) -> dict[str, Any] | None:
    """The checked `pruned.json` of the cell with this id, None if there is no such file.

    Raises `Unsound`.
    """
    return _read(path, lambda tree: check_pruned(tree, identity))


def _read(path: Path, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any] | None:
    try:
        tree = read_json(path)
    except FileNotFoundError:
        return None
    check(tree)
    return tree


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
            _bytes(path).decode(),
            parse_constant=refuse,
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
    data = _bytes(path)
    if not data.endswith(b"\n"):
        raise Unsound("torn or damaged: its last line has no end")
    try:
        text, depth = data.decode(), 0
        for event in yaml.parse(text, Loader=YAML):  # deep nesting would crash the C loader
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise Unsound(_TOO_DEEP)
        tree = yaml.load(text, Loader=YAML)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise Unsound(f"torn or damaged: not valid YAML ({reason})") from error
    if not isinstance(tree, dict):
        raise Unsound(f"expected a YAML mapping, found {type(tree).__name__}")
    return tree


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise Unsound("is not a file") from error
    except OSError as error:
        raise Unsound(f"cannot be read: {error.strerror}") from error


def check_schema(tree: Mapping[str, Any], newest: int = SCHEMA) -> None:
    """Refuse a record without a known schema. Raises `Unsound`, or `Newer` above `newest`."""
    if "schema" not in tree:
        raise Unsound("field 'schema' is missing")
    schema = tree["schema"]
    if not is_count(schema) or schema < 1:
        raise Unsound(f"schema: expected a number up to {newest}, found {str(schema)[:40]!r}")
    if schema > newest:
        raise Newer(schema)


def check_result(tree: Mapping[str, Any], identity: str, metric: str | None = None) -> None:
    """Check the content of `result.json` of the cell with this id. Raises `Unsound`."""
    _check(tree, _RESULT, identity)
    for name, (is_right, wanted) in _OPTIONAL.items():
        if tree.get(name) is not None and not is_right(tree[name]):
            raise _unexpected(tree, name, wanted)
    status, metrics = tree["status"], tree["metrics"]
    if (status == "diverged") != (tree["diverged"] is not None):
        raise Unsound(f"status '{status}' and the field diverged contradict each other")
    if outcome(tree) not in _OUTCOMES_OF[status]:
        raise Unsound(f"status '{status}' and outcome '{tree['outcome']}' contradict each other")
    if status == "ok" and metrics.get(LOSS) is None:
        raise Unsound(f"reports no finite '{LOSS}', though its status is ok")
    if status == "ok" and metric is not None and metric not in metrics:
        raise Unsound(f"reports no '{metric}', the metric of the grid")


def check_pruned(tree: Mapping[str, Any], identity: str) -> None:
    """Check the content of `pruned.json` of the cell with this id. Raises `Unsound`."""
    _check(tree, _PRUNED, identity)


def outcome(result: Mapping[str, Any]) -> str:
    """How a finished run ended, a key of `OUTCOMES`; for old results without it, it is derived."""
    recorded = result.get("outcome")
    if recorded is not None:
        return recorded
    if result["status"] == "ok":
        return "trained"
    unmeasured = result["metrics"].get(LOSS) is None
    return "non_finite" if unmeasured or "not finite" in result["diverged"]["rule"] else "stalled"


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
    "status": (
        lambda value: is_text(value) and value in _OUTCOMES_OF,
        "ok or diverged",
    ),
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
    "outcome": (
        lambda value: is_text(value) and value in (*OUTCOMES, CUT_SHORT),
        " or ".join((*OUTCOMES, CUT_SHORT)),
    ),
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
