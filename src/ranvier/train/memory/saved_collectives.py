"""Kept: which results of collectives the blocks of a run keep for backward.

All of them, or (`memory.collectives = auto` with a limit of memory) some: the step is measured
without them, and what it leaves free is shared by the blocks that compute again. All ranks choose
alike: room and need are those of the rank that is worst off, rates those that rank 0 has measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ranvier.comm import bandwidth
from ranvier.comm.consensus import largest
from ranvier.config.run import Run
from ranvier.cost.layers import Flow
from ranvier.memory.recompute_collectives import Result, seconds, worth
from ranvier.models import Decoder
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import Parallel, parallel_of
from ranvier.train.memory.probe import GIB
from ranvier.train.memory.resolve import foreseen


def settle(
    run: Run, model: Decoder, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> list[str]:
    """Choose which results of collectives are kept, if there is a choice; a line that says it.

    Communicates: nothing, but with `auto` and a limit as `foreseen` and `rates.measured`.
    """
    parallel, plan, keeping = parallel_of(model), run.plan, parallel_of(model).moment.keeping
    again = [block for block, kind in parallel.kinds.items() if kind != "none"]
    if run.memory.collectives != "auto" or run.memory.limit == 0.0 or not again:
        return []
    keeping.chosen = frozenset()  # the step is measured without any
    account = foreseen(run, model, optimizer, device, local_ranks)
    free = 0
    if account.predicted is not None and account.case is not None:
        free = max(account.case.limit - account.predicted.total, 0)
    free = -largest(-free, parallel.grid, device)
    itemsize = parallel.queue.buckets[0].data.element_size()
    flow = Flow(plan.micro_batch, run.data.seq, itemsize, statistics=max(itemsize, 4))
    results = results_of(parallel, again, flow, device)
    names = set[str]()
    for block in again:
        inside = [result for result in results if result.name.startswith(f"{block}.")]
        found = worth(inside, free // len(again))
        if parallel.compiled is None or len(found) == len(inside):  # a graph keeps all or nothing
            names |= found
    keeping.chosen = None if len(names) == len(results) else frozenset(names)
    held = sum(result.bytes for result in results if result.name in names)
    return [
        f"memory: {len(names)} of {len(results)} results of collectives are kept for "
        f"recomputation, {held / GIB:.3g} of {free / GIB:.3g} GiB"
    ]


def results_of(
    parallel: Parallel, blocks: Sequence[str], flow: Flow, device: torch.device
) -> list[Result]:
    """What blocks may keep of each of their leaves. Communicates: see `rates.measured`."""
    found = [
        (name, leaf, leaf.forward_events(flow))
        for block in blocks
        for name, leaf in parallel.speaking.items()
        if name.startswith(f"{block}.")
    ]
    axes = [event.axis for _, _, events in found for event in events]
    speeds = bandwidth.measured(parallel.grid, axes, device)
    selective = {name for name, kind in parallel.kinds.items() if kind == "selective"}
    return [
        Result(
            name,
            leaf.held(flow, selective=leaf.site.block in selective),
            seconds(events, speeds),
        )
        for name, leaf, events in found
        if events
    ]
