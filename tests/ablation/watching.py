"""A supervisor of cells of two ranks that run `watched`.

`watching.py GRID FOLDER [hang_limit=N] [storage=URL]`
"""

import sys
from pathlib import Path

from lightning_app.ablation.grid_spec import read_spec
from lightning_app.ablation.supervision.locks import Interrupted
from lightning_app.ablation.supervision.options import Options
from lightning_app.ablation.supervision.runner import run_grid


def main() -> int:
    grid, folder, *rest = sys.argv[1:]
    words = dict(word.split("=", 1) for word in rest)
    options = Options(
        workers=1,
        devices_per_cell=2,
        storage=words.get("storage"),
        hang_limit=float(words.get("hang_limit", 1800)),
        lost_after=60.0,
    )
    try:
        run_grid(read_spec(grid), Path(folder), options, program="watched")
    except Interrupted:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
