"""Chunks: what the blocks of a stage keep of a micro-batch, and need while they run backward.

Blocks are kept together by kind. Of each kind the first and the last are looked at: what is kept is
most while the last runs backward, what gradients have been made while the first does. No torch.
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
    """What else decides what is there: see `space`."""

    saves_collectives: bool
    compiled: bool
    fp8: Fp8Scaling
    simulates_schedule: bool


@dataclass(frozen=True, eq=False)
class BlockBackwardMemory:
    """A block of a chunk, while it runs backward: those behind it have done so."""

    where: str
    is_first: bool
    worst_moments: tuple[tuple[int, int], ...]
    """Most it needs besides, and elements of gradients of weights by then: `kept.Kept.moments`."""
    deferred_moment: tuple[int, int]
    """Another moment, if gradients of weights are made later."""
    entry_bytes: int
    """Needed at its end, if gradients of weights are made later."""
    recomputed_bytes: int
    """How much more is there once it has run again."""
    saved_bytes: int
    """Kept by it and the blocks before it, and angles."""
    deferred_bytes: int
    """What those behind it keep, if gradients of weights are made later."""
    gathered_bytes: int
    """Bytes of its weights."""
    next_gathered_bytes: int
    """Bytes of the weights that come next: of the block before it, or of any."""
    gathered_grad_bytes: int
    """Bytes of its gathered gradients."""
    previous_grad_bytes: int | None
    """Bytes of those of the block behind it; None: it is the last."""
    finished_grad_elements: int
    """Elements of the gradients that are made, and not being reduced."""


@dataclass(frozen=True)
class ChunkMemory:
    """What a chunk of a stage keeps of a micro-batch."""

    block_bytes: int
    """By all its blocks, and angles."""
    num_blocks: int
    """Blocks."""
    grad_elements: int
    """Of the gradients of all of them."""
    block_memories: tuple[BlockBackwardMemory, ...]
    """The first and the last block of each kind."""
    first_grad_bytes: int
    """Bytes of the gathered gradients of the first block."""
    reducing_bytes: int
    """Most of a block's gathered gradients and those of the one behind it, being reduced."""
    has_embedding: bool
    has_head: bool
    input_bytes: int
    """Its input, if nothing else keeps it."""
    head_bytes: int
    """By the last norm and the head, whose gradients are made in forward."""
    deferred_bytes: int
    """After backward, if gradients of weights are made later."""

    @cached_property
    def saved_bytes(self) -> int:
        """From forward to backward."""
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

    Chunks of the same parts are alike, but for the last where each stage computes losses there.
    """
    count = stage.stage_spec.num_stages
    order = model.parts_in_order
    if count > 1:
        mine = part_ranges(firsts, len(order))[stage.stage_spec.index :: count]
    else:
        mine = [slice(None)]
    spread = plan.spread and count > 1
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
    """What some parts keep of a micro-batch.

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
    if blocks:
        angles = flow.seq * 2 * model.head_dim * flow.itemsize
    else:
        angles = 0
    leaves = find_head(model, parts, inside) is not None
    shared = (blocks and (kind != "none" or how.compiled)) or (wide == 1 and (blocks or leaves))
    waits = {part: deferred_grad_bytes(model, part, inside, flow) for part in found}
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
    """The first and the last block of each kind, while they run backward."""
    sizes = dict(own.by_block)
    final = len(blocks) - 1
    firsts = {part: at for at, part in reversed([*enumerate(blocks)])}
    lasts = {part: at for at, part in enumerate(blocks)}
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
    """The head, if it is among these parts."""
    outside = [part for part in parts if not part.is_block]
    layers = (one for part in outside for one in build_layers(model, part, inside))
    return next((one for one in layers if isinstance(one, LMHeadCost)), None)
