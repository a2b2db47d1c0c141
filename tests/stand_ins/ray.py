"""A stand-in for Ray, of which only `docs/recipes/ray_job.py` is to be tested.

Each task is a forked process. `cancel` raises KeyboardInterrupt in it; `get` returns what the tasks
have returned, also those that were cancelled and have caught the interrupt, as Ray 2.60 does.
"""

import json
import os
import signal
from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    pid: int
    answer: int


class _Remote:
    def __init__(self, function: Callable[[], int]) -> None:
        self._function = function

    def remote(self) -> Task:
        answer, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(ours, json.dumps(self._function()).encode())
            os._exit(0)
        os.close(ours)
        return Task(pid, answer)


def init() -> None:
    """Connect to the cluster of which this is a part."""


def remote(**options: object) -> Callable[[Callable[[], int]], _Remote]:
    print(json.dumps(options), flush=True)
    return _Remote


def cancel(task: Task) -> None:
    os.kill(task.pid, signal.SIGINT)


def get(tasks: list[Task]) -> list[int]:
    return [json.loads(os.read(task.answer, 100)) for task in tasks]
