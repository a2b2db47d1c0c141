"""The lines of each folder and the words of each text beside what `benchmarks/budget.toml` allows.

python -m benchmarks.budget    # exit code 1 if a budget is exceeded
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = Path(__file__).with_name("budget.toml")


def files_of(place: str, suffix: str) -> list[Path]:
    """Return the tracked files of one or several places, joined by " + "."""
    command = ["git", "ls-files", "-z", *place.split(" + ")]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in out.split("\0") if name.endswith(suffix)]


def measured(kind: str, place: str) -> int:
    """Return the lines of Python, or the words of Markdown, in the files of a place."""
    texts = [
        path.read_text("utf-8") for path in files_of(place, ".py" if kind == "lines" else ".md")
    ]
    return sum(len(text.splitlines() if kind == "lines" else text.split()) for text in texts)


def rows() -> list[tuple[str, str, int, int]]:
    """Return the kind, the place, what is there and what is allowed, of each budget."""
    budget = tomllib.loads(BUDGET.read_text("utf-8"))
    return [
        (kind, place, measured(kind, place), most)
        for kind, places in budget.items()
        for place, most in places.items()
    ]


def main() -> int:
    over = 0
    for kind, place, found, most in rows():
        over += found > most
        mark = f"  {found - most:,} over" if found > most else ""
        print(f"{place:45} {found:7,} of {most:7,} {kind}{mark}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
