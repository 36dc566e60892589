"""Homes: where a run keeps weights and states, from its settings and what the host has."""

from __future__ import annotations

from ranvier.comm.arena import GIB, host_room
from ranvier.optim.store import Home
from ranvier.run import Run


def weights_room(run: Run, ranks: int) -> int | None:
    """Bytes of the host where weights may rest; None: they stay on the device."""
    return host_room(ranks, run.memory.host) if run.memory.weights == "host" else None


def states_home(run: Run, ranks: int) -> Home:
    """Where states rest. ranks: those that share the host."""
    memory = run.memory
    if memory.states == "device":
        return Home(tile=memory.tile)
    return Home(
        memory.states,
        resident=int(memory.resident * GIB),
        room=host_room(ranks, memory.host),
        path=memory.path,
        update="cpu" if memory.update == "cpu" else "device",
        tile=memory.tile,
    )
