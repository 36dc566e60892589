"""Model chunks: what the blocks of a stage save per micro-batch and need in their backward pass.

Blocks are grouped by kind. Of each kind the first and the last are examined: saved activations are
largest while the last one runs backward, accumulated gradients while the first one does. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ranvier.config.plan import Plan, Recompute
from ranvier.cost.layers import ActivationShape
from ranvier.cost.linear import LMHeadCost
from ranvier.pipeline.balance import part_ranges
from ranvier.planner.comm_volume import CACHE_SIZE, ShardingKey, StageBlocks, build_layers
from ranvier.planner.memory.activations import (
    STATISTICS_BYTES,
    BlockActivations,
    block_activations,
    deferred_grad_bytes,
    stream_bytes,
)
from ranvier.planner.memory.model_states import BlockStates, StageModelStates
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.time.compute import Fp8Scaling


class MemoryOptions(NamedTuple):
    """Options that affect memory: see `total.peak_memory`."""

    saves_collectives: bool
    compiled: bool
    fp8: Fp8Scaling
    simulates_schedule: bool


@dataclass(frozen=True, eq=False)
class BlockBackwardMemory:
    """A block of a chunk in its backward pass, after that of the blocks behind it."""

    where: str
    is_first: bool
    worst_moments: tuple[tuple[int, int], ...]
    """Peaks besides, and elements of weight gradients by then: `BlockActivations`."""
    deferred_moment: tuple[int, int]
    """An additional peak if weight gradients are deferred."""
    entry_bytes: int
    """Needed at the end of its backward pass if weight gradients are deferred."""
    recomputed_bytes: int
    """Increase of memory by its recomputation."""
    saved_bytes: int
    """Saved by it and the blocks before it, including rotary angles."""
    deferred_bytes: int
    """Kept by the blocks behind it if weight gradients are deferred."""
    gathered_bytes: int
    """Bytes of its gathered weights."""
    next_gathered_bytes: int
    """Bytes of the weights gathered next: of the block before it, or of any block."""
    gathered_grad_bytes: int
    """Bytes of its unsharded gradients."""
    previous_grad_bytes: int | None
    """Bytes of those of the block behind it; None: it is the last."""
    finished_grad_elements: int
    """Elements of the gradients that are complete and not being reduced."""


@dataclass(frozen=True)
class ChunkMemory:
    """What a chunk of a stage saves per micro-batch."""

    block_bytes: int
    """Saved by all its blocks, including rotary angles."""
    num_blocks: int
    """Number of blocks."""
    grad_elements: int
    """Elements of the gradients of all blocks."""
    block_memories: tuple[BlockBackwardMemory, ...]
    """The first and the last block of each kind."""
    first_grad_bytes: int
    """Bytes of the unsharded gradients of the first block."""
    reducing_bytes: int
    """Most bytes of a block's unsharded gradients and those of the block behind it in reduction."""
    has_embedding: bool
    has_head: bool
    input_bytes: int
    """Its input, if nothing else keeps it alive."""
    head_bytes: int
    """Saved by the last norm and the head, whose gradients are computed in forward."""
    deferred_bytes: int
    """Kept after backward if weight gradients are deferred."""

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward."""
        return self.block_bytes + self.input_bytes + self.head_bytes


def build_chunks(
    model: ModelSpec,
    stage: StageBlocks,
    firsts: tuple[int, ...],
    inside: ShardingKey,
    flow: ActivationShape,
    plan: Plan,
    own: StageModelStates,
    how: MemoryOptions,
) -> tuple[tuple[int, ...], tuple[ChunkMemory, ...]]:
    """The group of each chunk of a stage, and one chunk of each group.

    Chunks with the same parts are equal, except the last one if every stage computes losses there.
    """
    count = stage.stage_spec.num_stages
    order = model.parts_in_order
    # Stage i owns the virtual stages i, i + count, i + 2 count, ...
    if count > 1:
        mine = part_ranges(firsts, len(order))[stage.stage_spec.index :: count]
    else:
        mine = [slice(None)]
    # With the vocabulary split over pipe the head's gradient is counted per stage, not per chunk.
    spread = plan.vocab_over_pipe and count > 1
    if spread:
        head = 0
    else:
        head = own.head_elements * own.wide_itemsize
    sizes = ChunkWeights(own.by_block, own.gathered_block_bytes, own.is_split, plan.depth)
    places = dict[tuple[object, ...], int]()
    groups = list[int]()
    chunks = list[ChunkMemory]()
    for i, one in enumerate(mine):
        parts = order[one]
        first = not one.start
        comes = not first or spread
        # Chunks with equal keys share one entry; most chunks of a stage are alike.
        key = (first, parts, spread and i == len(mine) - 1)
        if key not in places:
            places[key] = len(chunks)
            kind = plan.recompute
            chunks.append(
                _build_chunk(model, parts, first, comes, inside, flow, kind, how, sizes, head)
            )
        groups.append(places[key])
    return tuple(groups), tuple(chunks)


class ChunkWeights(NamedTuple):
    """What chunks depend on of the weights of a stage."""

    by_block: tuple[tuple[str, BlockStates], ...]
    gathered_bytes: int
    is_split: bool
    depth: int


@lru_cache(CACHE_SIZE)
def _build_chunk(
    model: ModelSpec,
    parts: tuple[BlockSpec, ...],
    first: bool,
    comes: bool,
    inside: ShardingKey,
    flow: ActivationShape,
    kind: Recompute,
    how: MemoryOptions,
    own: ChunkWeights,
    head: int,
) -> ChunkMemory:
    """What some parts save per micro-batch.

    comes: its input comes from another chunk. head: bytes of the head's gradient.
    """
    stream = stream_bytes(model, inside, flow)
    wide = max(flow.itemsize, STATISTICS_BYTES) // flow.itemsize
    blocks = [part for part in parts if part.is_block]
    sizes = dict(own.by_block)
    found = {
        part: block_activations(model, part, inside, flow, how.compiled, how.fp8)
        for part in {*blocks}
    }
    # Cosines and sines of the rotary embedding, shared by all blocks.
    if blocks:
        angles = flow.seq * 2 * model.head_dim * flow.itemsize
    else:
        angles = 0
    leaves = find_head(model, parts, inside) is not None
    # Whether a first layer saves the input already: recomputed and compiled blocks save it as it
    # is, and in fp32 a norm needs no widened copy.
    shared = (blocks and (kind != "none" or how.compiled)) or (wide == 1 and (blocks or leaves))
    waits = {part: deferred_grad_bytes(model, part, inside, flow) for part in found}
    # A block's gradients and those of the block behind it, whose reduction is in flight.
    full = [sizes[part.name].gathered_grad_bytes for part in blocks]
    pairs = zip(full, [*full, 0][1:], strict=True)
    return ChunkMemory(
        angles + sum(found[part].saved_bytes(kind, keeps=how.saves_collectives) for part in blocks),
        len(blocks),
        sum(sizes[part.name].grad_elements for part in blocks),
        tuple(_block_memories(blocks, found, waits, own, angles, kind, how)),
        full[0] if full else 0,
        max((one + behind + behind // own.depth for one, behind in pairs), default=0),
        first,
        leaves,
        input_bytes=0 if shared or not comes else stream,
        head_bytes=stream * (1 + 2 * wide) + head if leaves else 0,
        deferred_bytes=sum(waits[part] for part in blocks),
    )


def _block_memories(
    blocks: Sequence[BlockSpec],
    found: Mapping[BlockSpec, BlockActivations],
    waits: Mapping[BlockSpec, int],
    own: ChunkWeights,
    angles: int,
    kind: Recompute,
    how: MemoryOptions,
) -> Iterator[BlockBackwardMemory]:
    """The first and the last block of each kind in their backward pass."""
    sizes = dict(own.by_block)
    final = len(blocks) - 1
    firsts = {part: at for at, part in reversed([*enumerate(blocks)])}
    lasts = {part: at for at, part in enumerate(blocks)}
    # Backward order, from the last block to the first.
    for at in sorted({*firsts.values(), *lasts.values()}, reverse=True):
        part = blocks[at]
        share = sizes[blocks[at].name]
        if at == final:
            name = "last"
        elif at == 0:
            name = "first"
        else:
            name = "present"
        yield BlockBackwardMemory(
            f"in the {name} block, backward",
            at == 0,
            found[part].moments_of_mode(kind, keeps=how.saves_collectives, last=at == final),
            found[part].deferred_moment,
            found[part].entry_bytes,
            found[part].recomputed_bytes(kind, keeps=how.saves_collectives),
            angles
            + sum(
                found[one].saved_bytes(kind, keeps=how.saves_collectives)
                for one in blocks[: at + 1]
            ),
            sum(waits[one] for one in blocks[at + 1 :]),
            share.gathered_bytes,
            sizes[blocks[at - 1].name].gathered_bytes if at else own.gathered_bytes,
            share.gathered_grad_bytes,
            None if at == final else sizes[blocks[at + 1].name].gathered_grad_bytes,
            sum(sizes[one.name].grad_elements for one in blocks[at + 1 + own.is_split :]),
        )


@lru_cache(CACHE_SIZE)
def find_head(
    model: ModelSpec, parts: tuple[BlockSpec, ...], inside: ShardingKey
) -> LMHeadCost | None:
    """The LM head, if it is among these parts."""
    outside = [part for part in parts if not part.is_block]
    layers = (one for part in outside for one in build_layers(model, part, inside))
    return next((one for one in layers if isinstance(one, LMHeadCost)), None)
