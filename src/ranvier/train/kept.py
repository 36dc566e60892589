"""Kept: what the blocks of a run keep for backward besides their kinds, and where it waits.

A share of it waits on the host (`memory.activations`). Of results of collectives all are kept, or
(`memory.collectives = auto` with a limit of memory) some: the step is measured without them, and
what it leaves free is shared by the blocks that compute again. All ranks choose alike: room and
need are those of the rank that is worst off, rates those that rank 0 has measured.
"""

from __future__ import annotations

import torch

from ranvier.comm import rates
from ranvier.comm.agree import largest
from ranvier.comm.arena import Arena, host_room
from ranvier.memory import collectives
from ranvier.memory.activations import Activations
from ranvier.memory.budget import Kind
from ranvier.memory.collectives import Result, worth
from ranvier.memory.pool import Pool
from ranvier.models import Decoder
from ranvier.nn.leaf import Flow
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel import Parallel, parallel_of
from ranvier.run import Run
from ranvier.trace import Event
from ranvier.train.fit import GIB, measured, room


def settle(
    run: Run,
    model: Decoder,
    optimizer: Optimizer,
    device: torch.device,
    flow: Flow,
    *,
    local_ranks: int,
) -> list[str]:
    """Settle what blocks keep; a line that says it. Nothing is measured unless the run asks for it.

    Communicates: see `fit.measured` and `rates.measured`.
    """
    parallel, plan, keeping = parallel_of(model), run.plan, parallel_of(model).moment.keeping
    again = [block for block, kind in parallel.kinds.items() if kind != "none"]
    if run.memory.collectives != "auto" or run.memory.limit == 0.0 or not again:
        return []
    keeping.chosen = frozenset()
    available = min(room(plan, device, local_ranks), int(run.memory.limit * GIB))
    available = -largest(-available, parallel.grid, device)
    accumulated = plan.micro_batch * plan.replicas < plan.batch
    need = measured(run, model, optimizer, device, plan.micro_batch, accumulated=accumulated)
    free = 0 if need is None else max(available - need.of(_kinds(parallel)), 0)
    axes = [event.axis for found in results_of(parallel, again[0], flow, {}) for event in found[1]]
    speeds = rates.measured(parallel.grid, axes, device)
    chosen, every, held = set[str](), True, 0
    for block in again:
        results = [result for result, _ in results_of(parallel, block, flow, speeds)]
        names = worth(results, free // len(again))
        if parallel.compiled is not None and len(names) < len(results):
            names = frozenset()  # a graph keeps all or nothing
        chosen |= names
        held += sum(result.bytes for result in results if result.name in names)
        every = every and len(names) == len(results)
    keeping.chosen = None if every else frozenset(chosen)
    return [
        f"memory: {len(chosen)} results of collectives are kept for recomputation, "
        f"{held / GIB:.3g} of {free / GIB:.3g} GiB that are free"
    ]


def offload(run: Run, model: Decoder, device: torch.device, *, local_ranks: int) -> None:
    """Have a share of the activations of blocks wait on the host, if the run asks for it."""
    parallel, share = parallel_of(model), run.memory.activations
    if share == 0.0:
        return
    stage = parallel.pipeline.runtime.stage
    parallel.moment.keeping.store = Activations(
        share,
        list(parallel.kinds),
        device,
        weights=lambda: [bucket.data for bucket in parallel.queue.buckets],
        pool=Pool(
            lambda size: Arena(size, device).bytes, room=host_room(local_ranks, run.memory.host)
        ),
        last=list(parallel.kinds)[-1] if stage.index == stage.count - 1 else "",
    )


def results_of(
    parallel: Parallel,
    block: str,
    flow: Flow,
    speeds: dict[tuple[str, ...], rates.Rate],
) -> list[tuple[Result, list[Event]]]:
    """What a block may keep of each of its leaves, with what that leaf communicates."""
    found, selective = [], parallel.kinds[block] == "selective"
    for name, leaf in parallel.speaking.items():
        events = leaf.forward_events(flow) if name.startswith(f"{block}.") else []
        if events:
            held = leaf.held(flow, selective=selective)
            found.append((Result(name, held, collectives.seconds(events, speeds)), events))
    return found


def _kinds(parallel: Parallel) -> list[Kind]:
    """The kinds of the blocks, as a budget knows them."""
    return ["full" if kind == "reentrant" else kind for kind in parallel.kinds.values()]  # type: ignore[misc]
