"""Where is each variant stable?"""

import math

from lightning_app.analysis.formatting import DASH, p_value, rate
from lightning_app.analysis.headline import own_reading
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.figure import figures
from lightning_app.analysis.page.parts import column, estimate, head, scored, section
from lightning_app.analysis.run_summary import in_short
from lightning_app.analysis.score import Score

OVER_RATES = ("need", "octaves", "rate_sensitivity", "stall_difference")


def stable(contents: Contents) -> Markup:
    title = "Where is each variant stable?"
    rates = contents.grid.rates
    if len(rates) < 2:
        only = f", {rates[0]:g}" if rates else ""
        text = (
            f"This grid has one learning rate{only}, so it cannot show up to which rate a variant "
            "is stable. Table 1 shows how many runs stalled at each warm-up. A grid with several "
            "values of model.optimizer.lr has a map and a frontier here."
        )
        return section("stable", title, element("p", text))
    return section(
        "stable", title, _own_rates(contents), _largest(contents), figures(contents, "stable")
    )


def _own_rates(contents: Contents) -> Markup:
    """What warm-up gives each variant over all rates."""
    grid = contents.grid
    shown = [score for score in contents.scores if score.score in OVER_RATES]
    columns = [
        column("Variant", text=True),
        column("Warm-up", "at the best rates", text=True),
        column("N", "nats per token"),
        column("p", "Holm"),
        column("O", "octaves of rate"),
        column("S(0) − S(ref)", "nats per token"),
        column("runs that stall", "without − with"),
        column("p", "exact, Holm"),
    ]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        stalls = own["stall_difference"]
        return element(
            "tr",
            head(variant),
            element("td", own_reading(own, "need"), class_="text"),
            estimate(own["need"]),
            element("td", p_value(own["need"].p_holm)),
            estimate(own["octaves"]),
            estimate(own["rate_sensitivity"]),
            element("td", DASH if math.isnan(stalls.estimate) else f"{stalls.estimate:.0%}"),
            element("td", p_value(stalls.p_holm)),
        )

    rates = ", ".join(f"{lr:g}" for lr in grid.rates)
    caption = (
        "Over all learning rates. N: loss without warm-up minus loss with it, each at its own best "
        "rate, which is chosen on the other seeds. O: log2 of the largest tolerated rate with "
        "warm-up over that without. S: how much the loss rises over the rates. ≥ and ≤: a best or "
        f"a tolerated rate is at the edge of those tried. Rates: {rates}. {in_short(grid)}"
    )
    return scored(contents.next_table(), caption, columns, shown, row)


def _largest(contents: Contents) -> Markup:
    grid = contents.grid
    shown = [score for score in contents.scores if score.score.startswith("eta_max")]
    columns = [
        column("Variant", text=True),
        *(column("η_max", f"warm-up {warmup:,}") for warmup in grid.warmups),
    ]

    def row(variant: str, own: dict[str, Score]) -> Markup:
        found = [own.get(f"eta_max w={warmup}") for warmup in grid.warmups]
        values = (element("td", DASH if s is None else rate(s.estimate)) for s in found)
        return element("tr", head(variant), *values)

    rates = ", ".join(f"{lr:g}" for lr in grid.rates)
    caption = (
        "η_max: the largest learning rate of the grid at which no finished run stalled or was "
        f"non-finite. Rates: {rates}; nothing is known between them or outside. "
        f"{in_short(grid)}"
    )
    return scored(contents.next_table(), caption, columns, shown, row)
