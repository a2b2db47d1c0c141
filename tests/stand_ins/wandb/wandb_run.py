"""The run of the stand-in."""

from collections.abc import Callable
from typing import Any


class Config:
    def __init__(self, record: Callable[[str, Any], None]) -> None:
        self._record = record

    def update(self, given: dict[str, Any], allow_val_change: bool = False) -> None:
        self._record("config", given)


class Run:
    """What WandbLogger calls of a run."""

    def __init__(self, name: str, record: Callable[[str, Any], None]) -> None:
        self.name = self.id = name
        self.config = Config(record)
        self._record = record

    def log(self, metrics: dict[str, float]) -> None:
        self._record("log", metrics)

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def finish(self) -> None:
        self._record("finish", None)
