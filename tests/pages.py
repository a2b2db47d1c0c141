"""README and the pages of the documentation, and the fenced blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


class Fenced(NamedTuple):
    """A fenced block: the page that it is in, its language, its text."""

    page: str
    language: str
    text: str


def _pages() -> dict[str, str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in found}


PAGES = _pages()
"""The text of each page by its path from the root of the repository."""

README = PAGES["README.md"]


def fenced(language: str) -> list[Fenced]:
    """Return the blocks of a language in all pages."""
    found = [
        Fenced(page, match[1], match[2])
        for page, text in PAGES.items()
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if block.language == language]


def inline(first: str) -> list[tuple[str, str]]:
    """Return the commands in the lines of the pages that begin with a word, with their pages."""
    return [
        (page, " ".join(match[1].split()))
        for page, text in PAGES.items()
        for match in _INLINE.finditer(_FENCE.sub("", text))
        if match[1].split()[:1] == [first]
    ]


def bash_lines(page: str) -> list[str]:
    """Return what a page says to type, in its order, without comments; a pipe is one line."""
    lines = [
        line.split("#")[0].strip()
        for block in fenced("bash")
        if block.page == page
        for line in block.text.splitlines()
    ]
    return [line for line in lines if line]


def typed() -> list[str]:
    """Return each command in the bash blocks of all pages, once."""
    parts = [
        part for page in PAGES for line in bash_lines(page) for part in re.split(r"\s+\|\s+", line)
    ]
    return list(dict.fromkeys(parts))
