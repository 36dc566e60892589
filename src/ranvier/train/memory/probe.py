"""Fit: the memory that a step of a run needs, found by measuring a model with two of its blocks.

All blocks are alike, so two of them tell what each adds: what it keeps, what it needs for a moment
and the gradient it leaves. The passes are those of a step, with everything that is around blocks.
`memory.budget` adds up the rest, and `planner.fit` chooses by it.
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

from ranvier.buckets.scheduler import Deferred
from ranvier.comm.consensus import largest, most_of, told
from ranvier.config.plan import Plan
from ranvier.config.run import Run
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.memory import recompute_budget
from ranvier.memory.recompute_budget import Block, Kind, Pass
from ranvier.memory.saved_results import Held
from ranvier.models import Decoder
from ranvier.parallel.parallelize import Parallel, parallel_of
from ranvier.pipeline.policy_search import read, written
from ranvier.planner.memory import measured_states
from ranvier.train.step import forward_backward

RESERVE = 0.05
"""Share of a device's memory that is left free: gaps between tensors, space of its libraries."""
SEGMENTS = 48 * 2**20
"""Bytes of a given limit that torch's allocator may leave empty in the segments (of 2 and 20 MiB)
that it takes from a device."""
GIB = 2**30


def candidates(plan: Plan, seq: int) -> list[int]:
    """Micro-batches to try, largest first: the given one, or those that are of use."""
    if plan.micro_batch > 0:
        return [plan.micro_batch]
    multiple = plan.col if plan.inner == "samples" else 1
    return recompute_budget.useful(plan.batch // plan.replicas, seq, multiple)


def room(limit: float, device: torch.device, local_ranks: int) -> int:
    """Bytes that this rank may use, what it holds already included. limit: GiB; 0: none.

    Gaps in segments that other tensors of the process hold do not count as free, since tensors of
    other sizes may not fit into them.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # segments without any tensor are not gaps
        free, total = torch.cuda.mem_get_info(device)
        gaps = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        there = int(free + torch.cuda.memory_allocated(device) - RESERVE * total)
        limit = max(limit - (SEGMENTS + gaps) / GIB, 1e-9) if limit > 0.0 else limit
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        there = int((1.0 - RESERVE) * total / local_ranks)
    return min(there, int(limit * GIB)) if limit > 0.0 else there


def bounded(run: Run, model: Decoder, device: torch.device, local_ranks: int) -> list[str]:
    """Settle how many micro-batches a stage may hold, by measuring one; lines on the pipeline.

    Communicates: as a forward and backward pass inside the stage, and a number over all axes.
    """
    parallel, plan, limited = parallel_of(model), run.plan, run.memory.limit
    pipeline = parallel.pipeline
    stage = pipeline.runtime.stage
    if stage.count == 1:
        return []
    lines = stage.words()
    if limited > 0.0 and plan.credits == 0:
        kept = max(_kept(run, parallel, chunk, device) for chunk in range(len(stage.chunks)))
        own = measured_states.sizes_of(parallel, moments=run.optim.moments, tile=run.memory.tile)
        wide = sum(b.size for b in parallel.queue.buckets if b.trainable)
        fixed = own.weights + own.communication + wide * parallel.queue.dtype.itemsize
        fixed += own.states if run.memory.states == "device" else own.ring + own.small
        available = room(limited, device, local_ranks)
        fits = (available - fixed) // max(kept, 1)
        limit = -largest(-int(min(fits, 2**31)), parallel.grid, device)
        if limit < 1:
            raise PlanError(
                f"memory.limit={limited} leaves room for no micro-batch: of "
                f"{available / GIB:.3g} GiB weights, gradients and moments take "
                f"{fixed / GIB:.3g} on rank {parallel.grid.rank}, a micro-batch {kept / GIB:.3g}. "
                "A stage holds one at least. Use a larger memory.limit, a smaller "
                "plan.micro_batch, or plan.recompute='full'."
            )
        pipeline.how = replace(pipeline.how, limit=limit)
        lines.append(f"a stage may hold {limit} micro-batches in {available / GIB:.3g} GiB")
    # the simulator runs on one rank, and all do what it found
    found = pipeline.policy(plan.micro_batches) if parallel.grid.rank == 0 else None
    policy = read(told(written(found), parallel.grid, device), pipeline.shape(plan.micro_batches))
    pipeline.chosen[plan.micro_batches] = policy
    return [*lines, f"policy {plan.policy}: {policy}"]


def _kept(run: Run, parallel: Parallel, chunk: int, device: torch.device) -> int:
    """Bytes that the activations of a micro-batch take in a chunk of my stage."""
    plan, stage = run.plan, parallel.pipeline.runtime.stage
    batch, x = blank(run, plan.micro_batch, device), None
    parallel.moment.samples = batch.samples
    shape = (
        plan.micro_batch,
        run.data.seq // (plan.row * plan.context),
        run.model.embed // plan.col,
    )
    if not stage.enters(chunk) or stage.vocabulary:
        dtype = parallel.queue.buckets[0].data.dtype
        x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    more = {"scored": False} if stage.vocabulary else {}
    kept = 0
    for _ in range(2):  # compilers and libraries take memory of their own in the first
        forget(parallel, device)
        with _watching(parallel, [x, batch.inputs()], device) as watch:
            y = stage.run(x, stage.chunks[chunk], **batch.inputs(), **more)
            kept = watch.held()
            y.backward(torch.zeros_like(y))
        del y
    forget(parallel, device)
    return kept


# ---- measuring --------------------------------------------------------------------------


def measured(
    run: Run,
    model: Decoder,
    device: torch.device,
    micro: int,
    *,
    passes: int,
    kinds: Sequence[Kind] = tuple(recompute_budget.COST),
) -> tuple[Pass, ...] | None:
    """What passes of `micro` samples each need in a step of so many; None if that is too much.

    The model runs with two of its blocks, in each of the kinds. All ranks get the same numbers.
    Communicates: as a step with two blocks, twice for each kind; numbers over all axes.
    """
    parallel, blocks = parallel_of(model), model.blocks
    keeping, names = parallel.moment.keeping, [*parallel.kinds][:2]
    store, keeping.store = keeping.store, Held()  # what waits elsewhere is counted, not measured
    before = {name: parallel.kinds[name] for name in names}
    batches = [blank(run, micro, device) for _ in range(passes)]
    found: dict[Kind, list[Pass]] = {}
    gc.collect()  # nothing older shall be freed while bytes are counted
    try:
        model.blocks = nn.ModuleList([blocks[0], blocks[min(1, len(blocks) - 1)]])
        for kind in kinds:
            parallel.kinds.update(dict.fromkeys(names, kind))
            found[kind] = _probed(model, batches, device, kind)
    except torch.OutOfMemoryError:
        found = {}
    finally:
        model.blocks, keeping.store = blocks, store
        parallel.kinds.update(before)
        forget(parallel, device)
    if largest(int(not found), parallel.grid, device):
        return None
    return tuple(
        _agreed([found[kind][i] for kind in kinds], parallel.grid, device) for i in range(passes)
    )


def _probed(
    model: Decoder, batches: Sequence[Batch], device: torch.device, kind: Kind
) -> list[Pass]:
    """Passes over a model with two blocks of a kind.

    The first time is not measured: compilers and libraries take memory of their own in it, and the
    order of blocks is noted.
    """
    parallel, inputs = parallel_of(model), [batch.inputs() for batch in batches]
    forward_backward(model, batches)
    forget(parallel, device)
    marks: list[_Mark] = []
    with _watching(parallel, inputs, device) as watch:

        def note(name: str) -> None:
            if not marks or marks[-1].name != name:  # a value may come in two parts
                marks.append(_Mark.now(name, watch))

        with marking(model, note):
            forward_backward(model, batches)
        note("end")
    return [*_passes(marks, kind, parallel)]


@dataclass(frozen=True)
class _Mark:
    """Bytes at a moment, and the most since the one before."""

    name: str
    held: int
    most: int

    @classmethod
    def now(cls, name: str, watch: _Watch) -> _Mark:
        """This moment; what is most begins anew."""
        held, most = watch.held(), watch.peak()
        watch.restart()
        return cls(name, held, most)


@contextmanager
def marking(model: Decoder, note: Callable[[str], None]) -> Iterator[None]:
    """Inside, a pass tells where it is: forward 0, forward 1, ..., head, ..., backward 0, leave.

    head: the last block is done. leave: so is the first one's backward pass.
    """
    blocks = {id(block): block for block in model.blocks}
    inner = {at: block.forward for at, block in blocks.items()}
    count, calls = len(model.blocks), itertools.count()

    def behind(value: Any, name: str) -> None:
        for part in value if isinstance(value, tuple) else (value,):  # one, or two to be added
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


MOMENTS = ("forward 0", "forward 1", "head", "backward 1", "backward 0", "leave")
"""What a pass of a model with two blocks tells."""


def _passes(marks: Sequence[_Mark], kind: Kind, parallel: Parallel) -> Iterator[Pass]:
    """What marks of passes tell; see `budget.Pass`."""
    before, first_enter, each = 0, 0, len(MOMENTS)
    name, count = [*parallel.kinds][:2][-1], len(marks) // each
    assert [mark.name for mark in marks] == [*MOMENTS * count, "end"], marks
    for at in range(0, len(marks) - 1, each):
        _, second, head, back, first, leave, end = marks[at : at + each + 1]
        kept, last = head.held - second.held, at // each == count - 1
        made = before + first.held - back.held + kept
        gradient = measured_states.gradient(parallel, name, passes=at // each + 1, last=last)
        if parallel.queue.homes is None:  # else it leaves, and weights come and go
            gradient = min(made, gradient)
        else:
            made = gradient
        peak, enter = first.most - back.held + kept, second.held - kept - 2 * before
        first_enter = first_enter or enter
        yield Pass(
            {kind: Block(kept, max(peak, kept), head.most - second.held)},
            enter=enter,
            head=back.most - head.held,
            after=back.held - head.held,
            leave=end.most - leave.held,
            gradient=gradient,
            before=before,
            rest=max(end.held - 2 * gradient, 0),
            outside=max(enter - first_enter, 0),
            moving=made - gradient,
        )
        before = gradient if parallel.queue.homes is None else 0  # else it leaves for the host


def _agreed(passes: Sequence[Pass], grid: Grid, device: torch.device) -> Pass:
    """One pass of all kinds: the most that any rank and any kind needs outside of blocks."""
    names = [one.name for one in fields(Pass) if one.name != "blocks"]
    numbers = [max(getattr(one, name) for one in passes) for name in names]
    blocks = {kind: block for one in passes for kind, block in one.blocks.items()}
    inside = [number for block in blocks.values() for number in astuple(block)]
    most = most_of([*numbers, *inside], grid, device)
    parts = iter(most[len(names) :])
    every = {kind: Block(next(parts), next(parts), next(parts)) for kind in blocks}
    return Pass(every, **dict(zip(names, most, strict=False)))


def blank(run: Run, micro: int, device: torch.device) -> Batch:
    """A micro-batch of one token again and again, in two documents a sample if any are packed."""
    tokens = torch.zeros(micro, run.data.seq, dtype=torch.int64)
    samples = torch.arange(micro)
    if not run.data.packed or run.data.seq < 2:
        return Batch(tokens, tokens, samples=samples).to(device)
    positions = torch.arange(run.data.seq).expand(micro, -1)
    documents = (positions >= run.data.seq // 2).long()
    return Batch(tokens, tokens, positions.contiguous(), documents, samples).to(device)


@contextmanager
def _watching(parallel: Parallel, inputs: Any, device: torch.device) -> Iterator[_Watch]:
    """Counts bytes made inside."""
    watch: _Watch = _OnDevice(device)
    if device.type != "cuda":
        queue = parallel.queue
        watch = OnHost([[b.data for b in queue.buckets], inputs], partial(gradients, queue))
    with watch:
        yield watch


def gradients(queue: Deferred) -> list[Tensor]:
    """Gradients of weights, and weights gathered over depth, that a queue holds now."""
    found: list[Tensor] = []
    for bucket in queue.buckets:
        for some in (bucket.grad, bucket.finished):
            found += [] if some is None else some.parts.values()
        found += [] if bucket.full is None else [bucket.full]
        found += bucket.gathered or []
    return found


def forget(parallel: Parallel, device: torch.device) -> None:
    """Drop gradients and gathered weights; nothing may be under way any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    parallel.queue.forget()
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

    def restart(self) -> None:
        """Have the most begin anew with what is held now."""


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

    def restart(self) -> None:
        """See `_Watch`."""
        torch.cuda.reset_peak_memory_stats(self.device)


class OnHost(TorchDispatchMode):
    """Storages that operations use or make; nobody else counts them on a host.

    Of compiled code that is what it hands to autograd, not what it uses for a moment. A hook on
    what autograd saves would not do, as a selective block keeps its results elsewhere.
    """

    supports_higher_order_operators = True
    everywhere = False
    """Whether communication and deferred work are seen as well."""

    def __init__(self, before: Any, unseen: Callable[[], list[Tensor]] = list) -> None:
        """before: tensors that are there already. unseen: those that are made behind our back."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.unseen, self.known = unseen, list[int]()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """Known and alive by address, with their bytes; 0 if they were there before."""
        self.most = self.bound = 0
        """Bytes: the most so far; those now, with some that may be gone already."""
        self._meet(before, new=False)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code may run while this mode is on."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run; the most is looked at after each operation that may have made it."""
        out = func(*args, **(kwargs or {}))
        self._meet((args, kwargs, out), new=True)
        self._look()
        if self.bound > self.most and self.held() > self.most:
            self.most = self.bound
            self.grown()
        return out

    def grown(self) -> None:
        """Is called when there is more than ever."""

    def _look(self) -> None:
        """Meet what was made behind our back, if that has changed."""
        unseen = self.unseen()
        now = [id(x) for x in unseen]
        if now != self.known:
            self.known = now
            self._meet(unseen, new=True)

    def _meet(self, values: Any, *, new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                known = self.storages.get(reference.cdata)
                if known is None or known[0].expired():
                    size = storage.nbytes() if new else 0
                    self.storages[reference.cdata] = (reference, size)
                    self.bound += size

    def held(self) -> int:
        """See `_Watch`."""
        self._look()
        self.storages = {
            at: (reference, size)
            for at, (reference, size) in self.storages.items()
            if not reference.expired()
        }
        self.bound = sum(size for _, size in self.storages.values())
        return self.bound

    def peak(self) -> int:
        """See `_Watch`."""
        return self.most

    def restart(self) -> None:
        """See `_Watch`."""
        self.most = self.held()
