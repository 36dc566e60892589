"""Collectives between CPU ranks of one host: `ranvier.comm` against torch's Gloo.

    python benchmarks/shared_memory.py --ranks 2
    python benchmarks/shared_memory.py --ranks 8 --bytes 4096 65536 1048576

Both run in the same processes, in turns. Medians of the calls of rank 0 are printed for parts of
each size, with the ratio to Gloo and to the time of the fewest copies: what a rank has to copy or
add through shared memory, at the rate at which all ranks copy at once.

    all_gather       p + 1 parts copied: into the segment, and all parts out
    reduce_scatter   p - 1 parts in, p - 1 parts added (1.5 copies each: two are read)
    all_reduce       of one part: as a reduce-scatter of parts of n/p, then an all-gather of them
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from script_parser import ScriptParser
from torch import distributed

from pool import PRELOAD_GRID, Pool
from ranvier.comm import collectives
from ranvier.comm.transports.executor import gather_into, scatter_into
from ranvier.grid import Grid

ADD_COPIES = 1.5
"""Copies that take as long as adding two tensors of the same size."""
SMALL_REDUCE_BYTES = 4096
REPEATED_CALLS = 300


def copies(op: str, ranks: int) -> float:
    """The fewest copies of a part of a rank."""
    scatter = (ranks - 1) * (1.0 + ADD_COPIES)
    if op == "all_gather":
        return ranks + 1.0
    if op == "reduce_scatter":
        return scatter
    return (scatter + ranks + 1.0) / ranks


def measure(grid: Grid, sizes: list[int], calls: int) -> dict[str, dict[str, float]]:
    """Median seconds of each call, by size and name."""
    torch.set_num_threads(1)
    axis = grid.axis("row")
    found = {}
    for size in sizes:
        count = max(size // 4, 1)
        part, whole = torch.rand(count), torch.rand(count * axis.size)
        out, piece = torch.empty_like(whole), torch.empty_like(part)
        work: dict[str, Callable[[], object]] = {
            "copy": lambda part=part, piece=piece: piece.copy_(part),
            "all_gather gloo": lambda part=part, out=out: gather_into(out, part, group=axis.group),
            "all_gather": lambda part=part: collectives.all_gather(part, axis).wait(),
            "reduce_scatter gloo": lambda whole=whole, piece=piece: scatter_into(
                piece, whole, group=axis.group
            ),
            "reduce_scatter": lambda whole=whole: collectives.reduce_scatter(whole, axis).wait(),
            "all_reduce gloo": lambda part=part: distributed.all_reduce(part, group=axis.group),
            "all_reduce": lambda part=part: collectives.all_reduce(part, axis).wait(),
        }
        times: dict[str, list[float]] = {name: [] for name in work}
        # The first three calls provide memory.
        for number in range(calls + 3):
            for name, call in work.items():
                began = time.perf_counter()
                call()
                if number >= 3:
                    times[name].append(time.perf_counter() - began)
            # Sums of sums would overflow.
            part.fill_(1.0)
        found[str(size)] = {name: median(several) for name, several in times.items()}
    found["in a row"] = {"all_reduce": repeat_small_reduce(grid)}
    return found


def repeat_small_reduce(grid: Grid) -> float:
    """Median seconds of small all-reduces, one after the other."""
    axis = grid.axis("row")
    x = torch.ones(SMALL_REDUCE_BYTES // 4)
    times = []
    for _ in range(REPEATED_CALLS):
        began = time.perf_counter()
        collectives.all_reduce(x, axis).wait()
        times.append(time.perf_counter() - began)
    return median(times)


def print_table(rows: dict[str, dict[str, float]], ranks: int) -> None:
    """One line for each size and collective."""
    names = f"{'bytes of a part':>16}  {'collective':<16}{'Gloo':>12}{'ranvier':>12}"
    print(f"{names}{'x Gloo':>8}  x copies")
    for size, times in rows.items():
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            if f"{op} gloo" not in times:
                continue
            gloo, own = times[f"{op} gloo"], times[op]
            fewest = copies(op, ranks) * times["copy"]
            print(
                f"{int(size):>16,}  {op:<16}{gloo * 1e6:>9.0f} µs{own * 1e6:>9.0f} µs"
                f"{gloo / own:>8.1f}  {own / fewest:.2f}"
            )
    small = rows["in a row"]["all_reduce"]
    print(f"all_reduce of {SMALL_REDUCE_BYTES} bytes, one after the other: {small * 1e6:.0f} µs")


def main() -> None:
    parser = ScriptParser(
        __doc__, smoke="--ranks 2 --bytes 4096 --calls 1 --json {folder}/rows.json"
    )
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks (default 2)")
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[4096, 2**16, 2**20, 2**26], help="of each part"
    )
    parser.add_argument("--calls", type=int, default=21, help="timed calls (default 21)")
    parser.add_argument("--json", type=Path, help="file for all medians")
    options = parser.parse_args()
    pool = Pool(options.ranks, preload=PRELOAD_GRID)
    try:
        rows = pool.on_grid({"row": options.ranks}, measure, options.bytes, options.calls)[0]
    finally:
        pool.stop()
    print_table(rows, options.ranks)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
