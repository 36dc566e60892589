"""Tests that only make sense over NCCL: they need a GPU, and `--nccl`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def over_nccl(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--nccl"):
        pytest.skip("needs a GPU and --nccl")
