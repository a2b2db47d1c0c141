"""What warm-up gives each variant over all learning rates."""

import math

from lightning_app.analysis.formatting import DASH, p_value
from lightning_app.analysis.headline import own_reading
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import column, estimate, head, scored
from lightning_app.analysis.score import Score
from lightning_app.grid_axes import label

_SCORES = ("need", "octaves", "rate_sensitivity", "stall_difference")


def over_rates(contents: Contents) -> Markup:
    """The table of the variants with several rates; nothing without any."""
    # A variant with one rate has its difference of stalls at that rate, and no other of these.
    scores = [s for s in contents.scores if s.score in _SCORES and math.isnan(s.lr)]
    several = {(s.group, s.variant) for s in scores if s.score == "stall_difference"}
    several &= {(s.group, s.variant) for s in scores if s.score == "need"}
    shown = [score for score in scores if (score.group, score.variant) in several]
    if not shown:
        return Markup("")
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

    rates = ", ".join(label(lr) for lr in contents.grid.rates)
    caption = (
        "Over all learning rates. N: loss without warm-up minus loss with it, each at its own best "
        "rate, which is chosen on the other seeds. O: log2 of the largest tolerated rate with "
        "warm-up over that without. S: how much the loss rises over the rates. ≥ and ≤: a best or "
        "a tolerated rate is at the edge of those tried, or no run without warm-up trained; (?): "
        f"both directions are open. Rates: {rates}."
    )
    return scored(contents.next_table(), caption, columns, shown, row)
