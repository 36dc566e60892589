"""Measures how long the planner searches, and the start-up time of the command.

    python benchmarks/search.py

Prints layouts, seconds and layouts per second with one and two
processes for a few jobs, and the seconds of `ranvier plan` from the shell in addition to its
search: for a built-in size, which needs no torch (the minimum of TIMES calls), and for the first
call with another model, which is built once. Limits: 10,000 layouts in 10 s on two cores; start-up
in 0.5 s and 4 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from script_parser import ScriptParser

from ranvier.planner import cluster, model_spec, search
from ranvier.planner.predict import Workload
from ranvier.planner.search import SearchRequest

JOBS = (
    ("llama3-8b", "perlmutter", 32, 512),
    ("llama3-70b", "dgx-h100", 64, 1024),
    ("llama3-70b", "dgx-h100", 45, 1440),
    ("llama3-405b", "dgx-h100", 512, 2048),
)
OTHER_LAYERS = 30
"""A number of layers that no built-in size has."""
TIMES = 10


def main() -> None:
    """Prints the table."""
    parser = ScriptParser(__doc__, smoke="--jobs 1 --nodes 1 --size tiny --times 1")
    parser.add_argument(
        "--jobs", type=int, default=len(JOBS), help="number of jobs, the first ones"
    )
    parser.add_argument("--nodes", type=int, help="nodes of every job (default: its own)")
    parser.add_argument("--size", default="llama3-8b", help="built-in size of the start-up")
    parser.add_argument("--times", type=int, default=TIMES, help="calls of a built-in size")
    asked = parser.parse_args()
    print(f"{'job':32} {'grids':>6} {'layouts':>8} {'1 process':>10} {'2':>8} {'per second':>10}")
    for size, machine, nodes, batch in JOBS[: asked.jobs]:
        wish = SearchRequest(
            Workload(model_spec.load_shipped_spec(size), 4096, batch),
            cluster.load_cluster(machine).with_size(nodes=asked.nodes or nodes),
        )
        spent = []
        for workers in (2, 1):  # in this order: what is cached here is forked
            began = time.perf_counter()
            result = search.search_layouts(wish, workers=workers)
            spent.append(time.perf_counter() - began)
        name = f"{size} on {asked.nodes or nodes} x {machine}"
        print(
            f"{name:32} {result.num_grids:6} {result.num_candidates:8,} {spent[1]:8.2f} s "
            f"{spent[0]:6.2f} s {result.num_candidates / spent[0]:10,.0f}"
        )
    built_in = ["plan", "--model.size", asked.size, "--cluster", "dgx-h100", "--nodes", "1"]
    other = [*built_in, "--model.layers", str(OTHER_LAYERS)]
    for name, words, times in (("built-in size", built_in, asked.times), ("other model", other, 1)):
        spent_all = [started(words) for _ in range(times)]
        print(f"start-up, {name}: {min(spent_all):.2f} s (ranvier {' '.join(words)})")


def started(words: Sequence[str]) -> float:
    """Returns the seconds of a command from the shell without its search, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        out = subprocess.run(
            [sys.executable, "-m", "ranvier", *words, "--json", "-"],
            capture_output=True,
            check=True,
            env={**os.environ, "RANVIER_CACHE": cache},
        ).stdout
        return time.perf_counter() - began - float(json.loads(out)["seconds"])


if __name__ == "__main__":
    main()
