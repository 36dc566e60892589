"""Settle: what a run leaves open about its memory is measured and chosen before its first step.

Open is what asks for it: `plan.recompute = budget`, `memory.activations = -1`, `memory.states =
split` without `resident`, `memory.update = auto` of states elsewhere; and with `memory.fit = auto`
all of recomputation, micro-batch, states, weights, activations and update that has its default
value. Any other value is a decision and is kept. After a fit a trial step, which changes nothing,
shows whether it is right.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from ranvier.comm.consensus import largest, most_of
from ranvier.config.plan import Plan, divisors
from ranvier.config.run import Run
from ranvier.config.sections import MemoryConfig
from ranvier.cost.layers import Flow
from ranvier.errors import PlanError
from ranvier.memory import recompute_budget
from ranvier.memory.host import host_room
from ranvier.memory.recompute_budget import Kind, Need, Pass
from ranvier.models import Decoder
from ranvier.nn.linear import Linear
from ranvier.optim.grad_scaler import Scale
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.state_store import SLOTS
from ranvier.parallel.parallelize import Parallel, parallel_of
from ranvier.planner import device_rates, offload_search
from ranvier.planner.communicators import pipe_peers, worst_stage_bytes
from ranvier.planner.device_rates import Rates
from ranvier.planner.memory.measured_states import logits, sizes_of
from ranvier.planner.model_spec import of_run
from ranvier.planner.offload_search import Case, Choice
from ranvier.planner.time.offload import Moved, Work, streamed
from ranvier.train.memory import placement
from ranvier.train.memory.breakdown import USUAL, Account, is_short, tensors_of
from ranvier.train.memory.probe import GIB, blank, candidates, forget, measured, room
from ranvier.train.step import forward_backward

PASSES = 3
"""Micro-batches of a step from which on one is like the other."""
TRIES = 3
"""Times that a fit is tried before the run gives up."""
LESS = 0.05
"""Share of the limit by which it is lowered at least when a trial step does not fit."""
TILES, NUMBER, SMALLEST = 0.02, 12, 20
"""Share of the device that tiles of states take, bytes of the states of a number, and bits of the
number of numbers of the smallest tile: a smaller one would not fill the link."""
PLACED = frozenset({"states", "weights", "activations", "update"})
"""What depends on how fast things move."""
ALIKE = Rates(1e12, 1e12, 1e12, 1e12, 1e12)
"""Where nothing but recomputation and the micro-batch are open: any rates choose alike."""


@dataclass
class Settled:
    """A run with everything settled, and what came of it."""

    run: Run
    optimizer: Optimizer
    account: Account
    notes: list[str] = field(default_factory=list)


def optimizer_of(run: Run, model: Decoder, device: torch.device, *, local_ranks: int) -> Optimizer:
    """The optimizer of a settled run; weights and activations go where they were chosen to."""
    optim, queue = run.optim, parallel_of(model).queue
    placement.go_home(run, model, local_ranks)
    placement.place_activations(run, model, local_ranks)
    return Optimizer(
        queue,
        lr=run.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        decay=optim.decay,
        clip=optim.clip,
        factors={
            "matrix": optim.matrix_lr,
            "embedding": optim.embedding_lr,
            "vector": optim.vector_lr,
        },
        scale=Scale(device) if run.train.dtype == "fp16" else None,
        moments=optim.moments,
        home=placement.states_home(run, local_ranks, queue.homes),
    )


def settle(run: Run, model: Decoder, device: torch.device, *, local_ranks: int) -> Settled:
    """The run with what was open, its optimizer, and lines that say what was chosen.

    Communicates: where something is open, passes of a model of two blocks, a few times, and numbers
    over all axes; after a fit two trial steps.
    """
    free = opened(run)
    if device.type == "cpu" and run.memory.limit == 0.0:
        free -= PLACED  # the host is the device
    if free == {"update"}:  # that is a matter of rates alone
        run, free = faster(run, parallel_of(model), device), frozenset()
    if not free or run.plan.pipe > 1:
        optimizer = optimizer_of(run, model, device, local_ranks=local_ranks)
        return Settled(run, optimizer, Account(peers=count_peers(run, parallel_of(model))))
    run = _tiled(run, device, local_ranks)
    case = case_of(run, model, device, local_ranks, free)
    if not case.needs and "weights" in free:  # beside all weights not even two blocks fit
        run, free = replace(run, memory=replace(run.memory, weights="host")), free - {"weights"}
        placement.go_home(run, model, local_ranks)
        case = case_of(run, model, device, local_ranks, free)
    parallel, notes = parallel_of(model), list[str]()
    for tries in range(TRIES):
        every = [*offload_search.fits(case)]
        found = offload_search.best(every)
        if found is None:
            raise PlanError(_refusal(run, case))
        chosen = applied(run, found.choice)
        parallel.kinds.update(zip(parallel.kinds, found.choice.kinds, strict=True))
        account = Account(case, found.choice, peers=count_peers(run, parallel))
        tried, missing = _tried(chosen, model, device, local_ranks)
        if tried is not None:
            notes += offload_search.said(case, found, every)
            return Settled(chosen, tried, account, notes)
        lower = case.limit - max(missing, int(LESS * case.limit))
        notes.append(
            f"a trial step did not fit into {case.limit / GIB:.3g} GiB, {missing / GIB:.3g} were "
            f"missing: chosen again for {lower / GIB:.3g} GiB"
        )
        if tries == TRIES - 1:
            break
        case = replace(case, limit=lower)
    raise account.short("; ".join(notes))


def opened(run: Run) -> frozenset[str]:
    """What of `planner.fit.OPEN` a run leaves open."""
    plan, memory, usual = run.plan, run.memory, MemoryConfig()
    auto, found = memory.fit == "auto", set[str]()
    if plan.recompute == "budget" or (auto and plan.recompute == Plan().recompute):
        found.add("recompute")
    if plan.micro_batch == -1:
        found.add("micro_batch")
    if memory.activations < 0.0:
        found.add("activations")
    if memory.states == "split" and memory.resident == 0.0:
        found.add("resident")
    if memory.states != "device" and memory.update == "auto":
        found.add("update")
    if auto:
        names = ("states", "weights", "activations", "update")
        found |= {name for name in names if getattr(memory, name) == getattr(usual, name)}
    return frozenset(found)


def faster(run: Run, parallel: Parallel, device: torch.device) -> Run:
    """The run with the faster way to update states that rest elsewhere.

    Communicates: numbers over all axes.
    """
    found = _slowest(device_rates.measured(device, parallel.queue.buckets[0].data.dtype), parallel)
    sizes = sizes_of(parallel, moments=run.optim.moments, tile=run.memory.tile)
    moved = Moved(0, 0, sizes.states - sizes.small, sizes.trained, 0, 0, 0)
    times = {cpu: streamed(moved, found, cpu=cpu) for cpu in (False, True)}
    update: Literal["device", "cpu"] = "cpu" if times[True] < times[False] else "device"
    return replace(run, memory=replace(run.memory, update=update))


def _tiled(run: Run, device: torch.device, local_ranks: int) -> Run:
    """With `memory.fit`: tiles of states that take a small share of the device, as no result
    depends on them."""
    memory = run.memory
    if memory.fit == "off" or memory.tile != MemoryConfig().tile:
        return run
    most = TILES * room(memory.limit, device, local_ranks) / (SLOTS * NUMBER)
    tile = min(1 << max(int(most).bit_length() - 1, SMALLEST), memory.tile)
    return replace(run, memory=replace(memory, tile=tile))


def applied(run: Run, choice: Choice) -> Run:
    """The run with a choice."""
    memory = replace(
        run.memory,
        states=choice.states,
        resident=choice.resident / GIB if choice.states == "split" else 0.0,
        update=run.memory.update if choice.states == "device" else choice.update,
        weights=choice.weights,
        activations=choice.activations,
    )
    return replace(run, plan=replace(run.plan, micro_batch=choice.micro_batch), memory=memory)


def foreseen(
    run: Run, model: Decoder, optimizer: Optimizer, device: torch.device, local_ranks: int
) -> Account:
    """The account of a run that has left nothing open, with what it may be told if memory is short.

    Smaller micro-batches, and blocks that keep their input only, are estimated from its own.
    Communicates: see `measured`.
    """
    parallel, plan = parallel_of(model), run.plan
    peers = count_peers(run, parallel)
    if plan.pipe > 1 or plan.graph:
        return Account(peers=peers)
    case = case_of(run, model, device, local_ranks, frozenset(), optimizer)
    own, share = plan.micro_batch, plan.batch // plan.replicas
    if own not in case.needs:
        return Account(peers=peers)
    need = case.needs[own]
    passes, output = need.passes, run.data.seq // (plan.row * plan.context)
    output *= own * (run.model.embed // plan.col) * parallel.queue.buckets[0].data.element_size()
    if len(passes) < min(share, PASSES):
        more = measured(
            run, model, device, own, passes=min(share, PASSES), kinds=(_kind(parallel),)
        )
        passes = more or passes
    wider = replace(need, passes=_estimated(need.passes, 1.0, output))
    needs, chunks = {own: wider}, dict(case.logits)
    for micro in (n for n in divisors(share) if n < own and own % n == 0):
        needs[micro] = replace(need, passes=_estimated(passes, micro / own, output))
        chunks[micro] = logits(parallel, flow_of(run, parallel, micro))
    return Account(replace(case, needs=needs, logits=chunks), case.given, peers=peers)


def count_peers(run: Run, parallel: Parallel) -> int:
    """Ranks that this one sends to point to point, over all communicators."""
    plan, stage = run.plan, parallel.grid.index["pipe"]
    stages = pipe_peers(stage, plan.pipe, chunks=plan.chunks, spread=plan.spread)
    return sum(stages.values()) + (plan.expert - 1 if parallel.balance is not None else 0)


def _estimated(passes: Sequence[Pass], share: float, output: int) -> tuple[Pass, ...]:
    return tuple(recompute_budget.estimated(one, passes[0], share, output) for one in passes)


# ---- what a choice depends on -----------------------------------------------------------


def case_of(
    run: Run,
    model: Decoder,
    device: torch.device,
    local_ranks: int,
    free: frozenset[str],
    optimizer: Optimizer | None = None,
) -> Case:
    """What the choices of a run depend on. optimizer: if it is there already.

    Communicates: see `measured`; numbers over all axes.
    """
    parallel, plan, memory = parallel_of(model), run.plan, run.memory
    grid, micros = parallel.grid, candidates(plan, run.data.seq)
    limit = -largest(-room(memory.limit, device, local_ranks), grid, device)
    host = -largest(-host_room(local_ranks, memory.host), grid, device)
    kind = _kind(parallel)
    kinds = tuple(recompute_budget.COST) if "recompute" in free else (kind,)
    chunks = {micro: logits(parallel, flow_of(run, parallel, micro)) for micro in micros}
    needs = Probes(run, model, device, kinds, chunks).needs(micros)
    sizes = sizes_of(parallel, moments=run.optim.moments, tile=memory.tile)
    needs = {micro: replace(need, publish=sizes.publish) for micro, need in needs.items()}
    given = Choice(
        micros[0],
        (kind,) * sizes.count,
        memory.states,
        int(memory.resident * GIB),
        memory.update,
        memory.weights,
        max(memory.activations, 0.0),
    )
    found = ALIKE
    if free & PLACED:
        found = _slowest(_rates(parallel, device), parallel)
    return Case(
        needs,
        sizes,
        work_of(run, parallel),
        found,
        limit,
        host,
        given,
        free,
        largest(others(parallel, device, optimizer), grid, device),
        chunks,
        worst_stage_bytes(of_run(run), plan) if grid.backend == "nccl" else 0,
    )


@dataclass
class Probes:
    """Measured passes, each measured once."""

    run: Run
    model: Decoder
    device: torch.device
    kinds: Sequence[Kind]
    chunks: dict[int, int]
    """Bytes of the logits of a chunk, by micro-batch: they do not grow evenly."""
    known: dict[tuple[int, int], tuple[Pass, ...] | None] = field(default_factory=dict)

    def passes(self, micro: int, count: int) -> tuple[Pass, ...] | None:
        """Passes of a step of so many micro-batches; None if they do not fit.

        Only a reduction over data makes the last one of a step unlike others.
        """
        plan = self.run.plan
        share = plan.batch // (plan.replicas * micro) if plan.micro_batch > 0 else PASSES
        whole = count if plan.data > 1 else max(min(share, PASSES), count)
        if (micro, whole) not in self.known:
            self.known[micro, whole] = measured(
                self.run, self.model, self.device, micro, passes=whole, kinds=self.kinds
            )
        found = self.known[micro, whole]
        return None if found is None else found[:count]

    def needs(self, micros: Sequence[int]) -> dict[int, Need]:
        """What steps need, by micro-batch; what does not fit by itself is left out.

        The largest and the smallest are measured, the rest lies between: compilers take their time
        for each size.
        """
        blocks, share = len(self.model.blocks), self.run.plan.batch // self.run.plan.replicas
        counts = {micro: min(share // micro, PASSES) for micro in micros}
        high = next((m for m in micros if self.passes(m, counts[m]) is not None), None)
        if high is None:
            return {}
        found = {}
        for micro in (m for m in micros if m <= high):
            passes = self._between(micros[-1], high, micro, counts[micro])
            if passes is not None:
                found[micro] = Need(passes, blocks)
        return found

    def _between(self, low: int, high: int, micro: int, count: int) -> tuple[Pass, ...] | None:
        if micro in (low, high):
            return self.passes(micro, count)
        small, large = self.passes(low, count), self.passes(high, count)
        if small is None or large is None:
            return None
        share = (micro - low) / (high - low)
        chunk = self.chunks[low] + (self.chunks[high] - self.chunks[low]) * share
        more = self.chunks[micro] - round(chunk)
        mixed = (recompute_budget.between(a, b, share) for a, b in zip(small, large, strict=True))
        return tuple(replace(one, head=max(one.head + more, 0)) for one in mixed)


def _kind(parallel: Parallel) -> Kind:
    """The kind of all blocks, for those who measure."""
    word = next(iter(parallel.kinds.values()))
    return "none" if word == "budget" else word


def flow_of(run: Run, parallel: Parallel, micro: int) -> Flow:
    """What a micro-batch is to leaves."""
    size = parallel.queue.buckets[0].data.element_size()
    return Flow(micro, run.data.seq, size, statistics=4)


def work_of(run: Run, parallel: Parallel) -> Work:
    """The work of a rank on a sample and in a step."""
    share = run.plan.batch // run.plan.replicas
    flow = flow_of(run, parallel, share)
    forward = backward = inside = 0
    for name, leaf in parallel.leaves.items():
        frozen = isinstance(leaf, Linear) and not leaf.handles["weight"].trainable
        flops = leaf.flops(flow)
        forward, backward = forward + flops, backward + flops * (1 if frozen else 2)
        if any(name.startswith(f"{block}.") for block in parallel.kinds):
            inside += flops * (2 if frozen else 3)
    blocks = inside / max(forward + backward, 1)
    return Work(forward // share, backward // share, blocks, share, run.data.seq)


def _rates(parallel: Parallel, device: torch.device) -> Rates:
    """The rates of a device, or usual ones where it has no room for a measurement."""
    try:
        return device_rates.measured(device, parallel.queue.buckets[0].data.dtype)
    except torch.OutOfMemoryError:
        return USUAL


def _slowest(found: Rates, parallel: Parallel) -> Rates:
    """Of each rate that of the slowest rank. Communicates: numbers over all axes."""
    device = parallel.queue.device
    numbers = [-int(getattr(found, name)) for name in found.__dataclass_fields__]
    return Rates(*(float(-number) for number in most_of(numbers, parallel.grid, device)))


def others(parallel: Parallel, device: torch.device, optimizer: Optimizer | None) -> int:
    """Bytes on a device that are neither weights nor states: workspaces of libraries, inputs."""
    if device.type != "cuda":
        return 0
    tensors = [bucket.data for bucket in parallel.queue.buckets]
    if optimizer is not None:
        tensors = [x for some in tensors_of(optimizer).values() for x in some]
    here = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.is_cuda}
    known = sum(storage.nbytes() for storage in here.values())
    return max(torch.cuda.memory_allocated(device) - known, 0)


def _refusal(run: Run, case: Case) -> str:
    word = "memory.fit='auto'" if run.memory.fit == "auto" else "plan.recompute='budget'"
    short = offload_search.least(case) if case.needs else 0
    least = f"at least {short / GIB:.3g} GiB" if short else "more than its device has"
    remedy = "a smaller plan.micro_batch, " if run.plan.micro_batch > 1 else ""
    remedy += "a larger memory.limit, " if run.memory.limit > 0.0 else ""
    remedy += "" if run.memory.fit == "auto" else "memory.fit=auto, "
    return (
        f"{word}: a rank needs {least}, but may use {case.limit / GIB:.3g} GiB (and "
        f"{case.host / GIB:.3g} of the host). Weights, moments, gradients and what a block "
        f"computes again must fit. Use {remedy}a smaller data.seq or model.size, or more ranks on "
        "depth, row or col."
    )


# ---- trial ------------------------------------------------------------------------------


def _tried(
    run: Run, model: Decoder, device: torch.device, local_ranks: int
) -> tuple[Optimizer | None, int]:
    """The optimizer of a run, if steps with it fit on all ranks; else the bytes that were missing.

    Communicates: as two steps; a number over all axes.
    """
    parallel, missing, optimizer = parallel_of(model), 0, None
    try:
        optimizer = optimizer_of(run, model, device, local_ranks=local_ranks)
        if run.memory.fit == "auto":
            trial(run, model, optimizer, device)
    except RuntimeError as error:
        if not is_short(error):
            raise
        missing = max(asked(str(error)), 1)
    missing = largest(missing, parallel.grid, device)
    if missing:
        if optimizer is not None:
            with suppress(RuntimeError):  # its copies must not outlive their memory
                optimizer.store.settle()
        optimizer = parallel.queue.complete = None
        gc.collect()
    if missing or run.memory.fit == "auto":
        forget(parallel, device)
    return optimizer, missing


def trial(run: Run, model: Decoder, optimizer: Optimizer, device: torch.device) -> None:
    """Two steps that change nothing: their updates are vetoed. Communicates: as steps do.

    A second one, as an update may go on in the forward pass that follows it.
    """
    count = min(run.plan.micro_batches, PASSES)
    batches = [blank(run, run.plan.micro_batch, device) for _ in range(count)]
    scale = optimizer.scale
    before = None if scale is None else (scale.value.clone(), scale.good.clone())
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(2):
            forward_backward(model, batches, scale=None if scale is None else scale.value)
            veto = torch.ones(1, dtype=torch.bool, device=device)
            optimizer.step(0.0, votes=veto, vetoes=1)
    if scale is not None and before is not None:
        scale.value.copy_(before[0])
        scale.good.copy_(before[1])
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def asked(words: str) -> int:
    """Bytes that torch tried to allocate, less what was free, as its error says; 0: not known."""
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", words)
    free = re.search(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free", words)
    want, there = (int(float(m[1]) * units[m[2]]) if m else 0 for m in (found, free))
    return max(want - there, 0) or want
