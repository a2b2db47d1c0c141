"""A table, laid out once for the page, for papers (LaTeX and Markdown) and for a terminal."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lightning_app.report.facts import DASH

Output = Literal["page", "paper", "terminal"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of the page; `served` is its target where `ablate report --serve` serves the page."""

    text: str
    href: str
    label: str
    served: str = ""


@dataclass(frozen=True)
class Datum:
    """A text, and lines `below` it, such as an interval. Only the page shows the rest.

    `aside` holds the values of the seeds, and `title` says why there is no value; a terminal lists
    these reasons below the table.
    """

    text: str
    below: tuple[str, ...] = ()
    aside: str = ""
    title: str = ""
    bad: bool = False
    wrap: bool = False
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Heading:
    """A column of numbers, or of `words`.

    The page shows the `unit` below the title. `between` joins the lines of a cell in a paper; a
    `brief` column shows only the first line in a terminal.
    """

    title: str
    unit: str = ""
    words: bool = False
    outputs: tuple[Output, ...] = ("page", "paper", "terminal")
    between: str = "\n"
    brief: bool = False


Bodies = Mapping[str, Sequence[tuple[Datum, ...]]]


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """`bodies` has the rows of each slice of the grid; a single slice has the name "".

    The first cell of a row is its name. `notes` explain why scores are undefined, and other facts;
    only the page adds `page_caption`, and a terminal shows the `title` instead of a caption.
    """

    name: str
    caption: str
    columns: tuple[Heading, ...]
    bodies: Bodies
    notes: tuple[str, ...] = ()
    page_caption: str = ""
    title: str = ""
    heading: str = "Notes:"

    def on(self, output: Output) -> list[tuple[int, Heading]]:
        """The columns of an output, and their places in a row."""
        return [(n, column) for n, column in enumerate(self.columns) if output in column.outputs]


Item = TypeVar("Item")
Columns = Iterable[tuple[Heading, Callable[[Item], Datum | str]]]
"""The headings of a table, each with the function that computes its datum from a row."""


def laid_out(
    name: str, columns: Columns[Item], rows: Iterable[tuple[str, Item]], **more: Any
) -> ReportTable:
    """A table from its columns and its rows, each with the slice it belongs to."""
    columns, bodies = list(columns), dict[str, list[tuple[Datum, ...]]]()
    for where, item in rows:
        values = (value(item) for _, value in columns)
        row = tuple(Datum(each) if isinstance(each, str) else each for each in values)
        bodies.setdefault(where, []).append(row)
    headings = tuple(heading for heading, _ in columns)
    return ReportTable(name=name, columns=headings, bodies=bodies, **more)


def _on_paper(table: ReportTable) -> tuple[list[Heading], dict[str, list[list[str]]]]:
    """The columns shown in a paper, and the cell texts with line breaks between their lines."""
    shown = table.on("paper")
    return [column for _, column in shown], {
        where: [
            [column.between.join((row[n].text, *row[n].below)) for n, column in shown]
            for row in rows
        ]
        for where, rows in table.bodies.items()
    }


def markdown(table: ReportTable) -> str:
    """A pipe table; slices are rows in bold."""
    columns, bodies = _on_paper(table)
    sides = [":--" if column.words else "--:" for column in columns]
    lines = [_pipe(_escaped(column.title) for column in columns), _pipe(sides)]
    for where, rows in bodies.items():
        if where:
            lines.append(_pipe([f"**{_escaped(where)}**", *[""] * (len(columns) - 1)]))
        lines += [_pipe(map(_escaped, row)) for row in rows]
    notes = "".join(f"- {_escaped(note)}\n" for note in table.notes)
    listed = f"\nA dash marks an undefined score.\n\n{notes}" if notes else ""
    return "\n".join([*lines, "", _escaped(table.caption), listed])


def latex(table: ReportTable) -> str:
    r"""A `table*` of booktabs; a cell of several lines becomes as many rows of the table."""
    columns, bodies = _on_paper(table)
    body = []
    for number, (where, rows) in enumerate(bodies.items()):
        body += [r"\midrule"] * (number > 0)
        if where:
            body.append(rf"\multicolumn{{{len(columns)}}}{{l}}{{\emph{{{tex(where)}}}}} \\")
        body += [line for row in rows for line in _tex_rows(row)]
    notes = [rf"\par\smallskip\raggedright\footnotesize {tex(note)}." for note in table.notes]
    return "\n".join(
        [
            r"% \usepackage{booktabs,graphicx}",
            r"\begin{table*}",
            r"\centering",
            rf"\caption{{{tex(table.caption)}}}",
            rf"\label{{tab:{table.name.replace('_', '-')}}}",
            r"\medskip",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{''.join('l' if column.words else 'r' for column in columns)}}}",
            r"\toprule",
            rf"{' & '.join(tex(column.title) for column in columns)} \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            *notes,
            r"\end{table*}",
            "",
        ]
    )


def tex(text: str) -> str:
    """Text for LaTeX: special characters escaped, symbols of the report as formulas."""
    escaped = "".join(_LETTERS.get(letter, letter) for letter in text)
    named = re.compile(r"(?<![A-Za-z_\\])([A-Z]|\$\\eta\$)\\_(\w+)")
    return named.sub(lambda of: rf"${of[1].strip('$')}_{{\mathrm{{{of[2]}}}}}$", escaped)


_LETTERS = {letter: rf"\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "<": "$<$",
    ">": "$>$",
    "·": r"$\cdot$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "Δ": r"$\Delta$",
    "η": r"$\eta$",
    DASH: "--",
    "“": "``",
    "”": "''",
}


def _tex_rows(row: Sequence[str]) -> list[str]:
    lines = [cell.split("\n") for cell in row]
    height = max(map(len, lines))
    filled = [[*map(tex, cell), *[""] * (height - len(cell))] for cell in lines]
    return [" & ".join(cells).rstrip() + r" \\" for cells in zip(*filled, strict=True)]


def _pipe(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_|<>])", r"\\\1", text).replace("\n", "<br>")
