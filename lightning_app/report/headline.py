"""The answer of a report: one sentence of at most 30 words, from its verdicts."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lightning_app.config.tree import PRESET, WARMUP, label
from lightning_app.report.comparisons import (
    BETTER,
    EQUAL,
    SAME,
    UNDECIDED,
    UNLIKE,
    WORSE,
    comparisons,
)
from lightning_app.report.pairs import IS_BASELINE, NEVER, Score
from lightning_app.report.results import GridResults, grouped
from lightning_app.report.tasks import failure_tests
from lightning_app.report.verdicts import (
    GAINS,
    LOSES,
    MIXED,
    NEEDS,
    NO_NEED,
    SLIGHTLY,
    Verdict,
    verdicts,
    why_none,
)

STALLS = "stalls w="
WORDS = 30  # of the answer, at most
NAMED = 4  # variants of one word from which on all of them are "all variants"
_NAMES = {
    "delta": "Δ",
    "bleu": "ΔBLEU",
    "steps_saved": "steps saved",
    "tuned_steps_saved": "steps saved at the best rates",
    "lost_steps": "lost steps",
    "stall_difference": "stalls",
    "tuned": "T",
    "tuned_interaction": "interaction",
    "mean_over_rates": "M",
    "rate_shift": "shift of the best rate",
}
_OF_ARMS = {  # in the singular and in the plural
    NEEDS: ("needs warm-up", "need warm-up"),
    "fails": ("fails more often without warm-up", "fail more often without warm-up"),
    GAINS: ("gains from warm-up", "gain from warm-up"),
    SLIGHTLY: ("slightly gains from warm-up", "slightly gain from warm-up"),
    MIXED: ("gives mixed results", "give mixed results"),
    LOSES: ("loses by warm-up", "lose by warm-up"),
    NO_NEED: ("needs no warm-up", "need no warm-up"),
    UNDECIDED: ("is undecided", "are undecided"),
    NEVER: ("has not learned", "have not learned"),
}
_ON_AVERAGE = {
    GAINS: "warm-up helps on average",
    SLIGHTLY: "warm-up slightly helps on average",
    LOSES: "warm-up hurts on average",
    NO_NEED: "warm-up makes no difference that matters on average",
}
_COMPARED = {
    BETTER: ("is better than {0}", "are better than {0}"),
    WORSE: ("is worse than {0}", "are worse than {0}"),
    SAME: ("differs too little from {0} to matter", "differ too little from {0} to matter"),
    EQUAL: ("changes nothing", "change nothing"),
    UNDECIDED: _OF_ARMS[UNDECIDED],
    UNLIKE: ("cannot be compared with {0}", "cannot be compared with {0}"),
    "": ("has too few seeds for a test", "have too few seeds for a test"),
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

Named = Sequence[tuple[str, str]]  # a name and its word, one for each setting of the other axes


def answer(grid: GridResults, scores: Sequence[Score]) -> str:
    """What a grid says in one sentence; empty where it says nothing."""
    if not grid.finished:
        return ""
    if grid.scored and grid.asks_warmup:
        return _of_tasks(grid)
    found = verdicts(grid, scores)
    if not found:
        return "" if why_none(grid) and grid.asks_warmup else _of_metric(grid)
    # No saving is shown where the interval contains zero.
    arms = [
        (each.variant, "fails" if each.word == NEEDS and each.low <= 0 else each.word)
        for each in found
        if each.kind == "arm"
    ]
    over = [verdict for verdict in found if verdict.kind in ("pooled", "family")]
    average = _average([verdict.word for verdict in over if verdict.kind == "pooled"])
    families = [
        f"{name} {_said(words, _OF_ARMS)[0]}"
        for name, words in _settled([(v.variant, v.word) for v in over if v.kind == "family"])
    ]
    single, others = _clauses(arms, _OF_ARMS), _clauses(arms, _OF_ARMS, brief=True)
    open_ = sum(word == UNDECIDED for _, word in arms)
    drafts = [single, [*average, *others], others]
    if families or 2 * open_ > len(arms) or len({verdict.group for verdict in found}) > 1:
        drafts = [[*average, *families, *of] for of in (others, [])]
    where = f"Tuned with {_number(grid.trials)} trials, " if grid.trials else _where(found)
    checks = {c.variant for c in grid.cells if grid.control and c.axes.get(PRESET) == grid.control}
    said = {word for name, word in arms if name in checks} & {NO_NEED, UNDECIDED, LOSES}
    blind = f"{grid.control}, the control, shows no gain, so this setting cannot tell"
    tail = [blind] * bool(said and NO_NEED in dict(arms).values())
    drafts += [average or families, _roughly(arms, _OF_ARMS)]
    return _shortest(where, [[*clauses, *tail] for clauses in drafts if clauses])


def _average(words: Sequence[str]) -> list[str]:
    """What holds on average over the arms, if it holds in every setting of the other axes."""
    every = " in every setting" * (len(words) > 1)
    if words and {*words} == {GAINS, SLIGHTLY}:
        return [_ON_AVERAGE[GAINS] + every]
    if len({*words}) != 1 or words[0] not in _ON_AVERAGE:
        return []
    return [_ON_AVERAGE[words[0]] + every]


def _where(found: Sequence[Verdict]) -> str:
    """The rates, in words."""
    arms = [verdict for verdict in found if verdict.kind == "arm"]
    tuned = [verdict for verdict in arms if verdict.score.score == "tuned"]
    if tuned:
        counts = {verdict.score.tried for verdict in tuned if any(verdict.score.tried)}
        if len(counts) == 1 and len({*next(iter(counts))}) == 1:
            (number, _) = next(iter(counts))
            return f"At the best of {_number(number)} rates, "
        return "At the best rates tried, "
    rates = {verdict.lr for verdict in arms}
    return f"At rate {label(rates.pop())}, " if len(rates) == 1 else "At the rate of each, "


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def _of_metric(grid: GridResults) -> str:
    """What the comparisons of the first axis say."""
    rows = comparisons(grid)
    rows = [row for row in rows if row.axis == rows[0].axis]
    if not any(row.seeds for row in rows):
        return ""
    words = {
        word: (a.format(rows[0].baseline), b.format(rows[0].baseline))
        for word, (a, b) in _COMPARED.items()
    }
    named = [(row.value, row.reading) for row in rows]
    metrics = " and ".join({row.metric: 0 for row in rows})
    drafts = [_clauses(named, words), _clauses(named, words, brief=True), _roughly(named, words)]
    return _shortest(f"By {metrics}, ", drafts)


def _of_tasks(grid: GridResults) -> str:
    """Whose runs fail more often without warm-up, and whether scores change."""
    tests = [test for test in failure_tests(grid) if test.axis == WARMUP]
    moved = [row for row in comparisons(grid) if row.axis == WARMUP]
    if not tests and not moved:
        return _of_metric(grid)
    less = ("fails less often with warm-up", "fail less often with warm-up")
    more = ("fails more often with warm-up", "fail more often with warm-up")
    same = ("shows no difference in failures", "show no difference in failures")
    words = {"less": less, "more": more, "same": same}
    named = []
    for test in tests:
        word = "less" if test.difference < 0 else "more"
        named.append((test.variant, word if test.p_holm < 0.05 else "same"))
    clauses = _clauses(named, words, brief=True)
    for word, text in ((BETTER, "scores rise"), (WORSE, "scores fall")):
        if where := [row.where for row in moved if row.reading == word]:
            clauses.append(f"{text} on {_listed(where)}" if len(where) < 3 else f"some {text}")
    if moved and not any(row.reading in (BETTER, WORSE) for row in moved):
        clauses.append("no score is shown to change")
    return _shortest("Over all tasks, ", [clauses, clauses[: len(clauses) - 1]])


def _settled(named: Named) -> list[tuple[str, tuple[str, ...]]]:
    by_name = grouped(named, lambda pair: pair[0])
    return [(name, tuple(sorted({word for _, word in of}))) for name, of in by_name.items()]


def _said(words: tuple[str, ...], verbs: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """What holds of a variant with these words: in some settings, where they differ."""
    if len(words) == 1:
        return verbs[words[0]]
    decided = [word for word in words if word != UNDECIDED]
    if len(decided) > 1:
        return "differs between settings", "differ between settings"
    one, several = verbs[decided[0]]
    return f"{one} in some settings", f"{several} in some settings"


def _clauses(
    named: Named, verbs: Mapping[str, tuple[str, str]], *, brief: bool = False
) -> list[str]:
    """A clause for each word, in the order of `verbs`; `brief`: without names in the longest."""
    found: dict[tuple[str, str], list[str]] = {}
    order = [*verbs]
    for name, words in sorted(_settled(named), key=lambda of: (len(of[1]), order.index(of[1][0]))):
        found.setdefault(_said(words, verbs), []).append(name)
    longest = max(found, key=lambda said: len(found[said]), default=("", ""))
    clauses = []
    for said in sorted(found, key=lambda each: brief and each == longest):
        names = found[said]
        shown = _listed(names)
        if len(found) == 1 and len(names) >= NAMED:
            shown = "all variants"
        elif brief and said == longest and len(names) > 1:
            shown = "the others" if len(found) > 1 else "all variants"
        clauses.append(f"{shown} {said[len(names) > 1]}")
    return clauses


def _roughly(named: Named, verbs: Mapping[str, tuple[str, str]]) -> list[str]:
    """What holds of most variants, without names."""
    counts = Counter(_said(words, verbs)[1] for _, words in _settled(named))
    if not counts:
        return []
    ((said, count),) = counts.most_common(1)
    whose = "most variants" if 2 * count > counts.total() else "many variants"
    return [f"{whose} {said}", "the others differ"]


def _shortest(where: str, drafts: Iterable[Sequence[str]]) -> str:
    """The first draft of at most `WORDS` words, or the last one."""
    sentence = ""
    for clauses in filter(None, drafts):
        sentence = f"{where}{'; '.join(clauses)}."
        if len(sentence.split()) <= WORDS:
            break
    return sentence


def _listed(names: Sequence[str]) -> str:
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
