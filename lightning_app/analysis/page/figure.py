"""The figures of a section, drawn inside the page, each with caption and files."""

import re
from collections.abc import Iterable

from lightning_app.analysis.figures.drawing import FigureFiles, Question
from lightning_app.analysis.figures.slices import drawn_slices, slices_of
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.run_summary import UNKNOWN, in_short

# Ink, paper and rules of a figure follow the page, which may be dark.
THEME = {"#222222": "var(--ink)", "#707070": "var(--muted)", "#e6e6e6": "var(--hair)"}


def figures(contents: Contents, question: Question) -> Markup:
    """Every figure of a question, or a sentence if no run has data for one."""
    shown = [
        _figure(contents, drawing, number)
        for number, drawing in enumerate(contents.drawings, start=1)
        if drawing.question == question
    ]
    if not shown:
        return Markup("")
    drawn, there = len(drawn_slices(contents.grid)), len(slices_of(contents.grid))
    if drawn < there:
        text = (
            f"Only the first {drawn} of {there} combinations of learning rate and other axes are "
            "drawn; the tables and results.csv have all."
        )
        shown.insert(0, element("p", text))
    return Markup("".join(shown))


def _figure(contents: Contents, drawing: FigureFiles, number: int) -> Markup:
    title = f"Figure {number}. {drawing.title}"
    return element(
        "figure",
        element("div", _inline(drawing, title, number), class_="card", tabindex="0"),
        element(
            "figcaption",
            element("b", f"{title}."),
            f" {drawing.text} {_setting(contents, drawing)} ",
            element("span", drawing.limits, class_="limits"),
            " ",
            element("span", *_files(drawing), class_="files"),
        ),
        id=f"figure-{number}",
    )


def _setting(contents: Contents, drawing: FigureFiles) -> str:
    seeds = len({cell.seed for cell in drawing.cells})
    devices = dict.fromkeys(str(cell.record.get("device") or UNKNOWN) for cell in drawing.cells)
    parts = [f"n = {seeds} seed{'s' * (seeds != 1)}, {len(drawing.cells)} finished runs"]
    parts += [] if drawing.group == "all" else [drawing.group]
    parts += [] if drawing.lr is None else [f"learning rate {drawing.lr:g}"]
    return f"{'; '.join(parts)}. {in_short(contents.grid)} Device: {', '.join(devices)}."


def _files(drawing: FigureFiles) -> Iterable[Markup]:
    for suffix, name in ((".svg", "SVG"), (".pdf", "PDF"), (".csv", "data")):
        path = drawing.path.with_suffix(suffix)
        label = f"{drawing.title}: {name}"
        yield element("a", name, href=f"{path.parent.name}/{path.name}", aria_label=label)


def _inline(drawing: FigureFiles, title: str, number: int) -> Markup:
    """The SVG without its prolog, with unique ids and with the page's links and colours."""
    text = drawing.path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="f{number}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1f{number}-", text)
    text = text.replace('xlink:href="../', 'xlink:href="')
    for colour, variable in THEME.items():
        text = text.replace(colour, variable)
    text = text.replace("fill: #ffffff", "fill: none")
    named = element("title", title)
    return Markup(re.sub(r"<svg([^>]*)>", rf'<svg\1 role="group">{named}', text, count=1))
