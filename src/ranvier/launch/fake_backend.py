"""Counted: every call of a process group, seen where torch hands it over.

That is below `comm`: who counts here trusts neither its tracer nor any prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PROCESS_GROUP_METHODS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("receive", 0),
}
"""Methods of torch's process groups (torch 2.13 renamed three of them): what they do, and which
argument holds the whole tensor."""


@dataclass(frozen=True)
class CommCall:
    """One call."""

    op: str
    ranks: tuple[int, ...]
    """Of the group, ascending."""
    bytes: int
    """Of the whole (gathered or reduced) tensor."""


@contextmanager
def count_comm_calls() -> Iterator[list[CommCall]]:
    """All calls inside, of all threads."""
    from torch.distributed import ProcessGroup, get_process_group_ranks

    calls = list[CommCall]()

    def noting(op: str, whole: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: Any, *arguments: Any, **options: Any) -> Any:
            x = arguments[whole]
            size = sum(one.nbytes for one in (x if isinstance(x, list) else [x]))
            calls.append(CommCall(op, tuple(sorted(get_process_group_ranks(group))), size))
            return call(group, *arguments, **options)

        return noted

    # As they lie in the class: what getattr gives would not be bound to a group any more.
    before = {
        name: call for name, call in vars(ProcessGroup).items() if name in PROCESS_GROUP_METHODS
    }
    for name in before:
        setattr(
            ProcessGroup, name, noting(*PROCESS_GROUP_METHODS[name], getattr(ProcessGroup, name))
        )
    try:
        yield calls
    finally:
        for name, call in before.items():
            setattr(ProcessGroup, name, call)
