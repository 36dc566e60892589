"""Results that a block keeps of its first run for its second, in the order in which they came.

A block that forgets its activations runs again in backward (`nn.recompute`). What lies here is then
neither computed nor communicated again: results of matrix products where recomputation is
selective, and results of collectives if the model keeps them (communication-aware checkpointing of
DeepSpeed-TED, Singh et al. 2023). Each call of a block has a queue of its own, as several micro-
batches may be under way. The second run takes what the first has put there and may end earlier:
torch stops it when backward has all it needs. Weights gathered over depth are no part of it: they
come from the queue of deferred work, which both runs and backward share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from ranvier.comm.collectives import hidden
from ranvier.grid import Grid
from ranvier.trace import Trace

T = TypeVar("T")
Collectives = Literal["again", "keep", "auto"]
STOPPED: type[Exception] | tuple[()] = getattr(checkpoint, "_StopRecomputationError", ())
"""How torch ends a second run; without it nobody learns which results are of no use."""


class Store(Protocol):
    """Where what blocks keep waits for backward."""

    def pack(self, x: Tensor) -> Any:
        """What stands for a tensor until backward."""

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""

    def block(self, name: str) -> AbstractContextManager[None]:
        """What autograd keeps of a block that runs inside waits here, too."""


class Held:
    """Everything stays where it is."""

    def pack(self, x: Tensor) -> tuple[Tensor, int]:
        """The tensor, and how often it was changed."""
        return x, x._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """The tensor, which nobody may have changed."""
        return unchanged(*packed)

    def block(self, name: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


def unchanged(x: Tensor, version: int) -> Tensor:
    """A kept tensor; refused if it was written to since."""
    if x._version != version:
        raise RuntimeError(
            f"A kept tensor of the shape {tuple(x.shape)} was changed {x._version - version} times "
            "before backward. What a block keeps must stay as it is. Write out of place."
        )
    return x


@dataclass
class Keeping:
    """What the blocks of a model keep for their second run, and where it waits."""

    trace: Trace = field(default_factory=Trace)
    collectives: Collectives = "again"
    chosen: frozenset[str] | None = None
    """Leaves whose results are kept, where `auto` has settled that; None: all."""
    depth: str = ""
    """Group over which graphs gather weights, which are not kept."""
    store: Store = field(default_factory=Held)
    spare: set[str] = field(default_factory=set)
    """Leaves whose results no second run needs, as first ones have shown: the last of a block."""

    @classmethod
    def on(cls, grid: Grid, collectives: Collectives) -> Keeping:
        """That of a model on a grid."""
        depth = grid.axis("depth", channel="gather")
        return cls(grid.trace, collectives, depth=depth.group_name)

    def keeps(self, where: str) -> bool:
        """Whether the results of a leaf are kept."""
        return self.collectives != "again" and (self.chosen is None or where in self.chosen)

    @property
    def all(self) -> bool:
        """Whether those of all leaves are: of a graph nobody knows what is whose."""
        return self.collectives != "again" and self.chosen is None

    def results(self, *, selective: bool) -> Results | None:
        """A queue for a call of a block; None if it would stay empty."""
        some = self.collectives != "again" and self.chosen != frozenset()
        return Results(self, selective) if selective or some else None


@dataclass
class Results:
    """What one call of a block keeps, first in, first out."""

    keeping: Keeping
    selective: bool
    """Whether products are kept, too: those inside of a kept result are not, then."""
    again: bool = False
    """Whether the block runs for the second time."""
    where: str = ""
    """What it is a part of: the second run is called by backward of something else."""
    entries: deque[tuple[str, Any]] = field(default_factory=deque)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A run of the block, the first or the second."""
        trace = self.keeping.trace
        self.where = self.where if self.again else trace.where
        before, trace.results = trace.results, self
        try:
            with trace.at(self.where):
                yield
        finally:
            trace.results, self.again = before, True

    def once(self, work: Callable[[], T]) -> T:
        """The result of work that communicates: of the first run, if it is kept."""
        keeping = self.keeping
        trace, where = keeping.trace, keeping.trace.where
        if not keeping.keeps(where):
            return work()
        if self.again:
            kept: T = self.take(where)
            return kept
        with trace.beside(), hidden() if self.selective else nullcontext():
            out = work()  # what is kept of a whole is not kept of its parts
        self.put(where, out)
        return out

    def known(self, where: str) -> bool:
        """Whether a leaf's next result was kept: then it need not be begun."""
        return self.again and self.keeping.keeps(where)

    def put(self, label: str, value: Any) -> None:
        """Keep tensors; of those that nobody needs their shape."""
        if label in self.keeping.spare:
            self.entries.append((label, tree_map_only(Tensor, _outline, value)))
        else:
            self.entries.append((label, tree_map_only(Tensor, self._packed, value)))

    def take(self, label: str) -> Any:
        """The next kept tensors; they are forgotten here."""
        if not self.entries:
            raise RuntimeError(
                f"{label} is computed again, but what was kept of it is gone. It serves one "
                "backward pass. Compute the loss again, or set memory.collectives='again' and "
                "recompute='full'."
            )
        kept, value = self.entries.popleft()
        if kept != label:
            raise RuntimeError(
                f"{label} came where {kept} came before. A block that is computed again must do "
                "the same again. Let it depend on nothing but its inputs and weights."
            )
        return tree_map_only(_Packed, lambda one: one.taken(), value)

    def _packed(self, x: Tensor) -> _Packed:
        return _Packed(self.keeping.store, self.keeping.store.pack(_apart(x)))


@dataclass(frozen=True)
class _Packed:
    """A tensor that waits in a store; without a store its shape, and NaN where it is read."""

    store: Store | None
    packed: Any

    def taken(self) -> Tensor:
        if self.store is not None:
            return self.store.unpack(self.packed)
        shape, options = self.packed
        return torch.full(shape, torch.nan, **options)


def _outline(x: Tensor) -> _Packed:
    assert x.is_floating_point(), (x.shape, x.dtype)
    return _Packed(None, (x.shape, {"dtype": x.dtype, "device": x.device}))


def _apart(x: Tensor) -> Tensor:
    """The same tensor without its history, but with its count of changes.

    Below autograd a view has none of its own unless it is asked for (as torch's own checkpoints
    do).
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return x.detach()
