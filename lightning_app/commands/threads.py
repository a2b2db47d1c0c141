"""``--threads``: the number of threads of each process. Fast to import."""

import os
import sys

from lightning_app.errors import UserError

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Read by torch when it is imported, and by the processes that train the cells of a grid."""


def use_threads(count: int | None) -> None:
    """Let this process and its children use `count` threads; None leaves the environment alone.

    Raises:
        UserError: for a number below 1.
    """
    if count is None:
        return
    if count < 1:
        raise UserError(f"--threads {count}: expected at least 1")
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
