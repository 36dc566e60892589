"""Launch: who am I, who are the others, how ranks start and end. It alone reads the environment.

What only runs need is imported when it is asked for: a plan starts sooner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from ranvier.launch.fake_backend import Call, counted
from ranvier.launch.signals import Stop, end_at_once, reported

if TYPE_CHECKING:
    from ranvier.launch.agent import start
    from ranvier.launch.cache_directories import cache, keep_compiled, triton, writable
    from ranvier.launch.heartbeat import Pulse
    from ranvier.launch.process_group import (
        backends,
        connect,
        die_with_parent,
        fake,
        free_port,
        joined,
        local_ranks,
        warm,
    )
    from ranvier.launch.rendezvous import Nodes
    from ranvier.launch.restart_policy import Policy
    from ranvier.launch.watchdog import watched

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
    "rendezvous": ("Nodes",),
    "cache_directories": ("cache", "keep_compiled", "triton", "writable"),
    "process_group": (
        "backends",
        "connect",
        "die_with_parent",
        "fake",
        "free_port",
        "joined",
        "local_ranks",
        "warm",
    ),
    "heartbeat": ("Pulse",),
    "restart_policy": ("Policy",),
    "agent": ("start",),
    "watchdog": ("watched",),
}


def __getattr__(name: str) -> Any:
    """Import what only runs need."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"ranvier.launch.{home}"), name)
    raise AttributeError(f"module 'ranvier.launch' has no attribute {name!r}")
