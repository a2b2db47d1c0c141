"""Grids of fine-tuning runs written by hand, with the scores that a test chooses."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.report.conftest import BASE, PRESET, SEED, WARMUP, FakeGrid, change

CORRECTED = "model.optimizer.bias_correction"
CORPUS = "data.name"
MAJORITY = {"rte": 146 / 277, "mrpc": 279 / 408, "cola": 721 / 1043, "sst2": 444 / 872}
ENTROPY = 0.69
FLOOR = 0.685  # a loss that counts as stalled
AXES = {SEED: [1, 2, 3, 4, 5], CORPUS: ["cola", "rte"], PRESET: ["post_ln"], WARMUP: [0, 60]}

GLUE_BASE: dict[str, Any] = json.loads(json.dumps(BASE))
GLUE_BASE["model"]["objective"] = {"kind": "glue", "evaluate_test": False, "label_smoothing": None}
GLUE_BASE["model"]["architecture"] |= {"kind": "encoder", "encoder_depth": 4}
del GLUE_BASE["model"]["architecture"]["decoder_depth"]
GLUE_BASE["model"]["optimizer"] |= {"bias_correction": True}
GLUE_BASE["data"] = {"name": "rte", "tokens_per_batch": 1024}

Scores = Mapping[str, float | None]


def constant(corpus: str, loss: float = FLOOR) -> dict[str, float | None]:
    """What a run that answers the most frequent class reports."""
    majority = MAJORITY[corpus]
    found = {"val/nll": loss, "val/accuracy": majority, "val/majority_accuracy": majority}
    if corpus == "cola":
        found["val/matthews"] = 0.0
    if corpus == "mrpc":
        found["val/f1"] = 2 * majority / (1 + majority)
    return dict(found)


def learned(corpus: str, score: float, loss: float = 0.5) -> dict[str, float | None]:
    """What a run with this own score reports; of CoLA the Matthews correlation, of MRPC F1."""
    found = {"val/nll": loss, "val/majority_accuracy": MAJORITY[corpus]}
    if corpus == "cola":
        return {**found, "val/accuracy": 0.72, "val/matthews": score}
    if corpus == "mrpc":
        return {**found, "val/accuracy": score - 0.08, "val/f1": score}
    return {**found, "val/accuracy": score}


def glue_grid(
    folder: Path,
    scores: Callable[[Mapping[str, Any]], Scores],
    axes: Mapping[str, Any] = AXES,
    **file: Any,
) -> Path:
    """A grid whose runs report these scores; None as `val/nll` is a non-finite run.

    `file` has more keys of the grid file.
    """
    asks = {"reference_warmup": 60, "baseline": "post_ln"}
    fake = FakeGrid(folder, lambda _: 0.5, axes, base=GLUE_BASE, sensitivity=asks, curves=False)

    def reports(at: Mapping[str, Any], record: dict[str, Any]) -> None:
        found = dict(scores(at))
        loss = found["val/nll"]
        bad = loss is None or loss >= ENTROPY - 0.05
        record |= {"metrics": found, "unigram_entropy": ENTROPY}
        record |= {"status": "diverged" if bad else "ok", "diverged": None}
        record["outcome"] = "trained"
        if bad:
            record["outcome"] = "non_finite" if loss is None else "stalled"
            rule = "val/nll is not finite" if loss is None else "val/nll >= floor - 0.05"
            record["diverged"] = {"step": 200, "rule": rule, "last_finite_loss": loss}
        corpus = at.get(CORPUS, "rte")
        record["data"] = record["data"] | {"name": corpus, "protocol": f"GLUE {corpus}"}

    fake.rewrite(reports)
    change(fake, **file)
    return folder
