"""Bytes that a step has to read, and how fast a device reads them.

A step reads all weights once, except the rows of the input embedding that it does not use, and the
keys and values of all earlier tokens of its sequences, up to the window of a layer. The share of
the memory bandwidth that a step reaches is bytes / seconds / B, where B is measured by a copy.
Experts count as if all of them were used. Each iteration of a recurrent core reads its weights and
its keys and values, as if no token exits early.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ranvier.config.engine import EngineConfig
from ranvier.infer.model_runner import ModelRunner
from ranvier.infer.policy import WorkItem
from ranvier.models.decoder import AttentionCore
from ranvier.models.recurrent_decoder import RecurrentDecoder
from ranvier.nn.embedding import Embedding
from ranvier.parallel.parallel_model import get_parallel_model

COPY_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
NUM_COPIES = 5


@dataclass(frozen=True)
class MemoryTraffic:
    """What the steps of this rank read; the rank is in the first home."""

    weight_bytes: int
    kv_bytes: int
    """Bytes of the keys and values of a token in a layer."""
    windows: Mapping[int, int]
    """Number of layers with each window; 0 means no window."""
    context_size: int = 1
    """Number of ranks of context, of which each reads its own pages."""

    @classmethod
    def of_model(cls, model: nn.Module, config: EngineConfig) -> MemoryTraffic:
        """Returns the bytes of a model on this rank."""
        parallel = get_parallel_model(model)
        buckets = parallel.bucket_scheduler.buckets
        total = sum(bucket.data.nbytes for bucket in buckets)
        sizes: Any = model.config
        if not sizes.tie_embeddings:
            tables = [one for one in parallel.layers.values() if isinstance(one, Embedding)]
            total -= sum(x.nbytes for one in tables for x in one.parameters())
        num_iterations = config.num_iterations(sizes.mean_recurrence)
        if isinstance(model, RecurrentDecoder):
            core = sum(
                weight.storage.nbytes
                for name, weight in parallel.weights.items()
                if name.startswith(f"{model.core_name}.")
            )
            total += (num_iterations - 1) * core
        shape = ModelRunner.kv_cache_shape(model, 1, config.block_size)
        itemsize = buckets[0].data.element_size()
        windows: Counter[int] = Counter()
        for one in model.modules():
            if isinstance(one, AttentionCore):
                windows[one.window] += num_iterations if one.is_recurrent else 1
        return cls(
            total,
            2 * math.prod(shape) * itemsize // config.block_size,
            windows,
            parallel.grid.degrees["context"],
        )

    def count_bytes(self, items: Iterable[WorkItem]) -> int:
        """Returns the bytes that a step has to read."""
        stops = [item.start + item.num_tokens for item in items if item.home == 0]
        tokens = 0
        for window, layers in self.windows.items():
            if window:
                tokens += layers * sum(min(stop, window) for stop in stops)
            else:
                tokens += layers * sum(stops)
        return self.weight_bytes + tokens * self.kv_bytes // self.context_size


def measure_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second of a copy on a device, read and written bytes counted."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fastest = math.inf
    for _ in range(NUM_COPIES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.monotonic()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.monotonic() - start)
    return 2 * source.nbytes / fastest
