"""Fixtures and options of the suite: a seeded covering sample by default, `--full` for the whole product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run every combination, not a covering sample"
    )


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers shared by all tests."""
    pool = Pool()
    yield pool
    pool.stop()
