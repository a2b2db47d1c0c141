"""The cost of no warm-up in BLEU: over seeds, and over test sentences.

One interval cannot answer both questions. Over seeds: Student's t interval of the differences, seed
by seed. Over sentences, for each seed: sacreBLEU's paired approximate randomisation of the two
stored translations of the test set.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_app.report.pairs import Score
from lightning_app.report.results import CellResult, GridResults
from lightning_app.report.statistics import (
    FEW_SEEDS,
    bleu_difference,
    ended_alike,
    mean,
    seeds_interval,
)

BLEU = "test/bleu"
TRIALS = 1_000  # of one test: the smallest p value is 1 / 1,001
MOST_TESTS = 24  # of one report: each reads two test sets and takes a second or two


def bleu_scores(grid: GridResults) -> list[Score]:
    """`bleu`: `mean_s [BLEU(ref, s) - BLEU(0, s)]`, the gain of warm-up, on the 0-100 scale.

    A row for each group, rate and variant with seeds that have a test BLEU at both warm-ups. The
    t interval is over seeds; it is undefined for one seed, or if only some of the seeds failed. The
    note has the p values over sentences, for the first `MOST_TESTS` pairs of the grid whose
    translations are stored.
    """
    if grid.parts:
        return [score for part in grid.parts for score in bleu_scores(part)]
    reference = grid.reference_warmup
    if not reference or grid.pruner is not None:
        return []
    arms: dict[tuple[str, float, str], dict[tuple[int, int], CellResult]] = {}
    for cell in grid.finished:
        if cell.metrics.get(BLEU) is not None:
            arm = arms.setdefault((cell.group, cell.lr or 0.0, cell.variant), {})
            arm[cell.warmup or 0, cell.seed or 0] = cell
    left, found = MOST_TESTS, []
    for (group, lr, variant), arm in arms.items():
        seeds = [seed for warmup, seed in arm if warmup == 0 and (reference, seed) in arm]
        pairs = [(arm[reference, seed], arm[0, seed]) for seed in sorted(seeds)]
        if pairs:
            tested = [_over_sentences(*pair) for pair in pairs[:left]]
            left -= len([p for p in tested if p is not None])
            where = {"group": group, "lr": lr, "variant": variant}
            found.append(Score(score="bleu", **where, **_over_seeds(pairs, tested)))
    return found


def _over_seeds(
    pairs: Sequence[tuple[CellResult, CellResult]], tested: Sequence[float | None]
) -> dict[str, Any]:
    changes = [_bleu(with_it) - _bleu(without) for with_it, without in pairs]
    failed = [[cell.failed for cell in arm] for arm in zip(*pairs, strict=True)]
    mixed = not all(ended_alike(arm) for arm in failed)
    low, high, p = seeds_interval(changes, *failed)
    notes = ["stalls are mixed, so no interval over seeds"] if mixed else []
    shown = [
        f"{cells[0].seed}: {value:.3f}"
        for cells, value in zip(pairs, tested, strict=False)
        if value is not None
    ]
    if shown:
        notes.append(f"p over sentences, by seed {', '.join(shown)}")
    seeds = [cells[0].seed or 0 for cells in pairs]
    few = len(pairs) < FEW_SEEDS or mixed
    return {
        "estimate": mean(changes),
        "low": low,
        "high": high,
        "p": p,
        "seeds": len(pairs),
        "cells": 2 * len(pairs),
        "diverged": sum(map(sum, failed)),
        "note": "; ".join(notes),
        "each": tuple(zip(seeds, changes, strict=True)) if few else (),
    }


def _bleu(cell: CellResult) -> float:
    value = cell.metrics[BLEU]
    assert value is not None
    return value


def _over_sentences(first: CellResult, second: CellResult) -> float | None:
    """The p value of the paired test, None if the files that it needs are missing."""
    signatures = [_signature(cell) for cell in (first, second)]
    if signatures[0] != signatures[1] or "tok" not in signatures[0]:
        return None
    lines = [
        [_lines(cell.run.sound(f"{name}.txt")) for name in ("hypotheses", "references")]
        for cell in (first, second)
    ]
    (ours, references), (theirs, others) = lines
    if not references or references != others or not len(ours) == len(theirs) == len(references):
        return None
    how = {"tokenize": signatures[0]["tok"], "lowercase": signatures[0].get("case") == "lc"}
    return bleu_difference(ours, theirs, references, trials=TRIALS, **how).p


def _signature(cell: CellResult) -> dict[str, str]:
    """`nrefs:1|case:lc|tok:none` as a mapping."""
    parts = str(cell.record.get("bleu_signature") or "").split("|")
    return dict(part.split(":", 1) for part in parts if ":" in part)


def _lines(path: Path | None) -> list[str]:
    return [] if path is None else path.read_text(encoding="utf-8").split("\n")[:-1]
