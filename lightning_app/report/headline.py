"""The headline of a report: what its scores say, in words.

Each variant has two readings. `own_reading` is only about the variant: does warm-up help it, cost
it something, or is neither shown, and do its runs stall? `relation` compares it with the baseline.
A label needs a p value under 5 % after Holm's correction over the whole grid.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_app.config.tree import WARMUP, label
from lightning_app.report.comparisons import (
    BETTER,
    EQUAL,
    SAME,
    UNLIKE,
    WORSE,
    MetricDifference,
    comparisons,
)
from lightning_app.report.facts import DASH, bounded, budget_of, interval, p_value, rate, say
from lightning_app.report.pairs import (
    ELSEWHERE,
    IS_BASELINE,
    NEVER,
    NOT_YET,
    Arm,
    Score,
    arms,
    stall_counts,
)
from lightning_app.report.results import GridResults, failures
from lightning_app.report.statistics import LEVEL, mean
from lightning_app.report.tasks import FailureTest, failure_tests
from lightning_app.scores.task_facts import glue_task_of

HELPS, COSTS, LOST, UNSHOWN = "helps", "costs", "costs only its lost steps", "not shown"
EDGE = "open, since a better rate may lie outside"
MORE, LESS = "more", "less"
CAPPED = "open, since no run of one trained without it"
BASELINE = "the baseline"
STALLS = "stalls w="
_NAMES = {
    "delta": "Δ",
    "bleu": "ΔBLEU",
    "steps_saved": "steps saved",
    "steps_at_best_rates": "steps saved at the best rates",
    "lost_steps": "lost steps",
    "stall_difference": "stalls",
    "rate_sensitivity": "rate sensitivity",
}
_VERBS = {
    "stalled": ("stalls", "stall"),
    "non-finite": ("becomes non-finite", "become non-finite"),
}
_OWN = {
    HELPS: "helps",
    COSTS: "costs",
    LOST: "costs_only_its_lost_steps",
    UNSHOWN: "not_shown",
    EDGE: "open_at_the_edge",
    NEVER: "never_learned",
    ELSEWHERE: "learned_elsewhere",
    NOT_YET: "not_yet_learned",
    DASH: "no_test",
}
_COMPARED = {BETTER: "better", WORSE: "worse", SAME: "same", UNLIKE: "unlike", EQUAL: "equal"}
_COMPARED |= {"": "no_test"}
_VERSUS = {
    MORE: "more",
    LESS: "less",
    SAME: "same",
    CAPPED: "capped",
}


def own_reading(own: Mapping[str, Score], name: str = "delta") -> str:
    """Classify `delta` or `need` of one variant by its sign; a dash if it is undefined.

    A cost is only that of the lost steps if the interval of `steps_saved` reaches no further down
    than the steps of rate that warm-up loses.
    """
    score = own[name]
    for word in (NEVER, ELSEWHERE, NOT_YET):
        if word in score.note and math.isnan(score.estimate):
            return word
    if math.isnan(score.p_holm):
        return DASH
    if score.p_holm >= 1 - LEVEL or not bounds_agree(score):
        return EDGE if name == "need" and score.bound else UNSHOWN
    if not shows_sign(score):
        return EDGE
    if score.estimate > 0:
        return HELPS
    saved, lost = own.get("steps_saved"), own.get("lost_steps")
    if name == "delta" and saved and lost and saved.low >= -lost.estimate:
        return LOST
    return COSTS


def relation(own: Mapping[str, Score]) -> str:
    """Compare Delta of one variant with the baseline's; a dash if it is undefined."""
    versus = own["interaction"]
    if versus.note == IS_BASELINE:
        return BASELINE if not math.isnan(own["delta"].estimate) else DASH
    if math.isnan(versus.p_holm):
        return DASH
    if versus.p_holm >= 1 - LEVEL:
        return SAME
    if not shows_sign(versus):
        return CAPPED
    return MORE if versus.estimate > 0 else LESS


def with_p(words: str, score: Score) -> str:
    """A label with the p value, corrected by Holm, that decides it: `helps (p 0.012)`."""
    return words if math.isnan(score.p_holm) else f"{words} (p {p_value(score.p_holm)})"


def with_numbers(score: Score) -> str:
    """A variant with the estimate, interval and p value of a score in nats, as far as it has them:
    `post_ln (0.908 nats [0.776, 1.039], p < 0.001)`."""
    parts = [] if math.isnan(score.estimate) else [f"{bounded(score)} nats"]
    if parts and not math.isnan(score.low):
        parts[0] += f" {interval(score.low, score.high)}"
    if not math.isnan(score.p_holm):
        parts.append(f"p {p_value(score.p_holm)}")
    return f"{score.variant} ({', '.join(parts)})" if parts else score.variant


def shows_sign(score: Score) -> bool:
    """Whether the value behind a censored estimate has its sign in any case."""
    return score.bound in ("", ">=" if score.estimate > 0 else "<=")


def bounds_agree(score: Score) -> bool:
    """Whether the bounds of a score, of which its p value is, have the sign of the estimate.

    They are by other means: of rates that are tied, the one chosen on other seeds may be worse.
    """
    lows, highs = [low for _, low, _ in score.ends], [high for *_, high in score.ends]
    return not score.ends or (mean(lows) > 0 if score.estimate > 0 else mean(highs) < 0)


def stall_words(own: Mapping[str, Score], reference: int | None, kinds: str = "stalled") -> str:
    """`stalls without it (3/3 against 0/3)` where the shares of failed runs differ; else empty.

    `kinds` says how they failed, as `failures` does.
    """
    bare, ref = own.get(f"{STALLS}0"), own.get(f"{STALLS}{reference}")
    if reference in (None, 0) or bare is None or ref is None or not (bare.cells and ref.cells):
        return ""
    if bare.estimate == ref.estimate:
        return ""
    first, second = (bare, ref) if bare.estimate > ref.estimate else (ref, bare)
    where = "without it" if first is bare else "with it"
    counts = f"{first.diverged}/{first.cells} against {second.diverged}/{second.cells}"
    ends = " or ".join(_VERBS[kind][0] for kind in kinds.split(" or "))
    return f"{ends} {where} ({counts})"


def findings(grid: GridResults, scores: Sequence[Score]) -> list[str]:
    """The headline in sentences, the strongest effect first; empty without a reference warm-up.

    First the variants whose runs stall, over all rates; then those that warm-up helps, by Delta at
    a single rate, by the need at the best rates where a grid has several. The first sentence of
    each group of the other axes names the budget. Of tasks with published scores: who fails more
    often, and whose scores change.
    """
    if not grid.asks_warmup:
        return _compared(grid)
    if grid.scored:
        return _by_score(grid)
    if not grid.reference_warmup:
        return []
    found: list[str] = []
    groups = dict.fromkeys(score.group for score in scores)
    for group in groups:
        own: dict[str, dict[str, Score]] = {}
        for score in scores:
            if score.group == group:
                own.setdefault(score.variant, {})[score.score] = score
        rates = {score.lr for score in scores if score.group == group and not math.isnan(score.lr)}
        tried = Counter(
            variant
            for variant, lr in {
                (score.variant, score.lr) for score in scores if score.group == group
            }
            if not math.isnan(lr)
        )
        several = any(count > 1 for count in tried.values())  # a rate may follow from the variant
        texts = [*_stalling(grid, group, own), *_helped(own, grid, several=several)]
        if texts:
            where = "" if group == "all" else f"{group}: "
            own_runs = tuple(cell for cell in grid.cells if cell.group == group)
            values = {
                "budget": budget_of(replace(grid, cells=own_runs)),
                "at": f" at learning rate {rate(rates.pop())}" if len(rates) == 1 else "",
                "where": "" if group == "all" else f", {group}",
            }
            found.append(say("findings.first", **values, text=texts[0]))
            for text in texts[1:]:
                shown = text if where else _capitalized(text, grid)
                found.append(say("findings.more", where=where, text=shown, of=text))
    return found


def _compared(grid: GridResults) -> list[str]:
    """What the comparisons of the grid's metric say, a sentence for each axis and slice.

    Beside a label is what else differs: the tokens read and the axes that follow.
    """
    read: dict[tuple[str, str, str, str], dict[str, list[MetricDifference]]] = {}
    for row in comparisons(grid):
        kinds = read.setdefault((row.axis, row.baseline, row.where, row.metric), {})
        kinds.setdefault(row.reading, []).append(row)
    found = []
    for (axis, baseline, where, metric), kinds in read.items():
        name, parts = axis.rsplit(".", 1)[-1], []
        for kind in (each for each in _COMPARED if each in kinds):
            values = _listed([row.value_with_p for row in kinds[kind]])
            said = [f"{row.value} {' and '.join(row.beside)}" for row in kinds[kind] if row.beside]
            beside = f" ({'; '.join(said)})" if said else ""
            why = "; ".join({row.why_unlike: 0 for row in kinds[kind]})
            words = {"name": name, "values": values, "baseline": baseline, "why": why}
            parts.append(say(f"findings.value.{_COMPARED[kind]}", **words, beside=beside))
        at = "" if where == "all" else f", {where}"
        words = {"budget": budget_of(grid), "metric": metric, "text": "; ".join(parts)}
        found.append(say("findings.compared", at=at, **words, of=parts))
    return found


def _by_score(grid: GridResults) -> list[str]:
    """Who needs warm-up by the scores of tasks: failed runs, then the scores themselves.

    Empty where no warm-up is compared with none. Only the last sentence mentions the loss: it
    is not what a reader of these tasks asks for.
    """
    tests = failure_tests(grid)
    found = [
        sentence
        for axis, value, baseline in dict.fromkeys((t.axis, t.value, t.baseline) for t in tests)
        for sentence in _failing(
            [t for t in tests if (t.axis, t.value, t.baseline) == (axis, value, baseline)]
        )
    ]
    found += _scores_moved(comparisons(grid))
    if found:
        tasks = _listed(_corpora(grid))
        found[0] = say("findings.on_tasks", budget=budget_of(grid), tasks=tasks, text=found[0])
        found.append(say("findings.not_the_score", loss=grid.monitored.loss))
    return [
        say("findings.more", where="", text=_capitalized(text, grid), of=text) for text in found
    ]


def _corpora(grid: GridResults) -> list[str]:
    names = dict.fromkeys(cell.corpus or "" for cell in grid.scored)
    return [glue_task_of(name) or name for name in names]


def _failing(tests: Sequence[FailureTest]) -> list[str]:
    """What one value of an axis does to the shares of failed runs, in sentences."""
    axis, value, baseline = tests[0].axis, tests[0].value, tests[0].baseline
    name = axis.rpartition(".")[2]
    first, second = f"with {name} {value}", f"with {name} {baseline}"
    if axis == WARMUP:
        first, second = f"with warm-up {value}", "without warm-up"
    shown: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda each: (math.isnan(each.p), each.p, each.variant)):
        own, other = (
            f"{test.failed} of {test.runs}",
            f"{test.baseline_failed} of {test.baseline_runs}",
        )
        if not test.failed + test.baseline_failed:
            kind, words = "none", test.variant
        elif not test.p_holm < 1 - LEVEL:
            kind, words = "open", f"{test.variant} ({other}, {own})"
        elif test.difference < 0:
            kind, words = "base", f"{test.variant} ({other} runs, {own} {first})"
        else:
            kind, words = "own", f"{test.variant} ({own} runs, {other} {second})"
        shown.setdefault(kind, []).append(words)
    most = {
        kind: p_value(
            max(t.p_holm for t in tests if t.p_holm < 1 - LEVEL and (t.difference < 0) == less)
        )
        for kind, less in (("base", True), ("own", False))
        if kind in shown
    }
    found: list[str] = []
    for kind, where in (("base", second), ("own", first)):
        if kind in shown:
            several = len(shown[kind]) > 1
            words = {"where": where, "names": _listed(shown[kind])}
            words |= {"fail": "fail" if several else "fails"}
            p = f"{most[kind]}{' or less' * several}"
            found.append(say("findings.failing", **words, p=p))
    sides = {"first": first, "second": second}
    if "open" in shown:
        found.append(say("findings.failing_open", **sides, names=_listed(shown["open"])))
    if "none" in shown and axis == WARMUP:
        found.append(say("findings.failing_none", **sides, names=_listed(shown["none"])))
    return found


def _scores_moved(compared: Sequence[MetricDifference]) -> list[str]:
    """What warm-up does to the own score of each task, in a sentence."""
    rows = [row for row in compared if row.axis == WARMUP]
    if not rows:
        return []
    read: dict[str, list[str]] = {}
    for row in rows:
        read.setdefault(row.reading, []).append(f"with {row.value} updates: {row.where}")
    parts = [
        f"{word} in {len(read[kind])} of {len(rows)} comparisons"
        + (f" ({'; '.join(read[kind])})" if kind in (BETTER, WORSE) and len(read[kind]) < 4 else "")
        for kind, word in _MOVED.items()
        if kind in read
    ]
    name = "scores_moved" if parts else "scores_untested"
    parts += [f"{len(read[kind])} {words}" for kind, words in _UNTESTED.items() if kind in read]
    return [say(f"findings.{name}", text=", ".join(parts))]


_MOVED = {BETTER: "better", WORSE: "worse", SAME: "not shown to differ", EQUAL: "equal"}
_UNTESTED = {
    UNLIKE: "are of scores that cannot be compared",
    "": "allow no test",
}


def _stalling(grid: GridResults, group: str, own: Mapping[str, Mapping[str, Score]]) -> list[str]:
    """The variants whose runs stall more often without warm-up, or with it, in sentences.

    Differences that chance does not explain come first, the strongest evidence on top.
    """
    found: dict[tuple[int, bool, tuple[str, str]], list[tuple[Score, str]]] = {}
    for arm in arms(grid):
        score = own.get(arm.variant, {}).get("stall_difference")
        if arm.group != group or score is None or math.isnan(score.estimate) or not score.estimate:
            continue
        bare, ref = stall_counts([arm], grid.reference_warmup)
        kind, with_it = int(score.p_holm >= 1 - LEVEL), score.estimate < 0
        if math.isnan(score.p_holm):
            kind = 2
        counts = f"{bare} runs without warm-up, {ref} with it"
        if with_it:
            counts = f"{ref} runs with warm-up, {bare} without it"
        key = kind, with_it, _ends(arm, grid.reference_warmup)
        found.setdefault(key, []).append((score, f"{arm.variant} ({counts})"))
    sentences = []
    for (kind, with_it, ends), rows in sorted(found.items(), key=lambda item: item[0]):
        rows.sort(key=lambda row: (0.0 if kind == 2 else row[0].p, -abs(row[0].estimate)))
        several = len(rows) > 1
        p = (min if kind else max)(score.p_holm for score, _ in rows)
        words = {
            "names": _listed([words for _, words in rows]),
            "ends": ends[several],
            "where": "with warm-up" if with_it else "without warm-up",
            "p": p_value(p) + (" or more" if kind else " or less") * several,
        }
        name = ("stalling", "stalling_by_chance", "stalling_untested")[kind]
        sentences.append(say(f"findings.{name}", **words))
    return sentences


def _ends(arm: Arm, reference: int | None) -> tuple[str, str]:
    """How runs of a variant fail, as a verb in the singular and in the plural."""
    kinds = failures(cell for key, cell in arm.cells.items() if key[0] in (0, reference))
    found = [_VERBS[kind] for kind in kinds.split(" or ")]
    one, several = (" or ".join(form) for form in zip(*found, strict=True))
    return one, several


def _helped(
    own: Mapping[str, Mapping[str, Score]], grid: GridResults, *, several: bool
) -> list[str]:
    """What warm-up does to each variant, and how that compares with the baseline."""
    name = "need" if several else "delta"
    read: dict[str, list[str]] = {}
    for variant, of in own.items():
        reading = own_reading(of, name) if name in of else DASH
        if reading != DASH or (name in of and not math.isnan(of[name].estimate)):
            read.setdefault(reading, []).append(with_numbers(of[name]) if name in of else variant)
    at = "at the best rates of each, " if several else ""
    known = [of[name] for of in own.values() if name in of and not math.isnan(of[name].estimate)]
    if known and all(score.seeds == 1 for score in known):
        each = _listed([f"{bounded(score)} for {score.variant}" for score in known])
        return [say("findings.one_seed", each=each)]
    parts = _said("own", _OWN, read)
    sentences = []
    sentences += [say("findings.own_only", at=at, text=part, of=part) for part in parts]
    versus: dict[str, dict[str, list[str]]] = {}
    if grid.baseline is not None and not several:
        baselines = {(cell.group, cell.variant): cell.baseline for cell in grid.cells}
        for of in own.values():
            if "interaction" in of:
                score = of["interaction"]
                base = baselines[score.group, score.variant] or grid.baseline
                versus.setdefault(base, {}).setdefault(relation(of), []).append(with_numbers(score))
    for baseline, kinds in versus.items():
        for part in _said("versus_baseline", _VERSUS, kinds):
            sentences.append(say("findings.against", baseline=baseline, text=part, of=part))
    return sentences


def _said(part: str, kinds: Mapping[str, str], read: Mapping[str, Sequence[str]]) -> list[str]:
    """A clause for each reading that some variants have, in the order of `kinds`."""
    return [
        say(f"findings.{part}.{name}", names=_listed(read[kind]))
        for kind, name in kinds.items()
        if kind in read
    ]


def _capitalized(text: str, grid: GridResults) -> str:
    """The text with a capital, unless it begins with a variant, whose name has none."""
    starts = tuple(f"{variant}{end}" for variant in grid.variants for end in (" ", ","))
    return text if text.startswith(starts) else f"{text[0].upper()}{text[1:]}"


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def by_slice(scores: Sequence[Score]) -> dict[str, dict[str, dict[str, Score]]]:
    """Scores by slice of the grid (rate and group, in words), variant and name."""
    several = len({(score.group, score.lr) for score in scores if not math.isnan(score.lr)}) > 1
    slices: dict[str, dict[str, dict[str, Score]]] = {}
    for score in scores:
        rate = "" if math.isnan(score.lr) or not several else f"learning rate {label(score.lr)}"
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
