"""The processor seconds of each test, with those of the processes that it starts and waits for.

Wall time depends on what else runs. Processes that `tests.warm` forks say theirs when they end;
those that are killed with their parents are missing.
"""

import resource
import time
from collections.abc import Generator

import pytest

from tests import warm

LIMIT = 8.0  # processor seconds of a test that is neither slow nor dear
LOOP = 0.15  # processor seconds of the loop of `slowness`


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the user choose how many of the dearest tests are printed."""
    parser.addoption("--dearest", type=int, default=10, help="how many dear tests to print")


def spent() -> float:
    """The processor seconds so far."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts) + warm.ended_seconds()


def slowness() -> float:
    """The time of a loop here and now over that on a Xeon at rest; at least 1."""
    before = time.process_time()
    sum(number * number for number in range(2_000_000))
    return max(1.0, (time.process_time() - before) / LOOP)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Note what the test itself spends, and fail it above LIMIT; its fixtures may serve others."""
    before = spent()
    try:
        result = yield
    finally:
        seconds = spent() - before
        item.user_properties.append(("processor seconds", seconds))
    marks = {mark.name for mark in item.iter_markers()}
    if seconds > LIMIT and not marks & {"slow", "dear"} and seconds > LIMIT * slowness():
        pytest.fail(
            f"{seconds:.1f} processor seconds; make it cheaper, slow, or dear with a reason"
        )
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the processor seconds of all processes that have ended, and the dearest tests."""
    found = {
        report.nodeid: float(str(value))
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, value in report.user_properties
        if name == "processor seconds"
    }
    # With pytest-xdist the workers and their processes are children of this one.
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(part.ru_utime + part.ru_stime for part in parts)
    terminalreporter.write_line(f"processor seconds: {total:.0f}; the dearest tests:")
    most = terminalreporter.config.getoption("--dearest")
    for name, value in sorted(found.items(), key=lambda each: -each[1])[:most]:
        terminalreporter.write_line(f"{value:7.1f}  {name}")
