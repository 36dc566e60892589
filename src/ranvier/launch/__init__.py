"""Launch: who am I, who are the others, how ranks start and end. It alone reads the environment."""

from ranvier.launch.counted import Call, counted
from ranvier.launch.ends import Stop, end_at_once, reported
from ranvier.launch.environment import (
    Failure,
    Ranks,
    age,
    cache,
    environment,
    grow_segments,
    hosts,
    is_follower,
    keep_compiled,
    ranks,
    repeat_products,
    triton,
    writable,
)
from ranvier.launch.nodes import Nodes
from ranvier.launch.processes import (
    backends,
    connect,
    die_with_parent,
    fake,
    free_port,
    joined,
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
    "ranks",
    "repeat_products",
    "reported",
    "start",
    "triton",
    "warm",
    "watched",
    "writable",
]
