"""Entropy and distance of attention maps by layer, as in RealFormer's analysis (He et al. 2021)."""

from lightning_app.analysis.figures.drawing import Part, Sketch
from lightning_app.analysis.figures.heads import Heads, heads_by_layer
from lightning_app.analysis.figures.probes import has_probes, last_probes

PROBED = "At the last step that was probed, on one fixed validation batch."
ENTROPY = Heads(
    quantity="attention_entropy_p50",
    line="attention_entropy",
    free="attention_free_entropy",
    title="Entropy of the attention maps by layer",
    label="entropy of the map (nats)",
    text="How widely the heads attend (He et al. 2021, section 4.1.3): the entropy of the "
    "softmax map. A small mark is the median over the rows of one head of one run, a line the "
    "mean over rows, heads and runs. A grey bar is the entropy of the uniform map, the maximum. "
    f"{PROBED}",
    limits="A head may attend widely and still contribute little: entropy does not measure the "
    "values.",
)
DISTANCE = Heads(
    quantity="attention_distance",
    line="attention_distance",
    title="Distance of the attention maps to the layer below",
    label="Jensen-Shannon divergence (bits)",
    text="How far the map of each head is from that of the same head in the layer below: the "
    "Jensen-Shannon divergence, 0 for equal maps, 1 for maps that share no key (He et al. "
    f"2021). A small mark is a head of one run, a line the mean over heads and runs. {PROBED}",
    limits="Without residual scores a head is not related to the head of the same number below: "
    "the distance is then that of two random heads.",
)


def attention_figures(part: Part, kind: Heads) -> list[Sketch]:
    """A quantity of the attention maps by layer, one panel for each variant."""
    runs = [cell for cell in part.cells if has_probes(cell)]
    return heads_by_layer(part, runs, kind, last_probes)
