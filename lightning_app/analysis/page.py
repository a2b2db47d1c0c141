"""The page of a report, section by section. It needs no script, no network and no other file."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from lightning_app import __version__
from lightning_app.analysis.facts import DASH, budget_of, counts, facts, in_short, limits
from lightning_app.analysis.figures import Drawing, drawn_slices, slices_of
from lightning_app.analysis.markup import Child, Markup, element, join
from lightning_app.analysis.runs import Cell, Grid
from lightning_app.analysis.sensitivity import LEARNED, Score
from lightning_app.analysis.statistics import LEVEL, POWER, ended_alike, mean, t_interval

if TYPE_CHECKING:
    import pandas as pd

Row = Callable[[str, dict[str, Score]], Markup]
FIGURES = Markup("<!-- figures -->")  # they come last: each level around them would copy them
HEADLINE = ("delta", "relative_delta", "interaction")
MORE, LESS, SAME = "needs it more", "needs it less", "no difference shown"
NEVER = "never learned"
VERDICTS = {
    MORE: "warm-up matters more for",
    LESS: "warm-up matters less for",
    SAME: "no difference shown for",
    NEVER: "never learned, with warm-up either:",
}
NAMES = {
    "delta": "Δ",
    "relative_delta": "relative Δ",
    "interaction": "interaction",
    "R_w": "R_w",
    "S_w": "S_w",
    "D": "D",
}


def page(
    grid: Grid, scores: Sequence[Score], results: "pd.DataFrame", drawings: Sequence[Drawing]
) -> str:
    """The whole document. `results` holds the finished cells."""
    css = resources.files("lightning_app.analysis") / "report.css"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{grid.name}: warm-up sensitivity"),
        element("style", Markup(css.read_text(encoding="utf-8"))),
    )
    if grid.finished and grid.pruner is not None:
        sections = [
            _what_was_run(grid),
            _cautions(grid),
            _figures(grid, drawings),
            _all_cells(grid, results),
        ]
    elif grid.finished:
        sections = [
            _what_was_run(grid),
            _cautions(grid),
            _headline(grid, scores),
            FIGURES,
            _by_warmup(grid, scores),
            _over_rates(grid, scores),
            _all_cells(grid, results),
        ]
    else:
        nothing = "No cell has finished yet: there is nothing to score."
        sections = [element("p", element("strong", nothing)), _what_was_run(grid)]
    main = element("main", *sections, _unfinished(grid), _tensorboard(grid))
    document = element(
        "html", head, element("body", _opening(grid, scores), main, _closing(grid)), lang="en"
    )
    figures = _figures(grid, drawings) if grid.finished else ""
    return f"<!DOCTYPE html>\n{document}\n".replace(FIGURES, figures)


def _opening(grid: Grid, scores: Sequence[Score]) -> Markup:
    paragraphs = [" ".join(text.split()) for text in re.split(r"\n\s*\n", grid.question)]
    return element(
        "header",
        element("p", "Warm-up sensitivity report", class_="kicker"),
        element("h1", grid.name),
        *(element("p", text, class_="lead") for text in paragraphs if text),
        element("p", counts(grid), class_="summary"),
        *(element("p", text, class_="finding") for text in _findings(grid, scores)),
    )


def _findings(grid: Grid, scores: Sequence[Score]) -> list[str]:
    """The headline in a sentence for each group and rate; it says no more than Table 1."""
    found = []
    if grid.baseline is None:
        return found
    for where, variants in _slices(scores).items():
        read: dict[str, list[str]] = {}
        for variant, own in variants.items():
            if "interaction" in own:
                read.setdefault(_reading(own), []).append(variant)
        told = [
            f"{verdict} {', '.join(read[reading])}"
            for reading, verdict in VERDICTS.items()
            if reading in read
        ]
        if told:
            rate = f", at {where}" if where else ""
            budget = f"Within {budget_of(grid)}{rate}, compared with {grid.baseline}"
            found.append(f"{budget}: {'; '.join(told)}.")
    return found


def _what_was_run(grid: Grid) -> Markup:
    rows = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in facts(grid).items()
    ]
    table = element(
        "table",
        element("caption", "The whole grid; every value that is no axis holds for all cells."),
        element("tbody", *rows),
        class_="facts",
    )
    return element("section", element("h2", "What was run"), _scroll(table))


def _cautions(grid: Grid) -> Markup:
    return element(
        "aside",
        element("h2", "What may not be concluded"),
        element("ul", *(element("li", item) for item in limits(grid))),
        class_="caution",
    )


def _headline(grid: Grid, scores: Sequence[Score]) -> Markup:
    shown = [s for s in scores if s.score in HEADLINE or s.score.startswith("stalls")]
    columns = [
        _column("Variant", text=True),
        _column("Reads", text=True),
        _column("Δ", "nats per token"),
        _column("relative Δ", "of what is learned"),
        _column("interaction", f"Δ − Δ of {grid.baseline}" if grid.baseline else "no baseline"),
        _column("p", "Holm"),
        *(_column("stalls", f"warm-up {warmup:,}") for warmup in grid.warmups),
        _column("seeds"),
    ]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        versus = own["interaction"]
        return element(
            "tr",
            element("th", variant, scope="row"),
            element("td", _reading(own), class_="text"),
            *(_estimate(own[name]) for name in HEADLINE),
            element("td", _p(versus.p_holm)),
            *(_share(own.get(f"stalls w={warmup}")) for warmup in grid.warmups),
            element("td", str(own["delta"].seeds)),
        )

    few = any(len(score.each) > 1 for score in shown)
    booted = any(score.bootstrap for score in shown)
    caption = (
        f"What each variant loses without warm-up. In brackets: {LEVEL:.0%} intervals (t over "
        "seeds for Δ and the interaction, Fieller for the ratio, Wilson for stalls). "
        f"{'Below them: the values of the seeds. ' if few else ''}"
        f"{'Bootstrap-t intervals besides: sensitivity.csv. ' if booted else ''}"
        f"{in_short(grid)}"
    )
    table = _table("Table 1.", caption, columns, _bodies(shown, row, len(columns)))
    return element(
        "section",
        element("h2", "Which variants need warm-up"),
        _scroll(table),
        _notes(shown, "A dash is an undefined score. Notes:"),
        _power(scores),
        _formulas(grid),
    )


def _power(scores: Sequence[Score]) -> Markup:
    """What differences the grid could have found, for each group and rate."""
    told = {}
    for where, variants in _slices(scores).items():
        for own in variants.values():
            score = own.get("detectable")
            if score is not None and not math.isnan(score.estimate):
                at = f", {where}" if where else ""
                found = f"{_nats(score.estimate)} nats with {score.seeds} seeds{at} ({score.note})"
                told[found] = None
    if not told:
        return Markup("")
    text = (
        f"“{SAME[0].upper()}{SAME[1:]}” is not “no difference”. The smallest true interaction that "
        f"one test at {1 - LEVEL:.0%} finds {POWER:.0%} of the time, at the spread between seeds "
        "seen here:"
    )
    items = element("ul", *(element("li", found) for found in told))
    return element("div", element("p", text), items, class_="notes")


def _reading(own: dict[str, Score]) -> str:
    versus, score = own["interaction"], own["delta"]
    if NEVER in score.note:
        return NEVER
    if math.isnan(score.estimate):
        return DASH
    if versus.note == "is the baseline":
        return "the baseline"
    if math.isnan(versus.p_holm):
        return DASH
    if versus.p_holm >= 1 - LEVEL:
        return SAME
    return MORE if versus.estimate > 0 else LESS


def _formulas(grid: Grid) -> Markup:
    reference = "the reference" if grid.reference_warmup is None else f"{grid.reference_warmup:,}"
    terms = {
        "Δ": f"mean over seeds of l(warm-up 0) − l(warm-up {reference}), seed by seed",
        "relative Δ": "Δ / (H − l at the reference); undefined where the denominator is under "
        f"{LEARNED:g} nats (“never learned”)",
        "interaction": "Δ of the variant − Δ of the baseline, the same seeds in all four arms",
        "R_w": "(mean over warm-ups of l − smallest l) / (H − smallest l), l averaged over seeds",
        "S_w": "mean over warm-ups of l − smallest l; it ranks a variant that stalls everywhere as "
        "insensitive, and is here only for comparison with Wortsman et al. 2023",
    }
    if len(grid.rates) > 1:
        terms["D"] = "smallest l over rates without warm-up − smallest l over rates and warm-ups"
        terms["η_max"] = "largest rate of the grid at which no finished run stalled"
    return element(
        "div",
        element(
            "p",
            "l is the final val/nll of a run, H the unigram entropy of the validation targets. A "
            "run that ends within 0.05 nats of H or above, or is not finite, has failed and counts "
            "as H, the same for every variant.",
        ),
        element("dl", *(_term(name, text) for name, text in terms.items()), class_="formulas"),
        class_="notes",
    )


def _term(name: str, text: str) -> Markup:
    return join([element("dt", name), element("dd", text)])


def _figures(grid: Grid, drawings: Sequence[Drawing]) -> Markup:
    shown = [
        _figure(grid, drawing, number) for number, drawing in enumerate(drawings, start=1)
    ] or [element("p", "No finished run has a finite loss to draw.")]
    drawn, there = len(drawn_slices(grid)), len(slices_of(grid))
    if drawn < there:
        text = (
            f"Drawn are the first {drawn} of {there} combinations of learning rate and other axes; "
            "the tables and results.csv have all."
        )
        shown.insert(0, element("p", text))
    return element("section", element("h2", "Figures"), *shown)


def _figure(grid: Grid, drawing: Drawing, number: int) -> Markup:
    seeds = {cell.seed for cell in drawing.cells}
    where = "" if drawing.group == "all" else f" {drawing.group}."
    setting = f"n = {len(seeds)} seed{'s' * (len(seeds) != 1)}, {len(drawing.cells)} finished runs."
    setting += f"{where} Learning rate {drawing.lr or 0:g}. {in_short(grid)}"
    if drawing.kind == "final":
        title = "Final validation loss against warm-up."
        text = (
            "Thin lines join the runs of one seed; diamonds are means over seeds with their "
            f"{LEVEL:.0%} t interval (none for one seed). Crosses are runs that stalled or "
            "diverged, drawn at the unigram entropy (dashed) as the scores count them. Warm-ups "
            "are evenly spaced, not to scale."
        )
    else:
        what = "Training" if drawing.kind.startswith("train") else "Validation"
        title = f"{what} loss during training."
        text = (
            "Colour tells the variant, line style the warm-up. Thin lines are single seeds, heavy "
            "lines their mean at the steps that all of them have logged; neither "
            "smoothing nor interval. Dashed: unigram entropy."
        )
    return element(
        "figure",
        element("div", _inline_svg(drawing, f"Figure {number}. {title}", number), class_="card"),
        element("figcaption", element("b", f"Figure {number}. {title}"), f" {text} {setting}"),
    )


def _inline_svg(drawing: Drawing, title: str, number: int) -> Markup:
    """The file without its prolog; its ids are made the figure's own, its title is spoken."""
    text = drawing.path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="f{number}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1f{number}-", text)
    text = text.replace('<style type="text/css">*', '<style type="text/css">figure svg *')
    named = element("title", title)
    return Markup(re.sub(r"<svg([^>]*)>", rf'<svg\1 role="img">{named}', text, count=1))


def _by_warmup(grid: Grid, scores: Sequence[Score]) -> Markup:
    shown = [score for score in scores if score.score in ("R_w", "S_w")]
    columns = [
        _column("Variant", text=True),
        *(_column(f"warm-up {warmup:,}", "val/nll, nats") for warmup in grid.warmups),
        _column("R_w"),
        _column("S_w", "nats"),
    ]

    finished: dict[tuple[str, str, float, int | None], list[Cell]] = {}
    for cell in grid.finished:
        key = (cell.variant, cell.group, cell.lr or 0.0, cell.warmup)
        finished.setdefault(key, []).append(cell)

    def row(variant: str, own: dict[str, Score]) -> Markup:
        key = (variant, own["R_w"].group, own["R_w"].lr)
        return element(
            "tr",
            element("th", variant, scope="row"),
            *(_mean(finished.get((*key, warmup), [])) for warmup in grid.warmups),
            _estimate(own["R_w"]),
            _estimate(own["S_w"]),
        )

    caption = (
        "Final loss by warm-up, mean over the finished seeds with its t interval, failures counted "
        "as the unigram entropy; no interval where some seeds failed and others did not; and how "
        f"flat it is over warm-ups. {in_short(grid)}"
    )
    table = _table("Table 2.", caption, columns, _bodies(shown, row, len(columns)))
    heading = element("h2", "Loss by warm-up")
    return element("section", heading, _scroll(table), _notes(shown, "Notes:"))


def _over_rates(grid: Grid, scores: Sequence[Score]) -> Markup:
    shown = [score for score in scores if score.score == "D" or score.score.startswith("eta_max")]
    if not shown:
        return Markup("")
    columns = [
        _column("Variant", text=True),
        _column("D", "nats per token"),
        *(_column("η_max", f"warm-up {warmup:,}") for warmup in grid.warmups),
    ]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        rates = [own.get(f"eta_max w={warmup}") for warmup in grid.warmups]
        return element(
            "tr",
            element("th", variant, scope="row"),
            _estimate(own["D"]),
            *(element("td", DASH if s is None else _rate(s.estimate)) for s in rates),
        )

    rates = ", ".join(f"{lr:g}" for lr in grid.rates)
    caption = f"What no warm-up costs with the rate tuned again, over the rates {rates}."
    table = _table("Table 3.", caption, columns, _bodies(shown, row, len(columns)))
    heading = element("h2", "Over learning rates")
    return element("section", heading, _scroll(table), _notes(shown, "Notes:"))


def _all_cells(grid: Grid, results: "pd.DataFrame") -> Markup:
    shown = {"variant": "variant", "warmup": "warm-up", "lr": "lr", "seed": "seed"}
    axes = [key for key in grid.axes if key in results and not key.startswith("model.block.")]
    shown |= {key: key for key in axes} | {"status": "status"}
    shown |= {key: key for key in results if "/" in key}
    shown |= {"diverged_step": "diverged at", "diverged_rule": "rule", "seconds": "seconds"}
    shown |= {"name": "run"}
    text = {"variant", "status", "diverged_rule", "name"}
    if not any(cell.state == "diverged" for cell in grid.finished):
        del shown["diverged_step"], shown["diverged_rule"]
    columns = [_column(title, text=key in text) for key, title in shown.items()]
    rows = []
    for record in results.to_dict("records"):
        cells = [_value(key, record[key]) for key in shown]
        first = element("th", cells[0], scope="row")
        others = [
            element("td", value, class_=_classes(key, record, key in text))
            for key, value in zip(list(shown)[1:], cells[1:], strict=True)
        ]
        rows.append(element("tr", first, *others))
    caption = f"Every finished cell, as in results.csv (which has more columns). {in_short(grid)}"
    table = _table("Table A.", caption, columns, [element("tbody", *rows)])
    return element("section", element("h2", "All cells"), _scroll(table))


def _classes(key: str, record: dict[Any, Any], text: bool) -> str | None:
    kinds = ["text"] if text else []
    if key == "status" and record["status"] != "ok":
        kinds.append("bad")
    return " ".join(kinds) or None


def _unfinished(grid: Grid) -> Markup:
    absent = [cell for cell in grid.cells if not cell.finished and cell.state != "pruned"]
    heading = element("h2", "Failed and missing cells")
    if not absent:
        pruned = any(cell.state == "pruned" for cell in grid.cells)
        every = "every planned cell has a result" + " or was pruned" * pruned
        return element("section", heading, element("p", f"None: {every}."))
    says = {
        "failed": "crashed",
        "unfinished": "running or cut short",
        "waiting": "not started",
    }
    columns = [_column(title, text=True) for title in ("Variant", "run", "state", "last message")]
    rows = [
        element(
            "tr",
            element("th", cell.variant, scope="row"),
            element("td", element("code", cell.name), class_="text"),
            element("td", says[cell.state], class_="text bad" if cell.error else "text"),
            element("td", cell.error or DASH, class_="text wrap"),
        )
        for cell in absent
    ]
    caption = "Planned cells without a result. No score counts them; each says how many it lacks."
    table = _table("Table B.", caption, columns, [element("tbody", *rows)])
    again = element(
        "p",
        "The same ",
        element("code", "ablate run"),
        " goes on with them; crashed cells need ",
        element("code", "--retry-failed"),
        ".",
    )
    return element("section", heading, _scroll(table), again)


def _tensorboard(grid: Grid) -> Markup:
    return element(
        "section",
        element("h2", "Curves in TensorBoard"),
        element("pre", element("code", f"tensorboard --logdir {grid.folder}")),
        element(
            "p",
            "HPARAMS lists all cells with parameters, final metrics and status. CUSTOM SCALARS has "
            "a chart for each variant with its curves by warm-up, and the health of all runs.",
        ),
    )


def _closing(grid: Grid) -> Markup:
    ends = [str(cell.record.get("finished") or "") for cell in grid.finished]
    last = f" The last cell finished at {max(ends)}." if any(ends) else ""
    files = "results.csv, results.parquet, sensitivity.csv and figures/ lie beside this page."
    return element("footer", element("p", f"lightning_app {__version__}. {files}{last}"))


def _slices(scores: Sequence[Score]) -> dict[str, dict[str, dict[str, Score]]]:
    """Scores by slice of the grid (rate and group, in words), variant and name."""
    several = len({(score.group, score.lr) for score in scores if not math.isnan(score.lr)}) > 1
    slices: dict[str, dict[str, dict[str, Score]]] = {}
    for score in scores:
        rate = "" if math.isnan(score.lr) or not several else f"learning rate {score.lr:g}"
        where = ", ".join(part for part in (rate, score.group) if part and part != "all")
        slices.setdefault(where, {}).setdefault(score.variant, {})[score.score] = score
    return slices


def _bodies(scores: Sequence[Score], row: Row, width: int) -> list[Markup]:
    """A table body for each slice, with a heading row where there are several."""
    bodies = []
    for where, variants in _slices(scores).items():
        rows = [row(variant, own) for variant, own in variants.items()]
        if where:
            heading = element("th", where, scope="rowgroup", colspan=str(width))
            rows.insert(0, element("tr", heading, class_="slice"))
        bodies.append(element("tbody", *rows))
    return bodies


def _table(number: str, caption: str, columns: Sequence[Markup], bodies: Iterable[Child]) -> Markup:
    return element(
        "table",
        element("caption", element("div", element("b", number), f" {caption}")),
        element("thead", element("tr", *columns)),
        *bodies,
    )


def _scroll(table: Markup) -> Markup:
    """A wide table scrolls in its own box; the box takes the keyboard's focus to be scrolled."""
    return element("div", table, class_="scroll", tabindex="0")


def _column(title: str, unit: str = "", text: bool = False) -> Markup:
    second = [element("span", unit, class_="unit")] if unit else []
    return element("th", title, *second, scope="col", class_="text" if text else None)


def _notes(scores: Sequence[Score], heading: str) -> Markup:
    notes: dict[tuple[str, str], list[str]] = {}
    for where, variants in _slices(scores).items():
        for variant, own in variants.items():
            for name, score in own.items():
                if score.note and score.note != "is the baseline":
                    who = f"{variant}, {where}" if where else variant
                    notes.setdefault((who, score.note), []).append(NAMES.get(name, name))
    items = [
        element("li", f"{who} ({', '.join(names)}): {note}") for (who, note), names in notes.items()
    ]
    if not items:
        return Markup("")
    return element("div", element("p", heading), element("ul", *items), class_="notes")


def _estimate(score: Score) -> Markup:
    if math.isnan(score.estimate):
        return element("td", DASH, title=score.note)
    shown: list[Child] = [_nats(score.estimate)]
    if not math.isnan(score.low):
        interval = f"[{_nats(score.low)}, {_nats(score.high)}]"
        shown.append(element("span", interval, class_="interval"))
    if len(score.each) > 1:
        values = " · ".join(_nats(value) for _, value in score.each)
        shown.append(element("span", values, class_="interval", title="seed by seed"))
    return element("td", *shown)


def _mean(cells: Sequence[Cell]) -> Markup:
    cells = [cell for cell in cells if math.isfinite(cell.loss)]
    losses = [cell.loss for cell in cells]
    if not losses:
        return element("td", DASH)
    low, high, _ = t_interval(losses)
    shown: list[Child] = [_nats(mean(losses))]
    if not math.isnan(low) and ended_alike([cell.state == "diverged" for cell in cells]):
        shown.append(element("span", f"[{_nats(low)}, {_nats(high)}]", class_="interval"))
    return element("td", *shown)


def _share(score: Score | None) -> Markup:
    if score is None or math.isnan(score.estimate):
        return element("td", DASH, title=score.note if score else "not in the grid")
    shown = f"{score.diverged} / {score.cells}"
    interval = element("span", f"[{score.low:.2f}, {score.high:.2f}]", class_="interval")
    return element(
        "td", element("span", shown, class_="bad") if score.diverged else shown, interval
    )


def _nats(value: float) -> str:
    return f"{value:.3f}".replace("-", "−").replace("−0.000", "0.000")


def _rate(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:g}"


def _p(value: float) -> str:
    if math.isnan(value):
        return DASH
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _value(key: str, value: Any) -> Child:
    import pandas as pd

    if value is None or value is pd.NA or value != value:
        return DASH
    if key == "name":
        return element("code", str(value))
    if key == "lr":
        return f"{value:g}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 or key == "seconds" else _nats(value)
    return str(value)
