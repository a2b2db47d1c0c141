"""Many cases in one test: pytest takes longer to hand out thousands of them than to run them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def noted(*case: object) -> Iterator[None]:
    """Run a case as a test of its own would: with the same seed, and named where it fails."""
    torch.manual_seed(1)
    try:
        yield
    except BaseException as error:
        error.add_note("case: " + ", ".join(map(str, case)))
        raise
