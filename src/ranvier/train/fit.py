"""Fit: how a run uses the memory of its device, found by measuring one block.

With `plan.recompute = budget` one block runs forward and backward in each kind, and the model once
without blocks. What they keep and need at most is put into `memory.budget`, which chooses a kind
for each block and, if it was left open, the micro-batch. Kinds change no result.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranvier.comm.agree import largest, told
from ranvier.comm.bucket import Bucket
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.memory import budget
from ranvier.memory.budget import Block, Kind, Need
from ranvier.models import Decoder
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel import Parallel, parallel_of
from ranvier.pipeline.choice import read, written
from ranvier.plan import Plan
from ranvier.run import Run

RESERVE = 0.05
"""Share of a device's memory that is left free: gaps between tensors, space of its libraries."""
GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """A micro-batch, the kinds of the blocks, and what they need."""

    micro_batch: int
    kinds: tuple[Kind, ...]
    bytes: int
    time: float
    """Of a token, relative."""


def fit(
    run: Run, model: Decoder, optimizer: Optimizer, device: torch.device, *, local_ranks: int
) -> tuple[Run, list[str]]:
    """The run with its micro-batch, and a line that says what was chosen; blocks get their kinds.

    Nothing is measured unless the plan asks for it. Communicates: as a block and as the model
    without blocks, a few times; numbers over all axes.
    """
    plan, parallel = run.plan, parallel_of(model)
    if plan.recompute != "budget":
        return run, []
    available = -largest(-room(plan, device, local_ranks), parallel.grid, device)
    best, short = None, 0
    for micro in candidates(plan, run.data.seq):
        tokens = micro * run.data.seq
        if best is not None and best.time <= budget.time(tokens):
            break  # smaller ones cannot be faster
        accumulated = micro * plan.replicas < plan.batch
        need = measured(run, model, optimizer, device, micro, accumulated=accumulated)
        kinds = None if need is None else budget.assigned(need, available)
        if need is not None:
            short = min(short or budget.least(need), budget.least(need))
        if need is not None and kinds is not None:
            time = budget.time(tokens, budget.share(kinds))
            choice = Choice(micro, kinds, need.of(kinds), time)
            best = choice if best is None or time < best.time else best
    if best is None:
        raise PlanError(_refusal(plan, available, short))
    parallel.kinds.update(zip(parallel.kinds, best.kinds, strict=True))
    settled = replace(run, plan=replace(plan, micro_batch=best.micro_batch))
    return settled, [_said(best, available)]


def candidates(plan: Plan, seq: int) -> list[int]:
    """Micro-batches to try, largest first: the given one, or those that are of use."""
    if plan.micro_batch > 0:
        return [plan.micro_batch]
    multiple = plan.col if plan.inner == "samples" else 1
    return budget.useful(plan.batch // plan.replicas, seq, multiple)


def room(plan: Plan, device: torch.device, local_ranks: int) -> int:
    """Bytes that this rank may use, what it holds already included."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        there = int(free + torch.cuda.memory_reserved(device) - RESERVE * total)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        there = int((1.0 - RESERVE) * total / local_ranks)
    return min(there, int(plan.memory * GIB)) if plan.memory > 0.0 else there


def _said(choice: Choice, available: int) -> str:
    words: dict[Kind, str] = {"none": "keep all", "selective": "selective", "full": "full"}
    counts = [(choice.kinds.count(kind), word) for kind, word in words.items()]
    blocks = ", ".join(f"{count} {word}" for count, word in counts if count)
    return (
        f"memory: {choice.bytes / GIB:.3g} of {available / GIB:.3g} GiB: micro-batch "
        f"{choice.micro_batch}, recomputation of blocks: {blocks}"
    )


def _refusal(plan: Plan, available: int, short: int) -> str:
    least = f"at least {short / GIB:.3g} GiB" if short else "more than its device has"
    remedy = "a smaller plan.micro_batch, " if plan.micro_batch > 1 else ""
    remedy += "a larger plan.memory, " if plan.memory > 0.0 else ""
    return (
        f"plan.recompute='budget': a rank needs {least}, but may use {available / GIB:.3g} GiB. "
        "Weights, moments, gradients and what a block computes again must fit. Use "
        f"{remedy}a smaller data.seq or model.size, or more ranks on depth, row or col."
    )


def bounded(
    run: Run, model: Decoder, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> list[str]:
    """Settle how many micro-batches a stage may hold, by measuring one; lines on the pipeline.

    Communicates: as a forward and backward pass inside the stage, and a number over all axes.
    """
    parallel, plan = parallel_of(model), run.plan
    pipeline = parallel.pipeline
    stage = pipeline.runtime.stage
    if stage.count == 1:
        return []
    lines = stage.words()
    if plan.memory > 0.0 and plan.credits == 0:
        batch = _blank(run, plan.micro_batch, device)
        rows, cols = (plan.row * plan.context, plan.col)
        shape = (plan.micro_batch, run.data.seq // rows, run.model.embed // cols)
        dtype, kept = parallel.queue.buckets[0].data.dtype, 0
        parallel.moment.samples = batch.samples
        for chunk, parts in enumerate(stage.chunks):
            x, more = None, {"scored": False} if stage.vocabulary else {}
            if not stage.enters(chunk) or stage.vocabulary:
                x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            run_it = partial(stage.run, x, parts, **batch.inputs(), **more)
            kept = max(kept, _pass(run_it, [x, batch.inputs()], parallel, device).kept)
        fixed = _fixed(parallel, optimizer, device) + sum(_gradients(parallel, True).values())
        available = room(plan, device, local_ranks)
        fits = (available - fixed) // max(kept, 1)
        limit = -largest(-int(min(fits, 2**31)), parallel.grid, device)
        if limit < 1:
            raise PlanError(
                f"plan.memory={plan.memory} leaves room for no micro-batch: of "
                f"{available / GIB:.3g} GiB weights, gradients and moments take "
                f"{fixed / GIB:.3g} on rank {parallel.grid.rank}, a micro-batch {kept / GIB:.3g}. "
                "A stage holds one at least. Use a larger plan.memory, a smaller "
                "plan.micro_batch, or plan.recompute='full'."
            )
        pipeline.how = replace(pipeline.how, limit=limit)
        lines.append(f"a stage may hold {limit} micro-batches in {available / GIB:.3g} GiB")
    # the simulator runs on one rank, and all do what it found
    found = pipeline.policy(plan.micro_batches) if parallel.grid.rank == 0 else None
    policy = read(told(written(found), parallel.grid, device), pipeline.shape(plan.micro_batches))
    pipeline.chosen[plan.micro_batches] = policy
    return [*lines, f"policy {plan.policy}: {policy}"]


# ---- measuring --------------------------------------------------------------------------


def measured(
    run: Run,
    model: Decoder,
    optimizer: Optimizer,
    device: torch.device,
    micro: int,
    *,
    accumulated: bool,
) -> Need | None:
    """What a step needs in micro-batches of `micro`; None if one block is too much already.

    Communicates: see `fit`.
    """
    parallel, found, fits = parallel_of(model), dict[Kind, Block](), True
    first = next(iter(parallel.kinds))
    before, blocks = parallel.kinds[first], model.blocks
    probe, batch = _Probe(), _blank(run, micro, device)
    parallel.moment.samples = batch.samples
    gc.collect()  # nothing older shall be freed while bytes are counted
    try:
        model.blocks = nn.ModuleList([probe])
        head = _pass(lambda: model(**batch.inputs()), batch.inputs(), parallel, device)
        model.blocks = blocks
        for kind in budget.COST:
            parallel.kinds[first] = kind
            found[kind] = _pass(lambda: blocks[0](*probe.again()), probe.inputs, parallel, device)
    except torch.OutOfMemoryError:
        fits = False
    finally:
        model.blocks, parallel.kinds[first] = blocks, before
        _forget(parallel, device)
    if largest(int(not fits), parallel.grid, device):
        return None

    def most(number: int) -> int:
        return largest(number, parallel.grid, device)

    return Need(
        {kind: Block(most(block.kept), most(block.peak)) for kind, block in found.items()},
        count=len(parallel.kinds),
        gradient=most(max(_gradients(parallel, accumulated)[name] for name in parallel.kinds)),
        fixed=most(_fixed(parallel, optimizer, device)),
        head=most(head.peak),
        outside=most(_gradients(parallel, accumulated)[""]),
        accumulated=accumulated,
    )


class _Probe(nn.Module):
    """Stands where blocks stand: what they are called with."""

    inputs: tuple[Any, ...] = ()

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """Take note."""
        self.inputs = (x, *others)
        return x

    def again(self) -> tuple[Any, ...]:
        """The same for another pass, with nothing before it."""
        return self.inputs[0].detach().requires_grad_(), *self.inputs[1:]


def _blank(run: Run, micro: int, device: torch.device) -> Batch:
    """A micro-batch of one token again and again, in two documents a sample if any are packed."""
    tokens = torch.zeros(micro, run.data.seq, dtype=torch.int64)
    samples = torch.arange(micro)
    if not run.data.packed or run.data.seq < 2:
        return Batch(tokens, tokens, samples=samples).to(device)
    positions = torch.arange(run.data.seq).expand(micro, -1)
    documents = (positions >= run.data.seq // 2).long()
    return Batch(tokens, tokens, positions.contiguous(), documents, samples).to(device)


def _pass(
    forward: Callable[[], Tensor], inputs: Any, parallel: Parallel, device: torch.device
) -> Block:
    """What a forward and backward pass keeps between the two, and needs at most.

    The first of two is not measured: compilers and libraries take memory of their own in it.
    """
    for _ in range(2):
        _forget(parallel, device)
        weights = [bucket.data for bucket in parallel.queue.buckets]
        watch: _Watch = _OnDevice(device)
        if device.type != "cuda":
            watch = _OnHost([weights, inputs])
        with watch:
            y = forward()
            kept = watch.held()
            y.backward(torch.zeros_like(y))
            peak = watch.peak()
        del y
    return Block(kept, peak)


def _forget(parallel: Parallel, device: torch.device) -> None:
    """Drop gradients and gathered weights; nothing may be under way any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    parallel.queue.begin("")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # what a run reports is its own


class _Watch(Protocol):
    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...

    def held(self) -> int:
        """Bytes made inside that still live."""

    def peak(self) -> int:
        """The most of them at any time."""


class _OnDevice:
    """What torch counts on a device, also of compiled code."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *_: Any) -> None:
        pass

    def held(self) -> int:
        """See `_Watch`."""
        return torch.cuda.memory_allocated(self.device) - self.before

    def peak(self) -> int:
        """See `_Watch`."""
        return torch.cuda.max_memory_allocated(self.device) - self.before


class _OnHost(TorchDispatchMode):
    """Storages that operations use or make; nobody else counts them on a host.

    Of compiled code that is what it hands to autograd, not what it uses for a moment. A hook on
    what autograd saves would not do, as a selective block keeps its results elsewhere.
    """

    supports_higher_order_operators = True

    def __init__(self, before: Any) -> None:
        """before: tensors that are there already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """Known and alive by address, with their bytes; 0 if they were there before."""
        self.most = 0
        self._meet(before, new=False)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code may run while this mode is on."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run; the most is looked at after each operation."""
        out = func(*args, **(kwargs or {}))
        self._meet((args, kwargs, out), new=True)
        self.most = max(self.most, self.held())
        return out

    def _meet(self, values: Any, *, new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                known = self.storages.get(reference.cdata)
                if known is None or known[0].expired():
                    size = storage.nbytes() if new else 0
                    self.storages[reference.cdata] = (reference, size)

    def held(self) -> int:
        """See `_Watch`."""
        self.storages = {
            at: (reference, size)
            for at, (reference, size) in self.storages.items()
            if not reference.expired()
        }
        return sum(size for _, size in self.storages.values())

    def peak(self) -> int:
        """See `_Watch`."""
        return self.most


# ---- counting ---------------------------------------------------------------------------


def _fixed(parallel: Parallel, optimizer: Optimizer, device: torch.device) -> int:
    """Weights, master weights and moments, what else lies on a device, and buckets under way."""
    queue = parallel.queue
    tensors = [bucket.data for bucket in queue.buckets]
    for held in optimizer.store.held.values():
        tensors += held.values()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    there = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    # Over depth and data one bucket is being moved while the next one is filled.
    wide, narrow = queue.dtype.itemsize, queue.buckets[0].data.element_size()
    depth = queue.gather_axis.size
    moved = [
        2 * bucket.size * depth * (wide + (narrow if bucket.split else 0))
        for bucket in queue.buckets
        if bucket.split or queue.data_axis.size > 1
    ]
    return max(sum(storages.values()), there) + max(moved, default=0)


def _gradients(parallel: Parallel, accumulated: bool) -> dict[str, int]:
    """Bytes of the gradients of each block, and at "" of all that is in none."""
    found = {"": 0, **dict.fromkeys(parallel.kinds, 0)}
    for bucket in parallel.queue.buckets:
        found[bucket.name if bucket.name in parallel.kinds else ""] += _gradient(
            bucket, accumulated
        )
    return found


def _gradient(bucket: Bucket, accumulated: bool) -> int:
    """Bytes of the gradient of a bucket.

    It stays as it came, or is wide once it is added to another or goes over an axis.
    """
    if not bucket.trainable:
        return 0
    ranks = bucket.queue.data_axis.size
    wide = bucket.size * bucket.queue.dtype.itemsize
    if accumulated or bucket.late or bucket.copied:
        return wide
    return wide // ranks if bucket.split or ranks > 1 else bucket.data.nbytes
