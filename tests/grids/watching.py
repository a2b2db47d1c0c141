"""A supervisor of cells of two ranks that run `watched`.

`watching.py GRID FOLDER [hang_limit=N] [storage=URL]`
"""

import sys
from pathlib import Path

from lightning_app.config.grid import read_spec
from lightning_app.grids.slots import Options
from lightning_app.grids.supervisor import run_grid
from lightning_app.runs.folder import GridFolder


def main() -> int:
    grid, folder, *rest = sys.argv[1:]
    words = dict(word.split("=", 1) for word in rest)
    options = Options(
        workers=1,
        devices_per_cell=2,
        storage=words.get("storage"),
        hang_limit=float(words.get("hang_limit", 1800)),
    )
    ending = run_grid(read_spec(grid), GridFolder(Path(folder)), options, program="watched")
    return 130 if ending.cut else 0


if __name__ == "__main__":
    sys.exit(main())
