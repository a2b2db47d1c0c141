"""The learned spans of attention heads by layer."""

from collections.abc import Container
from dataclasses import replace
from statistics import median

from lightning_app.analysis.figures.drawing import Part, Sketch
from lightning_app.analysis.figures.heads import Heads, heads_by_layer
from lightning_app.analysis.figures.logs import finite_curves, logs
from lightning_app.analysis.grid_results import CellResult
from lightning_app.tables import Place

LOGGED = "probe/span/"
SPANS = Heads(
    quantity="span",
    line="span",
    title="Learned spans of the attention heads by layer",
    label="span (tokens)",
    text="How far back the heads have learned to look (Sukhbaatar et al. 2019): the span z of a "
    "head, at the last logged step. Weights fall from 1 at distance z to 0 at z + R. A span that "
    "depends on the token is the mean over the tokens of that step's batch. A small mark is a head "
    "of one run, a line the mean over heads and runs.",
    limits="A span is the distance that a head may look back, not the distance at which its "
    "weights lie. Spans move slowly: after few steps they show the start more than the data.",
)


def span_figures(part: Part) -> list[Sketch]:
    """The spans of every head, one panel for each variant that learns them."""
    runs = [cell for cell in part.cells if logs(cell, LOGGED)]
    return [_with_numbers(sketch) for sketch in heads_by_layer(part, runs, SPANS, last_spans)]


def last_spans(cell: CellResult, quantities: Container[str]) -> dict[Place, float]:
    """The spans that `metrics.csv` has as `probe/span/<stack>/<layer>/<head>`, at its last step.

    Without a head, the mean over the heads of a layer.
    """
    curves = finite_curves(cell, lambda tag: tag.startswith(LOGGED))
    last = max((step for curve in curves.values() for step in curve), default=0)
    return {_place(tag): curve[last] for tag, curve in curves.items() if last in curve}


def _place(tag: str) -> Place:
    _, quantity, stack, layer, *head = tag.split("/")
    return Place(quantity, stack, int(layer), int(head[0]) if head else None)


def _with_numbers(sketch: Sketch) -> Sketch:
    """The sketch with a sentence about the spans of all heads."""
    spans = list(sketch.table.loc[sketch.table["mark"] == "head", "value"])
    found = (
        f"The {len(spans):,} spans drawn lie between {min(spans):.1f} and {max(spans):.1f} tokens, "
        f"their median is {median(spans):.1f}."
    )
    return replace(sketch, text=f"{sketch.text} {found}")
