"""Launch: who am I, who are the others, how ranks start and end. It alone reads the environment.

What only runs need is imported when it is asked for: a plan starts sooner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ranvier.launch.counted import Call, counted
from ranvier.launch.ends import Stop, end_at_once, reported
from ranvier.launch.environment import (
    Failure,
    Ranks,
    age,
    environment,
    grow_segments,
    hosts,
    is_follower,
    keep_freed_memory,
    ranks,
    repeat_products,
    start_environment,
)

if TYPE_CHECKING:
    from ranvier.launch.nodes import Nodes
    from ranvier.launch.places import cache, keep_compiled, triton, writable
    from ranvier.launch.processes import (
        backends,
        connect,
        die_with_parent,
        fake,
        free_port,
        joined,
        local_ranks,
        warm,
    )
    from ranvier.launch.pulse import Pulse
    from ranvier.launch.restarts import Policy
    from ranvier.launch.supervisor import start
    from ranvier.launch.watch import watched

__all__ = [
    "Call",
    "Failure",
    "Nodes",
    "Policy",
    "Pulse",
    "Ranks",
    "Stop",
    "age",
    "backends",
    "cache",
    "connect",
    "counted",
    "die_with_parent",
    "end_at_once",
    "environment",
    "fake",
    "free_port",
    "grow_segments",
    "hosts",
    "is_follower",
    "joined",
    "keep_compiled",
    "keep_freed_memory",
    "local_ranks",
    "ranks",
    "repeat_products",
    "reported",
    "start",
    "start_environment",
    "triton",
    "warm",
    "watched",
    "writable",
]

_HOMES = {
    "nodes": ("Nodes",),
    "places": ("cache", "keep_compiled", "triton", "writable"),
    "processes": (
        "backends",
        "connect",
        "die_with_parent",
        "fake",
        "free_port",
        "joined",
        "local_ranks",
        "warm",
    ),
    "pulse": ("Pulse",),
    "restarts": ("Policy",),
    "supervisor": ("start",),
    "watch": ("watched",),
}


def __getattr__(name: str) -> Any:
    """Import what only runs need."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"ranvier.launch.{home}"), name)
    raise AttributeError(f"module 'ranvier.launch' has no attribute {name!r}")
