"""What happened inside?"""

from lightning_app.analysis.figures.probes import has_probes
from lightning_app.analysis.markup import Markup, element
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.figure import figures
from lightning_app.analysis.page.parts import section

ASKS = "trainer.callbacks: [{class_path: lightning_app.callbacks.probes.SignalProbe}]"


def inside(contents: Contents) -> Markup:
    probed = any(has_probes(cell) for cell in contents.grid.finished)
    said = "" if probed else _unprobed()
    return section("inside", "What happened inside?", figures(contents, "inside"), said)


def _unprobed() -> Markup:
    return element(
        "p",
        "No run was probed, so signals and attention inside the blocks were not measured. With ",
        element("code", ASKS),
        " in the grid's base, each run records them; it does not change the training.",
    )
