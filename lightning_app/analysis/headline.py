"""The headline of a report: the scores of its first table in words."""

import math
from collections.abc import Mapping, Sequence

from lightning_app.analysis.formatting import DASH
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.pairing import IS_BASELINE, NEVER, NOT_YET
from lightning_app.analysis.run_summary import budget_of
from lightning_app.analysis.score import Score
from lightning_app.analysis.statistics import LEVEL

MORE, LESS, SAME = "needs it more", "needs it less", "no difference shown"
BASELINE = "the baseline"
_NAMES = {
    "delta": "Δ",
    "relative_delta": "relative Δ",
    "detectable": "detectable difference",
    "bleu": "ΔBLEU",
}
VERDICTS = {
    MORE: "warm-up matters more for",
    LESS: "warm-up matters less for",
    SAME: "no difference shown for",
    NEVER: "never learned, with warm-up either:",
    NOT_YET: "not yet learned, so that nothing can be said of",
}


def reading(own: Mapping[str, Score]) -> str:
    """Classify the scores of one variant, by name, against the baseline; a dash if undefined.

    A difference is one whose p value, corrected by Holm, is under 5 %.
    """
    versus, score = own["interaction"], own["delta"]
    for word in (NEVER, NOT_YET):
        if word in score.note:
            return word
    if math.isnan(score.estimate):
        return DASH
    if versus.note == IS_BASELINE:
        return BASELINE
    if math.isnan(versus.p_holm):
        return DASH
    if versus.p_holm >= 1 - LEVEL:
        return SAME
    return MORE if versus.estimate > 0 else LESS


def findings(grid: GridResults, scores: Sequence[Score]) -> list[str]:
    """The headline, one sentence for each group and rate; empty without a baseline."""
    found = []
    for part in grid.parts:  # each has its own budget and baseline
        groups = {cell.group for cell in part.cells}
        found += findings(part, [score for score in scores if score.group in groups])
    if grid.baseline is None or grid.parts:
        return found
    for where, variants in by_slice(scores).items():
        read: dict[str, list[str]] = {}
        for variant, own in variants.items():
            if "interaction" in own:
                read.setdefault(reading(own), []).append(variant)
        verdicts = [
            f"{verdict} {', '.join(read[kind])}"
            for kind, verdict in VERDICTS.items()
            if kind in read
        ]
        if verdicts:
            rate = f", at {where}" if where else ""
            budget = f"Within {budget_of(grid)}{rate}, compared with {grid.baseline}"
            found.append(f"{budget}: {'; '.join(verdicts)}.")
    return found


def by_slice(scores: Sequence[Score]) -> dict[str, dict[str, dict[str, Score]]]:
    """Scores by slice of the grid (rate and group, in words), variant and name."""
    several = len({(score.group, score.lr) for score in scores if not math.isnan(score.lr)}) > 1
    slices: dict[str, dict[str, dict[str, Score]]] = {}
    for score in scores:
        rate = "" if math.isnan(score.lr) or not several else f"learning rate {score.lr:g}"
        where = ", ".join(part for part in (rate, score.group) if part and part != "all")
        slices.setdefault(where, {}).setdefault(score.variant, {})[score.score] = score
    return slices


def score_notes(scores: Sequence[Score]) -> list[str]:
    """The reasons of undefined scores and missing intervals, merged if they are equal."""
    found: dict[tuple[str, str], list[str]] = {}
    for where, variants in by_slice(scores).items():
        for variant, own in variants.items():
            who = f"{variant}, {where}" if where else variant
            for name, score in own.items():
                if score.note and score.note != IS_BASELINE:
                    found.setdefault((who, score.note), []).append(_NAMES.get(name, name))
    return [f"{who} ({', '.join(names)}): {note}" for (who, note), names in found.items()]
