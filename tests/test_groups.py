"""Tests of one `xdist_group` run in one process, since they share a server or a trained model."""

import os

import pytest


@pytest.mark.xdist_group("marked")
def test_the_process_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    """pytest-xdist writes the group into the test's id; where pytest does not take it, no group
    stays together, and what its tests share is made once a process."""
    distributed = "PYTEST_XDIST_WORKER" in os.environ
    assert request.node.nodeid.endswith("@marked") == distributed
