"""Chooses which results of collectives recomputed blocks save, so as not to rerun the collectives.

It saves all of them, or (`memory.recompute_collectives = auto` with a memory limit) some: the step
is predicted without them, and the remaining memory is divided evenly among the blocks that
recompute. All ranks choose alike: free memory is the minimum over ranks, and rank 0 measures the
rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ranvier.comm import bandwidth
from ranvier.comm.consensus import max_over_ranks
from ranvier.config.run import RunConfig
from ranvier.cost.layers import ActivationShape
from ranvier.memory.recompute_collectives import (
    SavableResult,
    choose_results,
    communication_seconds,
)
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.train.memory.resolve import predict_memory
from ranvier.train.memory.usage import GIB


def choose_saved_collectives(
    run: RunConfig, model: nn.Module, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> list[str]:
    """Choose which results of collectives are saved, if there is a choice; returns a note on it.

    Communicates: nothing, or with `auto` and a limit as `predict_memory` and
    `bandwidth.measure_axis_rates`.
    """
    parallel = get_parallel_model(model)
    plan = run.plan
    keeping = get_parallel_model(model).step_context.save_policy
    again = [block for block, kind in parallel.recompute_modes.items() if kind != "none"]
    if (
        run.memory.recompute_collectives != "auto"
        or run.memory.device_limit_gib == 0.0
        or not again
    ):
        return []
    # The step is predicted without any saved results.
    keeping.chosen_layers = frozenset()
    account = predict_memory(run, model, optimizer, device, local_ranks)
    free = 0
    if account.predicted_usage is not None and account.fit_problem is not None:
        free = max(account.fit_problem.device_limit - account.predicted_usage.total_bytes, 0)
    # The rank with the least free memory decides, so that all ranks run the same collectives.
    free = -max_over_ranks(-free, parallel.grid, device)
    itemsize = parallel.bucket_scheduler.buckets[0].data.element_size()
    flow = ActivationShape(
        plan.micro_batch, run.data.seq_len, itemsize, statistics_itemsize=max(itemsize, 4)
    )
    results = collective_results(parallel, again, flow, device)
    names = set[str]()
    for block in again:
        inside = [result for result in results if parallel.block_of(result.name) == block]
        # Every recomputed block gets the same budget.
        found = choose_results(inside, free // len(again))
        # A compiled graph saves all of its results or none.
        if parallel.compiled_blocks is None or len(found) == len(inside):
            names |= found
    if len(names) == len(results):
        keeping.chosen_layers = None
    else:
        keeping.chosen_layers = frozenset(names)
    held = sum(result.bytes for result in results if result.name in names)
    return [
        f"memory: {len(names)} of {len(results)} results of collectives are saved for "
        f"recomputation, {held / GIB:.3g} of {free / GIB:.3g} GiB"
    ]


def collective_results(
    parallel: ParallelModel, blocks: Sequence[str], flow: ActivationShape, device: torch.device
) -> list[SavableResult]:
    """The results that blocks may save for each of their layers, with their bytes and seconds.

    Communicates: see `bandwidth.measure_axis_rates`.
    """
    found = [
        (name, leaf, leaf.forward_events(flow))
        for block in blocks
        for name, leaf in parallel.communicating_layers.items()
        if parallel.block_of(name) == block
    ]
    axes = [event.axis for _, _, events in found for event in events]
    speeds = bandwidth.measure_axis_rates(parallel.grid, axes, device)
    return [
        SavableResult(
            name,
            leaf.saved_bytes(
                flow, selective=parallel.recompute_modes[parallel.block_of(name)] == "selective"
            ),
            communication_seconds(events, speeds),
        )
        for name, leaf, events in found
        if events
    ]
