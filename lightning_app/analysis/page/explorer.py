"""Interactive figures: one point and one line for each run, drawn by Plotly inside the page."""

import json
import math
from importlib import resources
from typing import Any

from lightning_app.analysis.figures.style import colours
from lightning_app.analysis.grid_results import CellResult, scales
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import section
from lightning_app.task_facts import LOSS

POINTS = 60_000  # points of all curves together
FEWEST, MOST = 8, 200  # points of one curve
CURVES = {"train/nll": "training loss", LOSS: "validation loss"}


def explorer(contents: Contents) -> Markup:
    """A figure of final values and one of curves, with their data."""
    found = _data(contents)
    # Runs whose losses count other things are drawn one kind at a time.
    of = ("of",) if len({run["ruler"] for run in found["runs"]}) > 1 else ()
    data = json.dumps(found, separators=(",", ":"), allow_nan=False)
    script = resources.files("lightning_app.analysis.page") / "explorer.js"
    return section(
        "explore",
        "Explore the runs",
        element(
            "p",
            "Each point and each line is one run: point at it to see which, click to open its "
            "folder, click a name in the legend to hide it, drag to zoom. Crosses are runs that "
            "stalled or became non-finite. Lines are solid for the longest warm-up, then dotted, "
            "dashed and dash-dotted for shorter ones. Nothing is averaged here; do not conclude "
            "anything from single runs.",
        ),
        _controls("final", ("across", "value", *of)),
        element("div", id="explore-final", class_="plot"),
        _controls("curves", ("loss", "along", *of)),
        element("div", id="explore-curves", class_="plot"),
        element("script", Markup(data.replace("<", r"\u003c")), type="application/json", id="runs"),
        element("script", Markup(_plotly()), type="text/plain", id="plotly"),
        element("script", Markup(script.read_text(encoding="utf-8"))),
    )


def _controls(figure: str, names: tuple[str, ...]) -> Markup:
    """Selection lists, which the script fills with the columns of the runs."""
    labels = (
        element("label", f"{name} ", element("select", id=f"explore-{figure}-{name}"))
        for name in names
    )
    return element("p", *labels, class_="controls")


def _data(contents: Contents) -> dict[str, Any]:
    cells = contents.grid.finished
    names = scales(cells, contents.grid.monitored.loss)
    most = min(MOST, max(FEWEST, POINTS // max(1, 2 * len(cells))))
    metrics = list(dict.fromkeys(name for cell in cells for name in cell.metrics))
    values = {"l": "final loss as scored, nats", **dict.fromkeys(metrics), "seconds": "seconds"}
    return {
        "colours": colours(contents.grid.variants),
        "values": [{"key": key, "label": label or key} for key, label in values.items()],
        "curves": [{"key": key, "label": label} for key, label in CURVES.items()],
        "runs": [
            {**_run(contents, cell, list(values), most), "ruler": name}
            for cell, name in zip(cells, names, strict=True)
        ],
    }


def _run(contents: Contents, cell: CellResult, keys: list[str], most: int) -> dict[str, Any]:
    found = {**cell.metrics, "l": cell.loss, "seconds": cell.record.get("seconds")}
    curves = {}
    for tag in CURVES:
        points = [point for point in cell.curve(tag).items() if math.isfinite(point[1])]
        points = _thinned(points, most)
        curves[tag] = [[step for step, _ in points], [round(loss, 4) for _, loss in points]]
    return {
        "name": cell.name,
        "folder": contents.link(cell),
        "variant": cell.variant,
        "group": cell.group,
        "warmup": cell.warmup,
        "lr": cell.lr,
        "seed": cell.seed,
        "state": cell.state,
        "word": cell.word,
        "values": [_finite(found.get(key)) for key in keys],
        "curves": list(curves.values()),
    }


def _thinned(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most about `most` points, always with the last one."""
    stride = math.ceil(len(points) / most) or 1
    return points[::-1][::stride][::-1]


def _finite(value: Any) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
