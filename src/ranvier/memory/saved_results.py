"""Results that a block saves in its forward pass for its recomputation, first in, first out.

A checkpointed block is recomputed in backward (`nn.activation_checkpoint`). Saved results are
neither recomputed nor communicated again: results of matrix products with selective recomputation,
and results of collectives if the model saves them (communication-aware checkpointing of
DeepSpeed-TED, Singh et al. 2023). Each call of a block has its own queue, as several micro-batches
may be in flight. The recomputation takes the results of the forward pass from the queue. It may end
early: torch stops it when backward has all tensors that it needs. Weights gathered over depth are
not saved here, as the bucket scheduler keeps them for forward, recomputation and backward.
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
from ranvier.grid import Axis, Grid
from ranvier.trace import Trace

T = TypeVar("T")
CollectiveReuse = Literal["rerun", "save", "auto"]
STOP_RECOMPUTATION: type[Exception] | tuple[()] = getattr(checkpoint, "_StopRecomputationError", ())
"""The exception with which torch ends a recomputation; without it, unneeded results are unknown."""


class ActivationStore(Protocol):
    """Stores the saved tensors of blocks until backward."""

    def pack(self, x: Tensor) -> Any:
        """Returns a placeholder for a tensor until backward."""

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor of a placeholder."""

    def block_context(self, name: str) -> AbstractContextManager[None]:
        """Returns a context in which tensors that autograd saves for a block are also stored."""


class InPlaceStore:
    """A store that leaves all tensors on their device."""

    def pack(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns the tensor and its version counter."""
        return x, x._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """Returns the tensor; raises if it was modified."""
        return check_unchanged(*packed)

    def block_context(self, name: str) -> AbstractContextManager[None]:
        """Returns a null context."""
        return nullcontext()


def check_unchanged(x: Tensor, version: int) -> Tensor:
    """Returns a saved tensor; raises if it was modified after the save, as autograd does."""
    if x._version != version:
        raise RuntimeError(
            f"A saved tensor of shape {tuple(x.shape)} was modified {x._version - version} times "
            "before backward. Tensors that a block saves must not change. Use out-of-place "
            "operations."
        )
    return x


@dataclass
class SavePolicy:
    """Which results the blocks of a model save for their recomputation, and where."""

    trace: Trace = field(default_factory=Trace)
    collectives: CollectiveReuse = "rerun"
    """Whether recomputation runs the collectives of blocks again or uses saved results."""
    chosen_layers: frozenset[str] | None = None
    """Layers whose results are saved, after `auto` is resolved; None for all layers."""
    saves_attention: bool = False
    """Whether attention over context is always saved: at long sequences it is most of a step."""
    gather_group: str = ""
    """Group over which compiled graphs gather weights, which are not saved."""
    store: ActivationStore = field(default_factory=InPlaceStore)
    unneeded_layers: set[str] = field(default_factory=set)
    """Layers whose results recomputation does not need, found so far (the last of a block)."""

    @classmethod
    def for_grid(cls, grid: Grid, gather_axis: Axis) -> SavePolicy:
        """Returns the policy of a model on a grid, whose weights are gathered over an axis."""
        saves_attention = grid.degrees["context"] > 1
        return cls(grid.trace, saves_attention=saves_attention, gather_group=gather_axis.group_name)

    def saves_layer(self, where: str) -> bool:
        """Whether the results of a layer are saved."""
        return self.collectives != "rerun" and (
            self.chosen_layers is None or where in self.chosen_layers
        )

    @property
    def saves_all_layers(self) -> bool:
        """Whether the results of all layers are saved, for compiled graphs without layer names."""
        return self.collectives != "rerun" and self.chosen_layers is None

    def open_results(self, *, selective: bool) -> SavedResults | None:
        """Returns a queue for one call of a block, or None if nothing would be saved."""
        some = self.collectives != "rerun" and self.chosen_layers != frozenset()
        if selective or some or self.saves_attention:
            return SavedResults(self, selective)
        return None


@dataclass
class SavedResults:
    """Queue of the results that one call of a block saves."""

    policy: SavePolicy
    selective: bool
    """Whether matrix products are also saved, except inside of a saved result."""
    is_recompute: bool = False
    """Whether the block is being recomputed."""
    where: str = ""
    """Trace scope of the block; its recomputation runs inside the scope of another layer."""
    entries: deque[tuple[str, Any]] = field(default_factory=deque)

    @contextmanager
    def block_run(self) -> Iterator[None]:
        """Returns a context for the forward pass of the block, or its recomputation."""
        trace = self.policy.trace
        # The recomputation runs in the scope of another layer's backward, so the scope is stored
        # in the first run.
        if not self.is_recompute:
            self.where = trace.where
        before = trace.saved_results
        trace.saved_results = self
        try:
            with trace.named_scope(self.where):
                yield
        finally:
            trace.saved_results = before
            # Also after an error, as torch ends a recomputation early with an exception.
            self.is_recompute = True

    def run_once(self, work: Callable[[], T], *, always: bool = False) -> T:
        """Runs work that communicates; in recomputation returns the saved result, if any.

        always: save the result whatever the policy says of the layer.
        """
        keeping = self.policy
        trace = keeping.trace
        where = keeping.trace.where
        if not always and not keeping.saves_layer(where):
            return work()
        if self.is_recompute:
            kept: T = self.next_result(where)
            return kept
        # The whole result is saved, so collectives and products inside of it are not saved.
        with trace.outside_block(), hide_from_dispatch_modes() if self.selective else nullcontext():
            out = work()
        self.save_result(where, out)
        return out

    def has_result(self, where: str) -> bool:
        """Whether the next result of a layer was saved, so that it need not be computed."""
        return self.is_recompute and self.policy.saves_layer(where)

    def save_result(self, label: str, value: Any) -> None:
        """Saves tensors, or only their shapes if no recomputation needs them."""
        if label in self.policy.unneeded_layers:
            self.entries.append((label, tree_map_only(Tensor, _pack_shape_only, value)))
        else:
            self.entries.append((label, tree_map_only(Tensor, self._pack_tensor, value)))

    def next_result(self, label: str) -> Any:
        """Returns the next saved tensors and drops them from the queue."""
        if not self.entries:
            raise RuntimeError(
                f"{label} is recomputed, but its saved results were already used. They are kept "
                "for one backward pass. Compute the loss again, or set "
                "memory.recompute_collectives='rerun' and recompute='full'."
            )
        kept, value = self.entries.popleft()
        if kept != label:
            raise RuntimeError(
                f"The recomputation of a block runs {label} where its forward pass ran {kept}. "
                "Both must run the same operations. Make the block depend only on its inputs and "
                "weights."
            )
        return tree_map_only(_PackedTensor, lambda one: one.unpack_tensor(), value)

    def _pack_tensor(self, x: Tensor) -> _PackedTensor:
        return _PackedTensor(self.policy.store, self.policy.store.pack(detach_with_version(x)))


@dataclass(frozen=True)
class _PackedTensor:
    """A tensor in a store; without a store only its shape, which is read as NaN."""

    store: ActivationStore | None
    packed: Any

    def unpack_tensor(self) -> Tensor:
        if self.store is not None:
            return self.store.unpack(self.packed)
        shape, options = self.packed
        return torch.full(shape, torch.nan, **options)


def _pack_shape_only(x: Tensor) -> _PackedTensor:
    # The placeholder is read as NaN, so that using it by mistake is visible.
    assert x.is_floating_point(), (x.shape, x.dtype)
    return _PackedTensor(None, (x.shape, {"dtype": x.dtype, "device": x.device}))


def detach_with_version(x: Tensor) -> Tensor:
    """Returns the tensor without its autograd history, but with its version counter.

    Below autograd a view does not share the version counter unless ADInplaceOrView is enabled, as
    in torch's own checkpointing.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return x.detach()
