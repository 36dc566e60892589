"""How long the planner searches, and how soon the command answers.

Usage: python benchmarks/search.py
Prints, for a few jobs, layouts, seconds and layouts a second with one and two processes, and the
seconds of `ranvier plan` from the shell where torch is not needed. Limits: 10,000 layouts in 10 s
on two cores, half a second from the shell besides the search.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from ranvier.planner import cluster, leaves, search
from ranvier.planner.predict import Job
from ranvier.planner.search import Wish

JOBS = (
    ("llama3-8b", "perlmutter", 32, 512),
    ("llama3-70b", "dgx-h100", 64, 1024),
    ("llama3-70b", "dgx-h100", 45, 1440),
    ("llama3-405b", "dgx-h100", 512, 2048),
)


def main() -> None:
    """Print the table."""
    print(f"{'job':32} {'grids':>6} {'layouts':>8} {'1 process':>10} {'2':>8} {'a second':>9}")
    for size, machine, nodes, batch in JOBS:
        wish = Wish(
            Job(leaves.of_size(size), 4096, batch), cluster.cluster(machine).of(nodes=nodes)
        )
        spent = []
        for workers in (2, 1):  # in this order: what is cached here is forked
            began = time.perf_counter()
            result = search.search(wish, workers=workers)
            spent.append(time.perf_counter() - began)
        name = f"{size} on {nodes} x {machine}"
        print(
            f"{name:32} {result.grids:6} {result.count:8,} {spent[1]:8.2f} s {spent[0]:6.2f} s "
            f"{result.count / spent[0]:9,.0f}"
        )
    words = ["plan", "--model.size", "llama3-70b", "--cluster", "dgx-h100", "--nodes", "64"]
    began = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-m", "ranvier", *words, "--json", "-"], capture_output=True, check=True
    ).stdout
    spent_all = time.perf_counter() - began
    inside = json.loads(out)["seconds"]
    print(f"ranvier {' '.join(words)}: {spent_all:.2f} s, of it search {inside:.2f} s")


if __name__ == "__main__":
    main()
