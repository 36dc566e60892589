"""Memory breakdown: bytes by category at the peak of a step, predicted and measured.

Device and host have a column each. The sum of all rows but the last two is what torch counts as
allocated on a device. The last two rows are gaps between tensors that its allocator reserves, and
the buffers of communicators, which NCCL allocates from the device itself.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    "communicators",
)
"""Rows: working weights; their gradients; master weights; moments and preconditioners; activations;
weights gathered over depth; logits of a chunk; buffers of collectives and of updates of whole
matrices; tiles of states in transfer; workspaces of libraries; gaps; buffers and kernels of NCCL.
"""
NOT_TENSORS = ("fragmentation", "communicators")
"""Rows that are not tensors."""
ESTIMATED_CATEGORIES = ("activations", "gathered weights", "logits", "communication")
"""Rows that only a prediction distinguishes; a measurement has one number for all of them."""
GIB = 2**30


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes by category; missing categories are 0."""

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    where: str = ""
    """Description of the point of the step at which the peak is reached."""

    def __post_init__(self) -> None:
        odd = {*self.device, *self.host} - {*CATEGORIES}
        assert not odd, odd

    @property
    def allocated_bytes(self) -> int:
        """Peak bytes of tensors on the device."""
        return sum(size for name, size in self.device.items() if name not in NOT_TENSORS)

    @property
    def total_bytes(self) -> int:
        """Device bytes that are needed in total."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory used for offloading."""
        return sum(self.host.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-compatible dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Any) -> MemoryBreakdown | None:
        """Returns a breakdown from its JSON dict; None if it is not one."""
        if not isinstance(facts, dict) or not isinstance(facts.get("device"), dict):
            return None
        # Unknown categories are dropped: the file may be from another version.
        device, host = (_parse_column(facts.get(name)) for name in ("device", "host"))
        return cls(device, host, str(facts.get("where", "")))


def _parse_column(facts: Any) -> dict[str, int]:
    items = facts.items() if isinstance(facts, dict) else ()
    return {name: size for name, size in items if name in CATEGORIES and type(size) is int}


BREAKDOWN_HEADER = ("device", "measured", "host", "measured")


def breakdown_rows(
    predicted: MemoryBreakdown | None, measured: MemoryBreakdown | None
) -> tuple[str, list[tuple[str, ...]]]:
    """Returns the unit, and rows of cells under `BREAKDOWN_HEADER`. Empty rows are omitted."""
    tables = [predicted, measured]
    columns = [None if t is None else t.device for t in tables]
    columns += [None if t is None else t.host for t in tables]
    # Whether the run measured tensors on the device; without CUDA this is not possible.
    counted = measured is not None and ESTIMATED_CATEGORIES[0] in measured.device
    found: list[tuple[str, list[int | None]]] = []
    for name in CATEGORIES:
        cells = [None if column is None else column.get(name, 0) for column in columns]
        if name in ESTIMATED_CATEGORIES[1:] or (name == ESTIMATED_CATEGORIES[0] and not counted):
            # Part of the row of activations, or not known.
            cells[1] = None
        if any(cells):
            found.append((name, cells))
    sums = [None if t is None else t.allocated_bytes for t in tables]
    sums[1] = sums[1] if counted else None
    sums += [None if t is None else t.host_bytes for t in tables]
    found.append(("sum of tensors", sums))
    unit, size = ("GiB", GIB) if max(x or 0 for x in sums) >= GIB else ("MiB", 2**20)
    return unit, [(name, *(_format_bytes(cell, size) for cell in cells)) for name, cells in found]


def format_breakdown(
    predicted: MemoryBreakdown | None, measured: MemoryBreakdown | None = None
) -> list[str]:
    """Returns the table as text, predicted and measured."""
    unit, cells = breakdown_rows(predicted, measured)
    cells = [(unit, *BREAKDOWN_HEADER), *cells]
    shown = [1, 2, 3, 4] if measured else [1, 3]
    widths = [max(len(row[i]) for row in cells) for i in range(len(BREAKDOWN_HEADER) + 1)]
    out = [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in shown)])
        for row in cells
    ]
    return [*out, *breakdown_notes(predicted, measured)]


def breakdown_notes(
    predicted: MemoryBreakdown | None, measured: MemoryBreakdown | None
) -> list[str]:
    """Returns the point of the peak, and the accuracy of the prediction."""
    found = []
    if predicted is not None and predicted.where:
        found.append(f"the peak is {predicted.where}")
    if (
        predicted is not None
        and measured is not None
        and ESTIMATED_CATEGORIES[0] in measured.device
    ):
        ratio = measured.allocated_bytes / max(predicted.allocated_bytes, 1)
        found.append(f"measured vs. predicted on the device: {ratio - 1.0:+.1%}")
    return found


def _format_bytes(size: int | None, unit: int) -> str:
    """Formats bytes in a unit; unknown values are a dot."""
    if size is None:
        return "·"
    if size:
        return f"{size / unit:.3f}"
    return "-"
