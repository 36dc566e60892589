"""Bandwidth of the decode attention kernel, compared with that of a copy on the same device.

Usage: python benchmarks/paged_attention.py [--sequences 64] [--tokens 2048]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from ranvier.infer.paged_kernels import decode_attention
from ranvier.models.paged_attention import KVCache

BLOCK_SIZE = 64


def seconds_of(work: Callable[[], object], repeats: int = 50) -> float:
    """Median time of some kernels in a CUDA graph, as the engine runs them.

    The cache of the device is overwritten in between, which takes longer than to launch the graph.
    """
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    for _ in range(5):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(sorted(times)[len(times) // 2])


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GiB."""
    x = torch.empty(2**30, dtype=torch.int16, device="cuda")
    y = torch.empty_like(x)
    # A copy in a graph is slower than the kernel of this.
    return 2 * x.nbytes / seconds_of(lambda: torch.bitwise_not(x, out=y), 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s")
    heads, kv_heads, head_dim = 32, 8, 128
    for count in options.sequences:
        for tokens in options.tokens:
            blocks = -(-tokens // BLOCK_SIZE)
            shape = (count * blocks + 1, kv_heads, BLOCK_SIZE, head_dim)
            caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
            cache = KVCache(*caches)
            table = torch.randperm(count * blocks, device="cuda").add(1).int().view(count, blocks)
            lengths = torch.full((count,), tokens, dtype=torch.int32, device="cuda")
            rows = torch.arange(count, device="cuda")
            q = torch.randn(count, heads, head_dim, device="cuda", dtype=torch.bfloat16)
            num_bytes = 2 * count * tokens * kv_heads * head_dim * 2
            line = f"{count:3} sequences of {tokens:5} tokens:"
            for splits in (0, 1, 2, 4, 8, 16):
                seconds = seconds_of(
                    lambda: decode_attention(q, cache, table, rows, lengths, num_splits=splits)  # noqa: B023
                )
                share = num_bytes / seconds / bandwidth
                name = f"{splits} splits" if splits else "auto"
                line += f"  {name} {seconds * 1e6:.0f} µs ({share:.0%})"
            print(line, flush=True)


if __name__ == "__main__":
    main()
