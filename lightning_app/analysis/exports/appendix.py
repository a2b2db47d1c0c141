"""Cells of a notebook that compute the scores again, from `results.parquet` alone.

The page prints them, so that a reader can recompute every number of its tables. They share no code
with `sensitivity`; the tests run the printed cells and compare.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.pairing import LEARNED
from lightning_app.analysis.score import Score
from lightning_app.analysis.statistics import FEW_SEEDS

NOT_COVERED = (
    "Not recomputed here: bootstrap-t intervals, which depend on the resamples drawn; p values "
    "over test sentences, which come from the stored translations; and the curves of runs, which "
    "are in validations.parquet and in each run's metrics.csv."
)


@dataclass(frozen=True, kw_only=True)
class NotebookCell:
    """At most ten lines of code. `table` is the name of the table that they define, or "".

    A table has the columns of `sensitivity.csv` that it fills; an undefined score has no row. Cells
    run in their order, in the folder of the report.
    """

    title: str
    table: str
    code: str


def notebook(grid: GridResults, scores: Sequence[Score]) -> list[NotebookCell]:
    """The cells that recompute the scores that are defined, after the one that reads the runs."""
    if not scores or not grid.finished:
        return []
    defined = {score.score.split()[0] for score in scores if not math.isnan(score.estimate)}
    cells = [READ, COST, STALLS, MEANS, FLATNESS]
    if "delta" in defined:
        cells += [PAIRS, DELTA, RATIO]
    if "interaction" in defined:
        cells += [INTERACTION, HOLM]
    if "detectable" in defined:
        cells.append(POWER)
    if "eta_max" in defined:
        cells.append(RATES)
    if "bleu" in defined:
        cells.append(BLEU)
    return [*cells, METRICS] if any(part.published for part in grid.parts or (grid,)) else cells


READ = NotebookCell(
    title="Read the runs",
    table="",
    code="""\
import numpy as np, pandas as pd
from scipy import integrate, optimize, stats
runs = pd.read_parquet("results.parquet").fillna({"warmup": 0, "lr": 0.0, "seed": 0})
runs["failed"] = (runs.status == "diverged").astype(int)
arm, columns = ["group", "lr", "variant"], ["score", "estimate", "low", "high", "p", "seeds"]
def t_test(x):  # Student's interval and p value; nan for one seed, or seeds that do not differ
    apart = len(x) > 1 and np.ptp(x) > 1e-12 * max(1, np.abs(x).max())
    error = np.std(x, ddof=1) / np.sqrt(len(x)) if apart else np.nan
    low, high = np.mean(x) + stats.t.ppf([0.025, 0.975], len(x) - 1) * error
    return low, high, 2 * stats.t.sf(abs(np.mean(x)) / error, len(x) - 1)""",
)

COST = NotebookCell(
    title="What was run and what it took: means over the runs of a variant, and their ratios",
    table="",
    code="""\
states = runs.status.value_counts()
took = ["parameters", "train/tokens_per_second", "peak_memory_bytes", "seconds"]
ended = runs[runs.status.isin(["ok", "diverged"])].reindex(columns=[*runs.columns.union(took)])
variants = ended.groupby(["group", "variant"])
cost = variants[took].mean()
base = variants.baseline.first().reset_index().merge(
    cost, how="left", left_on=["group", "baseline"], right_index=True
)
ratios = cost / base.set_index(["group", "variant"])[took]
hours = variants.seconds.sum() / 3600""",
)

PAIRS = NotebookCell(
    title="Pair the runs without warm-up and with the reference warm-up, seed by seed",
    table="",
    code=f"""\
compared = runs[runs.reference_warmup > 0].dropna(subset="loss")
without, warm = (compared[compared.warmup == w] for w in (0, compared.reference_warmup))
pairs = without.merge(warm, on=[*arm, "seed"], suffixes=("", "_ref"))
pairs["lost"] = pairs.loss - pairs.loss_ref
pairs["learned"] = pairs.unigram_entropy_ref - pairs.loss_ref
entropy = (pairs.unigram_entropy + pairs.unigram_entropy_ref) / 2
margin = (entropy - pairs.loss_ref).groupby([pairs[key] for key in arm]).transform("mean")
pairs = pairs[margin >= {LEARNED}]  # an arm that never learned has no score
stalled = ["failed", "failed_ref"]
alike = pairs.groupby(arm)[stalled].nunique().max(axis=1) == 1""",
)

DELTA = NotebookCell(
    title="Δ with Student's t interval",
    table="delta",
    code="""\
rows = []
for who, own in pairs.groupby(arm):
    ends = t_test(own.lost)[:2] if alike[who] else (np.nan, np.nan)
    rows.append((*who, "delta", own.lost.mean(), *ends, len(own)))
delta = pd.DataFrame(rows, columns=[*arm, *columns[:4], "seeds"])""",
)

RATIO = NotebookCell(
    title="Relative Δ with Fieller's interval",
    table="relative",
    code="""\
rows = []
for who, own in pairs.groupby(arm):
    (top, bottom), n = own[["lost", "learned"]].mean(), len(own)
    error = own[["lost", "learned"]].cov(min_periods=2) * stats.t.ppf(0.975, n - 1) ** 2 / n
    a, b = bottom**2 - error.learned.learned, top * bottom - error.lost.learned
    apart = not np.isnan(t_test(own.lost - top / bottom * own.learned)[0])
    root = max(b**2 - a * (top**2 - error.lost.lost), 0) ** 0.5 if apart and a > 0 else np.nan
    ends = ((b - root) / a, (b + root) / a) if alike[who] else (np.nan, np.nan)
    rows.append((*who, "relative_delta", top / bottom, *ends, n))
relative = pd.DataFrame(rows, columns=[*arm, *columns[:4], "seeds"])""",
)

INTERACTION = NotebookCell(
    title="The interaction: Δ less that of the baseline, over the seeds of both, and its p value",
    table="versus",
    code=f"""\
rows, own, base = [], ["group", "lr", "seed", "baseline"], ["group", "lr", "seed", "variant"]
both = pairs.merge(pairs, left_on=own, right_on=base, suffixes=("", "_base"))
for who, own in both[both.variant != both.baseline].groupby(arm):
    low, high, p = t_test(own.lost - own.lost_base)
    mixed = own.filter(like="failed").nunique().max() > 1  # some seeds of an arm stalled, some not
    level = all(np.ptp(own.filter(regex=f"^{{arms}}(_base)?$").to_numpy()) == 0 for arms in stalled)
    low, high = (np.nan, np.nan) if mixed else (low, high)
    p = p if level or len(own) >= {FEW_SEEDS} else np.nan  # else stalls may be chance
    rows.append((*who, "interaction", (own.lost - own.lost_base).mean(), low, high, p, len(own)))
versus = pd.DataFrame(rows, columns=[*arm, *columns])""",
)

HOLM = NotebookCell(
    title="Holm's correction over the variants of one rate and group",
    table="versus",
    code="""\
family = versus[versus.seeds > 1].sort_values("p")  # a p value that is withheld counts as 1
left = family.groupby(["group", "lr"]).cumcount(ascending=False) + 1
steps = (family.p.fillna(1) * left).clip(upper=1)
corrected = steps.groupby([family.group, family.lr]).cummax()
versus["p_holm"] = corrected.where(family.p.notna()).reindex(versus.index)""",
)

POWER = NotebookCell(
    title="The smallest interaction that its test finds in 80 %, with the spread of its family",
    table="power",
    code="""\
edge = lambda q, n: (stats.chi2.ppf(q, n - 1) / (n - 1)) ** 0.5 * stats.t.ppf(0.975, n - 1)
both = lambda q, x, n: stats.norm.cdf(x - edge(q, n)) + stats.norm.cdf(-x - edge(q, n))
found = lambda x, n: integrate.quad(both, 0, 1, args=(x, n), epsabs=1e-10)[0]  # noncentral t
ncp = lambda n: optimize.brentq(lambda x: found(x, n) - 0.8, 0, 100) / n**0.5
known = versus.dropna(subset="low").assign(free=versus.seeds - 1)
half = (known.high - known.low) / 2 / stats.t.ppf(0.975, known.free)
sums = known.assign(squares=known.free * known.seeds * half**2).groupby(["group", "lr"])
known["sd"] = (sums.squares.transform("sum") / sums.free.transform("sum")) ** 0.5
power = known.dropna(subset="p")[[*arm, "sd", "seeds"]].assign(score="detectable")
power["estimate"] = power.sd * power.seeds.map({n: ncp(n) for n in power.seeds.unique()})""",
)

STALLS = NotebookCell(
    title="Stalls with Wilson's interval",
    table="stalls",
    code="""\
rows = []
for (*who, warmup), own in runs.dropna(subset="loss").groupby([*arm, "warmup"]):
    ends = stats.binomtest(own.failed.sum(), len(own)).proportion_ci(0.95, "wilson")
    rows.append((*who, f"stalls w={warmup}", own.failed.mean(), *ends, len(own)))
stalls = pd.DataFrame(rows, columns=[*arm, *columns[:4], "seeds"])""",
)

MEANS = NotebookCell(
    title="Mean loss by warm-up with Student's t interval",
    table="means",
    code="""\
rows = []
for (*who, warmup), own in runs.dropna(subset="loss").groupby([*arm, "warmup"]):
    ends = t_test(own.loss)[:2] if own.failed.nunique() == 1 else (np.nan, np.nan)
    rows.append((*who, f"loss w={warmup}", own.loss.mean(), *ends, len(own)))
means = pd.DataFrame(rows, columns=[*arm, *columns[:4], "seeds"])""",
)

FLATNESS = NotebookCell(
    title="R_w and S_w: how flat the loss is over the warm-ups",
    table="flat",
    code=f"""\
rows = []
for who, own in runs.groupby(arm):
    loss = own.pivot(index="seed", columns="warmup", values="loss").dropna()
    if len(loss) and loss.shape[1] > 1:
        top, mean = own[own.seed.isin(loss.index)].unigram_entropy.mean(), loss.mean()
        rows.append((*who, "S_w", mean.mean() - mean.min()))
        if top - mean.min() >= {LEARNED}:
            rows.append((*who, "R_w", (mean.mean() - mean.min()) / (top - mean.min())))
flat = pd.DataFrame(rows, columns=[*arm, *columns[:2]])""",
)

RATES = NotebookCell(
    title="D and η_max: over the learning rates",
    table="rates",
    code=f"""\
rows = []
for (group, variant), own in runs.groupby(["group", "variant"]):
    loss = own.pivot(index="seed", columns=["warmup", "lr"], values="loss").dropna()
    mean, top = loss.mean(), own[own.seed.isin(loss.index)].unigram_entropy.mean()
    if 0 in mean.index and top - mean.min() >= {LEARNED}:
        rows.append((group, np.nan, variant, "D", mean[0].min() - mean.min()))
    for warmup, some in own.dropna(subset="loss").groupby("warmup"):
        sound = some.groupby("lr").filter(lambda one: one.failed.sum() == 0)
        rows.append((group, np.nan, variant, f"eta_max w={{warmup}}", sound.lr.max()))
rates = pd.DataFrame(rows, columns=[*arm, *columns[:2]])""",
)

BLEU = NotebookCell(
    title="What warm-up gives in test BLEU, with Student's t interval",
    table="bleu",
    code="""\
rows, known = [], runs.dropna(subset="test/bleu")
without, warm = (known[known.warmup == w] for w in (0, known.reference_warmup))
gains = without.merge(warm, on=[*arm, "seed"], suffixes=("", "_ref"))
for who, own in gains.groupby(arm):
    gain = own["test/bleu_ref"] - own["test/bleu"]
    steady = own[["failed", "failed_ref"]].nunique().max() == 1
    low, high, p = t_test(gain) if steady else (np.nan, np.nan, np.nan)
    rows.append((*who, "bleu", gain.mean(), low, high, p, len(own)))
bleu = pd.DataFrame(rows, columns=[*arm, *columns])""",
)

METRICS = NotebookCell(
    title="Mean and number of runs of every metric by arm: ours beside published figures",
    table="",
    code="""\
kept = [name for name in runs if name.startswith(("val/", "test/"))]
metrics = runs.groupby([*arm, "warmup"])[kept].agg(["mean", "count"])""",
)
