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

from ranvier.comm.collectives import hide_from_dispatch_modes
from ranvier.grid import Grid
from ranvier.trace import Trace

T = TypeVar("T")
CollectiveReuse = Literal["again", "keep", "auto"]
STOP_RECOMPUTATION: type[Exception] | tuple[()] = getattr(checkpoint, "_StopRecomputationError", ())
"""How torch ends a second run; without it nobody learns which results are of no use."""


class ActivationStore(Protocol):
    """Where what blocks keep waits for backward."""

    def pack(self, x: Tensor) -> Any:
        """What stands for a tensor until backward."""

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""

    def block_context(self, name: str) -> AbstractContextManager[None]:
        """What autograd keeps of a block that runs inside waits here, too."""


class InPlaceStore:
    """Everything stays where it is."""

    def pack(self, x: Tensor) -> tuple[Tensor, int]:
        """The tensor, and how often it was changed."""
        return x, x._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """The tensor, which nobody may have changed."""
        return check_unchanged(*packed)

    def block_context(self, name: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


def check_unchanged(x: Tensor, version: int) -> Tensor:
    """A kept tensor; refused if it was written to since."""
    if x._version != version:
        raise RuntimeError(
            f"A kept tensor of the shape {tuple(x.shape)} was changed {x._version - version} times "
            "before backward. What a block keeps must stay as it is. Write out of place."
        )
    return x


@dataclass
class SavePolicy:
    """What the blocks of a model keep for their second run, and where it waits."""

    trace: Trace = field(default_factory=Trace)
    collectives: CollectiveReuse = "again"
    chosen_layers: frozenset[str] | None = None
    """Leaves whose results are kept, where `auto` has settled that; None: all."""
    depth_group: str = ""
    """Group over which graphs gather weights, which are not kept."""
    store: ActivationStore = field(default_factory=InPlaceStore)
    unneeded_layers: set[str] = field(default_factory=set)
    """Leaves whose results no second run needs, as first ones have shown: the last of a block."""

    @classmethod
    def for_grid(cls, grid: Grid, collectives: CollectiveReuse) -> SavePolicy:
        """That of a model on a grid."""
        depth = grid.axis("depth", channel="gather")
        return cls(grid.trace, collectives, depth_group=depth.group_name)

    def saves_layer(self, where: str) -> bool:
        """Whether the results of a leaf are kept."""
        return self.collectives != "again" and (
            self.chosen_layers is None or where in self.chosen_layers
        )

    @property
    def saves_all_layers(self) -> bool:
        """Whether those of all leaves are: of a graph nobody knows what is whose."""
        return self.collectives != "again" and self.chosen_layers is None

    def open_results(self, *, selective: bool) -> SavedResults | None:
        """A queue for a call of a block; None if it would stay empty."""
        some = self.collectives != "again" and self.chosen_layers != frozenset()
        if selective or some:
            return SavedResults(self, selective)
        return None


@dataclass
class SavedResults:
    """What one call of a block keeps, first in, first out."""

    policy: SavePolicy
    selective: bool
    """Whether products are kept, too: those inside of a kept result are not, then."""
    is_recompute: bool = False
    """Whether the block runs for the second time."""
    where: str = ""
    """What it is a part of: the second run is called by backward of something else."""
    entries: deque[tuple[str, Any]] = field(default_factory=deque)

    @contextmanager
    def block_run(self) -> Iterator[None]:
        """A run of the block, the first or the second."""
        trace = self.policy.trace
        if not self.is_recompute:
            self.where = trace.where
        before = trace.saved_results
        trace.saved_results = self
        try:
            with trace.named_scope(self.where):
                yield
        finally:
            trace.saved_results = before
            self.is_recompute = True

    def run_once(self, work: Callable[[], T]) -> T:
        """The result of work that communicates: of the first run, if it is kept."""
        keeping = self.policy
        trace = keeping.trace
        where = keeping.trace.where
        if not keeping.saves_layer(where):
            return work()
        if self.is_recompute:
            kept: T = self.next_result(where)
            return kept
        with trace.outside_block(), hide_from_dispatch_modes() if self.selective else nullcontext():
            out = work()  # what is kept of a whole is not kept of its parts
        self.save_result(where, out)
        return out

    def has_result(self, where: str) -> bool:
        """Whether a leaf's next result was kept: then it need not be begun."""
        return self.is_recompute and self.policy.saves_layer(where)

    def save_result(self, label: str, value: Any) -> None:
        """Keep tensors; of those that nobody needs their shape."""
        if label in self.policy.unneeded_layers:
            self.entries.append((label, tree_map_only(Tensor, _pack_shape_only, value)))
        else:
            self.entries.append((label, tree_map_only(Tensor, self._pack_tensor, value)))

    def next_result(self, label: str) -> Any:
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
        return tree_map_only(_PackedTensor, lambda one: one.unpack_tensor(), value)

    def _pack_tensor(self, x: Tensor) -> _PackedTensor:
        return _PackedTensor(self.policy.store, self.policy.store.pack(_detach_with_version(x)))


@dataclass(frozen=True)
class _PackedTensor:
    """A tensor that waits in a store; without a store its shape, and NaN where it is read."""

    store: ActivationStore | None
    packed: Any

    def unpack_tensor(self) -> Tensor:
        if self.store is not None:
            return self.store.unpack(self.packed)
        shape, options = self.packed
        return torch.full(shape, torch.nan, **options)


def _pack_shape_only(x: Tensor) -> _PackedTensor:
    assert x.is_floating_point(), (x.shape, x.dtype)
    return _PackedTensor(None, (x.shape, {"dtype": x.dtype, "device": x.device}))


def _detach_with_version(x: Tensor) -> Tensor:
    """The same tensor without its history, but with its count of changes.

    Below autograd a view has none of its own unless it is asked for (as torch's own checkpoints
    do).
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return x.detach()
