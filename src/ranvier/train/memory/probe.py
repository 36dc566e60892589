"""Memory of a training step, measured on the model with only two of its blocks.

All blocks are alike, so two of them show what each adds: what it saves for backward, its temporary
peak, and its gradient. The passes are those of a real step, with embedding and head.
`memory.recompute_budget` extrapolates to all blocks, and `planner.offload_search` chooses by it.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.comm.consensus import broadcast_text, max_each, max_over_ranks
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.data.batch import SampleBatch, batch_type
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.memory import recompute_budget
from ranvier.memory.recompute_budget import BlockMemory, PassMemory, RecomputeMode
from ranvier.memory.saved_results import InPlaceStore
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.pipeline.policy_search import policy_from_text, policy_to_text
from ranvier.planner.memory import measured_states
from ranvier.sharding import ShardingTable
from ranvier.train.step import forward_backward

RESERVED_FRACTION = 0.05
"""Fraction of the device memory left free for fragmentation and libraries."""
ALLOCATOR_SLACK_BYTES = 48 * 2**20
"""Bytes of a limit that torch's allocator may leave unused in its segments (of 2 and 20 MiB)."""
GIB = 2**30


def candidate_micro_batches(plan: Plan, seq: int) -> list[int]:
    """Micro-batches to try, largest first: the given one, or all useful ones."""
    if plan.micro_batch > 0:
        return [plan.micro_batch]
    multiple = ShardingTable.from_plan(plan).batch_multiple(plan.degrees)
    return recompute_budget.candidate_micro_batches(
        plan.global_batch // plan.num_replicas, seq, multiple
    )


def available_bytes(limit: float, device: torch.device, local_ranks: int) -> int:
    """Bytes that this rank may use, including what it holds already. limit: GiB; 0: no limit.

    Gaps in segments that hold other tensors of the process do not count as free, since tensors of
    other sizes may not fit into them.
    """
    if device.type == "cuda":
        # Empty segments can be returned to the device and are not gaps.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        gaps = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        there = int(free + torch.cuda.memory_allocated(device) - RESERVED_FRACTION * total)
        if limit > 0.0:
            limit = max(limit - (ALLOCATOR_SLACK_BYTES + gaps) / GIB, 1e-9)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        there = int((1.0 - RESERVED_FRACTION) * total / local_ranks)
    if limit > 0.0:
        return min(there, int(limit * GIB))
    return there


def resolve_in_flight_limit(
    run: RunConfig, model: nn.Module, device: torch.device, local_ranks: int
) -> list[str]:
    """Choose how many micro-batches a stage may hold, by measuring one; notes on the pipeline.

    Communicates: as a forward and backward pass inside the stage, and a number over all axes.
    """
    parallel = get_parallel_model(model)
    plan = run.plan
    limited = run.memory.device_limit_gib
    pipeline = parallel.pipeline
    stage = pipeline.executor.stage
    if stage.num_stages == 1:
        return []
    lines = stage.describe_stages()
    if limited > 0.0 and plan.max_in_flight == 0:
        kept = max(
            _activation_bytes(run, parallel, chunk, device) for chunk in range(len(stage.chunks))
        )
        own = measured_states.model_state_sizes(
            parallel, moments=run.optim.state_dtype, tile=run.memory.offload_tile
        )
        wide = sum(b.size for b in parallel.bucket_scheduler.buckets if b.trainable)
        # Bytes that do not depend on the micro-batches in flight: weights, communication buffers,
        # gradients in the dtype of their reduction, and optimizer states.
        fixed = (
            own.weight_bytes
            + own.communication
            + wide * parallel.bucket_scheduler.reduce_dtype.itemsize
        )
        fixed += (
            own.state_bytes
            if run.memory.optimizer_states == "device"
            else own.state_ring + own.vector_states
        )
        available = available_bytes(limited, device, local_ranks)
        fits = (available - fixed) // max(kept, 1)
        # The stage with the least room decides for all: the policy assumes one limit.
        limit = -max_over_ranks(-int(min(fits, 2**31)), parallel.grid, device)
        if limit < 1:
            raise PlanError(
                f"memory.device_limit_gib={limited} leaves room for no micro-batch: of "
                f"{available / GIB:.3g} GiB weights, gradients and moments take "
                f"{fixed / GIB:.3g} on rank {parallel.grid.rank}, a micro-batch {kept / GIB:.3g}. "
                "A stage holds one at least. Use a larger memory.device_limit_gib, a smaller "
                "plan.micro_batch, or plan.recompute='full'."
            )
        pipeline.config = replace(pipeline.config, max_in_flight=limit)
        lines.append(f"a stage may hold {limit} micro-batches in {available / GIB:.3g} GiB")
    # The policy search simulates on rank 0 only; all ranks follow what it found.
    if parallel.grid.rank == 0:
        found = pipeline.policy_for_step(plan.num_micro_batches)
    else:
        found = None
    policy = policy_from_text(
        broadcast_text(policy_to_text(found), parallel.grid, device),
        pipeline.step_shape(plan.num_micro_batches),
    )
    pipeline.policies[plan.num_micro_batches] = policy
    return [*lines, f"policy {plan.schedule}: {policy}"]


def _activation_bytes(
    run: RunConfig, parallel: ParallelModel, chunk: int, device: torch.device
) -> int:
    """Bytes that a micro-batch saves for backward in a chunk of this stage."""
    plan = run.plan
    stage = parallel.pipeline.executor.stage
    batch = blank_batch(run, plan.micro_batch, device)
    inputs = batch.local_inputs(parallel.grid, parallel.table)
    x = None
    parallel.step_context.samples = batch.samples
    shape = parallel.table.local_shape(
        "embed", plan.micro_batch, run.data.seq_len, run.model.embed, plan.degrees
    )
    # All but the first chunk receive activations instead of tokens.
    if not stage.is_first_chunk(chunk) or stage.vocab_layers:
        dtype = parallel.bucket_scheduler.buckets[0].data.dtype
        x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    if stage.vocab_layers:
        more = {"scored": False}
    else:
        more = {}
    kept = 0
    # The first pass also allocates memory of compilers and libraries; the second one counts.
    for _ in range(2):
        drop_gradients(parallel, device)
        with _count_memory(parallel, [x, inputs], device) as watch:
            y = stage.run_parts(x, stage.chunks[chunk], **inputs, **more)
            kept = watch.live_bytes()
            y.backward(torch.zeros_like(y))
        del y
    drop_gradients(parallel, device)
    return kept


# ---- measuring --------------------------------------------------------------------------


def block_list(model: nn.Module) -> nn.ModuleList:
    """The blocks of a model."""
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList), type(blocks)
    return blocks


def measure_passes(
    run: RunConfig,
    model: nn.Module,
    device: torch.device,
    micro: int,
    *,
    passes: int,
    kinds: Sequence[RecomputeMode] = tuple(recompute_budget.RECOMPUTE_COST),
) -> tuple[PassMemory, ...] | None:
    """Measure the `passes` micro-batches of a step, of `micro` samples each; None if out of memory.

    The model runs with two of its blocks, in each recomputation mode. All ranks get equal numbers.
    Communicates: as a step with two blocks, twice for each mode; numbers over all axes.
    """
    parallel = get_parallel_model(model)
    blocks = block_list(model)
    keeping = parallel.step_context.save_policy
    names = parallel.blocks[:2]
    # Offloaded activations are computed, not measured: everything stays on the device here.
    store, keeping.store = (
        keeping.store,
        InPlaceStore(),
    )
    before = {name: parallel.recompute_modes[name] for name in names}
    batches = [blank_batch(run, micro, device) for _ in range(passes)]
    found: dict[RecomputeMode, list[PassMemory]] = {}
    # Older garbage must not be freed while bytes are counted.
    gc.collect()
    try:
        model.blocks = nn.ModuleList([blocks[0], blocks[min(1, len(blocks) - 1)]])
        for kind in kinds:
            parallel.recompute_modes.update(dict.fromkeys(names, kind))
            found[kind] = _probe_passes(model, batches, device, kind)
    except torch.OutOfMemoryError:
        found = {}
    finally:
        model.blocks = blocks
        keeping.store = store
        parallel.recompute_modes.update(before)
        drop_gradients(parallel, device)
    # One rank without enough memory is enough to discard the measurement on all.
    if max_over_ranks(int(not found), parallel.grid, device):
        return None
    return tuple(
        _merge_passes([found[kind][i] for kind in kinds], parallel.grid, device)
        for i in range(passes)
    )


def _probe_passes(
    model: nn.Module, batches: Sequence[SampleBatch], device: torch.device, kind: RecomputeMode
) -> list[PassMemory]:
    """Measure passes over a model with two blocks in one recomputation mode.

    The first run is not measured: compilers and libraries allocate memory in it, and the bucket
    scheduler records the order of blocks.
    """
    parallel = get_parallel_model(model)
    inputs = [batch.model_inputs() for batch in batches]
    forward_backward(model, batches)
    drop_gradients(parallel, device)
    marks: list[_MemoryMark] = []
    with _count_memory(parallel, inputs, device) as watch:

        def note(name: str) -> None:
            # The hook fires twice if a value comes in two parts.
            if not marks or marks[-1].name != name:
                marks.append(_MemoryMark.record_now(name, watch))

        with mark_blocks(model, note):
            forward_backward(model, batches)
        note("end")
    return [*_passes_from_marks(marks, kind, parallel)]


@dataclass(frozen=True)
class _MemoryMark:
    """Live bytes at a point of a pass, and the peak since the previous point."""

    name: str
    live_bytes: int
    peak_bytes: int

    @classmethod
    def record_now(cls, name: str, watch: _MemoryCounter) -> _MemoryMark:
        """Record the current point and reset the peak."""
        held = watch.live_bytes()
        most = watch.peak_bytes()
        watch.reset_peak()
        return cls(name, held, most)


@contextmanager
def mark_blocks(model: nn.Module, note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` at the points of a pass: forward 0, forward 1, ..., head, ..., backward 0, leave.

    head: the forward pass of the last block is done. leave: the backward pass of the first one is.
    """
    members = block_list(model)
    blocks = {id(block): block for block in members}
    inner = {at: block.forward for at, block in blocks.items()}
    count = len(members)
    # A block may occur twice in `model.blocks`, so blocks are numbered by their calls.
    calls = itertools.count()

    def behind(value: Any, name: str) -> None:
        # A block passes on one tensor, or two whose addition is deferred.
        for part in value if isinstance(value, tuple) else (value,):
            if part.requires_grad:
                part.register_hook(lambda _: note(name))

    def forward(at: int, x: Any, *others: Any) -> Any:
        i = next(calls) % count
        note(f"forward {i}")
        behind(x, f"backward {i - 1}" if i else "leave")
        y = inner[at](x, *others)
        if i == count - 1:
            note("head")
            behind(y, f"backward {i}")
        return y

    try:
        for at, block in blocks.items():
            block.forward = partial(forward, at)
        yield
    finally:
        for at, block in blocks.items():
            block.forward = inner[at]


PASS_MARKS = ("forward 0", "forward 1", "head", "backward 1", "backward 0", "leave")
"""The points of a pass of a model with two blocks, in order."""


def _passes_from_marks(
    marks: Sequence[_MemoryMark], kind: RecomputeMode, parallel: ParallelModel
) -> Iterator[PassMemory]:
    """Derive the memory of passes from their marks; see `recompute_budget.PassMemory`."""
    before = 0
    first_enter = 0
    each = len(PASS_MARKS)
    name = parallel.blocks[:2][-1]
    count = len(marks) // each
    assert [mark.name for mark in marks] == [*PASS_MARKS * count, "end"], marks
    for at in range(0, len(marks) - 1, each):
        _, second, head, back, first, leave, end = marks[at : at + each + 1]
        # The second block's forward: what it leaves behind is what it saves for backward.
        kept = head.live_bytes - second.live_bytes
        last = at // each == count - 1
        # Its backward frees the saved tensors and adds the gradient.
        made = before + first.live_bytes - back.live_bytes + kept
        gradient = measured_states.block_grad_bytes(
            parallel, name, passes=at // each + 1, last=last
        )
        # With offloading the gradient leaves for the host and weights come and go: use its size.
        if parallel.bucket_scheduler.host_offload is None:
            gradient = min(made, gradient)
        else:
            made = gradient
        peak = first.peak_bytes - back.live_bytes + kept
        enter = second.live_bytes - kept - 2 * before
        first_enter = first_enter or enter
        yield PassMemory(
            {kind: BlockMemory(kept, max(peak, kept), head.peak_bytes - second.live_bytes)},
            input_bytes=enter,
            head_peak=back.peak_bytes - head.live_bytes,
            after_head=back.live_bytes - head.live_bytes,
            embedding_peak=end.peak_bytes - leave.live_bytes,
            block_grad=gradient,
            earlier_block_grad=before,
            outside_grad=max(end.live_bytes - 2 * gradient, 0),
            earlier_outside_grad=max(enter - first_enter, 0),
            reduction_buffer=made - gradient,
        )
        # Offloaded gradients are not on the device in the next pass.
        if parallel.bucket_scheduler.host_offload is None:
            before = gradient
        else:
            before = 0


def _merge_passes(passes: Sequence[PassMemory], grid: Grid, device: torch.device) -> PassMemory:
    """Merge the modes of a pass; outside of blocks the maximum over all ranks and modes."""
    names = [one.name for one in fields(PassMemory) if one.name != "blocks"]
    numbers = [max(getattr(one, name) for one in passes) for name in names]
    blocks = {kind: block for one in passes for kind, block in one.blocks.items()}
    inside = [number for block in blocks.values() for number in astuple(block)]
    most = max_each([*numbers, *inside], grid, device)
    parts = iter(most[len(names) :])
    every = {kind: BlockMemory(next(parts), next(parts), next(parts)) for kind in blocks}
    return PassMemory(every, **dict(zip(names, most, strict=False)))


def blank_batch(run: RunConfig, micro: int, device: torch.device) -> SampleBatch:
    """A micro-batch for measurements."""
    return batch_type(run.model).blank(run, micro).to(device)


@contextmanager
def _count_memory(
    parallel: ParallelModel, inputs: Any, device: torch.device
) -> Iterator[_MemoryCounter]:
    """Count the bytes that are allocated inside."""
    watch: _MemoryCounter = _DeviceMemoryCounter(device)
    if device.type != "cuda":
        queue = parallel.bucket_scheduler
        watch = HostMemoryCounter(
            [[b.data for b in queue.buckets], inputs], partial(live_gradients, queue)
        )
    with watch:
        yield watch


def live_gradients(queue: BucketScheduler) -> list[Tensor]:
    """Gradients and unsharded weights that the bucket scheduler currently holds."""
    found: list[Tensor] = []
    for bucket in queue.buckets:
        for some in (bucket.grad, bucket.final_grads):
            found += [] if some is None else some.parts.values()
        found += [] if bucket.unsharded_grads is None else [bucket.unsharded_grads]
        found += bucket.unsharded_params or []
    return found


def drop_gradients(parallel: ParallelModel, device: torch.device) -> None:
    """Drop gradients and unsharded weights, after all pending work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    parallel.bucket_scheduler.discard_trial()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # The peak that a run reports must not include measurements.
        torch.cuda.reset_peak_memory_stats(device)


class _MemoryCounter(Protocol):
    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...

    def live_bytes(self) -> int:
        """Bytes allocated inside that are still alive."""

    def peak_bytes(self) -> int:
        """Peak of the live bytes."""

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are alive now."""


class _DeviceMemoryCounter:
    """Counts by torch's CUDA allocator, which includes compiled code."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.bytes_before = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *_: Any) -> None:
        pass

    def live_bytes(self) -> int:
        """See `_MemoryCounter`."""
        return torch.cuda.memory_allocated(self.device) - self.bytes_before

    def peak_bytes(self) -> int:
        """See `_MemoryCounter`."""
        return torch.cuda.max_memory_allocated(self.device) - self.bytes_before

    def reset_peak(self) -> None:
        """See `_MemoryCounter`."""
        torch.cuda.reset_peak_memory_stats(self.device)


class HostMemoryCounter(TorchDispatchMode):
    """Counts the storages that operations use or create, as there is no allocator count on a CPU.

    Of compiled code it sees what is handed to autograd, not temporaries. Saved-tensor hooks would
    not be enough, as selective checkpointing saves its results elsewhere.
    """

    supports_higher_order_operators = True
    counts_communication = False
    """Whether communication and deferred work are counted as well."""

    def __init__(self, before: Any, unseen: Callable[[], list[Tensor]] = list) -> None:
        """before: existing tensors. unseen: returns tensors that dispatch does not see."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_tensors, self.known_ids = unseen, list[int]()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """Known live storages by address, with their bytes; 0 if they existed before."""
        self.max_bytes = self.upper_bound = 0
        """The peak bytes, and an upper bound of the live bytes that may include freed storages."""
        self._add_tensors(before, new=False)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled code to run while this mode is active."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and update the peak."""
        out = func(*args, **(kwargs or {}))
        self._add_tensors((args, kwargs, out), new=True)
        self._add_hidden_tensors()
        # The exact count walks over all storages, so it is taken only if the bound exceeds the
        # peak.
        if self.upper_bound > self.max_bytes and self.live_bytes() > self.max_bytes:
            self.max_bytes = self.upper_bound
            self.on_new_peak()
        return out

    def on_new_peak(self) -> None:
        """Called when the live bytes reach a new peak."""

    def _add_hidden_tensors(self) -> None:
        """Add tensors that were created outside of dispatch, if they have changed."""
        unseen = self.hidden_tensors()
        now = [id(x) for x in unseen]
        if now != self.known_ids:
            self.known_ids = now
            self._add_tensors(unseen, new=True)

    def _add_tensors(self, values: Any, *, new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                # An address may have been reused by a new storage after the old one was freed.
                known = self.storages.get(reference.cdata)
                if known is None or known[0].expired():
                    size = storage.nbytes() if new else 0
                    self.storages[reference.cdata] = (reference, size)
                    self.upper_bound += size

    def live_bytes(self) -> int:
        """See `_MemoryCounter`."""
        self._add_hidden_tensors()
        self.storages = {
            at: (reference, size)
            for at, (reference, size) in self.storages.items()
            if not reference.expired()
        }
        self.upper_bound = sum(size for _, size in self.storages.values())
        return self.upper_bound

    def peak_bytes(self) -> int:
        """See `_MemoryCounter`."""
        return self.max_bytes

    def reset_peak(self) -> None:
        """See `_MemoryCounter`."""
        self.max_bytes = self.live_bytes()
