"""The table of an attempt: as Lightning writes it, but no kill empties it."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_app.training.callbacks.loggers import Curves

ROWS = (
    (1, {"train/loss": 5.0, "epoch": 0.0}),
    (2, {"train/loss": 4.0, "epoch": 0.0}),
    (2, {"val/nll": 4.5, "epoch": 0.0}),  # a column before the others
    (3, {"train/loss": 3.0, "epoch": 1.0}),
    (3, {"test/nll": 3.5, "a": 1.0}),
)


def logged(logger: CSVLogger, rows: tuple[tuple[int, dict[str, float]], ...]) -> bytes:
    for step, metrics in rows:
        logger.log_metrics({**metrics}, step)
        logger.save()
    return Path(logger.log_dir, "metrics.csv").read_bytes()


def test_it_is_the_table_of_lightning(tmp_path: Path) -> None:
    ours, theirs = (kind(tmp_path / kind.__name__, "", "") for kind in (Curves, CSVLogger))
    assert logged(ours, ROWS) == logged(theirs, ROWS)


@pytest.mark.parametrize("method", ["writeheader", "writerows"])
def test_a_kill_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    logger = Curves(tmp_path, "", "")
    before = logged(logger, ROWS[:4])

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, method, kill)
    with pytest.raises(KeyboardInterrupt):
        logged(logger, ROWS[4:])
    assert (tmp_path / "metrics.csv").read_bytes() == before
