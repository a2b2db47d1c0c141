"""Run calls of `ablate` in processes that have imported nothing of it, and measure each one.

`measured` starts one interpreter, which forks for each call: its start is paid once, and every call
pays for its own imports, as a user's does.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Answer:
    """What a call printed, its exit code, and what it imported."""

    code: int
    out: str
    err: str
    imported: frozenset[str]


def measured(
    calls: Sequence[tuple[Sequence[str], Path]], environment: Mapping[str, str]
) -> list[Answer]:
    """Return the answer to each call, which is the words after `ablate` and a working folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.attempt"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        input=json.dumps([(list(words), str(folder)) for words, folder in calls]),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    answers = (json.loads(line) for line in done.stdout.splitlines())
    return [Answer(**{**each, "imported": frozenset(each["imported"])}) for each in answers]


def attempt(words: list[str], folder: str) -> dict[str, object]:
    """Fork, run the call in the fork, and return the fields of its `Answer`."""
    files = [os.memfd_create(name) for name in ("out", "err", "said")]
    pid = os.fork()
    if pid == 0:
        run(words, folder, *files)
    os.waitpid(pid, 0)
    out, err, said = (os.pread(file, 1 << 20, 0).decode() for file in files)
    for file in files:
        os.close(file)
    return {**json.loads(said), "out": out, "err": err}


def run(words: list[str], folder: str, out: int, err: int, said: int) -> None:
    """Run the call and end the process."""
    os.chdir(folder)
    os.dup2(out, 1)
    os.dup2(err, 2)
    code = 70
    try:
        from lightning_app.cli import main

        code = main(words)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    heavy = ("torch", "lightning", "optuna", "matplotlib")
    imported = [name for name in heavy if name in sys.modules]
    os.write(said, json.dumps({"code": code, "imported": imported}).encode())
    os._exit(0)


if __name__ == "__main__":
    for words, folder in json.load(sys.stdin):
        print(json.dumps(attempt(words, folder)), flush=True)
