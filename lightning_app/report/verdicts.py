"""Verdicts: what the measure and the failures of an arm say of its need for warm-up, in one word.

The measure is T for a group of arms with several rates, else Delta (`report.warmup`); positive is
better with warm-up. The interval that decides is that of Holm's step (`statistics.Estimate`). The
words, of which the first that holds counts:

- `never learned`: no run of either warm-up learned;
- `needs`: fails more often without warm-up, and the measure is not below zero;
- `mixed`: one side fails more often, and the measure favours it;
- `no need`: the interval at the level of the whole family lies within `+-matters`, no more runs
  fail without warm-up than with it, and the best rates of most seeds lie between others at most an
  octave away;
- `loses`: the interval lies below zero, or more runs fail with warm-up;
- `gains`: the interval lies above `matters`;
- `slightly gains`: the interval lies above zero;
- `undecided`: none of these.

The difference of two families is `larger`, `smaller`, or `no difference` that matters.

A grid whose runs a pruner ended, or a search chose, has no verdicts, and one or two seeds decide
nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_app.report.pairs import NEVER, Score
from lightning_app.report.results import GridResults
from lightning_app.report.statistics import MOST_SEEDS, seeds_to_decide, within
from lightning_app.report.warmup import measured_by

NEEDS, MIXED, NO_NEED, LOSES = "needs", "mixed", "no need", "loses"
GAINS, SLIGHTLY, UNDECIDED = "gains", "slightly gains", "undecided"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One row of the answer.

    `kind`: `pooled` over all arms of a group, `family`, `difference` of two families, or `arm`.
    `low` and `high`: the interval that decides. `enough`: the fewest seeds at which the mean and
    spread seen would decide, None where that is not known, `MOST_SEEDS + 1` for more.
    """

    kind: Literal["pooled", "family", "difference", "arm"]
    group: str
    lr: float
    variant: str
    word: str
    estimate: float
    low: float
    high: float
    p: float
    failures: float
    failures_p: float
    seeds: int
    enough: int | None
    score: Score

    @property
    def more(self) -> str:
        """How many seeds would decide; empty where one has, or where that is not known."""
        if self.word != UNDECIDED or self.enough is None:
            return ""
        about = "more than" if self.enough > MOST_SEEDS else "about"
        return f"{about} {min(self.enough, MOST_SEEDS)} seeds would decide"

    @property
    def words(self) -> str:
        """The word, and how many seeds would decide."""
        return "; ".join(filter(None, (self.word, self.more)))


def verdicts(grid: GridResults, scores: Sequence[Score]) -> list[Verdict]:
    """The answers of a grid: over all arms, over families, and for each arm."""
    if why_none(grid):
        return []
    found = []
    stalls = {(s.group, s.variant): s for s in scores if s.score == "stall_difference"}
    for score in scores:
        if kind := _OVER_ARMS.get(score.score):
            found.append(_verdict(kind, score, None, grid))
    for group in dict.fromkeys(score.group for score in scores):
        for score in measured_by(scores, group):
            found.append(_verdict("arm", score, stalls.get((group, score.variant)), grid))
    order = (*_OVER_ARMS.values(), "arm")
    return sorted(found, key=lambda verdict: order.index(verdict.kind))


_OVER_ARMS: Mapping[str, Any] = {
    "pooled": "pooled",
    "family": "family",
    "family_difference": "difference",
}


_OF_TWO = {GAINS: "larger", SLIGHTLY: "larger", LOSES: "smaller", NO_NEED: "no difference"}
"""The words for the first family less the second."""


def why_none(grid: GridResults) -> str:
    """Why a grid has no verdicts on warm-up; empty if it has some."""
    if grid.pruner is not None:
        return "a pruner ended runs early"
    if grid.searched:
        return "a search chose the trials of each arm"
    if not (grid.asks_warmup and grid.reference_warmup):
        return "no warm-up is compared"
    return "runs are judged by the scores of their tasks" if grid.scored else ""


def _verdict(kind: Any, score: Score, stalls: Score | None, grid: GridResults) -> Verdict:
    word = _word(score, stalls, grid.matters)
    if kind == "difference":
        word = _OF_TWO.get(word, word)
    known = word == UNDECIDED and len(score.values) > 1 and not math.isnan(score.low)
    return Verdict(
        kind=kind,
        group=score.group,
        lr=score.lr,
        variant=score.variant,
        word=word,
        estimate=score.estimate,
        low=score.holm_low,
        high=score.holm_high,
        p=score.p_holm,
        failures=math.nan if stalls is None else stalls.estimate,
        failures_p=math.nan if stalls is None else stalls.p_holm,
        seeds=score.seeds,
        enough=seeds_to_decide(score, grid.matters if score.inner else 0.0) if known else None,
        score=score,
    )


def _word(score: Score, stalls: Score | None, matters: float) -> str:
    share = score.stalled if stalls is None or math.isnan(stalls.estimate) else stalls.estimate
    more = share if stalls is not None and stalls.significant else 0.0
    low, high = score.holm_low, score.holm_high
    below, above = high < 0, low > 0  # neither without an interval, as of two seeds
    if score.never:
        return NEVER
    if more > 0:
        return MIXED if below else NEEDS
    if more < 0 and above:
        return MIXED
    if within(score, matters) and share <= 0 and score.inner:
        return NO_NEED
    if below or more < 0:
        return LOSES
    if above:
        return GAINS if low > matters else SLIGHTLY
    return UNDECIDED


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """A verdict for scripts."""
    return {name: value for name, value in vars(verdict).items() if name != "score"}
