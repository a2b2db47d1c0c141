"""A drawing in sentences: the description of a picture for readers who cannot see it."""

from collections.abc import Iterable

from lightning_app.blocks.residual import SUM
from lightning_app.catalogue.drawing import NAMES, Drawing, NormPart, Part, Sum


def formula(one: Sum) -> str:
    """Return a residual formula as one line, with its operations in words."""

    def through(parts: tuple[Part, ...], inner: str) -> str:
        for part in parts:
            if isinstance(part, NormPart):
                inner = f"{part.name}({inner})"
            else:
                inner = f"{' '.join(part.notes)} gain {part.value} times {inner}".strip()
        return inner

    source = through(one.shared, "x")
    terms = [] if one.skip is None else [through(one.skip, "x")]
    terms += [through(one.skip or (), "the layer's input")] * one.bottom
    for branch in one.branches:
        inside = f"{NAMES[branch.kind]} of {through(branch.before, source)}"
        terms.append(through(branch.after, inside))
    joined = " + ".join(terms) if one.rule == SUM else f"{one.rule}({', '.join(terms)})"
    return f"x becomes {through(one.norm, joined)}"


def description(drawings: Iterable[Drawing]) -> str:
    """Return the content of the drawings in sentences."""
    said = []
    for drawing in drawings:
        side = drawing.side
        said += [f"{side}: {part_name(part)} on what enters." for part in drawing.entry]
        for run in drawing.runs:
            said.append(f"{side}, {run.label}: {'; '.join(map(formula, run.sums))}.")
            for branch in (branch for one in run.sums for branch in one.branches):
                inner = [", ".join((part.label, *part.notes)) for part in branch.inside]
                said += [f"{NAMES[branch.kind]}: {'; '.join(inner)}."] * bool(inner)
            said += [f"{note}." for note in run.notes]
        said += [f"{note}." for note in drawing.notes]
        said += [f"A second stream adds up all branches of the {side}."] * drawing.dual
        where = "on the second stream after" if drawing.dual else "after"
        said += [f"{side}: {part_name(part)} {where} the last layer." for part in drawing.exit]
    return " ".join(said)


def part_name(part: Part) -> str:
    """Return a part in full words."""
    if isinstance(part, NormPart):
        return part.name
    return " ".join(("gain", part.value, *part.notes))
