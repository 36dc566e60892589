"""benchmarks/parscale.py judges its claim."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def test_a_difference_counts_above_its_standard_error() -> None:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "parscale.py"
    spec = importlib.util.spec_from_file_location("benchmark_parscale", path)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    assert bench.mean_and_error([1.0, 2.0, 3.0]) == (2.0, 1.0 / 3.0**0.5)
    # The error of the difference is 0.05.
    assert bench.is_below((1.94, 0.03), (2.0, 0.04))
    assert not bench.is_below((1.96, 0.03), (2.0, 0.04))
    run = bench.make_run(4, 7, bench.STEPS, bench.HeldOut(0.02, 4))
    assert (run.model.size, run.model.streams, run.train.seed) == ("tiny", 4, 7)
    assert bench.make_run(1, 7, bench.STEPS, bench.HeldOut(0.02, 4)).model.streams == 1
