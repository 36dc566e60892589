"""benchmarks/goldfish.py judges its claims."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "goldfish.py"
    spec = importlib.util.spec_from_file_location("benchmark_goldfish", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_claims_are_judged_by_means_and_errors(bench: ModuleType) -> None:
    matches = {"standard": (0.95, 0.01), "random k=4": (0.85, 0.05)}
    matches |= {f"goldfish k={k}": (0.0, 0.0) for k in (2, 3, 4)}
    matches |= {"goldfish k=8": (0.3, 0.1), "goldfish k=32": (0.2, 0.1)}
    losses = {"standard": 3.0, "goldfish k=4": 3.05}
    # A fall of 0.1 is within the error of the difference, 0.14.
    assert bench.check_claims(matches, losses) == []
    wrong = matches | {"goldfish k=4": (0.06, 0.01), "goldfish k=32": (0.1, 0.1)}
    failed = bench.check_claims(wrong | {"standard": (0.8, 0.0)}, {**losses, "standard": 2.9})
    assert [line.split(":")[0] for line in failed] == [
        "standard",
        "goldfish k=4",
        "exact match falls from k=8 to k=32",
        "held-out loss of goldfish k=4 differs by +5.17%",
    ]


def test_documents_come_from_one_chain(bench: ModuleType) -> None:
    one, other = (bench.draw_documents(50, np.random.default_rng(seed)) for seed in (0, 1))
    assert one.shape == (50, bench.SEQ_LEN) and (one[:, -1] == bench.STATES).all()
    assert one[:, :-1].max() < bench.STATES and not np.array_equal(one, other)
    again = bench.draw_documents(50, np.random.default_rng(0))
    assert np.array_equal(one, again)
