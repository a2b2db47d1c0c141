"""The effects of the factors of a grid, as a table."""

import math

from lightning_app.analysis.factors import MEASURES, TIMES, Effect, effects
from lightning_app.analysis.formatting import DASH, interval, nats, p_value
from lightning_app.analysis.markup import Child, Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import column, head, html_table
from lightning_app.analysis.statistics import LEVEL
from lightning_app.grid_axes import value_name

NAMES = {
    "octaves": "O, octaves of rate that warm-up buys",
    "need": "N, nats that warm-up saves at the best rates",
    "delta": "Δ, nats that warm-up saves",
    "rate_sensitivity": "S(0) − S(reference), nats",
    "steps_saved": "steps saved by warm-up",
}


def factor_table(contents: Contents) -> Markup:
    """Main effects and interactions on each measure; nothing for a grid without factors."""
    grid = contents.grid
    found = effects(grid, contents.scores)
    # Scores at single rates are in effects.csv where those over all rates say more.
    over_rates = any(math.isnan(effect.lr) for effect in found)
    shown = [effect for effect in found if math.isnan(effect.lr) or not over_rates]
    if not shown:
        return Markup("")
    columns = [
        column("Effect", text=True),
        column("estimate"),
        column("p"),
        column("p", "Holm"),
        column("seeds"),
    ]
    bodies = []
    for measure in MEASURES:
        rows = [_row(effect) for effect in shown if effect.measure == measure]
        if rows:
            heading = element("th", NAMES[measure], scope="rowgroup", colspan=str(len(columns)))
            bodies.append(element("tbody", element("tr", heading, class_="slice"), *rows))
    levels = "; ".join(
        f"{name}: {' to '.join(value_name(axis, value, grid.labels) for value in grid.axes[axis])}"
        for name, axis in grid.factors.items()
    )
    caption = (
        f"Effects of the factors ({levels}) on what warm-up gives. A main effect is the mean "
        "difference between the second value of a factor and the first, over all values of the "
        f"other factors; an interaction (a{TIMES}b) is how much the effect of a changes with b. "
        f"In brackets: {LEVEL:.0%} t intervals over seeds."
    )
    return html_table(contents.next_table(), caption, columns, bodies)


def _row(effect: Effect) -> Markup:
    rest = "" if effect.group == "all" else f", {effect.group}"
    name = head(f"{effect.factors}{rest}")
    if math.isnan(effect.estimate):
        empty = element("td", DASH, title=effect.note)
        return element("tr", name, empty, *[element("td", DASH)] * 2, element("td", "0"))
    shown: list[Child] = [nats(effect.estimate)]
    if not math.isnan(effect.low):
        shown.append(element("span", interval(effect.low, effect.high), class_="interval"))
    if effect.note:
        shown.append(element("span", effect.note, class_="interval"))
    return element(
        "tr",
        name,
        element("td", *shown),
        element("td", p_value(effect.p)),
        element("td", p_value(effect.p_holm)),
        element("td", str(effect.seeds)),
    )
