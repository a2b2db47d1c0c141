"""Every command in the bash blocks of README and pages works as it is typed there.

The commands of a page run in their order, as a reader types them, in the checkout that
`small_checkout` writes. What has worked on an earlier page is not run again. RUN stands for the run
that a command before it on the page has printed.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests import small_checkout, warm
from tests.documented_commands import ELSEWHERE, NEEDED, SEEN, Seen
from tests.pages import PAGES, ROOT, bash_lines, typed
from tests.scores.corpora import folder_of_corpora

TIMEOUT = 300.0


class Reader:
    """Types the commands of pages in a small checkout."""

    def __init__(self, folder: Path, real: Path, cache: str) -> None:
        self.checkout, home, corpora = (folder / name for name in ("checkout", "home", "corpora"))
        home.mkdir()
        small_checkout.write_checkout(self.checkout)
        small_checkout.write_corpora(corpora, real)
        small_checkout.write_files_of_the_pages(self.checkout, corpora)
        small_checkout.write_programs(self.checkout)
        self.environment = {
            **{name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ},
            "PATH": f"{self.checkout / small_checkout.BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.checkout),
            "HOME": str(home),
            "LIGHTNING_APP_DATA": str(corpora),
            "LIGHTNING_APP_CACHE": cache,
            "OMP_NUM_THREADS": "1",
        }
        self.worked: set[str] = set()

    def read(self, page: str) -> None:
        """Type the commands of a page, after those that it takes for granted."""
        self.runs: dict[str, str] = {}  # the folder of a run by the command that made it
        for line in [*NEEDED.get(page, ()), *bash_lines(page)]:
            again = re.search(" (run|fit) ", line)
            if line not in ELSEWHERE and (again or line not in self.worked):
                self.type(line, SEEN[line])
                self.worked.add(line)

    def type(self, line: str, seen: Seen) -> None:
        """Run a command and compare what it does with what must be seen."""
        began = time.monotonic()
        if seen.fresh:
            shutil.rmtree(self.checkout / seen.fresh, ignore_errors=True)
        before = self.times(seen.writes)
        filled = self.fill(line, seen)
        serving = " --serve" in line or line.startswith("tensorboard ")
        print(f"$ {filled}")  # pytest shows it for a test that fails
        out = self.serve(filled, seen.prints) if serving else self.run(filled)
        assert re.search(seen.prints, out, re.M | re.S), (
            f"{line}\nprinted {out}\nand not {seen.prints}"
        )
        if seen.writes:
            after = self.times(seen.writes)
            assert after.items() - before.items(), f"{line}\ndid not write {seen.writes}"
        print(f"  {time.monotonic() - began:.1f} s")
        if made := re.search(r"^(experiments/fit/runs/[^/\s]+): ", out, re.M):
            self.runs.pop(line, None)
            self.runs[line] = made[1]

    def times(self, pattern: str) -> dict[Path, int]:
        found = self.checkout.glob(pattern) if pattern else ()
        return {path: path.stat().st_mtime_ns for path in found}

    def fill(self, line: str, seen: Seen) -> str:
        """Put the newest run that fits in the place of RUN, and the one before it for OTHER."""
        folders = [folder for made, folder in self.runs.items() if seen.of in made]
        folders = list(dict.fromkeys(reversed(folders)))
        for place, folder in zip(("RUN", "OTHER"), folders, strict=False):
            line = line.replace(f"experiments/fit/runs/{place}", folder)
            line = re.sub(rf"\bfit/{place}\b", f"fit/{Path(folder).name}", line)
            line = re.sub(rf" {place}\b", f" {folder}", line)
        assert not re.search(r"\b(RUN|OTHER)\b", line), line
        return f"{line} {seen.more}".strip()

    def run(self, line: str) -> str:
        """Run a command to its end; return what it prints, errors last."""
        if " | " in line or line.startswith("make "):
            done = subprocess.run(
                ["sh", "-c", line],
                cwd=self.checkout,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        else:
            place = {"folder": self.checkout, "root": self.checkout}
            done = warm.run(arguments(line), **place, environment=self.environment, timeout=TIMEOUT)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def serve(self, line: str, address: str) -> str:
        """Start a server, look whether it answers at the address, and press Ctrl-C."""
        process = warm.start(
            arguments(line), folder=self.checkout, root=self.checkout, environment=self.environment
        )
        ends = time.monotonic() + TIMEOUT
        while not (found := re.search(address, said(process), re.M | re.S)):
            assert process.poll() is None, said(process)
            assert time.monotonic() < ends, said(process)
            time.sleep(0.1)
        url = found[0].partition(" ")[2] if "serving" in found[0] else found[0].split()[-1]
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            assert b"<html" in answer.read()
        interrupt(process)
        return said(process)


def arguments(line: str) -> list[str]:
    """The arguments of Python for a command."""
    program, *words = shlex.split(line)
    modules = {"ablate": ["-m", "lightning_app"], "tensorboard": ["-m", "tensorboard.main"]}
    return [*modules.get(program, ()), *words]


def said(process: warm.Process) -> str:
    return process.printed() + process.printed(errors=True)


def interrupt(process: warm.Process) -> None:
    """Press Ctrl-C, after which a server ends well."""
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 0, said(process)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Reader:
    real = folder_of_corpora()
    return Reader(tmp_path_factory.mktemp("reader"), real, cache)


@pytest.mark.slow
@pytest.mark.xdist_group("documented commands")
@pytest.mark.parametrize("page", [page for page in PAGES if bash_lines(page)])
def test_the_commands_of_a_page_work(page: str, reader: Reader) -> None:
    reader.read(page)


def test_every_command_is_run_here_or_elsewhere() -> None:
    """A new command belongs into `documented_commands.py`, with what shows that it works."""
    lines = {line for page in PAGES for line in bash_lines(page)}
    assert {part for line in lines for part in line.split(" | ")} == set(typed())
    needed = {line for page in NEEDED for line in NEEDED[page]}
    assert lines | needed == SEEN.keys() | ELSEWHERE.keys()
    assert not SEEN.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_runs_a_command_elsewhere_is_there(command: str) -> None:
    file, text = ELSEWHERE[command]
    assert text in (ROOT / file).read_text(encoding="utf-8")
