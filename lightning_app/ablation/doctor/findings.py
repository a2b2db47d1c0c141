"""What `ablate doctor` finds in a grid's folder, and how files are put aside without loss."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_app.files import free_name, writing_in

RUNS_AGAIN = "so that the cell runs again"
ASIDE = "aside"  # folder of the grid that takes what --fix moves out of runs/


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in a grid's folder that is not as it should be.

    `path` is a file or, as it is shown, a database. `remedy` says what `--fix` does or, where there
    is no `fix`, what the user can do. `fix` mends it and returns what was done. A `note` does no
    harm and is no reason to act.
    """

    path: Path | str
    what: str
    remedy: str = ""
    fix: Callable[[], str] | None = None
    note: bool = False

    def line(self, done: str | None = None) -> str:
        """The finding in one line, with what was `done` about it instead of the remedy."""
        if done is not None:
            text = f"{self.path}: {self.what}; fixed: {done}"
        elif self.remedy:
            text = f"{self.path}: {self.what}; {'--fix would ' if self.fix else ''}{self.remedy}"
        else:
            text = f"{self.path}: {self.what}"
        return " ".join(f"{'note: ' if self.note else ''}{text}".split())


def put_aside(path: Path) -> str:
    """Rename a file or folder to `<name>.damaged`, over nothing, and say so."""
    target = free_name(path.with_name(f"{path.name}.damaged"))
    with writing_in(path.parent):
        path.rename(target)
    return f"moved to {target.name}"


def move_aside(path: Path, directory: Path) -> str:
    """Move a run's folder out of `runs/` into `aside/` of the grid's folder, and say so."""
    target = free_name(directory / ASIDE / path.name)
    with writing_in(directory):
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return f"moved to {ASIDE}/{target.name}"


def damaged(path: Path, what: str, then: str = "") -> Finding:
    """A finding whose fix puts the file aside; `then` says what that leads to."""
    consequence = f", {then}" if then else ""
    return Finding(
        path=path,
        what=what,
        remedy=f"move it to {path.name}.damaged{consequence}",
        fix=lambda: f"{put_aside(path)}{consequence}",
    )
