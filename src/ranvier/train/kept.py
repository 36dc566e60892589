"""Kept: what the blocks of a run keep for backward besides their kinds, and where it waits.

A share of it waits on the host (`memory.activations`). Of results of collectives all are kept, or
(`memory.collectives = auto` with a limit of memory) some: the step is measured without them, and
what it leaves free is shared by the blocks that compute again. All ranks choose alike: room and
need are those of the rank that is worst off, rates those that rank 0 has measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ranvier.comm import rates
from ranvier.comm.agree import largest
from ranvier.comm.arena import Arena, host_room
from ranvier.memory.activations import Activations
from ranvier.memory.budget import Kind
from ranvier.memory.collectives import Result, seconds, worth
from ranvier.memory.pool import Pool
from ranvier.models import Decoder
from ranvier.nn.leaf import Flow
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel import Parallel, parallel_of
from ranvier.run import Run
from ranvier.train.fit import GIB, measured, room


def settle(
    run: Run, model: Decoder, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> list[str]:
    """Settle what blocks keep and where; lines that say it.

    Communicates: nothing, but with `auto` and a limit as `fit.measured` and `rates.measured`.
    """
    lines = _chosen(run, model, optimizer, device, local_ranks)
    if run.memory.activations != 0.0:
        offload(run, model, local_ranks)
    return lines


def _chosen(
    run: Run, model: Decoder, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> list[str]:
    """Choose which results of collectives are kept, if there is a choice."""
    parallel, plan, keeping = parallel_of(model), run.plan, parallel_of(model).moment.keeping
    again = [block for block, kind in parallel.kinds.items() if kind != "none"]
    if run.memory.collectives != "auto" or run.memory.limit == 0.0 or not again:
        return []
    keeping.chosen = frozenset()  # the step is measured without any
    available = min(room(plan, device, local_ranks), int(run.memory.limit * GIB))
    available = -largest(-available, parallel.grid, device)
    accumulated = plan.micro_batch * plan.replicas < plan.batch
    need = measured(run, model, optimizer, device, plan.micro_batch, accumulated=accumulated)
    free = 0 if need is None else max(available - need.of(_kinds(parallel)), 0)
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
    speeds = rates.measured(parallel.grid, axes, device)
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


def offload(run: Run, model: Decoder, local_ranks: int) -> None:
    """Have a share of the activations of blocks wait on the host."""
    parallel, room = parallel_of(model), host_room(local_ranks, run.memory.host)
    blocks, runtime = list(parallel.kinds), parallel.pipeline.runtime
    stage, device = runtime.stage, runtime.device
    ends = stage.index == stage.count - 1 and bool(blocks)  # a stage may have no block
    parallel.moment.keeping.store = Activations(
        run.memory.activations,
        blocks,
        device,
        weights=lambda: [bucket.data for bucket in parallel.queue.buckets],
        pool=Pool(lambda size: Arena(size, device).bytes, room=room),
        last=blocks[-1] if ends else "",
    )


def _kinds(parallel: Parallel) -> list[Kind]:
    """The kinds of the blocks, as a budget knows them."""
    return ["full" if kind == "reentrant" else kind for kind in parallel.kinds.values()]  # type: ignore[misc]
