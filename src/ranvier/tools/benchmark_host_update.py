"""Hosted: seconds of the host for a block of a model that nobody has compiled.

A model so small that its device does nothing is run forward and backward with few blocks and with
more; what the difference takes is Python, autograd and the starts of kernels, as in any size:

    block = (seconds of MORE blocks - seconds of FEW blocks) / (MORE - FEW) / 3

which is the forward pass; the backward pass takes twice that.
"""

from __future__ import annotations

import statistics
import time

import torch

from ranvier.config import run as runs
from ranvier.cost.layers import Flow
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.parallel.parallelize import parallel_of
from ranvier.planner.cluster import Rate
from ranvier.train.build_model import built
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.step import forward_backward
from ranvier.train.train import settled

FEW, MORE = 2, 8
"""Blocks."""
SEQ, WIDTH = 32, 64
TURNS = 10


def rates(device: torch.device, *, fp8: bool) -> list[Rate]:
    """Seconds of the host for the forward pass of a block: `block`, and with 8 bits `block8`."""
    found = [Rate("block", _block(device, "off"))]
    return [*found, Rate("block8", _block(device, "tensorwise"))] if fp8 else found


def _block(device: torch.device, fp8: str) -> float:
    few, more = (_passes(device, blocks, fp8) for blocks in (FEW, MORE))
    return max(more - few, 0.0) / (MORE - FEW) / 3.0


def _passes(device: torch.device, blocks: int, fp8: str) -> float:
    """Seconds of both passes of a model of so many blocks."""
    sizes = {"layers": blocks, "embed": WIDTH, "heads": 4, "kv_heads": 4, "mlp": 2 * WIDTH}
    tables = {
        "model": {**sizes, "head_dim": WIDTH // 4, "vocab": 256, "max_seq": SEQ},
        "data": {"seq": SEQ, "packed": False},
        "plan": {"batch": 1, "micro_batch": 1, "compile": "off", "recompute": "none"},
        "train": {"device": device.type, "dtype": "bf16", "fp8": fp8},
    }
    run = settled(runs.from_tables(tables).check(1), device)
    grid = Grid({})
    model = built(run, grid, device, local_ranks=1)
    choose_arithmetic(run, model, grid, device, Flow(1, SEQ, itemsize=2, statistics=4))
    ids = torch.zeros(1, SEQ, dtype=torch.int64, device=device)
    batches = Batch(ids, ids).micro_batches(grid, 1)
    taken = []
    for _ in range(TURNS):
        _wait(device)
        begun = time.perf_counter()
        forward_backward(model, batches)
        _wait(device)
        taken.append(time.perf_counter() - begun)
        parallel_of(model).queue.begin("")
        grid.trace.awaited = []
    return statistics.median(taken[1:])  # a step waits for a host that is now and then busy


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
