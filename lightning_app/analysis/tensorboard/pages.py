"""The custom-scalars pages "Warm-up", "Health" and "Inside the blocks"."""

# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.

import re

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.tensorboard.summaries import tensor
from lightning_app.rulers import names_of, ruler
from lightning_app.run_folder import METRICS
from lightning_app.tables import column_names
from lightning_app.task_facts import LOSS

CURVES = ("train/nll", LOSS)
HEALTH = {
    "train/grad_norm": "gradient norm",
    "train/tokens_per_second": "tokens per second",
    "train/data_wait_share": "share of the time spent waiting for data",
    "train/lr": "learning rate",
}
INSIDE = {
    "token_cosine": "mean cosine of the tokens of a sentence, last layer (1: all alike)",
    "output_information": "information in the output, nats (0: equal for every input)",
    "w2_gradient": "gradient norm of the feed-forward's W2, last layer",
    "alpha": "alpha, gain of the identity, by layer",
    "beta": "beta, gain of the attention map, by layer",
    "gamma": "gamma, gain of the centre, by layer",
}
"""Titles of probed quantities; a quantity that is missing here is a learned gain."""


def layout(grid: GridResults) -> Summary:
    """The pages: a chart for each variant and loss, the tags of all runs, and the probed ones."""
    pages = layout_pb2.Layout()
    warmup = pages.category.add(title="Warm-up")
    variants = [cell.variant for cell in grid.cells]
    for tag in reversed(CURVES):
        for variant, kind in dict.fromkeys(zip(variants, rulers_of(grid), strict=True)):
            of = f", {kind}" if kind else ""
            chart = warmup.chart.add(title=f"{variant}{of}: {tag} by warm-up, finished runs")
            chart.multiline.tag.append(rf"^{re.escape(_curves(variant, kind))}warmup_\d+/{tag}$")
    health = pages.category.add(title="Health")
    for tag, title in HEALTH.items():
        chart = health.chart.add(title=f"{title}, all runs")
        chart.multiline.tag.append(f"^{tag}$")
    probed = _probed(grid)
    if probed:
        inside = pages.category.add(title="Inside the blocks")
        for quantity in probed:
            gain = f"learned gain {quantity.replace('_', ' ')}, by layer"
            chart = inside.chart.add(title=INSIDE.get(quantity, gain))
            chart.multiline.tag.append(f"^probe/{re.escape(quantity)}/")
    return tensor(
        metadata.CONFIG_SUMMARY_TAG,
        metadata.PLUGIN_NAME,
        pages.SerializeToString(deterministic=True),
    )


def rulers_of(grid: GridResults) -> list[str]:
    """What the loss counts in each cell, where it counts other things in others: no chart has both.

    It is what the configs say, as a plan of charts is written before the results are there.
    """
    return names_of([ruler(cell.setting, cell.monitored.loss) for cell in grid.cells])


def curve_tag(cell: CellResult, tag: str, kind: str) -> str:
    """The tag of the second copy of the curve of a finished run, one of `rulers_of`."""
    return f"{_curves(cell.variant, kind)}warmup_{cell.warmup or 0}/{tag}"


def _curves(variant: str, kind: str) -> str:
    return f"curves/{variant}/{f'{kind}/' if kind else ''}"


def _probed(grid: GridResults) -> list[str]:
    """The quantities that some finished run has logged, those of `INSIDE` first."""
    found = {
        tag.split("/")[1]
        for cell in grid.finished
        for tag in column_names(cell.folder / METRICS)
        if tag.startswith("probe/") and tag.count("/") > 1
    }
    return [*(name for name in INSIDE if name in found), *sorted(found - INSIDE.keys())]
