"""What the program gave for shipped grids and published studies when the set was frozen.

    python -m tests.frozen.frozen compare    # exactly; prints the first differences
    python -m tests.frozen.frozen write      # freezes what the program gives now

`expected.json.xz` holds, for each shipped grid, the ids of its cells and the settings and the
record of its first cell; for each packed study, the documents of `plan`, `status` and `report` with
`--json`, and the tables that `report` writes. `demo.tar.xz` is the demo, packed.
"""

import contextlib
import io
import json
import lzma
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from lightning_app.cli import main
from lightning_app.config.config import resolve
from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import read_spec
from lightning_app.grids.plan import cell_tree, expand
from lightning_app.report.packed import unpack
from tests import questions, tables
from tests.documents import write_books

ROOT = Path(__file__).parents[2]
GRIDS = sorted((ROOT / "ablations").glob("*.yaml"))
BASES = sorted((ROOT / "ablations/base").glob("*.yaml"))
STUDIES = {
    "demo": Path(__file__).with_name("demo.tar.xz"),
    **{
        name: ROOT / "ablations/results" / name / "runs.tar.xz"
        for name in ("joint", "xiong_small", "warmup_lm")
    },
}
ELSEWHERE = ("code", "device", "libraries")
"""What `plan` calls stale on another machine, or after a change of any counted definition."""
_EXPECTED = Path(__file__).with_name("expected.json.xz")
_BOOKS = "A book. It has two sentences.\nA line.\n-------\nAnother book. It has a line.\n" * 2
_MOST = 400_000  # the bytes of a table; the curves of validations are longer


@cache
def expected() -> dict[str, Any]:
    found = json.loads(lzma.decompress(_EXPECTED.read_bytes()))
    return {name: _compared(documents) for name, documents in found.items()}


def _compared(documents: dict[str, Any]) -> dict[str, Any]:
    """The documents without what any change of code changes."""
    if "plan.json" not in documents:
        return documents
    plan = documents["plan.json"]
    stale = {key: value for key, value in plan["stale"].items() if key not in ELSEWHERE}
    return {**documents, "plan.json": {**plan, "stale": stale}}


def write_corpora(folder: Path) -> None:
    """Write small texts where the shipped grids look for corpora, below the folder of a user."""
    for name in ("books", "pretraining", "corpora/tinyshakespeare", "corpora/iwslt14_deen"):
        (folder / name).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            for suffix in ("txt", "de", "en"):
                (folder / name / f"{split}.{suffix}").write_text(_BOOKS)
    write_books(folder / "corpora")
    for name, published in tables.FOLDERS.items():
        tables.write_table(folder / "corpora/glue" / published, name)
    for name in ("squad1", "squad2"):
        questions.write_squad(folder / "corpora/squad", name)


def settings_of(path: Path) -> dict[str, Any]:
    """The cells of a grid file or of a base: their ids, and what their first run would record."""
    if path in BASES:
        trees, ids = [yaml.safe_load(path.read_text())], {}
    else:
        spec = read_spec(path)
        plan, _ = expand(spec, resolve, partial(identity_of, fetch=False))
        trees = [cell_tree(spec.base_config, (*plan.cells, *plan.waiting)[0].axes)]
        ids = {cell.name: cell.id for cell in plan.cells}
    first = resolve(trees[0], str(path))
    found: dict[str, Any] = {"ids": ids, "config": first}
    if path in BASES or ids:  # a child has no record before its parent is trained
        found["record"] = asdict(identity_of(first, fetch=False))
    return json.loads(json.dumps(found))


def documents_of(study: str, folder: Path) -> dict[str, Any]:
    """What the commands give for a packed study, restored in an empty folder, without corpora."""
    unpack(STUDIES[study], folder / "experiments")
    grid = str(folder / "experiments" / study)
    found: dict[str, Any] = {}
    for command in ("plan", "status", "report"):
        words = [command, study if command == "plan" else grid, "--json"]
        out = io.StringIO()
        with (
            contextlib.chdir(folder),
            _corpora(None),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            code = main([*words, "--experiments", str(folder / "experiments")])
        assert code == 0, f"{study}: {command} ended with code {code}"
        found[f"{command}.json"] = json.loads(out.getvalue().replace(str(folder), "."))
    for path in sorted(Path(grid).rglob("*")):
        inside = path.relative_to(grid)
        if path.suffix not in (".csv", ".tex", ".md") or inside.parts[0] == "runs":
            continue
        if path.stat().st_size <= _MOST:
            found[str(inside)] = path.read_text()
    return _compared(found)


def differences(
    found: Any, wanted: Any, *, exactly: bool = False, where: str = ""
) -> Iterator[str]:
    """Yield the places where `found` differs from `wanted`.

    Args:
        found: A value of JSON.
        wanted: The frozen one.
        exactly: Compare sentences, and numbers to the last bit; else numbers to 1e-9, since
            another processor may sum in another order, and no text of more than three words.
        where: The place of both.
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in wanted.keys() ^ found.keys():
            yield f"{where}/{key}: only in what {'is found' if key in found else 'was frozen'}"
        for key in wanted.keys() & found.keys():
            yield from differences(found[key], wanted[key], exactly=exactly, where=f"{where}/{key}")
    elif isinstance(wanted, list) and isinstance(found, list):
        if len(found) != len(wanted):
            yield f"{where}: {len(found)} entries, not {len(wanted)}"
        for number, pair in enumerate(zip(found, wanted, strict=False)):
            yield from differences(*pair, exactly=exactly, where=f"{where}/{number}")
    elif not _equal(found, wanted, exactly):
        yield f"{where}: {str(found)[:300]!r}, not {str(wanted)[:300]!r}"


def _equal(found: Any, wanted: Any, exactly: bool) -> bool:
    if found == wanted or exactly or type(found) is not type(wanted):
        return found == wanted
    if isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12)
    if not isinstance(wanted, str):
        return False
    if "\n" in wanted:  # a table
        pairs = zip(_words(found), _words(wanted), strict=False)
        return len(_words(found)) == len(_words(wanted)) and all(
            _equal(*pair, exactly) for pair in pairs
        )
    return wanted.count(" ") > 2


_PROSE = {"|": r"[^|]", "%": r"\\(?:caption|par)"}
"""What a caption or a note begins with, by the first character of Markdown and LaTeX."""


def _words(table: str) -> list[Any]:
    """The entries of a table, numbers as such; of captions and notes only the numbers."""
    prose, words = _PROSE.get(table[:1], r"(?!)"), []
    for line in table.splitlines():
        entries = [_number(word) for word in re.split(r",| +", line)]
        caption = re.match(prose, line)
        words += [entry for entry in entries if not caption or isinstance(entry, float)]
    return words


def _number(word: str) -> Any:
    try:
        return float(word)
    except ValueError:
        return word


@contextlib.contextmanager
def _corpora(folder: Path | None) -> Iterator[None]:
    kept = {key: value for key, value in os.environ.items() if key != "LIGHTNING_APP_DATA"}
    given = {} if folder is None else {"LIGHTNING_APP_DATA": str(folder)}
    with patch.dict(os.environ, kept | given, clear=True):
        yield


def collect(name: str, folder: Path) -> dict[str, Any]:
    """Return what the program gives now for `settings` or a study, with `folder` to write in."""
    if name != "settings":
        return documents_of(name, folder)
    write_corpora(folder)
    with contextlib.chdir(folder), _corpora(folder / "corpora"):
        return {str(path.relative_to(ROOT)): settings_of(path) for path in (*BASES, *GRIDS)}


def _run(command: str) -> int:
    found: dict[str, Any] = {}
    for name in ("settings", *STUDIES):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = collect(name, Path(folder))
    if command == "write":
        text = json.dumps(found, sort_keys=True).encode()
        _EXPECTED.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        return 0
    lines = list(differences(found, expected(), exactly=True))
    print(*lines[:40], f"{len(lines)} differences", sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1]))
