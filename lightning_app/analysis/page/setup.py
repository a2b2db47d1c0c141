"""The section "What was run?"."""

from typing import Any

from lightning_app.analysis.formatting import DASH, nats
from lightning_app.analysis.grid_results import OTHER_DATA, GridResults
from lightning_app.analysis.limits import SHORT, limits, urgent
from lightning_app.analysis.markup import Child, Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import column, head, html_table, section
from lightning_app.analysis.published import our_settings
from lightning_app.analysis.run_summary import facts
from lightning_app.analysis.serve import tensorboard_path
from lightning_app.analysis.tensorboard import run_url
from lightning_app.grid_axes import BLOCK, label
from lightning_app.records import OUTCOMES

TEXT = frozenset({"variant", "outcome", "diverged_rule"})


def cautions(grid: GridResults) -> Markup:
    """What may not be concluded: what is urgent and three lines in view, the rest folded."""
    items = [element("li", item) for item in limits(grid)]
    shown = SHORT + (0 if grid.parts else len(urgent(grid)))
    folded = [element("ul", *items[shown:])] if items[shown:] else []
    rest = [element("summary", f"{len(items) - shown} more limits, and how the labels are made")]
    return element(
        "aside",
        element("h2", "What may not be concluded"),
        element("ul", *items[:shown]),
        *([element("details", *rest, *folded)] if folded else []),
        class_="caution",
        aria_label="What may not be concluded",
    )


def what_was_run(contents: Contents) -> Markup:
    grid = contents.grid
    parts = [_facts(grid)]
    if grid.finished:
        parts += [_published(contents), _all_cells(contents)]
    return section("run", "What was run?", *parts, _unfinished(contents), _tensorboard(grid))


def _facts(grid: GridResults) -> Markup:
    rows = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in facts(grid).items()
    ]
    inner = element(
        "table",
        element("caption", "The whole grid; values that are not axes are the same for all cells."),
        element("tbody", *rows),
        class_="facts",
    )
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label="Setting")


def _published(contents: Contents) -> Markup:
    """Figures of papers beside ours, with the differences between the two."""
    frame = contents.published
    if frame.empty:
        return Markup("")
    wide = {"paper", "setting", "differences", "note"}
    names = [str(name) for name in frame.columns]
    columns = [column(name.replace("_", " "), text=name in wide) for name in names]
    rows = []
    for record in frame.to_dict("records"):
        values = [_value(name, record[name]) for name in names]
        cells = [
            element("td", value, class_="text wrap" if name in wide else None)
            for name, value in list(zip(names, values, strict=True))[1:]
        ]
        rows.append(element("tr", element("th", values[0], scope="row", class_="wrap"), *cells))
    caption = (
        "Published figures and ours. They are not the same experiment: read the differences "
        f"before the numbers. Ours: {' '.join(our_settings(contents.grid))}"
    )
    return html_table(contents.next_table(), caption, columns, [element("tbody", *rows)])


def _all_cells(contents: Contents) -> Markup:
    grid, results = contents.grid, contents.results
    shown = {"variant": "variant", "warmup": "warm-up", "lr": "lr", "seed": "seed"}
    axes = [key for key in grid.axes if key in results and not key.startswith(BLOCK)]
    shown |= {key: key for key in axes} | {"outcome": "outcome"}
    shown |= {key: key for key in results if "/" in key}
    if any(cell.state == "diverged" for cell in grid.finished):
        shown |= {"diverged_step": "at step", "diverged_rule": "rule"}
    shown |= {"seconds": "seconds"}
    columns = [column(title, text=key in TEXT) for key, title in shown.items()]
    columns.append(column("run", text=True))
    records = {(r["id"], r["group"]): r for r in results.to_dict("records")}
    rows = []
    for cell in grid.finished:
        record = records[cell.id, cell.group]
        values = [
            element("td", _value(key, record[key]), class_=_classes(key, record))
            for key in list(shown)[1:]
        ]
        folder = element(
            "a", "folder", href=contents.link(cell), aria_label=f"folder of {cell.name}"
        )
        curves = element(
            "a",
            "curves",
            href=run_url("http://localhost:6006/", cell),
            data_tensorboard=run_url(tensorboard_path(cell.folder.parent.parent), cell),
            aria_label=f"curves of {cell.name} in TensorBoard",
        )
        rows.append(
            element(
                "tr",
                head(str(record["variant"])),
                *values,
                element("td", folder, " ", curves, class_="text"),
            )
        )
    caption = (
        "Every finished cell, as in results.csv (which has more columns). “curves” links to "
        "TensorBoard if it runs (see below). "
    )
    return html_table(contents.next_table(), caption, columns, [element("tbody", *rows)])


def _classes(key: str, record: dict[Any, Any]) -> str | None:
    kinds = ["text"] if key in TEXT else []
    if key == "outcome" and record["status"] != "ok":
        kinds.append("bad")
    return " ".join(kinds) or None


def _value(key: str, value: Any) -> Child:
    import pandas as pd

    if value is None or value is pd.NA or value != value:
        return DASH
    if key == "outcome":
        return OUTCOMES[value]
    if key == "lr":
        return label(value)
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 or key == "seconds" else nats(value)
    return str(value)


def _unfinished(contents: Contents) -> Markup:
    grid = contents.grid
    absent = [cell for cell in grid.cells if not cell.finished and cell.state != "pruned"]
    heading = element("h3", "Failed and missing cells")
    waiting = len(grid.without_parent)
    if not absent and waiting:
        return Markup(heading + element("p", _waiting(waiting)))
    if not absent:
        pruned = any(cell.state == "pruned" for cell in grid.cells)
        every = "every planned cell has a result" + " or was pruned" * pruned
        return Markup(heading + element("p", f"None: {every}."))
    says = {
        "failed": "crashed",
        "unfinished": "running or interrupted",
        "waiting": "not started",
        OTHER_DATA: "trained on other data, left out",
        "damaged": "damaged result",
    }
    columns = [column(title, text=True) for title in ("Variant", "run", "state", "last message")]
    rows = [
        element(
            "tr",
            head(cell.variant),
            element("td", element("code", cell.name), class_="text"),
            element("td", says[cell.state], class_="text bad" if cell.error else "text"),
            element("td", cell.error or DASH, class_="text wrap"),
        )
        for cell in absent
    ]
    caption = "Planned cells without a result. Scores are without them and note their number."
    again = element(
        "p",
        "The same ",
        element("code", "ablate run"),
        " continues with them; crashed cells need ",
        element("code", "--retry-failed"),
        ".",
    )
    body = [element("tbody", *rows)]
    table = html_table(contents.next_table(), caption, columns, body)
    return Markup(heading + table + again + (element("p", _waiting(waiting)) if waiting else ""))


def _waiting(count: int) -> str:
    cells = "1 cell waits" if count == 1 else f"{count} cells wait"
    return f"{cells} for runs of another grid to start from; ablate plan names them."


def _tensorboard(grid: GridResults) -> Markup:
    grids = grid.parts or (grid,)
    alone = [element("code", f"tensorboard --logdir {part.folder}") for part in grids]
    return Markup(
        element("h3", "Curves in TensorBoard")
        + element(
            "p",
            element("code", f"ablate report --serve {' '.join(part.name for part in grids)}"),
            " shows this page and TensorBoard together; ",
            *((code, ", ") for code in alone[:-1]),
            alone[-1],
            " TensorBoard alone, to which the table links. HPARAMS lists all cells "
            "with parameters, final metrics and status. CUSTOM SCALARS has a chart for each "
            "variant with its curves by warm-up, the health of all runs, and the inside of the "
            "blocks.",
        )
    )
