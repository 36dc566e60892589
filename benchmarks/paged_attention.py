"""Bandwidth of the decode attention kernel for shapes drawn from a seed.

    python benchmarks/paged_attention.py --cells 120 --seed 0 --csv cells.csv
    python benchmarks/paged_attention.py --old ../old/src/ranvier/infer/paged_kernels.py

A cell has a batch of 1 to 256, 1 to 16 kv heads, groups of 1, 4 or 8 heads, a head dim of 64 to 256
and lengths of 128 to 65,536, equal or mixed, as far as they fit into --gib. The kernel, which also
writes the new keys and values, is captured as a CUDA graph as in the engine: some layers, one after
another, with caches of their own. The lengths change between replays, and the cache of the device
is overwritten in between. Before a cell is timed, the outputs for its first lengths are compared
with plain attention in fp32.

Printed are the time of a layer and its share of the bandwidth of a copy. With --old, the kernel of
another tree runs in the smaller cells with each number of splits it may have, and the ratio to its
best one is printed.
"""

from __future__ import annotations

import atexit
import csv
import functools
import importlib.util
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from script_parser import ScriptParser
from torch import Tensor

from ranvier.launch import has_triton
from ranvier.models.paged_attention import KVCache, num_split_counters

BLOCK_SIZE = 64
ITEMSIZE = 2
MIN_BYTES = 128e6
"""Smaller cells cannot reach the bandwidth of a copy, and are compared with the old kernel."""
OLD_SPLITS = (1, 2, 4, 8, 16, 32)
GRAPH_BYTES = 1e9
"""Keys and values that the layers of a graph read, so that the next replay finds none in a cache of
the device, and the launch of the graph takes a small part of the time."""
MAX_LAYERS = 24
WARMUP_SECONDS = 0.05
"""Time of the replays before the timed ones."""
MAX_PROCESSES = 16
"""Processes that compile kernels."""
NUM_DRAWS = 3
"""Sets of lengths of a cell."""
MAX_ERROR = 0.02
"""Of outputs in bf16, relative to the largest one."""


@dataclass(frozen=True)
class Cell:
    """A batch of decodes. lengths: numbers of tokens, for each set of a number per sequence."""

    kv_heads: int
    group: int
    head_dim: int
    is_mixed: bool
    lengths: tuple[tuple[int, ...], ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * self.kv_heads * self.head_dim * ITEMSIZE

    @property
    def read_bytes(self) -> float:
        """Bytes of the keys and values of a replay, on average."""
        return sum(map(sum, self.lengths)) / len(self.lengths) * self.token_bytes

    @property
    def is_small(self) -> bool:
        """Whether it is compared with the old kernel instead of a copy."""
        return self.read_bytes < MIN_BYTES

    @property
    def max_lengths(self) -> list[int]:
        """Maximum length of each sequence."""
        return [max(draws) for draws in zip(*self.lengths, strict=True)]

    def __str__(self) -> str:
        num_sequences = len(self.lengths[0])
        mean_length = sum(map(sum, self.lengths)) / len(self.lengths) / num_sequences
        spread = "mixed" if self.is_mixed else "equal"
        heads = f"{self.kv_heads:2} kv heads x {self.group} of {self.head_dim:3}"
        return f"{num_sequences:3} x {mean_length:6.0f} {spread}, {heads}"


def draw_cell(rng: random.Random, max_bytes: float) -> Cell:
    """Returns a random cell whose keys and values fit into `max_bytes`."""
    while True:
        num_sequences = max(1, round(2 ** rng.uniform(0, 8)))
        low, high = 128, int(128 * 2 ** rng.uniform(0, 9))
        is_mixed = rng.random() < 0.5
        draws = []
        for _ in range(NUM_DRAWS):
            if is_mixed:
                draws.append(tuple(rng.randint(low, high) for _ in range(num_sequences)))
            else:
                draws.append((rng.randint(max(low, high * 3 // 4), high),) * num_sequences)
        cell = Cell(
            kv_heads=rng.choice([1, 2, 3, 4, 6, 8, 12, 16]),
            group=rng.choice([1, 4, 8]),
            head_dim=rng.choice([64, 80, 96, 128, 192, 256]),
            is_mixed=is_mixed,
            lengths=tuple(draws),
        )
        if (sum(cell.max_lengths) + BLOCK_SIZE * num_sequences) * cell.token_bytes <= max_bytes:
            return cell


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors of a cell."""

    q: Tensor
    caches: list[KVCache]
    """Keys and values of each layer."""
    block_table: Tensor
    table_rows: Tensor
    seq_lens: Tensor
    new: tuple[Tensor, Tensor]
    counters: Tensor

    def attend(self, kernels: Any, **options: int) -> list[Tensor]:
        """Runs the decode kernel of a module for each layer."""
        return [
            kernels.decode_attention(
                self.q,
                cache,
                self.block_table,
                self.table_rows,
                self.seq_lens,
                new=self.new,
                counters=self.counters,
                **options,
            )
            for cache in self.caches
        ]


def make_flush() -> Tensor:
    """Returns a tensor that fills the cache of a GPU when it is overwritten."""
    return torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")


def make_inputs(
    cell: Cell, device: torch.device, block_size: int = BLOCK_SIZE, *, has_one_block: bool = False
) -> Inputs:
    """Returns random tensors, with the blocks of a sequence anywhere in the cache.

    has_one_block: the blocks of all sequences are one, so that no cell needs much memory.
    """
    num_layers = min(max(round(GRAPH_BYTES / cell.read_bytes), 2), MAX_LAYERS)
    num_sequences = len(cell.lengths[0])
    num_blocks = [-(-length // block_size) for length in cell.max_lengths]
    block_table = torch.zeros(num_sequences, max(num_blocks), dtype=torch.int32)
    if has_one_block:
        num_layers, num_blocks = 1, [0]
    else:
        order = torch.randperm(sum(num_blocks)).add(1).int()
        for row, blocks in zip(block_table, order.split(num_blocks), strict=True):
            row[: len(blocks)] = blocks

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_()

    cache_shape = (sum(num_blocks) + 1, cell.kv_heads, block_size, cell.head_dim)
    new_shape = (num_sequences, cell.kv_heads, cell.head_dim)
    num_counters = num_split_counters(num_sequences, cell.kv_heads)
    return Inputs(
        q=draw(num_sequences, cell.kv_heads * cell.group, cell.head_dim),
        caches=[KVCache(draw(*cache_shape), draw(*cache_shape)) for _ in range(num_layers)],
        block_table=block_table.to(device),
        table_rows=torch.arange(num_sequences, device=device),
        seq_lens=torch.tensor(cell.lengths[0], dtype=torch.int32, device=device),
        new=(draw(*new_shape), draw(*new_shape)),
        counters=torch.zeros(num_counters, dtype=torch.int32, device=device),
    )


def plain_attention(inputs: Inputs) -> Tensor:
    """Returns what the last layer must return, in fp32: softmax(q Kᵀ / √d) V of each sequence."""
    num_sequences, num_heads, head_dim = inputs.q.shape
    cache = inputs.caches[-1]
    kv_heads = cache.keys.shape[1]
    y = torch.empty(num_sequences, num_heads, head_dim, device=inputs.q.device)
    for i, length in enumerate(inputs.seq_lens.tolist()):
        positions = torch.arange(length, device=y.device)
        blocks = inputs.block_table[i][positions // BLOCK_SIZE].long()
        slots = positions % BLOCK_SIZE
        k, v = (x[blocks, :, slots].float() for x in (cache.keys, cache.values))
        k[-1], v[-1] = inputs.new[0][i], inputs.new[1][i]
        q = inputs.q[i].view(kv_heads, -1, head_dim).float()
        weights = (torch.einsum("ghk,tgk->ght", q, k) * head_dim**-0.5).softmax(-1)
        y[i] = torch.einsum("ght,tgk->ghk", weights, v).flatten(0, 1)
    return y


def check_outputs(kernels: ModuleType, inputs: Inputs) -> None:
    """Compares the outputs of a kernel with plain attention."""
    expected = plain_attention(inputs)
    error = (inputs.attend(kernels)[-1].float() - expected).abs().max() / expected.abs().max()
    if not error < MAX_ERROR:
        raise SystemExit(
            f"The outputs differ from plain attention by {error:.1%} of the largest one, more than "
            f"{MAX_ERROR:.0%}: nothing is timed."
        )


def replay_seconds(
    run: Callable[[], object], inputs: Inputs, draws: list[Tensor], flush: Tensor, repeats: int
) -> float:
    """Returns the time of a layer in a CUDA graph: the mean over lengths of medians."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    # Clocks of an idle device rise for some milliseconds.
    warmup_end = time.perf_counter() + WARMUP_SECONDS
    while time.perf_counter() < warmup_end:
        graph.replay()
        torch.cuda.synchronize()
    events: list[list[tuple[Any, Any]]] = [[] for _ in draws]
    for _ in range(repeats):
        for seq_lens, pairs in zip(draws, events, strict=True):
            inputs.seq_lens.copy_(seq_lens)
            # This takes longer than to launch the graph.
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            pairs.append((start, stop))
    torch.cuda.synchronize()
    seconds = statistics.mean(
        statistics.median(start.elapsed_time(stop) / 1e3 for start, stop in pairs)
        for pairs in events
    )
    return seconds / len(inputs.caches)


def copy_bandwidth(flush: Tensor) -> float:
    """Returns bytes read and written per second by a copy of 2 GiB."""
    x = torch.empty(2**30, dtype=torch.int16, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(10):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        # A copy in a graph is slower than the kernel of this.
        torch.bitwise_not(x, out=y)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * x.nbytes / statistics.median(times)


@functools.cache
def load_old_kernels(path: Path) -> ModuleType:
    """Imports the kernels of another tree, whose operators get a library of their own."""
    code = path.read_text().replace('"ranvier"', '"old_ranvier"')
    code = code.replace("ranvier::", "old_ranvier::").replace("ops.ranvier.", "ops.old_ranvier.")
    folder = tempfile.mkdtemp(prefix="ranvier-old-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder, "old_paged_kernels.py")
    copy.write_text(code)
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton looks up the globals of a kernel.
    sys.modules[copy.stem] = module
    spec.loader.exec_module(module)
    return module


def compile_kernels(cell: Cell, old: Path | None) -> None:
    """Runs the kernels of a cell once, so that Triton's cache has them: compiling takes longest."""
    from ranvier.infer import paged_kernels

    inputs = make_inputs(cell, torch.device("cuda"), has_one_block=True)
    inputs.attend(paged_kernels)
    if old is not None and cell.is_small:
        old_kernels = load_old_kernels(old)
        for num_splits in OLD_SPLITS:
            inputs.attend(old_kernels, num_splits=num_splits)


@dataclass(frozen=True)
class Row:
    """Results of a cell."""

    cell: str
    megabytes: float
    microseconds: float
    share: float
    """Of the bandwidth of a copy."""
    old_splits: int | None = None
    """Number of splits with which the old kernel was fastest."""
    old_microseconds: float | None = None

    def __str__(self) -> str:
        line = f"{self.cell}: {self.megabytes:8.1f} MB {self.microseconds:8.1f} µs {self.share:.2f}"
        if self.old_microseconds is not None:
            line += f"  old {self.old_microseconds:8.1f} µs with {self.old_splits:2} splits: "
            line += f"{self.microseconds / self.old_microseconds:.2f}"
        return line


def print_summary(rows: list[Row]) -> None:
    """Prints the median and the worst share of large cells, and the ratios of smaller ones."""
    large = [row.share for row in rows if row.megabytes >= MIN_BYTES / 1e6]
    if large:
        print(
            f"{len(large)} cells of at least {MIN_BYTES / 1e6:.0f} MB: median "
            f"{statistics.median(large):.3f}, worst {min(large):.3f} of the copy bandwidth"
        )
    ratios = [
        row.microseconds / row.old_microseconds
        for row in rows
        if row.megabytes < MIN_BYTES / 1e6 and row.old_microseconds is not None
    ]
    if ratios:
        print(
            f"{len(ratios)} smaller cells: median {statistics.median(ratios):.2f}, worst "
            f"{max(ratios):.2f} of the time of the old kernel with its best number of splits"
        )


def main() -> None:
    parser = ScriptParser(
        __doc__,
        smoke="--cells 4 --gib 0.001",
        skipped="the kernel needs a GPU; the cells are drawn, and plain attention runs.",
    )
    parser.add_argument("--cells", type=int, default=30, help="number of cells")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gib", type=float, default=16.0, help="maximum size of a cell's cache")
    parser.add_argument("--repeats", type=int, default=7, help="replays for each set of lengths")
    parser.add_argument("--old", type=Path, help="paged_kernels.py of a tree before stream-K")
    parser.add_argument("--csv", type=Path, help="table to write")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    cells = [draw_cell(rng, options.gib * 2**30) for _ in range(options.cells)]
    if not torch.cuda.is_available() or not has_triton():
        for cell in cells:
            y = plain_attention(make_inputs(cell, torch.device("cpu")))
            print(f"{cell}: {cell.read_bytes / 1e6:.2f} MB, outputs {tuple(y.shape)}")
        return

    from ranvier.infer import paged_kernels

    num_processes = min(os.cpu_count() or 1, MAX_PROCESSES)
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compile_kernels, old=options.old), cells))
    old_kernels = None if options.old is None else load_old_kernels(options.old)
    flush = make_flush()
    bandwidth = copy_bandwidth(flush)
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows = []
    for cell in cells:
        inputs = make_inputs(cell, torch.device("cuda"))
        check_outputs(paged_kernels, inputs)
        draws = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in cell.lengths]
        measure = partial(
            replay_seconds, inputs=inputs, draws=draws, flush=flush, repeats=options.repeats
        )
        seconds = measure(partial(inputs.attend, paged_kernels))
        old_seconds = {
            splits: measure(partial(inputs.attend, old_kernels, num_splits=splits))
            for splits in (OLD_SPLITS if old_kernels is not None and cell.is_small else ())
        }
        old_splits = min(old_seconds, key=lambda splits: old_seconds[splits], default=None)
        row = Row(
            cell=str(cell),
            megabytes=round(cell.read_bytes / 1e6, 1),
            microseconds=round(seconds * 1e6, 1),
            share=round(cell.read_bytes / seconds / bandwidth, 3),
            old_splits=old_splits,
            old_microseconds=old_splits and round(old_seconds[old_splits] * 1e6, 1),
        )
        rows.append(row)
        print(row, flush=True)
    print_summary(rows)
    if options.csv is not None and rows:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(vars(rows[0]))
            writer.writerows(vars(row).values() for row in rows)


if __name__ == "__main__":
    main()
