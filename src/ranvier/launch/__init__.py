"""Launch: ranks, process groups, agents and signals; the only package that reads the environment.

Names that only runs need are imported lazily, so that `ranvier plan` starts sooner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ranvier.launch.environment import (
    Failure,
    ProcessInfo,
    cache_compiled_kernels,
    cache_dir,
    environment_without_ranks,
    has_triton,
    is_follower,
    is_writable,
    keep_freed_memory,
    minimal_environment,
    parse_host_list,
    process_age_seconds,
    read_added_options,
    read_compile_errors,
    read_environment,
    read_process_info,
    use_deterministic_cublas,
    use_expandable_segments,
)
from ranvier.launch.fake_backend import CommCall, count_comm_calls
from ranvier.launch.signals import GracefulStop, exit_on_stop_signals, report_errors

if TYPE_CHECKING:
    from ranvier.launch.agent import launch_ranks
    from ranvier.launch.heartbeat import Heartbeat
    from ranvier.launch.process_group import (
        available_backends,
        die_with_parent,
        fake_process_group,
        find_free_port,
        init_process_group,
        join_process_group,
        local_process_infos,
        start_forkserver,
    )
    from ranvier.launch.rendezvous import NodeInfo
    from ranvier.launch.restart_policy import RestartPolicy
    from ranvier.launch.watchdog import watch_for_hangs

__all__ = [
    "CommCall",
    "Failure",
    "GracefulStop",
    "Heartbeat",
    "NodeInfo",
    "ProcessInfo",
    "RestartPolicy",
    "available_backends",
    "cache_compiled_kernels",
    "cache_dir",
    "count_comm_calls",
    "die_with_parent",
    "environment_without_ranks",
    "exit_on_stop_signals",
    "fake_process_group",
    "find_free_port",
    "has_triton",
    "init_process_group",
    "is_follower",
    "is_writable",
    "join_process_group",
    "keep_freed_memory",
    "launch_ranks",
    "local_process_infos",
    "minimal_environment",
    "parse_host_list",
    "process_age_seconds",
    "read_added_options",
    "read_compile_errors",
    "read_environment",
    "read_process_info",
    "report_errors",
    "start_forkserver",
    "use_deterministic_cublas",
    "use_expandable_segments",
    "watch_for_hangs",
]

_HOMES = {
    "rendezvous": ("NodeInfo",),
    "process_group": (
        "available_backends",
        "init_process_group",
        "die_with_parent",
        "fake_process_group",
        "find_free_port",
        "join_process_group",
        "local_process_infos",
        "start_forkserver",
    ),
    "heartbeat": ("Heartbeat",),
    "restart_policy": ("RestartPolicy",),
    "agent": ("launch_ranks",),
    "watchdog": ("watch_for_hangs",),
}


def __getattr__(name: str) -> Any:
    """Imports names that only runs need lazily."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"ranvier.launch.{home}"), name)
    raise AttributeError(f"module 'ranvier.launch' has no attribute {name!r}")
