"""Model chunks: activations that the blocks of a stage save, and memory of their backward pass.

Blocks are grouped by kind and recompute mode. Of each group the first and the last are examined:
saved activations are largest while the last one runs backward, accumulated gradients while the
first one does. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
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
from ranvier.planner.memory.token_chunks import chunked_block_activations, runs_in_chunks
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.planner.time.compute import Fp8Scaling


class MemoryOptions(NamedTuple):
    """Options that affect memory: see `total.peak_memory`."""

    saves_collectives: bool = False
    compiled: bool = False
    fp8: Fp8Scaling = ""
    simulates_schedule: bool = True
    recompute_modes: tuple[Recompute, ...] = ()
    """Modes of the blocks of the stage, in order; empty means `plan.recompute` for all of them."""
    offloaded_fraction: float = 0.0
    """Fraction of saved activations on the host; the last block of the model keeps its own."""
    update_continues: bool = False
    """Whether the update of offloaded states continues in the next forward pass."""
    counts_in_flight: bool = True
    """Whether other micro-batches in flight on a stage are counted."""

    def is_graph(self, kind: Recompute, experts: int) -> bool:
        """Returns whether a block is compiled; experts: ranks of the expert axis."""
        # Expert-parallel blocks with recomputation run eagerly.
        return self.compiled and (experts == 1 or kind == "none")


@dataclass(frozen=True, eq=False)
class BlockBackwardMemory:
    """A block of a chunk in its backward pass, after the backward pass of the following blocks."""

    where: str
    is_first: bool
    worst_moments: tuple[tuple[int, int], ...]
    """Additional peaks, and elements of weight gradients until then: `BlockActivations`."""
    deferred_moment: tuple[int, int]
    """An additional peak if weight gradients are deferred."""
    entry_bytes: int
    """Needed at the end of its backward pass if weight gradients are deferred."""
    recomputed_bytes: int
    """Increase of memory by its recomputation."""
    saved_bytes: int
    """Saved by it and the blocks before it on the device, including rotary angles and tensors
    fetched from the host."""
    forward_bytes: int
    """Needed while it runs forward, above `saved_bytes`."""
    deferred_bytes: int
    """Kept by the following blocks if weight gradients are deferred."""
    gathered_bytes: int
    """Bytes of its gathered weights."""
    next_gathered_bytes: int
    """Bytes of the weights gathered next: of the block before it, or of any block."""
    gathered_grad_bytes: int
    """Bytes of its unsharded gradients."""
    previous_grad_bytes: int | None
    """Bytes of the unsharded gradients of the following block; None for the last block."""
    finished_grad_elements: int
    """Elements of the gradients that are complete and not in a reduction."""
    later_grad_elements: int
    """Elements of the gradients of all following blocks."""


@dataclass(frozen=True)
class ChunkMemory:
    """Activations that a chunk of a stage saves per micro-batch."""

    block_bytes: int
    """Saved by all its blocks on the device, including rotary angles."""
    num_blocks: int
    """Number of blocks."""
    grad_elements: int
    """Elements of the gradients of all blocks."""
    block_memories: tuple[BlockBackwardMemory, ...]
    """The first and the last block of each kind."""
    first_grad_bytes: int
    """Bytes of the unsharded gradients of the first block."""
    reducing_bytes: int
    """Most bytes of a block's unsharded gradients and the following block's ones in reduction."""
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
    """Returns the group of each chunk of a stage, and one chunk of each group.

    Chunks with the same parts are equal, except the last one if every stage computes losses there.
    """
    count = stage.stage_spec.num_stages
    order = model.parts_in_order
    # Stage i owns the virtual stages i, i + count, i + 2 count, ...
    if count > 1:
        mine = part_ranges(firsts, len(order))[stage.stage_spec.index :: count]
    else:
        mine = [slice(None)]
    # With the vocabulary split over pipe, the head's gradient is counted per stage, not per chunk.
    spread = plan.vocab_over_pipe and count > 1
    if spread:
        head = 0
    else:
        head = own.head_elements * own.wide_itemsize
    sizes = ChunkWeights(own.by_block, own.gathered_block_bytes, own.is_split, plan.gather_ranks)
    saves = chunk_saving(model, plan, flow, how)
    modes = _modes_by_chunk([order[one] for one in mine], plan.recompute, how.recompute_modes)
    places = dict[tuple[object, ...], int]()
    groups = list[int]()
    chunks = list[ChunkMemory]()
    for i, one in enumerate(mine):
        parts = order[one]
        first = not one.start
        comes = not first or spread
        # Chunks with equal keys share one entry; most chunks of a stage are alike.
        kinds = modes[i]
        key = (first, parts, kinds, spread and i == len(mine) - 1)
        if key not in places:
            places[key] = len(chunks)
            # The backward pass of the last block of the model comes next, so it is not offloaded.
            last = stage.stage_spec.index == count - 1 and i == len(mine) - 1
            saved = saves._replace(keeps_last=last) if saves.offloaded_fraction else saves
            chunks.append(
                _build_chunk(model, parts, first, comes, inside, flow, kinds, saved, sizes, head)
            )
        groups.append(places[key])
    return tuple(groups), tuple(chunks)


def _modes_by_chunk(
    chunks: Sequence[Sequence[BlockSpec]], usual: Recompute, modes: tuple[Recompute, ...]
) -> list[tuple[Recompute, ...]]:
    """Returns the modes of the blocks of each chunk."""
    counts = [sum(part.is_block for part in parts) for parts in chunks]
    modes = modes or (usual,) * sum(counts)
    assert len(modes) == sum(counts), (modes, counts)
    rest = iter(modes)
    return [tuple(islice(rest, count)) for count in counts]


class ChunkSaving(NamedTuple):
    """How blocks save their activations."""

    saves_collectives: bool
    fp8: Fp8Scaling
    is_graph: tuple[bool, bool]
    """Whether a block is compiled: without and with recomputation."""
    offloaded_fraction: float
    keeps_last: bool = False
    """Whether nothing of the last block is offloaded."""
    token_chunk: int = 0
    """Tokens of a chunk of a block; 0 if blocks run as a whole."""

    def activations(
        self,
        model: ModelSpec,
        part: BlockSpec,
        inside: ShardingKey,
        flow: ActivationShape,
        kind: Recompute,
    ) -> BlockActivations:
        """Returns the activations of a block with a recompute mode."""
        if self.token_chunk and runs_in_chunks(model, part, inside):
            return chunked_block_activations(model, part, inside, flow, self.token_chunk)
        return block_activations(model, part, inside, flow, self.is_graph[kind != "none"], self.fp8)


def chunk_saving(
    model: ModelSpec, plan: Plan, flow: ActivationShape, how: MemoryOptions
) -> ChunkSaving:
    """Returns how the blocks of a plan save their activations."""
    return ChunkSaving(
        how.saves_collectives,
        how.fp8,
        (how.is_graph("none", plan.expert), how.is_graph("full", plan.expert)),
        how.offloaded_fraction,
        token_chunk=plan.chunk_of_samples(flow.samples * model.streams, flow.seq),
    )


class ChunkWeights(NamedTuple):
    """The sizes of the weights of a stage that chunks depend on."""

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
    kinds: tuple[Recompute, ...],
    how: ChunkSaving,
    own: ChunkWeights,
    head: int,
) -> ChunkMemory:
    """Returns the activations that some parts save per micro-batch.

    comes: its input is from another chunk. kinds: modes of the blocks. head: bytes of the head's
    gradient.
    """
    stream = stream_bytes(model, inside, flow)
    wide = max(flow.itemsize, STATISTICS_BYTES) // flow.itemsize
    blocks = [part for part in parts if part.is_block]
    sizes = dict(own.by_block)
    found = [
        how.activations(model, part, inside, flow, kind)
        for part, kind in zip(blocks, kinds, strict=True)
    ]
    # Cosines and sines of the rotary embedding, shared by all blocks.
    if blocks:
        angles = flow.seq * 2 * model.head_dim * flow.itemsize
    else:
        angles = 0
    leaves = find_head(model, parts, inside) is not None
    # Whether a first layer already saves the input: recomputed and compiled blocks save it
    # unchanged, and in fp32 a norm needs no widened copy.
    graph = how.is_graph[0]
    shared = (blocks and (kinds[0] != "none" or graph)) or (wide == 1 and (blocks or leaves))
    # A message before a ladder layer has two tensors; without recomputation its block saves one.
    inputs = parts[0].num_inputs
    saved_inputs = (inputs if kinds and kinds[0] != "none" else 1) if shared else 0
    waits = {part: deferred_grad_bytes(model, part, inside, flow) for part in {*blocks}}
    saved = [
        one.saved_bytes(kind, keeps=how.saves_collectives)
        for one, kind in zip(found, kinds, strict=True)
    ]
    away = [round(size * how.offloaded_fraction) for size in saved]
    if how.keeps_last:
        away[-1:] = [0] * bool(away)
    # A block's gradients and the ones of the following block, whose reduction is in flight.
    full = [sizes[part.name].gathered_grad_bytes for part in blocks]
    pairs = zip(full, [*full, 0][1:], strict=True)
    return ChunkMemory(
        angles + sum(saved) - sum(away),
        len(blocks),
        sum(sizes[part.name].grad_elements for part in blocks),
        tuple(_block_memories(blocks, kinds, found, saved, away, waits, own, angles, stream, how)),
        full[0] if full else 0,
        max((one + behind + behind // own.depth for one, behind in pairs), default=0),
        first,
        leaves,
        input_bytes=(inputs - saved_inputs) * stream if comes else 0,
        head_bytes=stream * (1 + 2 * wide) + head if leaves else 0,
        deferred_bytes=sum(waits[part] for part in blocks),
    )


def _block_memories(
    blocks: Sequence[BlockSpec],
    kinds: Sequence[Recompute],
    found: Sequence[BlockActivations],
    saved: Sequence[int],
    away: Sequence[int],
    waits: Mapping[BlockSpec, int],
    own: ChunkWeights,
    angles: int,
    stream: int,
    how: ChunkSaving,
) -> Iterator[BlockBackwardMemory]:
    """Yields the first and the last block of each kind and mode in their backward pass.

    saved, away: bytes that each block saves, and those of them on the host.
    """
    sizes = dict(own.by_block)
    final = len(blocks) - 1
    alike = [*zip(blocks, kinds, strict=True)]
    firsts = {key: at for at, key in reversed([*enumerate(alike)])}
    lasts = {key: at for at, key in enumerate(alike)}
    keeps = how.saves_collectives
    # Backward order, from the last block to the first.
    for at in sorted({*firsts.values(), *lasts.values()}, reverse=True):
        part, kind = alike[at]
        share = sizes[part.name]
        if at == final:
            name = "last"
        elif at == 0:
            name = "first"
        else:
            name = "present"
        # Tensors of this block and the one before it on the host are fetched for their backward
        # pass.
        fetched = sum(away[max(at - 1, 0) : at + 1])
        yield BlockBackwardMemory(
            f"in the backward pass of the {name} block",
            at == 0,
            found[at].moments_of_mode(kind, keeps=keeps, last=at == final),
            found[at].deferred_moment,
            found[at].entry_bytes,
            found[at].recomputed_bytes(kind, keeps=keeps),
            angles + sum(saved[: at + 1]) - sum(away[: at + 1]) + fetched,
            max(found[at].none - saved[at], 0) + 2 * stream,
            sum(waits[one] for one in blocks[at + 1 :]),
            share.gathered_bytes,
            sizes[blocks[at - 1].name].gathered_bytes if at else own.gathered_bytes,
            share.gathered_grad_bytes,
            None if at == final else sizes[blocks[at + 1].name].gathered_grad_bytes,
            sum(sizes[one.name].grad_elements for one in blocks[at + 1 + own.is_split :]),
            sum(sizes[one.name].grad_elements for one in blocks[at + 1 :]),
        )


@lru_cache(CACHE_SIZE)
def find_head(
    model: ModelSpec, parts: tuple[BlockSpec, ...], inside: ShardingKey
) -> LMHeadCost | None:
    """Returns the LM head, if it is among these parts."""
    outside = [part for part in parts if not part.is_block]
    layers = (one for part in outside for one in build_layers(model, part, inside))
    return next((one for one in layers if isinstance(one, LMHeadCost)), None)
