"""Write figures as files that are identical for the same runs."""

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_app.analysis.figures.links import Links
from lightning_app.atomic_write import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ANCHOR = re.compile(r"</?a\b[^>]*>")
_PATH = re.compile(r' d="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")


def save(figure: "Figure", path: Path) -> Path:
    """Write `figure` as SVG without links, identical each time."""
    write_whole(path, _ANCHOR.sub("", _svg(figure)))
    return path


def svg(figure: "Figure", links: Links, folder: Path) -> str:
    """The figure as SVG in `folder`."""
    return links.into(_svg(figure), folder)


def _svg(figure: "Figure") -> str:
    """The figure with marks by number; paths are cut to a hundredth of a point, half the bytes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    text = buffer.getvalue().decode()
    return _PATH.sub(lambda path: _DIGITS.sub(r"\1", path[0]), text)


def png(figure: "Figure", dpi: int = 144) -> bytes:
    """The figure as PNG, without a date."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    figure.set_dpi(dpi)
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def pdf(figure: "Figure") -> bytes:
    """The figure as PDF, without a date."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    buffer = io.BytesIO()
    nothing = dict.fromkeys(("CreationDate", "Creator", "Producer"))
    FigureCanvasPdf(figure).print_pdf(buffer, metadata=nothing)
    return buffer.getvalue()
