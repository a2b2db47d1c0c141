"""Cells of the appendix's notebook that compute the scores over all learning rates again."""

from lightning_app.analysis.exports.notebook_cell import NotebookCell
from lightning_app.analysis.pairing import ESCAPED, LEARNED
from lightning_app.analysis.rate_scores import TOLERATED
from lightning_app.analysis.statistics import FEW_SEEDS

FACED = NotebookCell(
    title="The runs of each rate that has some without warm-up and some with the reference",
    table="",
    code="""\
faced = compared[(compared.warmup == 0) | (compared.warmup == compared.reference_warmup)]
faced = faced[faced.groupby(arm).warmup.transform("nunique") == 2]
faced = faced.assign(bare=faced.warmup == 0)
of = runs.groupby(["group", "variant"]).lr
only = of.min().where(of.nunique() == 1)  # the rate of a variant that has one
shares = faced.groupby([*arm, "bare"]).failed.agg(["mean", "count"]).unstack()
weight = shares["count"].prod(axis=1) / shares["count"].sum(axis=1)  # Mantel and Haenszel's
sums = pd.DataFrame({"w": weight, "x": weight * shares["mean"].diff(axis=1)[True]})
less = sums.groupby(["group", "variant"]).sum().eval("x / w")""",
)

EXACT = NotebookCell(
    title="Stalls without warm-up against stalls with it: an exact test over the rates",
    table="exact",
    code="""\
rows = []
for (group, variant), own in faced.groupby(["group", "variant"]):
    chances, bare = np.ones(1), own[own.bare].failed
    for _, one in own.groupby("lr"):
        given = stats.hypergeom(len(one), one.failed.sum(), one.bare.sum())
        chances = np.convolve(chances, given.pmf(np.arange(one.failed.sum() + 1)))
    p = chances[chances <= chances[bare.sum()] * (1 + 1e-9)].sum() if own.failed.any() else np.nan
    who = (group, only[group, variant], variant, "stall_difference")
    rows.append((*who, less[group, variant], p, own.seed.nunique()))
exact = pd.DataFrame(rows, columns=[*arm, "score", "estimate", "p", "seeds"])""",
)

EXACT_P = NotebookCell(
    title="Holm's correction over the variants with a stall; the others have no test",
    table="exact",
    code="""\
exact["p_holm"] = holm(exact.dropna(subset="p")).p_holm""",
)

LARGEST = NotebookCell(
    title="η_max: the largest rate without a stall",
    table="rates",
    code="""\
rows = []
for who, own in runs.dropna(subset="loss").groupby(["group", "variant", "warmup"]):
    sound = own.groupby("lr").filter(lambda one: one.failed.sum() == 0)
    rows.append((who[0], np.nan, who[1], f"eta_max w={who[2]}", sound.lr.max()))
rates = pd.DataFrame(rows, columns=[*arm, *columns[:2]])""",
)

COMPLETE = NotebookCell(
    title="The runs [seed, rate] of the seeds that finished at every rate, by warm-up",
    table="",
    code="""\
full, planned = {}, runs.groupby(["group", "variant"]).lr.unique().map(np.sort)
for who, own in compared.groupby(["group", "variant"]):
    kinds = [own.pivot(index="seed", columns=["warmup", "lr"])[of] for of in ("loss", "failed")]
    for warmups in ([0, own.reference_warmup.iloc[0]], *([w] for w in own.warmup.unique())):
        points = pd.MultiIndex.from_product([warmups, planned[who]])
        seeds = kinds[0].reindex(columns=points).dropna().index
        both = [[of.reindex(seeds, columns=points)[w].to_numpy() for w in warmups] for of in kinds]
        used = own[own.seed.isin(seeds) & own.warmup.isin(warmups)].groupby("seed")
        if len(seeds) and len(planned[who]) > 1:
            full[*who, *warmups] = planned[who], *both, used.unigram_entropy.mean()""",
)

CLEAR = NotebookCell(
    title="The factor of a standard error where the best rate is not clear",
    table="",
    code="""\
def widen(losses):  # 1 where the second best rate is worse by its t interval, at each warm-up
    n, order = len(losses[0]), [x.mean(axis=0).argsort() for x in losses]
    apart = [x[:, o[1]] - x[:, o[0]] for x, o in zip(losses, order)]
    edge = stats.t.ppf(0.975, n - 1) / n**0.5
    clear = all(x.mean() > edge * x.std(ddof=1) for x in apart)
    return 1 if clear else (1 + n / (n - 1)) ** 0.5  # the choices are not independent""",
)

CHOSEN = NotebookCell(
    title="The runs at the best rates, each chosen on the other seeds, and how they ended",
    table="",
    code=f"""\
def at_best(loss, of):
    return of[np.arange(len(loss)), (loss.sum(axis=0) - loss).argmin(axis=1)]
def ended_at_best(losses, failed, tops):  # whether the interval and the p value are withheld
    bad = np.array([at_best(*of) for of in zip(losses, failed)])
    gain = np.where(bad, 0, tops.to_numpy() - [at_best(x, x) for x in losses])
    best, few = gain.max(axis=1, keepdims=True), bad.shape[1] < {FEW_SEEDS}
    late = (best >= {LEARNED}) & (gain < best * {ESCAPED}) & (bad == 0)
    mixed = [np.ptp(one.astype(float), axis=1).any() for one in (bad, late)]
    return mixed[0] or (few and mixed[1]), mixed[0] or late.any() or (few and np.ptp(bad) > 0)""",
)

NEED = NotebookCell(
    title="N: the need at the best rates",
    table="needed",
    code=f"""\
needs, withheld, rows = {{}}, {{}}, []
for (g, v, *other), (_, losses, failed, tops) in full.items():
    low = losses[-1].mean(axis=0).min()
    if len(other) == 2 and len(tops) > 1 and tops.mean() - low >= {LEARNED}:
        needs[g, v] = x = np.subtract(*[at_best(x, x) for x in losses])
        withheld[g, v] = *ended_at_best(losses, failed, tops), widen(losses)
        ends = (np.nan, np.nan) if withheld[g, v][0] else t_test(x, withheld[g, v][2])[:2]
        rows.append((g, np.nan, v, "need", x.mean(), *ends, np.nan, len(x)))
needed = pd.DataFrame(rows, columns=[*arm, *columns])
mass = {{g: [x for (of, _), x in needs.items() if of == g] for g in needed.group}}""",
)

NEED_P = NotebookCell(
    title="p values of N, with the spread pooled over the variants of a group",
    table="needed",
    code="""\
found = []
for (group, variant), x in needs.items():
    free = sum(len(y) - 1 for y in mass[group])
    sd = (sum((len(y) - 1) * y.var(ddof=1) for y in mass[group]) / free) ** 0.5
    _, hidden, wide = withheld[group, variant]
    found.append(np.nan if hidden else larger(x, sd, free, wide))
needed = holm(needed.assign(p=found))""",
)

OCTAVES = NotebookCell(
    title="O: the octaves of learning rate that warm-up buys",
    table="bought",
    code=f"""\
def tolerated(rates, loss, top):  # log2 of the largest rate, going up from the best
    limit, at = loss.min() + {TOLERATED} * (top - loss.min()), np.log2(rates)
    over = [k for k in range(loss.argmin(), len(rates)) if loss[k] > limit][:1]
    theta = [np.interp(limit, loss[k - 1 : k + 1], at[k - 1 : k + 1]) for k in over] or [at[-1]]
    return theta[0] if top - loss.min() >= {LEARNED} else np.nan
rows = []
for (g, v, *other), (lrs, losses, _, tops) in full.items():
    x = np.diff([[tolerated(lrs, *one) for one in zip(of, tops)] for of in losses], axis=0).sum(0)
    rows += [(g, np.nan, v, "octaves", x.mean(), *t_test(x), len(x))] * (len(other) == 2)
bought = pd.DataFrame(rows, columns=[*arm, *columns]).dropna(subset="estimate")""",
)

RISEN = NotebookCell(
    title="S: how much the loss rises over the rates",
    table="risen",
    code=f"""\
rows = []
for (group, variant, *warmups), (lrs, losses, _, tops) in full.items():
    learned = all((tops - x.min(axis=1) >= {LEARNED}).all() for x in losses)
    wide = np.log(lrs[-1] / lrs[0])
    s = [np.trapezoid(x, np.log(lrs), axis=1) / wide - at_best(x, x) for x in losses]
    value, name = (s[0] - s[1], "") if len(s) == 2 else (s[0], f" w={{warmups[0]}}")
    low, high, p = t_test(value, widen(losses) if len(value) > 1 else 1)
    row = (group, np.nan, variant, f"rate_sensitivity{{name}}", value.mean(), low, high)
    rows += [(*row, np.nan if name else p, len(value))] * (learned and len(value) > 1)
risen = pd.DataFrame(rows, columns=[*arm, *columns])""",
)
