"""How much would another sample of validation text change a difference of losses?

The intervals of all scores are over seeds, with one validation set. A run leaves the loss of G
parts of that set, each of consecutive rows (`objectives.validation_parts`). A difference of losses
is `D = mean_s sum_r c_r l_r(s)` with coefficients of +1 and -1; with `D_g` the same without part g
in any run, the delete-a-group jackknife gives the standard error over texts,

    `sqrt((G - 1) / G sum_g (D_g - mean D_g)^2)`

(Quenouille 1956; Kott 2001, "The delete-a-group jackknife"). All runs are of the same text, so what
is hard in a text for both sides of a difference cancels. For N every D_g has the best rates that
the whole text gives: the choice of rates is no part of the error, which is too small where two
rates are about equally good. Errors over texts and over seeds add in
squares only as far as seeds and texts do not interact; they are given side by side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import TYPE_CHECKING

import numpy as np

from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.pairing import Arm, arms
from lightning_app.analysis.rate_scores import best_runs
from lightning_app.analysis.score import Score

if TYPE_CHECKING:
    import pandas as pd

SCORES = ("delta", "interaction", "need")

Run = tuple[CellResult, float]  # and its coefficient


@dataclass(frozen=True, kw_only=True)
class TextSampling:
    """One row of `text_sampling.csv`: a score and its standard errors, in nats per token.

    `over_texts` is that of another validation set of the same size, `over_seeds` that of other
    seeds, NaN for one seed. `parts` is G.
    """

    group: str
    lr: float
    variant: str
    score: str
    estimate: float
    over_texts: float
    over_seeds: float
    parts: int
    seeds: int


def text_sampling(grid: GridResults, scores: Sequence[Score]) -> list[TextSampling]:
    """A row for each difference of losses whose runs all left the losses of the same parts.

    Without a row: differences with a run that failed or has not yet learned, since its loss counts
    as the unigram entropy, whatever the text; and those with a run of an older version.
    """
    found: list[TextSampling] = []
    for part in grid.parts or (grid,):
        known = {(arm.group, arm.variant): arm for arm in arms(part)}
        for score in scores:
            arm = known.get((score.group, score.variant))
            if score.score not in SCORES or not score.values or arm is None:
                continue
            runs = _runs(score, arm, known, part.reference_warmup or 0)
            error, parts = jackknife(runs)
            if parts:
                values = [value for _, value in score.values]
                spread = stdev(values) if len(values) > 1 else math.nan
                found.append(
                    TextSampling(
                        group=score.group,
                        lr=score.lr,
                        variant=score.variant,
                        score=score.score,
                        estimate=score.estimate,
                        over_texts=error,
                        over_seeds=score.widen * spread / math.sqrt(len(values)),
                        parts=parts,
                        seeds=len(values),
                    )
                )
    return found


def text_sampling_frame(rows: Sequence[TextSampling]) -> "pd.DataFrame":
    """The rows as a table."""
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in rows])


def jackknife(runs: Sequence[Run]) -> tuple[float, int]:
    """The standard error over texts of a sum of losses with coefficients, and the parts.

    No parts, and NaN, where a run has none, or where runs are of other parts.
    """
    none: dict[str, list[float]] = {"nll": [], "tokens": []}
    records = [cell.record.get("validation_parts") or none for cell, _ in runs]
    sizes = {tuple(record["tokens"]) for record in records}
    measured = all(cell.state == "ok" and not cell.capped for cell, _ in runs)
    measured = measured and all(map(_agrees, runs))
    if not measured or len(sizes) != 1 or len(min(sizes)) < 2:
        return math.nan, 0
    nll = np.array([record["nll"] for record in records])  # [run, part]
    tokens = np.array(min(sizes))
    without = (nll.sum(axis=1, keepdims=True) - nll) / (tokens.sum() - tokens)
    values = np.array([coefficient for _, coefficient in runs]) @ without
    count = len(tokens)
    squares = float(((values - values.mean()) ** 2).sum())
    return math.sqrt((count - 1) / count * squares), count


def _agrees(run: Run) -> bool:
    """Whether the parts of a run give its loss, up to the rounding of sums in single precision."""
    cell, record = run[0], run[0].record.get("validation_parts")
    return not record or math.isclose(
        sum(record["nll"]) / sum(record["tokens"]), cell.loss, rel_tol=1e-4
    )


def _runs(
    score: Score, arm: Arm, known: Mapping[tuple[str, str], Arm], reference: int
) -> list[Run]:
    """The runs of which a score is the sum, with their coefficients."""
    seeds = [seed for seed, _ in score.values]
    points = [(warmup, score.lr) for warmup in (0, reference)]
    pairs = best_runs(arm, reference) if score.score == "need" else arm.at(points)
    signs = zip(pairs.points, (1.0, -1.0), strict=True)
    runs = [(pairs.runs[point, seed], sign) for point, sign in signs for seed in seeds]
    if score.score == "interaction":
        base = known[score.group, arm.baseline or ""]
        for seed in seeds:
            runs.append((base.cells[0, score.lr, seed], -1.0))
            runs.append((base.cells[reference, score.lr, seed], 1.0))
    return [(cell, sign / len(seeds)) for cell, sign in runs]
