"""Passes of a model whose activations wait on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence import Case, batch_of, gradients, micros_of
from ranvier.grid import Grid
from ranvier.memory.activation_offload import ActivationOffload
from ranvier.memory.host import HostBufferPool
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import forward_backward

CPU = torch.device("cpu")


def bytes_of(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def activations(share: float, blocks: list[str], **options: Any) -> ActivationOffload:
    pool = options.pop("pool", None) or HostBufferPool(bytes_of, room=2**30)
    options = {"weights": list, "small": 1, **options}
    return ActivationOffload(share, blocks, CPU, pool=pool, **options)


def stored(model: nn.Module, share: float) -> ActivationOffload:
    """Have a share of what the blocks of a model keep wait elsewhere."""
    parallel = get_parallel_model(model)
    blocks, stage = parallel.blocks, parallel.pipeline.executor.stage
    store = activations(
        share,
        blocks,
        weights=lambda: [bucket.data for bucket in parallel.bucket_scheduler.buckets],
        last=blocks[-1] if stage.index == stage.num_stages - 1 else "",
    )
    parallel.step_context.save_policy.store = store
    return store


ALONE = ["none rerun", "selective rerun", "full rerun"]
ON_GRID = ["none rerun", "selective save", "full save"]


def passes(grid: Grid, case: Case, ways: list[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """What changes if activations wait on the host; bytes that went, and that still wait."""
    batch = batch_of(case.model, samples=16, packed=case.packed)
    micros, lines, went = micros_of(batch, grid, case.micro_batches), list[str](), []
    for way in ways:
        kind, collectives = way.split()
        want: dict[str, Tensor] = {}
        for share in (0.0, 0.4, 1.0):
            model = replace(case, recompute=kind, collectives=collectives).on(grid)
            store = stored(model, share)
            for _ in range(2 if share else 1):  # in the second one arena holds all
                loss = forward_backward(model, micros)
                grads = {
                    name: grad for name, (grad, _) in gradients(get_parallel_model(model)).items()
                }
                grads["loss"] = loss
                want = want or grads
                lines += [
                    f"rank {grid.rank}: {name} with {way}, share {share}"
                    for name, grad in grads.items()
                    if not torch.equal(grad, want[name])
                ]
            went.append((store.offloaded_bytes, sum(store.saved_bytes())))
    return lines, went
