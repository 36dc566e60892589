"""Compares pipelines with randomly delayed messages with one process, for many seeds.

Cases are drawn from the full product of `tests/pipeline/test_stages.py` (grids, models, policies,
chunks), each with its own seed of delays that no test uses. Losses, gradients, weights after a step
and the optimizer state are compared as in the tests. Case n is the same in every run.

    python benchmarks/pipeline_delays.py --count 200
    python benchmarks/pipeline_delays.py --first 137 --count 1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "pipeline")]

from script_parser import ScriptParser  # noqa: E402

if TYPE_CHECKING:
    from equivalence import Case
    from pool import Pool

FIRST_SEED = 1_000_000
"""First seed: tests use the numbers of their cases, which are smaller."""


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(__doc__, smoke="--first 31 --count 1")
    parser.add_argument("--count", type=int, default=200, help="cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    return parser.parse_args()


def draw_case(number: int) -> tuple[dict[str, int], Case]:
    """Returns the case of a number."""
    # Tests import transformers, which `--help` need not wait for.
    from test_stages import whole_product

    grid, case = random.Random(number).choice(whole_product())
    return grid, replace(case, delay=FIRST_SEED + number)


def differences(pool: Pool, grid: dict[str, int], case: Case) -> list[str]:
    """Returns the differences to one process."""
    from test_stages import CLIP, LR, serial

    from equivalence import compare, run_case
    from pool import RankError

    whole = serial(case.model, case.packed, case.steps)
    try:
        return compare(whole, pool.on_grid(grid, run_case, case, whole.batch, LR, CLIP))
    except RankError as error:
        return str(error).splitlines()


def main() -> int:
    """Tries all cases."""
    options, num_different, start_time = settings(), 0, time.perf_counter()
    from grids import label
    from pool import Pool

    numbers = range(options.first, options.first + options.count)
    pool = Pool()
    # Workers and tests import the same packages, for seconds: at the same time.
    with ThreadPoolExecutor(1) as thread:
        start = thread.submit(pool.start)
        cases = [draw_case(number) for number in numbers]
        start.result()
    for number, (grid, case) in zip(numbers, cases, strict=True):
        lines = differences(pool, grid, case)
        num_different += bool(lines)
        if lines:
            name = f"{label(grid)}-{case.policy}-{case.chunks}-{case.label}{'-keep' * case.keep}"
            print(f"case {number}: {name}, delays {case.delay}")
            print("\n".join(f"    {line}" for line in lines), flush=True)
    pool.stop()
    seconds = time.perf_counter() - start_time
    print(f"{options.count} cases with random delays, {num_different} differ, {seconds:.0f} s")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
