"""Counts every call of a process group, at the point where torch issues it, and completes the fake
one.

Counting is below `comm`, so the counts do not depend on its trace or on any prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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

ALL_TO_ALL_METHODS = frozenset(
    name for name, (op, _) in PROCESS_GROUP_METHODS.items() if op == "all_to_all"
)


@dataclass(frozen=True)
class CommCall:
    """One communication call."""

    op: str
    ranks: tuple[int, ...]
    """Ranks of the group, ascending."""
    bytes: int
    """Size of the full (gathered or reduced) tensor."""


@contextmanager
def patch_process_groups(
    patch: Callable[[str, Callable[..., Any]], Callable[..., Any]], names: Collection[str]
) -> Iterator[None]:
    """Replaces methods of process groups inside the context.

    Args:
        patch: Returns the new method, for the name of a method and the method.
        names: Names of the methods; those that this version of torch does not have are ignored.
    """
    from torch.distributed import ProcessGroup

    # Save the descriptors of the class, because the result of getattr would not bind to a group.
    before = {name: call for name, call in vars(ProcessGroup).items() if name in names}
    for name in before:
        setattr(ProcessGroup, name, patch(name, getattr(ProcessGroup, name)))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(ProcessGroup, name, call)


@contextmanager
def count_comm_calls() -> Iterator[list[CommCall]]:
    """Yields a list that collects all calls inside the context, of all threads."""
    from torch.distributed import get_process_group_ranks

    calls = list[CommCall]()

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        op, whole = PROCESS_GROUP_METHODS[name]

        def noted(group: Any, *arguments: Any, **options: Any) -> Any:
            # Some methods take a list of tensors.
            x = arguments[whole]
            size = sum(one.nbytes for one in (x if isinstance(x, list) else [x]))
            calls.append(CommCall(op, tuple(sorted(get_process_group_ranks(group))), size))
            return call(group, *arguments, **options)

        return noted

    with patch_process_groups(noting, PROCESS_GROUP_METHODS):
        yield calls


@contextmanager
def allow_empty_inputs() -> Iterator[None]:
    """Lets a rank of the fake process group receive in an all-to-all without sending anything.

    The fake process group fills outputs with its input, and raises an error if that is empty.
    """

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def all_to_all(
            group: Any, output: Any, x: Any, receive: list[int], *rest: Any, **options: Any
        ) -> Any:
            if x.shape[0] == 0:
                output, receive = output[:0], [0] * len(receive)
            return call(group, output, x, receive, *rest, **options)

        return all_to_all

    with patch_process_groups(wrap, ALL_TO_ALL_METHODS):
        yield
