"""Homes: where a run keeps weights, states and activations, by its settings and what there is."""

from __future__ import annotations

from ranvier.buckets.offload import Homes
from ranvier.config.run import Run
from ranvier.memory.activation_offload import Activations
from ranvier.memory.host import GIB, Arena, host_room
from ranvier.memory.host_pool import Pool
from ranvier.memory.saved_results import Held
from ranvier.models import Decoder
from ranvier.optim.state_tiles import Home
from ranvier.parallel.parallelize import parallel_of


def weights_room(run: Run, ranks: int) -> int | None:
    """Bytes of the host where weights may rest; None: they stay on the device."""
    return host_room(ranks, run.memory.host) if run.memory.weights == "host" else None


def go_home(run: Run, model: Decoder, ranks: int) -> None:
    """Take weights to the host if they are to rest there and do not yet."""
    room, queue = weights_room(run, ranks), parallel_of(model).queue
    if room is not None and queue.homes is None:
        queue.go_home(room)


def states_home(run: Run, ranks: int, homes: Homes | None = None) -> Home:
    """Where states rest. ranks: those that share the host. homes: of weights and gradients."""
    memory = run.memory
    if memory.states == "device":
        return Home(tile=memory.tile)
    room = host_room(ranks, memory.host)
    if homes is not None:
        free = host_room(ranks) - homes.owed
        room = min(free, room - homes.size - homes.owed) if memory.host > 0.0 else free
    return Home(
        memory.states,
        resident=int(memory.resident * GIB),
        room=max(room, 0),
        path=memory.path,
        update="cpu" if memory.update == "cpu" else "device",
        tile=memory.tile,
    )


def place_activations(run: Run, model: Decoder, local_ranks: int) -> None:
    """Have a share of the activations of blocks wait on the host, or none."""
    parallel_of(model).moment.keeping.store = Held()
    if run.memory.activations <= 0.0:
        return
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
