"""Checks that replicated tensors are bit-identical on all ranks that hold them.

All replicas of a weight start equal and get equal updates, so a difference is a fault: a flipped
bit in a device's memory, or a gradient that was not reduced everywhere (as in BLOOM, whose norms
drifted apart unnoticed for thousands of steps). Each tensor is hashed on its device; the largest
and the smallest hash among its holders are equal, or it is reported with the ranks that differ.

Compared are the working weights of all ranks with the same shards, and master weights and moments
of ranks of row and col, and of stages, that share them. Not handled: a wrong value that was sent to
all ranks.

It also computes a step twice before its update and compares loss and gradients bit by bit.

A flipped bit in an activation leaves the loss finite and the replicas of weights equal: only
repeating the same work detects it (silent data corruption). It costs a second forward and backward
pass, so it is done only every `guard.replay_interval` steps.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import broadcast_first_error, broadcast_text, world_axis
from ranvier.errors import NumericError
from ranvier.grid import Axis, Grid
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.sharding import Shard

HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
"""An odd 64-bit constant without a pattern (2^64 / golden ratio), as a signed integer."""
HASH_CHUNK = 2**23
"""Elements that are hashed at a time, which bounds the temporary memory."""
TRACE_NAME = "replicas"
"""Scope of the comparison in a trace."""


@dataclass(frozen=True)
class Replica:
    """A tensor on this rank that other ranks hold as well."""

    name: str
    part: Tensor
    shard: Shard
    axes: tuple[Axis, ...]
    """Axes whose ranks hold the same tensor; together they connect all of its holders."""


def fingerprint_tensor(x: Tensor) -> Tensor:
    """64-bit hash of a tensor, on its device; it depends on all bits and on their order.

    Σ wᵢ · mᵢ of the 64-bit words w with odd m, modulo 2⁶⁴. As odd numbers are invertible modulo
    2⁶⁴, a single flipped bit always changes the hash.
    """
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if x.numel() == 0:
        return total
    # Elements per 64-bit word; chunks are padded with zeros to whole words.
    count = 8 // x.element_size()
    for number, part in enumerate(x.detach().reshape(-1).split(HASH_CHUNK)):
        whole = part.new_zeros(-(-part.numel() // count) * count)
        whole[: part.numel()] = part
        words = whole.view(torch.int64)
        places = torch.arange(len(words), device=x.device)
        weighted = words.mul_(places.mul_(2).add_(1).mul_(HASH_MULTIPLIER)).sum()
        total = total + weighted * (2 * number + 1)
    return total


def list_replicas(optimizer: Optimizer) -> Iterator[Replica]:
    """Iterate over the tensors of this rank that other ranks hold as well."""
    queue = optimizer.bucket_scheduler
    # Updates and copies of offloaded states may still be in flight.
    queue.wait_for_updates()
    optimizer.state_store.synchronize()
    for bucket in queue.buckets:
        tied = () if bucket.tied_axis is None else (bucket.tied_axis,)
        for weight in (one for one in bucket.weights if one.num_elements):
            others = (bucket.segment_of(weight).shared_axis, *tied)
            others = tuple(axis for axis in others if axis.size > 1)
            # Ranks with the same working weights split their optimizer states.
            replicas = bucket.replica_axis
            lines = (*others, replicas) if replicas.size > 1 else others
            if lines:
                yield Replica(weight.name, weight.storage, weight.shard, lines)
            if others and bucket.trainable:
                states = optimizer.weight_states(weight)
            else:
                states = {}
            for kind, part in states.items():
                yield Replica(f"{weight.name}.{kind}", part, bucket.state_shard(weight), others)


@torch.no_grad()
def compare_replicas(
    optimizer: Optimizer,
    grid: Grid,
    device: torch.device | str,
    kept: Callable[[], str] = lambda: "the beginning (no checkpoint was saved)",
) -> None:
    """Raise if replicas differ.

    kept: returns the checkpoint to resume from; called on all ranks.
    Communicates: all-reduce of two numbers per tensor over each axis, one number over all.
    """
    mine = list(list_replicas(optimizer))
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    hashes = torch.stack([*(fingerprint_tensor(one.part).to(device) for one in mine), nothing])
    with grid.trace.named_scope(TRACE_NAME):
        odd = torch.zeros_like(hashes, dtype=torch.bool)
        for axis in dict.fromkeys(axis for one in mine for axis in one.axes):
            at = torch.tensor([i for i, one in enumerate(mine) if axis in one.axes], device=device)
            # ~h = -h - 1 reverses the order without overflow, so one max-reduction yields both
            # the maximum and the minimum.
            both = torch.stack([hashes[at], ~hashes[at]])
            largest = collectives.all_reduce(both, axis, "max").wait()
            odd[at] |= largest[0] != ~largest[1]
        # The lowest rank that sees a difference reports it.
        first = torch.where(odd.any(), nothing + grid.rank, nothing + grid.world_size)
        whose = int(collectives.all_reduce(first[None], world_axis(grid), "min").wait().item())
        if whose < grid.world_size:
            _raise_mismatch(mine, hashes.tolist(), odd.tolist(), grid, device, whose, kept)


def _raise_mismatch(
    mine: Sequence[Replica],
    hashes: Sequence[int],
    odd: Sequence[bool],
    grid: Grid,
    device: torch.device | str,
    whose: int,
    kept: Callable[[], str],
) -> None:
    """Raise with the first differing tensor of rank `whose` and the ranks that differ.

    Communicates: its name, and the hashes of all holders.
    """
    if grid.rank == whose:
        name = mine[odd.index(True)].name
    else:
        name = ""
    name = broadcast_text(name, grid, device, rank=whose)
    found = [(hashes[i], one) for i, one in enumerate(mine) if one.name == name]
    # Holders are the ranks with the same shard, identified by its checksum; ranks without the
    # tensor take part in the all-gather with a zero.
    row = [[int(h), 1 + zlib.crc32(str(one.shard).encode())] for h, one in found] or [[0, 0]]
    rows = (
        collectives.all_gather(torch.tensor(row, device=device), world_axis(grid)).wait().tolist()
    )
    ranks = world_axis(grid).ranks
    here = rows[ranks.index(whose)][1]
    held = {rank: h for rank, (h, place) in zip(ranks, rows, strict=True) if place == here}
    raise NumericError(
        f"{_describe_mismatch(name, held)}. Replicas of a weight must be bit-identical; a "
        "difference means a faulty device or reduction. Check these devices with `ranvier doctor` "
        f"before you use them again, and resume from {kept()}."
    )


def _describe_mismatch(name: str, held: dict[int, int]) -> str:
    """Describe which ranks differ from the majority; all values if there is none."""
    value, count = Counter(held.values()).most_common(1)[0]
    if 2 * count > len(held):
        odd, rest = ([r for r, h in held.items() if (h == value) == same] for same in (False, True))
        verb = "holds" if len(odd) == 1 else "hold"
        return f"{_format_ranks(odd)} {verb} different bits of {name} than {_format_ranks(rest)}"
    values = ", ".join(f"rank {rank} {h % 2**64:016x}" for rank, h in sorted(held.items())[:16])
    return f"{_format_ranks(sorted(held))} hold different bits of {name}: {values}"


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}"


@dataclass(frozen=True)
class StepReplay:
    """Compares two forward and backward passes over the same micro-batches."""

    model: nn.Module
    step: int
    """Number of the step, from 0."""

    def run_twice(self, work: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward twice; returns the loss, gradients are left in the scheduler.

        Communicates: twice what the pass does, then perhaps a text over all axes.
        """
        before = self._signature(work())
        loss = work()
        after = self._signature(loss)
        odd = [name for name, bits in after.items() if before[name] != bits]
        if odd:
            what = f"{odd[0]} ({len(odd)} of {len(after)} differ)"
        else:
            what = ""
        parallel = get_parallel_model(self.model)
        if parallel.grid.world_size > 1:
            rank = f" on rank {parallel.grid.rank}"
        else:
            rank = ""
        found = broadcast_first_error(what and what + rank, parallel.grid, loss.device)
        if found:
            raise NumericError(
                f"Step {self.step + 1} was computed twice and differs in {found}. The same work "
                "must give the same bits. No update was made. Check the device with `ranvier "
                "doctor`, and resume from the latest checkpoint."
            )
        return loss

    def _signature(self, loss: Tensor) -> dict[str, int]:
        """Hashes of the loss and of the gradient of each weight's optimizer shard."""
        found = {"the loss": loss.detach().reshape(1)}
        for bucket, pieces in get_parallel_model(self.model).bucket_scheduler.finish_gradients():
            for weight, grad in bucket.split_by_weight(pieces):
                found[f"the gradient of {weight.name}"] = grad
        # One transfer to the host for all hashes.
        hashes = torch.stack([fingerprint_tensor(x) for x in found.values()]).tolist()
        return dict(zip(found, hashes, strict=True))
