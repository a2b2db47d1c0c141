"""Where is each variant stable?"""

from lightning_app.analysis.formatting import DASH, rate
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.figure import figures
from lightning_app.analysis.page.parts import column, head, scored, section
from lightning_app.analysis.score import Score
from lightning_app.grid_axes import label


def stable(contents: Contents) -> Markup:
    title = "Where is each variant stable?"
    rates = contents.grid.rates
    if len(rates) < 2:
        only = f", {label(rates[0])}" if rates else ""
        text = (
            f"This grid has one learning rate{only}, so it cannot show up to which rate a variant "
            "is stable. The table of Δ shows how many runs stalled at each warm-up. A grid with "
            "several values of model.optimizer.lr has a map and a frontier here."
        )
        return section("stable", title, element("p", text))
    return section("stable", title, _largest(contents), figures(contents, "stable"))


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

    rates = ", ".join(label(lr) for lr in grid.rates)
    caption = (
        "η_max: the largest learning rate of the grid at which no finished run stalled or was "
        f"non-finite. Rates: {rates}; nothing is known between them or outside. "
    )
    return scored(contents.next_table(), caption, columns, shown, row)
