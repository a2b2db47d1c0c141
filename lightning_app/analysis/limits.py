"""The limits of a grid's evidence, in sentences built from the settings of its runs."""

import re
from collections import Counter
from collections.abc import Sequence

from lightning_app.analysis.comparison import comparisons
from lightning_app.analysis.damaged_files import damaged_files
from lightning_app.analysis.failed_runs import failed_runs
from lightning_app.analysis.grid_results import OTHER_DATA, CellResult, GridResults, unlike
from lightning_app.analysis.merge_grids import differing_settings, shared
from lightning_app.analysis.run_summary import (
    budget_of,
    range_of,
    records_of,
    schedules,
)
from lightning_app.analysis.statistics import FEW_SEEDS, LEVEL, wilson_interval
from lightning_app.analysis.strays import stray_runs
from lightning_app.grid_axes import label
from lightning_app.mixtures import left_out, statements, unsealed
from lightning_app.task_facts import LOSS, glue_task_of

SHORT = 3  # of the other limits are in view on the page, one line each


def limits(grid: GridResults) -> list[str]:
    """The limits of a grid, one sentence each, the `urgent` ones first."""
    if grid.parts:
        return _limits_of_all(grid)
    items = [
        *urgent(grid),
        *_of_scores(grid),
        *_of_overlap(grid),
        f"Every run ended after {budget_of(grid)}: a run that stalls can learn later, so “stalls” "
        "and Δ hold for this budget only.",
    ]
    if text := unsealed(records_of(grid)):
        items.append(text)
    rates = sorted({cell.lr for cell in grid.finished if cell.lr is not None})
    if len(rates) == 1:
        items.append(f"One learning rate, {label(rates[0])}: another rate can change the order.")
    elif rates:
        items.append(f"Learning rates {_rates(grid)}; other rates were not tried.")
    seeds = len({cell.seed for cell in grid.finished})
    corpora = len({cell.data.get("digest") for cell in grid.finished} - {None})
    one = f"{f'{corpora} corpora' if corpora > 1 else 'One corpus'}, "
    over = "intervals are over seeds only, not over" if seeds > 1 else "nothing is said about other"
    items.append(
        f"{one}{range_of(grid, 'parameters')} parameters: {over} validation "
        "texts, corpora, languages, depths or widths."
    )
    if seeds < 2:
        items.append(
            "One seed: differences between variants may be chance; there are no intervals over "
            "seeds."
        )
    else:
        few = (
            " With so few seeds, intervals are wide, or narrow by chance."
            if seeds < FEW_SEEDS
            else ""
        )
        items.append(
            f"{seeds} seeds. Intervals are Student's t at {LEVEL:.0%}. They are not corrected for "
            "multiple comparisons. The labels helps, costs, more and less are: each needs p under "
            f"{1 - LEVEL:.0%} after Holm's correction over all variants, rates and other axes of "
            "the grid. p is the larger of two: Student's t over the seeds, and the same with the "
            f"spread between seeds pooled over the variants.{few}"
        )
        items.append(
            "In simulated grids without any difference a label is false in at most 6 % of grids "
            "(benchmarks/false_labels.py: normal, heavy-tailed and skewed noise, spreads that "
            "differ 40-fold, runs that leave a plateau or stall by chance; 3 to 10 seeds, 3 and 23 "
            "comparisons, 1 and 6 rates; Δ, the interaction and N). Noise that is skewed more "
            "strongly than that can exceed it. The p value by sign flips in sensitivity.csv needs "
            f"symmetric noise only, but cannot be under {2 / 2**seeds:.2g} here."
        )
        items.append(
            "Coverage of the intervals in simulated grids (benchmarks/coverage.py): those of "
            "Δ, relative Δ and the interaction contain the true value in 93 to 97 %, with skewed "
            "or heavy-tailed noise too; those of the mean loss of one arm in 92 to 93 % where "
            "noise is strongly skewed; those of stalls in 95 % on average over the true share, "
            "in 83 to 100 % at a single one."
        )
        items.append(
            "Δ, the interaction and N have an interval only if all seeds of an arm stalled, or "
            "none did: otherwise it would contain the true value in only 41 to 95 % of cases. "
            f"Fewer than {FEW_SEEDS} seeds give no p value where the arms differ in stalls, or "
            "where a run half escaped: it learned less than a third of what the best seed learned."
        )
    items += _not_asked(grid)
    return [*items, *_of_coupling(grid)]


def _of_scores(grid: GridResults) -> list[str]:
    """What the scores of published tasks do not show."""
    if not grid.scored:
        return []
    least = min((arm.runs for arm in failed_runs(grid)), default=1)
    _, most = wilson_interval(0, least)
    items = [
        "Scores are those of the dev set. A setting that was chosen by them, as in the row of the "
        "best setting, looks better than it is: compare the means over all seeds.",
        f"{least} seeds an arm: if none of {least} runs failed, up to {most:.0%} may fail (Wilson, "
        f"{LEVEL:.0%}). “Failed” means no better than a constant answer at the end of this budget.",
        f"Models of {range_of(grid, 'parameters')} parameters: published figures are of other "
        "models, other pretraining and other choices of settings, so that only the order of "
        "variants may be compared, not the scores.",
    ]
    other = {
        glue_task_of(cell.corpus or "") or cell.corpus or ""
        for cell in grid.scored
        if _is_of_other_rows(str(cell.data.get("protocol")))
    }
    if other:
        items.insert(
            0,
            f"Not the published rows: {', '.join(sorted(other))}. Scores on other rows cannot be "
            "compared with published ones.",
        )
    return items


def _of_overlap(grid: GridResults) -> list[str]:
    """What of the evaluated text the runs were trained on, as the protocol of each corpus says."""
    found = {
        (str(cell.data.get("name")), match[1])
        for cell in grid.finished
        if (match := re.search("; also in train: ([^;]+)", str(cell.data.get("protocol"))))
    }
    return [
        f"Evaluated on text that is also in train ({name}): {said}. A model may know it by heart, "
        "so losses and scores on it do not show what holds for new text."
        for name, said in sorted(found)
    ]


def _is_of_other_rows(protocol: str) -> bool:
    """Whether an evaluation was of other rows than the published ones, or of a part of them."""
    part = re.search(r"([\d,]+) of ([\d,]+) rows of valid are evaluated", protocol)
    others = ("not the published counts", "NOT the published splits")
    return any(words in protocol for words in others) or (part is not None and part[1] != part[2])


def _rates(grid: GridResults) -> str:
    """The smallest and the largest rate; of each group where groups have others."""
    tried: dict[str, set[float]] = {}
    for cell in grid.finished:
        tried.setdefault(cell.group, set()).add(cell.lr or 0.0)
    spans = {group: f"from {label(min(of))} to {label(max(of))}" for group, of in tried.items()}
    if len(set(spans.values())) == 1:
        return next(iter(spans.values()))
    return "; ".join(f"{span} ({group})" for group, span in spans.items())


def _of_coupling(grid: GridResults) -> list[str]:
    """What the coupling of warm-up and decay means for a comparison, for each one of the grid."""
    references = grid.tried("model.schedule.reference_steps")
    begins = f"at step {label(references[0])}" if len(references) == 1 else "at its reference step"
    shared = (
        f"Warm-up and decay are decoupled: every run has the decay that begins {begins}, and "
        "warm-up 0 means the full rate at step 1. The numbers are not comparable with papers that "
        "couple the two (Xiong et al. 2020)."
    )
    later = (
        "The schedule is coupled: its decay begins where the warm-up ends, so a run without "
        "warm-up has smaller rates later. Do not read Δ as the effect of warm-up; use coupling: "
        "decoupled for that."
    )
    seam = (
        "The schedule is that of BERT's code: every run follows the same line from the full rate "
        "at step 1 to 0, except during its warm-up, which starts at rate 0 and ends with a fall."
    )
    texts = {
        ("inverse_sqrt", "paper"): "The schedule is coupled: no warm-up is also almost no learning "
        "rate after the first steps. In short runs this alone makes a variant look sensitive, "
        "Pre-LN most of all. Do not read Δ as the effect of warm-up; use coupling: decoupled for "
        "that.",
        ("linear", "paper"): later,
        ("cosine", "paper"): later,
        ("inverse_sqrt", "decoupled"): shared,
        ("linear", "decoupled"): shared,
        ("cosine", "decoupled"): shared,
        ("bert", ""): seam,
    }
    found = schedules(grid)
    if len(found) == 1:
        return [texts[found[0]]] if found[0] in texts else []
    return [
        f"Runs with {each[0]}{', coupling ' * bool(each[1])}{each[1]}: {texts[each]}"
        for each in found
        if each in texts
    ]


def urgent(grid: GridResults) -> list[str]:
    """What is wrong or missing among the runs of one grid."""
    items = [text for text in (left_out(grid.strangers), stray_runs(grid)) if text]
    items += statements(records_of(grid)).values()
    items += [*_unlike(grid), *_early(grid), *_damaged(grid)]
    pruned = sum(cell.state == "pruned" for cell in grid.cells)
    if grid.pruner is not None:
        items.append(
            f"Pruner: {grid.pruner}. {pruned} of {len(grid.cells)} cells were ended early because "
            "their metric was poor. They are left out, so the means are too good for the variants "
            "that lost most cells; no sensitivity is reported."
        )
    apart = sum(cell.state == OTHER_DATA for cell in grid.cells)
    missing = len(grid.cells) - len(grid.finished) - pruned - apart
    if missing:
        items.append(
            f"{missing} of {len(grid.cells)} cells have no result. Runs of one seed are compared, "
            "so that the other run of a pair is not used either."
        )
    return items


def _limits_of_all(grid: GridResults) -> list[str]:
    """The limits between the grids, then those common to all, then those of single grids."""
    differ = [
        f"{key} ({' / '.join(map(label, values))})"
        for key, values in differing_settings(grid).items()
    ]
    found = [
        "Each grid is compared with its own baseline and its own reference warm-up; no test "
        "compares one grid with another. If they differ, the reason may be chance, or any of "
        f"the settings that differ: {'; '.join(differ) or 'none except their axes'}.",
    ]
    found += _of_rulers(grid)
    if common := shared(grid):
        found.append(
            f"{common} cells are in more than one grid: the same runs, shown in each, so that the "
            "grids agree there by construction."
        )
    found_in = {part.name: limits(part) for part in grid.parts}
    alike = [
        item for item in found_in[grid.parts[0].name] if all(item in t for t in found_in.values())
    ]
    each = [
        f"{name}: {item}" for name, items in found_in.items() for item in items if item not in alike
    ]
    return [*found, *alike, *each]


def _not_asked(grid: GridResults) -> list[str]:
    """Missing arms, and the scores that they leave undefined."""
    if not grid.asks_warmup:
        return []
    reference = grid.reference_warmup
    baselines = {cell.baseline for cell in grid.cells}
    items = []
    if 0 not in grid.warmups:
        items.append("No arm without warm-up: who needs it cannot be said, and Δ is undefined.")
    elif not reference or reference not in grid.warmups:
        items.append("No arm with a reference warm-up to compare with: Δ is undefined.")
    if not baselines & set(grid.variants):
        items.append(
            "No arm of a baseline: the need for warm-up of two variants cannot be compared."
        )
    return items


def _unlike(grid: GridResults) -> list[str]:
    """Metrics that count other things in some runs, and values of axes with other budgets."""
    items = _of_rulers(grid)
    rows = [] if grid.pruner else comparisons(grid)
    for axis in dict.fromkeys(row.axis for row in rows):
        name = axis.rpartition(".")[2]
        said = dict.fromkeys(
            f"{row.value} {row.budget}, compared with {row.baseline}"
            for row in rows
            if row.axis == axis and row.budget and row.comparable
        )
        if said:
            items.append(
                f"Unequal budgets: {name} {'; '.join(said)}. That one value is better or worse may "
                "come from more tokens or a longer training alone."
            )
    return items


def _of_rulers(grid: GridResults) -> list[str]:
    """The metrics of which no single ranking of all runs is possible, and why."""
    items = []
    metrics = [each.metric for each in grid.measures]
    for metric in dict.fromkeys([*metrics, *(cell.monitored.loss for cell in grid.finished)]):
        cells = [c for c in grid.finished if metric in (grid.measure(c).metric, c.monitored.loss)]
        if why := unlike(cells, metric):
            items.append(
                f"{metric} does not count the same in all runs ({why}), so it is compared, ranked "
                "and averaged only among runs in which it does."
            )
    return items


def _early(grid: GridResults) -> list[str]:
    """Runs that have not yet learned, and runs without the metric of the grid."""
    items = []
    early = [cell for cell in grid.finished if cell.outcome == "not_yet_learned"]
    if early:
        capped = [cell for cell in early if cell.capped]
        items.append(
            f"Not yet learned: {len(early)} of {len(grid.finished)} runs. Their loss was falling "
            "when the budget ended and lay above the bar of a stall; they did not fail. One cap "
            f"holds for all variants, so the loss of {len(capped)} of them counts as the unigram "
            f"entropy in every score, though it ended higher: {_named(capped) or 'none'}. A longer "
            "budget is needed to compare them."
        )
    lacking = [c for c in grid.finished if c.metrics.get(grid.measure(c).metric) is None]
    names = ", ".join(dict.fromkeys(grid.measure(cell).metric for cell in lacking))
    if lacking and names != LOSS:
        whose = "the metric of the grid" if names == grid.metric else "their task's own score"
        items.append(
            f"{len(lacking)} of {len(grid.finished)} finished runs have no finite {names}, "
            f"{whose}; its means leave them out, which flatters their variants: "
            f"{_named(lacking)}."
        )
    return items


def _named(cells: Sequence[CellResult]) -> str:
    """The number of cells of each variant and warm-up."""
    found = Counter(f"{cell.variant} at warm-up {cell.warmup or 0:,}" for cell in cells)
    return ", ".join(f"{count} of {where}" for where, count in found.items())


def _damaged(grid: GridResults) -> list[str]:
    lines = damaged_files(grid)
    if not lines:
        return []
    return [
        f"{len(lines)} files are damaged, and what they held is missing here: {'; '.join(lines)}. "
        "`ablate doctor` lists what can be repaired."
    ]
