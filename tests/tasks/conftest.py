"""The tests of tasks use the corpora of the tests of data."""

from tests.data.conftest import _no_environment, shared_data, text_config, write_pairs

__all__ = ["_no_environment", "shared_data", "text_config", "write_pairs"]
