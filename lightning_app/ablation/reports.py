"""The reports of running cells for a pruner: `reports.jsonl` of each attempt."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_app.run_folder import RunFolder


@dataclass
class ReportReader:
    """Read the reports of one run; keeps the steps yielded and the bytes read of each file."""

    steps: set[int] = field(default_factory=set)
    read: dict[Path, int] = field(default_factory=dict)

    def new(self, folder: RunFolder, attempt: int) -> Iterator[tuple[int, float]]:
        """Yield (step, value) of an attempt's new complete lines with a finite value.

        A line counts as yielded once the caller asks for the next one; otherwise it is repeated.
        """
        path = folder.attempt(attempt).reports
        start = self.read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            try:
                report = json.loads(line)
            except ValueError:
                continue  # a power loss can leave zeros; one report is lost
            if report["value"] is not None and report["step"] not in self.steps:
                yield report["step"], report["value"]
                self.steps.add(report["step"])
        self.read[path] = start + whole


def read_reports(folder: RunFolder) -> dict[int, float]:
    """Every step and value that a run has reported, in all its attempts."""
    reader, attempts = ReportReader(), range(1, folder.last_attempt() + 1)
    return {step: value for attempt in attempts for step, value in reader.new(folder, attempt)}


def last_report(folder: RunFolder) -> float | None:
    """The value of the last step that a run has reported, None before the first report."""
    reports = read_reports(folder)
    return reports[max(reports)] if reports else None
