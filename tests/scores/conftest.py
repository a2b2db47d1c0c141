"""The folder of real corpora, if there is one."""

from tests.data.conftest import shared_data

__all__ = ["shared_data"]
