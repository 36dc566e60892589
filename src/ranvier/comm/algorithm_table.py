"""Table of algorithms: which one the collectives of each axis use, by their bytes.

The setting `comm.algorithm` is a name for all axes, or names by axis and one for all others:

    auto                                    the fastest by measurement
    native                                  the collectives of the backend
    row=ring,depth+data=hierarchical,auto   fused axes are joined by +

`auto` takes rules that were learned from timings (`planner.algorithm_choice`). Without timings CPU
ranks of one node use shared memory, nodes with several CPU ranks each use a hierarchical algorithm,
and all others the backend. All ranks must have the same table: rank 0 makes it, and a run saves it.
Imports no torch.
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ranvier.comm.algorithms.registry import ALGORITHMS, algorithm_names, find_algorithm
from ranvier.comm.algorithms.schedule import OPERATIONS, AxisShape, Operation
from ranvier.config.plan import AXES
from ranvier.errors import PlanError

AUTO = "auto"
NATIVE = "native"
SHARED_MEMORY = "shared_memory"
MESSAGE_OPERATIONS = ("all_to_all", "broadcast", "send", "receive")
"""Operations without schedules, which are native or use shared memory."""
TABLE_OPERATIONS = (*OPERATIONS, *MESSAGE_OPERATIONS)

GRID_BYTES = tuple(2**i for i in range(10, 31))
"""Bytes of the full tensor at which algorithms are compared: 1 KiB to 1 GiB."""
DEFAULT_INTER = ("ring", "doubling", "bruck")
"""Algorithms between nodes that are compared without timings."""
DEFAULT_MARGIN = 0.05
"""Share of the time by which another one must be faster than the ring, whose messages are the
smallest and need no packing."""
DEFAULT_LATENCY = 1e-4
"""Seconds per round between nodes, without timings."""
DEFAULT_BANDWIDTH = 1.25e8
"""Bytes per second that leave a node, without timings: 1 Gbit/s."""


Thresholds = tuple[tuple[int, str], ...]
"""Algorithms and the bytes from which they are used, ascending from 0 bytes."""
ALWAYS_NATIVE: Thresholds = ((0, NATIVE),)


@dataclass(frozen=True)
class MeasuredRule:
    """The algorithms of an operation on axes of some size, learned from timings."""

    op: str
    size: int
    nodes: int
    thresholds: Thresholds


@dataclass(frozen=True)
class AxisRules:
    """The algorithms of all operations of one axis."""

    thresholds: Mapping[str, Thresholds]
    notes: tuple[str, ...] = ()
    """Why `native` is used instead of the algorithm of the setting or of the timings."""

    def algorithm(self, op: str, num_bytes: int) -> str:
        """Returns the algorithm of a collective whose full tensor has `num_bytes`."""
        rules = self.thresholds[op]
        # The common case first, as this runs at every collective.
        if len(rules) == 1:
            return rules[0][1]
        return rules[bisect.bisect_right(rules, num_bytes, key=lambda rule: rule[0]) - 1][1]

    @property
    def algorithms(self) -> set[str]:
        """Names of all algorithms that the axis may use."""
        return {name for rules in self.thresholds.values() for _, name in rules}


@dataclass(frozen=True)
class AlgorithmTable:
    """The algorithms of all axes of a run."""

    default: str = AUTO
    """Algorithm of all axes that are not in `axes`."""
    axes: tuple[tuple[tuple[str, ...], str], ...] = ()
    """Names of axes, and their algorithm."""
    measured: tuple[MeasuredRule, ...] = ()
    source: str = ""
    """Where the rules of `auto` come from."""

    @classmethod
    def parse(cls, text: str) -> AlgorithmTable:
        """Returns the table of a setting."""
        items = [item.strip() for item in text.split(",")]
        by_axis = [_parse_axis_item(item) for item in items if "=" in item]
        others = [item for item in items if item and "=" not in item]
        problems = [
            *_find_item_problems(text, items, others),
            *_find_axis_problems([names for names, _ in by_axis]),
            *_find_name_problems([*(name for _, name in by_axis), *others]),
        ]
        if problems:
            raise PlanError(problems)
        return cls(others[0] if others else AUTO, tuple(by_axis))

    @property
    def setting(self) -> str:
        """The setting that gives this table, apart from measurements."""
        return ",".join([*(f"{'+'.join(names)}={one}" for names, one in self.axes), self.default])

    @property
    def uses_auto(self) -> bool:
        """Whether any axis uses the fastest algorithm by measurement."""
        return AUTO in (self.default, *(name for _, name in self.axes))

    def with_measured(self, rules: Iterable[MeasuredRule], *, source: str) -> AlgorithmTable:
        """Returns the table with rules for `auto`, and where they come from."""
        return replace(self, measured=tuple(rules), source=source)

    def rules_for(
        self, names: tuple[str, ...], shape: AxisShape, *, backend: str, on_host: bool
    ) -> AxisRules:
        """Returns the algorithms of an axis.

        on_host: whether its ranks compute on the CPU, so that those of a node can share memory. An
        algorithm of the setting for all axes that this axis cannot use is replaced by `native`,
        with a note; one for this very axis is an error.
        """
        name = dict(self.axes).get(names, self.default)
        if shape.size == 1 or (name == AUTO and backend == "fake"):
            return AxisRules(dict.fromkeys(TABLE_OPERATIONS, ALWAYS_NATIVE))
        if name == AUTO:
            host_ranks = on_host and backend == "gloo"
            wanted = {op: self._auto_thresholds(op, shape, host_ranks) for op in TABLE_OPERATIONS}
        else:
            wanted = {op: ((0, name),) for op in TABLE_OPERATIONS if has_operation(name, op)}
        limitations = {
            (op, each): find_limitation(each, op, shape, on_host=on_host)
            for op, thresholds in wanted.items()
            for _, each in thresholds
        }
        axis = "+".join(names)
        if name != AUTO and names in dict(self.axes) and all(limitations.values()):
            raise PlanError(f"comm.algorithm has {axis}={name}. {next(iter(limitations.values()))}")
        found = dict.fromkeys(TABLE_OPERATIONS, ALWAYS_NATIVE)
        for op, thresholds in wanted.items():
            found[op] = _merge_thresholds(
                (start, NATIVE if limitations[op, each] else each) for start, each in thresholds
            )
        # A note has the reason of a limitation without its remedy.
        notes = [
            f"{axis} uses native instead of {each}. {reason.partition(' Use ')[0]}"
            for (_, each), reason in limitations.items()
            if reason
        ]
        return AxisRules(found, tuple(dict.fromkeys(notes)))

    def schedules_of(self, names: tuple[str, ...]) -> set[str]:
        """Returns the algorithms with schedules that any line of an axis may use."""
        name = dict(self.axes).get(names, self.default)
        if name != AUTO:
            return {name} - {NATIVE, SHARED_MEMORY}
        chosen = {each for rule in self.measured for _, each in rule.thresholds}
        return chosen - {NATIVE, SHARED_MEMORY}

    def _auto_thresholds(self, op: str, shape: AxisShape, host_ranks: bool) -> Thresholds:
        for rule in self.measured:
            if (rule.op, rule.size, rule.nodes) == (op, shape.size, shape.num_nodes):
                return rule.thresholds
        return default_thresholds(op, shape, host_ranks=host_ranks)

    def describe(self, axes: Mapping[tuple[str, ...], AxisRules]) -> str:
        """Returns one line with the algorithms of axes, by their names."""
        texts: dict[str, list[str]] = {}
        for names, rules in axes.items():
            texts.setdefault(_describe_rules(rules.thresholds), []).append("+".join(names))
        parts = [f"{', '.join(names)} {text}" for text, names in texts.items()]
        source = f" ({self.source})" if self.uses_auto and self.source else ""
        return f"collectives: {'; '.join(parts) or self.setting}{source}"

    def to_json(self) -> dict[str, Any]:
        """Returns the table as JSON values."""
        return {
            "algorithm": self.setting,
            "measured": [
                {**vars(rule), "thresholds": [*map(list, rule.thresholds)]}
                for rule in self.measured
            ],
            "source": self.source,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AlgorithmTable:
        """Returns the table of JSON values."""
        try:
            rules = [
                MeasuredRule(
                    op=str(rule["op"]),
                    size=int(rule["size"]),
                    nodes=int(rule["nodes"]),
                    thresholds=tuple((int(start), str(name)) for start, name in rule["thresholds"]),
                )
                for rule in values["measured"]
            ]
            table = cls.parse(values["algorithm"])
            source = str(values["source"])
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise PlanError(
                f"The saved table of algorithms cannot be read: {error!r:.200}. It has the keys "
                "algorithm, measured and source. Set comm.algorithm instead."
            ) from None
        names = {name for rule in rules for _, name in rule.thresholds}
        problems = [*_find_name_problems(sorted(names))]
        if problems:
            raise PlanError(problems)
        return table.with_measured(rules, source=source)


# ---- algorithms of an axis --------------------------------------------------------------


def is_algorithm(name: str) -> bool:
    """Returns whether there is an algorithm with this name."""
    if name == SHARED_MEMORY:
        return True
    try:
        find_algorithm(name)
    except PlanError:
        return False
    return True


def has_operation(name: str, op: str) -> bool:
    """Returns whether an algorithm implements an operation."""
    return name in (NATIVE, SHARED_MEMORY) or op in find_algorithm(name).operations


def find_limitation(name: str, op: str, shape: AxisShape, *, on_host: bool) -> str:
    """Returns why an axis cannot use an algorithm for an operation; empty if it can."""
    if name == NATIVE:
        return ""
    if SHARED_MEMORY in name.split("/") and not on_host:
        return (
            f"The ranks of a node share no memory. {name} needs CPU ranks that map the memory of "
            "each other. Use native."
        )
    if name == SHARED_MEMORY:
        if shape.num_nodes > 1:
            return (
                f"The axis has ranks on {shape.num_nodes} nodes. {name} needs all of them on one. "
                "Use hierarchical/bruck/shared_memory."
            )
        return ""
    algorithm = find_algorithm(name)
    for operation in OPERATIONS:
        if operation == op:
            return algorithm.limitation(operation, shape)
    return f"{name} has no {op}. It implements {' and '.join(algorithm.operations)}. Use native."


def available_algorithms(
    names: Iterable[str], op: str, shape: AxisShape, *, on_host: bool
) -> list[str]:
    """Returns the algorithms that an axis can use for an operation."""
    return [name for name in names if not find_limitation(name, op, shape, on_host=on_host)]


def choose_by_bytes(choose: Callable[[int], str]) -> Thresholds:
    """Returns the thresholds of a choice that is made for each of GRID_BYTES."""
    choices = [choose(num_bytes) for num_bytes in GRID_BYTES]
    return _merge_thresholds(zip((0, *GRID_BYTES[1:]), choices, strict=True))


def default_thresholds(op: str, shape: AxisShape, *, host_ranks: bool) -> Thresholds:
    """Returns the algorithms of an axis without timings.

    host_ranks: whether it has CPU ranks and Gloo.
    """
    if not host_ranks:
        return ALWAYS_NATIVE
    if shape.num_nodes == 1:
        return ((0, SHARED_MEMORY),)
    if not shape.is_even or shape.ranks_per_node == 1:
        return ALWAYS_NATIVE
    for operation in OPERATIONS:
        if operation == op:
            return _hierarchical_thresholds(operation, shape)
    return ALWAYS_NATIVE


def _hierarchical_thresholds(op: Operation, shape: AxisShape) -> Thresholds:
    """Returns the fastest hierarchical algorithms by closed form: latency and network."""
    names = [f"hierarchical/{inter}/{SHARED_MEMORY}" for inter in DEFAULT_INTER]
    costs = {
        name: find_algorithm(name).cost(op, shape)
        for name in available_algorithms(names, op, shape, on_host=True)
    }

    def seconds(name: str, num_bytes: int) -> float:
        cost = costs[name]
        return cost.rounds * DEFAULT_LATENCY + cost.leaving_node * num_bytes / DEFAULT_BANDWIDTH

    def choose(num_bytes: int) -> str:
        fastest = min(costs, key=lambda name: seconds(name, num_bytes))
        if seconds(names[0], num_bytes) <= (1.0 + DEFAULT_MARGIN) * seconds(fastest, num_bytes):
            return names[0]
        return fastest

    return choose_by_bytes(choose)


def _merge_thresholds(thresholds: Iterable[tuple[int, str]]) -> Thresholds:
    """Returns thresholds without those that change nothing."""
    found: list[tuple[int, str]] = []
    for start, name in thresholds:
        if not found or found[-1][1] != name:
            found.append((start, name))
    return tuple(found)


# ---- a setting --------------------------------------------------------------------------


def _parse_axis_item(item: str) -> tuple[tuple[str, ...], str]:
    """Returns the names of fused axes in the order of the grid, and their algorithm."""
    fused, _, name = item.partition("=")
    names = [each.strip() for each in fused.split("+")]
    # Unknown axes are kept, because all problems of a setting are reported together.
    names.sort(key=lambda each: AXES.index(each) if each in AXES else len(AXES))
    return tuple(names), name.strip()


def _find_item_problems(text: str, items: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    if "" in items:
        yield (
            f"comm.algorithm={text!r} has an empty item. Items are separated by single commas. Use "
            "auto, or remove a comma."
        )
    if len(others) > 1:
        yield (
            f"comm.algorithm={text!r} has {len(others)} algorithms without an axis. Only one can "
            f"be that of all other axes. Remove {others[0]}, or write row={others[0]}."
        )
    elif others and others[0] != items[-1]:
        yield (
            f"comm.algorithm={text!r} has {others[0]} before an axis. The algorithm of all other "
            "axes is the last item. Move it to the end."
        )


def _find_axis_problems(axes: Sequence[tuple[str, ...]]) -> Iterator[str]:
    for name in dict.fromkeys(name for names in axes for name in names):
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1, cutoff=0.0)[0]
            yield (
                f"comm.algorithm has axis {name!r}. The axes of a grid are {', '.join(AXES)}. Use "
                f"{near}."
            )
    for names in dict.fromkeys(axes):
        if len(set(names)) < len(names):
            yield (
                f"comm.algorithm has {'+'.join(names)}. An axis is fused with others only. Name "
                "each of them once."
            )
        if axes.count(names) > 1:
            yield (
                f"comm.algorithm has {axes.count(names)} items for {'+'.join(names)}. An axis has "
                "one algorithm. Remove all but one."
            )


def _find_name_problems(names: Iterable[str]) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if name != AUTO and not is_algorithm(name):
            known = [AUTO, SHARED_MEMORY, *algorithm_names()]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            yield (
                f"comm.algorithm has {name!r}. The algorithms are {AUTO}, {SHARED_MEMORY}, "
                f"{', '.join(ALGORITHMS)}, hierarchical/INTER/INTRA and nvrar/INTRA. Use {near}."
            )


# ---- one line ---------------------------------------------------------------------------


def _describe_rules(thresholds: Mapping[str, Thresholds]) -> str:
    """Returns the algorithms of an axis: `all_gather ring from 1 MiB, else native`."""
    if len(set(thresholds.values())) == 1:
        return _describe_thresholds(next(iter(thresholds.values())))
    texts: dict[str, list[str]] = {}
    for op, rules in thresholds.items():
        if rules != ALWAYS_NATIVE:
            texts.setdefault(_describe_thresholds(rules), []).append(op)
    return ", ".join(f"{_join_words(ops)} {text}" for text, ops in texts.items())


def _describe_thresholds(rules: Thresholds) -> str:
    (_, first), *rest = rules
    later = [f"{name} from {_format_bytes(start)}" for start, name in rest]
    if first == NATIVE and later:
        return f"{', then '.join(later)}, else {NATIVE}"
    return ", then ".join([first, *later])


def _join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _format_bytes(num_bytes: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} bytes"
