"""Predicts the memory of a served model on a rank, without loading it."""

from __future__ import annotations

import math

from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer.engine import DEFAULT_CPU_CACHE_GIB, block_bytes, resolve_max_model_len
from ranvier.infer.engine_start import DTYPES
from ranvier.infer.model_source import ModelSource
from ranvier.launch import fake_process_group
from ranvier.system.terminal import print


def print_memory(source: ModelSource, plan: Plan, config: EngineConfig, dtype: str) -> int:
    """Prints weights, KV cache and the longest request of one replica. Returns the exit code."""
    import torch

    from ranvier.infer.load import build_empty_model
    from ranvier.parallel.parallel_model import get_parallel_model

    itemsize = DTYPES.get(dtype, torch.bfloat16)
    replica = plan.with_degrees({"data": 1})
    most = 0
    least_blocks = math.inf
    model = None
    for rank in range(replica.world_size):
        with fake_process_group(replica.world_size, rank):
            grid = Grid.from_plan(replica, rank=rank)
            model = build_empty_model(
                source.load_config(), grid, "meta", plan=replica, dtype=itemsize
            )
        buckets = get_parallel_model(model).bucket_scheduler.buckets
        most = max(most, sum(bucket.data.nbytes for bucket in buckets))
        size = block_bytes(model, config.block_size)
        gib = config.kv_cache_gib or DEFAULT_CPU_CACHE_GIB
        least_blocks = min(least_blocks, int(gib * 2**30) // size)
    assert model is not None
    longest = resolve_max_model_len(model, config, int(least_blocks))
    each = -(-longest // config.block_size)
    homes = replica.world_size // (replica.row * replica.pipe)
    if plan.col_splits == "features":
        homes //= replica.col
    print(f"Weights: {most / 2**30:.2f} GiB on the rank with the most")
    print(
        f"KV cache: {gib:g} GiB on each rank, {int(least_blocks) - 1:,} blocks of "
        f"{config.block_size} tokens"
    )
    print(f"Longest request: {longest:,} tokens")
    print(
        f"Requests of that length at the same time: {homes * ((int(least_blocks) - 1) // each):,}"
    )
    return 0
