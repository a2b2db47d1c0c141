"""The display of a running grid: counts of cells, a live table or lines, or one JSON document."""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lightning_app.core.errors import printable
from lightning_app.runs.records import OUTCOMES
from lightning_app.runs.run import fraction


def by_status(words: Counter[str], states: Sequence[str]) -> dict[str, dict[str, int]]:
    """Counts for `--json`: of cells by `states`, and of finished cells by `outcomes`.

    `words` counts the values of `RunState.word`.
    """
    outcomes = {key: words[word] for key, word in OUTCOMES.items()}
    failed = outcomes["stalled"] + outcomes["non_finite"]
    known = {**words, "ok": sum(outcomes.values()) - failed, "diverged": failed}
    return {"states": {state: known.get(state, 0) for state in states}, "outcomes": outcomes}


def describe(states: Counter[str]) -> str:
    """Counts by state in one line, in a fixed order, without zeros."""
    order = (*OUTCOMES.values(), "pruned", "failed", "running", "waiting", "missing")
    return ", ".join(f"{states[state]} {state}" for state in order if states[state])


SCHEMA = 1  # increases when a key changes its meaning or is removed


@contextmanager
def document(command: str, as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a mapping for the caller to fill, and print it at the end if `as_json`.

    After a `UserError` no document is printed: its message goes to standard error, as without JSON.
    """
    tree: dict[str, Any] = {"schema": SCHEMA, "command": command}
    if not as_json:
        yield tree
        return
    with redirect_stdout(sys.stderr):
        yield tree
    print(json.dumps(_plain(tree), indent=1, allow_nan=False), flush=True)


def _plain(value: Any) -> Any:
    """The value in JSON: numbers that are not finite become null, paths become strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


_REFRESH = 1.0  # seconds
_LOOKS = {  # the character and the colour of each state of cells in a bar
    "ok": ("█", "green"),
    "not yet learned": ("░", "green"),
    "stalled": ("▓", "yellow"),
    "non-finite": ("▚", "yellow"),
    "pruned": ("▒", "blue"),
    "failed": ("×", "red"),
    "running": ("▸", "cyan"),
    "waiting": ("·", "dim"),
}


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class PlainConsole(Console):
    """A console that prints text literally: no markup, emoji or control characters."""

    def __init__(self, **options: Any) -> None:
        # Its own escape sequences, for colours, must bypass the filter of the stream.
        stream = getattr(sys.stdout, "stream", None)
        super().__init__(file=stream, highlight=False, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            own = segment.control is not None
            yield segment if own else segment._replace(text=printable(segment.text))


def plain_console() -> Console:
    """A console that does not cut lines if its output is piped."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=1000)


class Display:
    """Count the finished cells, out of `total`, and estimate the remaining time.

    The estimate assumes that the remaining cells take as long as the finished ones.
    """

    def __init__(self, name: str, total: int) -> None:
        self._console = plain_console()
        self._started = self._shown = time.monotonic()
        self._total = total
        self._over = 0
        bar = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*bar, TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
        self._task = self._progress.add_task(name, total=total, left="")
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        if self._console.is_terminal:
            self._live.start()

    def close(self) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def finished(self, name: str, status: str, detail: str, seconds: float) -> None:
        self._over += 1
        self._total = max(self._total, self._over)  # cells of lost supervisors are added later
        left = self._left(float(self._over))
        self._progress.update(self._task, completed=self._over, left=left)
        self.say(f"[{self._over}/{self._total}] {name}: {status} {detail} {seconds:.1f} s, {left}")

    def update(self, look: Callable[[], Sequence[tuple[str, Mapping[str, Any] | None]]]) -> None:
        """Redraw once a second with the result of `look`: (name, progress) of all running cells."""
        now = time.monotonic()
        if not self._console.is_terminal or now - self._shown < _REFRESH:
            return
        self._shown = now
        running = look()
        left = self._left(self._over + sum(fraction(progress) for _, progress in running))
        self._progress.update(self._task, left=left)
        self._live.update(Group(self._progress, running_table(running)), refresh=True)

    def _left(self, over: float) -> str:
        if over <= 0:
            return "time left unknown"
        elapsed = time.monotonic() - self._started
        return f"{clock(max(0.0, self._total - over) * elapsed / over)} left"


def running_table(running: Sequence[tuple[str, Mapping[str, Any] | None]]) -> Table:
    """One row per running cell: name, step, steps per second, loss."""
    table = Table("running", "step", "steps/s", "loss", box=None, pad_edge=False)
    for name, progress in running:
        if progress is None:
            table.add_row(name, "starts", "", "")
        else:
            rate, loss = progress.get("rate"), progress.get("loss")
            table.add_row(
                name,
                f"{progress['step']}/{progress['max_steps']}".removesuffix("/-1"),
                "" if rate is None else f"{rate:.1f}",
                "" if loss is None else f"{loss:.3f}",
            )
    return table


def bar(states: Mapping[str, int], width: int) -> Text:
    """Cells by state as a bar. Every state with cells has at least one character."""
    there = {state: count for state, count in states.items() if count}
    total, text = sum(there.values()), Text()
    room = max(0, width - len(there))
    seen = drawn = 0
    for state, count in there.items():
        seen += count
        until = room * seen // total
        character, style = _LOOKS[state]
        text.append(character * (1 + until - drawn), style)
        drawn = until
    return text


def counts_table(name: str, *columns: str) -> Table:
    """A table of numbers, with names in the first column."""
    table = Table(box=None, pad_edge=False)
    table.add_column(name, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def states_table(variants: Mapping[str, Mapping[str, int]], states: Mapping[str, int]) -> Table:
    """One row per variant: the number of its cells in each state."""
    there = [state for state, count in states.items() if count]
    table = counts_table("variant", *there)
    for name, counts in variants.items():
        table.add_row(Text(name), *(str(counts[state]) for state in there))
    return table
