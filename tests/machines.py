"""Machines that nobody has: hosts with round numbers, for tests of the planner."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ranvier.launch import ProcessInfo
from ranvier.planner.cluster import (
    AttentionRate,
    Cluster,
    MatmulRate,
    MeasuredCollective,
    MeasuredRate,
)
from ranvier.tools import benchmark_cluster

OPS = ("all_gather", "reduce_scatter", "all_reduce", "send")


@functools.cache
def machine(cores: int = 2, latency: float = 1e-3) -> Cluster:
    """A host on which everything takes round numbers, but for `ranks` that want the same core."""
    rows: list[Any] = []
    for ranks in (1, 2, 4, 8):
        slow = max(ranks / cores, 1.0)
        rows += [
            MatmulRate(192, 192, 192, "fp32", 4e10 / slow, ranks, kind) for kind in ("y", "dx")
        ]
        rows += [MatmulRate(192, 192, 192, "fp32", 4e10 / slow, ranks, "dw")]
        rows += [AttentionRate(96, 24, "fp32", 1e10 / slow, 1e10 / slow, ranks)]
        rates = {"memory": 1e10, "between": 5e9, "update": 1e8, "norm": 1e9}
        rows += [MeasuredRate(kind, value / slow, ranks) for kind, value in rates.items()]
        rows += [MeasuredRate(kind, 1e-5 * slow, ranks) for kind in ("launch", "pair")]
    links = [MeasuredCollective(op, n, latency, 1e9, 8 // n) for n in (2, 4, 8) for op in OPS]
    made = benchmark_cluster.build_cluster(
        torch.device("cpu"), ProcessInfo(local_world_size=8), rows, links
    )
    return replace(made, cores=cores)
