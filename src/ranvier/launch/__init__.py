"""Launch: who am I, who are the others, how ranks start and end. It alone reads the environment."""

from ranvier.launch.ends import Stop, reported
from ranvier.launch.environment import (
    Ranks,
    age,
    cache,
    environment,
    hosts,
    is_follower,
    keep_compiled,
    ranks,
    triton,
    writable,
)
from ranvier.launch.processes import (
    backends,
    connect,
    die_with_parent,
    fake,
    free_port,
    joined,
    start,
    warm,
)

__all__ = [
    "Ranks",
    "Stop",
    "age",
    "backends",
    "cache",
    "connect",
    "die_with_parent",
    "environment",
    "fake",
    "free_port",
    "hosts",
    "is_follower",
    "joined",
    "keep_compiled",
    "ranks",
    "reported",
    "start",
    "triton",
    "warm",
    "writable",
]
