"""Grid: all ranks as one array with seven named axes, and the process groups along them.

The array is explicit, so that placement (which ranks are neighbors) is independent of the names. A
grid without processes knows all sizes and coordinates; the planner and tools use that. Only the
members of a group create it, in the order in which axes are requested; all ranks run the same
program and so request them in the same order.

Nothing is initialized lazily: an NCCL communicator is connected when its group is created, because
connecting it at its first use would block the host in the middle of a step. Creating a group after
`seal_groups` is a bug in the program, and causes a warning.
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.comm.algorithm_table import NATIVE, AlgorithmTable, AxisRules
from ranvier.comm.algorithms.registry import find_algorithm
from ranvier.comm.algorithms.schedule import AxisShape, Level
from ranvier.config.plan import AXES, Plan
from ranvier.errors import CommunicationError, PlanError
from ranvier.system import file_handles
from ranvier.trace import Trace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ranvier.comm.transports.executor import Delay
    from ranvier.comm.transports.runner import CollectiveRunner
    from ranvier.comm.transports.shared_memory import Segment
    from ranvier.comm.transports.symmetric_memory import SymmetricMemoryCommunicator

HOST_CHANNEL = "host"
"""Channel of groups on the host, for small values at any time."""
ORDERS_CHANNEL = "orders"
"""Channel on which ranks wait for the next command of rank 0, without a time limit."""
CONTROL_CHANNEL = "control"
"""Channel on which the hosts of pipeline stages announce the transfers they post."""
GATHER_CHANNEL = "gather"
SCATTER_CHANNEL = "scatter"
WEIGHT_CHANNELS = (GATHER_CHANNEL, SCATTER_CHANNEL)
"""Channels of gathers of weights and of reductions of their gradients."""
GLOO_CHANNELS = (HOST_CHANNEL, ORDERS_CHANNEL, CONTROL_CHANNEL)
"""Channels that always use Gloo, regardless of the backend of the others."""
LONG_TIMEOUT_CHANNELS = ("forward", "backward", ORDERS_CHANNEL, CONTROL_CHANNEL)
"""Channels with receives that are posted long before their messages; the caller, not the group,
limits the time of their waits."""
MESSAGE_CHANNELS = ("forward", "backward", *GLOO_CHANNELS)
"""Channels without collectives of tensors, for which the backend is enough."""
WEEK_SECONDS = 7 * 24 * 3600.0
GLOO_HANDLES = 6
"""File handles of a Gloo group, in addition to one per rank."""
NCCL_HANDLES = 64
"""File handles of an NCCL communicator, which connects a rank to few others."""


@dataclass(frozen=True)
class Communicator:
    """A group that was created, and how long its creation took."""

    names: tuple[str, ...]
    """Axes of its ranks."""
    channel: str
    size: int
    backend: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Axis:
    """A line of ranks: one named axis, several fused into one, or consecutive ranks of one."""

    names: tuple[str, ...]
    size: int
    index: int
    """Index of this rank on the axis."""
    ranks: tuple[int, ...]
    """Global ranks, in order."""
    order: tuple[int, ...]
    """Position of each of them in the process group, because c10d sorts the ranks of a group."""
    shape: AxisShape
    """Number of ranks, and the node of each."""
    group: ProcessGroup | None
    group_name: str
    trace: Trace
    channel: str = ""
    """Distinguishes communicators over the same ranks."""
    rules: AxisRules | None = None
    """Algorithms of its collectives; None without processes."""
    runner: CollectiveRunner | None = None
    """Runs the collectives that the backend does not."""

    def __str__(self) -> str:
        return "·".join(self.names) or "none"

    @property
    def crosses_nodes(self) -> bool:
        """Whether its ranks are on several nodes."""
        return self.shape.num_nodes > 1


@dataclass(eq=False)
class Grid:
    """The ranks of a plan, seen from one of them."""

    degrees: Mapping[str, int]
    rank: int = -1
    """Global rank of this process; -1 takes it from the process group, or 0 without processes."""
    order: Sequence[int] | None = None
    """Global rank of each grid position, innermost axis fastest; None means 0, 1, 2, ..."""
    ranks_per_node: int = 8
    node_of_rank: Sequence[int] | None = None
    """Node of each global rank; None means that `ranks_per_node` consecutive ranks share a node."""
    connected: bool = False
    """Whether to create process groups (needs an initialized default process group)."""
    timeout_seconds: float = 600.0
    trace: Trace = field(default_factory=Trace)
    groups: dict[tuple[tuple[int, ...], str], ProcessGroup] = field(default_factory=dict)
    """Groups by ranks and channel; grids of one process may share them."""
    rendezvous: bool | None = None
    """Whether stages agree on each transfer before posting it (see `comm.p2p`). None means yes with
    NCCL, whose transfers are kernels that spin until both sides are posted."""
    algorithms: AlgorithmTable = field(default_factory=AlgorithmTable)
    """Algorithms of collectives; by default the fastest that is known for each (`comm.algorithms`).
    """
    segments: dict[tuple[int, ...], Segment | str] = field(default_factory=dict)
    """Shared memory by the ranks of a host that share it, or why there is none; grids of one
    process may share it."""
    memory_verdicts: dict[tuple[int, ...], bool] = field(default_factory=dict)
    """Whether the ranks of every node share memory, by the node of each rank; grids of one process
    may share it as well."""
    share_gpu: bool = False
    """Whether several ranks may share a GPU (`launch.share_gpu`)."""
    message_delay: Delay | None = None
    """Delays the messages of schedules, to test algorithms on slow networks."""
    communicators: list[Communicator] = field(default_factory=list)
    """Groups that this grid has created."""
    debug: bool = False
    """Whether to compare every collective and every model input between ranks before it runs
    (slow)."""

    def __post_init__(self) -> None:
        _check_axis_names(self.degrees)
        self.trace.check_collectives |= self.debug
        bad = [f"{axis}={size}" for axis, size in self.degrees.items() if size < 1]
        if bad:
            raise PlanError(
                f"{', '.join(bad)} is invalid on a grid. A degree must be at least 1. Resolve the "
                "plan first."
            )
        self.degrees = {axis: self.degrees.get(axis, 1) for axis in AXES}
        shape = tuple(self.degrees.values())
        world = math.prod(shape)
        # `ranks[position]` is the global rank at each grid position, innermost axis fastest.
        if self.order is None:
            ranks = np.arange(world)
        else:
            ranks = np.asarray(self.order)
        if sorted(ranks.tolist()) != list(range(world)):
            raise PlanError(
                f"The rank order has {len(set(ranks.tolist()))} different entries. "
                f"It must be a permutation of the {world} ranks. Use None for 0, 1, 2, ..."
            )
        if self.rank == -1:
            self.rank = self._process_rank()
        if self.connected and self.rank != self._process_rank():
            raise PlanError(
                f"rank={self.rank}, but this process is rank {self._process_rank()}. A "
                "connected grid uses the rank of its process. Remove rank."
            )
        if not 0 <= self.rank < world:
            raise PlanError(
                f"rank={self.rank} is not on a grid of {world} ranks. Ranks are numbered from 0. "
                f"Use a rank less than {world}, or larger degrees."
            )
        self.ranks = ranks.reshape(shape)
        place = np.argwhere(self.ranks == self.rank)[0]
        self.index = {axis: int(i) for axis, i in zip(AXES, place, strict=True)}
        self._axes: dict[tuple[Any, ...], Axis] = {}
        self._runners: dict[tuple[tuple[int, ...], str], tuple[AxisRules, CollectiveRunner]] = {}
        """Algorithms and runners by ranks in their order, and channel."""
        self._is_sealed = False
        if self.rendezvous is None:
            self.rendezvous = self.backend == "nccl"

    def _process_rank(self) -> int:
        """Returns the global rank of this process, or 0 without processes."""
        if not self.connected:
            return 0
        # Imported here, because the planner uses unconnected grids without torch.
        from torch import distributed

        return distributed.get_rank()

    @classmethod
    def from_plan(cls, plan: Plan, **options: Any) -> Grid:
        """Return the grid of a resolved plan, with ranks placed in the plan's order."""
        # Number the ranks in the axis order of the plan, outermost first, then transpose to the
        # order of AXES.
        if plan.rank_order and "order" not in options:
            shape = [plan.degrees[axis] for axis in plan.axis_order]
            places = [plan.axis_order.index(axis) for axis in AXES]
            ranks = np.arange(plan.world_size).reshape(shape).transpose(places)
            options = {**options, "order": ranks.reshape(-1).tolist()}
        return cls(plan.degrees, **options)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.ranks.size)

    def node_of(self, rank: int) -> int:
        """Returns the node of a global rank."""
        if self.node_of_rank is not None:
            return self.node_of_rank[rank]
        return rank // self.ranks_per_node

    def axis(self, *names: str, share: Mapping[str, int] | None = None, channel: str = "") -> Axis:
        """Returns the axis of these names, fused, outermost first.

        share: number of consecutive ranks to take of these axes (ranks that hold the same shard).
        channel: a different name creates a second communicator over the same ranks. Communicates:
        with its members, at the first request on a connected grid.
        """
        _check_axis_names([*names, *(share or {})])
        # Axes of size 1 are dropped, so that requests for the same ranks share one group.
        counts = {name: self.degrees[name] for name in AXES if name in names} | dict(share or {})
        counts = {name: counts[name] for name in AXES if counts.get(name, 1) > 1}
        key = (tuple(counts.items()), channel)
        if key not in self._axes:
            self._axes[key] = self._make_axis(counts, channel)
        return self._axes[key]

    def world_axis(self, *, channel: str = "") -> Axis:
        """Returns the axis of all ranks in numerical order, regardless of placement.

        The index on this axis is the global rank. Communicates: as `axis`.
        """
        key = ("everyone", channel)
        if key not in self._axes:
            counts = {name: size for name, size in self.degrees.items() if size > 1}
            self._axes[key] = self._axis_of_ranks(tuple(counts), [*range(self.world_size)], channel)
        return self._axes[key]

    def axis_without_group(self, *names: str) -> Axis:
        """Return the axis of these names without a communicator, for its size and index."""
        _check_axis_names(names)
        counts = {n: self.degrees[n] for n in AXES if n in names and self.degrees[n] > 1}
        return self._axis_of_ranks(tuple(counts), self._member_ranks(counts), None)

    def axis_subset(self, name: str, indices: Sequence[int]) -> Axis:
        """Returns an axis of some of the ranks of an axis; on other ranks, of that rank alone.

        All ranks must call this, including those that are not members: each creates a group, so
        that all have created equally many. Communicates: with its members, at the first request.
        """
        if len(indices) == self.degrees[name]:
            return self.axis(name)
        key = (name, tuple(indices))
        if key not in self._axes:
            line = self._member_ranks({name: self.degrees[name]})
            some = [line[i] for i in indices]
            mine = self.rank in some
            if not mine and self.connected and ((self.rank,), str(key)) not in self.groups:
                self.groups[(self.rank,), str(key)] = self._make_group([self.rank], (name,), "")
            if not mine and self.connected and len(some) > 1:
                alone = AxisShape.of_nodes([self.node_of(self.rank)])
                self._level_groups((name,), [self.rank], alone, "")
            self._axes[key] = self._axis_of_ranks((name,), some if mine else [self.rank], "")
        return self._axes[key]

    def strided_axis(self, name: str, *, stride: int) -> Axis:
        """Returns every `stride`-th rank of an axis, among them this one.

        Together with `axis(share={name: stride})`, the consecutive ranks, it factors an axis.
        Communicates: as `axis`.
        """
        assert self.degrees[name] % stride == 0, f"{stride} does not divide {self.degrees}"
        key = (name, stride, "strided")
        if key not in self._axes:
            line = self._member_ranks({name: self.degrees[name]})
            ranks = line[line.index(self.rank) % stride :: stride]
            self._axes[key] = self._axis_of_ranks((name,) if len(ranks) > 1 else (), ranks, "")
        return self._axes[key]

    def _make_axis(self, counts: Mapping[str, int], channel: str) -> Axis:
        assert all(self.degrees[name] % n == 0 for name, n in counts.items()), (
            f"{dict(counts)} does not divide {self.degrees}"
        )
        return self._axis_of_ranks(tuple(counts), self._member_ranks(counts), channel)

    def _axis_of_ranks(self, names: tuple[str, ...], ranks: list[int], channel: str | None) -> Axis:
        """Return an axis of these ranks with their group; without a group if `channel` is None."""
        # c10d sorts the ranks of a group, so axes with the same ranks in another order share the
        # group.
        places = {rank: place for place, rank in enumerate(sorted(ranks))}
        shape = AxisShape.of_nodes([self.node_of(rank) for rank in ranks])
        group = None
        if self.connected and len(ranks) > 1 and channel is not None:
            key = (tuple(sorted(ranks)), channel)
            if key not in self.groups:
                self.groups[key] = self._make_group(ranks, names, channel)
            group = self.groups[key]
        rules = runner = None
        if group is not None and channel is not None:
            # Axes of the same ranks number their collectives together, because ranks, channel and
            # number identify a message.
            line = (tuple(ranks), channel)
            if line not in self._runners:
                self._runners[line] = self._connect_algorithms(names, ranks, shape, channel, group)
            rules, runner = self._runners[line]
        return Axis(
            names=names,
            size=len(ranks),
            index=ranks.index(self.rank),
            ranks=tuple(ranks),
            order=tuple(places[rank] for rank in ranks),
            shape=shape,
            group=group,
            group_name=group.group_name if group is not None else "",
            trace=self.trace,
            channel=channel or "",
            rules=rules,
            runner=runner,
        )

    def _connect_algorithms(
        self,
        names: tuple[str, ...],
        ranks: list[int],
        shape: AxisShape,
        channel: str,
        group: ProcessGroup,
    ) -> tuple[AxisRules, CollectiveRunner]:
        """Returns the algorithms of an axis, and what runs those that the backend does not have.

        Communicates: with its members, if an algorithm needs groups of some of them.
        """
        # Channels on the host, and those of messages, use only the backend.
        is_plain = channel in MESSAGE_CHANNELS
        table = AlgorithmTable(NATIVE) if is_plain else self.algorithms
        segment = None if is_plain else self._local_segment()
        shares_memory = not is_plain and self._shares_memory(segment)
        own_node = shape.members[self.node_of(self.rank)]
        rules = table.rules_for(names, shape, backend=self.backend, on_host=shares_memory)
        from torch import cuda, device

        from ranvier.comm.transports.executor import RankGroup, ScheduleExecutor
        from ranvier.comm.transports.runner import CollectiveRunner
        from ranvier.comm.transports.shared_memory import SharedMemoryGroup

        near = None
        if segment is not None and len(own_node) > 1:
            neighbors = [ranks[index] for index in own_node]
            # Two channels of the same ranks, and two orders of them, are different groups.
            key = _stable_hash(f"{ranks} {channel}")
            near = SharedMemoryGroup(segment, neighbors, key, self.timeout_seconds)
        members = RankGroup(
            ranks=tuple(ranks),
            index=ranks.index(self.rank),
            places=tuple(sorted(ranks).index(rank) for rank in ranks),
            group=group,
            levels={} if is_plain else self._level_groups(names, ranks, shape, channel),
            shared_memory=near,
            delay=self.message_delay,
        )
        runner = CollectiveRunner(
            shape,
            members.index,
            shared_memory=near if shape.num_nodes == 1 else None,
            executor=ScheduleExecutor(members),
            symmetric_memory=self._symmetric_memory(names, ranks, group, rules),
        )
        if self.backend == "nccl":
            # NCCL connects a pair of ranks at its first message, so it is sent here and not in the
            # middle of a step.
            for name in sorted(rules.algorithms - {NATIVE}):
                runner.warm_up(name, device("cuda", cuda.current_device()))
        return rules, runner

    def _symmetric_memory(
        self, names: tuple[str, ...], ranks: list[int], group: ProcessGroup, rules: AxisRules
    ) -> SymmetricMemoryCommunicator | None:
        """Returns the memory that the GPUs of an axis share, if its algorithms use it.

        Communicates: with its members.
        """
        if self.backend != "nccl" or not rules.algorithms & {"direct", "one_shot"}:
            return None
        # torch counts what a process shares, so all lines of an axis must share memory, or none.
        nodes = np.vectorize(self.node_of)(self.ranks)
        places = tuple(AXES.index(name) for name in names)
        if (nodes.min(places) != nodes.max(places)).any():
            return None
        from torch import cuda, device

        from ranvier.comm.transports.symmetric_memory import (
            SymmetricMemoryCommunicator,
            availability,
        )

        here = device("cuda", cuda.current_device())
        if availability(group, here, share_gpu=self.share_gpu):
            return None
        positions = {rank: place for place, rank in enumerate(sorted(ranks))}
        return SymmetricMemoryCommunicator(
            group,
            here,
            order=[positions[rank] for rank in ranks],
            timeout_seconds=self.timeout_seconds,
        )

    def _local_segment(self) -> Segment | None:
        """Returns the shared memory of this rank's host; None if there is none.

        Communicates: with the ranks of this node, at the first request.
        """
        if self.backend != "gloo":
            return None
        node = self.node_of(self.rank)
        local = tuple(rank for rank in range(self.world_size) if self.node_of(rank) == node)
        if len(local) == 1:
            return None
        from ranvier.comm.transports.shared_memory import Segment, connect_segments

        if local not in self.segments:
            self.segments[local] = connect_segments(self.rank, local, *_store_functions(local))
        found = self.segments[local]
        return found if isinstance(found, Segment) else None

    def _shares_memory(self, segment: Segment | None) -> bool:
        """Returns whether the ranks of every node share memory, the same on all ranks.

        Communicates: a text per rank through the store, at the first request on several nodes.
        """
        if self.backend != "gloo":
            return False
        nodes = tuple(self.node_of(rank) for rank in range(self.world_size))
        if len({*nodes}) == 1:
            return segment is not None
        if nodes not in self.memory_verdicts:
            publish, look_up = _store_functions(tuple(range(self.world_size)))
            is_alone = nodes.count(self.node_of(self.rank)) == 1
            publish(f"memory {self.rank}", "yes" if segment is not None or is_alone else "no")
            if self.rank == 0:
                answers = {look_up(f"memory {rank}") for rank in range(self.world_size)}
                publish("verdict", "yes" if answers == {"yes"} else "no")
            self.memory_verdicts[nodes] = look_up("verdict") == "yes"
        return self.memory_verdicts[nodes]

    def _level_groups(
        self,
        names: tuple[str, ...],
        ranks: list[int],
        shape: AxisShape,
        channel: str,
    ) -> dict[Level, ProcessGroup]:
        """Returns the groups of this rank inside and between nodes that algorithms need.

        All lines of an axis create them, also those that use other algorithms, so that all ranks
        have created equally many.
        """
        found: dict[Level, ProcessGroup] = {}
        schedules = [find_algorithm(name) for name in self.algorithms.schedules_of(names)]
        levels: tuple[Level, ...] = ("intra", "inter")
        for level in levels:
            if not any(one.needs_group(level) for one in schedules):
                continue
            members = [self.rank]
            if shape.is_even:
                members = [ranks[i] for i in shape.group(level, ranks.index(self.rank))]
            # Axes that share a level must not share its group, as their threads would mix calls.
            key = (tuple(sorted(members)), f"{ranks} {channel}/{level}")
            if key not in self.groups:
                self.groups[key] = self._make_group(members, names, key[1])
            found[level] = self.groups[key]
        return found

    def _member_ranks(self, counts: Mapping[str, int]) -> list[int]:
        """Returns the global ranks that differ from this one only along `counts`, in fused
        order."""
        # Along an axis of `counts` take the aligned block of ranks that contains this one.
        window = []
        for axis in AXES:
            if axis in counts:
                start = self.index[axis] // counts[axis] * counts[axis]
            else:
                start = self.index[axis]
            window.append(slice(start, start + counts.get(axis, 1)))
        return [int(rank) for rank in self.ranks[tuple(window)].reshape(-1)]

    @property
    def connected_axes(self) -> list[Axis]:
        """The axes with a group that were requested so far."""
        return [axis for axis in self._axes.values() if axis.group is not None]

    @property
    def backend(self) -> str:
        """Backend of all groups except those on the host; empty without processes."""
        if not self.connected:
            return ""
        from torch import distributed

        return str(distributed.get_backend())

    def seal_groups(self) -> None:
        """Declares that all groups that the run will use exist; later ones cause a warning."""
        self._is_sealed = True

    def _make_group(self, ranks: list[int], names: tuple[str, ...], channel: str) -> ProcessGroup:
        """Create and connect a group of these ranks. Communicates: with them."""
        from torch import cuda, device, distributed, zeros

        if self._is_sealed:
            warnings.warn(
                f"A group over {'·'.join(names)} ({channel or 'collectives'}) is created in the "
                "middle of a run. All groups should be created at its start, because creating one "
                "blocks its ranks. Request that axis before Grid.seal_groups().",
                stacklevel=4,
            )
        patient = channel in LONG_TIMEOUT_CHANNELS
        if patient:
            seconds = max(self.timeout_seconds, WEEK_SECONDS)
        else:
            seconds = self.timeout_seconds
        on_host = channel in GLOO_CHANNELS
        nccl = self.backend == "nccl" and not on_host and len(ranks) > 1
        if nccl:
            here = device("cuda", cuda.current_device())
        else:
            here = None
        # Running out of file handles inside c10d gives unclear errors, so check first.
        if len(ranks) > 1:
            if nccl:
                count = NCCL_HANDLES
            else:
                count = len(ranks) + GLOO_HANDLES
            file_handles.require_handles(
                count, f"Creating a group of {len(ranks)} ranks over {'·'.join(names)}"
            )
        begun = time.perf_counter()
        # Only members take part (O(1) calls per rank at any world size). c10d names such a group by
        # its ranks and the number of groups of the process, so members must have created equally
        # many groups before. With a device_id NCCL connects immediately, and point-to-point
        # transfers do not need separate communicators.
        try:
            group = distributed.new_group(
                ranks,
                backend="gloo" if on_host else None,
                timeout=datetime.timedelta(seconds=seconds),
                use_local_synchronization=True,
                device_id=here,
            )
        except RuntimeError as error:
            if file_handles.is_shortage(error):
                raise PlanError(file_handles.describe_shortage()) from error
            raise CommunicationError(
                f"Rank {self.rank} could not create a group with ranks {ranks}: "
                f"{str(error).splitlines()[0]}. All of them must be running. Check the messages of "
                "the other ranks first."
            ) from error
        assert isinstance(group, distributed.ProcessGroup), (self.rank, ranks)
        if nccl and not any(one.backend == "nccl" for one in self.communicators):
            # The first collective loads NCCL's kernels, which waits for all work on the device, so
            # it runs here and not in the middle of a step.
            distributed.all_reduce(zeros(1, device=here), group=group)
            cuda.synchronize()
        if len(ranks) > 1:
            if on_host:
                backend = "gloo"
            else:
                backend = self.backend
            taken = time.perf_counter() - begun
            self.communicators.append(Communicator(names, channel, len(ranks), backend, taken))
        return group


def _store_functions(
    ranks: tuple[int, ...],
) -> tuple[Callable[[str, str], None], Callable[[str], str]]:
    """Returns functions that publish a text to the ranks of a host, and look one up."""
    from torch import distributed

    store = distributed.distributed_c10d._get_default_store()
    # Each rank counts its own calls, which are equally many on all ranks.
    prefix = f"ranvier/segments/{_stable_hash(str(ranks)):x}"
    times = store.add(f"{prefix}/{distributed.get_rank()}", 1)

    def publish(name: str, text: str) -> None:
        store.set(f"{prefix}/{times}/{name}", text)

    def look_up(name: str) -> str:
        text: str = store.get(f"{prefix}/{times}/{name}").decode()
        return text

    return publish, look_up


def _stable_hash(text: str) -> int:
    """Returns 63 bits that are the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _check_axis_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1, cutoff=0.0)[0]
            raise PlanError(
                f"{name!r} is not an axis. The axes are {', '.join(AXES)}. Use {near!r}."
            )
