"""Cluster description: devices, the links between them, and measurements.

Numbers come from data sheets (`devices.toml` in this directory, each with its source) or from a
file that `ranvier measure` writes. A measurement takes precedence over a data sheet. Rates are
bytes or FLOPs per second, sizes are bytes, times are seconds. The rate of a link is for one
direction.

`load_measured_cluster` reads the cluster file of this machine, which `ranvier measure` writes.
"""

from __future__ import annotations

import difflib
import itertools
import math
import platform
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ranvier import launch
from ranvier.errors import PlanError

DATA_SHEETS = Path(__file__).with_name("devices.toml")
NO_RATES: Mapping[str, float] = MappingProxyType({})
TYPICAL_EFFICIENCY: Mapping[str, float] = MappingProxyType(
    {"bf16": 0.82, "fp16": 0.82, "fp8": 0.74}
)
"""Share of the peak that the best matmul reaches on devices without measurements: the mean of the
measured devices."""


@dataclass(frozen=True)
class MatmulRate:
    """Measured rate of a matmul (m, k) · (k, n)."""

    m: int
    n: int
    k: int
    dtype: str
    rate: float
    """FLOPs per second."""
    ranks: int = 1
    """Number of concurrent ranks on the machine, which share the cores on a CPU."""
    kind: str = "y"
    """y: x Wᵀ; dx: dy W; dw: dyᵀ x. Libraries use different kernels for them."""


@dataclass(frozen=True)
class AttentionRate:
    """Measured rate of fused causal attention."""

    seq: int
    head_dim: int
    dtype: str
    forward: float
    """FLOPs per second, counting half of the square (causal)."""
    backward: float
    ranks: int = 1


@dataclass(frozen=True)
class MeasuredRate:
    """A rate of the whole device, measured with a number of concurrent ranks."""

    kind: str
    """memory (bytes), adam (parameters on the host), to_device, to_host (bytes), launch (seconds
    per empty kernel), block, block8 (host seconds per block that is not compiled)."""
    value: float
    ranks: int = 1


@dataclass(frozen=True)
class MeasuredCollective:
    """A measured collective of `groups` concurrent groups of `size` ranks.

    seconds = latency + wire bytes / bandwidth. The wire carries (size-1)/size of the full tensor,
    twice as much in an all-reduce, and all of it in a message (op `send`).
    """

    op: str
    size: int
    latency: float
    bandwidth: float
    groups: int = 1
    """Concurrent groups inside a node."""
    nodes: int = 1
    """Nodes that the group covers."""
    algorithm: str = "native"
    """`native` is that of the backend."""


@dataclass(frozen=True)
class CollectiveTiming:
    """Measured time of one collective with one algorithm and one size of its tensor."""

    op: str
    algorithm: str
    size: int
    """Ranks of the group."""
    nodes: int
    """Nodes that the group covers."""
    bytes: int
    """Bytes of the full (gathered or reduced) tensor."""
    seconds: float
    groups: int = 1
    """Concurrent groups inside a node."""


@dataclass(frozen=True)
class Efficiency:
    """Efficiencies of a device relative to its data sheet: the only four fitted numbers."""

    matmul: float = 0.95
    """Share of the best measured matmul that large 16-bit matmuls reach in a long run."""
    narrow: float = 0.95
    """The same for 8-bit matmuls."""
    memory: float = 0.6
    """Share of the bandwidth that memory-bound kernels reach."""
    link: float = 0.94
    """Share of the rate of a link inside a node that collectives reach."""


@dataclass(frozen=True)
class Device:
    """One accelerator, as a rank sees it."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    peak: Mapping[str, float]
    """Dense peak FLOPs per second by dtype: fp32, fp16, bf16, fp8."""
    measured: Mapping[str, float] = field(default_factory=lambda: NO_RATES)
    """Best measured rate of a matmul, by dtype."""
    launch: float = 4e-6
    """Seconds per kernel launch in eager mode."""
    cores: int = 132
    """Streaming multiprocessors: the number of matmul tiles computed at a time."""
    generation: int = 90
    """Compute capability in NVIDIA's numbering: 70 Volta, 80 Ampere, 90 Hopper, 100 Blackwell."""
    reach: Efficiency = Efficiency()
    products: tuple[MatmulRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    rates: tuple[MeasuredRate, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other names of the same device that runs and drivers use."""
    source: str = ""

    # Mappings are not hashable, and clusters are keys of many caches. A cheap hash is enough,
    # because equality still compares all fields.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.reach))

    def best_matmul_rate(self, dtype: str) -> float:
        """Returns the FLOPs per second of the best matmul: measured, or the typical share of the
        peak.
        """
        # Both 16-bit dtypes run at the same rate on tensor cores, so one can replace the other.
        alike = ("bf16", "fp16") if dtype in ("bf16", "fp16") else (dtype,)
        found = [self.measured[name] for name in alike if name in self.measured]
        peak = max((self.peak[name] for name in alike if name in self.peak), default=0.0)
        return max(found, default=TYPICAL_EFFICIENCY.get(dtype, 0.8) * peak) or min(
            self.peak.values()
        )

    def measured_rate(self, kind: str, *, ranks: int = 1, usual: float = 0.0) -> float:
        """Returns a measured rate for the nearest number of ranks; `usual` if it was not
        measured.
        """
        rows = [row for row in self.rates if row.kind == kind]
        if rows:
            return nearest_rate(rows, ranks).value
        return usual


@dataclass(frozen=True)
class Link:
    """An interconnect between devices."""

    bandwidth: float
    """Bytes per second of a device (inside a node) or of a whole node (between nodes)."""
    latency: float
    """Seconds per hop."""
    wide: float = 0.0
    """Bytes per second between only two devices, if it differs; 0 means the same."""
    collective: float = 1.0
    """Measured share of the bandwidth that collectives reach; messages use all of it."""


@dataclass(frozen=True)
class HostSpec:
    """The host, as seen by one device."""

    memory: float = 128e9
    """Bytes of host memory."""
    to_device: float = 25e9
    to_host: float = 25e9
    adam: float = 1e9
    """Parameters per second that its processors update."""


@dataclass(frozen=True)
class Cluster:
    """A number of nodes with equal devices."""

    name: str
    device: Device
    per_node: int
    """Devices per node."""
    link: Link
    """Inside a node."""
    network: Link
    """Between nodes. Its bandwidth is per node and shared by all groups that communicate."""
    nodes: int = 1
    host: HostSpec = HostSpec()
    collectives: tuple[MeasuredCollective, ...] = ()
    """Measurements; they replace `link` and `network` for groups of the same shape."""
    timings: tuple[CollectiveTiming, ...] = ()
    """Times of algorithms of collectives, from which the fastest is chosen."""
    straggle: float = 0.01
    """Slowdown of a step per doubling of the nodes (noise, dragonfly networks)."""
    cores: int = 0
    """Number of CPU cores that the ranks share; 0 if each rank has its own device."""
    source: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.nodes, self.per_node, self.device))

    @property
    def num_devices(self) -> int:
        """Total number of devices."""
        return self.nodes * self.per_node

    def with_size(self, *, nodes: int = 0, devices: int = 0) -> Cluster:
        """Returns the same machine with another number of nodes or devices."""
        if devices:
            # Fewer devices than one node has: a part of one node.
            per_node = min(devices, self.per_node)
            if devices % per_node:
                raise PlanError(
                    f"devices={devices} is not a multiple of {per_node} devices per node. Only "
                    f"whole nodes can be used. Use {max(devices // per_node, 1) * per_node} or "
                    f"{(devices // per_node + 1) * per_node}."
                )
            return replace(self, nodes=devices // per_node, per_node=per_node)
        if nodes < 1:
            raise PlanError(
                f"nodes={nodes} is too small. A cluster has at least one node. Use nodes=1."
            )
        return replace(self, nodes=nodes)


def nearest_rate(rows: Sequence[MeasuredRate], ranks: int) -> MeasuredRate:
    """Returns the measurement with the nearest number of ranks."""
    return min(rows, key=lambda row: abs(math.log(row.ranks / ranks)))


# ---- files ------------------------------------------------------------------------------


@cache
def _load_data_sheets() -> dict[str, Any]:
    return tomllib.loads(DATA_SHEETS.read_text(encoding="utf-8"))


@cache
def known_devices() -> dict[str, Device]:
    """Returns all devices with a data sheet, by name."""
    return {
        name: _parse_device({"name": name, **facts})
        for name, facts in _load_data_sheets()["device"].items()
    }


def cluster_names() -> list[str]:
    """Returns the names of the built-in clusters."""
    return list(_load_data_sheets()["cluster"])


def find_device(name: str) -> Device:
    """Returns the device with this name or alias."""
    # Drivers, data sheets and users spell names differently.
    wanted = _normalize_name(name)
    for one in known_devices().values():
        if wanted in map(_normalize_name, (one.name, *one.aliases)):
            return one
    known = list(known_devices())
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise PlanError(
        f"device {name!r} has no data sheet. Known devices: {', '.join(known)}. Use {near!r}, or "
        "run `ranvier measure` on it."
    )


def _normalize_name(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


@cache
def load_cluster(name: str) -> Cluster:
    """Returns a built-in cluster by name, or the cluster that a TOML file describes."""
    if name.endswith(".toml") or "/" in name:
        return read_cluster(Path(name))
    known = _load_data_sheets()["cluster"]
    if _normalize_name(name) in known:
        return _parse_cluster({"name": _normalize_name(name), **known[_normalize_name(name)]})
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    raise PlanError(
        f"cluster {name!r} is not known. Built-in clusters are {', '.join(known)}. Use one of "
        f"them, for example {near!r}, or a TOML file written by `ranvier measure`."
    )


def read_cluster(path: Path) -> Cluster:
    """Returns the cluster in a TOML file. Missing values of a known device come from its data
    sheet.
    """
    try:
        return _parse_cluster(
            {"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}
        )
    except FileNotFoundError:
        raise PlanError(
            f"cluster file {path} does not exist. A cluster is a built-in name "
            f"({', '.join(cluster_names())}) or a TOML file. Use one of them or run `ranvier "
            "measure`."
        ) from None
    except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, KeyError):
            missing = "missing key "
        else:
            missing = ""
        raise PlanError(
            f"cluster file {path} cannot be read: {missing}{error!s:.200}. It must have the fields "
            "that `ranvier measure` writes. Fix the file or measure again."
        ) from None


def write_cluster(made: Cluster, path: Path) -> None:
    """Writes a cluster as TOML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_format_cluster(made), encoding="utf-8")


ROW_TYPES: Mapping[str, type] = {
    "products": MatmulRate,
    "attention": AttentionRate,
    "rates": MeasuredRate,
}


TIMING_LISTS = ("bytes", "seconds")
"""Fields of timings that are lists in a file."""


def _parse_device(facts: Mapping[str, Any]) -> Device:
    """Returns a device from its table. Missing values come from the device named by `base`."""
    made = dict(facts)
    base = made.pop("base", "")
    for name, kind in ROW_TYPES.items():
        if name in made:
            made[name] = tuple(kind(**row) for row in made[name])
    if "reach" in made:
        made["reach"] = Efficiency(**made["reach"])
    if "aliases" in made:
        made["aliases"] = tuple(made["aliases"])
    # A file of `ranvier measure` may name a known device and override the measured values.
    if base:
        return replace(find_device(base), **made)
    return Device(**made)


def _parse_cluster(facts: Mapping[str, Any]) -> Cluster:
    made = dict(facts)
    one = made["device"]
    if isinstance(one, str):
        made["device"] = find_device(one)
    else:
        made["device"] = _parse_device(one)
    for name in ("link", "network"):
        made[name] = Link(**made[name])
    if "host" in made:
        made["host"] = HostSpec(**made["host"])
    made["collectives"] = tuple(MeasuredCollective(**row) for row in made.get("collectives", ()))
    made["timings"] = _parse_timings(made.get("timings", ()))
    return Cluster(**made)


def _parse_timings(tables: Iterable[Mapping[str, Any]]) -> tuple[CollectiveTiming, ...]:
    """Returns one row for each size of the tables, which have lists of bytes and seconds."""
    found = []
    for table in tables:
        group = dict(table)
        points = zip(group.pop("bytes"), group.pop("seconds"), strict=True)
        for size, seconds in points:
            if size <= 0 or not 0.0 < seconds < math.inf:
                raise ValueError(f"timings of {size} bytes in {seconds} seconds")
            found.append(CollectiveTiming(**group, bytes=size, seconds=seconds))
    return tuple(found)


def _format_cluster(made: Cluster) -> str:
    """Formats a cluster as TOML: plain values first, then tables, then arrays of tables."""
    # Order matters: a plain value after a table header would belong to that table.
    lines = [*_format_fields(made)]
    lines += ["", "[device]", *_format_fields(made.device)]
    for name in ("peak", "measured"):
        lines += ["", f"[device.{name}]"]
        lines += [f"{key} = {_format_value(x)}" for key, x in getattr(made.device, name).items()]
    lines += ["", "[device.reach]", *_format_fields(made.device.reach)]
    for name in ("link", "network", "host"):
        lines += ["", f"[{name}]", *_format_fields(getattr(made, name))]
    rows = [(f"device.{name}", getattr(made.device, name)) for name in ROW_TYPES]
    for name, several in [*rows, ("collectives", made.collectives)]:
        for row in several:
            lines += ["", f"[[{name}]]", *_format_fields(row)]
    lines += _format_timings(made.timings)
    return "\n".join(lines) + "\n"


def _format_timings(rows: Sequence[CollectiveTiming]) -> list[str]:
    """Formats consecutive rows of one algorithm and group as a table with lists."""
    # A table for each row would make a file of thousands of lines.
    lines = []
    for group, same in itertools.groupby(rows, lambda row: replace(row, bytes=0, seconds=0.0)):
        points = [*same]
        lines += ["", "[[timings]]"]
        lines += [line for line in _format_fields(group) if not line.startswith(TIMING_LISTS)]
        for name in TIMING_LISTS:
            lines.append(f"{name} = {_format_value(tuple(getattr(row, name) for row in points))}")
    return lines


def _format_fields(one: Any) -> list[str]:
    found = {f.name: getattr(one, f.name) for f in fields(one)}
    return [
        f"{name} = {_format_value(x)}"
        for name, x in found.items()
        if isinstance(x, (str, int, float)) or (name == "aliases" and x)
    ]


def _format_value(x: Any) -> str:
    if isinstance(x, tuple):
        return "[" + ", ".join(map(_format_value, x)) + "]"
    if isinstance(x, str):
        return '"' + x.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
    # Large and small numbers in scientific notation, which keeps the file readable.
    if isinstance(x, float) and (abs(x) >= 1e6 or abs(x) < 1e-3):
        return f"{x:.6g}"
    return repr(x)


def measured_cluster_path(device: str) -> Path:
    """Returns the path of the measurements of a device on this host."""
    return (
        launch.cache_dir()
        / f"cluster-{_slugify_name(platform.node())}-{_slugify_name(device)}.toml"
    )


def load_measured_cluster(device: str = "") -> Cluster | None:
    """Returns the measurements of a device on this host, or the latest ones if `device` is empty.

    Returns None if there are none.
    """
    if device:
        if measured_cluster_path(device).exists():
            return read_cluster(measured_cluster_path(device))
        return None
    own = launch.cache_dir().glob(f"cluster-{_slugify_name(platform.node())}-*.toml")
    newest = max(own, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    return read_cluster(newest)


def _slugify_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "none"
