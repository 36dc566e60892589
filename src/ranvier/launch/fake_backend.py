"""Counts every call of a process group, at the point where torch issues it.

This is below `comm`, so the counts do not depend on its trace or on any prediction.
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
"""Methods of torch's process groups (torch 2.13 renamed three of them): the operation, and the
index of the argument that holds the full tensor."""


@dataclass(frozen=True)
class CommCall:
    """One communication call."""

    op: str
    ranks: tuple[int, ...]
    """Ranks of the group, ascending."""
    bytes: int
    """Size of the full (gathered or reduced) tensor."""


@contextmanager
def count_comm_calls() -> Iterator[list[CommCall]]:
    """Yields a list that collects all calls inside the context, of all threads."""
    from torch.distributed import ProcessGroup, get_process_group_ranks

    calls = list[CommCall]()

    def noting(op: str, whole: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: Any, *arguments: Any, **options: Any) -> Any:
            # Some methods take a list of tensors.
            x = arguments[whole]
            size = sum(one.nbytes for one in (x if isinstance(x, list) else [x]))
            calls.append(CommCall(op, tuple(sorted(get_process_group_ranks(group))), size))
            return call(group, *arguments, **options)

        return noted

    # Save the descriptors of the class, because the result of getattr would not bind to a group.
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
