"""Ranks of unequal software are refused before they compute."""

import pytest

from mpi_tp.errors import ConfigurationError
from mpi_tp.versions import check_same_versions, versions

HOSTS = ("node0", "node1", "node1")


def test_equal_versions_pass() -> None:
    check_same_versions(HOSTS, [versions()] * 3)


def test_the_rank_that_differs_is_named_with_both_versions() -> None:
    other = versions() | {"torch": "1.0"}
    said = rf"rank 2 on node1 has torch 1\.0, rank 0 on node0 has {versions()['torch']}: start all ranks from one"
    with pytest.raises(ConfigurationError, match=said.replace("+", r"\+")):
        check_same_versions(HOSTS, [versions(), versions(), other])
