"""Predicts the memory of a served model on a rank, without loading it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer.engine import (
    DEFAULT_CPU_CACHE_GIB,
    block_bytes,
    count_block_tokens,
    resolve_max_model_len,
)
from ranvier.infer.engine_start import DTYPES, choose_device
from ranvier.infer.model_source import ModelSource
from ranvier.launch import ProcessInfo, fake_process_group
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner.cluster import load_cluster
from ranvier.system.terminal import print


@dataclass(frozen=True)
class DeviceMemory:
    """Kind and memory of the device of a rank."""

    name: str
    type: str
    num_bytes: float
    """Memory of a GPU; 0 on a CPU, where the KV cache has a fixed size."""

    @classmethod
    def find(cls, wanted: str, cluster: str) -> DeviceMemory:
        """Returns the device of this machine, or of a cluster if it has a name.

        wanted: auto, cpu or cuda.
        """
        if cluster:
            found = load_cluster(cluster)
            if found.cores or wanted == "cpu":
                return cls("CPU", "cpu", 0.0)
            return cls(found.device.name, "cuda", found.device.memory)
        device = choose_device(wanted, ProcessInfo())
        if device.type == "cpu":
            return cls("CPU", "cpu", 0.0)
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, "cuda", properties.total_memory)

    def kv_cache_bytes(self, config: EngineConfig, weight_bytes: int) -> float:
        """Returns the bytes of the KV cache next to weights, as the engine chooses them."""
        if config.kv_cache_gib > 0.0:
            return config.kv_cache_gib * 2**30
        if self.type == "cpu":
            return DEFAULT_CPU_CACHE_GIB * 2**30
        return max(0.0, config.gpu_memory_utilization * self.num_bytes - weight_bytes)


def print_memory(
    source: ModelSource, plan: Plan, config: EngineConfig, *, dtype: str, memory: DeviceMemory
) -> int:
    """Prints weights, KV cache and the longest request of one replica. Returns the exit code."""
    weight_dtype = source.find_dtype(torch.device(memory.type), DTYPES.get(dtype))
    replica = plan.with_degrees({"data": 1})
    most = 0
    least_blocks = math.inf
    least_bytes = math.inf
    model = None
    for rank in range(replica.world_size):
        with fake_process_group(replica.world_size, rank):
            grid = Grid.from_plan(replica, rank=rank)
            model = source.build_empty(grid, "meta", replica, weight_dtype)
        buckets = get_parallel_model(model).bucket_scheduler.buckets
        weights = sum(bucket.data.nbytes for bucket in buckets)
        most = max(most, weights)
        num_bytes = memory.kv_cache_bytes(config, weights)
        least_bytes = min(least_bytes, num_bytes)
        least_blocks = min(least_blocks, num_bytes // block_bytes(model, config))
    assert model is not None
    num_blocks = int(least_blocks)
    longest = resolve_max_model_len(model, config, num_blocks)
    block_tokens = count_block_tokens(model, config)
    # The last token is sampled and not stored.
    each = -(-(longest - 1) // block_tokens)
    homes = replica.world_size // (replica.row * replica.pipe * replica.context)
    if plan.col_splits == "features":
        homes //= replica.col
    names = {value: name for name, value in DTYPES.items()}
    print(f"Device: {memory.name}, weights in {names.get(weight_dtype, weight_dtype)}")
    print(f"Weights: {most / 2**30:.2f} GiB on the rank with the most")
    print(
        f"KV cache: {least_bytes / 2**30:.4g} GiB on each rank, {num_blocks - 1:,} blocks of "
        f"{block_tokens} tokens"
    )
    if replica.context > 1:
        print(
            f"A block has {config.block_size} tokens on each of {replica.context} ranks of context"
        )
    print(f"Longest request: {longest:,} tokens")
    print(f"Requests of that length at the same time: {homes * ((num_blocks - 1) // each):,}")
    return 0
