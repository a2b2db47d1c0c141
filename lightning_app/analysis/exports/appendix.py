"""Cells of a notebook that compute the scores again, from `results.parquet` alone.

The page prints them, so that a reader can recompute every number of its tables. They share no code
with `sensitivity`; the tests run the printed cells and compare.
"""

import math
from collections.abc import Sequence

from lightning_app.analysis.exports.notebook_cell import NotebookCell
from lightning_app.analysis.exports.rate_cells import (
    CHOSEN,
    CLEAR,
    COMPLETE,
    EXACT,
    EXACT_P,
    FACED,
    LARGEST,
    NEED,
    NEED_P,
    OCTAVES,
    RISEN,
)
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.pairing import ESCAPED, LEARNED
from lightning_app.analysis.score import Score
from lightning_app.analysis.statistics import FEW_SEEDS
from lightning_app.task_facts import LOSS

NOT_COVERED = (
    "Not recomputed here: bootstrap-t intervals, which depend on the resamples drawn; p values "
    "over test sentences, which come from the stored translations; lost steps, which come from the "
    "learning rates in each run's metrics.csv; errors over texts, which come from the parts in "
    "each run's result.json; and the curves of runs, which are in validations.parquet."
)


def notebook(grid: GridResults, scores: Sequence[Score]) -> list[NotebookCell]:
    """The cells that recompute the scores that are defined, after the one that reads the runs."""
    if not scores or not grid.finished:
        return []
    defined = {score.score.split()[0] for score in scores if not math.isnan(score.estimate)}
    cells = [READ, COST, STALLS, MEANS, FLATNESS]
    if defined & {"delta", "stall_difference"}:
        cells += [COMPARED, HOLM]
    if "delta" in defined:
        cells += [PAIRS, TESTS, DELTA, RATIO]
    if "interaction" in defined:
        cells += [BESIDE, INTERACTION]
    if "detectable" in defined:
        cells.append(POWER)
    if "steps_saved" in defined:
        cells += [CURVES, SAVED]
    if "stall_difference" in defined:
        cells += [FACED, EXACT, EXACT_P]
    if "eta_max" in defined:
        cells.append(LARGEST)
    if defined & {"need", "octaves", "rate_sensitivity"}:
        cells += [COMPLETE, CLEAR, CHOSEN, NEED, NEED_P, OCTAVES, RISEN]
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
def t_test(x, widen=1):  # Student's interval, p value; nan for one seed or seeds that do not differ
    apart = len(x) > 1 and np.ptp(x) > 1e-12 * max(1, np.abs(x).max())
    error = widen * np.std(x, ddof=1) / np.sqrt(len(x)) if apart else np.nan
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

COMPARED = NotebookCell(
    title="Runs with a reference; late ones learned under a third of what the best seed learned",
    table="",
    code=f"""\
compared = runs[runs.reference_warmup > 0].dropna(subset="loss")
gain = compared.unigram_entropy - compared.loss
best = gain.groupby([compared[key] for key in [*arm, "warmup"]]).transform("max")
late = (best >= {LEARNED}) & (gain < best * {ESCAPED}) & (compared.failed == 0)
compared = compared.assign(late=late)""",
)

PAIRS = NotebookCell(
    title="Pair the runs without warm-up and with the reference warm-up, seed by seed",
    table="",
    code=f"""\
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

TESTS = NotebookCell(
    title="p values: the larger of two, corrected by Holm over the whole grid",
    table="",
    code=f"""\
late = pairs.groupby(arm)[["late", "late_ref"]].max().max(axis=1).astype(bool)
alike &= ~(late & (pairs.groupby(arm).size() < {FEW_SEEDS}))
level = pairs.groupby(arm)[stalled].mean().mean(axis=1).isin([0, 1])  # none failed, or all
spread = pairs.groupby(arm).lost.agg(["var", "count"])
free = (spread["count"] - 1).groupby(["group", "lr"]).sum()
sd = (spread["var"].fillna(0) * (spread["count"] - 1)).groupby(["group", "lr"]).sum() / free
pool = {{who: (sd[who] ** 0.5, free[who]) for who in free.index}}
def larger(x, sd, free, widen=1):  # Student's p, and that of the spread pooled over variants
    error = widen * sd / len(x) ** 0.5 if sd > 0 else np.nan
    return np.maximum(t_test(x, widen)[2], 2 * stats.t.sf(abs(np.mean(x)) / error, free))""",
)

HOLM = NotebookCell(
    title="Holm's correction over the whole grid",
    table="",
    code="""\
def holm(table):
    tested = table[table.seeds > 1].sort_values("p")  # a p value that is withheld counts as 1
    steps = tested.p.fillna(1) * np.arange(len(tested), 0, -1)
    corrected = steps.clip(upper=1).cummax().where(tested.p.notna())
    return table.assign(p_holm=corrected.reindex(table.index))""",
)

DELTA = NotebookCell(
    title="Δ with Student's t interval and its p value",
    table="delta",
    code=f"""\
rows = []
for who, own in pairs.groupby(arm):
    ends = t_test(own.lost)[:2] if alike[who] else (np.nan, np.nan)
    sure = (alike[who] and level[who]) or len(own) >= {FEW_SEEDS}  # else stalls may be chance
    p = larger(own.lost, *pool[who[:2]]) if sure else np.nan
    rows.append((*who, "delta", own.lost.mean(), *ends, p, len(own)))
delta = holm(pd.DataFrame(rows, columns=[*arm, *columns]))""",
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

BESIDE = NotebookCell(
    title="Pair the runs of each variant with those of the baseline, seed by seed",
    table="",
    code=f"""\
own, base = ["group", "lr", "seed", "baseline"], ["group", "lr", "seed", "variant"]
both = pairs.merge(pairs, left_on=own, right_on=base, suffixes=("", "_base"))
both = both[both.variant != both.baseline]
def endings(own):  # whether seeds of one arm ended differently, and arms of one warm-up
    few, late = len(own) < {FEW_SEEDS}, own.filter(like="late").to_numpy().any()
    level = [np.ptp(own.filter(regex=f"^{{of}}(_base)?$").to_numpy()) == 0 for of in stalled]
    mixed = own.filter(like="failed").nunique().max() > 1 or (few and late)
    return mixed, len(own) < 2 or (few and (late or not all(level)))""",
)

INTERACTION = NotebookCell(
    title="The interaction: Δ less that of the baseline, over the seeds of both, and its p value",
    table="versus",
    code="""\
rows = []
for who, own in both.groupby(arm):
    lost, (mixed, chance) = own.lost - own.lost_base, endings(own)
    low, high = (np.nan, np.nan) if mixed else t_test(lost)[:2]
    p = np.nan if chance else larger(lost, 2**0.5 * pool[who[:2]][0], pool[who[:2]][1])
    rows.append((*who, "interaction", lost.mean(), low, high, p, len(own)))
versus = holm(pd.DataFrame(rows, columns=[*arm, *columns]))""",
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
    title="R_w: how flat the loss is over the warm-ups",
    table="flat",
    code=f"""\
rows = []
for who, own in runs.groupby(arm):
    loss = own.pivot(index="seed", columns="warmup", values="loss").dropna()
    if len(loss) and loss.shape[1] > 1:
        top, mean = own[own.seed.isin(loss.index)].unigram_entropy.mean(), loss.mean()
        if top - mean.min() >= {LEARNED}:
            rows.append((*who, "R_w", (mean.mean() - mean.min()) / (top - mean.min())))
flat = pd.DataFrame(rows, columns=[*arm, *columns[:2]])""",
)

CURVES = NotebookCell(
    title="The steps by which one run is ahead of the other, from the validations",
    table="",
    code=f"""\
log = pd.read_parquet("validations.parquet").dropna(subset="{LOSS}")
curves = {{run: own.set_index("step")["{LOSS}"] for run, own in log.groupby("id")}}
def first(curve, x):  # the first step with a loss of x or less, linear between validations
    k = int(np.argmax(curve.to_numpy() <= x)) if (curve <= x).any() else len(curve) - 1
    (t0, y0), (t1, y1) = [(curve.index[i], curve.iloc[i]) for i in (max(k - 1, 0), k)]
    return t1 if k == 0 or y1 > x else t0 + (y0 - x) / (y0 - y1) * (t1 - t0)
def ahead(run):
    bare, ref = curves[run.id], curves[run.id_ref]
    saved = ref.index[-1] - first(ref, run.loss)
    return saved if run.loss_ref <= run.loss else first(bare, run.loss_ref) - bare.index[-1]""",
)

SAVED = NotebookCell(
    title="Steps saved with Student's t interval",
    table="saved",
    code="""\
rows, known = [], {run for run, curve in curves.items() if len(curve) > 1}
for who, own in pairs.groupby(arm):
    if {*own.id, *own.id_ref} <= known:
        steps = np.array([ahead(run) for run in own.itertuples()])
        ends = t_test(steps)[:2] if alike[who] else (np.nan, np.nan)
        rows.append((*who, "steps_saved", steps.mean(), *ends, len(own)))
saved = pd.DataFrame(rows, columns=[*arm, *columns[:4], "seeds"])""",
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
