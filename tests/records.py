"""The smallest valid records that a run writes at its end."""

import json
from pathlib import Path
from typing import Any

from lightning_app.records import SEAL, sealed

TIMES = {"started": "2026-01-01T10:00:00+00:00", "finished": "2026-01-01T10:00:05+00:00"}


def result(identity: str, status: str = "ok", nll: float | None = 2.0, **changes: Any) -> dict:
    """A `result.json`, without the fields whose value is "gone"."""
    failed = {"step": 4, "rule": "stall", "last_finite_loss": None}
    tree = {
        "schema": 2,
        "id": identity,
        "name": f"cell-{identity}",
        "status": status,
        "outcome": "trained" if status != "diverged" else "stalled" if nll else "non_finite",
        "diverged": failed if status == "diverged" else None,
        "metrics": {"val/nll": nll},
        "unigram_entropy": 6.0,
        "steps": 4,
        "seconds": 1.0,
        "attempt": 1,
        **TIMES,
        **changes,
    }
    return {key: value for key, value in tree.items() if value != "gone"}


def pruned(identity: str, **changes: Any) -> dict:
    """A `pruned.json`."""
    tree = {"schema": 2, "id": identity, "name": f"cell-{identity}", "status": "pruned", "step": 4}
    return {**tree, "value": 3.0, "seconds": 1.0, "attempt": 1, **TIMES, **changes}


def unseal(path: Path, **changes: Any) -> None:
    """Make a result, with other values of some fields, one of an earlier version, without seal."""
    tree = {**json.loads(path.read_text()), **changes, "schema": 2}
    tree.pop(SEAL, None)
    tree.get("provenance", {}).pop("arithmetic", None)
    path.write_text(json.dumps(tree))


def reseal(path: Path, **changes: Any) -> None:
    """Write a result as if a run had ended with other values of some fields."""
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **changes}, path.parent)))
