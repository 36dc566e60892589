"""Weights of a rank, their optimizer states and gradients, in closed form; imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ranvier.buckets.matrix_owners import OWNER_AXES
from ranvier.buckets.spec import BucketSpec, BucketTraffic
from ranvier.config.plan import AXES
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.planner.comm_volume import CACHE_SIZE, ShardingKey, StageBlocks, stage_bucket_specs
from ranvier.planner.matrix_load import MatrixLoad, stage_matrix_load
from ranvier.planner.model_spec import ENTRY, EXIT, ModelSpec
from ranvier.sharding import round_up

POSITION_BYTES = 4
"""Bytes of the position of an element that a mask keeps (`buckets.sparsity`)."""
TILES_IN_FLIGHT = 4
"""Number of tiles of offloaded states with a buffer on the device
(`optim.state_store.NUM_SLOTS`).
"""


@dataclass(frozen=True)
class BlockStates:
    """The matrices of a block on a rank."""

    grad_elements: int = 0
    """Elements of their gradients."""
    shard_bytes: int = 0
    """Bytes of the weights on this rank."""
    gathered_bytes: int = 0
    """Bytes of the weights gathered over depth; 0 if they are not sharded."""
    gathered_grad_bytes: int = 0
    """Bytes of their unsharded gradients, in 32 bits; 0 if they are not sharded."""

    def add_bucket(
        self, bulk: BucketTraffic, count: int, own: int, wide: int, depth: int
    ) -> BlockStates:
        """Returns a copy with one more bucket, of which `count` elements have gradients."""
        split = bulk.is_gathered * depth
        return BlockStates(
            self.grad_elements + count,
            self.shard_bytes + bulk.size * own,
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
    """Elements of the head's unsharded gradient; 0 if it is on another stage, or frozen."""
    embedding_elements: int
    """Elements of the embedding's unsharded gradient; 0 as above."""
    position_elements: int
    """Elements of the unsharded gradient of learned positions; 0 as above."""
    gathered_block_bytes: int
    """Bytes of the largest block's weights gathered over depth; 0 if they are not sharded."""
    gathered_bytes: int
    """Bytes of all weights gathered over depth."""
    wide_itemsize: int
    """Bytes per element of accumulated gradients and master weights."""
    itemsize: int
    """Bytes per element of weights."""
    grad_replicas: float
    """Ranks over which gradients and states of matrices are sharded; a mean with experts, which
    have fewer replicas."""
    local_head_elements: int
    """Elements on this rank of the gradients of head and embedding, without late ones."""
    local_embedding_elements: int
    has_tied_embeddings: bool
    pads_vocab_grads: bool
    """Whether gradients of both are copied for padding before they are scattered over depth."""
    late_grad_bytes: int = 0
    """Bytes of the unsharded gradients of tied weights, which are reduced at the end of a step."""
    shared_grad_bytes: int = 0
    """Bytes of the 32-bit gradients of weights that another stage has as well."""
    matrix_update_bytes: int = 0
    """Bytes of the temporary tensors of an update of whole matrices."""

    @cached_property
    def is_split(self) -> bool:
        """Whether depth shards weights: of blocks or, on a stage without blocks, of other
        layers.
        """
        return self.gathered_bytes > 0


@lru_cache(CACHE_SIZE)
def stage_model_states(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    own: int,
    optimizer: OptimizerSpec,
    density: float = 1.0,
) -> StageModelStates:
    """Returns the weights, states and gradients of a rank of a stage.

    own: bytes per element of weights. density: fraction of the matrices of blocks that is trained.
    """
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    depth = spot.gather_ranks
    wide = max(own, 4)
    # Ranks over which the rows of the vocabulary are split.
    words = degrees["row"] * (degrees["pipe"] if spot.vocab_over_pipe else 1)
    parts = Counter[str]()
    kinds = dict[str, BlockStates]()
    blocks = {part.name for part, _ in stage.block_counts if part.is_block}
    total = master = both = outside = whole = late = twice = matrices = updated = 0
    for part, lot, count in stage_bucket_specs(model, stage, spot):
        bulk = lot.traffic
        inside = part in blocks
        reduced = _reduced_elements(lot, inside, density)
        total += count * (bulk.size * own + _mask_bytes(lot, inside, density, depth))
        whole += count * bulk.size * own * depth if bulk.is_gathered else 0
        if inside:
            before = kinds.get(part, BlockStates())
            kinds[part] = before.add_bucket(bulk, reduced * bulk.trainable, own, wide, depth)
        if not bulk.trainable:
            continue
        # Replicas split optimizer states (ZeRO).
        held = reduced // bulk.replica_axis.size
        first, second = _bucket_states(lot, held, optimizer, own, reduced < bulk.size)
        if lot.params[0].param_group != "vector":
            matrices += count * reduced
            updated += count * held
        master += count * first
        both += count * second
        # Gradients reduced at the end of the step stay unsharded; they are counted separately.
        waits = bulk.reduce_at_step_end and bulk.is_gathered
        late += reduced * wide * depth if waits else 0
        twice += reduced * wide if bulk.tied_across_stages else 0
        outside += 0 if inside or waits else reduced
        if lot.params[0].param_group != "vector" and not inside and not waits:
            parts[part] += reduced
    load = _matrix_load(model, stage, spot, optimizer)
    rule = optimizer.matrix_rule
    if load is not None:
        both += load.max_owner_states * wide
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
        matrices / max(updated, 1),
        parts[EXIT],
        parts[ENTRY],
        model.has_tied_embeddings,
        -(-model.units["vocab"] // words) % depth > 0,
        late,
        twice,
        load.update_elements * rule.itemsize if rule is not None and load is not None else 0,
    )


def _matrix_load(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey, optimizer: OptimizerSpec
) -> MatrixLoad | None:
    """Returns the load of the owners of matrices; None if the optimizer needs no owners."""
    if optimizer.matrix_rule is None:
        return None
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    num_ranks = math.prod(degrees[axis] for axis in OWNER_AXES)
    return stage_matrix_load(model, stage, num_ranks, optimizer.matrix_rule)


def _reduced_elements(lot: BucketSpec, inside: bool, density: float) -> int:
    """Returns the elements of a bucket that are reduced and updated: a multiple of its replica
    axis.
    """
    bulk = lot.traffic
    if density == 1.0 or not _is_pruned(lot, inside):
        return bulk.reduced_elements
    return round_up(round(bulk.size * density), bulk.replica_axis.size)


def _is_pruned(lot: BucketSpec, inside: bool) -> bool:
    """Returns whether a bucket has masks in a pruned run: matrices of blocks do."""
    return inside and lot.params[0].param_group == "matrix" and lot.traffic.trainable


def _mask_bytes(lot: BucketSpec, inside: bool, density: float, depth: int) -> int:
    """Returns the bytes of the masks of a bucket: bits, or positions if these are smaller."""
    if density == 1.0 or not _is_pruned(lot, inside):
        return 0
    whole = lot.traffic.size * (depth if lot.traffic.is_gathered else 1)
    return min(-(-whole // 8), round(whole * density) * POSITION_BYTES)


def _bucket_states(
    lot: BucketSpec, count: int, optimizer: OptimizerSpec, own: int, pruned: bool
) -> tuple[int, int]:
    """Returns the bytes of master weights and moments of `count` elements of a bucket."""
    wide = max(own, 4)
    # 32-bit weights are their own master copy, unless they are pruned.
    if own < 4 or pruned:
        master = count * wide
    else:
        master = 0
    moments = optimizer.moment_bytes(
        count, wide, group=lot.params[0].param_group, is_hidden_matrix=lot.has_matrices
    )
    return master, moments


@dataclass(frozen=True)
class ModelStateSizes:
    """Bytes of a rank by whether they may be offloaded to the host.

    A bucket of vectors is too small for offloading to pay off, so it stays on the device, and so do
    weights that several layers share. All others may be offloaded.
    """

    weight_bytes: int
    """All working weights."""
    resident_weights: int
    """Weights that stay on the device."""
    master: int
    """Master weights of trained 16-bit weights."""
    moments: int
    resident_states: int
    """Part of master weights and moments that stays on the device: that of vectors, and states
    that only the owner of a matrix has."""
    state_ring: int
    """Buffers on the device for tiles of offloaded states."""
    offload_ring: int
    """The same if weights are offloaded as well, whose gradients and values use the buffers too."""
    host_gradients: int
    """Gradients of weights that may be offloaded, once they are on the host."""
    trained_elements: int
    """Elements that this rank updates."""

    @property
    def state_bytes(self) -> int:
        """All master weights and moments."""
        return self.master + self.moments

    @property
    def host_weights(self) -> int:
        """Weights that may be offloaded."""
        return self.weight_bytes - self.resident_weights


@lru_cache(CACHE_SIZE)
def model_state_sizes(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    own: int,
    optimizer: OptimizerSpec,
    density: float = 1.0,
    tile: int = 2**24,
) -> ModelStateSizes:
    """Returns the sizes of a rank of a stage, as in `stage_model_states`. tile:
    `memory.offload_tile`.
    """
    wide = max(own, 4)
    every = stage_model_states(model, stage, spot, own, optimizer, density)
    blocks = {part.name for part, _ in stage.block_counts if part.is_block}
    away = gradients = vectors = trained = 0
    rings = [0], [0]
    load = _matrix_load(model, stage, spot, optimizer)
    for part, lot, count in stage_bucket_specs(model, stage, spot):
        bulk = lot.traffic
        inside = part in blocks
        reduced = _reduced_elements(lot, inside, density)
        vector = lot.params[0].param_group == "vector"
        movable = not vector and not bulk.reduce_at_step_end
        away += count * bulk.size * own * movable
        if not bulk.trainable:
            continue
        held = reduced // bulk.replica_axis.size
        trained += count * held
        gradients += count * reduced * wide * movable
        states = sum(_bucket_states(lot, held, optimizer, own, reduced < bulk.size))
        vectors += count * states * vector
        if held and not vector:
            share = min(tile, held) / held
            rings[0].append(round(share * states))
            rings[1].append(round(share * (states + held * (wide + own))))
    return ModelStateSizes(
        every.weight_bytes,
        every.weight_bytes - away,
        every.master_bytes,
        every.moment_bytes,
        vectors + (load.max_owner_states * wide if load is not None else 0),
        TILES_IN_FLIGHT * max(rings[0]),
        TILES_IN_FLIGHT * max(rings[1]),
        gradients,
        trained,
    )


def _outside_elements(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey, kind: str, *, words: bool = True
) -> int:
    """Returns the elements of the unsharded matrix of a trained layer outside of blocks.

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
