"""The folder of real corpora, if there is one."""

from pathlib import Path

import pytest

from tests.scores.corpora import folder_of_corpora


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real corpora. Tests that need it fail, not skip, if a file of it is missing."""
    return folder_of_corpora()
