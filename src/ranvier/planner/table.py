"""Table: bytes by category at the moment of a step when most is there, predicted beside measured.

Device and host have a column each. What torch counts as allocated on a device is the sum of all
rows but the last, which is what its allocator holds besides: gaps between tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

CATEGORIES = (
    "weights",
    "gradients",
    "master",
    "moments",
    "activations",
    "gathered weights",
    "logits",
    "communication",
    "staging",
    "libraries",
    "fragmentation",
)
"""Rows: working weights; their gradients; master weights; both moments; what blocks keep and use;
weights gathered over depth; logits of a chunk; buffers of collectives; tiles of states on their
way; workspaces of libraries; gaps."""
GAPS = "fragmentation"
REST = ("activations", "gathered weights", "logits", "communication")
"""Rows that only a prediction tells apart: in a run that is measured they are one number."""
GIB = 2**30


@dataclass(frozen=True)
class Table:
    """Bytes by category; what is not named is 0."""

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    where: str = ""
    """The moment, in words."""

    def __post_init__(self) -> None:
        odd = {*self.device, *self.host} - {*CATEGORIES}
        assert not odd, odd

    @property
    def allocated(self) -> int:
        """Most bytes of tensors on the device."""
        return sum(size for name, size in self.device.items() if name != GAPS)

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        return sum(self.device.values())

    @property
    def on_host(self) -> int:
        """Bytes of host memory for what is kept there."""
        return sum(self.host.values())

    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def read(cls, facts: Any) -> Table | None:
        """A table from JSON; None if it is none."""
        if not isinstance(facts, dict) or not isinstance(facts.get("device"), dict):
            return None
        device, host = (_column(facts.get(name)) for name in ("device", "host"))
        return cls(device, host, str(facts.get("where", "")))


def _column(facts: Any) -> dict[str, int]:
    items = facts.items() if isinstance(facts, dict) else ()
    return {name: size for name, size in items if name in CATEGORIES and type(size) is int}


HEADER = ("", "device", "measured", "host", "measured")


def rows(predicted: Table | None, measured: Table | None) -> Iterator[tuple[str, ...]]:
    """Lines of cells in GiB, under `HEADER`; rows that are empty everywhere are left out."""
    tables = [predicted, measured]
    columns = [None if t is None else t.device for t in tables]
    columns += [None if t is None else t.host for t in tables]
    for name in CATEGORIES:
        cells = [None if column is None else column.get(name, 0) for column in columns]
        if name in REST[1:]:
            cells[1] = None  # part of the row of activations
        if any(cells):
            yield name, *map(_shown, cells)
    sums = [None if t is None else t.allocated for t in tables]
    sums += [None if t is None else t.on_host for t in tables]
    yield "sum without gaps", *map(_shown, sums)


def lines(predicted: Table | None, measured: Table | None = None) -> list[str]:
    """The table as text, predicted beside measured."""
    cells = [HEADER, *rows(predicted, measured)]
    shown = [0, 1, *([2] if measured else []), 3, *([4] if measured else [])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADER))]
    out = [f"{'GiB':<{widths[0]}}  " + "  ".join(f"{HEADER[i]:>{widths[i]}}" for i in shown[1:])]
    for row in cells[1:]:
        out.append(
            f"{row[0]:<{widths[0]}}  " + "  ".join(f"{row[i]:>{widths[i]}}" for i in shown[1:])
        )
    if predicted is not None and measured is not None and predicted.allocated:
        ratio = measured.allocated / predicted.allocated
        out.append(f"measured / predicted on the device: {ratio:.3f}")
    if predicted is not None and predicted.where:
        out.append(f"most is there {predicted.where}")
    return out


def _shown(size: int | None) -> str:
    """Bytes in GiB; what nobody knows is a dot."""
    return "·" if size is None else f"{size / GIB:.3f}" if size else "-"
