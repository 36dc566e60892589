"""Weights of a rank, their optimizer states and gradients, in closed form; imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from ranvier.buckets.spec import BucketTraffic
from ranvier.config.plan import AXES
from ranvier.planner.comm_volume import CACHE_SIZE, ShardingKey, StageBlocks, stage_bucket_specs
from ranvier.planner.model_spec import ENTRY, EXIT, ModelSpec

MomentPrecision = Literal["master", "bf16", "int8"]
QUANT_BLOCK = 256
"""Elements of an 8-bit moment that share a scale."""


@dataclass(frozen=True)
class BlockStates:
    """The matrices of a block on a rank."""

    grad_elements: int = 0
    """Elements of their gradients."""
    gathered_bytes: int = 0
    """Bytes of the weights gathered over depth; 0: they are not sharded."""
    gathered_grad_bytes: int = 0
    """Bytes of their unsharded gradients, in 32 bits; 0: likewise."""

    def add_bucket(self, bulk: BucketTraffic, own: int, wide: int, depth: int) -> BlockStates:
        """A copy with one more bucket."""
        split = bulk.is_depth_sharded * depth
        count = bulk.reduced_elements * bulk.trainable
        return BlockStates(
            self.grad_elements + count,
            self.gathered_bytes + split * bulk.size * own,
            self.gathered_grad_bytes + split * count * wide,
        )


@dataclass(frozen=True)
class StageModelStates:
    """Bytes of the weights of a rank, their optimizer states and gradients."""

    weight_bytes: int
    master_bytes: int
    moment_bytes: int
    by_block: tuple[tuple[str, BlockStates], ...]
    """The matrices of each kind of block."""
    outside_elements: int
    """Trained elements outside of blocks."""
    head_elements: int
    """Elements of the head's unsharded gradient; 0: it is on another stage, or frozen."""
    embedding_elements: int
    """Elements of the embedding's unsharded gradient; 0: likewise."""
    position_elements: int
    """Elements of the unsharded gradient of learned positions; 0: likewise."""
    gathered_block_bytes: int
    """Bytes of the largest block's weights gathered over depth; 0: they are not sharded."""
    gathered_bytes: int
    """Bytes of all weights gathered over depth."""
    wide_itemsize: int
    """Bytes per element of accumulated gradients and master weights."""
    itemsize: int
    """Bytes per element of weights."""
    data_ranks: int
    """Ranks over which optimizer states are sharded."""
    local_head_elements: int
    """Elements of the head's gradient on this rank, and of the embedding's, without late ones."""
    local_embedding_elements: int
    has_tied_embeddings: bool
    pads_vocab_grads: bool
    """Whether gradients of both are copied for padding before they are scattered over depth."""
    late_grad_bytes: int = 0
    """Bytes of the unsharded gradients of tied weights, which are reduced at the end of a step."""
    shared_grad_bytes: int = 0
    """Bytes of the 32-bit gradients of weights that another stage has as well."""

    @cached_property
    def is_split(self) -> bool:
        """Whether depth shards weights, of blocks or, on a stage without any, of others."""
        return self.gathered_bytes > 0


@lru_cache(CACHE_SIZE)
def stage_model_states(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey, own: int, moments: MomentPrecision
) -> StageModelStates:
    """Weights, states and gradients of a rank of a stage. own: bytes per element of weights."""
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    data = degrees["data"]
    depth = degrees["depth"]
    wide = max(own, 4)
    # Ranks over which the rows of the vocabulary are split.
    words = degrees["row"] * (degrees["pipe"] if spot.vocab_over_pipe else 1)
    parts = Counter[str]()
    kinds = dict[str, BlockStates]()
    blocks = {part.name for part, _ in stage.block_counts if part.is_block}
    total = master = both = outside = whole = late = twice = 0
    for part, lot, count in stage_bucket_specs(model, stage, spot):
        bulk = lot.traffic
        total += count * bulk.size * own
        inside = part in blocks
        whole += count * bulk.size * own * depth if bulk.is_depth_sharded else 0
        if inside:
            kinds[part] = kinds.get(part, BlockStates()).add_bucket(bulk, own, wide, depth)
        if not bulk.trainable:
            continue
        # Optimizer states are sharded over data (ZeRO); fp32 weights are their own master copy.
        held = bulk.reduced_elements // data
        vector = lot.params[0].param_group == "vector"
        master += count * held * (wide if own < 4 else 0)
        both += count * _moment_bytes(held, moments, wide, vector=vector)
        # Gradients reduced at the end of the step wait unsharded; they are counted apart.
        waits = bulk.reduce_at_step_end and bulk.is_depth_sharded
        late += bulk.reduced_elements * wide * depth if waits else 0
        twice += bulk.reduced_elements * wide if bulk.tied_across_stages else 0
        outside += 0 if inside or waits else bulk.reduced_elements
        if lot.params[0].param_group != "vector" and not inside and not waits:
            parts[part] += bulk.reduced_elements
    head, table = (_outside_elements(model, stage, spot, kind) for kind in ("head", "embedding"))
    places = _outside_elements(model, stage, spot, "embedding", words=False)
    return StageModelStates(
        total,
        master,
        both,
        tuple(kinds.items()),
        outside,
        head,
        table,
        places,
        max((one.gathered_bytes for one in kinds.values()), default=0),
        whole,
        wide,
        own,
        data,
        parts[EXIT],
        parts[ENTRY],
        model.has_tied_embeddings,
        -(-model.units["vocab"] // words) % depth > 0,
        late,
        twice,
    )


def _moment_bytes(count: int, moments: MomentPrecision, wide: int, *, vector: bool) -> int:
    """Bytes of both moments of `count` elements."""
    if vector or moments == "master":
        return 2 * count * wide
    if moments == "bf16":
        return 2 * count * 2
    # One byte per element and an fp32 scale per block, for each of the two moments.
    return 2 * count + 8 * -(-count // QUANT_BLOCK)


def _outside_elements(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey, kind: str, *, words: bool = True
) -> int:
    """Elements of the unsharded matrix of a trained layer outside of blocks.

    words: whether to count matrices over the vocabulary or others (learned positions).
    """
    ground = spot.layout_context(model)
    found = 0
    for part, _ in stage.block_counts:
        for leaf in part.layers if not part.is_block else ():
            if leaf.kind == kind and leaf.trainable and (leaf.dims[0] == "vocab") == words:
                piece = next(iter(leaf.param_specs("", "", ground)))
                rows, width = piece.sharding.unsharded_shape
                found += rows * width
    return found
