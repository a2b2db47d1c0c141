"""Prose in modern technical English: no archaic, literary or elliptic words."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHAIC = re.compile(
    r"""\b(?:
        (?i:told|untold|anew|but\ for|whoever|lest|hence|whence|hither|thither|whither
        |there(?:of|by|in|upon|unto)|where(?:of|in|upon)|here(?:by|in|of)|bears|stands?
        |so\ many|of\ old|by\ turns|kin|nought|naught|aught|save\ for|ere|albeit|whilst|amongst
        |unto|forthwith|mends?|mended|yonder|hitherto|henceforth)
        |(?:is|are)\ none
    )\b""",
    re.VERBOSE,
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and strings of a module, or the text of a page, with their first lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] in {"COMMENT", "STRING", "FSTRING_MIDDLE"}:
            yield token.start[0], token.string


def found(path: Path) -> Iterator[str]:
    for first, text in prose(path):
        # A phrase may be broken between two lines of a paragraph.
        for match in ARCHAIC.finditer(text.replace("\n    ", "\n").replace("\n", " ")):
            yield f"{path.relative_to(ROOT)}:{first}: {match[0]}"


def test_no_archaic_words() -> None:
    pages = [page for page in ROOT.rglob("*.md") if not {".venv"} & set(page.parts)]
    pages += [*(ROOT / "lightning_app/report").rglob("*.toml")]
    pages += [*(ROOT / "lightning_app/report").rglob("*.html")]
    # The protocol of the synthetic corpus is data, not prose.
    modules = [
        module
        for module in (ROOT / "lightning_app").rglob("*.py")
        if module.parts[-2:] != ("corpora", "texts.py")
    ]
    assert [line for path in sorted(modules + pages) for line in found(path)] == []
