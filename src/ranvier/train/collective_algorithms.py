"""The algorithms of collectives of a run: set by the user, or the fastest by measurement."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch

from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.comm.consensus import broadcast_through_store, gather_through_store
from ranvier.comm.transports.shared_memory import read_boot_id
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.planner.algorithm_choice import add_measured_rules, list_groups
from ranvier.planner.cluster import load_measured_cluster


def check_algorithms(algorithm: str, grid: Grid, backend: str) -> None:
    """Raise if `comm.algorithm` is invalid, or names an axis that cannot use its algorithm."""
    table = AlgorithmTable.parse(algorithm)
    for names, _ in table.axes:
        shape = grid.axis(*names).shape
        table.rules_for(names, shape, backend=backend, on_host=backend == "gloo")


def find_nodes(me: ProcessInfo) -> list[int] | None:
    """The node of each rank, the same on all ranks; None if there is only one.

    Communicates: two texts per rank through the store.
    """
    if me.world_size <= me.local_world_size:
        return None
    hosts = gather_through_store("hosts", f"{platform.node()} {read_boot_id()}")
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def make_algorithm_table(algorithm: str, me: ProcessInfo, device: torch.device) -> AlgorithmTable:
    """The algorithms of a run, chosen by rank 0 from the measurements of its machine.

    Communicates: a text through the store.
    """
    table = AlgorithmTable.parse(algorithm)
    if me.world_size == 1 or not table.uses_auto:
        return table
    text = ""
    if me.rank == 0:
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        else:
            name = "cpu"
        groups = list_groups(me.world_size, max(me.local_world_size, 1))
        measured = load_measured_cluster(name)
        table = add_measured_rules(table, measured, groups, host=platform.node())
        text = json.dumps(table.to_json())
    return AlgorithmTable.from_json(json.loads(broadcast_through_store("algorithms", text)))


def describe_algorithms(grid: Grid) -> list[str]:
    """Lines about the algorithms of the axes that a run communicates over."""
    rules = {axis.names: axis.rules for axis in grid.connected_axes if axis.rules is not None}
    if not rules:
        return []
    notes = [note for one in rules.values() for note in one.notes]
    missing = [reason for reason in grid.segments.values() if isinstance(reason, str)]
    notes += [f"no shared memory between ranks, because {reason}" for reason in missing]
    return [grid.algorithms.describe(rules), *dict.fromkeys(notes)]


def find_algorithm_changes(saved: Mapping[str, Any] | None, grid: Grid) -> str:
    """A sentence if a checkpoint was saved with other algorithms; empty if not."""
    own = json.loads(json.dumps(grid.algorithms.to_json()))
    if saved is None or saved == own or grid.world_size == 1:
        return ""
    return (
        f"The checkpoint was saved with comm.algorithm={saved.get('algorithm')!r} "
        f"({saved.get('source') or 'as set'}), and the algorithms of collectives differ now. Sums "
        "are added in another order, so results may not be bit-identical."
    )
