"""The limits of a grid's evidence, as messages with the numbers of its runs."""

import re
from collections import Counter
from collections.abc import Sequence

from lightning_app.config.tree import label
from lightning_app.report.comparisons import compared_axes, comparisons, followers
from lightning_app.report.facts import range_of, records_of, say, schedules
from lightning_app.report.pairs import arms
from lightning_app.report.results import OTHER_DATA, CellResult, GridResults, damaged_files, unlike
from lightning_app.report.statistics import ALPHA, FEW_SEEDS, LEVEL, wilson_interval
from lightning_app.report.tasks import failed_runs
from lightning_app.runs.mixtures import left_out, statements, unsealed
from lightning_app.scores.task_facts import LOSS, glue_task_of

_CORPUS = tuple(
    f"data.{name}"
    for name in ("class_path", "init_args", "name", "task", "root", "source_language")
)
SHOWN = 5  # limits that the page shows unfolded


def limits(grid: GridResults) -> list[str]:
    """The limits of a grid, one message each, the `urgent` ones first."""
    if not grid.finished:
        return urgent(grid)
    items = [*urgent(grid), *_of_scores(grid), *_of_protocol(grid), *_without_spread(grid)]
    items.append(say("limits.budget", budget=f"{range_of(grid, 'steps')} steps"))
    items += filter(None, [unsealed(records_of(grid))])
    rates = sorted({cell.lr for cell in grid.finished if cell.lr is not None})
    if len(rates) == 1:
        items.append(say("limits.one_rate", rate=label(rates[0])))
    elif rates:
        own = "each seed at its own" if grid.trials else "each arm at some"
        items.append(say("limits.rates", rates=_rates(grid), of=f" ({own})" * bool(grid.chosen)))
    seeds = len({cell.seed for cell in grid.finished})
    corpora = len({tuple(label(c.setting(field)) for field in _CORPUS) for c in grid.finished})
    over = "intervals cover only seeds, not" if seeds > 1 else "nothing is known about other"
    corpora_words = f"{corpora} corpora" if corpora > 1 else "One corpus"
    parameters = range_of(grid, "parameters")
    items.append(say("limits.scope", corpora=corpora_words, parameters=parameters, over=over))
    if seeds < 2:
        items.append(say("limits.one_seed"))
    else:
        own = [len({seed for *_, seed in arm.cells}) for arm in arms(grid) if arm.cells]
        least, most = min(own), max(own)
        few = " With so few seeds, intervals are wide, or narrow by chance." * (least < FEW_SEEDS)
        many = most if least == most else f"{least} to {most}"
        items += [
            say("limits.seeds", seeds=many, few=few),
            say("limits.false_labels"),
            *([say("limits.until", level=1 - grid.alpha)] if grid.alpha < ALPHA else []),
            *([say("limits.adaptive")] if grid.chosen and not grid.trials else []),
        ]
    return [*items, *_not_asked(grid), *_of_coupling(grid)]


def _of_scores(grid: GridResults) -> list[str]:
    """What the scores of published tasks do not show."""
    if not grid.scored:
        return []
    least = min((arm.runs for arm in failed_runs(grid)), default=1)
    other = {
        glue_task_of(cell.corpus or "") or cell.corpus or ""
        for cell in grid.scored
        if _is_of_other_rows(str(cell.data.get("protocol")))
    }
    return [
        *([say("limits.other_rows", tasks=", ".join(sorted(other)))] if other else []),
        say("limits.dev_set"),
        say("limits.failures", seeds=least, most=wilson_interval(0, least)[1], level=LEVEL),
        say("limits.other_models", parameters=range_of(grid, "parameters")),
    ]


def _without_spread(grid: GridResults) -> list[str]:
    """Metrics on which the runs of several arms all end with the same value."""
    runs: dict[tuple[str, str | None], list[CellResult]] = {}
    for cell in grid.finished:
        metric = grid.measure(cell).metric
        if cell.metrics.get(metric) is not None:
            runs.setdefault((metric, cell.corpus), []).append(cell)
    return [
        say("limits.no_spread", metric=tag, corpus=corpus or "all data", value=label(values.pop()))
        for (tag, corpus), cells in runs.items()
        if len(values := {cell.metrics[tag] for cell in cells}) == 1
        and len({(cell.group, cell.variant, cell.warmup, cell.lr) for cell in cells}) > 1
    ]


_SAID = {
    "overlap": "; also in train: ([^;]+)",
    "unmasked": "; ([^;]+ of training words) have more pieces",
}


def _of_protocol(grid: GridResults) -> list[str]:
    """Texts that are also in train, and words that are never masked, by the protocols."""
    found = {
        (name, str(cell.data.get("name")), match[1])
        for cell in grid.finished
        for name, pattern in _SAID.items()
        if (match := re.search(pattern, str(cell.data.get("protocol"))))
    }
    return [say(f"limits.{each}", name=of, protocol=text) for each, of, text in sorted(found)]


def _is_of_other_rows(protocol: str) -> bool:
    """Whether an evaluation used other rows than the published ones, or only a part of them."""
    part = re.search(r"([\d,]+) of ([\d,]+) rows of valid are evaluated", protocol)
    others = ("not the published counts", "NOT the published splits")
    return any(words in protocol for words in others) or (part is not None and part[1] != part[2])


def _rates(grid: GridResults) -> str:
    """The smallest and the largest rate; per group where groups differ."""
    tried: dict[str, set[float]] = {}
    for cell in grid.finished:
        tried.setdefault(cell.group, set()).add(cell.lr or 0.0)
    spans = {group: f"from {label(min(of))} to {label(max(of))}" for group, of in tried.items()}
    if len(set(spans.values())) == 1:
        return next(iter(spans.values()))
    return "; ".join(f"{span} ({group})" for group, span in spans.items())


_LATER = ("linear", "cosine", "sqrt")
_SCHEDULES = {
    ("inverse_sqrt", "paper"): "limits.coupled_inverse",
    **{(kind, "paper"): "limits.coupled_later" for kind in _LATER},
    **{(kind, "decoupled"): "limits.decoupled" for kind in ("inverse_sqrt", *_LATER)},
    ("bert", ""): "limits.bert",
}


def _of_coupling(grid: GridResults) -> list[str]:
    """What each coupling of warm-up and decay in the grid means for a comparison."""
    steps = grid.tried("model.schedule.reference_steps")
    begins = f"at step {label(steps[0])}" if len(steps) == 1 else "at its reference step"
    if 0 < max(grid.tried("trainer.max_steps"), default=0) <= min(steps, default=0):
        begins += ", which is not before its last one"
    kinds = schedules(grid)
    texts = {each: say(_SCHEDULES[each], begins=begins) for each in kinds if each in _SCHEDULES}
    if len(kinds) == 1:
        return [*texts.values()]
    return [
        say("limits.one_schedule", kind=kind, coupling=of and f", coupling {of}", text=text)
        for (kind, of), text in texts.items()
    ]


def urgent(grid: GridResults) -> list[str]:
    """What is wrong or missing among the runs of one grid."""
    items = [text] if (text := left_out(grid.strangers)) else []
    if grid.afterwards:
        items.append(say("limits.afterwards", names=" and ".join(grid.afterwards)))
    items += statements(records_of(grid)).values()
    items += [*_unlike(grid), *_early(grid)]
    if lines := damaged_files(grid):
        items.append(say("limits.damaged", files=len(lines), lines="; ".join(lines)))
    pruned, cells = sum(cell.state == "pruned" for cell in grid.cells), len(grid.cells)
    if grid.pruner is not None:
        items.append(say("limits.pruner", pruner=grid.pruner, pruned=pruned, cells=cells))
    apart = sum(cell.state == OTHER_DATA for cell in grid.cells)
    if missing := cells - len(grid.finished) - pruned - apart:
        items.append(say("limits.missing", missing=missing, cells=cells))
    return items


def _not_asked(grid: GridResults) -> list[str]:
    """Missing arms, and the scores that they leave undefined."""
    if not grid.asks_warmup:
        return []
    reference, items = grid.reference_warmup, []
    if 0 not in grid.warmups:
        items.append(say("limits.no_bare_arm"))
    elif not reference or reference not in grid.warmups:
        items.append(say("limits.no_reference"))
    if not {cell.baseline for cell in grid.cells} & set(grid.variants):
        items.append(say("limits.no_baseline"))
    return items


def _unlike(grid: GridResults) -> list[str]:
    """Metrics that count different things in some runs, and axis values with unequal budgets."""
    items = _of_rulers(grid)
    budgets: dict[str, dict[str, None]] = {}
    for row in () if grid.pruner else comparisons(grid):
        if row.budget and row.comparable:
            text = f"{row.value} {row.budget}, compared with {row.baseline}"
            budgets.setdefault(row.axis.rpartition(".")[2], {})[text] = None
    compared = {*compared_axes(grid), *(of for of in grid.axes if of.startswith(grid.wiring))}
    if follow := followers(grid, compared):
        items.append(say("limits.follows", text=follow))
    return items + [
        say("limits.unequal_budgets", axis=axis, values="; ".join(of))
        for axis, of in budgets.items()
    ]


def _of_rulers(grid: GridResults) -> list[str]:
    """The metrics by which not all runs can be ranked together, and why."""
    items = []
    metrics = [each.metric for each in grid.measures]
    for metric in dict.fromkeys([*metrics, *(cell.monitored.loss for cell in grid.finished)]):
        cells = [c for c in grid.finished if metric in (grid.measure(c).metric, c.monitored.loss)]
        if why := unlike(cells, metric):
            items.append(say("limits.unlike", metric=metric, why=why))
    return items


def _early(grid: GridResults) -> list[str]:
    """Runs with translations that were cut, that have not yet learned, and without the metric of
    the grid."""
    items, runs = [], len(grid.finished)
    if cut := [n for cell in grid.finished if (n := cell.record.get("cut_hypotheses"))]:
        items.append(say("limits.cut", most=max(cut), cut=len(cut), runs=runs))
    early = [cell for cell in grid.finished if cell.outcome == "not_yet_learned"]
    if early:
        capped = [cell for cell in early if cell.capped]
        counts = {"early": len(early), "runs": runs, "capped": len(capped)}
        items.append(say("limits.early", **counts, names=_named(capped) or "none"))
    lacking = [c for c in grid.finished if c.metrics.get(grid.measure(c).metric) is None]
    metric = ", ".join(dict.fromkeys(grid.measure(cell).metric for cell in lacking))
    if lacking and not (metric == LOSS and grid.asks_warmup):  # there it counts as H
        whose = "the metric of the grid" if metric == grid.metric else "their task's own score"
        counts = {"lacking": len(lacking), "runs": runs}
        items.append(
            say("limits.no_metric", **counts, metric=metric, whose=whose, names=_named(lacking))
        )
    return items


def _named(cells: Sequence[CellResult]) -> str:
    counts = Counter(f"{cell.variant} at warm-up {cell.warmup or 0:,}" for cell in cells)
    return ", ".join(f"{count} of {where}" for where, count in counts.items())
