"""The corpora of the tests of data serve those of tasks too."""

from tests.data.conftest import _no_environment, text_config, write_pairs

__all__ = ["_no_environment", "text_config", "write_pairs"]
