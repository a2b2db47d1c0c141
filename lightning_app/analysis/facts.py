"""What was run and what that leaves open, in words."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_app.analysis.numbers import DASH
from lightning_app.analysis.runs import (
    LOSS,
    OTHER_DATA,
    Cell,
    Grid,
    damaged_files,
    label,
    outcomes,
)
from lightning_app.analysis.statistics import FEW_SEEDS, LEVEL
from lightning_app.analysis.strays import strays
from lightning_app.analysis.together import differences, different, shared
from lightning_app.mixtures import SUPERSEDED, UNKNOWN, counted, groups, left_out, statements
from lightning_app.task_facts import STACKS, task_facts


def counts(grid: Grid) -> str:
    """How many cells there are in each state; of several grids, each cell counts once."""
    cells = different(grid)
    states = [cell.state for cell in cells]
    ended = outcomes(cells)
    parts = [
        f"of them {ended}" if ended else "none of them stalled",
        f"{states.count('pruned')} pruned" if "pruned" in states else "",
        f"{states.count('failed')} crashed" if "failed" in states else "",
        f"{states.count('unfinished')} unfinished" if "unfinished" in states else "",
        f"{states.count('waiting')} not started" if "waiting" in states else "",
        f"{states.count(OTHER_DATA)} left out, of other data" if OTHER_DATA in states else "",
        f"{states.count('damaged')} with a damaged result" if "damaged" in states else "",
    ]
    counted = ", ".join(part for part in parts if part)
    finished = sum(cell.finished for cell in cells)
    common = shared(grid)
    once = f" {common} of them in more than one grid, counted once." if common else ""
    return f"{finished} of {len(states)} planned cells finished: {counted}.{once}"


def facts(grid: Grid) -> dict[str, str]:
    """Everything that a reader needs to run it again, by name; of several grids, what each has."""
    if grid.parts:
        return _facts_of_each(grid)
    found = {
        "Variants": ", ".join(grid.variants),
        "Compared with": grid.baseline or DASH,
        "Warm-up": _warmups(grid),
        "Learning rate": ", ".join(f"{lr:g}" for lr in grid.rates) or DASH,
        "Seeds": f"{len(grid.seeds)} ({', '.join(map(str, grid.seeds))})" if grid.seeds else DASH,
        "Other axes": _other_axes(grid),
        "Budget of a run": _budget(grid),
        "Data": _data(grid),
        "Task": _task(grid),
        "Model": _model(grid),
        "Optimizer": _optimizer(grid),
        "Schedule": _schedule(grid),
        "Device": ", ".join(_distinct(grid, "device")) or DASH,
        "Precision": ", ".join(_distinct(grid, "precision")) or DASH,
        "Code": _code(grid),
        "Metric of the grid": _metric(grid),
        "Versions": _versions(grid),
        "Superseded": _superseded(grid),
    }
    return {name: value for name, value in found.items() if value}


def limits(grid: Grid) -> list[str]:
    """What the runs cannot tell, from what they were."""
    if grid.parts:
        return _limits_of_all(grid)
    items = [text for text in (left_out(grid.strangers), strays(grid)) if text]
    items += statements(_records(grid)).values()
    items += [
        f"Every run ended after {budget_of(grid)}. A run that stalls at the unigram entropy can "
        "leave it later, so “stalls” and Δ hold for this budget, not for training to the end.",
    ]
    rates = sorted({cell.lr for cell in grid.finished if cell.lr is not None})
    if len(rates) == 1:
        items.append(
            f"One learning rate, {rates[0]:g}. The rate at which warm-up begins to matter depends "
            "on the variant and on the data; another rate can change the order."
        )
    elif rates:
        items.append(
            f"Learning rates from {rates[0]:g} to {rates[-1]:g}; outside of them nothing is known."
        )
    items.append(
        f"What was trained on: {_corpus(grid)}; {_range(grid, 'parameters')} parameters. Intervals "
        "are over seeds only: they do not cover other corpora, languages, depths or widths."
    )
    seeds = len({cell.seed for cell in grid.finished})
    if seeds < 2:
        items.append(
            "One seed: differences between variants may be chance; there are no intervals over "
            "seeds."
        )
    else:
        few = " With so few, an interval is wide or lucky." if seeds < FEW_SEEDS else ""
        families = len({(cell.group, cell.lr) for cell in grid.cells})
        across = f", which does not reach across the {families} of them" if families > 1 else ""
        items.append(
            f"{seeds} seeds. Intervals are Student's t at {LEVEL:.0%}, not corrected for several "
            "comparisons; p values are, over the variants of one rate and one value of the other "
            f"axes (Holm){across}.{few}"
        )
        items.append(
            "What the intervals are worth, in simulated grids (benchmarks/coverage.py): those of "
            "Δ, relative Δ and the interaction hold the truth in 93 to 97 %, with skewed or "
            "heavy-tailed noise too; those of the mean loss of one arm in 92 to 93 % where noise "
            "is strongly skewed; those of stalls in 95 % on average over the true share, in 83 to "
            "100 % at a single one. Of variants that are the same, p values call any different in "
            "at most 5.2 % of tables; in up to 6 % where noise is skewed and unequal, or half of "
            "the runs stall."
        )
        items.append(
            "An interval is of seeds that end alike. Where some seeds of an arm stalled and others "
            "did not there is none (it would hold in 41 to 95 %), and from fewer than "
            f"{FEW_SEEDS} seeds no p value where arms differ in stalls: of 23 variants that all "
            "stall as often as not, 3 seeds would call one different in 22 % of grids."
        )
    items += [*_early(grid), *_damaged(grid), *_not_asked(grid)]
    kind, coupling = _coupling(grid)
    if kind == "inverse_sqrt" and coupling == "paper":
        items.append(
            "The schedule is coupled: no warm-up is also almost no learning rate after the first "
            "steps. In short runs this alone makes a variant look sensitive, Pre-LN most of all. "
            "Do not read Δ as the effect of warm-up; use coupling: decoupled for that."
        )
    elif kind == "inverse_sqrt":
        reference = grid.setting("model.schedule.reference_steps")
        items.append(
            "Warm-up and decay are decoupled: all arms share the decay of reference "
            f"{reference} steps, and warm-up 0 means the full rate at step 1. The numbers are not "
            "comparable with papers that couple the two (Xiong et al. 2020)."
        )
    pruned = sum(cell.state == "pruned" for cell in grid.cells)
    if grid.pruner is not None:
        items.append(
            f"Pruner: {grid.pruner}. {pruned} of {len(grid.cells)} cells were ended early because "
            "they did badly. They are left out, so means over the others flatter the variants that "
            "lost most; no sensitivity is reported."
        )
    apart = sum(cell.state == OTHER_DATA for cell in grid.cells)
    missing = len(grid.cells) - len(grid.finished) - pruned - apart
    if missing:
        items.append(
            f"{missing} of {len(grid.cells)} cells have no result. Seeds are compared in pairs, so "
            "a missing cell takes its partner out of the score as well."
        )
    return items


def _facts_of_each(grid: Grid) -> dict[str, str]:
    told = {part.name: facts(part) for part in grid.parts}
    found = {}
    for name in dict.fromkeys(name for each in told.values() for name in each):
        values = {each: known.get(name, DASH) for each, known in told.items()}
        alike = len(set(values.values())) == 1
        each = (f"{part}: {value}" for part, value in values.items())
        found[name] = next(iter(values.values())) if alike else " | ".join(each)
    return found


def _limits_of_all(grid: Grid) -> list[str]:
    """What holds between the grids, then what all say alike, then what one says."""
    differ = [
        f"{key} ({' / '.join(map(label, values))})" for key, values in differences(grid).items()
    ]
    found = [
        "Each grid is compared with its own baseline and its own reference warm-up; no test "
        "compares one grid with another. Where they read differently, it may be chance, or any of "
        f"the settings that differ: {'; '.join(differ) or 'none but what their axes say'}.",
    ]
    if common := shared(grid):
        found.append(
            f"{common} cells are in more than one grid: the same runs, shown in each, so that the "
            "grids agree there by construction."
        )
    told = {part.name: limits(part) for part in grid.parts}
    alike = [item for item in told[grid.parts[0].name] if all(item in t for t in told.values())]
    each = [
        f"{name}: {item}" for name, items in told.items() for item in items if item not in alike
    ]
    return [*found, *alike, *each]


def _not_asked(grid: Grid) -> list[str]:
    """What no score can say, for want of an arm."""
    reference = grid.reference_warmup
    baselines = {cell.baseline for cell in grid.cells}
    items = []
    if 0 not in grid.warmups:
        items.append("No arm without warm-up: who needs it cannot be said, and Δ is undefined.")
    elif not reference or reference not in grid.warmups:
        items.append("No arm with a reference warm-up to compare with: Δ is undefined.")
    if not baselines & set(grid.variants):
        items.append(
            "No arm of a baseline: no variant can be said to need warm-up more than another."
        )
    return items


def direction(mode: str) -> str:
    """What is better, in words."""
    return "lower is better" if mode == "min" else "higher is better"


def _metric(grid: Grid) -> str:
    return f"{grid.metric}, {direction(grid.mode)}; what the study of the queue optimises"


def _early(grid: Grid) -> list[str]:
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
    lacking = [cell for cell in grid.finished if cell.metrics.get(grid.metric) is None]
    if lacking and grid.metric != LOSS:
        items.append(
            f"{len(lacking)} of {len(grid.finished)} finished runs have no finite {grid.metric}, "
            "the metric of the grid; its means leave them out, which flatters their variants: "
            f"{_named(lacking)}."
        )
    return items


def _named(cells: Sequence[Cell]) -> str:
    """How many cells there are of each variant and warm-up."""
    found = Counter(f"{cell.variant} at warm-up {cell.warmup or 0:,}" for cell in cells)
    return ", ".join(f"{count} of {where}" for where, count in found.items())


def _damaged(grid: Grid) -> list[str]:
    lines = damaged_files(grid)
    if not lines:
        return []
    return [
        f"{len(lines)} files are damaged, and what they held is missing here: {'; '.join(lines)}. "
        "`ablate doctor` says what can be mended."
    ]


def _warmups(grid: Grid) -> str:
    listed = ", ".join(f"{warmup:,}" for warmup in grid.warmups) + " updates"
    if grid.reference_warmup is None:
        return f"{listed}; no reference named"
    return f"{listed}; reference {grid.reference_warmup:,}, fixed in the grid file"


def _other_axes(grid: Grid) -> str:
    groups = dict.fromkeys(cell.group for cell in grid.cells)
    return "" if list(groups) == ["all"] else "; ".join(groups)


def _budget(grid: Grid) -> str:
    steps, tokens = _range(grid, "steps"), _range(grid, "tokens")
    if not steps:
        planned = grid.setting("trainer.max_steps")
        return f"{planned:,} steps planned" if planned else DASH
    recorded = (cell.record.get("seconds") for cell in grid.finished)
    seconds = sorted(float(value) for value in recorded if value is not None)
    middle = f", {seconds[len(seconds) // 2]:,.1f} s of wall time (median)" if seconds else ""
    return f"{steps} optimizer steps, {tokens} tokens{middle}"


def _data(grid: Grid) -> str:
    found = {}
    for cell in grid.finished:
        data = cell.data
        sizes = data.get("sizes") or {}
        counts = ", ".join(f"{split} {count:,}" for split, count in sizes.items())
        vocabulary = data.get("vocab_size")
        text = f"{_corpus_name(grid, cell)}: {data.get('protocol') or UNKNOWN}; {counts or UNKNOWN}"
        found[f"{text}; vocabulary {vocabulary:,}" if vocabulary else text] = None
    entropies = sorted({round(cell.entropy, 3) for cell in grid.finished})
    unigram = " to ".join(f"{value:.3f}" for value in dict.fromkeys(entropies[:1] + entropies[-1:]))
    if not found:
        return str(grid.setting("data.name") or DASH)
    return f"{' | '.join(found)}; unigram entropy of the validation targets {unigram} nats"


def _task(grid: Grid) -> str:
    kind = task_facts(grid.setting("model.objective.kind") or DASH).title
    smoothing = grid.setting("model.objective.label_smoothing")
    trained = f", trained with label smoothing {smoothing:g}" if smoothing else ""
    return f"{kind}{trained}; val/nll is in unsmoothed nats per target token"


def _model(grid: Grid) -> str:
    def value(key: str) -> str:
        found = grid.setting(f"model.architecture.{key}")
        return "several" if found is None else label(found)

    kind = grid.setting("model.architecture.kind")
    if kind is None:
        return DASH
    depth = " + ".join(value(f"{name}_depth") for name in STACKS.get(kind, ("encoder",)))
    parts = [
        f"{kind.replace('_', '-')}, {depth} layers",
        f"width {value('model_dim')}, feed-forward {value('ff_dim')}, {value('num_heads')} heads",
        f"dropout {value('dropout')}",
    ]
    parameters = _range(grid, "parameters")
    return "; ".join([*parts, f"{parameters} parameters"] if parameters else parts)


def _optimizer(grid: Grid) -> str:
    given = grid.setting("model.optimizer") or {}
    shown = [f"{key} {label(v)}" for key, v in given.items() if key not in ("kind", "lr") and v]
    clip = grid.setting("trainer.gradient_clip_val")
    shown.append(f"gradients clipped at {clip:g}" if clip else "no gradient clipping")
    return "; ".join([str(given.get("kind", DASH)), *shown])


def _schedule(grid: Grid) -> str:
    kind, coupling = _coupling(grid)
    if not kind:
        return DASH
    text = str(kind).replace("_", " ")
    if kind == "inverse_sqrt" and coupling == "paper":
        return f"{text}, coupled as in Xiong et al. 2020: lr · min(t / T_w, √(T_w / t))"
    if kind == "inverse_sqrt":
        reference = grid.setting("model.schedule.reference_steps")
        return (
            f"{text}, decoupled: lr · min(1, t / T_w) · min(1, √(T_ref / t)), T_ref = {reference}"
        )
    return f"{text} after a linear warm-up"


def _coupling(grid: Grid) -> tuple[Any, Any]:
    return grid.setting("model.schedule.kind"), grid.setting("model.schedule.coupling")


def _records(grid: Grid) -> dict[str, Any]:
    return {cell.name: cell.record for cell in grid.finished}


def _code(grid: Grid) -> str:
    found = groups(_records(grid))["code"]
    return counted(found) if len(found) > 1 else next(iter(found), "")


def _superseded(grid: Grid) -> str:
    """How many runs have been done again since, and count nowhere."""
    folder = grid.folder / SUPERSEDED
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    return f"{count} earlier runs, kept in {SUPERSEDED}/; they count nowhere" if count else ""


def _versions(grid: Grid) -> str:
    found = {}
    for cell in grid.finished:
        versions = cell.record.get("versions") or {}
        shown = [f"{name} {versions[name]}" for name in ("torch", "lightning") if name in versions]
        found[", ".join(shown)] = None
    return " | ".join(text for text in found if text)


def budget_of(grid: Grid) -> str:
    return f"{_range(grid, 'steps')} steps"


def in_short(grid: Grid) -> str:
    """Data and budget, short, for a caption."""
    steps, tokens = _range(grid, "steps"), _range(grid, "tokens")
    return f"Data: {_corpus(grid)}. {steps} steps, {tokens} tokens a run."


def _corpus(grid: Grid) -> str:
    found = {}
    for cell in grid.finished:
        data = cell.data
        sizes = " / ".join(f"{count:,}" for count in (data.get("sizes") or {}).values())
        found[_corpus_name(grid, cell) + (f", {sizes} examples" if sizes else "")] = None
    return " and ".join(found) or str(grid.setting("data.name") or "not known")


def _corpus_name(grid: Grid, cell: Cell) -> str:
    return str(cell.data.get("name") or grid.setting("data.name") or UNKNOWN)


def _distinct(grid: Grid, key: str) -> list[str]:
    return list(dict.fromkeys(str(cell.record.get(key) or UNKNOWN) for cell in grid.finished))


def _range(grid: Grid, key: str) -> str:
    recorded = [cell.record.get(key) for cell in grid.finished]
    values = [int(value) for value in recorded if value is not None]
    if not values:
        return "an unknown number of" if recorded else ""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
