"""What a run reports at its validations, for a pruner."""

import json
from pathlib import Path

import pytest

from lightning_app.runs.folder import RunFolder
from lightning_app.runs.run import ReportReader, last_report, read_reports


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.attempt(1).path.mkdir(parents=True)
    return folder


def test_reports_are_read_as_they_come_and_only_whole(folder: RunFolder) -> None:
    path, reader = folder.attempt(1).reports, ReportReader()
    assert list(reader.new(folder, 1)) == []
    path.write_text('{"step": 5, "value": 3.0}\n{"step": 10, "val')
    assert list(reader.new(folder, 1)) == [(5, 3.0)]
    assert list(reader.new(folder, 1)) == []
    with path.open("a") as file:
        file.write('ue": 2.5}\n{"step": 15, "value": null}\n')
    assert list(reader.new(folder, 1)) == [(10, 2.5)]


def test_a_report_that_was_not_dealt_with_comes_again(folder: RunFolder) -> None:
    path, reader = folder.attempt(1).reports, ReportReader()
    path.write_text('{"step": 5, "value": 3.0}\n{"step": 10, "value": 2.0}\n')
    for step, _ in reader.new(folder, 1):
        if step == 10:
            break
    assert list(reader.new(folder, 1)) == [(10, 2.0)]


def test_the_reports_of_all_attempts_are_one_curve(folder: RunFolder) -> None:
    first, second = folder.attempt(1).reports, folder.attempt(2).reports
    second.parent.mkdir()
    first.write_bytes(b'{"step": 5, "value": 3.0}\n{"step": 10, "value": 2.0}\n\0\0\0\n{"st')
    second.write_text('{"step": 10, "value": 2.0}\n{"step": 15, "value": 1.0}\n')
    assert read_reports(folder) == {5: 3.0, 10: 2.0, 15: 1.0}
    assert last_report(folder) == 1.0


def test_reports_of_another_metric_are_left_out(folder: RunFolder) -> None:
    """Grids that share a run may be judged by different metrics."""
    lines = [(5, "val/nll", 3.0), (5, "val/bleu", 20.0), (10, "val/bleu", 21.0)]
    reports = [dict(zip(("step", "metric", "value"), line, strict=True)) for line in lines]
    old = {"step": 15, "value": 2.0}  # earlier versions did not name it
    text = "".join(json.dumps(report) + "\n" for report in (*reports, old))
    folder.attempt(1).reports.write_text(text)
    assert read_reports(folder, "val/nll") == {5: 3.0, 15: 2.0}
    assert read_reports(folder, "val/bleu") == {5: 20.0, 10: 21.0, 15: 2.0}
    assert last_report(folder, "val/nll") == 2.0


def test_a_run_without_reports_has_no_last_one(folder: RunFolder) -> None:
    assert last_report(folder) is None
