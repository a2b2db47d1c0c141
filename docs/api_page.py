"""Write a signature and a sentence under each object of `docs/api.md`: `python docs/api_page.py`.

Readers of the repository see these lines; the site shows whole docstrings instead
(`site_pages.py` drops the lines there).
"""

import importlib
import inspect
import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).with_name("api.md")
ENTRY = re.compile(r"^(::: (\S+)(?:\n {4}.+)?)\n(?:\n(?:> .+\n)+)?", re.M)
MOST_PARAMETERS = 7
LONGEST_DEFAULT = 10


def line_of(name: str) -> str:
    """Return the signature, without types, and the first sentence of an object's docstring.

    Long defaults, and the optional fields of a class with many, are left to the site.
    """
    module, _, last = name.rpartition(".")
    try:
        described = getattr(importlib.import_module(module), last)
    except AttributeError:  # a module
        described = importlib.import_module(name)
    docstring = inspect.getdoc(described)
    assert docstring is not None, name
    summary = docstring.split("\n\n")[0].replace("\n", " ").replace("``", "`")
    if inspect.ismodule(described):
        return f"`{last}`: {summary}"
    parameters = list(inspect.signature(described).parameters.values())
    if len(parameters) > MOST_PARAMETERS:
        required = [
            entry.name
            for entry in parameters
            if entry.default is entry.empty and entry.kind is not entry.VAR_KEYWORD
        ]
        return f"`{last}({', '.join([*required, '...'])})`: {summary}"
    plain = [
        entry.replace(
            annotation=entry.empty,
            default=... if len(repr(entry.default)) > LONGEST_DEFAULT else entry.default,
        )
        if entry.default is not entry.empty
        else entry.replace(annotation=entry.empty)
        for entry in parameters
    ]
    shown = str(inspect.Signature(plain)).replace("=Ellipsis", "=...")
    return f"`{last}{shown}`: {summary}"


def written(page: str) -> str:
    """Return the page with the lines of today's code."""

    def quoted(entry: re.Match[str]) -> str:
        lines = textwrap.wrap(line_of(entry[2]), 118, break_long_words=False)
        return "\n".join([entry[1], "", *(f"> {line}" for line in lines), ""])

    return ENTRY.sub(quoted, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
