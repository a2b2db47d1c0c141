"""The only reader and writer of YAML: a strict form of the core schema of YAML 1.2.

``010`` is 10, ``1e-3`` is a number, and ``1:30``, ``1_000``, ``yes`` and dates are text. A key that
occurs twice is refused. Fast to import.
"""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from lightning_app.core.errors import UserError, absent, named

_LEVELS = 100  # of nesting, far more than a config needs
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_INT = re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_BOOL = re.compile("(?:true|True|TRUE|false|False|FALSE)$")
_CORE = {  # YAML 1.2.2, section 10.3.2, in its order, and the merge keys of YAML 1.1
    f"{_TAG}null": (re.compile("(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    f"{_TAG}bool": (_BOOL, list("tTfF")),
    f"{_TAG}int": (_INT, list("-+0123456789")),
    f"{_TAG}float": (_FLOAT, list("-+.0123456789")),
    _MERGE: (re.compile("<<$"), ["<"]),
}
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 6 times as fast if available


class _Loader(_PARSER):
    """Only the safe types of JSON: no sets, no dates, no classes."""

    bounded = True
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "str", "seq", "map")
    }

    def flatten_mapping(self, node: Any) -> None:
        """Expand a merge key: own keys win, then the earlier of several mappings.

        With PyYAML 6.0.4 the later one wins (yaml/pyyaml#953).
        """
        if node in self.flat:  # an alias: its keys were checked, and merged ones are among them now
            return
        self.flat.add(node)
        _check_keys(self, node)
        given, node.value = node.value, [pair for pair in node.value if pair[0].tag != _MERGE]
        for merged in (value for key, value in given if key.tag == _MERGE):
            for each in merged.value if isinstance(merged, yaml.SequenceNode) else [merged]:
                if not isinstance(each, yaml.MappingNode):
                    raise _problem(each, "a merge key takes a mapping, or a list of mappings")
                self.flatten_mapping(each)
                node.value = each.value + node.value

    def construct_bool(self, node: Any) -> bool:
        return self._matching(node, _BOOL).lower() == "true"

    def construct_int(self, node: Any) -> int:
        text = self._matching(node, _INT)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            value = int(text, base)
            if self.bounded:
                check_size("a value", value)
        except ValueError as error:  # Python reads at most a few thousand digits
            raise _problem(node, f"a number of {len(text)} digits is too large") from error
        except UserError as error:
            raise _problem(node, str(error)) from error
        return value

    def construct_float(self, node: Any) -> float:
        text = self._matching(node, _FLOAT).lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def _matching(self, node: Any, form: re.Pattern[str]) -> str:
        text = self.construct_scalar(node)
        if not form.match(text):
            kind = node.tag.removeprefix(_TAG)
            raise _problem(node, f"{text!r} is no {kind} of YAML 1.2")
        return text


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as a number or keyword, so both read text."""


for _tag, (_form, _letters) in _CORE.items():
    _Loader.add_implicit_resolver(_tag, _form, _letters)
    _Dumper.add_implicit_resolver(_tag, _form, _letters)
for _kind in ("bool", "int", "float"):
    _Loader.add_constructor(f"{_TAG}{_kind}", getattr(_Loader, f"construct_{_kind}"))


def _problem(node: Any, what: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def read_yaml_file(path: Path) -> tuple[Any, str]:
    """Return the content of a file and its text. Raises `UserError` naming file and line."""
    with named(path):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"invalid UTF-8 at byte {error.start}") from error
        except FileNotFoundError as error:
            raise UserError(absent(path)) from error
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}") from error
        return load_yaml(text), text


def load_yaml(text: str) -> Any:
    """Return the content of a text.

    Raises:
        UserError: naming the line, also for a whole number of more than 64 bits.
    """
    try:
        return load_yaml_value(text, bounded=True)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{line}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"not valid YAML: {getattr(error, 'reason', error)}") from error


def load_yaml_value(text: str, *, bounded: bool = False) -> Any:
    """Return the content of a text, such as a value on the command line.

    Raises:
        UserError: for a key that occurs twice.
        yaml.YAMLError: for a text that is otherwise not YAML.
    """
    loader = _Loader(text)
    loader.bounded, loader.flat = bounded, set()
    try:
        # Deep nesting, as in a damaged file, would crash the C parser.
        levels = 0
        for event in yaml.parse(text, Loader=_Loader):
            levels += isinstance(event, yaml.CollectionStartEvent)
            levels -= isinstance(event, yaml.CollectionEndEvent)
            if levels > _LEVELS:
                line = event.start_mark.line + 1
                raise UserError(f"line {line}: nested too deeply, more than {_LEVELS} levels")
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def dump_yaml(tree: Any, **options: Any) -> str:
    """Return plain values as YAML, in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, **options)


def _check_keys(loader: Any, mapping: Any) -> None:
    """Refuse keys that are equal as values: 1, 0x1, 1.0 and true are the same key."""
    seen: set[Any] = set()
    for node, _ in mapping.value:
        if not isinstance(node, yaml.ScalarNode):
            raise _problem(node, "a key must be a text or a number")
        plain = node.tag in (f"{_TAG}str", _MERGE)
        key = (node.tag == _MERGE, node.value if plain else loader.construct_object(node))
        if key in seen:
            line = node.start_mark.line + 1
            raise UserError(f"line {line}: key '{node.value}' is given twice")
        seen.add(key)


_LARGEST = (1 << 63) - 1


def check_size(field: str, value: Any) -> None:
    """Refuse an integer of more than 64 bits."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        digits = math.ceil(value.bit_length() * math.log10(2))
        raise UserError(f"{field}: a whole number of about {digits} digits is too large")
