"""The digest of code by its syntax, equal under all versions of Python."""

import ast
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def joint_digest(digests: Iterable[tuple[str, str]]) -> str:
    """Return the digest of several named digests, in whatever order they come."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()


def syntax_digest(name: str, data: bytes) -> str:
    """Return the digest of a file: of Python code without comments, docstrings and layout."""
    if name.endswith(".py"):
        with suppress(SyntaxError, ValueError):  # for a newer Python, or half written: its bytes
            data = _canonical(ast.parse(data)).encode()
    return hashlib.sha256(data).hexdigest()


def _canonical(node: Any) -> str:
    """A syntax tree as text: without positions, docstrings and empty fields.

    `ast.dump` and `ast.unparse` differ between versions of Python.
    """
    if isinstance(node, ast.Constant):
        return f"Constant({node.value!a})"  # repr depends on the Unicode version
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 puts an empty text between the parts.
        parts = [each for each in node.values if getattr(each, "value", None) != ""]
        return f"JoinedStr({','.join(map(_canonical, parts))})"
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != [] and name != "ctx"
        )
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_canonical(each) for each in node if not _is_idle(each))}]"
    return ascii(node)


def _is_idle(node: Any) -> bool:  # docstrings too
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Pass)
