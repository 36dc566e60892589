"""Cluster: the machine as numbers: its devices, the links between them, what was measured there.

Facts come from data sheets (`devices.toml` beside this file, each with its source) or from a
measured file that `ranvier measure` writes. A measured number beats a data sheet. Rates are bytes
or FLOPs a second, sizes bytes, times seconds; a link's rate is one way.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ranvier.errors import PlanError

SHEETS = Path(__file__).with_name("devices.toml")
NONE: Mapping[str, float] = MappingProxyType({})
USUAL: Mapping[str, float] = MappingProxyType({"bf16": 0.82, "fp16": 0.82, "fp8": 0.74})
"""Share of the peak that the best product reaches where nobody has measured it: the mean of the
measured devices."""


@dataclass(frozen=True)
class Product:
    """The measured rate of a matrix product (m, k) · (k, n)."""

    m: int
    n: int
    k: int
    dtype: str
    rate: float
    """FLOPs a second."""
    ranks: int = 1
    """Ranks of the machine that worked at once: on a CPU they share cores."""
    kind: str = "y"
    """y: x Wᵀ; dx: dy W; dw: dyᵀ x. Libraries take other ways for them, at other rates."""


@dataclass(frozen=True)
class Fused:
    """The measured rate of fused causal attention."""

    seq: int
    head_dim: int
    dtype: str
    forward: float
    """FLOPs a second, counting half of the square."""
    backward: float
    ranks: int = 1


@dataclass(frozen=True)
class Rate:
    """A rate of the whole device that was measured while so many ranks worked at once."""

    kind: str
    """memory (bytes), adam (parameters on the host), to_device, to_host (bytes), launch (seconds
    of an empty kernel), block, block8 (seconds of the host for a block that is not compiled)."""
    value: float
    ranks: int = 1


@dataclass(frozen=True)
class Collective:
    """A measured collective of groups of `size` ranks, `groups` of them at once.

    seconds = latency + wire bytes / bandwidth, where the wire carries (size-1)/size of the whole
    tensor, twice that in an all-reduce, all of it in a message (op `send`).
    """

    op: str
    size: int
    latency: float
    bandwidth: float
    groups: int = 1
    """Groups that worked at once inside a node."""
    nodes: int = 1
    """Nodes that the group covers."""


@dataclass(frozen=True)
class Reach:
    """What a device reaches of its data sheet: the four numbers that are fitted, no others."""

    matmul: float = 0.95
    """Share of the best measured product that large products reach in a long run, in 16 bits."""
    narrow: float = 0.95
    """The same in 8 bits."""
    memory: float = 0.6
    """Share of the bandwidth that kernels which only read and write reach."""
    link: float = 0.94
    """Share of the rate of a link inside a node that collectives reach."""


@dataclass(frozen=True)
class Device:
    """One accelerator, as a rank sees it."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second of its memory."""
    peak: Mapping[str, float]
    """Dense FLOPs a second by dtype: fp32, fp16, bf16, fp8."""
    measured: Mapping[str, float] = field(default_factory=lambda: NONE)
    """The best rate of a matrix product that was seen, by dtype."""
    launch: float = 4e-6
    """Seconds from one kernel to the next where nobody has compiled them together."""
    cores: int = 132
    """Multiprocessors: tiles of a product are worked on so many at a time."""
    generation: int = 90
    """Of its kernels, as NVIDIA counts: 70 Volta, 80 Ampere, 90 Hopper, 100 Blackwell."""
    reach: Reach = Reach()
    products: tuple[Product, ...] = ()
    attention: tuple[Fused, ...] = ()
    rates: tuple[Rate, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other names of the same device, as runs and drivers print them."""
    source: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.reach))

    def best(self, dtype: str) -> float:
        """FLOPs a second of the best product: measured, or what devices reach of their peak."""
        alike = ("bf16", "fp16") if dtype in ("bf16", "fp16") else (dtype,)
        found = [self.measured[name] for name in alike if name in self.measured]
        peak = max((self.peak[name] for name in alike if name in self.peak), default=0.0)
        return max(found, default=USUAL.get(dtype, 0.8) * peak) or min(self.peak.values())

    def rate(self, kind: str, *, ranks: int = 1, usual: float = 0.0) -> float:
        """A measured rate, by the nearest number of ranks; `usual` if nobody has measured it."""
        rows = [row for row in self.rates if row.kind == kind]
        return nearest(rows, ranks).value if rows else usual


@dataclass(frozen=True)
class Link:
    """What joins devices."""

    bandwidth: float
    """Bytes a second of a device inside a node, or of a whole node between nodes."""
    latency: float
    """Seconds a hop."""
    wide: float = 0.0
    """Bytes a second between two devices alone, where it differs; 0: the same."""
    collective: float = 1.0
    """Share of the bandwidth that collectives can use, as measured; messages use all of it."""


@dataclass(frozen=True)
class Host:
    """The host's side, of one device."""

    memory: float = 128e9
    """Bytes of host memory."""
    to_device: float = 25e9
    to_host: float = 25e9
    adam: float = 1e9
    """Parameters that its processors update in a second."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices."""

    name: str
    device: Device
    per_node: int
    """Devices of a node."""
    link: Link
    """Inside a node."""
    network: Link
    """Between nodes; its bandwidth is that of a node, shared by all who talk at once."""
    nodes: int = 1
    host: Host = Host()
    collectives: tuple[Collective, ...] = ()
    """Measured here; used in place of `link` and `network` for groups of the same shape."""
    straggle: float = 0.01
    """Slow-down of a step for each doubling of the nodes (noise, dragonfly networks)."""
    cores: int = 0
    """Processors that ranks share, on a CPU; 0: each rank has a device of its own."""
    source: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.nodes, self.per_node, self.device))

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.per_node

    def of(self, *, nodes: int = 0, devices: int = 0) -> Cluster:
        """The same machine with another number of nodes, or of devices."""
        if devices:
            per_node = min(devices, self.per_node)
            if devices % per_node:
                raise PlanError(
                    f"devices={devices} do not fill nodes of {per_node}. Nodes are used whole. Use "
                    f"{max(devices // per_node, 1) * per_node} or "
                    f"{(devices // per_node + 1) * per_node}."
                )
            return replace(self, nodes=devices // per_node, per_node=per_node)
        if nodes < 1:
            raise PlanError(f"nodes={nodes}. A cluster has at least one node. Use nodes=1.")
        return replace(self, nodes=nodes)


def nearest(rows: Sequence[Rate], ranks: int) -> Rate:
    """The row that was measured with the nearest number of ranks."""
    return min(rows, key=lambda row: abs(math.log(row.ranks / ranks)))


# ---- files ------------------------------------------------------------------------------


@cache
def _sheets() -> dict[str, Any]:
    return tomllib.loads(SHEETS.read_text(encoding="utf-8"))


@cache
def devices() -> dict[str, Device]:
    """All devices with a data sheet, by name."""
    return {name: _device({"name": name, **facts}) for name, facts in _sheets()["device"].items()}


def names() -> list[str]:
    """Built-in clusters."""
    return list(_sheets()["cluster"])


def device(name: str) -> Device:
    """The device of this name or alias."""
    wanted = _plain(name)
    for one in devices().values():
        if wanted in map(_plain, (one.name, *one.aliases)):
            return one
    known = list(devices())
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise PlanError(
        f"device {name!r} has no data sheet. Known are {', '.join(known)}. Use {near!r}, or run "
        "`ranvier measure` on it."
    )


def _plain(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


@cache
def cluster(name: str) -> Cluster:
    """A built-in cluster by its name, or the one that a TOML file describes."""
    if name.endswith(".toml") or "/" in name:
        return read(Path(name))
    known = _sheets()["cluster"]
    if _plain(name) in known:
        return _cluster({"name": _plain(name), **known[_plain(name)]})
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    raise PlanError(
        f"cluster {name!r} is not known. Known are {', '.join(known)}, or a TOML file as "
        f"`ranvier measure` writes it. Use {near!r}."
    )


def read(path: Path) -> Cluster:
    """The cluster of a TOML file; what it does not say of a known device is from its data sheet."""
    try:
        return _cluster({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except FileNotFoundError:
        raise PlanError(
            f"cluster file {path} is not there. A cluster is a built-in name "
            f"({', '.join(names())}) or a TOML file. Use one of them or run `ranvier measure`."
        ) from None
    except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        missing = "there is no " if isinstance(error, KeyError) else ""
        raise PlanError(
            f"cluster file {path} cannot be read: {missing}{error!s:.200}. It has the fields that "
            "`ranvier measure` writes. Measure again or mend it."
        ) from None


def write(made: Cluster, path: Path) -> None:
    """Write a cluster as TOML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(made), encoding="utf-8")


LISTS: Mapping[str, type] = {"products": Product, "attention": Fused, "rates": Rate}


def _device(facts: Mapping[str, Any]) -> Device:
    """A device from its table; numbers of `base`, another device, where it says nothing."""
    made = dict(facts)
    base = made.pop("base", "")
    for name, kind in LISTS.items():
        if name in made:
            made[name] = tuple(kind(**row) for row in made[name])
    if "reach" in made:
        made["reach"] = Reach(**made["reach"])
    if "aliases" in made:
        made["aliases"] = tuple(made["aliases"])
    return replace(device(base), **made) if base else Device(**made)


def _cluster(facts: Mapping[str, Any]) -> Cluster:
    made = dict(facts)
    one = made["device"]
    made["device"] = device(one) if isinstance(one, str) else _device(one)
    for name in ("link", "network"):
        made[name] = Link(**made[name])
    if "host" in made:
        made["host"] = Host(**made["host"])
    made["collectives"] = tuple(Collective(**row) for row in made.get("collectives", ()))
    return Cluster(**made)


def _text(made: Cluster) -> str:
    """TOML: plain values, then tables, then rows."""
    lines = [*_plain_lines(made)]
    lines += ["", "[device]", *_plain_lines(made.device)]
    for name in ("peak", "measured"):
        lines += ["", f"[device.{name}]"]
        lines += [f"{key} = {_value(x)}" for key, x in getattr(made.device, name).items()]
    lines += ["", "[device.reach]", *_plain_lines(made.device.reach)]
    for name in ("link", "network", "host"):
        lines += ["", f"[{name}]", *_plain_lines(getattr(made, name))]
    rows = [(f"device.{name}", getattr(made.device, name)) for name in LISTS]
    for name, several in [*rows, ("collectives", made.collectives)]:
        for row in several:
            lines += ["", f"[[{name}]]", *_plain_lines(row)]
    return "\n".join(lines) + "\n"


def _plain_lines(one: Any) -> list[str]:
    found = {f.name: getattr(one, f.name) for f in fields(one)}
    return [
        f"{name} = {_value(x)}"
        for name, x in found.items()
        if isinstance(x, (str, int, float)) or (name == "aliases" and x)
    ]


def _value(x: Any) -> str:
    if isinstance(x, tuple):
        return "[" + ", ".join(map(_value, x)) + "]"
    if isinstance(x, str):
        return '"' + x.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
    return f"{x:.6g}" if isinstance(x, float) and (abs(x) >= 1e6 or abs(x) < 1e-3) else repr(x)
