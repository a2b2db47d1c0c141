"""The page of a report: one HTML file that needs no network, and what was run."""

import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from lightning_app.config.tree import BLOCK, label
from lightning_app.report.facts import (
    DASH,
    direction,
    facts,
    nats,
    preset_words,
    setting_of,
    state_counts,
)
from lightning_app.report.headline import findings
from lightning_app.report.limits import SHORT, limits, urgent
from lightning_app.report.markup import Child, Markup, element, join_markup
from lightning_app.report.page_parts import (
    Contents,
    column,
    figures,
    head,
    headline_figure,
    html_table,
    paper_table,
    section,
)
from lightning_app.report.page_sections import (
    comparison_table,
    cost,
    inside,
    metric_table,
    need,
    stable,
)
from lightning_app.report.pairs import LEARNED
from lightning_app.report.published import our_settings
from lightning_app.report.results import OTHER_DATA, GridResults
from lightning_app.report.serve import tensorboard_path
from lightning_app.report.tables import task_tables
from lightning_app.report.tensorboard import run_url
from lightning_app.runs.records import OUTCOMES
from lightning_app.version import __version__

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


RECOMPUTE = "recompute_study.py"
FILES = {
    "results.csv, results.parquet": "a row for each cell: axes, state, metrics, time and memory",
    "validations.csv, validations.parquet": "a row for each cell and validation",
    "sensitivity.csv": "a row for each variant and score, with interval, p value and note",
    "effects.csv": "a row for each effect of the factors of the grid",
    "comparisons.csv": "a row for each comparison of the grid's metric",
    "failed_runs.csv": "a row for each arm: failed runs by each definition, medians and means",
    "failure_tests.csv": "a row for each exact test of shares of failed runs",
    "task_scores.csv": "a row for each score of a task by variant, ours and published",
    "figures/": "every figure as SVG and PDF, and its data as CSV",
    "tables/": "the headline, losses by warm-up, tasks: for LaTeX (booktabs) and Markdown",
    RECOMPUTE: "a program that computes the scores again",
    "references.bib": "the papers to cite",
}


def appendix(contents: Contents) -> Markup:
    return section(
        "appendix",
        "How are the numbers computed?",
        _formulas(contents.grid),
        _again(contents),
        _files(contents),
    )


def _formulas(grid: GridResults) -> Markup:
    reference = "the reference" if grid.reference_warmup is None else f"{grid.reference_warmup:,}"
    terms = {
        "l": f"final {grid.monitored.loss} of a run in nats per token, at most H; H for a run "
        "that stalled or was non-finite",
        "H": f"{grid.monitored.floor} of the validation targets: the loss of a model that "
        "knows how often each token occurs and nothing else",
        "stalled": "the run ended within 0.05 nats of H, or above, and was not learning; "
        "non-finite: its loss was not finite any more. Both count as H, the same for every variant",
        "not yet learned": "the run was learning when its budget ended, above that bar. It did not "
        "fail, but the same cap holds: its l is H if its loss is above H",
        "Δ": f"mean over seeds of l(warm-up 0) − l(warm-up {reference}), seed by seed",
        "relative Δ": "Δ / (H − l at the reference); undefined if the denominator is under "
        f"{LEARNED:g} nats (“never learned”)",
        "interaction": "Δ of the variant − Δ of the baseline, the same seeds in all four arms",
        "p": "the larger of two: Student's t of the values over seeds, and the same with the "
        "spread between seeds pooled over the variants of the slice; Holm's correction covers the "
        "whole grid",
        "steps saved": "τ = T − the step at which the run with warm-up reached the final loss of "
        "the run without, or minus the same the other way round; seed by seed",
        "lost steps": "T − the step at which the sum of the rates without warm-up reaches the sum "
        "with warm-up over all T steps",
        "R_w": "(mean over warm-ups of l − smallest l) / (H − smallest l), l averaged over seeds",
    }
    if len(grid.rates) > 1:
        terms |= {
            "N": "mean over seeds of l(0, best rate) − l(reference, best rate); the best rate of "
            "a warm-up is that of the smallest mean loss over the other seeds",
            "√(1 + n / (n − 1))": "factor of the standard errors of N and S, n seeds, where the "
            "second best rate of a warm-up is not worse by the t interval of its difference: the "
            "choices are not independent then (Nadeau and Bengio 2003)",
            "O": "mean over seeds of log2(θ(reference) / θ(0)); θ is the largest rate, going up "
            "from the best one, with l at most l* + 0.1 (H − l*), l* the smallest l of that seed "
            "and warm-up",
            "S": "mean over ln(rate) of l − l at the best rate, as in N (Wortsman et al. 2023)",
            "η_max": "largest rate of the grid at which no finished run stalled or was non-finite",
        }
    rows = (join_markup([element("dt", name), element("dd", text)]) for name, text in terms.items())
    return element("dl", *rows, class_="formulas")


def _again(contents: Contents) -> Markup:
    """How to compute the numbers again; a test types it."""
    grids = [part.folder for part in contents.grid.parts or (contents.grid,)]
    folders = [Path(os.path.relpath(folder, contents.out)).as_posix() for folder in grids]
    words = [RECOMPUTE, ".", *(folders if folders != ["."] else ())]
    return element(
        "p",
        element("a", RECOMPUTE, href=RECOMPUTE),
        " shares no code with this program. It computes every score again from the records of the "
        "runs, and compares it with sensitivity.csv, effects.csv and the table of mean losses. In "
        "the folder of this page: ",
        element("code", f"python {shlex.join(words)}"),
        " (exit code 0 if all numbers agree). Its first lines say what it leaves out.",
    )


def _files(contents: Contents) -> Markup:
    """The files that there are: the page is written after them."""
    there = {name: contents.out / name.split(",")[0] for name in FILES}
    items = (
        element("li", element("code", name), f": {FILES[name]}")
        for name, path in there.items()
        if path.exists()
    )
    return element("div", element("h3", "Files beside this page"), element("ul", *items))


NAMED = 4  # presets with their words in view
SERVED = (
    'if (document.documentElement.classList.contains("served")) '
    'document.querySelectorAll("[data-tensorboard]")'
    ".forEach((link) => { link.href = link.dataset.tensorboard; });"
)


def page(contents: Contents) -> str:
    """The whole document."""
    grid = contents.grid
    css = resources.files("lightning_app.report") / "page.css"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="made-from", content=contents.made_from),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{grid.name}: {_kind(grid)}"),
        element("style", Markup(css.read_text(encoding="utf-8"))),
    )
    sections = _sections(contents)
    # Joined here directly: each nested call would copy the megabytes of the figures again.
    first = [_opening(contents), Markup("<main>"), headline_figure(contents), cautions(grid)]
    body = [*first, _question(grid), _contents(sections), *sections]
    body += [Markup("</main>"), _closing(grid), element("script", Markup(SERVED))]
    parts = ["<!DOCTYPE html>\n", '<html lang="en">', head, "<body>", *body, "</body></html>\n"]
    return "".join(parts)


def _sections(contents: Contents) -> list[Markup]:
    grid = contents.grid
    if not grid.finished:
        nothing = "No cell has finished yet, so there are no scores."
        return [
            section("need", "Who needs warm-up?", element("p", element("strong", nothing))),
            what_was_run(contents),
        ]
    if grid.pruner is not None:
        drawn = (figures(contents, question) for question in ("need", "cost", "stable", "inside"))
        return [
            section("figures", "How did the runs go?", metric_table(contents), *drawn),
            what_was_run(contents),
        ]
    if grid.parts or grid.asks_warmup:
        first = [need(contents), cost(contents), stable(contents)]
    else:
        first = [better(contents), cost(contents)]
    return [
        *first,
        inside(contents),
        what_was_run(contents),
        appendix(contents),
    ]


def better(contents: Contents) -> Markup:
    """The first section of a grid that does not ask about warm-up."""
    tables = (paper_table(contents, table) for table in task_tables(contents.grid))
    shown = [comparison_table(contents), *tables, metric_table(contents)]
    return section("need", "Which is better?", *shown, figures(contents, "need"))


def _opening(contents: Contents) -> Markup:
    """The answer in one sentence, the other findings, and the setting of all runs."""
    grid = contents.grid
    found = findings(grid, contents.scores)
    claim, *others = found if found and not grid.parts else [_unanswered(grid), *found]
    summary = [state_counts(grid), setting_of(grid)]
    if grid.scored:
        words = "; ".join(
            dict.fromkeys(f"{each.title}, {direction(each.mode)}" for each in grid.measures)
        )
        summary.append(
            f"Runs are judged by {words}. “Stalled” is about the loss, which ended at its floor; "
            "whether a run failed is judged by its score. Losses are in nats per row, lower is "
            "better."
        )
    elif grid.finished:
        summary.append(
            "Losses are in nats per token: lower is better, and 0.1 less is about 10 % less "
            "perplexity."
        )
    if grid.finished and len(grid.warmups) > 1 and 0 in grid.warmups:
        summary.append(
            f"Warm-up {grid.warmups[-1]:,}: the learning rate rises linearly over the first "
            f"{grid.warmups[-1]:,} steps; warm-up 0: the full rate from step 1."
        )
    return element(
        "header",
        element("p", f"{grid.name} · {_kind(grid)} report", class_="kicker"),
        element("h1", claim),
        *(element("p", text, class_="finding") for text in others),
        element("p", " ".join(summary), class_="summary"),
        _presets(grid),
    )


def _unanswered(grid: GridResults) -> str:
    """The title of a page without a finding: the first sentence of the question, or the name."""
    sentence = re.match(r".*?[.?!](?=\s|$)", " ".join(grid.question.split()))
    return grid.name if sentence is None or grid.parts else sentence[0]


def _presets(grid: GridResults) -> Markup:
    """What the names of the presets mean: a line for few of them, folded for many."""
    words = preset_words(grid)
    if not words:
        return Markup("")
    text = " · ".join(words)
    if len(words) <= NAMED:
        return element("p", text, class_="summary")
    folded = element("summary", f"What the names of the {len(words)} wirings mean")
    return element("details", folded, element("p", text), class_="summary")


def _question(grid: GridResults) -> Markup:
    """The question of the grid file, the first paragraph in view."""
    texts = [" ".join(text.split()) for text in re.split(r"\n\s*\n", grid.question)]
    first, *rest = [text for text in texts if text] or [""]
    if not first:
        return Markup("")
    shown = [element("p", first, class_="lead")]
    if rest:
        paragraphs = (element("p", text) for text in rest)
        shown.append(element("details", element("summary", "More from the grid file"), *paragraphs))
    return element("div", *shown, class_="question")


def _kind(grid: GridResults) -> str:
    return "warm-up sensitivity" if grid.parts or grid.asks_warmup else "ablation"


def _contents(sections: list[Markup]) -> Markup:
    """Links to the sections, by their questions."""
    found = [re.match(r'<section id="([a-z]+)"><h2>(.*?)</h2>', text) for text in sections]
    links = [
        element("li", element("a", Markup(match[2]), href=f"#{match[1]}"))
        for match in found
        if match
    ]
    return element("nav", element("ol", *links), aria_label="Contents")


def _closing(grid: GridResults) -> Markup:
    ends = [str(cell.record.get("finished") or "") for cell in grid.finished]
    last = f" The last cell finished at {max(ends)}." if any(ends) else ""
    return element("footer", element("p", f"lightning_app {__version__}.{last}"))
