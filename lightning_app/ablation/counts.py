"""Counts of cells by state, for people and for `--json`."""

from collections import Counter
from collections.abc import Sequence

from lightning_app.records import OUTCOMES


def by_status(words: Counter[str], states: Sequence[str]) -> dict[str, dict[str, int]]:
    """Counts for `--json`: of cells by `states`, and of finished cells by `outcomes`.

    `words` counts the values of `RunState.word`.
    """
    outcomes = {key: words[word] for key, word in OUTCOMES.items()}
    failed = outcomes["stalled"] + outcomes["non_finite"]
    known = {**words, "ok": sum(outcomes.values()) - failed, "diverged": failed}
    return {"states": {state: known.get(state, 0) for state in states}, "outcomes": outcomes}


def describe(states: Counter[str]) -> str:
    """Counts by state in one line, in a fixed order, without zeros."""
    order = (*OUTCOMES.values(), "pruned", "failed", "running", "waiting", "missing")
    return ", ".join(f"{states[state]} {state}" for state in order if states[state])
