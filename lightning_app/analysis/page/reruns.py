"""The rerun component, as a table."""

import math

from lightning_app.analysis.formatting import DASH, nats
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import column, head, html_table
from lightning_app.analysis.reruns import RerunComponent, rerun_components
from lightning_app.grid_axes import label


def rerun_table(contents: Contents) -> Markup:
    """A row for each arm with reruns; nothing for a grid without them."""
    found = rerun_components(contents.grid)
    if not found:
        return Markup("")
    columns = [
        column("Variant", text=True),
        column("warm-up"),
        column("learning rate"),
        column("between roundings", "sd, nats per token"),
        column("between seeds", "sd, nats per token"),
        column("share", "of the variance"),
        column("runs"),
        column("reruns"),
    ]
    caption = (
        "How far the final loss of a run moves if only the last bits of its initial values change, "
        "beside its spread between seeds, of which that is a part. No score includes the reruns."
    )
    body = element("tbody", *map(_row, found))
    return html_table(contents.next_table(), caption, columns, [body])


def _row(row: RerunComponent) -> Markup:
    share = DASH if math.isnan(row.share) else f"{row.share:.0%}"
    group = "" if row.group == "all" else f", {row.group}"
    values = [
        DASH if row.warmup is None else f"{row.warmup:,}",
        DASH if row.lr is None else label(row.lr),
        nats(row.rounding),
        DASH if math.isnan(row.seeds) else nats(row.seeds),
        share,
        str(row.runs),
        str(row.reruns),
    ]
    cells = (element("td", value) for value in values)
    return element("tr", head(f"{row.variant}{group}"), *cells)
