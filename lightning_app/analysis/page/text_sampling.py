"""The sampling of the validation text, as a sentence."""

import math
from collections.abc import Sequence

from lightning_app.analysis.formatting import nats
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.text_sampling import TextSampling, text_sampling


def sampling_note(contents: Contents) -> Markup:
    """How much another validation set would change Δ or N; nothing without a record of parts."""
    rows = text_sampling(contents.grid, contents.scores)
    several = len(contents.grid.rates) > 1
    score, symbol = ("need", "N") if several else ("delta", "Δ")
    shown = [row for row in rows if row.score == score]
    if not shown:
        return Markup("")
    chosen = ", with the best rates as they are" if several else ""
    seeds = [row.over_seeds for row in shown if not math.isnan(row.over_seeds)]
    text = (
        "Intervals are over seeds, with one sample of validation text. Another validation set of "
        f"the same size would change {symbol} by about "
        f"{_range([row.over_texts for row in shown])} nats{chosen}"
        f"{f'; other seeds would change it by about {_range(seeds)} nats' if seeds else ''} "
        f"(standard errors; jackknife over {max(row.parts for row in shown)} parts of consecutive "
        f"rows; {_count(shown)}, text_sampling.csv)."
    )
    return element("div", element("p", text), class_="notes")


def _range(values: Sequence[float]) -> str:
    low, high = (nats(end) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _count(rows: Sequence[TextSampling]) -> str:
    return "one difference" if len(rows) == 1 else f"{len(rows)} differences"
