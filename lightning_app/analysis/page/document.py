"""The page with its sections: who needs warm-up, what it costs, where training is stable, why."""

import re
from importlib import resources

from lightning_app.analysis.exports.task_tables import task_tables
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.headline import findings
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.appendix import appendix
from lightning_app.analysis.page.comparison import comparison_table
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.cost import cost
from lightning_app.analysis.page.figure import figures, headline_figure
from lightning_app.analysis.page.inside import inside
from lightning_app.analysis.page.metric import metric_table
from lightning_app.analysis.page.need import need
from lightning_app.analysis.page.parts import paper_table, section
from lightning_app.analysis.page.setup import cautions, what_was_run
from lightning_app.analysis.page.stable import stable
from lightning_app.analysis.run_summary import direction, preset_words, setting_of, state_counts
from lightning_app.version import __version__

NAMED = 4  # presets with their words in view
SERVED = (
    'if (document.documentElement.classList.contains("served")) '
    'document.querySelectorAll("[data-tensorboard]")'
    ".forEach((link) => { link.href = link.dataset.tensorboard; });"
)


def page(contents: Contents) -> str:
    """The whole document."""
    grid = contents.grid
    css = resources.files("lightning_app.analysis.page") / "page.css"
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
