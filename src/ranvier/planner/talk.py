"""Talk: what a block communicates over row and col in a micro-batch, as a runtime does it.

With T tokens a rank, n features inside and d outside, a product that enters gathers T·d/col over
row and scatters T·n/row over col; one that leaves does the reverse. Backward turns both round and
gathers the input once more for dW. Without sequence parallelism two all-reduces over row take the
place of gathers and scatters, with the same bytes and no second gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ranvier.planner.leaves import Part
from ranvier.planner.roofline import INNER, Setup, local
from ranvier.planner.runtime import Runtime


@dataclass(frozen=True)
class Said:
    """One collective of a block."""

    op: str
    axis: str
    bytes: int
    """Of the whole tensor."""
    back: bool = False
    under: bool = False
    """Whether it may run beside the product of a weight's gradient."""


@lru_cache(maxsize=20_000)
def block(part: Part, setup: Setup, runtime: Runtime) -> tuple[Said, ...]:
    """All collectives of one block in one micro-batch."""
    found: list[Said] = []
    each = 2 * setup.tokens
    for leaf in part.find("linear", "siblings", "apart", "head"):
        several = leaf.inside or (leaf,)
        names = [dim if isinstance(dim, str) else dim[1] for dim in several[0].dims]
        enters = names[0] in INNER
        inner = sum(local(one.dims[0 if enters else 1], one.shape[0 if enters else 1], setup)
                    for one in several if isinstance(one.dims[0], str))  # fmt: skip
        width = several[0].shape[1 if enters else 0]
        outer = local("embed", width, setup)
        if not enters:
            inner = local(names[1], several[0].shape[1], setup)
        if runtime.sequence:
            found += _turned(enters, each * outer, each * inner, setup)
        elif setup.row > 1:
            found.append(Said("all_reduce", "row", each * outer, back=enters, under=enters))
    return tuple(found)


def _turned(enters: bool, outer: int, inner: int, setup: Setup) -> list[Said]:
    """Gathers and scatters of one product."""
    first, last = ("row", "col") if enters else ("col", "row")
    sizes = {"row": outer, "col": inner}
    said = [
        Said("all_gather", first, sizes[first]),
        Said("reduce_scatter", last, sizes[last]),
        Said("all_gather", last, sizes[last], back=True),
        Said("reduce_scatter", first, sizes[first], back=True, under=True),
        Said("all_gather", first, sizes[first], back=True, under=True),
    ]
    return [one for one in said if getattr(setup, one.axis) > 1]
