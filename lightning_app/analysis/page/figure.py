"""The figures of a section, drawn inside the page, each with caption and files."""

import re
from collections.abc import Iterable

from lightning_app.analysis.figures.drawing import FigureFiles, Question
from lightning_app.analysis.figures.slices import drawn_slices, slices_of
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.grid_axes import label

# Ink, paper and rules of a figure follow the page, which may be dark.
THEME = {"#222222": "var(--ink)", "#707070": "var(--muted)", "#e6e6e6": "var(--hair)"}


def headline_figure(contents: Contents) -> Markup:
    """The first figure, if it answers the question who needs warm-up; nothing without one."""
    drawing = next(iter(contents.drawings), None)
    if drawing is None or drawing.question != "need":
        return Markup("")
    return _figure(contents, drawing, 1)


def figures(contents: Contents, question: Question) -> Markup:
    """The figures of a question except the headline, or nothing if no run has data for one.

    Those of all groups of runs but the first are folded.
    """
    found: dict[str, list[Markup]] = {}
    for number, drawing in enumerate(contents.drawings, start=1):
        if drawing.question == question and not (number == 1 and question == "need"):
            found.setdefault(drawing.group, []).append(_figure(contents, drawing, number))
    if not found:
        return Markup("")
    several = [group for group in found if group != "all"]
    shown = [figure for group in ("all", *several[:1]) for figure in found.get(group, ())]
    shown += [
        element("details", element("summary", f"The same for {group}"), *found[group])
        for group in several[1:]
    ]
    groups = {group for group, _ in drawn_slices(contents.grid)}
    there = {group for group, _ in slices_of(contents.grid)}
    if len(groups) < len(there):
        text = (
            f"Only the first {len(groups)} of {len(there)} combinations of the other axes are "
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
    parts = [f"n = {seeds} seed{'s' * (seeds != 1)}, {len(drawing.cells)} finished runs"]
    groups = list(dict.fromkeys(cell.group for cell in drawing.cells))
    parts += [] if groups == ["all"] else [" and ".join(groups)]
    known = [cell for cell in contents.grid.finished if cell.group in groups]
    several = len({cell.lr for cell in known}) > 1
    if drawing.lr is not None:
        best = any((group, drawing.lr) in drawn_slices(contents.grid) for group in groups)
        why = ", where the runs learn best" if several and best else ""
        parts.append(f"learning rate {label(drawing.lr)}{why}")
    return f"{'; '.join(parts)}."


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
