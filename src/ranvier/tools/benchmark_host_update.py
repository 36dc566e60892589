"""Measure the host time of one block of a model that is not compiled.

A model so small that its device is idle runs forward and backward with few blocks and with more;
the difference is Python, autograd and kernel launches, which do not depend on the size:

    block = (seconds of MORE blocks - seconds of FEW blocks) / (MORE - FEW) / 3

which is the forward pass; the backward pass takes twice that.
"""

from __future__ import annotations

import statistics
import time

import torch

from ranvier.config import run as runs
from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.parallel.parallelize import get_parallel_model
from ranvier.planner.cluster import MeasuredRate
from ranvier.train.build_model import build_model
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.step import forward_backward
from ranvier.train.train import resolve_device_and_dtype

FEW_BLOCKS = 2
MORE_BLOCKS = 8
"""Numbers of blocks of the two models."""
BLOCK_SEQ = 32
BLOCK_WIDTH = 64
BLOCK_REPEATS = 10


def measure_block_rates(device: torch.device, *, fp8: bool) -> list[MeasuredRate]:
    """Host seconds of the forward pass of a block: `block`, and in 8 bits `block8`."""
    found = [MeasuredRate("block", _block_seconds(device, "off"))]
    if fp8:
        return [*found, MeasuredRate("block8", _block_seconds(device, "tensorwise"))]
    return found


def _block_seconds(device: torch.device, fp8: str) -> float:
    few, more = (_passes_seconds(device, blocks, fp8) for blocks in (FEW_BLOCKS, MORE_BLOCKS))
    return max(more - few, 0.0) / (MORE_BLOCKS - FEW_BLOCKS) / 3.0


def _passes_seconds(device: torch.device, blocks: int, fp8: str) -> float:
    """Seconds of both passes of a model with `blocks` blocks."""
    sizes = {
        "layers": blocks,
        "embed": BLOCK_WIDTH,
        "heads": 4,
        "kv_heads": 4,
        "mlp": 2 * BLOCK_WIDTH,
    }
    tables = {
        "model": {**sizes, "head_dim": BLOCK_WIDTH // 4, "vocab": 256, "max_seq": BLOCK_SEQ},
        "data": {"seq": BLOCK_SEQ, "packed": False},
        "plan": {"batch": 1, "micro_batch": 1, "compile": "off", "recompute": "none"},
        "train": {"device": device.type, "dtype": "bf16", "fp8": fp8},
    }
    run = resolve_device_and_dtype(runs.run_from_tables(tables).check_and_resolve(1), device)
    grid = Grid({})
    model = build_model(run, grid, device, local_ranks=1)
    choose_arithmetic(
        run, model, grid, device, ActivationShape(1, BLOCK_SEQ, itemsize=2, statistics_itemsize=4)
    )
    ids = torch.zeros(1, BLOCK_SEQ, dtype=torch.int64, device=device)
    batches = Batch(ids, ids).split_micro_batches(grid, 1)
    taken = []
    for _ in range(BLOCK_REPEATS):
        _synchronize_device(device)
        begun = time.perf_counter()
        forward_backward(model, batches)
        _synchronize_device(device)
        taken.append(time.perf_counter() - begun)
        get_parallel_model(model).bucket_scheduler.begin_step("")
        # No step collects these events here, so they would pile up.
        grid.trace.waited_events = []
    # The first pass warms up; the median ignores passes in which the host was busy with something
    # else.
    return statistics.median(taken[1:])


def _synchronize_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
