"""Results that a block saves in its forward pass for its recomputation, first in, first out.

A checkpointed block is recomputed in backward (`nn.activation_checkpoint`). Saved results are then
neither recomputed nor communicated again: results of matrix products with selective recomputation,
and results of collectives if the model saves them (communication-aware checkpointing of
DeepSpeed-TED, Singh et al. 2023). Each call of a block has its own queue, as several micro-batches
may be in flight. The recomputation takes what the forward pass has put there and may end earlier:
torch stops it when backward has all it needs. Weights gathered over depth are not saved here: they
come from the bucket scheduler, which forward, recomputation and backward share.
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
CollectiveReuse = Literal["rerun", "save", "auto"]
STOP_RECOMPUTATION: type[Exception] | tuple[()] = getattr(checkpoint, "_StopRecomputationError", ())
"""Exception by which torch ends a recomputation; without it unneeded results stay unknown."""


class ActivationStore(Protocol):
    """Where saved tensors of blocks are stored until backward."""

    def pack(self, x: Tensor) -> Any:
        """Return a placeholder for a tensor until backward."""

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor of a placeholder."""

    def block_context(self, name: str) -> AbstractContextManager[None]:
        """Also store what autograd saves of a block that runs inside."""


class InPlaceStore:
    """Store that leaves all tensors where they are."""

    def pack(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the tensor and its version counter."""
        return x, x._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """Return the tensor; it must not have been modified."""
        return check_unchanged(*packed)

    def block_context(self, name: str) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()


def check_unchanged(x: Tensor, version: int) -> Tensor:
    """Return a saved tensor; raise if it was modified since, as autograd does."""
    if x._version != version:
        raise RuntimeError(
            f"A kept tensor of the shape {tuple(x.shape)} was changed {x._version - version} times "
            "before backward. What a block keeps must stay as it is. Write out of place."
        )
    return x


@dataclass
class SavePolicy:
    """What the blocks of a model save for their recomputation, and where it is stored."""

    trace: Trace = field(default_factory=Trace)
    collectives: CollectiveReuse = "rerun"
    """Whether recomputation runs the collectives of blocks again or uses their saved results."""
    chosen_layers: frozenset[str] | None = None
    """Layers whose results are saved, once `auto` is resolved; None: all."""
    depth_group: str = ""
    """Group over which compiled graphs gather weights, which are not saved."""
    store: ActivationStore = field(default_factory=InPlaceStore)
    unneeded_layers: set[str] = field(default_factory=set)
    """Layers whose results recomputation does not need, as seen so far: the last of a block."""

    @classmethod
    def for_grid(cls, grid: Grid) -> SavePolicy:
        """Return the policy of a model on a grid."""
        depth = grid.axis("depth", channel="gather")
        return cls(grid.trace, depth_group=depth.group_name)

    def saves_layer(self, where: str) -> bool:
        """Whether the results of a layer are saved."""
        return self.collectives != "rerun" and (
            self.chosen_layers is None or where in self.chosen_layers
        )

    @property
    def saves_all_layers(self) -> bool:
        """Whether the results of all layers are saved; in a compiled graph layers are not known."""
        return self.collectives != "rerun" and self.chosen_layers is None

    def open_results(self, *, selective: bool) -> SavedResults | None:
        """Return a queue for one call of a block; None if it would stay empty."""
        some = self.collectives != "rerun" and self.chosen_layers != frozenset()
        if selective or some:
            return SavedResults(self, selective)
        return None


@dataclass
class SavedResults:
    """Queue of the results that one call of a block saves."""

    policy: SavePolicy
    selective: bool
    """Whether matrix products are saved, too; those inside a saved result are not."""
    is_recompute: bool = False
    """Whether the block is being recomputed."""
    where: str = ""
    """Scope of the block; its recomputation is called from the backward pass of another scope."""
    entries: deque[tuple[str, Any]] = field(default_factory=deque)

    @contextmanager
    def block_run(self) -> Iterator[None]:
        """Run the block inside: its forward pass, or its recomputation."""
        trace = self.policy.trace
        # The recomputation runs in the scope of another layer's backward, so only the first run
        # knows its own.
        if not self.is_recompute:
            self.where = trace.where
        before = trace.saved_results
        trace.saved_results = self
        try:
            with trace.named_scope(self.where):
                yield
        finally:
            trace.saved_results = before
            # Also after an error: torch ends a recomputation early by an exception.
            self.is_recompute = True

    def run_once(self, work: Callable[[], T]) -> T:
        """Return the result of work that communicates; in recomputation the saved one, if any."""
        keeping = self.policy
        trace = keeping.trace
        where = keeping.trace.where
        if not keeping.saves_layer(where):
            return work()
        if self.is_recompute:
            kept: T = self.next_result(where)
            return kept
        # The whole result is saved, so collectives and products inside of it must not be.
        with trace.outside_block(), hide_from_dispatch_modes() if self.selective else nullcontext():
            out = work()
        self.save_result(where, out)
        return out

    def has_result(self, where: str) -> bool:
        """Whether the next result of a layer was saved, so that it need not be started."""
        return self.is_recompute and self.policy.saves_layer(where)

    def save_result(self, label: str, value: Any) -> None:
        """Save tensors; of those that no recomputation needs only their shape."""
        if label in self.policy.unneeded_layers:
            self.entries.append((label, tree_map_only(Tensor, _pack_shape_only, value)))
        else:
            self.entries.append((label, tree_map_only(Tensor, self._pack_tensor, value)))

    def next_result(self, label: str) -> Any:
        """Return the next saved tensors and drop them from the queue."""
        if not self.entries:
            raise RuntimeError(
                f"{label} is computed again, but what was kept of it is gone. It serves one "
                "backward pass. Compute the loss again, or set "
                "memory.recompute_collectives='again' and recompute='full'."
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
    """A tensor in a store; without a store only its shape, filled with NaN when read."""

    store: ActivationStore | None
    packed: Any

    def unpack_tensor(self) -> Tensor:
        if self.store is not None:
            return self.store.unpack(self.packed)
        shape, options = self.packed
        return torch.full(shape, torch.nan, **options)


def _pack_shape_only(x: Tensor) -> _PackedTensor:
    # The placeholder is filled with NaN, so that a result that is needed after all shows.
    assert x.is_floating_point(), (x.shape, x.dtype)
    return _PackedTensor(None, (x.shape, {"dtype": x.dtype, "device": x.device}))


def _detach_with_version(x: Tensor) -> Tensor:
    """Return the tensor without its autograd history, but with its version counter.

    Below autograd a view does not share the version counter unless ADInplaceOrView is enabled (as
    torch's own checkpointing does).
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return x.detach()
