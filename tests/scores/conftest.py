"""The folder of real corpora, if there is one."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real corpora. Tests that need it fail, not skip, if a file of it is missing."""
    given = os.environ.get("LIGHTNING_APP_DATA")
    if not given:
        pytest.skip("LIGHTNING_APP_DATA is unset: no real corpus to read")
    return Path(given)
